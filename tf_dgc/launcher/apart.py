"""Workers that can do without each other: one by one beside servers, or in groups."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tf_dgc.launcher.workers import ORACLE, Tasks

# A worker that fails for a server's end may be heard of before the server.
_HEARD_SECONDS = 1.0
_LONGEST_PAUSE = 60.0
_STEADY_SECONDS = 600.0


class Group(Protocol):
    """Tasks that run, workers before servers: `WorkerProcesses` here, or `Hosts`.

    Attributes:
        names: what stands before the output of each.
    """

    names: list[str]

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each task, None where it still runs."""

    def signal(self, signum: int, tasks: Sequence[int]) -> None:
        """Send `signum` to tasks that still run."""

    def again(self, task: int, environment: Mapping[str, str]) -> bool:
        """Start a task again that has ended; tell whether that can be done.

        Args:
            task: its number.
            environment: what it has beside what it had.
        """

    def kill(self, give_up: Callable[[], object]) -> None:
        """End what is left, and write the last of its output, or until `give_up()`."""


class Pauses:
    """Pauses before something is started again: each twice as long as the last.

    None is longer than a minute. What has run for ten minutes begins anew.
    """

    def __init__(self, first: float, now: float) -> None:
        """Begin at a time; all in seconds."""
        self._first, self._pause, self._began = first, 0.0, now

    def after_failure(self, now: float) -> float:
        """Return the seconds to wait after a failure at this time."""
        if now - self._began > _STEADY_SECONDS:
            self._pause = 0.0
        self._pause = min(max(2 * self._pause, self._first), _LONGEST_PAUSE)
        self._began = now + self._pause
        return self._pause


class End(NamedTuple):
    """End of a job."""

    status: int
    reason: str = ""  # none where it ends well
    worker: str = ""  # its name, where it is a worker's failure


class Apart:
    """Watches workers of which one that fails ends no other, and starts it again.

    Beside parameter servers each worker is by itself: the job ends with the last one,
    as the first of them has, or with the first server. The groups of a search fail as
    a whole: the job ends as the process of the oracle does, or when all have failed.
    """

    def __init__(
        self,
        tasks: Tasks,
        grace: float,
        pause: float,
        attempt: Callable[[], int | None],
        count: Callable[[str], object],
        say: Callable[[str], object],
    ) -> None:
        """Begin with tasks that have just been started.

        Args:
            tasks: of the job.
            grace: seconds from SIGTERM to SIGKILL.
            pause: seconds before something is started again; see `Pauses`.
            attempt: returns the number of the next start, None where none is left.
            count: counts a start, and says why.
            say: says something.
        """
        self._tasks, self._grace, self._pause = tasks, grace, pause
        self._attempt, self._count, self._say = attempt, count, say
        size = tasks.workers // tasks.groups if tasks.groups else 1
        firsts = range(0, tasks.workers, size)
        self._units = [range(first, first + size) for first in firsts]
        self._began = time.monotonic()
        # Units, when they failed, and which task did so first.
        self._failed: dict[int, tuple[float, int]] = {}
        self._waits: dict[int, float] = {}  # and when to start them again
        self._pauses: dict[int, Pauses] = {}
        self._given_up: set[int] = set()

    def end_of(self, group: Group) -> End | None:
        """Return how the job ends, None where it goes on."""
        codes = group.exit_codes()
        workers = codes[: self._tasks.workers]
        end = self._end_of_servers(workers, codes[len(workers) :])
        if end is not None:
            return end
        for number in range(len(self._units)):
            self._look_after(group, number, codes)
        if self._tasks.groups:
            if len(self._given_up) < len(self._units):
                return None
            first = next(task for task, code in enumerate(workers) if code)
            status = status_of(workers[first] or 1)
            return End(status, "all groups have failed", self._tasks.names()[first])
        failed = {worker for worker, code in enumerate(workers) if code}
        # Who has failed, and is not given up, begins again, or has just begun.
        over = None not in workers and failed <= self._given_up
        return End(status_of(workers[0] or 0)) if over else None

    def _end_of_servers(
        self, workers: Sequence[int | None], servers: Sequence[int | None]
    ) -> End | None:
        lost = [(j, code) for j, code in enumerate(servers) if code is not None]
        if not lost or (
            None not in workers and workers[0] == 0 and self._tasks.servers
        ):
            return None
        server, code = lost[0]
        status = status_of(code)
        if not self._tasks.groups:
            reason = f"server {server} ended with status {status}"
            return End(status or 1, reason, f"ps{server}")
        if status == 0:
            return End(0)
        reason = f"the process of the oracle ended with status {status}"
        return End(status, reason, ORACLE)

    def _look_after(
        self, group: Group, number: int, codes: Sequence[int | None]
    ) -> None:
        """Start a unit again of which a worker has failed, or let others go on."""
        unit, now = self._units[number], time.monotonic()
        failed = [task for task in unit if codes[task]]
        if not failed or number in self._given_up:
            return
        running = [task for task in unit if codes[task] is None]
        if number not in self._failed:
            begun = Pauses(self._pause, self._began)
            pauses = self._pauses.setdefault(number, begun)
            self._failed[number] = now, failed[0]
            self._waits[number] = now + max(pauses.after_failure(now), _HEARD_SECONDS)
            group.signal(signal.SIGTERM, running)
        elif running and now > self._failed[number][0] + self._grace:
            group.signal(signal.SIGKILL, running)
        if now > self._waits[number] and not running:
            _, first = self._failed.pop(number)
            self._replace(group, number, first, codes)

    def _replace(
        self, group: Group, number: int, failed: int, codes: Sequence[int | None]
    ) -> None:
        what, needed = f"worker {failed}", codes[0] != 0
        if self._tasks.groups:
            what, needed = f"worker {failed} of group {number}", True
        text = f"{what} ended with status {status_of(codes[failed] or 0)}"
        attempt = self._attempt() if needed else None
        if attempt is not None:
            own = {"TF_DGC_ATTEMPT": str(attempt)}
            if all([group.again(task, own) for task in self._units[number]]):
                self._count(f"{text}; starting it again")
                return
        self._given_up.add(number)
        self._say(f"{text}; the others go on" if len(self._units) > 1 else text)


def status_of(code: int) -> int:
    """Return the exit status that stands for an exit code of a process."""
    return code if code >= 0 else 128 - code
