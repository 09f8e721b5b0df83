"""A job that is killed at any step, and started again by `tf-dgc-run --restarts`."""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from typing import Any

import launch
import pytest

SCRIPT = str(launch.ROOT / "tests" / "jobs" / "restarted.py")
FREQ, STEPS = 50, 300


@pytest.mark.processes
@pytest.mark.timeout(1800)
class RestartsTest(unittest.TestCase):
    def run_job(
        self, *kills: int, chosen: Sequence[str] = ("dgc", "--sparsity", "0.9")
    ) -> tuple[list[dict[str, Any]], int]:
        """Return what the workers tell at the end, and the steps that were taken."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        own = ["-n", "2", "--restarts", str(len(kills)), "--pause", "0"]
        own += ["--strategy", *chosen]
        done = subprocess.run(
            [sys.executable, "-m", "tf_dgc.run", *own, SCRIPT, folder, str(FREQ)]
            + [str(step) for step in kills],
            env=launch.worker_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        found = launch.results(done)
        self.assertEqual([each["attempt"] for each in found], [len(kills)] * 2)
        steps = pathlib.Path(folder, "steps-1").read_text().splitlines()
        return found, len(steps)

    def assert_same(self, kills: Sequence[int], **options: Any) -> None:
        expected, steps = self.run_job(**options)
        self.assertEqual(steps, STEPS)
        found, steps = self.run_job(*kills, **options)
        for one, two in zip(found, expected, strict=True):
            self.assertEqual((one["crc"], one["logs"]), (two["crc"], two["logs"]))
        # A backup that is being written when the kill comes does not count.
        self.assertLessEqual(steps, STEPS + 2 * FREQ * len(kills))

    @pytest.mark.slow
    def test_a_killed_job_ends_as_one_that_was_not(self) -> None:
        self.assert_same([130, -2])

    @pytest.mark.slow
    def test_so_does_one_that_is_killed_at_any_moment(self) -> None:
        draw = random.Random(31)
        for _ in range(3):
            kills = [draw.choice([-1, -2, 40, 60]) for _ in range(4)]
            self.assert_same(sorted(kills, reverse=True))  # the end of `fit` is last

    @pytest.mark.slow
    def test_so_does_one_that_averages_its_parameters(self) -> None:
        outer = {"class_name": "SGD", "config": {"learning_rate": 0.7, "momentum": 0.5}}
        config = {"period": 7, "outer_optimizer": outer}
        for compression in ({}, {"compression": {"sparsity": 0.9, "min_elements": 1}}):
            with self.subTest(**compression), tempfile.NamedTemporaryFile("w") as file:
                json.dump(config | compression, file)
                file.flush()
                chosen = "averaging", "--config", file.name
                self.assert_same([70, 130], chosen=chosen)

    @pytest.mark.slow
    def test_killed_at_twenty_random_steps(self) -> None:
        draw = random.Random(29)  # at most five after a backup, and so none is left
        self.assert_same([draw.randrange(10, 70) for _ in range(20)])


if __name__ == "__main__":
    unittest.main()
