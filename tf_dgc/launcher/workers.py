"""The worker processes of one machine: started, watched and ended together."""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A line ends in newline or, as progress bars write it, in a lone carriage return;
# whether a carriage return is alone shows with the byte after it.
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


class Sink(Protocol):
    """Where output goes."""

    def write(self, data: bytes, /) -> object:
        """Take whole lines."""

    def flush(self) -> object:
        """Let go of them."""


# Below those that Linux gives to connections by itself: one of these could be taken
# before the worker listens that it is for.
_PORTS = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports that nobody listens on."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                break
            own = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                own.bind(("", port))
                found.append(port)
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


def forward(source: IO[bytes], target: Sink, prefix: bytes) -> None:
    """Copy `source` to `target` line by line, each behind `prefix`."""
    rest = b""
    while chunk := os.read(source.fileno(), 65536):
        rest += chunk
        lines = _LINE.findall(rest)
        rest = rest[sum(map(len, lines)) :]
        write(target, b"".join(prefix + line for line in lines))
    if rest:
        write(target, prefix + rest + b"\n")


def write(target: Sink, data: bytes) -> None:
    """Write what is not mixed with what other threads write."""
    with _write_lock, contextlib.suppress(BrokenPipeError):
        target.write(data)
        target.flush()


_write_lock = threading.Lock()


def _die_with_parent() -> Callable[[], None] | None:
    """Return what a worker runs first, so that a SIGKILL of ours ends it too."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Workers:
    """The processes of one run on this machine.

    Attributes:
        starts: how often each was started again.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        names: Sequence[str] | None = None,
        out: Sink | None = None,
        err: Sink | None = None,
    ) -> None:
        """Start them; each line of output is written behind the name.

        Args:
            command: of all workers.
            environments: of each worker, what it has beside that of this process.
            names: of each; by default its number.
            out: where the workers' stdout goes, by default to stdout.
            err: likewise, stderr.

        Raises:
            OSError: the command cannot be started.
        """
        self._command = command
        self._environments = list(environments)
        self._names = labels(len(environments)) if names is None else list(names)
        self._out, self._err = out or sys.stdout.buffer, err or sys.stderr.buffer
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self.starts = [0] * len(environments)
        try:
            for environment in environments:
                self._processes.append(_start(command, environment))
        except OSError:
            self.kill()
            raise
        for worker in range(len(self._processes)):
            self._read_both(worker)

    def _read_both(self, worker: int) -> None:
        process, prefix = self._processes[worker], f"[{self._names[worker]}] ".encode()
        for source, sink in ((process.stdout, self._out), (process.stderr, self._err)):
            self._readers.append(
                threading.Thread(
                    target=forward, args=(source, sink, prefix), daemon=True
                )
            )
            self._readers[-1].start()

    def signal(self, signum: int, tasks: Sequence[int] | None = None) -> None:
        """Send `signum` to workers, by default all, and what they started."""
        every = range(len(self._processes))
        for process in [
            self._processes[i] for i in (every if tasks is None else tasks)
        ]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def again(self, task: int, environment: Mapping[str, str]) -> bool:
        """Start one again that has ended; see `job.Group`."""
        self.starts[task] += 1
        self.signal(signal.SIGKILL, [task])  # what it may have left
        self._environments[task] = {**self._environments[task], **environment}
        try:
            process = _start(self._command, self._environments[task])
        except OSError:
            return False
        self._processes[task] = process
        self._read_both(task)
        return True

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each worker, None where it still runs."""
        return [process.poll() for process in self._processes]

    def end(self, signum: int, give_up: Callable[[], bool]) -> None:
        """Send `signum`; wait until all have ended or `give_up()`; then kill."""
        self.signal(signum)
        while None in self.exit_codes() and not give_up():
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End what is left of every worker and copy the last of the output."""
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join(timeout=2)  # a child in a session of its own may hold the pipe


def _start(
    command: Sequence[str], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a process group of its own, to signal as one
        preexec_fn=_die_with_parent(),
    )


def start_here(
    command: Sequence[str],
    workers: int,
    servers: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Workers:
    """Start workers, then parameter servers, that find each other on this machine.

    Raises:
        OSError: the command cannot be started.
    """
    count = workers + servers
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    own = environment or {}
    each = [
        {**own, "TF_CONFIG": tf_config(addresses, task, servers)}
        for task in range(count)
    ]
    return Workers(command, each, names=labels(workers, servers))
