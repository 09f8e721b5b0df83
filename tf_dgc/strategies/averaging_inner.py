"""Inside of ParameterAveragingStrategy: local steps, and rounds between them."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc.config import ADAPTIVE, AUTO, VISITS, AveragingConfig
from tf_dgc.exchanges import Averaging, Companions, Expected
from tf_dgc.exchanges.averaged import settle
from tf_dgc.strategies.combining import combining_of
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.inner import Inner
from tf_dgc.strategies.outer import OuterOptimizers
from tf_dgc.strategies.states import constrain

_logger = logging.getLogger("tf_dgc")


class AveragingInner(Inner):
    """Inside of a strategy whose workers average their weights."""

    def __init__(self, core: Core) -> None:
        """Begin without an outer optimizer."""
        super().__init__(core)
        self.begin()

    def begin(self) -> None:
        """Begin to average, by the settings of the core, without an outer optimizer."""
        self._settings = cast(AveragingConfig, self.core.config)
        self._averaging = cast(Averaging, self.core.make)
        self._outer = OuterOptimizers(self.core, self._settings)
        self._exchanges = self._steps = 0  # steps of a `fit`, where that tells
        self._model: Any = None  # whose step is run
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()  # what was run

    def expect_steps(self, steps: int) -> None:
        """Note how many steps the `fit` that begins has."""
        self._steps = steps

    def run(self, fn: Any, args: Any, step: Callable[[Any], Any]) -> Any:
        """Run a step; see the base class."""
        self._model = getattr(fn, "__self__", None)
        before = self._exchanges
        try:
            result = super().run(fn, args, step)
        finally:
            self._model = None
        if self._settings.period != ADAPTIVE:
            return result
        if self._exchanges > before:
            self._training.add(fn)  # a tf.function is traced only once
        if fn in self._training:
            loss: Any = result.get("loss") if isinstance(result, Mapping) else result
            if not tf.is_tensor(loss) or loss.shape.rank != 0:
                raise ValueError(
                    f"period={ADAPTIVE!r} follows the loss: a training step must "
                    "return it, or a dictionary with 'loss', as that of a Keras model "
                    f"does. Received: {result!r}"
                )
            self._averaging.loss.assign(tf.cast(loss, tf.float64))
        return result

    def flush(self, model: keras.Model) -> None:
        """Hold a round, and apply what compression keeps back of a model."""
        self._hold_round(resumed=True)
        super().flush(model)
        constrain(model.trainable_variables)

    @property
    def holds_alike(self) -> bool:
        """Tell whether nothing was trained: slots, and weights in a period, are own."""
        return self.core.ledger.untouched

    def settle(self) -> None:
        """Hold a round of what was trained since the last one."""
        self._hold_round(resumed=False)

    def _hold_round(self, resumed: bool) -> None:
        """Hold a round.

        Args:
            resumed: also of what was restored, and not trained since.
        """
        for optimizer in settle(self.core.ledger, resumed):
            constrain(_host.keras.variables_of(optimizer))

    def exchange_and_update(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Update the variables, then hold a round where it is time."""
        self._exchanges += 1
        used = [v for g, v in pairs if g is not None]
        if is_new := not self.core.ledger.knows(optimizer, used):
            with tf.init_scope():
                expected = Expected(
                    self._companions_of(optimizer),
                    self._outer.step(optimizer),
                    combining_of(optimizer, self._settings),
                    self._overlap_of(optimizer),
                )
                self._averaging.expect(optimizer, expected)
        super().exchange_and_update(optimizer, pairs, learning_rate, update)
        if is_new:
            self._warn_of_few_rounds()

    def _warn_of_few_rounds(self) -> None:
        """Warn where compression leaves changes that are never sent in a `fit`."""
        opened: Any = self.core.ledger.newest
        density = None if opened is None else opened.density
        visits = (density or 0.0) * self._steps / self._settings.least_period
        if density is None or not self._steps or visits >= VISITS:
            return
        rounds = self._steps // self._settings.least_period
        self.core.warn(
            [
                f"A `fit` of {self._steps} steps has {rounds} rounds, in each of which "
                f"{100 * density:.3g}% of the elements are sent: {visits:.2g} times "
                f"each on average, where {VISITS:g} times lose nothing. Send more of "
                "them, DGCConfig(sparsity=...), take a shorter period, or more epochs"
            ]
        )

    def _overlap_of(self, optimizer: keras.optimizers.Optimizer) -> int:
        """Return for how many steps rounds of what an optimizer trains are in flight.

        After a whole period nothing is lost with optimizers that normalize their steps,
        see docs/how-it-works/averaging.md.
        """
        overlap = self._settings.overlap
        if overlap != AUTO:
            return int(overlap or 0)
        period = self._settings.least_period
        return period if optimizers.normalizes_steps(optimizer) else -(-period // 4)

    def _companions_of(self, optimizer: keras.optimizers.Optimizer) -> Companions:
        config = self._settings
        if isinstance(self._model, keras.Model):
            weights = [v.value for v in self._model.non_trainable_weights]
            statistics = [v for v in weights if v.dtype.is_floating and not v.trainable]
        else:
            statistics = self.core.extended.made.statistics()
        chosen = [
            variable
            for variable in statistics
            if any(fnmatchcase(variable.name, f"{p}:0") for p in config.non_trainable)
        ]
        for pattern in set(config.non_trainable) - {"*"}:
            if not any(fnmatchcase(v.name, f"{pattern}:0") for v in statistics):
                paths = [v.name.removesuffix(":0") for v in statistics]
                _logger.warning("%r matches none of %s", pattern, paths)
        averaged = _host.keras.averages_of(optimizer)
        slots = _host.keras.slots_of(optimizer)
        outer = self._outer.of(optimizer)
        own = [] if outer is None else [v.value for v in outer.variables]
        if config.average_slots:
            return Companions(chosen, [*averaged, *slots], own)
        return Companions(chosen, averaged, [*slots, *own])
