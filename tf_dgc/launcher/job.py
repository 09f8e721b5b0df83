"""One job: it starts, is watched, ends as a whole, and may be started again."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tf_dgc.launcher import output, screen
from tf_dgc.launcher.workers import POLL_SECONDS, CannotStart, NotThere, obstacle_of

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMED_OUT = 124  # as of timeout(1)
CANNOT_START = 127  # as of a shell
# A worker that fails for a server's end may be heard of before the server.
_HEARD_SECONDS = 1.0
_LONGEST_PAUSE = 60.0
_STEADY_SECONDS = 600.0


class Group(Protocol):
    """Tasks that run, workers before servers: `Workers` of this machine, or `Hosts`."""

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


class Job:
    """Runs workers until all have ended well, or one has not.

    With servers, workers do not need each other: one that fails is started again by
    itself, as long as restarts are left, and else the others go on without it. The job
    ends with the last worker, as the first of them has, or with the first server.

    Attributes:
        received: the signals that came to this process, and are passed on.
        view: shows what is to be seen.
    """

    def __init__(
        self,
        name: str,
        timeout: float | None,
        grace: float,
        servers: int = 0,
        view: screen.View | None = None,
    ) -> None:
        """Take over the signals of this process.

        Args:
            name: of the program, for what it says.
            timeout: seconds until all is ended, or None.
            grace: seconds from a signal that ends workers to SIGKILL.
            servers: how many of the tasks, the last ones, are parameter servers.
            view: shows what is to be seen; by default all.
        """
        self.view = screen.All() if view is None else view
        self.received: list[int] = []
        output.NAME[0] = name
        output.open_standard_files()
        self._timeout, self._grace = timeout, grace
        self._servers = servers
        self._deadline = time.monotonic() + timeout if timeout else float("inf")
        for signum in PASSED_ON:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, lambda number, _: self.received.append(number))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides exit codes

    def run(
        self, start: Callable[[int], Group], restarts: int = 0, pause: float = 1.0
    ) -> int:
        """Run to the end; start again what fails.

        Args:
            start: starts all tasks; takes how often any were started again before.
            restarts: how often that may be.
            pause: seconds before the first time; see `Pauses`.

        Returns:
            The exit status to end with: 0, or that of the first worker to fail (128 + N
            for signal N), 124 where the time is out, 127 where they cannot be started.
        """
        self._restarts, self._again, self._pause = restarts, 0, pause
        pauses = Pauses(pause, time.monotonic())
        while True:
            status, final = self._attempt(start)
            if final or self._again == restarts:
                return status
            seconds = pauses.after_failure(time.monotonic())
            self._count("starting again", f" in {seconds:g} s")
            end, over = None, time.monotonic() + seconds
            while time.monotonic() < over and (end := self._end_by_itself()) is None:
                time.sleep(POLL_SECONDS)
            if end is not None:
                self._say(end.reason)
                return end.status

    def _count(self, text: str, when: str = "") -> None:
        self._again += 1
        self._say(f"{text}, {self._again} of {self._restarts}{when}")

    def _attempt(self, start: Callable[[int], Group]) -> tuple[int, bool]:
        """Return the status, and whether the job is not to be started again."""
        try:
            group = start(self._again)
        except (CannotStart, OSError) as error:
            if self.received:
                return 128 + self.received[0], True
            obstacle = obstacle_of("tasks", error)
            self._say(str(obstacle))
            return CANNOT_START, isinstance(obstacle, NotThere)
        self._failed: dict[int, float] = {}  # workers, and when to start them again
        self._pauses: dict[int, Pauses] = {}
        self._began = time.monotonic()
        self._given_up: set[int] = set()
        while (end := self._end_of(group)) is None:
            time.sleep(POLL_SECONDS)
            self.view.tick()
        if end.worker:
            self.view.ending(end.reason)
        elif end.reason:
            self._say(f"{end.reason}; ending all workers")
        sent = signal.Signals(self.received[0]) if self.received else signal.SIGTERM
        self._finish(group, sent)
        self.view.ended(end.worker)
        final = bool(self.received) or end.status in (0, TIMED_OUT)
        return end.status, final

    def _end_by_itself(self) -> End | None:
        """Return how the job ends by a signal, or by the time."""
        if self.received:
            number = self.received[0]
            return End(128 + number, f"received signal {number}")
        if time.monotonic() > self._deadline:
            return End(TIMED_OUT, f"no end after {self._timeout:g} seconds")
        return None

    def _end_of(self, group: Group) -> End | None:
        """Return how the job ends, None where it goes on."""
        if self.received:
            return self._end_by_itself()
        codes = group.exit_codes()
        workers = codes[: len(codes) - self._servers]
        servers = codes[len(workers) :]
        end = self._apart(group, workers, servers) if servers else _together(workers)
        return end or self._end_by_itself()

    def _apart(
        self,
        group: Group,
        workers: Sequence[int | None],
        servers: Sequence[int | None],
    ) -> End | None:
        """Return how workers end that do not need each other."""
        lost = [(j, code) for j, code in enumerate(servers) if code is not None]
        over = None not in workers
        if lost and not (over and workers[0] == 0):
            server, own = lost[0]
            status = _status(own)
            reason = f"server {server} ended with status {status}"
            return End(status or 1, reason, f"ps{server}")
        now = time.monotonic()
        for rank, code in enumerate(workers):
            if code and rank not in self._given_up:
                if rank not in self._failed:
                    pauses = self._pauses.setdefault(
                        rank, Pauses(self._pause, self._began)
                    )
                    wait = max(pauses.after_failure(now), _HEARD_SECONDS)
                    self._failed[rank] = now + wait
                if now > self._failed[rank]:
                    self._replace(group, rank, code, needed=workers[0] != 0)
                over = False
        return End(_status(workers[0] or 0)) if over else None

    def _replace(self, group: Group, rank: int, code: int, needed: bool) -> None:
        """Start a worker again that has failed, or let the others go on."""
        del self._failed[rank]
        text = f"worker {rank} ended with status {_status(code)}"
        if needed and self._again < self._restarts:
            attempt = {"TF_DGC_ATTEMPT": str(self._again + 1)}
            if group.again(rank, attempt):
                self._count(f"{text}; starting it again")
                return
        self._given_up.add(rank)
        self._say(f"{text}; the others go on")

    def _finish(self, group: Group, sent: int) -> None:
        """End the workers by a signal, then the servers, then what is left."""
        seen, last = len(self.received), time.monotonic() + self._grace
        count = len(group.exit_codes())
        workers = count - self._servers
        for tasks, signum in (
            (range(workers), sent),
            (range(workers, count), signal.SIGTERM),
        ):
            group.signal(signum, tasks)
            while any(code is None for code in _of(group.exit_codes(), tasks)):
                if time.monotonic() > last or len(self.received) > seen:
                    break
                time.sleep(POLL_SECONDS)
        limit = self._deadline + self._grace
        group.kill(lambda: len(self.received) > seen or time.monotonic() > limit)

    def _say(self, text: str) -> None:
        self.view.note(text)


def _together(workers: Sequence[int | None]) -> End | None:
    """Return how workers end that need each other."""
    if failed := [(rank, code) for rank, code in enumerate(workers) if code]:
        rank, code = failed[0]
        reason = f"worker {rank} ended with status {_status(code)}"
        return End(_status(code), reason, str(rank))
    return None if None in workers else End(0)


def _of(codes: Sequence[int | None], tasks: range) -> Sequence[int | None]:
    return codes[tasks.start : tasks.stop]


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code
