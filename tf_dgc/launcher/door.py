"""Door of a running job: workers that come to it from other machines, and go.

The launcher of the job listens. Who joins asks it for a seat: it is told the servers
and a number that no other worker has, and keeps the seat for as long as the connection
lasts. At the end of the job all are told.

A line of JSON goes each way: {"tf_dgc": version} there; {"cluster": .., "index": ..},
or {"error": text, "later": bool}, back; and {"end": status} at the end. Nobody is asked
who they are, as with the servers: the network must be a private one.
"""

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tf_dgc.launcher.workers import (
    POLL_SECONDS,
    CannotStart,
    NotThere,
    WorkerProcesses,
    free_ports,
)
from tf_dgc.version import __version__

_LINE = 65536  # bytes of a line, at most
_ANSWER_SECONDS = 10.0
_BACKLOG = 16
# Of a machine that is gone without a word: noticed after a minute.
_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


def read_address(text: str, option: str) -> tuple[str, int]:
    """Read "host:port".

    Raises:
        ValueError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"`{option}` must be HOST:PORT. Received: {option} {text}")
    return host.strip("[]"), int(port)


class Door:
    """Seats of a job that workers from other machines may take.

    Attributes:
        host: name of this machine, as others know it.
        address: "host:port" at which it listens; of a port 0, the one that was free.
    """

    def __init__(self, host: str, port: int, seats: Sequence[int]) -> None:
        """Listen.

        Args:
            host: name of this machine, as others know it.
            port: to listen on; 0 for any that is free.
            seats: numbers of workers that the job does not start itself.

        Raises:
            OSError: the port is taken.
        """
        self._free, self._lock = sorted(seats), threading.Lock()
        self._cluster: dict[str, list[str]] = {}
        self._guests: dict[int, socket.socket] = {}
        self._listener = socket.create_server(("", port), backlog=_BACKLOG)
        self.host = host
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def open(self, cluster: Mapping[str, Sequence[str]]) -> None:
        """Let others in; who comes again begins anew.

        Args:
            cluster: addresses of the servers and of all seats, as in TF_CONFIG.
        """
        self._cluster = {job: list(each) for job, each in cluster.items()}

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                guest, _ = self._listener.accept()
                threading.Thread(
                    target=self._receive, args=[guest], daemon=True
                ).start()

    def _receive(self, guest: socket.socket) -> None:
        index = None
        with contextlib.suppress(OSError, ValueError), guest:
            guest.settimeout(_ANSWER_SECONDS)
            lines = guest.makefile("rb")
            asked = json.loads(lines.readline(_LINE))
            answer = self._answer(asked)
            index = answer.get("index")
            if index is not None:
                self._guests[index] = guest
            _send(guest, answer)
            _keep(guest)
            if index is not None:
                lines.readline(_LINE)  # until it leaves
        if index is not None:
            with self._lock:
                del self._guests[index]
                self._free = sorted([*self._free, index])

    def _answer(self, asked: Any) -> dict[str, Any]:
        version = asked.get("tf_dgc") if isinstance(asked, dict) else None
        if version != __version__:
            return {"error": f"the job has tf_dgc {__version__}, this is {version}"}
        if not self._cluster:
            return {"error": "the job has not begun, or has ended", "later": True}
        with self._lock:
            if not self._free:
                taken = "all seats of the job are taken (--seats)"
                return {"error": taken, "later": True}
            return {"cluster": self._cluster, "index": self._free.pop(0)}

    def see_off(self, seconds: float, status: int) -> None:
        """Tell all how the job ends; wait until they have left, or for a time."""
        self._cluster = {}
        for guest in list(self._guests.values()):
            with contextlib.suppress(OSError):
                _send(guest, {"end": status})
        until = time.monotonic() + seconds
        while self._guests and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


class GuestSeat:
    """A seat in a running job, as long as this process lives.

    Attributes:
        index: number of the worker.
        over: whether it is over, as the job has ended or is lost.
        ended: the status with which the job has said that it ends, or None.
    """

    def __init__(self, host: str, port: int) -> None:
        """Ask for it.

        Raises:
            CannotStart: nobody listens there, or there is no seat.
        """
        self.ended: int | None = None
        self.over = self._given_back = False
        where = f"{host}:{port}"
        try:
            self._socket = socket.create_connection((host, port), _ANSWER_SECONDS)
            _send(self._socket, {"tf_dgc": __version__})
            lines = self._socket.makefile("rb")
            answer = json.loads(lines.readline(_LINE) or b"{}")
            _keep(self._socket)
        except (OSError, ValueError) as error:
            raise CannotStart(f"cannot join the job at {where}: {error}") from error
        if "index" not in answer:
            self._socket.close()
            lines.close()
            reason = answer.get("error", "it is no door of tf-dgc-run")
            kind = CannotStart if answer.get("later") else NotThere
            raise kind(f"cannot join the job at {where}: {reason}")
        self.index, self._cluster = int(answer["index"]), dict(answer["cluster"])
        threading.Thread(target=self._listen, args=[lines], daemon=True).start()

    def _listen(self, lines: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            self.ended = int(json.loads(lines.readline(_LINE))["end"])
        self.over = not self._given_back

    def config(self) -> str:
        """Return the `TF_CONFIG` of the worker, at an address of its own."""
        host = self._socket.getsockname()[0]
        host = f"[{host}]" if ":" in host else host
        cluster = {job: list(each) for job, each in self._cluster.items()}
        cluster["worker"][self.index] = f"{host}:{free_ports(1)[0]}"
        task = {"type": "worker", "index": self.index}
        return json.dumps({"cluster": cluster, "task": task})

    def leave(self) -> None:
        """Give it back."""
        self._given_back = True
        with contextlib.suppress(OSError):  # the job is no more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Guests(WorkerProcesses):
    """Workers of this machine in a job of another one; they end when it ends."""

    def __init__(
        self,
        command: Sequence[str],
        place: tuple[str, int],
        count: int,
        environment: Mapping[str, str],
        grace: float,
        view: Any,
    ) -> None:
        """Take seats, and start workers.

        Args:
            command: of all of them.
            place: host and port of the door.
            count: how many workers.
            environment: what each has beside that of this process.
            grace: seconds from SIGTERM to SIGKILL, where the job ends.
            view: shows their output.

        Raises:
            CannotStart: there are no seats, or the command cannot be started.
        """
        self._grace, self._place = grace, place
        self._seats: list[GuestSeat] = []
        self._told: dict[int, float] = {}  # when each was told to end
        self._said = False  # how the job has ended
        try:
            for _ in range(count):
                self._seats.append(GuestSeat(*place))
            each = [{**environment, "TF_CONFIG": s.config()} for s in self._seats]
            names = [str(seat.index) for seat in self._seats]
            super().__init__(command, each, names=names, view=view)
        except CannotStart:
            self._leave()
            raise

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes; at the end of the job each is its status."""
        found, now = super().exit_codes(), time.monotonic()
        for k, seat in enumerate(self._seats):
            if not seat.over:
                continue
            self._tell_of(seat.ended)
            if found[k] is not None:
                found[k] = (found[k] or 1) if seat.ended is None else seat.ended
            elif k not in self._told:
                self._told[k] = now
                self.signal(signal.SIGTERM, [k])
            elif now > self._told[k] + self._grace:
                self.signal(signal.SIGKILL, [k])
        return found

    def _tell_of(self, ended: int | None) -> None:
        """Say, once, that the job is lost or has failed."""
        host, port = self._place
        if ended != 0 and not self._said:
            how = "is lost" if ended is None else f"has ended with status {ended}"
            self._view.note(f"the job at {host}:{port} {how}")
        self._said = True

    def kill(self, give_up: Any = lambda: False) -> None:
        """End what is left, and give the seats back."""
        super().kill(give_up)
        self._leave()

    def _leave(self) -> None:
        for seat in self._seats:
            seat.leave()


def _keep(connection: socket.socket) -> None:
    """Let a connection last, and end where the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send(to: socket.socket, told: Mapping[str, Any]) -> None:
    to.sendall(json.dumps(told).encode() + b"\n")
