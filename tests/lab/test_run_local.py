"""Tests of scripts/run_local.py, with plain Python workers (no TensorFlow)."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import pytest
from launch import finish

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "run_local.py"


def start(
    workers: int, code: str, *options: str, environment: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Starts run_local.py on `workers` interpreters that run `code`."""
    command = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    return subprocess.Popen(
        [sys.executable, SCRIPT, "-n", str(workers), *options, "--", *command],
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells ignore SIGINT in what they start in the background, as these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(workers: int, code: str, *options: str) -> tuple[int, str, str]:
    """Runs to the end; see `start` and `finish`."""
    return finish(start(workers, code, *options))


def is_alive(pid: int) -> bool:
    """Tells whether the process exists and is no zombie."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


PRELUDE = """
    import json, os, signal, sys, time
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
"""


class OutputTest(unittest.TestCase):
    def test_every_line_carries_its_rank(self) -> None:
        status, out, err = run(
            2,
            PRELUDE
            + """
    print("first"); print("second", end="")
    print("wrong", file=sys.stderr)
    """,
        )
        self.assertEqual(status, 0)
        expected = [
            f"[{rank}] {word}" for rank in (0, 1) for word in ("first", "second")
        ]
        self.assertCountEqual(out.splitlines(), expected)
        self.assertCountEqual(err.splitlines(), ["[0] wrong", "[1] wrong"])

    def test_lines_of_two_workers_are_never_mixed(self) -> None:
        _, out, _ = run(
            2,
            PRELUDE
            + """
    for _ in range(300):
        for part in range(4):
            sys.stdout.write(str(rank) * 10); sys.stdout.flush()
        print()
    """,
        )
        self.assertEqual(
            {line: out.splitlines().count(line) for line in out.splitlines()},
            {f"[{rank}] " + str(rank) * 40: 300 for rank in (0, 1)},
        )

    def test_bytes(self) -> None:
        for name, written, expected in (
            ("progress bar", b"1/2\r2/2\r\n", b"[0] 2/2\r\n"),
            ("bar at the end", b"1/2\r", b"[0] 1/2\r\n"),
            ("no text", b"\xff\xfe\n", b"[0] \xff\xfe\n"),
        ):
            with self.subTest(name):
                code = f"import sys; sys.stdout.buffer.write({written!r})"
                result = subprocess.run(
                    [sys.executable, SCRIPT, "-n", "1", sys.executable, "-c", code],
                    stdout=subprocess.PIPE,
                    check=True,
                    timeout=30,
                )
                self.assertEqual(result.stdout, expected)

    def test_output_arrives_while_the_worker_runs(self) -> None:
        process = start(1, "import time; print('now'); time.sleep(60)")
        assert process.stdout is not None
        self.assertEqual(process.stdout.readline(), "[0] now\n")
        process.send_signal(signal.SIGTERM)
        finish(process)


class TfConfigTest(unittest.TestCase):
    def test_names_all_workers_and_one_task(self) -> None:
        process = start(
            3,
            "import os; print(os.environ['TF_CONFIG'])",
            environment={"TF_CONFIG": "{}"},
        )
        _, out, _ = finish(process)
        configs = [
            json.loads(line.partition("] ")[2]) for line in sorted(out.splitlines())
        ]
        self.assertEqual([config["task"]["index"] for config in configs], [0, 1, 2])
        self.assertEqual({config["task"]["type"] for config in configs}, {"worker"})
        clusters = [config["cluster"] for config in configs]
        self.assertEqual(clusters, [clusters[0]] * 3)
        addresses = clusters[0]["worker"]
        self.assertEqual(len(set(addresses)), 3)
        for address in addresses:
            self.assertRegex(address, r"^127\.0\.0\.1:[1-9]\d+$")

    def test_the_command_gets_its_own_options(self) -> None:
        command = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "-n", "7"]
        out = subprocess.run(
            [sys.executable, SCRIPT, "-n", "1", *command],
            stdout=subprocess.PIPE,
            check=True,
            timeout=30,
        ).stdout
        self.assertEqual(out, b"[0] ['-n', '7']\n")


class EndTest(unittest.TestCase):
    def test_status_of_the_worker_that_fails(self) -> None:
        status, _, err = run(3, PRELUDE + "    sys.exit(7 if rank == 1 else 0)")
        self.assertEqual(status, 7)
        self.assertIn("run_local: worker 1 ended with status 7", err)

    def test_a_signal_counts_128_and_its_number(self) -> None:
        status, _, _ = run(1, PRELUDE + "    os.kill(os.getpid(), signal.SIGKILL)")
        self.assertEqual(status, 137)

    @pytest.mark.long
    def test_one_that_fails_ends_all(self) -> None:
        begin = time.monotonic()
        status, out, _ = run(
            3, PRELUDE + "    time.sleep(0.5 if rank == 2 else 60); sys.exit(5)"
        )
        self.assertEqual((status, out), (5, ""))
        self.assertLess(time.monotonic() - begin, 15)

    @pytest.mark.long
    def test_one_that_succeeds_ends_none(self) -> None:
        status, out, _ = run(2, PRELUDE + "    time.sleep(rank); print('end')")
        self.assertEqual((status, out), (0, "[0] end\n[1] end\n"))

    @pytest.mark.long
    def test_one_that_ignores_sigterm_is_killed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "pid"
            status, _, _ = run(
                2,
                PRELUDE
                + f"""
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(file)!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    while not os.path.exists({str(file)!r}) or not open({str(file)!r}).read():
        time.sleep(0.01)
    sys.exit(3)
    """,
                "--grace",
                "0.5",
            )
            pid = int(file.read_text())
        self.assertEqual(status, 3)
        self.assertFalse(is_alive(pid))

    def test_children_of_workers_end_too(self) -> None:
        status, out, _ = run(
            1,
            PRELUDE
            + """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid)
    """,
        )
        self.assertEqual(status, 0)
        self.assertFalse(is_alive(int(out.partition("] ")[2])))

    def test_timeout(self) -> None:
        status, _, err = run(2, "import time; time.sleep(60)", "--timeout", "0.5")
        self.assertEqual(status, 124)
        self.assertIn("run_local: no end after 0.5 seconds", err)


class SignalTest(unittest.TestCase):
    CODE = (
        PRELUDE
        + """
    def handle(number, frame):
        print("received", number)
        sys.exit(0)
    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    print("ready", os.getpid())
    time.sleep(60)
    """
    )

    def _ready(
        self, code: str, *options: str
    ) -> "tuple[subprocess.Popen[str], list[int]]":
        process = start(2, code, *options)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        return process, [int(line.split()[-1]) for line in lines]

    @pytest.mark.long
    def test_signals_reach_all_workers(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=signum.name):
                process, pids = self._ready(self.CODE)
                process.send_signal(signum)
                status, out, _ = finish(process)
                self.assertEqual(status, 128 + signum)
                expected = [f"[{rank}] received {int(signum)}" for rank in (0, 1)]
                self.assertCountEqual(out.splitlines(), expected)
                self.assertFalse(any(map(is_alive, pids)))

    def test_the_second_ctrl_c_does_not_wait(self) -> None:
        code = self.CODE.replace("sys.exit(0)", "pass").replace(
            "time.sleep(60)", "[time.sleep(1) for _ in range(60)]"
        )
        process, pids = self._ready(code, "--grace", "60")
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        process.stdout.readline()  # the first has been passed on
        process.send_signal(signal.SIGINT)
        status, _, _ = finish(process, timeout=20)
        self.assertEqual(status, 130)
        self.assertFalse(any(map(is_alive, pids)))

    @pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
    def test_sigkill_of_the_launcher_ends_the_workers(self) -> None:
        process, pids = self._ready(self.CODE)
        process.kill()
        finish(process)
        deadline = time.monotonic() + 10
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertFalse(any(map(is_alive, pids)))


class ArgumentsTest(unittest.TestCase):
    def _error(self, *arguments: str) -> tuple[int, str]:
        result = subprocess.run(
            [sys.executable, SCRIPT, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
        return result.returncode, result.stderr

    def test_bad_arguments(self) -> None:
        for arguments, message in (
            (["--", "true"], "required: -n"),
            (["-n", "two", "--", "true"], "invalid int value: 'two'"),
            (["-n", "0", "--", "true"], "`-n` must be at least 1. Received: -n 0"),
            (["-n", "2", "--"], "no command to run; write it behind `--`"),
            (["-n", "2"], "no command to run; write it behind `--`"),
        ):
            with self.subTest(arguments=arguments):
                status, error = self._error(*arguments)
                self.assertEqual(status, 2)
                self.assertIn(message, error)

    def test_a_command_that_does_not_exist(self) -> None:
        status, error = self._error("-n", "2", "--", "/does/not/exist")
        self.assertEqual(status, 127)
        self.assertIn("run_local: cannot start /does/not/exist", error)


if __name__ == "__main__":
    unittest.main()
