"""The worker processes of one machine: started, watched and ended together."""

import contextlib
import ctypes
import errno
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tf_dgc.launcher import leftovers, output, screen
from tf_dgc.launcher.output import forward as forward  # for scripts that start others

POLL_SECONDS = 0.05
# Of a machine that has too much to do; it may pass.
_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
QUIET = "TF_CPP_MIN_LOG_LEVEL"
_DEFAULTS = {"PYTHONHASHSEED": "0", QUIET: "3"}
ORACLE = "oracle"  # name of the task in which one decides


# Below those that Linux gives to connections by itself: one of these could be taken
# before the worker listens that it is for.
_PORTS = range(20_000, 32_000)
_MOST_CHOSEN = 128
_chosen: list[socket.socket] = []  # by whose names other processes know of choices


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports that nobody listens on.

    Nor will a process that has chosen them here, and is still starting what listens.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                break
            own = stack.enter_context(socket.socket())
            mark = socket.socket(socket.AF_UNIX)
            try:
                mark.bind(f"\0tf_dgc port {port}")  # of the same network as the port
                own.bind(("", port))
            except OSError:
                mark.close()
            else:
                found.append(port)
                _chosen.append(mark)
    while len(_chosen) > max(_MOST_CHOSEN, count):
        _chosen.pop(0).close()
    return found


def tf_config(addresses: Sequence[str], task: int, servers: int = 0) -> str:
    """Return the `TF_CONFIG` of a task.

    Args:
        addresses: of each task; the last ones are of the servers.
        task: its number.
        servers: how many parameter servers there are.
    """
    workers = len(addresses) - servers
    cluster = {"worker": list(addresses[:workers])}
    if servers:
        cluster["ps"] = list(addresses[workers:])
    kind, index = ("worker", task) if task < workers else ("ps", task - workers)
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def labels(workers: int, servers: int = 0) -> list[str]:
    """Return what stands before the output of each task."""
    return [str(i) for i in range(workers)] + [f"ps{j}" for j in range(servers)]


class Tasks(NamedTuple):
    """Tasks of a job, in this order: workers, then servers.

    Workers in groups train each for themselves, and the only server is the process in
    which the oracle of their search decides.
    """

    workers: int
    servers: int = 0  # parameter servers
    groups: int = 0  # of a search for hyperparameters
    seats: int = 0  # of workers that may join later
    # Takes the addresses of servers and workers, for those that join.
    told: Callable[[Mapping[str, Sequence[str]]], None] = lambda _: None

    @property
    def others(self) -> int:
        """Number of tasks that are no workers."""
        return 1 if self.groups else self.servers

    def names(self) -> list[str]:
        """Return what stands before the output of each."""
        if not self.groups:
            return labels(self.workers, self.servers)
        size = self.workers // self.groups
        return [f"{i // size}.{i % size}" for i in range(self.workers)] + [ORACLE]

    def environments(self, addresses: Sequence[str]) -> list[dict[str, str]]:
        """Return what each has in its environment.

        Args:
            addresses: "host:port" of each.
        """
        if not self.groups:
            here, servers = addresses[: self.workers], addresses[self.workers :]
            later = [f"seat-{self.workers + k}:1" for k in range(self.seats)]
            seats = [*here, *later]
            self.told({"worker": seats, "ps": servers})
            numbers = [
                *range(self.workers),
                *range(len(seats), len(seats) + len(servers)),
            ]
            return [
                {"TF_CONFIG": tf_config([*seats, *servers], number, self.servers)}
                for number in numbers
            ]
        *own, oracle = addresses
        size = self.workers // self.groups
        hosts = [address.rpartition(":")[0] for address in own]
        found = []
        for task, host in enumerate(hosts):
            group, index = divmod(task, size)
            among = own[group * size :][:size]
            place = {"oracle": oracle, "group": group, "groups": self.groups}
            place["workers"] = size
            found.append(
                {
                    "TF_CONFIG": tf_config(among, index),
                    "TF_DGC_TRIALS": json.dumps(place),
                    # Of all groups, for GPUs: its number on this host, and how many.
                    "TF_DGC_LOCAL": f"{hosts[:task].count(host)}/{hosts.count(host)}",
                }
            )
        place = {"oracle": oracle, "group": None, "groups": self.groups}
        own_cluster = tf_config([oracle], 0)
        found.append(
            {
                "TF_CONFIG": own_cluster,
                "TF_DGC_TRIALS": json.dumps(place),
                "CUDA_VISIBLE_DEVICES": "-1",  # it trains nothing while others do
            }
        )
        return found


def _die_with_parent() -> Callable[[], None] | None:
    """Return what a worker runs first, so that a SIGKILL of ours ends it too."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class CannotStart(RuntimeError):
    """Tasks cannot be started; the message says why."""


class NotThere(CannotStart):
    """Error that what is to run is not there: to try again does not help."""


def obstacle_of(what: str, error: CannotStart | OSError) -> CannotStart:
    """Return what an error means to those who start something."""
    if isinstance(error, CannotStart):
        return error
    kind = CannotStart if error.errno in _PASSING else NotThere
    return kind(f"cannot start {what}: {error}")


class Command(NamedTuple):
    """Command line of all workers."""

    words: list[str]
    script: str = ""  # of Python, a file or a module; none where it is no Python
    module: bool = False

    def require(self) -> None:
        """Refuse a script that is not there.

        Raises:
            NotThere: it is not, or cannot be read.
        """
        if not self.script or self.script.startswith("-"):  # an option, such as -c
            return
        if self.module:
            if not _is_module(self.script.partition(".")[0]):
                raise NotThere(f"cannot start {self.script}: there is no such module")
        elif not os.access(self.script, os.R_OK):
            there = os.path.exists(self.script)
            problem = "it cannot be read" if there else "there is no such file"
            raise NotThere(f"cannot start {self.script}: {problem}")


def of_module(name: str) -> list[str]:
    """Return the command of a module, which no file of the current folder hides."""
    return [sys.executable, "-P", "-m", name]


def _is_module(name: str) -> bool:
    sys.path.insert(0, "")  # this folder
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True  # let Python say what it has against it
    finally:
        del sys.path[0]


class WorkerProcesses:
    """The processes of one run on this machine.

    A process is not reaped before the last signal to its group: until then nobody else
    can have its number.

    Attributes:
        starts: how often each was started again.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        names: Sequence[str] | None = None,
        view: screen.View | None = None,
    ) -> None:
        """Start them.

        Args:
            command: of all workers.
            environments: of each worker, what it has beside that of this process.
            names: of each; by default its number.
            view: shows their output; by default all of it.

        Raises:
            CannotStart: the command cannot be started.
        """
        self._command = command
        self._environments = list(environments)
        self.names = labels(len(environments)) if names is None else list(names)
        self._view = screen.All() if view is None else view
        self._processes: list[subprocess.Popen[bytes]] = []
        self._copiers: list[output.Copier] = []
        self._over = False
        self.starts = [0] * len(environments)
        self._family = leftovers.Family()
        try:
            for task in range(len(environments)):
                self._processes.append(self._start(task))
        except OSError as error:
            self.kill()
            kind = type(obstacle_of(command[0], error))
            raise kind(f"cannot start {command[0]}: {error}") from error
        for task in range(len(environments)):
            self._copy_both(task)

    def _start(self, task: int) -> "subprocess.Popen[bytes]":
        own = self._family.mark(task) | dict(self._environments[task])
        with contextlib.ExitStack() as stack:
            out: int | None = None
            chief = self.names[task] == self._view.chief
            terminal = self._view.terminal if chief else None
            if terminal is not None:
                master, out = terminal.open()
                stack.callback(os.close, out)
                opened = stack.enter_context(os.fdopen(master, "rb", buffering=0))
                own = {"TERM": terminal.kind} | own
            errors = out if terminal is not None and terminal.errors else None
            process = subprocess.Popen(
                self._command,
                # All go through sets in the same order, also when started again; of
                # TensorFlow's C++ only what ends a process is heard.
                env=_DEFAULTS | os.environ | {"PYTHONUNBUFFERED": "1"} | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if out is None else out,
                stderr=subprocess.PIPE if errors is None else errors,
                start_new_session=True,  # a process group of its own, to signal as one
                preexec_fn=_die_with_parent(),
            )
            if out is not None:
                process.stdout = opened
                stack.pop_all()
                os.close(out)
            return process

    def _copy_both(self, task: int) -> None:
        process, name = self._processes[task], self.names[task]
        for source, stream in ((process.stdout, "out"), (process.stderr, "err")):
            if source is not None:
                sink = self._view.sink(name, stream)
                self._copiers.append(output.Copier(source, sink))
                self._copiers[-1].start()

    def signal(self, signum: int, tasks: Sequence[int] | None = None) -> None:
        """Send `signum` to workers, by default all, and what they started."""
        every = range(len(self._processes))
        for task in () if self._over else every if tasks is None else tasks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._processes[task].pid, signum)

    def again(self, task: int, environment: Mapping[str, str]) -> bool:
        """Start one again that has ended; see `job.Group`."""
        self.starts[task] += 1
        self.signal(signal.SIGKILL, [task])  # what it may have left
        self._family.end(task)
        self._environments[task] = {**self._environments[task], **environment}
        try:
            process = self._start(task)
        except OSError:
            return False
        self._processes[task].wait()
        self._processes[task] = process
        self._copy_both(task)
        return True

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each worker, None where it still runs."""
        return [_exit_code(process) for process in self._processes]

    def end(self, signum: int, give_up: Callable[[], bool]) -> None:
        """Send `signum`; wait until all have ended or `give_up()`; then kill."""
        self.signal(signum)
        while None in self.exit_codes() and not give_up():
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self, give_up: Callable[[], object] = lambda: False) -> None:
        """End what is left of every worker and copy the last of the output."""
        self.signal(signal.SIGKILL)
        self._family.end()
        self._over = True
        for process in self._processes:
            process.wait()
        output.finish(self._copiers, give_up)
        self._family.close()


def _exit_code(process: "subprocess.Popen[bytes]") -> int | None:
    """Return how a process has ended, None where it runs; do not reap it."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    if (end := os.waitid(os.P_PID, process.pid, look)) is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def start_here(
    command: Sequence[str],
    tasks: Tasks,
    environment: Mapping[str, str] | None = None,
    view: screen.View | None = None,
    host: str = "127.0.0.1",
) -> WorkerProcesses:
    """Start tasks that find each other on this machine, by its name.

    Raises:
        CannotStart: the command cannot be started.
    """
    ports = free_ports(tasks.workers + tasks.others)
    addresses = [f"{host}:{port}" for port in ports]
    each = [{**(environment or {}), **own} for own in tasks.environments(addresses)]
    return WorkerProcesses(command, each, names=tasks.names(), view=view)
