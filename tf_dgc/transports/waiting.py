"""A line that says for whom a worker waits at start."""

import sys
import time
from collections.abc import Iterable, Sequence

_FIRST_SECONDS = 5.0  # nothing is said of shorter waits
_LIVE_SECONDS = 1.0  # between two states of the line, on a terminal


class Waiting:
    """Says on stderr who is missing: on a terminal in a line that is kept up to date.

    Elsewhere it says so after 5 seconds, 10, 20, 40 and so on. Of several workers that
    wait, the first says it.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        """Begin to wait.

        Args:
            rank: of this worker.
            names: of all workers, as their addresses; "" where it is not known.
        """
        self._rank, self._names = rank, names
        self._began, self._next = time.monotonic(), _FIRST_SECONDS
        self._live = sys.stderr is not None and sys.stderr.isatty()
        self._shown = False

    def still(self, missing: Iterable[int]) -> None:
        """Say who is missing, if it is time; called again and again."""
        seconds = time.monotonic() - self._began
        ranks = sorted(missing)
        first = all(rank in ranks for rank in range(self._rank))
        if seconds < self._next or not ranks or not first:
            return
        self._next = seconds + (_LIVE_SECONDS if self._live else seconds)
        text = line(ranks, self._names, seconds)
        self._write(f"\r{text}\x1b[K" if self._live else f"{text}\n")
        self._shown = True

    def over(self) -> None:
        """Take the line away."""
        if self._shown and self._live:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


def line(ranks: Sequence[int], names: Sequence[str], seconds: float) -> str:
    """Return what is said of workers that are missing."""
    named = [f"{r} ({names[r]})" if names[r] else str(r) for r in ranks[:4]]
    more = f" and {len(ranks) - 4} more" * (len(ranks) > 4)
    several = "s" * (len(ranks) > 1)
    return f"waiting for worker{several} {', '.join(named)}{more}, {seconds:.0f} s"
