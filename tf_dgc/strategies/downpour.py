"""The strategy of asynchronous SGD with parameter servers."""

import os
import secrets
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc._host.shared import Table
from tf_dgc.config import DownpourConfig
from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.exchanges.served_rounds import RoundsOnServers
from tf_dgc.exchanges.server_traffic import ServerStats
from tf_dgc.search import tuners
from tf_dgc.servers import cluster as clusters
from tf_dgc.servers import tables
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers
from tf_dgc.strategies import (
    files,
    randomness,
    watched,
)
from tf_dgc.strategies.base import BaseStrategy, versions
from tf_dgc.strategies.served import DownpourExtended
from tf_dgc.strategies.served_inner import ServedInner
from tf_dgc.transports import base
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.mesh import Mesh

_NO_TUNER = (
    "Workers of parameter servers train at their own pace, so they cannot train the "
    "trials of a tuner together. Take another strategy, or search with one worker"
)


class DownpourStrategy(BaseStrategy):
    """Asynchronous SGD: each worker trains at its own pace, on parameter servers.

    The parameters, and what the optimizer keeps, are on servers; a worker fetches them,
    computes the gradient of its rows and pushes it, without waiting for others. One
    that dies holds nobody back, and others may join. In a task of type "ps" the
    constructor serves, and does not return.

    Example:
        strategy = tf_dgc.DownpourStrategy()
        with strategy.scope():
            model = ...
            model.compile("adam", "mse")
        model.fit(dataset_of_global_batches)

    References:
        Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012.
    """

    _extended_class = DownpourExtended
    _inner_class = ServedInner
    inner: ServedInner

    def __init__(self, config: DownpourConfig | None = None) -> None:
        """Find the servers; call this before any other TensorFlow operation.

        Args:
            config: the settings, the same on every worker; by default
                `DownpourConfig()`.

        Raises:
            TypeError: `config` is not a DownpourConfig.
            ValueError: the cluster has no servers, they hold another job, this worker's
                index is taken, or the workers differ in version or settings.
            TimeoutError: the chief, or a server, did not come; names it.
        """
        config = DownpourConfig() if config is None else config
        if not isinstance(config, DownpourConfig):
            raise TypeError(
                f"`config` must be a DownpourConfig. Received: config={config!r}"
            )
        self._cluster = cluster = clusters.resolve()
        if cluster.task_type == "ps":
            clusters.serve(cluster)
        transport = LocalTransport()
        timeout = base.default_timeout()
        clusters.connect(cluster)
        self._servers = Servers(cluster.ps)
        counts = {"servers": len(cluster.ps), "workers": cluster.workers}
        record = {**versions(type(self).__name__), **counts, **config.get_config()}
        told = {"seed": secrets.randbits(31), **randomness.told()}
        place = self._servers, cluster.index, cluster.workers
        self._members = Members(*place, config.liveness, timeout, record, told)
        kind = Downpouring if config.local_steps is None else RoundsOnServers
        self._make = kind(config, self._servers, self._members)
        self._settings = config
        super().__init__(Mesh.of(transport), config, self._make)
        if config.synchronous and cluster.workers > 1:
            self.inner.sum_losses()
        self.extended.tables.bytes = config.table_bytes
        watched.of_several.add(self)
        if cluster.workers > 1:
            tuners.install(refusal=_NO_TUNER)
            files.set_worker(self.rank, cluster.workers)
            randomness.share(int(self._members.told["seed"]))
            self._core.warn(randomness.take_over_told(self._members.told))

    # Who and where.

    @property
    def rank(self) -> int:
        """Index of this worker, in [0, workers)."""
        return self._cluster.index

    @property
    def workers(self) -> int:
        """Number of workers of the cluster, W, whether they are there or not."""
        return self._cluster.workers

    def read_rows(self, variable: Any, start: int, stop: int) -> tf.Tensor:
        """Return rows of a table that lives on the servers only.

        Args:
            variable: of an Embedding, or of the optimizer.
            start: the first row.
            stop: the row after the last one.

        Raises:
            TypeError: it is another variable.
        """
        table = _host.keras.plain(variable)
        if not isinstance(table, Table):
            raise TypeError(
                "`variable` must be a table that lives on the servers only, as by "
                f"DownpourConfig(table_bytes=...). Received: variable={variable!r}"
            )
        return tables.read_rows(table, start, stop)

    def save_state(
        self, path: str | os.PathLike[str], model: keras.Model | None = None
    ) -> None:
        """Write what this worker keeps back; workers do not wait for each other.

        Without compression that is nothing, and others than the chief write no file.

        Args:
            path: of the folder; all may have the same, each has its own part of it.
            model: as in `BaseStrategy.save_state`.

        Raises:
            OSError: this worker could not write.
        """
        if self.is_chief or self.inner.following.keeps_back:
            super().save_state(self.inner.following.part_of_state(path), model)

    def restore_state(
        self, path: str | os.PathLike[str], model: keras.Model | None = None
    ) -> None:
        """Take over what this worker wrote.

        Args:
            path: as it was given to `save_state`.
            model: as it was given to `save_state`.

        Raises:
            FileNotFoundError: it wrote nothing there.
            ValueError: a file is damaged or not of this training; names file and field.
        """
        if self.is_chief or self.inner.following.keeps_back:
            super().restore_state(self.inner.following.part_of_state(path), model)
            self.inner.take_back()

    def server_stats(self) -> ServerStats:
        """Return what this worker did with the servers since it began."""
        return self._make.totals.stats()

    # Meeting.

    def fetch(self) -> None:
        """Fetch in any case what the servers have."""
        self.inner.fetch()

    def barrier(self) -> None:
        """Wait until all workers have come here; then fetch.

        Who has died, as far as `liveness` tells, has ended, or has not begun within
        TF_DGC_TIMEOUT, is not waited for.
        """
        self.inner.barrier()
