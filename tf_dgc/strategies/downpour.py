"""The strategy of asynchronous SGD with parameter servers."""

import contextlib
import os
import pathlib
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc._host.shared import Table
from tf_dgc.config import DownpourConfig
from tf_dgc.exchanges.downpour import Downpouring, ServerStats
from tf_dgc.search import tuners
from tf_dgc.servers import cluster as clusters
from tf_dgc.servers import tables
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers
from tf_dgc.strategies import (
    embeddings,
    files,
    on_servers,
    randomness,
    watched,
)
from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.strategies.served import DownpourExtended
from tf_dgc.strategies.served_share import OverServers, ServedShare
from tf_dgc.transports import base
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.mesh import Mesh
from tf_dgc.version import __version__

_NO_TUNER = (
    "Workers of parameter servers train at their own pace, so they cannot train the "
    "trials of a tuner together. Take another strategy, or search with one worker"
)
# How TensorFlow names a server in its errors.
_SERVER = re.compile(r"/job:ps/replica:0/task:(\d+)")


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
        record = {
            "strategy": type(self).__name__,
            "tf_dgc": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "servers": len(cluster.ps),
            "workers": cluster.workers,
            **config.get_config(),
        }
        told = {"seed": secrets.randbits(31), **randomness.told()}
        place = self._servers, cluster.index, cluster.workers
        self._members = Members(*place, config.liveness, timeout, record, told)
        self._make = Downpouring(config, self._servers, self._members)
        self._settings = config
        self._make.last = self._end_fit
        self._before_step: list[Callable[[], None]] = []
        self._fitted: keras.Model | None = None
        self._callbacks: Sequence[Any] = ()
        self._fits = self._evaluates = self._fit_count = 0
        super().__init__(Mesh.of(transport), config, self._make)
        self._sums: OverServers | None = None  # of losses, where steps are of all
        if config.synchronous and cluster.workers > 1:
            self._sums = OverServers(self._servers, self._members)
            self.share = ServedShare(self._sums)
        self.tables = tables.Tables(self._servers, self._members, self)
        self.extended.table_bytes = config.table_bytes
        watched.of_several.add(self)
        if cluster.workers > 1:
            tuners.install(refusal=_NO_TUNER)
            files.set_worker(self.rank, cluster.workers)
            randomness.share(int(self._members.told["seed"]))
            self._warn(randomness.take_over_told(self._members.told))

    # Who and where.

    @property
    def rank(self) -> int:
        """Index of this worker, in [0, workers)."""
        return self._cluster.index

    @property
    def workers(self) -> int:
        """Number of workers of the cluster, W, whether they are there or not."""
        return self._cluster.workers

    @property
    def holds_alike(self) -> bool:
        """False: workers do not wait for each other, and have what the servers have."""
        return False

    @property
    def twins(self) -> Any:
        """Server variables of what is trained."""
        return self._make.twins

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

    @property
    def fits(self) -> bool:
        """Tell whether `fit` runs."""
        return self._fits > 0

    @property
    def evaluates(self) -> bool:
        """Tell whether `evaluate` or `predict` runs."""
        return self._evaluates > 0

    @property
    def saves_state(self) -> bool:
        """Tell whether this worker's state is a part of backups: the chief's is."""
        return self.is_chief

    def tell_epoch(self, epoch: int) -> None:
        """Tell the other workers at which epoch of its `fit` the chief is."""
        self._members.progress = self._fit_count, epoch

    def chief_epoch(self) -> int:
        """Return where to begin a `fit`: at the chief's epoch, once it has told.

        Beyond all epochs, where the chief is at a later `fit`.

        Raises:
            TimeoutError: the chief has not told.
        """
        members, own = self._members, self._fit_count
        members.wait_for(lambda: members.progress[0] >= own, "epoch of `BackupState`")
        fit, epoch = members.progress
        return epoch if fit == own else sys.maxsize

    @property
    def progress(self) -> int:
        """At which epoch of its `fit` the chief is, as far as it has told."""
        return self._members.progress[1]

    @property
    def is_first(self) -> bool:
        """Tell whether no worker had this one's place before, on these servers."""
        return self._members.is_first

    @property
    def keeps_back(self) -> bool:
        """Tell whether a worker keeps back a part of what it is to push."""
        return self._settings.compression is not None

    def part_of_state(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Return where in a folder of state this worker writes."""
        own = [] if self.is_chief else [f"worker-{self.rank:05d}"]
        return pathlib.Path(path, *own)

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
        if self.is_chief or self.keeps_back:
            super().save_state(self.part_of_state(path), model)

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
        if self.is_chief or self.keeps_back:
            super().restore_state(self.part_of_state(path), model)
            self._take_back()

    @property
    def moves(self) -> Any:
        """Moves of this worker's main thread."""
        return self._members.meetings.moves

    def server_stats(self) -> ServerStats:
        """Return what this worker did with the servers since it began."""
        return self._make.totals.stats()

    def count_received(self, size: tf.Tensor) -> None:
        """Count bytes that were fetched: shape [], int64."""
        self._make.totals.add(received=size)

    # Training.

    def prepare(
        self, optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]]
    ) -> None:
        """Move what an optimizer trains to the servers, before its first step."""
        used = [(g, v) for g, v in pairs if g is not None]
        variables = [v.value if isinstance(v, keras.Variable) else v for _, v in used]
        if self._ledger.knows(optimizer, variables):
            self._current = self._ledger.of(optimizer, variables)
            return
        for variable in variables:
            self.extended.refuse_foreign(variable)
        momentum = optimizers.momentum_of(optimizer, 1.0, variables)
        with tf.init_scope():
            tables = [v.name for v in variables if isinstance(v, Table)]
            optimizers.refuse_unselected(optimizer, self._settings, tables)
            self._warn(
                on_servers.warnings_about(optimizer, self._settings, self.workers)
            )
            if self._settings.synchronous:
                _host.applying.clip_sums(optimizer)  # the mean is, see `on_servers`
            embeddings.check(optimizer, variables, self._settings)
            if self._fitted is not None:  # built by now
                limit = self._settings.table_bytes
                embeddings.check_callbacks(self._callbacks, self._fitted, limit)
            args = self._settings, self.extended, self.twins
            self._make.expect(on_servers.moved(optimizer, variables, *args))
            self._current = self._ledger.of(optimizer, variables, momentum)
            self._members.succession.trains(self.fits)
            if optimizer.use_ema:
                _host.keras.take_averages(optimizer, lambda: self.extended.running)

    def at_push(self, do: Callable[[], None]) -> None:
        """Do something in the steps that push; once, where they are of all workers."""
        if self._settings.synchronous:
            self._before_step.append(do)
            return
        if self._settings.push_period == 1:
            do()
            return
        exchange: Any = self._current
        tf.cond(exchange.pushes_now, do, lambda: None)

    def exchange_and_update(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Push the gradients, and fetch the parameters."""
        used = [(g, v) for g, v in pairs if g is not None]
        exchange: Any = self._ledger.of(optimizer, [v for _, v in used])
        before, self._before_step = self._before_step, []

        def push(pairs: list[Any], rate: Any) -> None:
            def do(factor: tf.Tensor, means: Any = None) -> None:
                # Of a common step; what follows reads it as well.
                chosen = rate if means is None else exchange.rate.now(rate)
                for each in before:
                    each()
                of = pairs
                if means is not None:
                    of = on_servers.of_all(optimizer, pairs, means)
                update(of, chosen * tf.cast(factor, chosen.dtype))
                on_servers.finish(optimizer, self.extended, self.twins)

            exchange.push(do)

        # Of the step that only finds data at their end nothing counts.
        given = tf.nest.flatten([g for g, _ in used], expand_composites=True)
        with tf.control_dependencies(given):
            if self.is_chief:
                twins, succession = self.twins, self._members.succession
                gives = twins.changed.read_value() & succession.counts_now.read_value()
                tf.cond(gives, twins.give, lambda: None)
                succession.tell()
            super().exchange_and_update(optimizer, used, learning_rate, push)

    # Meeting.

    def settle(self) -> None:
        """Fetch what the servers have, unless this worker's model was assigned since.

        What is evaluated, predicted or saved next is what the servers have then.
        """
        if not tf.executing_eagerly() or bool(self.twins.changed):
            return
        self._fetch(always=False)

    def fetch(self) -> None:
        """Fetch in any case what the servers have."""
        if not bool(self.twins.changed):
            self._fetch(always=True)

    def _take_back(self) -> None:
        """Let this worker's model be that of the servers, where a chief repeats."""
        if self._members.succession.repeats and bool(self.twins.changed):
            self.twins.changed.assign(False)
            self._fetch(always=True)

    def _fetch(self, always: bool) -> None:
        exchanges: list[Any] = self._ledger.exchanges()
        for exchange in exchanges:
            exchange.settle(always)

    def barrier(self) -> None:
        """Wait until all workers have come here; then fetch.

        Who has died, as far as `liveness` tells, has ended, or has not begun within
        TF_DGC_TIMEOUT, is not waited for.
        """
        takes_part = [turns for turns in self._turns() if turns.takes_part]
        self._leave_clocks()
        self._members.meetings.barrier()
        for turns in takes_part:  # before anybody takes a step
            turns.enter()
        if takes_part:
            self._members.meetings.barrier()
        self.fetch()

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Say which server has failed, where TensorFlow says it in its own way.

        Raises:
            tf.errors.OpError: a server has failed, or cannot be reached.
        """
        try:
            yield
        except tf.errors.OpError as error:
            number = _SERVER.search(error.message)
            if number is None or "Parameter server" in error.message:
                raise
            name = self._members.pulse.name_of(int(number[1]))
            text = (
                f"{name} has failed, or cannot be reached; what it held is lost. Start "
                "the job again: with tf_dgc.callbacks.BackupState it continues from "
                f"its last backup. TensorFlow says: {error.message}"
            )
            raise type(error)(error.node_def, error.op, text) from error

    @contextlib.contextmanager
    def fitting(
        self, model: keras.Model, callbacks: Sequence[Any] = ()
    ) -> Iterator[None]:
        """Let `fit` run: it has a number, and may be ended."""
        embeddings.check_callbacks(callbacks, model, self._settings.table_bytes)
        self._fits += 1
        self._fitted, self._callbacks = model, callbacks
        self._fit_count += 1
        self._members.succession.enter(self._fit_count)
        self._take_back()
        try:
            yield
        finally:
            self._fits -= 1
            self._fitted, self._callbacks = None, ()
            self._members.succession.leave()
            self.extended.training_next = False
            with contextlib.suppress(tf.errors.OpError):  # of a server that has failed
                self._leave_clocks()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Take the data that are distributed next for those that all read."""
        self._evaluates += 1
        try:
            yield
        finally:
            self._evaluates -= 1

    def _leave_clocks(self) -> None:
        """Hold nobody back who still trains."""
        exchanges: list[Any] = self._ledger.exchanges()
        for exchange in exchanges:
            if exchange.clocks is not None:
                exchange.clocks.leave()
        for turns in self._turns():
            turns.leave()

    def _turns(self) -> list[Any]:
        exchanges: list[Any] = self._ledger.exchanges()
        found = [exchange.together for exchange in exchanges]
        of_sums = [] if self._sums is None else self._sums.turns
        return [*of_sums, *[each.turns for each in found if each is not None]]

    def _end_fit(self) -> None:
        """End `fit`, where too few others are left for a step."""
        self._warn(
            ["The others have ended: what this worker computes further is dropped"]
        )
        if self._fitted is not None:
            self._fitted.stop_training = True
