"""Tests of `tf-dgc-run` on a terminal: real workers, as one process would be seen."""

import fcntl
import os
import pathlib
import pty
import re
import struct
import sys
import tempfile
import termios
import unittest

import pytest
from launch import ROOT

SCRIPT = """
import json, os, sys, warnings
import keras
import numpy as np

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

def fails(batch, logs):
    if rank == 1 and sys.argv[1:] == ["fail"]:
        raise RuntimeError("worker one has no room\\nleft")

x = np.random.normal(size=[512, 8]).astype("float32")
model = keras.Sequential([keras.layers.Dense(400), keras.layers.Dense(1)])
model.compile("sgd", "mse")
call = keras.callbacks.LambdaCallback(on_train_batch_end=fails)
print("first of", rank, flush=True)
if rank:
    warnings.warn("slow disk")
model.fit(x, x[:, 0], batch_size=8, epochs=2, callbacks=[call])
model.evaluate(x, x[:, 0], batch_size=8)
print("last of", rank)
"""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_a_terminal(command: list[str], folder: pathlib.Path) -> tuple[int, str]:
    """Run a command on a terminal of its own; return its status and what came."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
        environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
        os.execve(command[0], command, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 160, 0, 0))
    found = bytearray()
    try:
        while chunk := os.read(terminal, 65536):
            found += chunk
    except OSError:  # its processes have ended
        pass
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), found.decode()


def screen_of(text: str) -> list[str]:
    """Return the lines that stand on a terminal after all that was written."""
    lines, line, column = [], [], 0
    for part in re.findall(r"\x1b\[K|[^\x1b]", COLOURS.sub("", text)):
        if part == "\x1b[K":
            del line[column:]
        elif part == "\r":
            column = 0
        elif part == "\b":
            column = max(column - 1, 0)
        elif part == "\n":
            lines.append("".join(line))
            line = []
        else:
            line += " " * (column + 1 - len(line))
            line[column] = part
            column += 1
    return [each.rstrip() for each in [*lines, "".join(line)]]


@pytest.mark.processes
class TerminalTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "train.py").write_text(SCRIPT)
        self.command = [
            *(sys.executable, "-m", "tf_dgc.run", "-n", "2"),
            *("--strategy", "dgc", "--sparsity", "0.99", "train.py"),
        ]

    @pytest.mark.extended
    def test_one_bar_is_seen_and_no_line_of_two_workers(self) -> None:
        status, text = on_a_terminal(self.command, self.folder)
        lines = screen_of(text)
        self.assertEqual(status, 0, text)
        warning, code = [line for line in lines if line.startswith("[1] ")]
        rest = [line for line in lines if not line.startswith("[1] ")]
        first, epoch, bar, second, next_bar, sent, tested, last, end = rest
        self.assertEqual((first, last, end), ("first of 0", "last of 0", ""))
        self.assertRegex(warning, r"^\[1\] train\.py:\d+: UserWarning: slow disk$")
        self.assertEqual(code, '[1]   warnings.warn("slow disk")')
        self.assertEqual((epoch, second), ("Epoch 1/2", "Epoch 2/2"))
        for each in (bar, next_bar, tested):
            self.assertRegex(each, r"^64/64 \S+ \d+s \S+/step - loss: \S+$")
        self.assertGreater(text.count("\b\r"), 4)  # it was rewritten
        self.assertRegex(
            sent, r"^tf_dgc: \S+ KB a step and worker instead of 16\.0 KB "
        )

    @pytest.mark.slow
    def test_the_traceback_of_a_worker_is_whole_and_last(self) -> None:
        status, text = on_a_terminal([*self.command, "fail"], self.folder)
        lines = screen_of(text)
        place = next(i for i, each in enumerate(lines) if each.startswith("tf-dgc-run"))
        self.assertEqual(status, 1, text)
        self.assertIn("worker", lines[place])
        after = lines[place + 1 :]
        self.assertEqual(after[0], "[1] Traceback (most recent call last):")
        self.assertEqual(
            after[-3:-1],
            [
                "[1] RuntimeError: worker one has no room",
                "[1] left",
            ],
        )
        frames = [line for line in after if "  File " in line]
        self.assertEqual(len(frames), 2, frames)
        self.assertTrue(all('File "train.py", line' in line for line in frames))
        self.assertEqual(sum("Traceback" in line for line in lines), 1)
        self.assertNotIn("Detected at node", text)


if __name__ == "__main__":
    unittest.main()
