"""Warnings of workers that are not the chief: the same ones once."""

import re
import time
from collections.abc import Sequence

from tf_dgc.launcher.transcript import LOGGED, NOISE, plain

# For so long the same warning of other workers is waited for.
_TOGETHER_SECONDS = 1.0
_KNOWN = 2000  # lines and warnings that are remembered
_NAMED = 4  # workers
# Levels below a warning, as loggers of Python, absl and TensorFlow write them.
_LOW = re.compile(rb"(?:[^a-z]{0,40}[\[ :-])?(?:DEBUG|INFO)\b|[ID]\d{4} \d\d:\d\d:")


class _Warning:
    """Lines that some workers have on stderr."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines, self.since, self.shown = lines, time.monotonic(), False
        self.workers: dict[str, None] = {}

    def text(self) -> list[bytes]:
        """Return the lines, behind the names of the workers."""
        names = list(self.workers)
        label = ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)
        if len(names) > 1:
            label = f"{len(names)} workers: {label}"
        return [f"[{label}] ".encode() + line for line in self.lines]


class Warnings:
    """Warnings of the workers on stderr, without those of the chief."""

    def __init__(self) -> None:
        """Begin with none."""
        self._warnings: dict[bytes, _Warning] = {}
        self._said: dict[bytes, None] = {}  # lines of the chief

    def hear(self, worker: str, lines: Sequence[bytes]) -> None:
        """Take lines of another worker's stderr, and leave out what is no warning."""
        block: list[bytes] = []
        for line in lines:
            if line[:1] in b" \t\n\r" and block:
                block.append(line)
                continue
            self.take(worker, block)
            block = [line]
        self.take(worker, block)

    def take(self, worker: str, lines: Sequence[bytes]) -> None:
        """Show lines in a while, unless they are known or no warning."""
        if not lines or not lines[0].strip():
            return
        first = plain(lines[0])
        if _LOW.match(first) or NOISE.match(first) or len(self._warnings) > _KNOWN:
            return
        key = LOGGED.sub(b"", b"".join(lines), 1)
        warning = self._warnings.setdefault(key, _Warning(list(lines)))
        warning.workers[worker] = None

    def remember(self, lines: Sequence[bytes]) -> None:
        """Take lines of the chief, which are not shown once more."""
        for line in lines:
            self._said[plain(line).strip()] = None
        while len(self._said) > _KNOWN:
            del self._said[next(iter(self._said))]

    def leave_out(self, lines: Sequence[bytes]) -> None:
        """Take lines of another worker that are shown at the end, once."""
        there = set(lines)
        for warning in self._warnings.values():
            warning.shown |= there.issuperset(warning.lines)

    def due(self, now: float) -> list[bytes]:
        """Return the lines of warnings that have waited long enough for others."""
        lines = []
        for warning in self._warnings.values():
            if not warning.shown and warning.since + _TOGETHER_SECONDS < now:
                warning.shown = True
                if plain(warning.lines[0]).strip() not in self._said:
                    lines += warning.text()
        return lines
