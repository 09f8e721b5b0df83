"""Tests of the launcher's output: lines, files that fail, pauses between starts."""

import os
import pathlib
import random
import tempfile
import threading
import unittest

import pytest

from tf_dgc.launcher import output
from tf_dgc.launcher.apart import Pauses
from tf_dgc.launcher.job import EndedEarly


def cut(chunks: list[bytes]) -> list[bytes]:
    lines = output.Lines()
    return [line for chunk in chunks for line in lines.take(chunk)] + lines.rest()


class LinesTest(unittest.TestCase):
    def test_chunks_do_not_matter(self) -> None:
        draw = random.Random(1)
        for _ in range(300):
            text = bytes(draw.choices(b"ab\r\n", k=draw.randrange(30)))
            places = sorted(draw.choices(range(len(text) + 1), k=4))
            chunks = [
                text[i:j] for i, j in zip([0, *places], [*places, None], strict=True)
            ]
            ended = text if not text or text.endswith(b"\n") else text + b"\n"
            self.assertEqual(b"".join(cut(chunks)), ended)
            self.assertEqual(cut(chunks), cut([text]), text)

    def test_ends_of_lines(self) -> None:
        for text, expected in (
            (b"a\nb\n", [b"a\n", b"b\n"]),
            (b"1/2\r2/2\r\n", [b"1/2\r", b"2/2\r\n"]),
            (b"1/2\r", [b"1/2\r\n"]),
            (b"\r1\r2", [b"\r", b"1\r", b"2\n"]),
            (b"no end", [b"no end\n"]),
            (b"", []),
        ):
            self.assertEqual(cut([text]), expected)

    def test_work_for_a_long_line_is_linear(self) -> None:
        chunks = [b"." * 65536] * 80  # 5 MB: quadratic, it takes hours
        lines = cut(chunks)
        self.assertEqual(b"".join(line.rstrip() for line in lines), b"".join(chunks))
        longest = max(map(len, lines))
        self.assertLessEqual(longest, output.LONGEST + 65536 + 1)

    def test_bytes_that_come_one_by_one(self) -> None:
        text = b"a\r\nb" * 3000
        self.assertEqual(cut([text[i : i + 1] for i in range(len(text))]), cut([text]))


class StreamTest(unittest.TestCase):
    def pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        for end in ends:
            self.addCleanup(os.close, end)
        return ends

    def test_what_cannot_be_written_is_counted_and_told(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        full, file = (
            os.open("/dev/full", os.O_WRONLY),
            os.open(folder / "log", os.O_WRONLY | os.O_CREAT),
        )
        self.addCleanup(os.close, full)
        descriptor = os.dup(full)
        self.addCleanup(os.close, descriptor)
        stream = output.Stream(descriptor, "it")
        stream.write(b"12345\n")
        stream.write(b"6789\n")
        os.dup2(file, descriptor)  # there is room again
        os.close(file)
        stream.write(b"here\n")
        stream.write(b"again\n")
        told = (folder / "log").read_bytes()
        self.assertRegex(told, rb"^\n\[\d+ bytes of output are lost here\]\nhere\n")
        self.assertTrue(told.endswith(b"here\nagain\n"))

    def test_a_pipe_that_does_not_block(self) -> None:
        source, sink = self.pipe()
        os.set_blocking(sink, False)
        data = b"x" * 1_000_000 + b"\n"
        found = bytearray()

        def read() -> None:
            while len(found) < len(data):
                found.extend(os.read(source, 65536))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        output.Stream(sink, "it").write(data)
        reader.join(60)
        self.assertEqual(bytes(found), data)

    @pytest.mark.long
    def test_a_note_does_not_wait_for_a_reader(self) -> None:
        _, sink = self.pipe()
        os.set_blocking(sink, False)
        try:
            while True:
                os.write(sink, b"x" * 65536)
        except BlockingIOError:
            os.set_blocking(sink, True)
        output.Stream(sink, "it").note("not read")  # comes back


class EarlyTest(unittest.TestCase):
    def test_who_has_ended_well_long_before_others_is_named_once(self) -> None:
        early, ended = EndedEarly(), [None, 0, None]
        self.assertEqual(early.notice([None, None, None], 0.0), "")
        self.assertEqual(early.notice(ended, 100.0), "")
        self.assertEqual(early.notice(ended, 109.0), "")
        self.assertEqual(
            early.notice(ended, 110.0),
            "worker 1 ended with status 0 more than 10 s ago; workers 0, 2 still run",
        )
        self.assertEqual(early.notice([None, 0, 0], 130.0), "")

    def test_nothing_is_said_where_all_end_together(self) -> None:
        early = EndedEarly()
        self.assertEqual(early.notice([0, None], 0.0), "")
        self.assertEqual(early.notice([0, 0], 20.0), "")


class PausesTest(unittest.TestCase):
    def test_each_is_longer_up_to_a_bound(self) -> None:
        pauses, now, found = Pauses(1.0, 0.0), 0.0, []
        for _ in range(9):
            found.append(pauses.after_failure(now))
            now += found[-1] + 5.0  # it fails again five seconds after its start
        self.assertEqual(found, [1, 2, 4, 8, 16, 32, 60, 60, 60])

    def test_what_has_run_for_long_begins_anew(self) -> None:
        pauses = Pauses(1.0, 0.0)
        self.assertEqual([pauses.after_failure(1.0) for _ in range(3)], [1, 2, 4])
        self.assertEqual(pauses.after_failure(700.0), 1)

    def test_there_may_be_none(self) -> None:
        pauses = Pauses(0.0, 0.0)
        self.assertEqual([pauses.after_failure(1.0) for _ in range(3)], [0, 0, 0])


if __name__ == "__main__":
    unittest.main()
