"""Measures the way from one worker to another: latency and bandwidth of a connection.

What comes over the network is read as text, or counted and dropped.
"""

import contextlib
import dataclasses
import socket
import statistics
import threading
import time
from collections.abc import Callable

from tf_dgc.check.facts import host_of

HELLO, ECHO, SINK = (
    b"tf_dgc check hello\n",
    b"tf_dgc check echo\n",
    b"tf_dgc check sink\n",
)
_CONNECT_SECONDS = 5.0
_PINGS = 11
_SEND_SECONDS = 0.5
_SILENT_SECONDS = 30.0
_CHUNK = bytes(2**18)


@dataclasses.dataclass(frozen=True)
class Link:
    """Connection from one worker to another.

    Attributes:
        latency: seconds one way; None where there is no connection.
        bandwidth: bits per second.
        error: why there is no connection.
    """

    source: int
    target: int
    latency: float | None = None
    bandwidth: float | None = None
    error: str = ""


class Server:
    """Answers others on this worker's port."""

    def __init__(
        self, address: str, greet: Callable[[socket.socket], None] | None = None
    ) -> None:
        """Listen.

        Args:
            address: "host:port" of this worker.
            greet: takes a connection of a worker that says hello.

        Raises:
            OSError: the port is taken.
        """
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        port = int(address.rpartition(":")[2])
        self._greet = greet
        self._socket = socket.create_server(
            ("", port), family=family, backlog=128, dualstack_ipv6=both
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            answer = threading.Thread(target=self._answer, args=(connection,))
            answer.daemon = True
            answer.start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            prepare(connection)
            connection.settimeout(_SILENT_SECONDS)
            order = b""
            while not order.endswith(b"\n") and len(order) < len(HELLO):
                if not (byte := connection.recv(1)):
                    break
                order += byte
            if order == HELLO and self._greet is not None:
                self._greet(connection)
                return
            if order == ECHO:
                while byte := connection.recv(1):
                    connection.sendall(byte)
            if order == SINK:
                while connection.recv(len(_CHUNK)):
                    pass
                connection.sendall(b".")
        connection.close()


def prepare(connection: socket.socket) -> None:
    """Let a connection send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def connect(address: str, order: bytes) -> socket.socket:
    """Return a connection to a worker that has got an order.

    Raises:
        OSError: it cannot be reached.
    """
    place = host_of(address), int(address.rpartition(":")[2])
    connection = socket.create_connection(place, timeout=_CONNECT_SECONDS)
    connection.settimeout(_SILENT_SECONDS)
    prepare(connection)
    connection.sendall(order)
    return connection


def measure(source: int, target: int, address: str) -> Link:
    """Measure the way to another worker, whose address this is."""
    try:
        with connect(address, ECHO) as connection:
            times = [_round_trip(connection) for _ in range(_PINGS)]
        with connect(address, SINK) as connection:
            bandwidth = _send(connection)
    except OSError as error:
        return Link(source, target, error=error.strerror or str(error))
    return Link(source, target, statistics.median(times) / 2, bandwidth)


def _round_trip(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(b".")
    if not connection.recv(1):
        raise ConnectionResetError("the connection was closed")
    return time.perf_counter() - began


def _send(connection: socket.socket) -> float:
    """Send for a while; return bits per second."""
    began, sent = time.perf_counter(), 0
    while time.perf_counter() - began < _SEND_SECONDS:
        sent += connection.send(_CHUNK)
    connection.shutdown(socket.SHUT_WR)
    if not connection.recv(1):
        raise ConnectionResetError("the connection was closed")
    return 8 * sent / (time.perf_counter() - began)
