"""Tests of what is seen of a job: whole lines, warnings once, who failed first."""

import os
import pathlib
import tempfile
import unittest
from unittest import mock

from tf_dgc.launcher import output, screen, terminals
from tf_dgc.launcher.transcript import ENDS_TOO, Transcript
from tf_dgc.launcher.warned import Warnings

BAR = b"\b\b\b\r\x1b[1m%d/8\x1b[0m loss: 1"
TRACEBACK = b"""\
Traceback (most recent call last):
  File "train.py", line %d, in <module>
    fit()
ValueError: bad
in two lines
"""


def whole(text: bytes) -> list[bytes]:
    lines = output.WholeLines()
    return lines.take(text) + lines.rest()


class WholeLinesTest(unittest.TestCase):
    def test_only_the_last_state_of_a_bar_is_a_line(self) -> None:
        states = b"".join(BAR % i for i in range(1, 9))
        expected = [b"Epoch 1/2\n", b"\x1b[1m8/8\x1b[0m loss: 1\n"]
        self.assertEqual(whole(b"Epoch 1/2\n" + states + b"\n"), expected)
        self.assertEqual(whole(b"Epoch 1/2\n" + states), expected)

    def test_other_lines_stay_as_they_are(self) -> None:
        text = b"a\n\n  b\r\n\xff\n"
        self.assertEqual(b"".join(whole(text)), text)
        self.assertEqual(whole(b"end"), [b"end\n"])

    def test_chunks_do_not_matter(self) -> None:
        text = b"a\n" + b"".join(BAR % i for i in range(5)) + b"\nb"
        for size in (1, 2, 7):
            lines, found = output.WholeLines(), []
            for i in range(0, len(text), size):
                found += lines.take(text[i : i + size])
            self.assertEqual(found + lines.rest(), whole(text))


class TranscriptTest(unittest.TestCase):
    def failed(self, *chunks: bytes) -> Transcript:
        transcript = Transcript("1")
        for chunk in chunks:
            transcript.take(chunk.splitlines(keepends=True), errors=True)
        return transcript

    def test_a_traceback_is_kept_whole(self) -> None:
        text = TRACEBACK % 3
        found = self.failed(b"before\n", text[:50], text[50:])
        self.assertEqual(b"".join(found.traceback), text)

    def test_a_chain_is_one_traceback(self) -> None:
        chain = b"\nDuring handling of the above exception, another exception occurred:"
        text = TRACEBACK % 3 + chain + b"\n\n" + TRACEBACK % 4
        self.assertEqual(b"".join(self.failed(text).traceback), text)

    def test_the_last_one_counts(self) -> None:
        found = self.failed(TRACEBACK % 3, b"went on\n", TRACEBACK % 4)
        self.assertEqual(b"".join(found.traceback), TRACEBACK % 4)

    def test_what_follows_for_long_is_no_message_of_it(self) -> None:
        found = self.failed(TRACEBACK % 3, b"step\n" * 100)
        self.assertEqual(found.failure, b"")

    def test_the_same_place_is_the_same_failure(self) -> None:
        one, other = self.failed(TRACEBACK % 3), self.failed(TRACEBACK % 4)
        self.assertNotEqual(one.failure, other.failure)
        text = (TRACEBACK % 3).replace(b"bad", b"bad, on 1")
        self.assertEqual(one.failure, self.failed(text).failure)


class WarningsTest(unittest.TestCase):
    def test_the_same_of_several_workers_is_one_with_a_count(self) -> None:
        warnings = Warnings()
        for worker in ("1", "2", "3"):
            text = [b"x.py:3: UserWarning: slow disk\n", b"  warn()\n"]
            warnings.hear(worker, text)
            warnings.hear(worker, text)
        warnings.hear("2", [b"WARNING:root:other\n"])
        self.assertEqual(warnings.due(0.0), [])
        expected = [
            b"[3 workers: 1, 2, 3] x.py:3: UserWarning: slow disk\n",
            b"[3 workers: 1, 2, 3]   warn()\n",
            b"[2] WARNING:root:other\n",
        ]
        self.assertEqual(warnings.due(float("inf")), expected)
        self.assertEqual(warnings.due(float("inf")), [])

    def test_what_the_chief_says_is_not_said_again(self) -> None:
        warnings = Warnings()
        warnings.hear("1", [b"WARNING:root:slow\n"])
        warnings.remember([b"\x1b[31mWARNING:root:slow\x1b[0m\n"])
        self.assertEqual(warnings.due(float("inf")), [])

    def test_levels_below_a_warning_are_not_heard(self) -> None:
        for line in (
            b"INFO:root:step\n",
            b"DEBUG:x:y\n",
            b"2026-01-02 03:04:05,678 INFO trainer: step\n",
            b"[INFO] step\n",
            b"I0000 00:00:1795.1  77 port.cc:153] oneDNN\n",
            b"I0102 12:00:00.123 77 x.py:1] step\n",
        ):
            warnings = Warnings()
            warnings.hear("1", [line, b"  more of it\n"])
            self.assertEqual(warnings.due(float("inf")), [], line)

    def test_warnings_of_c_are_the_same_at_any_time(self) -> None:
        warnings = Warnings()
        for worker, stamp in (("1", 17), ("2", 18)):
            warnings.hear(worker, [b"W0000 00:00:%d.5  7 a.cc:1] slow\n" % stamp])
        (line,) = warnings.due(float("inf"))
        self.assertTrue(line.startswith(b"[2 workers: 1, 2] W0000"))


class ChiefTest(unittest.TestCase):
    """What is written to a terminal of 40 columns, which is a file here."""

    def setUp(self) -> None:
        super().setUp()
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.path = folder / "screen"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        self.addCleanup(os.close, descriptor)
        stream = output.Stream(descriptor, "screen")
        self.enterContext(mock.patch.object(output, "OUT", stream))
        self.enterContext(mock.patch.object(output, "ERR", stream))
        self.folder = folder / "logs"
        terminal = terminals.Terminal(24, 40, "xterm", True)
        self.view = screen.Chief(terminal, self.folder, quiet=True)

    def written(self) -> bytes:
        return self.path.read_bytes()

    def test_the_chief_is_seen_as_it_is_and_others_are_not(self) -> None:
        text = b"Epoch 1\n" + b"".join(BAR % i for i in range(3))
        self.view.sink("1", "out").write(text)
        self.view.sink("0", "out").write(text)
        self.assertEqual(self.written(), text)

    def test_a_warning_stands_above_the_bar(self) -> None:
        self.view.sink("0", "out").write(BAR % 1)
        self.view.sink("1", "err").write(b"WARNING: slow\n")
        self.view.ended("")
        bar = b"\x1b[1m1/8\x1b[0m loss: 1"
        expected = BAR % 1 + b"\r\x1b[K[1] WARNING: slow\n" + bar
        self.assertEqual(self.written(), expected)

    def test_noise_of_the_chief_is_left_out_however_it_comes(self) -> None:
        noise = b"I0000 00:00:17.1 7 port.cc:1] oneDNN\n"
        text = noise + b"a\n" + noise + noise + b"b I0000 00:00: c\n"
        for size in (20, 50, 200):
            sink = self.view.sink("0", "out")
            before = len(self.written())
            for i in range(0, len(text), size):
                sink.write(text[i : i + size])
            self.assertEqual(self.written()[before:], b"a\nb I0000 00:00: c\n", size)

    def test_the_traceback_of_who_failed_first_is_last(self) -> None:
        self.view.sink("0", "out").write(BAR % 1)
        self.view.sink("2", "err").write(TRACEBACK % 7)
        self.view.sink("0", "out").write(b"\n" + ENDS_TOO.encode() + b"Worker 2\n")
        self.view.sink("1", "err").write(ENDS_TOO.encode() + b"Worker 2\n")
        self.view.ending("worker 0 ended with status 1")
        self.view.ended("0")
        lines = (TRACEBACK % 7).splitlines(keepends=True)
        end = b"".join(b"[2] " + line for line in lines)
        self.assertTrue(self.written().endswith(end))
        self.assertEqual(self.written().count(b"ValueError"), 1)
        told = rb"worker 0 ended with status 1; worker 2 failed first; .*/logs\n\[2\]"
        self.assertRegex(self.written(), told)

    def test_an_error_of_all_is_shown_once(self) -> None:
        self.view.sink("1", "err").write(TRACEBACK % 7)
        self.view.sink("0", "out").write(TRACEBACK % 7)
        self.view.ending("worker 1 ended with status 1")
        self.view.ended("1")
        self.assertEqual(self.written().count(b"ValueError"), 1)
        self.assertTrue(self.written().startswith(TRACEBACK % 7))

    def test_last_lines_of_a_worker_that_was_killed(self) -> None:
        self.view.sink("1", "out").write(b"step 1\nstep 2\n")
        self.view.ending("worker 1 ended with status 137")
        self.view.ended("1")
        self.assertTrue(self.written().endswith(b"/logs\n[1] step 1\n[1] step 2\n"))

    def test_the_text_by_which_a_worker_leaves_is_shown_once(self) -> None:
        self.view.sink("1", "out").write(b"step 1\n")
        self.view.sink("1", "err").write(b"no more data\n")
        self.view.sink("2", "err").write(b"WARNING: slow\n")
        self.view.ending("worker 1 ended with status 1")
        self.view.ended("1")
        self.assertTrue(self.written().startswith(b"[2] WARNING: slow\n"))
        self.assertTrue(self.written().endswith(b"[1] step 1\n[1] no more data\n"))
        self.assertEqual(self.written().count(b"no more data"), 1)

    def test_a_file_for_each_worker(self) -> None:
        for name in ("0", "1", "ps0"):
            self.view.sink(name, "out").write(b"out\n" + BAR % 1 + BAR % 2 + b"\n")
            self.view.sink(name, "err").write(b"INFO: err\n")
        for name in ("worker-0", "worker-1", "ps0"):
            found = (self.folder / f"{name}.log").read_bytes()
            expected = b"out\n\x1b[1m2/8\x1b[0m loss: 1\nINFO: err\n"
            self.assertEqual(found, expected)


if __name__ == "__main__":
    unittest.main()
