"""A job that is killed and started again ends as one that was never killed."""

import tempfile
import unittest
from collections.abc import Sequence
from typing import Any

import launch
import pool
import pytest
from absl.testing import parameterized

SCRIPT = str(launch.ROOT / "tests" / "jobs" / "backup.py")


@pytest.mark.processes
class BackupTest(parameterized.TestCase, unittest.TestCase):
    @pytest.mark.slow
    def test_sigkill_changes_nothing(self) -> None:
        self._check("hybrid", 0, 7)

    @parameterized.parameters(
        ("collective", 1, 10),
        ("collective", 0, 14, "averaging"),
        ("collective", 1, 14, "averaging"),
    )
    @pytest.mark.slow
    def test_sigkill_at_other_steps_changes_nothing(
        self, launcher: str, rank: int, step: int, *options: str
    ) -> None:
        self._check(launcher, rank, step, *options)

    def _check(self, launcher: str, rank: int, step: int, *options: str) -> None:
        if launcher != "collective":
            launch.skip_without_horovod()
        whole, folder = (
            self.enterContext(tempfile.TemporaryDirectory()) for _ in range(2)
        )
        arguments: dict[str, Any] = {"folder": folder} | dict.fromkeys(options, True)
        expected = pool.run(
            launcher, 2, "backup", "run", **arguments | {"folder": whole}
        )
        self._killed(folder, launcher, rank, step, options)
        found = pool.run(launcher, 2, "backup", "run", **arguments)
        for one, two in zip(expected, found, strict=True):
            self.assertEqual(one["crc"], two["crc"])
            self.assertEqual(one["epochs"], list(range(5)))
            self.assertEqual(two["epochs"], list(range(step // 4, 5)))
            self.assertGreater(two["kept"][0], 0.0)
            self.assertEqual(two["kept"][1], 0.0)
            self.assertEqual(two["flushed"], expected[0]["flushed"])

    @pytest.mark.slow
    def test_on_more_workers_it_continues_from_a_disk_that_they_share(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self._killed(folder, "collective", 1, 10, ["shared"])
        arguments: dict[str, Any] = {"folder": folder, "shared": True}
        found = pool.run("collective", 3, "backup", "run", **arguments)
        self.assertEqual([each["epochs"] for each in found], [[2, 3, 4]] * 3)
        self.assertEqual(len({each["flushed"] for each in found}), 1)

    def _killed(
        self, folder: str, launcher: str, rank: int, step: int, options: Sequence[str]
    ) -> None:
        """Train on workers of their own until one of them is killed."""
        die = "--kill-rank", str(rank), "--kill-step", str(step)
        own = [f"--{option}" for option in options]
        done = launch.run(SCRIPT, folder, *own, *die, launcher=launcher, timeout=200)
        self.assertNotEqual(done.returncode, 0)


if __name__ == "__main__":
    unittest.main()
