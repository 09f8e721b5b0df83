"""A script that runs in a fork is, to whom starts it, the process that was started."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Any

import forks
import launch
import pytest

SCRIPT = pathlib.Path(__file__).parent / "forked.py"


@pytest.mark.processes
class ForksTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if forks.VARIABLE not in launch.worker_environment():
            raise unittest.SkipTest("forks are for Linux")

    def start(self, what: str, **environment: str) -> "subprocess.Popen[str]":
        folder = self.enterContext(tempfile.TemporaryDirectory())
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), what],
            cwd=folder,
            env=launch.worker_environment() | {"OWN": what} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def told(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        found: dict[str, Any] = json.loads(process.stdout.readline())
        return found

    def test_it_has_arguments_environment_and_folder(self) -> None:
        process = self.start("0")
        told = self.told(process)
        self.assertEqual(launch.finish(process), (0, "", ""))
        self.assertTrue(told["fork"])
        self.assertNotEqual(told["pid"], process.pid)
        self.assertEqual((told["own"], told["name"]), ("0", "__main__"))
        self.assertNotEqual(told["folder"], os.getcwd())

    def test_it_ends_as_the_script_ends(self) -> None:
        status, _, _ = launch.finish(self.start("7"))
        self.assertEqual(status, 7)
        status, _, error = launch.finish(self.start("raises"))
        self.assertEqual(status, 1)
        self.assertIn("ValueError: as it should", error)

    def test_signals_reach_the_script(self) -> None:
        process = self.start("waits")
        self.told(process)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(launch.finish(process)[0], -signal.SIGTERM)

    def test_a_script_that_stops_itself_goes_on_when_it_is_told_to(self) -> None:
        process = self.start("stops")
        pid = self.told(process)["pid"]
        state = pathlib.Path(f"/proc/{pid}/stat")
        while state.read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.02)
        process.send_signal(signal.SIGCONT)
        self.assertEqual(launch.finish(process), (0, "", ""))

    def test_the_script_ends_when_the_process_is_killed(self) -> None:
        process = self.start("waits")
        pid = self.told(process)["pid"]
        process.kill()
        self.assertEqual(launch.finish(process)[0], -signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            for _ in range(600):
                os.kill(pid, 0)
                time.sleep(0.1)
            self.fail(f"{pid} goes on")

    def test_without_a_server_the_script_runs_as_ever(self) -> None:
        nobody = os.readlink("/proc/self/ns/net") + " /no/such/socket"
        process = self.start("3", **{forks.VARIABLE: nobody})
        self.assertFalse(self.told(process)["fork"])
        self.assertEqual(launch.finish(process)[0], 3)


if __name__ == "__main__":
    unittest.main()
