"""Steps of a worker whose parameters are on servers: moved there, pushed, fetched."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc._host.shared import Table
from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.exchanges.served import Served
from tf_dgc.exchanges.served_rounds import RoundsOnServers
from tf_dgc.strategies import embeddings, on_servers, outside
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.exchanging import Exchanging
from tf_dgc.strategies.served_rounds import LocalTraining


class Fits:
    """Calls of `fit` and `evaluate` that run.

    Attributes:
        running: number of calls of `fit` that run.
        evaluating: number of calls of `evaluate` and `predict` that run.
        count: number of calls of `fit` so far.
        model: that is trained, if one is.
        callbacks: of this `fit`.
        data: that it trains on, as distributed.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.running = self.evaluating = self.count = 0
        self.model: keras.Model | None = None
        self.callbacks: Sequence[Any] = ()
        self.data: Any = None


class ServedTraining(Exchanging):
    """Pushes of gradients to the servers."""

    def __init__(self, core: Core, make: Downpouring, fits: Fits) -> None:
        """Take what a step needs.

        Args:
            core: of the strategy.
            make: of exchanges with servers.
            fits: that run.
        """
        super().__init__(core)
        self._make, self._fits = make, fits
        self.local: LocalTraining | None = None
        if isinstance(make, RoundsOnServers):
            self.local = LocalTraining(core, make)
        self._before_step: list[Callable[[], None]] = []
        self._current: Served | None = None  # the exchange of the step that runs

    def prepare(
        self, optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]]
    ) -> None:
        """Move what an optimizer trains to the servers, before its first step."""
        used = [(g, v) for g, v in pairs if g is not None]
        variables = [v.value if isinstance(v, keras.Variable) else v for _, v in used]
        if self._core.ledger.knows(optimizer, variables):
            self._current = self._exchange_of(optimizer, variables)
            return
        for variable in variables:
            outside.refuse_foreign(self._core.strategy, variable)
        if self.local is not None and not self.local.on_servers:
            self.local.prepare(optimizer, variables, self._open_outer)
            return
        momentum = optimizers.momentum_of(optimizer, 1.0, variables)
        with tf.init_scope():
            _refuse_without_values(variables)
            tables = [v.name for v in variables if isinstance(v, Table)]
            optimizers.refuse_unselected(optimizer, self._make.config, tables)
            workers = self._make.members.workers
            self._core.warn(
                on_servers.warnings_about(optimizer, self._make.config, workers)
            )
            if self._make.config.synchronous:
                _host.applying.clip_sums(optimizer)  # the mean is, see `on_servers`
            embeddings.check(optimizer, variables, self._make.config)
            if (model := self._fits.model) is not None:  # built by now
                limit = self._make.config.table_bytes
                embeddings.check_callbacks(self._fits.callbacks, model, limit)
            args = self._make.config, self._core.extended, self._make.twins
            self._make.expect(on_servers.moved(optimizer, variables, *args))
            self._current = self._exchange_of(optimizer, variables, momentum)
            self._make.members.succession.trains(self._fits.running > 0)
            if optimizer.use_ema:
                extended = self._core.extended
                _host.keras.take_averages(optimizer, lambda: extended.running)

    def at_push(self, do: Callable[[], None]) -> None:
        """Do something in the steps that push; once, where they are of all workers."""
        if self._make.config.synchronous:
            self._before_step.append(do)
            return
        if self._make.config.push_period == 1:
            do()
            return
        if self._current is not None:
            tf.cond(self._current.pushes_now, do, lambda: None)

    def _open_outer(
        self, outer: keras.optimizers.Optimizer, variables: Sequence[Any]
    ) -> Any:
        """Return the exchange of an outer optimizer, which is made."""
        self.prepare(outer, [(variable, variable) for variable in variables])
        return self._current

    def _exchange_of(self, optimizer: Any, variables: list[Any], *args: Any) -> Served:
        """Return the exchange of variables; see `Ledger.of`."""
        return cast(Served, self._core.ledger.of(optimizer, variables, *args))

    def exchange_and_update(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Push the gradients, and fetch the parameters."""
        used = [(g, v) for g, v in pairs if g is not None]
        # Of the step that only finds data at their end nothing counts.
        given = tf.nest.flatten([g for g, _ in used], expand_composites=True)
        if self.local is not None and not self.local.on_servers:
            with tf.control_dependencies(given):
                self.local.begin_step(optimizer, [v for _, v in used])
                super().exchange_and_update(optimizer, used, learning_rate, update)
            return
        exchange = self._exchange_of(optimizer, [v for _, v in used])
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
                on_servers.finish(optimizer, self._make.twins)

            exchange.push(do)

        with tf.control_dependencies(given):
            if self._make.members.is_chief:
                twins, succession = self._make.twins, self._make.members.succession
                gives = twins.changed.read_value() & succession.counts_now.read_value()
                given = [_host.shared.seldom(gives, twins.give)]
                with tf.control_dependencies(given):
                    succession.tell()
            with tf.control_dependencies(given):
                super().exchange_and_update(optimizer, used, learning_rate, push)


def _refuse_without_values(variables: Sequence[Any]) -> None:
    """Raise ValueError where variables have no values yet, which servers begin with."""
    for variable in variables:
        if isinstance(variable, Table):
            continue
        if not tf.raw_ops.VarIsInitializedOp(resource=variable.handle):
            raise ValueError(
                f"The variable {variable.name!r} is made while the first step is "
                "traced, and has no value before that is run, which the servers are to "
                "begin with. Make it before: in `__init__`, or by calling the model "
                "once before `fit`"
            )
