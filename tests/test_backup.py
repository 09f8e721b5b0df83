"""A job that is killed and started again ends as one that was never killed."""

import tempfile
import unittest
from typing import Any

import launch
import pytest
from absl.testing import parameterized

SCRIPT = str(launch.ROOT / "tests" / "backup.py")


@pytest.mark.processes
class BackupTest(parameterized.TestCase, unittest.TestCase):
    @parameterized.parameters(
        ("collective", 1, 10), ("hybrid", 0, 7), ("collective", 0, 14, "--averaging")
    )
    def test_sigkill_at_any_step_changes_nothing(
        self, launcher: str, rank: int, step: int, *strategy: str
    ) -> None:
        if launcher != "collective":
            launch.skip_without_horovod()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        options: dict[str, Any] = {"launcher": launcher, "timeout": 200}
        expected = launch.results(launch.run(SCRIPT, folder, *strategy, **options))
        die = "--kill-rank", str(rank), "--kill-step", str(step)
        killed = launch.run(SCRIPT, folder, *strategy, *die, **options)
        self.assertNotEqual(killed.returncode, 0)
        found = launch.results(launch.run(SCRIPT, folder, *strategy, **options))
        for one, two in zip(expected, found, strict=True):
            self.assertEqual(one["crc"], two["crc"])
            self.assertEqual(two["epochs"], list(range(step // 4, 5)))
            self.assertGreater(two["kept"][0], 0.0)
            self.assertEqual(two["kept"][1], 0.0)
            self.assertEqual(two["flushed"], expected[0]["flushed"])

    def test_on_more_workers_it_continues_from_a_disk_that_they_share(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        die = "--kill-rank", "1", "--kill-step", "10"
        killed = launch.run(SCRIPT, folder, "--shared", *die, timeout=200)
        self.assertNotEqual(killed.returncode, 0)
        found = launch.results(
            launch.run(SCRIPT, folder, "--shared", workers=3, timeout=200)
        )
        self.assertEqual([each["epochs"] for each in found], [[2, 3, 4]] * 3)
        self.assertEqual(len({each["flushed"] for each in found}), 1)


if __name__ == "__main__":
    unittest.main()
