#!/usr/bin/env python
"""Let something happen to one of two workers, and see how the other ends; a table.

    scripts/faults.py --jobs 3 --json faults.json     # each pair of settings once
    scripts/faults.py --all                           # all settings: an hour
    scripts/faults.py --rank 0 --kinds stop --ways hybrid --moments sparse round

A case is a kind of fault, a way to start the workers, a strategy, and the moment at
which it comes. The workers are real processes of tests/jobs/fault.py. A case is well
when all others stopped within the timeout and MARGIN_SECONDS, no exit status was 0, the
other worker said why and who is missing, and no process is left.

| kind | what happens |
|---|---|
| kill, stop | a worker gets SIGKILL, or SIGSTOP |
| raise | it raises an exception that nobody catches |
| network | its link goes down (network namespaces, see scripts/netlab.py) |
| interrupt, terminate | Ctrl-C or SIGTERM to the launcher, or to all without one |

| way | what starts the workers | transport |
|---|---|---|
| TF_CONFIG | nothing but themselves | collective |
| run_local | scripts/run_local.py | collective |
| horovod | horovodrun | horovod |
| hybrid | horovodrun | hybrid |
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import netlab

from tf_dgc.launcher import workers

HERE = pathlib.Path(__file__).resolve().parent
KINDS = ("kill", "stop", "raise", "network", "interrupt", "terminate")
WAYS = {
    "TF_CONFIG": "collective",
    "run_local": "collective",
    "horovod": "horovod",
    "hybrid": "hybrid",
}
# The strategies that have such a moment.
MOMENTS = {
    "start": ("dense", "dgc", "averaging"),
    "warmup": ("dgc",),
    "sparse": ("dgc",),
    "round": ("averaging",),
    "flight": ("flight",),
    "activations": ("split",),
    "evaluation": ("dense", "dgc", "averaging"),
    "checkpoint": ("dense", "dgc", "averaging"),
}
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
# Whichever collective the others wait in, a signal finds them alike.
_SIGNALLED_IN = ("start", "sparse", "flight", "checkpoint")
MARGIN_SECONDS = 30.0  # interpreters take seconds to end where much else runs
_START_SECONDS = 150.0
_POLL_SECONDS = 0.05
_LEFT_SECONDS = 10.0  # helpers of a launcher end after it
# Where much else runs, workers may not even meet within so short a timeout.
_TRIALS, _NEVER = 2, "no fault came"
_RAISED = "ArithmeticError: "  # by fault.py
_LINE = re.compile(r"\[(\d+)\](?:<std(?:err|out)>:| )(.*)")
# What TensorFlow puts around a message.
_LOGGED = re.compile(
    r"[EWI]\d{4} [\d:. ]+\S+\] |Aborting \w+ with [A-Z_]+: |"
    r"BaseCollectiveExecutor::StartAbort [A-Z_]+: |Collective ops is aborted by: |"
    r"Error reported from \S+: | \[type\.googleapis.*"
)


class Case(NamedTuple):
    """What happens, to whom and when."""

    kind: str
    way: str
    strategy: str
    moment: str

    @property
    def makes_sense(self) -> bool:
        """Whether there can be such a case."""
        if self.kind == "network" and self.way == "run_local":
            return False  # which starts all on one machine
        if self.kind in SIGNALS and (
            self.moment not in _SIGNALLED_IN
            # Nothing is set up yet: the workers are any processes of Python.
            or (self.way == "TF_CONFIG" and self.moment == "start")
        ):
            return False
        return self.strategy in MOMENTS[self.moment]

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """The pairs of settings that are to be met once."""
        kind, way, strategy, moment = self
        return {(kind, way), (kind, moment), (way, moment), (strategy, moment)}


@dataclasses.dataclass
class Outcome:
    """How a case ended.

    Attributes:
        case: the case.
        seconds: from the fault to the end of the last of the others; None if they went
            on.
        codes: exit status of each process that was started: launcher, or workers.
        said: the line of the other worker, or of the launcher, that tells most.
        problems: what is not as it should be.
    """

    case: Case
    seconds: float | None
    codes: list[int | None]
    said: str
    problems: list[str]


def product() -> list[Case]:
    """Returns all cases."""
    strategies = ("dense", "dgc", "averaging", "flight", "split")
    found = itertools.product(KINDS, WAYS, strategies, MOMENTS)
    return [case for each in found if (case := Case(*each)).makes_sense]


def covering(
    cases: Sequence[Case],
    pairs: Callable[[Case], set[object]] = lambda case: case.pairs,
) -> list[Case]:
    """Returns cases of these in which every pair of theirs is met; few, the same ones.

    Takes the case that meets most pairs that were not met, until there are none.

    Args:
        cases: to choose from.
        pairs: those of a case that are to be met.
    """
    left = set().union(*map(pairs, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        chosen.append(best)
        left -= pairs(best)
    return sorted(chosen, key=cases.index)


def says(way: str, rank: int) -> re.Pattern[str]:
    """Returns what the others, or the launcher, have to say: why, and who."""
    who = rf"task[:=]{rank}\b|[Ww]orker {rank}\b|ranks \[{rank}\]|rank {rank}\b"
    known = {
        "horovod": rf"|^Horovod has been|not all workers entered|Process {rank} exit",
        "hybrid": rf"|Process {rank} exit",
    }
    return re.compile(who + known.get(way, ""))


def said_in(text: str, case: Case, rank: int) -> str:
    """Returns the line that tells who: of another worker, else of the launcher.

    Where both end at once, horovodrun may name another than the rank that has raised,
    and end that before the others say who it was: then its own error counts.
    """
    found, pattern = [], says(case.way, rank)
    blamed = re.search(r"^Terminating .* after failure of Process (\d+)", text, re.M)
    wrongly = case.kind == "raise" and blamed is not None and int(blamed[1]) != rank
    for line in text.splitlines():
        of = _LINE.match(line)
        teller, rest = (int(of[1]), of[2]) if of else (None, line)
        own = teller == rank
        if (wrongly and rest.startswith(_RAISED)) if own else pattern.search(rest):
            said = _LOGGED.sub("", rest).strip()
            plain = bool(re.search("No longer reachable|failed:|did not come", said))
            found.append((own, teller is None, not plain, said))
    return min(found, key=lambda each: each[:3])[3] if found else ""


def run(case: Case, timeout: float, rank: int = 1) -> Outcome:
    """Runs a case to its end, and ends what is left of it.

    Args:
        case: one that makes sense.
        timeout: TF_DGC_TIMEOUT of the workers, in seconds.
        rank: whom it happens to.

    Raises:
        netlab.LabError: the network cannot be cut here.
    """
    for _ in range(_TRIALS):
        with (
            tempfile.TemporaryDirectory(prefix="tf_dgc-faults-") as name,
            contextlib.ExitStack() as stack,
        ):
            job = _Job(case, pathlib.Path(name), timeout, rank, stack)
            try:
                outcome = job.outcome()
            finally:
                job.end()
        if _NEVER not in outcome.problems:
            break
    return outcome


class _Job:
    """The processes of a case."""

    def __init__(
        self,
        case: Case,
        folder: pathlib.Path,
        timeout: float,
        rank: int,
        stack: contextlib.ExitStack,
    ) -> None:
        self._case, self._folder = case, folder
        self._timeout, self._rank = timeout, rank
        # By it the processes are known, also those that have sessions of their own.
        self._mark = f"TF_DGC_FAULTS={folder}".encode()
        tests = HERE.parent / "tests"
        worker = tests / "jobs" / "fault.py"
        folders = tests / "lean", HERE.parent, tests, worker.parent
        command = [sys.executable, str(worker), "--folder", str(folder)]
        command += ["--kind", case.kind, "--moment", case.moment, "--rank", str(rank)]
        command += ["--strategy", case.strategy, "--transport", WAYS[case.way]]
        environment = {
            "TF_DGC_FAULTS": str(folder),
            "TF_DGC_TIMEOUT": str(timeout),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PYTHONUNBUFFERED": "1",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._output = stack.enter_context((folder / "output").open("wb"))
        if case.kind == "network":
            lab = stack.enter_context(netlab.Laboratory(2, "1gbit"))
            command += ["--cut", f"ip -n {lab.switch} link set port{rank + 1} down"]
            launch = "tf_config" if case.way == "TF_CONFIG" else "horovodrun"
            for host, (line, added) in enumerate(lab.lines(command, launch)):
                self._follow(lab.start(host, line, environment | added), host)
            return
        for rank, (line, added) in enumerate(self._lines(command)):
            self._follow(_start(line, environment | added), rank)

    def _lines(self, command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        """Returns commands and environments of what is to be started."""
        if self._case.way == "TF_CONFIG":
            there = [f"127.0.0.1:{port}" for port in workers.free_ports(2)]
            return [
                (command, {"TF_CONFIG": workers.tf_config(there, rank)})
                for rank in range(2)
            ]
        if self._case.way == "run_local":
            own = [sys.executable, str(HERE / "run_local.py"), "-n", "2", "--"]
        else:
            own = ["horovodrun", "-np", "2"]
        return [([*own, *command], {})]

    def _follow(self, process: "subprocess.Popen[bytes]", rank: int) -> None:
        self._processes.append(process)
        prefix = f"[{rank}] ".encode() if self._case.way == "TF_CONFIG" else b""
        for source in (process.stdout, process.stderr):
            arguments = (source, self._output, prefix)
            reader = threading.Thread(
                target=workers.forward, args=arguments, daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def outcome(self) -> Outcome:
        """Waits for the fault and for the end of the others; tells how it was."""
        case, problems = self._case, []
        fault = self._folder / "fault"
        self._wait(_START_SECONDS, lambda: fault.exists() or all(self._ended()))
        if not fault.exists():
            self.end()
            return Outcome(case, None, self._codes(), "", [_NEVER, self._tail()])
        begin = float(fault.read_text())
        if case.kind in SIGNALS:
            time.sleep(1.0)  # the other has come to where it waits
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, SIGNALS[case.kind])
        seconds = None
        if self._wait(self._timeout + MARGIN_SECONDS, self._others_ended):
            seconds = time.time() - begin
        else:
            problems.append("the others went on")
        # A launcher may need twice five seconds until it kills one that is stopped.
        self._wait(MARGIN_SECONDS, lambda: None not in self._expected_codes())
        self._wait(_LEFT_SECONDS, lambda: not self._left())
        problems += [f"left: {left}" for left in self._left()]
        self.end()
        # Terminated itself, horovodrun returns 0 now and then.
        own = case.kind == "terminate" and case.way in ("horovod", "hybrid")
        if not own and not all(self._expected_codes()):
            problems.append(f"exit status {self._codes()}")
        text = (self._folder / "output").read_text(errors="replace")
        said = said_in(text, case, self._rank)
        if case.kind not in SIGNALS and not said:
            problems.append("nobody said why and who")
        return Outcome(case, seconds, self._codes(), said, problems)

    def _wait(self, seconds: float, condition: Callable[[], object]) -> bool:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return bool(condition())

    def _pid(self, rank: int) -> int | None:
        """Returns the process of a worker, while it is alive."""
        with contextlib.suppress(FileNotFoundError):
            pid = int((self._folder / f"pid.{rank}").read_text())
            return pid if self._is_own(pid) else None
        return None

    def _is_own(self, pid: int) -> bool:
        """Tells whether a process is of this job, and alive."""
        with contextlib.suppress(OSError):
            # That of a zombie is empty.
            environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
            return self._mark in environment.split(b"\0")
        return False

    def _alive(self) -> dict[int, str]:
        """Returns the processes of this job: number and command line."""
        found = {}
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            if self._is_own(int(path.name)):
                with contextlib.suppress(OSError):
                    line = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(path.name)] = line.decode(errors="replace")
        return found

    def _others_ended(self) -> bool:
        """Whether all that can still end by themselves did."""
        stopped = self._rank if self._case.kind == "stop" else None
        return all(ended for rank, ended in enumerate(self._ended()) if rank != stopped)

    def _ended(self) -> list[bool]:
        """Whether each worker has been there, and is no more; or can never be."""
        if None not in self._codes():
            return [True, True]
        return [
            (self._folder / f"pid.{rank}").exists() and self._pid(rank) is None
            for rank in (0, 1)
        ]

    @property
    def _nobody_ends_it(self) -> bool:
        """Whether a worker is stopped, and there is no launcher to kill it."""
        return self._case.kind == "stop" and self._case.way == "TF_CONFIG"

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _expected_codes(self) -> list[int | None]:
        codes = self._codes()
        if self._nobody_ends_it:
            del codes[self._rank]
        return codes

    def _left(self) -> list[str]:
        """Returns the command lines of processes that should have ended."""
        stopped = self._pid(self._rank) if self._nobody_ends_it else None
        return [line for pid, line in self._alive().items() if pid != stopped]

    def end(self) -> None:
        """Kills what is left, and collects the last of the output."""
        while alive := self._alive():
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join(timeout=2)
        for process in self._processes:
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()

    def _tail(self) -> str:
        text = (self._folder / "output").read_text(errors="replace")
        return text[-2000:]


def _start(
    command: Sequence[str], environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run_all(
    cases: Sequence[Case], timeout: float, jobs: int, rank: int = 1
) -> list[Outcome]:
    """Runs cases, some side by side: most of the time they wait."""
    with _interruptible(), concurrent.futures.ThreadPoolExecutor(jobs) as pool:

        def told(case: Case) -> Outcome:
            outcome = run(case, timeout, rank)
            print(row(outcome), file=sys.stderr, flush=True)
            return outcome

        return list(pool.map(told, cases))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets what is started get Ctrl-C, though a shell ignores it in the background."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_WIDTH = 100  # of what they said
COLUMNS = (*Case._fields, "seconds", "exit status", "said")


def row(outcome: Outcome) -> str:
    """Returns a row of the table."""
    seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    codes = " ".join(map(str, outcome.codes))
    said = "; ".join(f"PROBLEM: {each}" for each in outcome.problems)
    said = said or textwrap.shorten(outcome.said, _WIDTH, placeholder=" ...")
    cells = [*outcome.case, seconds, codes, said.replace("|", "\\|").replace("\n", " ")]
    return f"| {' | '.join(cells)} |"


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the table, in markdown."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*head, *map(row, outcomes)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases; returns 1 where one is not well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, choices in (("kinds", KINDS), ("ways", WAYS), ("moments", MOMENTS)):
        choices = tuple(choices)
        parser.add_argument(
            f"--{name}", nargs="+", choices=choices, default=choices, metavar="NAME"
        )
    parser.add_argument("--all", action="store_true", help="not only each pair once")
    parser.add_argument("--timeout", type=float, default=12.0, help="TF_DGC_TIMEOUT")
    parser.add_argument("--rank", type=int, default=1, choices=(0, 1), help="whose")
    parser.add_argument("--jobs", type=int, default=2, help="cases side by side")
    parser.add_argument("--json", type=pathlib.Path, help="write the outcomes")
    args = parser.parse_args(argv)
    cases = [
        case
        for case in product()
        if case.kind in args.kinds
        and case.way in args.ways
        and case.moment in args.moments
    ]
    netlab.end_on_signals()
    chosen = cases if args.all else covering(cases)
    outcomes = run_all(chosen, args.timeout, args.jobs, args.rank)
    print(table(outcomes))
    if args.json:
        found = [dataclasses.asdict(outcome) for outcome in outcomes]
        args.json.write_text(json.dumps(found, indent=1))
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
