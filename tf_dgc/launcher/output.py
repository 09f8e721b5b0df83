"""Output of workers: cut into lines, marked with a name, written to what may fail."""

import contextlib
import errno
import os
import re
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Protocol

# A line ends in newline or, as progress bars write it, in a lone carriage return.
_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
LONGEST = 1 << 20  # bytes of a line; a longer one is passed on in pieces
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 21  # more than a pipe holds
_HELD_SECONDS = 2.0
NOTE_SECONDS = 1.0
_POLL_SECONDS = 0.05


class Writer(Protocol):
    """Destination of whole lines."""

    def write(self, data: bytes, /) -> object:
        """Take whole lines."""

    def flush(self) -> object:
        """Let go of them."""


class Sink(Protocol):
    """Destination of what a process prints, as it comes."""

    def write(self, data: bytes, /) -> object:
        """Take some bytes, which may end within a line."""

    def close(self) -> object:
        """Take note that no more will come."""


class Lines:
    """Cuts bytes into lines, in time that is linear in their number."""

    def __init__(self) -> None:
        self._rest = bytearray()  # a line without its end
        self._held = b""  # a carriage return: the next byte tells whether it is alone

    def take(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in this chunk, which follows those before it."""
        text = self._held + chunk
        self._held = b"\r" if text.endswith(b"\r") else b""
        first, *others = _ENDS.split(text.removesuffix(self._held))
        self._rest += first
        lines = []
        if others:
            lines = [bytes(self._rest), *others[:-1]]
            self._rest = bytearray(others[-1])
        if len(self._rest) >= LONGEST:
            lines.append(bytes(self._rest) + b"\n")
            self._rest.clear()
        return lines

    def rest(self) -> list[bytes]:
        """Return the last line, where it has no end, with one."""
        last = bytes(self._rest) + self._held
        return [last + b"\n"] if last else []


class WholeLines:
    """Cuts bytes into lines as a screen shows them: of a progress bar its last state.

    What is written over, behind a lone carriage return, is left out.
    """

    def __init__(self) -> None:
        self._lines = Lines()
        self._state = b""  # of a bar, which may still be written over

    def take(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in this chunk, which follows those before it."""
        return self._ended(self._lines.take(chunk))

    def rest(self) -> list[bytes]:
        """Return the last line, where it has no end, with one."""
        lines = self._ended(self._lines.rest())
        return [*lines, self._state + b"\n"] if self._state else lines

    def _ended(self, pieces: Sequence[bytes]) -> list[bytes]:
        lines = []
        for piece in pieces:
            if not piece.endswith(b"\n"):
                text = piece.rstrip(b"\r\b")
                self._state = text if text.strip() else self._state
                continue
            over = self._state and not piece.strip(b"\r\n\b")
            lines.append(self._state + b"\n" if over else piece)
            self._state = b""
        return lines


class Prefixed:
    """Writes whole lines, each behind a prefix."""

    def __init__(self, writer: Writer, prefix: bytes) -> None:
        """Take the destination."""
        self._writer, self._prefix, self._lines = writer, prefix, WholeLines()

    def write(self, data: bytes) -> None:
        """Write the lines that end here."""
        self._write(self._lines.take(data))

    def close(self) -> None:
        """Write the last line."""
        self._write(self._lines.rest())

    def _write(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._writer.write(b"".join(self._prefix + line for line in lines))
            self._writer.flush()


class Stream:
    """A file descriptor that takes whole lines.

    Where it cannot be written, as on a full disk or in a pipe that nobody reads, the
    lines are lost, and a note says so: what writes them goes on.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        """Take a descriptor by its number, and what notes call it."""
        self._descriptor, self._name = descriptor, name
        self._lost = 0  # bytes since the last that were written

    def write(self, data: bytes) -> None:
        """Write lines, without those of other threads between them."""
        with _lock_of(self._descriptor):
            if self._lost:
                data = b"\n[%d bytes of output are lost here]\n" % self._lost + data
            left = memoryview(data)
            try:
                while left:
                    left = left[self._written(left) :]
                self._lost = 0
            except OSError as error:
                first, self._lost = not self._lost, self._lost + len(left)
                problem = error.strerror
            else:
                return
        if first and self is not ERR:
            ERR.note(f"{self._name} cannot be written: {problem}; the job goes on")

    def flush(self) -> None:
        """Do nothing: lines are written at once."""

    def _written(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # somebody has made it so
            select.select([], [self._descriptor], [], NOTE_SECONDS)
            return 0

    def takes(self, seconds: float) -> bool:
        """Tell whether something can be written now, or within so many seconds."""
        try:
            return bool(select.select([], [self._descriptor], [], seconds)[1])
        except (OSError, ValueError):
            return False

    def note(self, text: str) -> None:
        """Write a short line of the launcher, unless that takes more than a second."""
        lock = _lock_of(self._descriptor)
        if not lock.acquire(timeout=NOTE_SECONDS):
            return
        try:
            if self.takes(NOTE_SECONDS):
                os.write(self._descriptor, f"{NAME[0]}: {text}\n".encode())
        except OSError:
            pass  # there is nobody to tell
        finally:
            lock.release()


NAME = ["tf-dgc-run"]  # of the program, before its notes
_locks: dict[tuple[int, int], threading.Lock] = {}


def _lock_of(descriptor: int) -> threading.Lock:
    """Return the lock of a file; stdout and stderr may be the same one."""
    place = (0, 0)
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        place = found.st_dev, found.st_ino
    return _locks.setdefault(place, threading.Lock())


OUT, ERR = Stream(1, "stdout"), Stream(2, "stderr")


def open_standard_files() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed.

    Other files would get these numbers.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number


class Copier(threading.Thread):
    """Copies what a process prints, as it comes."""

    def __init__(self, source: IO[bytes], sink: Sink) -> None:
        super().__init__(daemon=True)
        self._source, self._sink = source, sink
        self.copied = 0  # bytes
        self.writing = False

    def run(self) -> None:
        """Copy to the end of the source."""
        while chunk := self._read():
            self.copied += len(chunk)
            self._give(self._sink.write, chunk)
        self._give(self._sink.close)

    def _read(self) -> bytes:
        try:
            return os.read(self._source.fileno(), _READ_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:  # so ends a terminal whose processes ended
                raise
            return b""

    def _give(self, take: Callable[..., object], *chunk: bytes) -> None:
        self.writing = True
        with contextlib.suppress(OSError):
            take(*chunk)
        self.writing = False


def finish(copiers: Sequence[Copier], give_up: Callable[[], object]) -> None:
    """Wait until all is copied that processes had printed which have ended.

    A process that still holds a pipe is waited for no longer than two seconds; a reader
    that is slow, as long as it likes.
    """
    before = [copier.copied for copier in copiers]
    for copier, copied in zip(copiers, before, strict=True):
        last = time.monotonic() + _HELD_SECONDS
        while copier.is_alive() and copier.copied < copied + _PIPE_BYTES:
            if copier.writing:
                last = time.monotonic() + _HELD_SECONDS
            if time.monotonic() > last or give_up():
                break
            copier.join(_POLL_SECONDS)


def forward(source: IO[bytes], writer: Writer, prefix: bytes) -> None:
    """Copy `source` to `writer` in whole lines, each behind `prefix`."""
    Copier(source, Prefixed(writer, prefix)).run()
