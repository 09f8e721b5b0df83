"""Tests of `tf-dgc-run` where things fail: disks, hosts, scripts, children, itself."""

import os
import pathlib
import signal
import subprocess
import sys
import unittest

import pytest
from launch import ROOT, finish
from test_run import Launched, all_end

# What a worker may leave, in its own session and in others; prints their numbers.
CHILDREN = """
import subprocess
nap = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
own = {"env": {**os.environ, "X": "1"}, "start_new_session": True}
children = [subprocess.Popen(nap), subprocess.Popen(nap, **own)]
print("ready", *[child.pid for child in children], os.getpid(), flush=True)
"""
# Stands for ssh; hosts are this machine. One is away where its name is a file.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
if [ -e "$0.$1" ]; then echo "No route to host" >&2; exit 255; fi
exec sh -c "$2"
"""


def numbers(line: str) -> list[int]:
    return [int(word) for word in line.split() if word.isdecimal()]


class OutputTest(Launched):
    def run_shell(self, rest: str, *arguments: str) -> tuple[int, str]:
        """Run with redirections of a shell; return status and what is on its stderr."""
        command = [sys.executable, "-m", "tf_dgc.run", *arguments]
        done = subprocess.run(
            ["sh", "-c", f'"$@" {rest}', "sh", *command],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stderr.decode()

    @pytest.mark.long
    def test_output_that_cannot_be_written_stops_nothing(self) -> None:
        script = self.script("""
            for _ in range(4000):
                print("x" * 99)
            open("end", "w").close()
            print("all printed", file=sys.stderr)
            """)
        for rest, told in (
            (">/dev/full", "stdout cannot be written: No space left on device"),
            (">&-", ""),
            ("<&- >&-", ""),
            ("| head -1 >/dev/null", "stdout cannot be written: Broken pipe"),
            (">/dev/full 2>/dev/full", ""),
            (">&- 2>&-", ""),
        ):
            with self.subTest(rest):
                (self.folder / "end").unlink(missing_ok=True)
                status, err = self.run_shell(rest, "-n", "1", script)
                self.assertEqual(status, 0, err)
                self.assertIn(told, err)
                self.assertEqual("all printed" in err, "2>" not in rest, err)
                self.assertTrue((self.folder / "end").exists())

    def test_a_long_line(self) -> None:
        script = self.script("print('.' * 5_000_000)")
        status, out, err = self.run_to_end("-n", "1", script)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(sum(line.count(".") for line in out), 5_000_000)
        self.assertEqual({line[:5] for line in out}, {"[0] ."})


class EndTest(Launched):
    def test_children_end_with_the_job_whatever_their_session(self) -> None:
        status, (line,), _ = self.run_to_end("-n", "1", self.script(CHILDREN))
        self.assertEqual(status, 0)
        self.assertTrue(all_end(numbers(line), 5))

    @pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
    def test_children_end_when_the_launcher_is_killed(self) -> None:
        script = self.script(CHILDREN + "time.sleep(120)")
        process = self.start("-n", "2", script)
        pids = [pid for _ in range(2) for pid in numbers(process.stdout.readline())]
        self.assertEqual(len(pids), 6)
        process.kill()
        finish(process)
        self.assertTrue(all_end(pids))

    def test_a_launcher_in_a_worker_ends_with_it(self) -> None:
        inner = self.script(CHILDREN + "time.sleep(120)", "inner.py")
        code = f"""
            import subprocess
            subprocess.Popen(
                [sys.executable, "-m", "tf_dgc.run", "-n", "1", {inner!r}],
                start_new_session=True,
            )
            time.sleep(120)
            """
        process = self.start("-n", "1", self.script(code))
        pids = numbers(process.stdout.readline())
        self.assertEqual(len(pids), 3)
        process.terminate()
        finish(process)
        self.assertTrue(all_end(pids))

    def test_exit_codes_are_known_where_children_are_ignored(self) -> None:
        code = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "tf_dgc.run", *sys.argv[1:]])
"""
        command = [sys.executable, "-c", code, "-n", "1", self.script("sys.exit(7)")]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=60, check=False
        )
        self.assertEqual(done.returncode, 7)


class StartTest(Launched):
    @pytest.mark.long
    def test_what_is_not_there_is_not_started_again(self) -> None:
        (self.folder / "closed.py").touch(0o000)
        (self.folder / "no_program").touch(0o600)
        cases = [
            (["none.py"], "none.py: there is no such file"),
            (["-m", "no_such_module.part"], "there is no such module"),
            (["--no-python", "./no_program"], "Permission denied"),
            (["--strategy", "dense", "none.py"], "none.py: there is no such file"),
        ]
        if os.geteuid():
            cases.append((["closed.py"], "closed.py: it cannot be read"))
        for arguments, message in cases:
            with self.subTest(arguments=arguments):
                given = ["-n", "2", "--restarts", "3", *arguments]
                status, _, err = self.run_to_end(*given)
                self.assertEqual(status, 127)
                self.assertIn(message, err)
                self.assertNotIn("starting again", err)


class HostsTest(Launched):
    def setUp(self) -> None:
        super().setUp()
        self.ssh = self.folder / "ssh"
        self.ssh.write_text(SSH)
        self.ssh.chmod(0o700)

    def on_hosts(self, *arguments: str) -> list[str]:
        hosts = ["--hosts", "127.0.0.1:1,127.0.0.2:1", "--ssh", str(self.ssh)]
        return [*hosts, *arguments]

    @pytest.mark.long
    def test_a_host_that_is_away_for_a_while(self) -> None:
        script = self.script("print('attempt', os.environ['TF_DGC_ATTEMPT'])")
        away = pathlib.Path(f"{self.ssh}.127.0.0.2")
        away.touch()
        process = self.start(*self.on_hosts("--restarts", "4", script))
        for line in process.stderr:
            if "starting again, 1 of 4" in line:
                away.unlink()
                break
            self.assertNotIn("Traceback", line)
        status, out, err = finish(process)
        self.assertEqual(status, 0, err)
        attempts = ["[0] attempt 1", "[1] attempt 1"]
        self.assertEqual(sorted(out.splitlines()), attempts)

    @pytest.mark.long
    def test_a_host_that_stays_away(self) -> None:
        pathlib.Path(f"{self.ssh}.127.0.0.2").touch()
        status, out, err = self.run_to_end(*self.on_hosts("--restarts", "1", "x.py"))
        self.assertEqual((status, out), (127, []))
        self.assertEqual(err.count("cannot start workers on 127.0.0.2"), 2)

    def test_no_ssh(self) -> None:
        given = ["--hosts", "127.0.0.1:1", "--ssh", "/no/ssh", "--restarts", "2"]
        status, _, err = self.run_to_end(*given, self.script(""))
        told = "tf-dgc-run: cannot start tasks: [Errno 2] No such file or directory: "
        self.assertEqual((status, err), (127, f"{told}'/no/ssh'\n"))

    def test_a_folder_that_is_gone(self) -> None:
        script = self.script("print('here')")
        folder, self.folder = self.folder, self.folder / "gone"
        code = f"import os; os.rmdir(os.getcwd()); os.execv({sys.executable!r}, "
        for arguments, status, told in (
            (["-n", "1", script], 0, "[0] here"),
            (["-n", "1", "-m", "json.tool", "-h"], 0, "[0] usage: "),
            (["--hosts", "127.0.0.1:1", "x.py"], 127, "No such file or directory"),
        ):
            with self.subTest(arguments=arguments):
                self.folder.mkdir()
                command = [sys.executable, "-m", "tf_dgc.run", *arguments]
                done = subprocess.run(
                    [sys.executable, "-c", f"{code}{command!r})"],
                    cwd=self.folder,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(told, done.stdout + done.stderr)
                self.assertNotIn("Traceback", done.stderr)
        self.folder = folder

    def test_a_script_that_no_host_has(self) -> None:
        given = self.on_hosts("--restarts", "3", "none.py")
        status, _, err = self.run_to_end(*given)
        self.assertEqual(status, 127)
        self.assertIn("cannot start none.py: there is no such file, on 127.0.0.", err)
        self.assertNotIn("starting again", err)

    @pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
    def test_children_end_where_an_agent_is_killed(self) -> None:
        script = self.script(
            CHILDREN + "print('agent', os.getppid(), flush=True)\ntime.sleep(120)"
        )
        process = self.start(*self.on_hosts(script))
        lines = [process.stdout.readline() for _ in range(4)]
        pids = [pid for line in lines if "ready" in line for pid in numbers(line)]
        (agent, *_) = [numbers(line)[-1] for line in lines if "agent" in line]
        os.kill(agent, signal.SIGKILL)
        status, _, err = finish(process)
        self.assertEqual(status, 255)
        self.assertIn("the connection is lost", err)
        self.assertTrue(all_end(pids))


if __name__ == "__main__":
    unittest.main()
