"""Lines that say for whom, or for what, a process waits."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

_FIRST_SECONDS = 5.0  # nothing is said of shorter waits
_LIVE_SECONDS = 1.0  # between two states of the line, on a terminal


class WaitReport:
    """A line on stderr that says who is missing; on a terminal it is kept up to date.

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
        ranks = sorted(missing)
        if ranks and all(rank in ranks for rank in range(self._rank)):
            self.say(missing_workers(ranks, self._names))

    def say(self, text: str) -> None:
        """Say a text and for how long that is so, if it is time."""
        seconds = time.monotonic() - self._began
        if seconds < self._next:
            return
        self._next = seconds + (_LIVE_SECONDS if self._live else seconds)
        text = f"{text}, {seconds:.0f} s"
        self._write(f"\r{text}\x1b[K" if self._live else f"{text}\n")
        self._shown = True

    def again(self) -> None:
        """Take the line away, and begin to wait anew."""
        self.over()
        self._shown = False
        self._began, self._next = time.monotonic(), _FIRST_SECONDS

    def over(self) -> None:
        """Take the line away."""
        if self._shown and self._live:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


@contextlib.contextmanager
def telling(text: str) -> Iterator[None]:
    """Say on stderr what this process is at, where that takes long."""
    waiting, over = WaitReport(0, ()), threading.Event()

    def watch() -> None:
        while not over.wait(_LIVE_SECONDS):
            waiting.say(text)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        waiting.over()


def missing_workers(ranks: Sequence[int], names: Sequence[str]) -> str:
    """Return what is said of workers that are missing."""
    named = [f"{r} ({names[r]})" if names[r] else str(r) for r in ranks[:4]]
    more = f" and {len(ranks) - 4} more" * (len(ranks) > 4)
    several = "s" * (len(ranks) > 1)
    return f"waiting for worker{several} {', '.join(named)}{more}"
