"""One job: it starts, is watched, ends as a whole, and may be started again."""

import signal
import sys
import time
from collections.abc import Callable
from typing import Protocol

from tf_dgc.launcher.workers import POLL_SECONDS

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMED_OUT = 124  # as of timeout(1)


class Group(Protocol):
    """Workers that run: `Workers` of this machine, or `Hosts`."""

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each worker, None where it still runs."""

    def end(self, signum: int, give_up: Callable[[], bool]) -> None:
        """Send `signum`; wait until all have ended or `give_up()`; then kill."""

    def kill(self) -> None:
        """End what is left."""


class Job:
    """Runs workers until all have ended well, or one has not.

    Attributes:
        received: the signals that came to this process, and are passed on.
    """

    def __init__(self, name: str, timeout: float | None, grace: float) -> None:
        """Take over the signals of this process.

        Args:
            name: of the program, for what it says.
            timeout: seconds until all is ended, or None.
            grace: seconds from a signal that ends workers to SIGKILL.
        """
        self.received: list[int] = []
        self._name, self._timeout, self._grace = name, timeout, grace
        self._deadline = time.monotonic() + timeout if timeout else float("inf")
        for signum in _PASSED_ON:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, lambda number, _: self.received.append(number))

    def run(self, start: Callable[[int], Group], restarts: int = 0) -> int:
        """Run to the end; start again what fails, with all its workers.

        Args:
            start: starts the workers; takes how often they were started before.
            restarts: how often that may be.

        Returns:
            The exit status to end with: 0, or that of the first worker to fail (128 + N
            for signal N), 124 where the time is out.
        """
        for attempt in range(restarts + 1):
            status = self._attempt(start, attempt)
            over = self.received or status in (0, TIMED_OUT)
            if over or attempt == restarts:
                break
            self._say(f"starting again, {attempt + 1} of {restarts}")
        return status

    def _attempt(self, start: Callable[[int], Group], attempt: int) -> int:
        group = start(attempt)
        codes = group.exit_codes()
        while None in codes and not any(codes) and not self.received:
            if time.monotonic() > self._deadline:
                break
            time.sleep(POLL_SECONDS)
            codes = group.exit_codes()
        sent = signal.SIGTERM
        if self.received:
            number = self.received[0]
            status, reason = 128 + number, f"received signal {number}"
            sent = signal.Signals(number)
        elif failed := [(rank, code) for rank, code in enumerate(codes) if code]:
            rank, code = failed[0]
            status = code if code > 0 else 128 - code
            reason = f"worker {rank} ended with status {status}"
        elif None in codes:
            status, reason = TIMED_OUT, f"no end after {self._timeout:g} seconds"
        else:
            group.kill()
            return 0
        self._say(f"{reason}; ending all workers")
        seen, last = len(self.received), time.monotonic() + self._grace
        group.end(sent, lambda: time.monotonic() > last or len(self.received) > seen)
        return status

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{self._name}: {text}\n")
        sys.stderr.flush()
