"""Tests of scripts/churn.py: its figures of logs made up, and one short run."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import churn
import launch
import pytest

SCRIPT = launch.ROOT / "scripts" / "churn.py"


class FiguresTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "result.json").write_text('{"loss": 1.5, "sent_per_step": 8}')

    def found(self, **logs: str) -> dict:
        for name, text in logs.items():
            (self.folder / f"{name.replace('_', '-')}.steps").write_text(text)
        args = argparse.Namespace(folder=self.folder, pace=0.5, local_steps=2, steps=4)
        return churn.figures(args)

    def test_waits_are_of_all_workers_behind_their_first_rounds(self) -> None:
        # The second step of each ends late, as it builds the first round.
        first = "0.0\n9.0\n9.5\n11.0\n"
        found = self.found(**{"0_7": first, "1_8": "3.0\n9.0\n13.0\n13.5\n"})
        self.assertEqual(found["wait"], 3.5)
        self.assertEqual(found["seconds"], 11.0)
        self.assertEqual(found["workers"], 2)
        self.assertEqual(found["together"], 2.0)

    def test_a_line_that_a_kill_cut_off_is_left_out(self) -> None:
        found = self.found(**{"0_7": "0.0\n1.0\n1.5\n", "1_8": "2.0\n2.5\n17"})
        self.assertEqual(found["wait"], 0.0)

    def test_who_restarts_goes_on_with_the_time_of_worker_0(self) -> None:
        found = self.found(**{"0_7": "1.0\n2.0\n", "0_9": "30.0\n31.0\n"})
        self.assertEqual(found["seconds"], 30.0)


@pytest.mark.processes
@pytest.mark.slow
class RunTest(unittest.TestCase):
    def test_workers_are_killed_and_others_join(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "text").write_text("to be or not to be, " * 6000)
        words = ["--rows", "churn", "--kills", "2", "--steps", "320"]
        words += ["--data", str(folder / "text"), "--json", str(folder / "found.json")]
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words],
            env=launch.worker_environment(),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        (row,) = json.loads((folder / "found.json").read_text())
        self.assertGreaterEqual(row["workers"], 4)
        self.assertGreaterEqual(row["kills"], 1)
        self.assertLess(row["loss"], 3.0)


if __name__ == "__main__":
    unittest.main()
