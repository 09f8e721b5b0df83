"""One job: it starts, is watched, ends as a whole, and may be started again."""

import signal
import time
from collections.abc import Callable, Sequence

from tf_dgc.launcher import output, screen
from tf_dgc.launcher.apart import Apart, End, Group, Pauses, status_of
from tf_dgc.launcher.workers import (
    POLL_SECONDS,
    CannotStart,
    NotThere,
    Tasks,
    obstacle_of,
)

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMED_OUT = 124  # as of timeout(1)
CANNOT_START = 127  # as of a shell
# A worker that ends well and before others may leave them waiting for it.
_ALONE_SECONDS = 10.0


class EndedEarly:
    """Workers that have ended well, while others run: told once."""

    def __init__(self) -> None:
        """Begin with workers that run."""
        self._since: dict[int, float] = {}
        self._said = False

    def notice(self, codes: Sequence[int | None], now: float) -> str:
        """Return what there is to say, or "".

        Args:
            codes: exit code of each worker, None where it still runs.
            now: in seconds.
        """
        running = [rank for rank, code in enumerate(codes) if code is None]
        for rank, code in enumerate(codes):
            if code == 0:
                self._since.setdefault(rank, now)
        early = [r for r, t in self._since.items() if now - t >= _ALONE_SECONDS]
        if self._said or not (early and running):
            return ""
        self._said = True
        return (
            f"{_named(early)} ended with status 0 more than {_ALONE_SECONDS:g} s ago; "
            f"{_named(running)} still run{'s' * (len(running) == 1)}"
        )


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"worker{'s' * (len(ranks) > 1)} {numbers}"


class OwnEnd:
    """End of a job by a signal that this process got, or by the time.

    Attributes:
        received: the signals that came to this process, and are passed on.
        deadline: when the time is out.
    """

    def __init__(self, timeout: float | None) -> None:
        """Take over the signals of this process.

        Args:
            timeout: seconds until all is ended, or None.
        """
        self.received: list[int] = []
        self._timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout else float("inf")
        for signum in PASSED_ON:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, lambda number, _: self.received.append(number))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides exit codes

    def now(self) -> End | None:
        """Return how the job ends by these, None where it goes on."""
        if self.received:
            number = self.received[0]
            return End(128 + number, f"received signal {number}")
        if time.monotonic() > self.deadline:
            return End(TIMED_OUT, f"no end after {self._timeout:g} seconds")
        return None

    def wait(self, seconds: float) -> End | None:
        """Wait so long, or until the job ends by these; return how."""
        end, over = None, time.monotonic() + seconds
        while time.monotonic() < over and (end := self.now()) is None:
            time.sleep(POLL_SECONDS)
        return end


class Job:
    """Runs workers until all have ended well, or one has not.

    Beside servers, and in groups, those that fail are started again by themselves, as
    long as restarts are left, and else the others go on without them; see `Apart`.

    Attributes:
        received: the signals that came to this process, and are passed on.
        view: shows what is to be seen.
        before_servers: called with the job's status when all workers have ended, and
            servers have not.
    """

    def __init__(
        self,
        name: str,
        timeout: float | None,
        grace: float,
        tasks: Tasks | None = None,
        view: screen.View | None = None,
    ) -> None:
        """Take over the signals of this process.

        Args:
            name: of the program, for what it says.
            timeout: seconds until all is ended, or None.
            grace: seconds from a signal that ends workers to SIGKILL.
            tasks: where not all of them are workers that need each other.
            view: shows what is to be seen; by default all.
        """
        self.view = screen.All() if view is None else view
        self.before_servers: Callable[[int], None] = lambda status: None
        output.NAME[0] = name
        output.open_standard_files()
        self._grace, self._tasks = grace, tasks or Tasks(0)
        self._own_end = OwnEnd(timeout)
        self.received = self._own_end.received

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
            if (end := self._own_end.wait(seconds)) is not None:
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
        self._early = EndedEarly()
        self._apart: Apart | None = None
        if self._tasks.others:
            self._apart = Apart(
                self._tasks,
                self._grace,
                self._pause,
                self._next_attempt,
                self._count,
                self._say,
            )
        while (end := self._end_of(group)) is None:
            time.sleep(POLL_SECONDS)
            self.view.tick()
        if end.worker:
            self.view.ending(end.reason)
        elif end.reason:
            self._say(f"{end.reason}; ending all workers")
        sent = signal.Signals(self.received[0]) if self.received else signal.SIGTERM
        self._finish(group, sent, end.status)
        self.view.ended(end.worker)
        final = bool(self.received) or end.status in (0, TIMED_OUT)
        return end.status, final

    def _end_of(self, group: Group) -> End | None:
        """Return how the job ends, None where it goes on."""
        if self.received:
            return self._own_end.now()
        if self._apart is not None:
            end = self._apart.end_of(group)
        else:
            codes = group.exit_codes()
            end = _together(codes, group.names)
            if notice := self._early.notice(codes, time.monotonic()):
                self._say(notice)
        return end or self._own_end.now()

    def _next_attempt(self) -> int | None:
        return self._again + 1 if self._again < self._restarts else None

    def _finish(self, group: Group, sent: int, status: int) -> None:
        """End the workers by a signal, then the servers, then what is left."""
        seen, last = len(self.received), time.monotonic() + self._grace
        count = len(group.exit_codes())
        workers = count - self._tasks.others
        for tasks, signum in (
            (range(workers), sent),
            (range(workers, count), signal.SIGTERM),
        ):
            if tasks.start:
                self.before_servers(status)
            group.signal(signum, tasks)
            while any(code is None for code in _of(group.exit_codes(), tasks)):
                if time.monotonic() > last or len(self.received) > seen:
                    break
                time.sleep(POLL_SECONDS)
        limit = self._own_end.deadline + self._grace
        group.kill(lambda: len(self.received) > seen or time.monotonic() > limit)

    def _say(self, text: str) -> None:
        self.view.note(text)


def _together(workers: Sequence[int | None], names: Sequence[str]) -> End | None:
    """Return how workers end that need each other."""
    if failed := [(k, code) for k, code in enumerate(workers) if code]:
        k, code = failed[0]
        reason = f"worker {names[k]} ended with status {status_of(code)}"
        return End(status_of(code), reason, names[k])
    return None if None in workers else End(0)


def _of(codes: Sequence[int | None], tasks: range) -> Sequence[int | None]:
    return codes[tasks.start : tasks.stop]
