"""Outer optimizers: they step along what a period of local steps has changed."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc.config import AveragingConfig
from tf_dgc.exchanges.anchors import Outer
from tf_dgc.exchanges.inplace import unseen
from tf_dgc.strategies.core import Core


def made_of(
    strategy: tf.distribute.Strategy,
    wanted: Any,
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Return an outer optimizer, built for what an optimizer of the user trains.

    Args:
        strategy: of the scope in which it is made.
        wanted: an optimizer, its settings, or a function that makes one.
        optimizer: of the user.
    """

    def create() -> keras.optimizers.Optimizer:
        with strategy.scope():
            if callable(wanted):
                outer = wanted()
            elif isinstance(wanted, Mapping):
                outer = keras.optimizers.deserialize(dict(wanted))
            else:
                outer = type(wanted).from_config(wanted.get_config())
            outer.build(_host.keras.variables_of(optimizer))
        return outer

    return unseen(create)


class OuterOptimizers:
    """Outer optimizers, one for each optimizer of the user."""

    def __init__(self, core: Core, config: AveragingConfig) -> None:
        """Begin without one.

        Args:
            core: of the strategy.
            config: the settings.
        """
        self._core, self._config = core, config
        self._made: weakref.WeakKeyDictionary[Any, keras.optimizers.Optimizer] = (
            weakref.WeakKeyDictionary()
        )

    def of(
        self, optimizer: keras.optimizers.Optimizer
    ) -> keras.optimizers.Optimizer | None:
        """Return that of what an optimizer trains; None where settings have none."""
        if self._config.outer_optimizer is None:
            return None
        if optimizer not in self._made:
            self._made[optimizer] = self._create(optimizer)
        return self._made[optimizer]

    def _create(
        self, optimizer: keras.optimizers.Optimizer
    ) -> keras.optimizers.Optimizer:
        args = self._core.strategy, self._config.outer_optimizer, optimizer
        outer = made_of(*args)
        own = [variable.value for variable in _host.keras.variables_of(optimizer)]
        optimizers.refuse_whole_tensors(outer, own, self._config.compression)
        # Its gradients are the same on all workers.
        _host.applying.apply_as_they_are(outer)
        return outer

    def step(self, optimizer: keras.optimizers.Optimizer) -> Outer | None:
        """Return the step of an optimizer's variables along outer gradients."""
        if (outer := self.of(optimizer)) is None:
            return None
        core, apply = self._core, outer.apply
        # With what Keras wraps around a variable it applies its constraint, too.
        wrapped = {id(v.value): v for v in _host.keras.variables_of(optimizer)}

        def step(gradients: list[Any], variables: Sequence[Any]) -> None:
            trained = [wrapped[id(v)] for v in variables]
            context = tf.distribute.get_replica_context()
            with core.exchanged():
                if context is not None and context.strategy is core.strategy:
                    apply(gradients, trained)
                else:
                    core.strategy.run(lambda: apply(gradients, trained))

        return step
