"""Worker 0 asks all others for their facts, and lets them measure the network."""

import contextlib
import dataclasses
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_dgc.check import links
from tf_dgc.check.facts import Facts
from tf_dgc.check.links import Link, Server
from tf_dgc.check.verdict import CheckedCluster

_MAX_BYTES = 2**22  # of a record
_ANSWER_SECONDS = 120.0
_POLL_SECONDS = 0.2
_ALL_PAIRS = 8  # workers, of whom each pair is measured
_CLOCKS = 5


class _Channel:
    """Records of JSON to and from another worker, one in each line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_ANSWER_SECONDS)
        self._connection = connection
        self._file = connection.makefile("rwb")

    def say(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next record.

        Raises:
            OSError: there is none.
            ValueError: it is damaged.
        """
        line = self._file.readline(_MAX_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection was closed")
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("no record")
        return record

    def ask(self, record: Mapping[str, Any]) -> dict[str, Any]:
        self.say(record)
        return self.hear()


def follow(facts: Facts, addresses: Sequence[str], seconds: float) -> bool:
    """Do what worker 0 asks for.

    Args:
        facts: of this worker.
        addresses: of all.
        seconds: for how long to look for worker 0.

    Returns:
        Whether worker 0 was there to the end.

    Raises:
        OSError: the port of this worker is taken, or worker 0 cannot be reached.
    """
    server = Server(addresses[facts.rank])
    deadline = time.monotonic() + seconds
    while True:
        try:
            channel = _Channel(links.connect(addresses[0], links.HELLO))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
    with contextlib.suppress(OSError, ValueError):
        channel.say(dataclasses.asdict(facts))
        while "targets" in (order := channel.hear()) or "clock" in order:
            if "clock" in order:
                channel.say({"clock": time.time()})
                continue
            found = _measured(facts.rank, order["targets"], addresses)
            channel.say({"links": [dataclasses.asdict(each) for each in found]})
        server.close()
        return bool(order.get("end"))
    server.close()
    return False


def _measured(
    rank: int, targets: Sequence[int], addresses: Sequence[str]
) -> list[Link]:
    return [links.measure(rank, int(t), addresses[int(t)]) for t in targets]


class HostMeeting:
    """Worker 0, who asks.

    Attributes:
        addresses: of all workers.
    """

    def __init__(self, facts: Facts, addresses: Sequence[str]) -> None:
        """Listen for the others.

        Raises:
            OSError: the port is taken.
        """
        self.addresses = addresses
        self._facts = {0: facts}
        self._channels: dict[int, _Channel] = {}
        self._came: queue.Queue[tuple[Facts, _Channel]] = queue.Queue()
        self._server = Server(addresses[0], self._greet)

    def _greet(self, connection: socket.socket) -> None:
        channel = _Channel(connection)
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._came.put((Facts.of(channel.hear()), channel))

    def wait(self, seconds: float, still: Callable[[Sequence[int]], None]) -> None:
        """Wait for the others.

        Args:
            seconds: for how long.
            still: takes the ranks that are missing, now and then.
        """
        deadline = time.monotonic() + seconds
        while missing := sorted(set(range(len(self.addresses))) - set(self._facts)):
            if time.monotonic() > deadline:
                return
            still(missing)
            with contextlib.suppress(queue.Empty):
                facts, channel = self._came.get(timeout=_POLL_SECONDS)
                if facts.rank in missing:
                    self._facts[facts.rank] = facts
                    self._channels[facts.rank] = channel

    def cluster(self) -> CheckedCluster:
        """Let all measure, and return what was found out."""
        ranks = sorted(self._facts)
        clocks = {rank: self._clock(rank) for rank in ranks if rank}
        found: list[Link] = []
        for rank in ranks:
            found += self._links(rank, _targets(rank, ranks))
        return CheckedCluster(
            self.addresses,
            [self._facts[rank] for rank in ranks],
            {rank: seconds for rank, seconds in clocks.items() if seconds is not None},
            found,
            self._together(ranks),
        )

    def end(self) -> None:
        """Let the others go."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.say({"end": True})
        self._server.close()

    def _clock(self, rank: int) -> float | None:
        """Return how many seconds a worker's clock is before this one."""
        found = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for _ in range(_CLOCKS):
                began = time.time()
                told = float(self._channels[rank].ask({"clock": True})["clock"])
                ended = time.time()
                found.append((ended - began, told - (began + ended) / 2))
        return min(found)[1] if found else None

    def _links(self, rank: int, targets: Sequence[int]) -> list[Link]:
        if rank == 0:
            return _measured(0, targets, self.addresses)
        try:
            told = self._channels[rank].ask({"targets": list(targets)})["links"]
            return [Link(**record) for record in told]
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.stderr.write(f"worker {rank} does not answer: {error}\n")
            return []

    def _together(self, ranks: Sequence[int]) -> list[Link]:
        """Measure while each worker sends to the next."""
        if len(ranks) < 2:
            return []
        found: list[Link] = []
        nexts = zip(ranks, [*ranks[1:], ranks[0]], strict=True)

        def measure(rank: int, target: int) -> None:
            found.extend(self._links(rank, [target]))

        threads = [threading.Thread(target=measure, args=pair) for pair in nexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(found, key=lambda link: link.source)


def _targets(rank: int, ranks: Sequence[int]) -> list[int]:
    """Return the workers to which one measures its way: of many two, else all."""
    if len(ranks) <= _ALL_PAIRS:
        return [each for each in ranks if each != rank]
    following = ranks[(ranks.index(rank) + 1) % len(ranks)]
    return sorted({following, ranks[0]} - {rank})
