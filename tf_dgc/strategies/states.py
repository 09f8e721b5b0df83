"""States of a strategy's exchanges and split layers in files."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, step
from tf_dgc.exchanges import Update, split_files
from tf_dgc.exchanges.records import Record
from tf_dgc.strategies.core import Core


class States:
    """States of workers: residuals, and parts of layers; saved, restored, applied."""

    def __init__(self, core: Core) -> None:
        """Take the core of the strategy."""
        self._core = core

    def records_of(self, model: keras.Model | None) -> list[Record]:
        """Return what this worker keeps back and has parts of; see `Inner`."""
        own = self._core.ledger.records(*_trained_in(model))
        return own + split_files.record_of(self._parts_of(model))

    def restore(self, path: str | os.PathLike[str], model: keras.Model | None) -> None:
        """Take over what was saved; see `BaseStrategy.restore_state`."""
        core = self._core
        if model is not None:
            self._build_for_parts(model)
        parts = self._parts_of(model)
        arrays = split_files.load(core.ledger.transport.everybody, path, parts)
        core.ledger.restore(path, *_trained_in(model))
        core.restored = True
        with core.strategy.scope():
            for variable, array in zip(parts, arrays, strict=True):
                variable.assign(tf.cast(array, variable.dtype))

    def _parts_of(self, model: keras.Model | None) -> list[Any]:
        """Return what this worker has parts of: all, or that of a model."""
        parts: list[Any] = self._core.extended.made.parts()
        if model is None:
            return parts
        owners = (model, *_host.keras.optimizers_of(model))
        own = {id(v.value) for owner in owners for v in owner.variables}
        return [variable for variable in parts if id(variable) in own]

    def _build_for_parts(self, model: keras.Model) -> None:
        """Make the slots of a model's parts, which a state has."""
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and self._parts_of(model):
            with self._core.strategy.scope():
                optimizer.build(model.trainable_variables)

    def flush(self, model: keras.Model) -> None:
        """Apply what workers keep back of a model; see `BaseStrategy.flush`."""
        core = self._core
        own = [variable.value for variable in model.weights]  # frozen ones, too

        def apply(optimizer: Any, update: Update, variables: Sequence[Any]) -> None:
            rate = tf.convert_to_tensor(optimizer.learning_rate)
            assign = functools.partial(
                _host.keras.update_variables, optimizer, core.strategy
            )
            with core.exchanged():
                step.apply(optimizer, update, variables, rate, assign, core.clips_sum)
            constrain(_host.keras.variables_of(optimizer))

        with core.strategy.scope():
            core.ledger.flush(own, apply)

    def tell_what_is_lost(self, optimizer: Any) -> None:
        """Warn where an optimizer that is given up still keeps something back."""
        parts = {id(each) for each in _host.keras.inner_optimizers(optimizer)}
        exchanges = [e for e in self._core.ledger.exchanges() if id(e.owner()) in parts]
        kept = [tf.reduce_any(part != 0) for e in exchanges for part in e.kept()]
        if any(map(bool, kept)):
            name = optimizer.name
            self._core.warn(
                [
                    f"The model is compiled anew, and what was kept back of {name!r}, "
                    "its optimizer before, is lost. Call `strategy.flush(model)` "
                    "before `compile`, which applies it"
                ]
            )


def _trained_in(model: keras.Model | None) -> tuple[list[Any] | None, list[Any]]:
    """Return a model's optimizers, or if it has none, the variables that others train.

    None, for all optimizers, where there is no model.
    """
    if model is None:
        return None, []
    own = _host.keras.optimizers_of(model)
    return own, [] if own else [v.value for v in model.variables]


def constrain(variables: Sequence[Any]) -> None:
    """Apply their constraints to Keras variables, as optimizers do after a step."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))
