"""Transcript of a worker: its last lines, and the error that it failed by."""

import collections
import re
import time
from collections.abc import Sequence

_TAIL = 10  # lines
_MOST = 2000  # lines of a traceback that are kept
_MESSAGE = 60  # of an exception that ends a process: lines
# What a worker prints that ends for the error of another one; see `_host.tracebacks`.
ENDS_TOO = "This worker ends, too: "
_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_CHAINS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_HEADS = (b"Traceback (most recent call last):", b"+ Exception Group Traceback")
# Log lines of TensorFlow's C++, and what is said before all others.
LOGGED = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:[\d.]+\s+\d+ ")
_NOISY = (b"I0000 00:00:", b"WARNING: All log messages before absl::Init")
NOISE = re.compile(b"|".join(_NOISY))


def plain(line: bytes) -> bytes:
    """Return a line without colours."""
    return _COLOUR.sub(b"", line)


def may_be_noise(begin: bytes) -> bool:
    """Tell whether a line of which this is the begin, without its end, may be noise."""
    short = len(begin) > 0 and any(each.startswith(begin) for each in _NOISY)
    return not begin.endswith(b"\n") and bool(short or NOISE.match(begin))


class Transcript:
    """Output of a worker so far.

    Attributes:
        name: its rank, or `ps` and a number.
        host: where it runs; "" on this machine.
        tail: its last lines.
        traceback: lines of the last traceback, with what was printed after it.
        since: when that began, by `time.monotonic`.
        shown: whether that is on the screen.
        ends_too: whether the worker ends for the error of another one.
    """

    def __init__(self, name: str, host: str = "") -> None:
        """Begin with nothing."""
        self.name, self.host = name, host
        self.begin()

    def begin(self) -> None:
        """Forget what a process has printed that is started again."""
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL)
        self.traceback: list[bytes] = []
        self.since, self.shown, self._open = 0.0, False, False
        self.ends_too = False

    @property
    def label(self) -> str:
        """Name, with the host where that is another one."""
        return f"{self.name} on {self.host}" if self.host else self.name

    def take(self, lines: Sequence[bytes], errors: bool) -> list[bytes]:
        """Keep lines; return those that are not of a traceback.

        Args:
            lines: as they are on a screen.
            errors: whether they are of stderr, where tracebacks are.
        """
        self.tail.extend(e for e in lines if e.strip() and not NOISE.match(e))
        if not errors:
            return list(lines)
        self.ends_too |= any(ENDS_TOO.encode() in line for line in lines)
        return [line for line in lines if not self._in_traceback(plain(line))]

    def _in_traceback(self, line: bytes) -> bool:
        if line.lstrip().startswith(_HEADS):
            before = [part.strip() for part in self.traceback if part.strip()]
            if not (self._open and before and before[-1] in _CHAINS):
                self.traceback, self.since = [], time.monotonic()
                self.shown = False
            self._open = True
        elif self._open and (
            LOGGED.match(line)
            or NOISE.match(line)
            or len(self.traceback) >= _MOST
            or len(self._message()) > _MESSAGE
        ):
            self._open = False
        if self._open:
            self.traceback.append(line)
        return self._open

    def close(self) -> None:
        """Take what follows for something else than the end of the traceback."""
        self._open = False

    def _message(self) -> list[bytes]:
        """Return the last lines, from that on which names the exception."""
        last = max(
            (i for i, e in enumerate(self.traceback) if e.startswith((b"  ", b"Trac"))),
            default=-1,
        )
        return self.traceback[last + 1 :]

    @property
    def failure(self) -> bytes:
        """Frames and type of what may have ended the process; empty if nothing."""
        message = self._message()
        if not message or len(message) > _MESSAGE:
            return b""
        frames = [line for line in self.traceback if line.startswith(b"  File")]
        return b"".join(frames) + message[0].partition(b":")[0]

    @property
    def last_words(self) -> list[bytes]:
        """Lines of what may have ended the process; where nothing did, its last."""
        return self.traceback if self.failure else list(self.tail)


def first_to_fail(
    transcripts: dict[str, Transcript], worker: str, chief: str
) -> Transcript:
    """Return who failed first: by its traceback, else the one that ended first.

    Args:
        transcripts: by the names of workers.
        worker: the first that ended.
        chief: stands for a worker that failed by the same.
    """
    found = transcripts.setdefault(worker, Transcript(worker))
    if found.failure or found.ends_too:  # else killed, or left; others met its end
        failed = [each for each in transcripts.values() if each.failure]
        found = min(failed, key=lambda each: each.since, default=found)
    own = transcripts.get(chief)
    return own if own and own.failure and own.failure == found.failure else found
