"""Workers of parameter servers in this process, which is their server as well.

    with local_servers.Job(workers=2) as job:
        chief = job.worker(0, table_bytes=64)
        ...
        job.kill(chief)
        again = job.worker(0, table_bytes=64)

What servers hold lives as long as the job, so that a worker that comes again finds it.
"""

import atexit
import contextlib
import itertools
import types
from typing import Any, Self
from unittest import mock

import tf_dgc
from tf_dgc.servers import cluster, shared, tables
from tf_dgc.strategies import downpour

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
_numbers = itertools.count()


class Job:
    """Servers, and workers when they are asked for."""

    def __init__(self, workers: int, servers: int = 2) -> None:
        self._workers, self._servers = workers, servers
        self._stack = contextlib.ExitStack()
        self._living: list[tf_dgc.DownpourStrategy] = []

    def __enter__(self) -> Self:
        container = f"local-{next(_numbers)}"
        for module in (shared, tables):
            self._patch(module, "CONTAINER", container)
        self._patch(cluster, "connect", lambda own: None)
        self._patch(downpour, "Servers", self._local)
        for module in (downpour.files, downpour.randomness):
            name = "set_worker" if module is downpour.files else "share"
            self._patch(module, name, lambda *args: None)
        return self

    def _patch(self, module: Any, name: str, value: Any) -> None:
        self._stack.enter_context(mock.patch.object(module, name, value))

    def _local(self, addresses: Any) -> shared.Servers:
        servers = shared.Servers(addresses)
        servers.devices = [DEVICE for _ in addresses]
        return servers

    def worker(self, index: int, **settings: Any) -> tf_dgc.DownpourStrategy:
        """Return the strategy of a worker that begins, or comes again."""
        ps = tuple(f"ps:{j}" for j in range(self._servers))
        place = cluster.Cluster(ps, self._workers, "worker", index, f"w:{index}")
        settings = {"liveness": 5.0} | settings
        with mock.patch.object(cluster, "resolve", lambda: place):
            strategy = tf_dgc.DownpourStrategy(tf_dgc.DownpourConfig(**settings))
        self._living.append(strategy)
        return strategy

    def kill(self, strategy: tf_dgc.DownpourStrategy) -> None:
        """Let a worker be no more, as if its process had been killed."""
        members = strategy._members
        members.pulse.end()
        atexit.unregister(members.leave)
        members.put(members.signs.seen, 0.0)
        self._living.remove(strategy)

    def end(self, strategy: tf_dgc.DownpourStrategy) -> None:
        """Let a worker leave, as its process does at its end."""
        strategy._members.leave()
        self._living.remove(strategy)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        for strategy in list(self._living):
            self.kill(strategy)
        self._stack.close()
