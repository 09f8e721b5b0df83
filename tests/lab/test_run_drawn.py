"""Drawn scripts and faults under `tf-dgc-run`, with plain Python workers."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import unittest
from typing import Any

import pytest
from launch import ROOT
from test_run import Launched

MARK = "DRAWN_JOB"
# What a worker does, one after the other; `lines` are numbered.
WORKER = """
import subprocess
nap = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
for kind, value in json.loads(sys.argv[1])[rank]:
    if kind == "lines":
        for i in range(value):
            print("line", i, "x" * (i % 50))
    elif kind == "long":
        print("." * value)
    elif kind == "error":
        print("e" * value, file=sys.stderr)
    elif kind == "bytes":
        os.write(1, bytes(range(1, 256)) + b"\\r\\r\\n")
    elif kind == "child":
        subprocess.Popen(nap, start_new_session=value)
    elif kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif kind == "close":
        os.dup2(os.open(os.devnull, os.O_WRONLY), value)
    elif kind == "sleep":
        time.sleep(value)
    elif kind == "signal":
        if value != signal.SIGKILL:
            signal.signal(value, signal.SIG_DFL)
        os.kill(os.getpid(), value)
    elif kind == "exit":
        sys.stdout.flush()
        os._exit(value) if value % 2 else sys.exit(value)
print("end", end="")
"""
ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGHUP)


def behaviour(draw: random.Random) -> list[tuple[str, int]]:
    """Draw what one worker does."""
    steps: list[tuple[str, Any]] = [
        draw.choice(
            [
                ("lines", draw.choice([1, 10, 3000])),
                ("long", draw.choice([10_000, 300_000, 2_000_000])),
                ("error", draw.choice([1, 70_000])),
                ("bytes", 0),
                ("child", draw.random() < 0.5),
                ("deaf", 0),
                ("sleep", draw.choice([0.1, 0.5])),
            ]
        )
        for _ in range(draw.randrange(5))
    ]
    if draw.random() < 0.1:
        steps.append(("close", draw.choice([1, 2])))
    if draw.random() < 0.4:
        last = [("exit", draw.choice([0, 1, 2, 3, 77])), ("signal", draw.choice(ENDS))]
        steps.append(draw.choice(last))
    return steps


def status_of(steps: list[tuple[str, int]]) -> int:
    """Return the status that a worker has by itself."""
    kind, value = steps[-1] if steps else ("", 0)
    return {"exit": value, "signal": 128 + value}.get(kind, 0)


def marked(mark: str) -> list[int]:
    """Return the processes that a job has left."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            pass  # it has ended, or is another user's
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
class DrawnTest(Launched):
    def job(self, draw: random.Random, mark: str) -> None:
        workers = [behaviour(draw) for _ in range(draw.choice([1, 2, 3]))]
        restarts = draw.choice([0, 0, 1])
        where = draw.choice(["file", "file", "full", "closed", "gone"])
        sent = draw.choice([None] * 4 + [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        temporary = self.folder / mark
        temporary.mkdir()
        options = ["-n", f"{len(workers)}", "--restarts", f"{restarts}"]
        options += ["--grace", "0.3", "--pause", "0.1"]
        script = self.script(WORKER)
        command = [sys.executable, "-m", "tf_dgc.run", *options, script]
        redirect = {"full": ">/dev/full", "closed": ">&-", "gone": "| true"}
        line = 'exec "$@" ' + redirect.get(where, ">out")
        if where == "gone":  # the shell's status is that of the launcher
            line = f"set -o pipefail; {line[5:]}"
        process = subprocess.Popen(
            ["bash", "-c", line, "bash", *command, json.dumps(workers)],
            cwd=temporary,
            env=os.environ | {"PYTHONPATH": str(ROOT), MARK: mark, "TMPDIR": "."},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.addCleanup(process.kill)
        if sent is not None and where != "gone":
            try:
                process.wait(draw.choice([0.05, 0.3, 0.8]))
            except subprocess.TimeoutExpired:
                process.send_signal(sent)
        else:
            sent = None
        _, err = process.communicate(timeout=60)
        self.check(workers, sent, process.returncode, err.decode(errors="replace"))
        for _ in range(100):
            if not (left := marked(mark)) or sent is not signal.SIGKILL:
                break
            signal.sigtimedwait([], 0.1)
        self.assertEqual(left, [])
        expected = {"out"} if where == "file" else set()
        self.assertEqual({path.name for path in temporary.iterdir()}, expected)
        if where == "file" and sent is None:
            self.check_output(workers, (temporary / "out").read_bytes())

    def check(
        self,
        workers: list[list[tuple[str, int]]],
        sent: signal.Signals | None,
        status: int,
        err: str,
    ) -> None:
        failures = {status_of(steps) for steps in workers} - {0}
        possible = failures or {0}
        if sent is not None:  # it may come before the launcher is there, or too late
            possible = {*possible, 0, 128 + sent, -sent}
            if "KeyboardInterrupt" in err or "ImportError" in err:
                return
        self.assertIn(status, possible, err[-2000:])
        self.assertNotIn("Exception ignored in", err)
        self.assertNotIn("tf_dgc/launcher", err)

    def check_output(self, workers: list[list[tuple[str, int]]], out: bytes) -> None:
        """Check that lines of workers that have ended by themselves are there."""
        failed = [rank for rank, steps in enumerate(workers) if status_of(steps)]
        alone = failed if len(failed) == 1 else [] if failed else range(len(workers))
        for rank in alone:
            steps = workers[rank]
            if ("close", 1) in steps:
                continue  # lines before are there, those after it not
            prefix = b"[%d] " % rank
            lines = [each for each in out.split(b"\n") if each.startswith(prefix)]
            for kind, value in steps:
                if kind == "lines":
                    told = b"line %d %s" % (value - 1, b"x" * ((value - 1) % 50))
                    self.assertIn(prefix + told, lines)
            dots = sum(each.count(b".") for each in lines if b" ." in each[:6])
            self.assertGreaterEqual(
                dots, sum(value for kind, value in steps if kind == "long")
            )

    def run_seeds(self, seeds: range) -> None:
        for seed in seeds:
            with self.subTest(seed=seed):
                self.job(random.Random(seed), f"{os.getpid()}-{seed}")

    @pytest.mark.extended
    def test_drawn_jobs(self) -> None:
        self.run_seeds(range(8))

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    def test_many_drawn_jobs(self) -> None:
        self.run_seeds(range(100, 500))


if __name__ == "__main__":
    unittest.main()
