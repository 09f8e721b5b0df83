"""The worker processes of one machine: started, watched and ended together."""

import contextlib
import ctypes
import json
import os
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


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def tf_config(addresses: Sequence[str], rank: int) -> str:
    """Return the `TF_CONFIG` of worker `rank`; each worker has one of `addresses`."""
    cluster = {"worker": list(addresses)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})


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
    """The processes of one run on this machine."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        first_rank: int = 0,
        out: Sink | None = None,
        err: Sink | None = None,
    ) -> None:
        """Start them; each line of output is written behind the rank.

        Args:
            command: of all workers.
            environments: of each worker, what it has beside that of this process.
            first_rank: of the first worker; the others follow.
            out: where the workers' stdout goes, by default to stdout.
            err: likewise, stderr.

        Raises:
            OSError: the command cannot be started.
        """
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            for environment in environments:
                self._processes.append(_start(command, environment))
        except OSError:
            self.kill()
            raise
        for rank, process in enumerate(self._processes, first_rank):
            prefix = f"[{rank}] ".encode()
            self._read(process.stdout, out or sys.stdout.buffer, prefix)
            self._read(process.stderr, err or sys.stderr.buffer, prefix)

    def _read(self, *arguments: object) -> None:
        self._readers.append(
            threading.Thread(target=forward, args=arguments, daemon=True)
        )
        self._readers[-1].start()

    def signal(self, signum: int) -> None:
        """Send `signum` to every worker and to the processes it started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

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
