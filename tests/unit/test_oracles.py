"""Tests of the search for hyperparameters, with oracles that are simple."""

import contextlib
import io
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
from typing import Any
from unittest import mock

import pytest

from tf_dgc import imported
from tf_dgc.search import groups, oracles


class Trial:
    """A trial as KerasTuner has it, as far as it is looked at."""

    def __init__(self, trial_id: str, status: str = "RUNNING") -> None:
        self.trial_id, self.status, self.message = trial_id, status, None

    def get_state(self) -> dict[str, Any]:
        return dict(vars(self))


class Oracle:
    """An oracle of so many trials."""

    def __init__(self, trials: int) -> None:
        self.max_trials = trials
        self.trials: dict[str, Trial] = {}
        self.ongoing_trials: dict[str, Trial] = {}
        self.ended: list[tuple[str, str]] = []

    def create_trial(self, tuner_id: str) -> Trial:
        if tuner_id in self.ongoing_trials:
            return self.ongoing_trials[tuner_id]
        if len(self.trials) == self.max_trials:
            return Trial("", "STOPPED")
        trial = Trial(str(len(self.trials)))
        self.trials[trial.trial_id] = self.ongoing_trials[tuner_id] = trial
        return trial

    def update_trial(self, trial_id: str) -> Trial:
        return self.trials[trial_id]

    def end_trial(self, trial: Trial) -> None:
        self.ended.append((trial.trial_id, trial.status))
        for name, ongoing in self.ongoing_trials.items():
            if ongoing.trial_id == trial.trial_id:
                del self.ongoing_trials[name]
                break
        if [status for _, status in self.ended[-3:]] == ["FAILED"] * 3:
            raise RuntimeError("too many failures")

    def get_state(self) -> dict[str, Any]:
        return {"trials": len(self.trials)}


class HallTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.object(groups, "_IDLE_SECONDS", 0.05))
        self.enterContext(mock.patch.object(groups, "_LOOK_SECONDS", 0.02))
        of_state = lambda state: Trial(state["trial_id"], state["status"])  # noqa: E731
        self.enterContext(mock.patch.object(oracles, "trial_of", of_state))
        self.err = self.enterContext(contextlib.redirect_stderr(io.StringIO()))

    def hall(self, trials: int, count: int = 2) -> groups.Hall:
        self.oracle = Oracle(trials)
        tuner = types.SimpleNamespace(oracle=self.oracle)
        return groups.Hall(oracles.Book(tuner), count)

    def ask(self, hall: groups.Hall, group: int, name: str) -> tuple[str, str]:
        outcome = hall.call(group, name, "create_trial", {}, 0)
        return outcome["trial"]["trial_id"], outcome["trial"]["status"]

    def end(self, hall: groups.Hall, group: int, name: str, trial: str) -> None:
        state = {"trial_id": trial, "status": "COMPLETED"}
        hall.call(group, name, "end_trial", {"trial": state}, 0)

    def test_each_group_gets_another_trial(self) -> None:
        hall = self.hall(2)
        names = [hall.come(0), hall.come(1)]
        found = [self.ask(hall, group, names[group]) for group in range(2)]
        self.assertEqual(found, [("0", "RUNNING"), ("1", "RUNNING")])

    def test_a_group_waits_for_others_whose_trial_may_come_back(self) -> None:
        hall = self.hall(2)
        one, two = hall.come(0), hall.come(1)
        self.ask(hall, 0, one), self.ask(hall, 1, two)
        self.end(hall, 0, one, "0")
        self.assertEqual(self.ask(hall, 0, one)[1], "IDLE")
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            hall.leave(1, two)
        self.assertIn("Group 1 has ended during trial 1, which another", logs.output[0])
        self.assertEqual(self.ask(hall, 0, one), ("1", "RUNNING"))
        self.end(hall, 0, one, "1")
        self.assertEqual(self.ask(hall, 0, one)[1], "STOPPED")

    def test_a_trial_that_has_ended_three_groups_has_failed(self) -> None:
        hall = self.hall(1)
        for _ in range(groups.RUNS):
            name = hall.come(0)
            self.assertEqual(self.ask(hall, 0, name), ("0", "RUNNING"))
            with self.assertLogs("tf_dgc", "WARNING"):
                hall.leave(0, name)
        self.assertEqual(self.oracle.ended, [("0", "FAILED")])
        self.assertEqual(self.ask(hall, 0, hall.come(0))[1], "STOPPED")

    def test_a_group_that_comes_again_has_ended_before(self) -> None:
        hall = self.hall(1)
        first = hall.come(0)
        self.ask(hall, 0, first)
        with self.assertLogs("tf_dgc", "WARNING"):
            again = hall.come(0)
        hall.leave(0, first)  # heard of late
        self.assertEqual(self.ask(hall, 0, again), ("0", "RUNNING"))

    def test_the_search_ends_when_the_groups_have_left(self) -> None:
        hall = self.hall(0, 1)
        name = hall.come(0)
        served = threading.Thread(target=hall.serve)
        served.start()
        self.assertEqual(self.ask(hall, 0, name)[1], "STOPPED")
        hall.leave(0, name)
        served.join(10)
        self.assertFalse(served.is_alive())

    def test_where_no_group_comes_they_are_named(self) -> None:
        hall = self.hall(1)
        hall.leave(1, hall.come(1))
        with (
            mock.patch.dict(os.environ, TF_DGC_TIMEOUT="0.2"),
            self.assertRaisesRegex(
                TimeoutError, "groups 0 have never come; groups 1 have ended"
            ),
        ):
            hall.serve()

    def test_where_the_oracle_gives_up_the_search_ends(self) -> None:
        hall = self.hall(9)
        with self.assertLogs("tf_dgc", "WARNING"):
            for _ in range(3 * groups.RUNS):
                name = hall.come(0)
                self.ask(hall, 0, name)
                hall.leave(0, name)
        with self.assertRaisesRegex(RuntimeError, "too many failures"):
            hall.serve()

    def test_it_is_said_which_group_waits_for_whom(self) -> None:
        hall = self.hall(1)
        one, two = hall.come(0), hall.come(1)
        self.ask(hall, 0, one), self.ask(hall, 1, two)
        said = []
        waiting = mock.Mock(say=said.append)
        hall._say(waiting)
        self.assertEqual(said, ["group 1 waits for group 0 (trial 0)"])
        hall = self.hall(1)
        hall._say(waiting)
        self.assertEqual(said[1:], ["waiting for groups 0, 1"])


class ServiceTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.place = groups.GroupPlace(address, 0, 1)
        self.enterContext(mock.patch.dict(os.environ, TF_DGC_LAUNCH="secret"))
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        tuner = types.SimpleNamespace(
            oracle=Oracle(2), get_trial_dir=lambda each: str(self.folder / each)
        )
        self.service = groups.Service(self.place)
        self.addCleanup(self.service.close)
        self.hall = self.service.add(oracles.Book(tuner))

    def client(self) -> groups.Client:
        client = groups.Client(self.place, 0)
        self.addCleanup(client.close)
        return client

    def test_files_of_a_trial_go_to_the_oracle_and_back(self) -> None:
        client = self.client()
        outcome = client.call("create_trial", {"tuner_id": "tuner0"}, 0)
        self.assertEqual(outcome["trial"]["trial_id"], "0")
        files = {"weights.h5": os.urandom(3_000_000), "more/config.json": b"{}"}
        client.put("0", files)
        self.assertEqual(client.files("0"), files)
        written = (self.folder / "0/more/config.json").read_bytes()
        self.assertEqual(written, b"{}")

    def test_nothing_is_written_beside_the_folder_of_a_trial(self) -> None:
        client = self.client()
        client.call("create_trial", {"tuner_id": "tuner0"}, 0)
        with self.assertRaisesRegex(ConnectionError, "has ended"):
            client.put("0", {"../elsewhere": b""})
        self.assertFalse((self.folder / "elsewhere").exists())
        with self.assertRaisesRegex(ConnectionError, "has ended"):
            self.client().files("../../etc")

    def test_who_does_not_know_the_job_is_not_answered(self) -> None:
        with mock.patch.dict(os.environ, TF_DGC_LAUNCH="guessed"):
            client = self.client()
        with self.assertRaisesRegex(ConnectionError, "has ended"):
            client.call("look", {}, 0)

    def test_an_oracle_that_does_not_come_is_named(self) -> None:
        with (
            mock.patch.dict(os.environ, TF_DGC_TIMEOUT="0.3"),
            self.assertRaisesRegex(TimeoutError, "127.0.0.1:9, has not come within"),
        ):
            groups.Client(groups.GroupPlace("127.0.0.1:9", 0, 1), 0)

    def test_a_connection_that_ends_is_a_group_that_has_ended(self) -> None:
        client = self.client()
        client.call("create_trial", {"tuner_id": "tuner0"}, 0)
        with self.assertLogs("tf_dgc", "WARNING"):
            client.close()
            until = time.monotonic() + 10
            while self.hall._here and time.monotonic() < until:
                time.sleep(0.02)
        self.assertEqual(len(self.hall._given_back), 1)


class FolderTest(unittest.TestCase):
    def test_what_is_read_is_written_alike_without_the_trial_itself(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        files = {"a.json": b"1", "b/c.h5": b"\x00\x01"}
        oracles.write_folder(folder, files)
        (pathlib.Path(folder) / "trial.json").write_text("{}")
        self.assertEqual(oracles.read_folder(folder), files)


class ImportedTest(unittest.TestCase):
    def test_a_module_is_prepared_when_it_is_imported_and_once(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        name = "tf_dgc_imported_for_a_test"
        (pathlib.Path(folder) / f"{name}.py").write_text("ran = True\n")
        seen: list[Any] = []
        self.enterContext(mock.patch.object(sys, "path", [folder, *sys.path]))
        self.addCleanup(sys.modules.pop, name, None)
        for _ in range(2):
            imported.when_imported(name, seen.append)
        self.assertEqual(seen, [])
        module = __import__(name)
        self.assertEqual(seen, [module])
        self.assertTrue(module.ran)
        self.assertEqual(module.__spec__.loader, module.__loader__)
        other: list[Any] = []
        imported.when_imported(name, other.append)
        self.assertEqual(other, [module])


@pytest.mark.processes
class ScriptTest(unittest.TestCase):
    def test_a_script_without_tuners_starts_without_tensorflow(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        script = folder / "search.py"
        script.write_text("import json, sys; print(json.dumps(sorted(sys.modules)))")
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tf_dgc.launcher.script", "-", str(script)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        self.assertNotIn("tensorflow", json.loads(done.stdout))


if __name__ == "__main__":
    unittest.main()
