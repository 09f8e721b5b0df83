#!/usr/bin/env python3
"""Pass on the packets of a laboratory's hosts, later, and not all of them.

    scripts/distance.py '[{"namespace": ..., "switch": ..., "port": 1, ...}, ...]'

scripts/netlab.py starts this process where its hosts are far from each other: kernels
need not have tc's `netem`. A host's packets come from the interface `out` in its
namespace, wait for the host's delay, and go on from `in1`, `in2`, ... in that of the
switch. Both are TUN interfaces, which exist before. A host's packets keep their order,
as on one cable: a jitter makes a packet wait for those before it.

Writes a line when it is ready, and another when its input ends: how many packets were
passed on and dropped, and how much later than wanted 99 of 100 and the last of them
were. A host that sends 100 Mbit/s takes some tenth of a processor.
"""

import collections
import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from typing import NamedTuple

_NAMESPACES = "/run/netns"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST_PACKET = 65_536
_AT_ONCE = 64  # packets of a host, before others have their turn
_LATENESS_STEP, _LATENESS_STEPS = 0.0005, 2000  # of the histogram, seconds and count


class Path(NamedTuple):
    """How packets of one host travel.

    Attributes:
        namespace: of the host.
        switch: namespace of the switch.
        port: the host's number there, from 1.
        delay: seconds that every packet waits.
        jitter: seconds; each waits up to so much longer or shorter.
        loss: probability that a packet is dropped.
        seed: of the draws.
    """

    namespace: str
    switch: str
    port: int
    delay: float
    jitter: float
    loss: float
    seed: int


def open_interface(namespace: str, name: str) -> int:
    """Return the file that is a TUN interface's other end.

    Raises:
        OSError: there is no such namespace, or no such interface.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    where = os.open(f"{_NAMESPACES}/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(where, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(where)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    )
    return file


class Cable:
    """Packets on their way from one host to the switch, in order.

    Attributes:
        source: file of the host's interface.
        passed: packets that arrived.
        dropped: packets that were lost.
    """

    def __init__(self, path: Path) -> None:
        """Open both ends."""
        self.source = open_interface(path.namespace, "out")
        self._target = open_interface(path.switch, f"in{path.port}")
        self._path, self._random = path, random.Random(path.seed)
        self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()
        self._last = 0.0
        self.passed = self.dropped = 0

    @property
    def due(self) -> float:
        """When the first packet goes on, in seconds of the monotonic clock."""
        return self._waiting[0][0] if self._waiting else float("inf")

    def take(self) -> None:
        """Read what the host has sent."""
        path = self._path
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self.source, _LARGEST_PACKET)
            except BlockingIOError:
                return
            if path.loss and self._random.random() < path.loss:
                self.dropped += 1
                continue
            delay = path.delay + path.jitter * self._random.uniform(-1, 1)
            self._last = max(self._last, time.monotonic() + delay)
            self._waiting.append((self._last, packet))

    def give(self, lateness: list[int]) -> None:
        """Pass on what is due; count it by how late it is."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            due, packet = self._waiting.popleft()
            late = int((now - due) / _LATENESS_STEP)
            lateness[min(late, _LATENESS_STEPS)] += 1
            try:
                os.write(self._target, packet)
            except OSError:  # the switch is down; a cable does not tell
                self.dropped += 1
                continue
            self.passed += 1


def pass_on(cables: list[Cable], end: int) -> list[int]:
    """Pass packets on until a file ends; return how many were how late."""
    lateness = [0] * (_LATENESS_STEPS + 1)
    by_file = {cable.source: cable for cable in cables}
    poll = select.epoll()
    for file in (*by_file, end):
        poll.register(file, select.EPOLLIN)
    while True:
        wait = min(cable.due for cable in cables) - time.monotonic()
        ready = poll.poll(None if wait == float("inf") else max(wait, 0))
        for file, _ in ready:
            if file == end:
                return lateness
            by_file[file].take()
        for cable in cables:
            cable.give(lateness)


def main() -> None:
    """Pass packets on as the argument says, until the standard input ends."""
    cables = [Cable(Path(**path)) for path in json.loads(sys.argv[1])]
    with contextlib.suppress(PermissionError):
        os.nice(-15)  # what is due waits for no worker's turn
    print("ready", flush=True)
    lateness = pass_on(cables, sys.stdin.fileno())
    total, seen, most = sum(lateness), 0, [0, 0]
    for step, count in enumerate(lateness):
        seen += count
        if count and seen - count < 0.99 * total:
            most[0] = step + 1
        if count:
            most[1] = step + 1
    report = {
        "passed": sum(cable.passed for cable in cables),
        "dropped": sum(cable.dropped for cable in cables),
        "late_99": most[0] * _LATENESS_STEP,
        "late_most": most[1] * _LATENESS_STEP,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
