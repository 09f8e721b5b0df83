"""Searches for hyperparameters on real workers: all train a trial, or groups do."""

import pathlib
import subprocess
import sys
import tempfile
import unittest
from typing import Any

import launch
import pytest

ROOT = pathlib.Path(__file__).parent
TUNER = "the extra `search` brings it"


def search(folder: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `tf-dgc-run` with options, then `search.py` with the words behind `--`."""
    end = words.index("--")
    script = str(ROOT / "search.py"), folder, *words[end + 1 :]
    return subprocess.run(
        [sys.executable, "-m", "tf_dgc.run", *words[:end], *script],
        env=launch.worker_environment() | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def of_oracle(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Return what the process of the oracle has printed."""
    renamed = done.stdout.replace("[oracle]", "[0]")
    if done.returncode:
        raise AssertionError(f"{done.returncode}\n{renamed}\n{done.stderr[-4000:]}")
    return launch.by_rank(renamed)[0]


@pytest.mark.processes
class TunerTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        pytest.importorskip("keras_tuner", reason=TUNER)
        pytest.importorskip("tensorboard", reason=TUNER)
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def assert_all_completed(self, found: dict[str, Any], count: int) -> None:
        statuses = [status for status, _, _ in found["trials"].values()]
        self.assertEqual(statuses, ["COMPLETED"] * count)
        self.assertEqual(found["best"], found["reloaded"])
        self.assertEqual(found["trials again"], sorted(found["trials"]))

    @pytest.mark.slow
    def test_an_unchanged_script_trains_each_trial_on_all_workers(self) -> None:
        done = search(self.folder, "-n", "2", "--strategy", "dgc", "--", "Hyperband")
        one, two = launch.results(done)
        self.assertEqual(one, two)
        self.assertGreater(len(one["trials"]), 3)
        self.assert_all_completed(one, len(one["trials"]))
        values = [values for _, _, values in one["trials"].values()]
        self.assertTrue(any("tuner/trial_id" in each for each in values))  # went on
        there = {path.name for path in pathlib.Path(self.folder, "search").iterdir()}
        names = {"oracle.json", "tuner0.json"} | {f"trial_{k}" for k in one["trials"]}
        self.assertEqual(there, names)

    @pytest.mark.slow
    def test_a_trial_that_fails_on_one_worker_has_failed_on_all(self) -> None:
        options = "-n", "2", "--strategy", "dense"
        done = search(self.folder, *options, "--", "RandomSearch", "--fail")
        one, two = launch.results(done)
        self.assertEqual(one, two)
        statuses = [status for status, _, _ in one["trials"].values()]
        self.assertEqual(statuses, ["COMPLETED", "FAILED", "COMPLETED"])
        self.assertIn("Worker 1: ValueError: worker 1 alone", one["messages"][0])

    @pytest.mark.slow
    def test_groups_train_trials_at_once_and_a_killed_one_gives_its_trial_back(
        self,
    ) -> None:
        options = "-n", "4", "--trials", "2", "--strategy", "dgc", "--restarts", "1"
        done = search(self.folder, *options, "--", "RandomSearch", "--kill")
        found = of_oracle(done)
        self.assert_all_completed(found, 3)
        self.assertIn(
            "worker 3 of group 1 ended with status 137; starting", done.stderr
        )
        self.assertRegex(done.stderr, r"Group 1 has ended during trial \d, which")
        self.assertNotIn("[1.0] {", done.stdout)  # groups end with the search

    @pytest.mark.slow
    def test_groups_of_one_worker_need_no_strategy(self) -> None:
        done = search(self.folder, "-n", "2", "--trials", "2", "--", "Hyperband")
        found = of_oracle(done)
        self.assert_all_completed(found, len(found["trials"]))
        values = [values for _, _, values in found["trials"].values()]
        self.assertTrue(any("tuner/trial_id" in each for each in values))


@pytest.mark.processes
class StudyTest(unittest.TestCase):
    @pytest.mark.extended
    def test_all_workers_get_what_the_chief_has_decided(self) -> None:
        pytest.importorskip("optuna", reason=TUNER)
        path = str(ROOT / "studies.py")
        one, two = launch.results(launch.run(path, timeout=200))
        self.assertEqual((one.pop("rank"), two.pop("rank")), (0, 1))
        self.assertEqual(one, two)
        self.assertEqual(len(set(one["asked"])), 2)
        self.assertIn(one["best"][0]["rate"], one["asked"])
        self.assertEqual(one["states"], ["COMPLETE", "PRUNED", "COMPLETE"])
        self.assertEqual([number for number, _, _ in one["trials"]], [0, 1, 2])
        self.assertIn("No trials are completed", one["refused"])


if __name__ == "__main__":
    unittest.main()
