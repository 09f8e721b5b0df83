"""The launcher's other end on a host: started there by ssh, it starts the workers.

    python -m tf_dgc.launcher.agent

Orders come on stdin, a JSON object in each line; what the workers print, and how they
end, goes back on stdout in frames: a line `KIND LENGTH`, then so many bytes. The first
frame is HELLO: what was on stdout before is of the host's own shell.

It ends its workers when the orders end, which is so where the connection or the
launcher is gone, or when nothing has come for a while, not even an empty line.
"""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from tf_dgc.launcher.terminals import Terminal
from tf_dgc.launcher.workers import (
    POLL_SECONDS,
    CannotStart,
    Command,
    NotThere,
    WorkerProcesses,
    free_ports,
)

HELLO = b"tf_dgc.agent 5\n"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _AgentView:
    """Tells the launcher what workers print; the frame's kind is `STREAM:NAME`."""

    def __init__(self, terminal: Sequence[Any] | None, chief: str) -> None:
        self.terminal = None if terminal is None else Terminal(*terminal)
        self.chief = chief

    def sink(self, worker: str, stream: str, host: str = "") -> "_Frames":
        return _Frames(f"{stream}:{worker}")

    def note(self, text: str) -> None:
        """Say nothing, as below: that is the launcher's."""

    def ending(self, reason: str) -> None:
        pass

    def ended(self, worker: str) -> None:
        pass

    def tick(self) -> None:
        pass


class _Frames:
    """Frames of one kind; an empty one is the last."""

    _lock = threading.Lock()

    def __init__(self, kind: str) -> None:
        self._kind = kind.encode()

    def write(self, data: bytes) -> None:
        frame = b"%s %d\n%s" % (self._kind, len(data), data)
        with self._lock:
            while frame:
                frame = frame[os.write(1, frame) :]

    def close(self) -> None:
        self.write(b"")


class _Orders:
    """The lines on stdin, as they come."""

    def __init__(self) -> None:
        self._rest = b""
        self._heard = time.monotonic()
        self._early: list[dict[str, Any]] = []  # came with the one that was awaited
        self.ended = False

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """Wait so long for orders, and return those that came."""
        if self._early:
            early, self._early = self._early, []
            return early
        if self.ended:
            time.sleep(seconds)
            return []
        if not select.select([0], [], [], seconds)[0]:
            return []
        chunk = os.read(0, 65536)
        self._heard, self.ended = time.monotonic(), not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]

    def first(self) -> dict[str, Any]:
        """Wait for an order.

        Raises:
            EOFError: none will come.
        """
        while not self.ended:
            if orders := self.read(POLL_SECONDS):
                order, *self._early = orders
                if "kill" in order:
                    break
                return order
        raise EOFError("The launcher has gone")

    def silent(self) -> float:
        """Return for how many seconds nothing has come."""
        return time.monotonic() - self._heard


def main() -> int:
    """Serve one launcher."""
    received: list[int] = []
    for signum in _ENDING:
        signal.signal(signum, lambda number, _: received.append(number))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides exit codes
    os.write(1, HELLO)
    orders = _Orders()
    with contextlib.suppress(EOFError, BrokenPipeError):
        _serve(orders, received)
    return 0


def _serve(orders: _Orders, received: list[int]) -> None:
    count = orders.first()["count"]
    _tell("ports", free_ports(count))
    order = orders.first()
    try:
        command = Command(*order["command"])
        command.require()
        workers = WorkerProcesses(
            command.words,
            order["environments"],
            names=order["names"],
            view=_AgentView(order["terminal"], order["chief"]),
        )
    except CannotStart as error:
        _tell("refused", [str(error), isinstance(error, NotThere)])
        return
    _tell("started", True)
    lost = True
    try:
        lost = _watch(workers, orders, received, order["silence"])
    finally:
        last = time.monotonic() + order["grace"]
        over = None not in workers.exit_codes()
        workers.end(signal.SIGTERM, lambda: over or time.monotonic() > last)
    if not lost:  # else nobody reads, and to write might take for ever
        _tell("codes", _ends(workers))


def _watch(
    workers: WorkerProcesses, orders: _Orders, received: list[int], silence: float
) -> bool:
    """Pass orders on, until the last, and tell of workers that end.

    Returns:
        Whether the launcher is gone.
    """
    told: list[tuple[int, int | None]] = []
    while not (orders.ended or orders.silent() > silence):
        for order in orders.read(POLL_SECONDS):
            if "signal" in order:
                workers.signal(order["signal"], order["tasks"])
            if "again" in order:
                workers.again(order["again"], order["environment"])
            if "kill" in order:
                workers.kill()
                return False
        ends = _ends(workers)
        if ends != told:
            _tell("codes", ends)
            told = ends
        if received:
            return False
    return True


def _ends(workers: WorkerProcesses) -> list[tuple[int, int | None]]:
    """Return for each worker how often it was started again, and its exit code."""
    return list(zip(workers.starts, workers.exit_codes(), strict=True))


def _tell(kind: str, content: object) -> None:
    _Frames(kind).write(json.dumps(content).encode())


if __name__ == "__main__":
    status = main()
    os._exit(status)  # readers may wait for a pipe that someone else holds
