#!/usr/bin/env python3
"""Start several workers of one training script on this machine.

    python scripts/run_local.py -n 2 -- python train.py --epochs 3

Every worker gets a `TF_CONFIG` that names all of them on free ports, so that
`tf_dgc` (and any other user of `TF_CONFIG`) finds its peers. Each line of output
is prefixed with the rank. When one worker fails, the others are ended, and the
exit status is that of the first to fail (128 + N for signal N, 124 for a
timeout). Ctrl-C and SIGTERM are passed on. No process is left behind.
"""

import argparse
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
from collections.abc import Callable, Sequence
from typing import IO, BinaryIO

_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A line ends in newline or, as progress bars write it, in a lone carriage return;
# whether a carriage return is alone shows with the byte after it.
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


def free_ports(count: int) -> list[int]:
    """Returns `count` different TCP ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def tf_config(ports: Sequence[int], rank: int) -> str:
    """Returns the `TF_CONFIG` of worker `rank`; each worker has one of `ports`."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})


def forward(source: IO[bytes], target: BinaryIO, prefix: bytes) -> None:
    """Copies `source` to `target` line by line, each behind `prefix`."""
    rest = b""
    while chunk := os.read(source.fileno(), 65536):
        rest += chunk
        lines = _LINE.findall(rest)
        rest = rest[sum(map(len, lines)) :]
        _write(target, b"".join(prefix + line for line in lines))
    if rest:
        _write(target, prefix + rest + b"\n")


def _write(target: BinaryIO, data: bytes) -> None:
    with _write_lock, contextlib.suppress(BrokenPipeError):
        target.write(data)
        target.flush()


_write_lock = threading.Lock()


def _die_with_parent() -> Callable[[], None] | None:
    """Returns what a worker runs first, so that a SIGKILL of ours ends it too."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Workers:
    """The processes of one run: started, watched and ended together."""

    def __init__(self, command: Sequence[str], count: int):
        ports = free_ports(count)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            for rank in range(count):
                self._processes.append(_start(command, tf_config(ports, rank)))
        except OSError:
            self.kill()
            raise
        for rank, process in enumerate(self._processes):
            prefix = f"[{rank}] ".encode()
            self._read(process.stdout, sys.stdout.buffer, prefix)
            self._read(process.stderr, sys.stderr.buffer, prefix)

    def _read(self, *arguments: object) -> None:
        self._readers.append(
            threading.Thread(target=forward, args=arguments, daemon=True)
        )
        self._readers[-1].start()

    def signal(self, signum: int) -> None:
        """Sends `signum` to every worker and to the processes it started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def exit_codes(self) -> list[int | None]:
        """Returns the exit code of each worker, None where it still runs."""
        return [process.poll() for process in self._processes]

    def end(self, signum: int, give_up: Callable[[], bool]) -> None:
        """Sends `signum`; waits until all have ended or `give_up()`; then kills."""
        self.signal(signum)
        while None in self.exit_codes() and not give_up():
            time.sleep(_POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends what is left of every worker and copies the last of the output."""
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join(timeout=2)  # a child in a session of its own may hold the pipe


def _start(command: Sequence[str], config: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env=os.environ | {"TF_CONFIG": config, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a process group of its own, to signal as one
        preexec_fn=_die_with_parent(),
    )


def run(command: Sequence[str], count: int, timeout: float | None, grace: float) -> int:
    """Runs `count` workers of `command`; returns the exit status to end with."""
    received: list[int] = []
    for signum in _PASSED_ON:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, lambda number, _: received.append(number))
    deadline = time.monotonic() + timeout if timeout else float("inf")
    workers = Workers(command, count)
    codes = workers.exit_codes()
    while None in codes and not any(codes) and not received:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
        codes = workers.exit_codes()

    sent = signal.SIGTERM
    if received:
        status, reason = 128 + received[0], f"received signal {received[0]}"
        sent = signal.Signals(received[0])
    elif any(codes):
        rank, code = next((r, c) for r, c in enumerate(codes) if c)
        status = code if code > 0 else 128 - code
        reason = f"worker {rank} ended with status {status}"
    elif None in codes:
        status, reason = 124, f"no end after {timeout:g} seconds"
    else:
        workers.kill()
        return 0
    print(f"run_local: {reason}; ending all workers", file=sys.stderr, flush=True)
    seen, last = len(received), time.monotonic() + grace
    workers.end(sent, lambda: time.monotonic() > last or len(received) > seen)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the arguments and runs the workers."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s -n N [options] -- COMMAND [ARGUMENT ...]",
        description="Start N workers of one training script on this machine.",
    )
    parser.add_argument("-n", type=int, required=True, help="number of workers")
    parser.add_argument("--timeout", type=float, help="end all after so many seconds")
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[options.command[:1] == ["--"] :]
    if options.n < 1:
        parser.error(f"`-n` must be at least 1. Received: -n {options.n}")
    if not command:
        parser.error("no command to run; write it behind `--`")
    try:
        return run(command, options.n, options.timeout, options.grace)
    except (FileNotFoundError, PermissionError) as error:
        print(f"run_local: cannot start {command[0]}: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
