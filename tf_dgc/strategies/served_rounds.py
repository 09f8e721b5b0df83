"""Local steps of an optimizer of the user, with an outer one on the servers."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges.local_counts import LocalOptimizer
from tf_dgc.exchanges.opened import Subset
from tf_dgc.exchanges.outer_on_servers import Compressing
from tf_dgc.exchanges.served_rounds import LocalRounds, RoundsOnServers
from tf_dgc.strategies import on_servers
from tf_dgc.strategies.combining import combining_of
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.outer import made_of

# Settings without which SGD subtracts its gradients, times a rate.
_NOT_PLAIN = (
    "momentum",
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


def _mean() -> keras.optimizers.Optimizer:
    """Return what takes the mean of changes itself."""
    return keras.optimizers.SGD(1.0)


def _plain_rate(outer: keras.optimizers.Optimizer) -> float | None:
    """Return the rate of an optimizer that is plain SGD; None of another one."""
    is_plain = type(outer) is keras.optimizers.SGD
    is_plain &= not any(getattr(outer, name, None) for name in _NOT_PLAIN)
    is_plain &= all(v.constraint is None for v in _host.keras.variables_of(outer))
    is_plain &= _host.keras.rate_of(outer) is not None  # no schedule
    return float(outer.learning_rate) if is_plain else None


def _amplifies(outer: keras.optimizers.Optimizer, quorum: int) -> list[str]:
    """Return a warning where an outer optimizer makes more of a change than it is.

    In rounds of a part of the workers, changes were begun before the last rounds, and
    go the same way once more.
    """
    if not isinstance(outer, keras.optimizers.SGD):
        return []
    gain = float(outer.learning_rate) / max(1.0 - (outer.momentum or 0.0), 1e-7)
    if gain <= 1.0 + 1e-6:
        return []
    return [
        f"With DownpourConfig(quorum={quorum}) rounds are of a part of the workers, "
        "whose changes do not know of each other: `outer_optimizer` makes "
        f"{gain:.3g} of a change of 1 in the end (learning_rate / (1 - momentum)), and "
        "goes too far. Leave `outer_optimizer` out, which takes the average, or the "
        "quorum, or let that be at most 1"
    ]


class LocalTraining:
    """Local steps of workers, whose changes go to the servers in rounds.

    Attributes:
        on_servers: whether the outer optimizer takes its step: it is what the servers
            have that is updated.
    """

    def __init__(self, core: Core, make: RoundsOnServers) -> None:
        """Take what makes exchanges.

        Args:
            core: of the strategy.
            make: of its exchanges.
        """
        self._core, self._make = core, make
        self._outers: weakref.WeakKeyDictionary[Any, keras.optimizers.Optimizer] = (
            weakref.WeakKeyDictionary()
        )
        self.on_servers = False

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the outer optimizer update what the servers have."""
        self.on_servers = True
        try:
            yield
        finally:
            self.on_servers = False

    def prepare(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[Any],
        open_outer: Callable[[keras.optimizers.Optimizer, Sequence[Any]], Any],
    ) -> None:
        """Make the exchanges of local steps, before the first one.

        Args:
            optimizer: of the user.
            variables: that it trains.
            open_outer: makes the exchange of an outer optimizer, of variables.

        Raises:
            ValueError: the optimizer cannot be averaged, or is not the chief's.
        """
        if optimizer.use_ema:
            raise ValueError(
                "DownpourConfig(local_steps=...) does not average moving averages of "
                "weights. Received: an optimizer with use_ema=True. Leave it out"
            )
        with tf.init_scope():
            outer = self._outer_of(optimizer)
            quorum = self._make.settings.quorum
            if quorum is not None and quorum < self._make.members.workers:
                self._core.warn(_amplifies(outer, quorum))
            self._make.compressing = self._compressing(optimizer, outer)
            with self.stepping():
                exchange = open_outer(outer, variables)
            steps, per_step = _host.keras.step_counter_of(optimizer)
            local = LocalOptimizer(
                exchange,
                self._step_of(outer, variables),
                steps,
                per_step,
                [slot.value for slot in _host.keras.movable_slots_of(optimizer)],
                _host.keras.rate_of(optimizer),
                on_servers.settings_of(optimizer),
            )
            self._make.expect_local(local)
            self._core.ledger.of(optimizer, variables)

    def begin_step(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Begin a local step of an optimizer."""
        cast(LocalRounds, self._core.ledger.of(optimizer, variables)).begin_step()

    def _compressing(
        self, optimizer: keras.optimizers.Optimizer, outer: keras.optimizers.Optimizer
    ) -> Compressing | None:
        """Return how changes that an optimizer has made are compressed."""
        settings = self._make.settings
        if settings.compression is None:
            return None
        combining = combining_of(optimizer, settings)
        return Compressing(settings.compression, combining, _plain_rate(outer))

    def _outer_of(
        self, optimizer: keras.optimizers.Optimizer
    ) -> keras.optimizers.Optimizer:
        if optimizer in self._outers:
            return self._outers[optimizer]
        wanted = self._make.settings.outer_optimizer or _mean
        outer = made_of(self._core.strategy, wanted, optimizer)
        self._outers[optimizer] = outer
        return outer

    def _step_of(
        self, outer: keras.optimizers.Optimizer, variables: Sequence[Any]
    ) -> Callable[[list[tf.Tensor]], None]:
        """Return what takes a step of an outer optimizer along changes."""
        wrapped = {id(v.value): v for v in _host.keras.variables_of(outer)}
        trained, strategy = [wrapped[id(v)] for v in variables], self._core.strategy

        def step(changes: list[tf.Tensor]) -> None:
            context = tf.distribute.get_replica_context()
            with self.stepping():
                if context is not None and context.strategy is strategy:
                    outer.apply(changes, trained)
                else:
                    strategy.run(lambda: outer.apply(changes, trained))

        return step

    def rounds(self) -> list[LocalRounds]:
        """Return the exchanges of local steps so far, on all workers alike.

        Workers learn at different times that a model is garbage: what has steps since
        its last round would wait for workers that know no such exchange.
        """
        ledger = self._core.ledger
        found = _local(ledger.exchanges())
        if any(int(each.position) for each in found if each is not ledger.newest):
            found = _local(ledger.left())
        gone = [each for each in [ledger.newest] if each not in found]
        return [*found, *_local(gone)]

    def rounds_of(self, model: keras.Model) -> list[LocalRounds]:
        """Return those of the optimizers that a model has."""
        owners = _host.keras.optimizers_of(model)
        return _local(self._core.ledger.exchanges(Subset(owners, ())))


def _local(exchanges: Sequence[Any]) -> list[LocalRounds]:
    return [each for each in exchanges if isinstance(each, LocalRounds)]
