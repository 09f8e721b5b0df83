"""A copy of all that training changes, to take steps back."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges.averaged import Averaged
from tf_dgc.exchanges.base import Exchange


class Snapshot:
    """Values of a model, its optimizers and its exchanges, on the host."""

    def __init__(self, model: keras.Model, exchanges: list[Exchange]) -> None:
        """Copy the values of this worker.

        Args:
            model: of the user.
            exchanges: of its optimizers.
        """
        self._rounds = [each.rounds for each in exchanges if isinstance(each, Averaged)]
        for each in exchanges:
            _ = each.state  # a round in flight is waited for, and is whole then
        owners = [model, *_host.keras.optimizers_of(model)]
        variables = [_host.keras.plain(v) for each in owners for v in each.variables]
        found = [(_host.distribute.components_of(v) or (v,))[0] for v in variables]
        found += _host.keras.changed_by_steps(model) + _host.keras.random_states(model)
        for each in exchanges:
            found += _variables_in(each)
        unique = {id(variable): variable for variable in found}
        self._copies = [(v, np.array(v.read_value())) for v in unique.values()]

    def put_back(self) -> None:
        """Assign what was copied."""
        for each in self._rounds:
            each.forget()
        for variable, value in self._copies:
            variable.assign(tf.cast(value, variable.dtype))
        for each in self._rounds:
            each.loaded()


def _variables_in(thing: Any) -> Iterator[tf.Variable]:
    """Yield the variables of an exchange, and of the objects that it is made of."""
    if isinstance(thing, tf.Variable):
        yield thing
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from _variables_in(each)
    elif type(thing).__module__.startswith("tf_dgc.exchanges"):
        for each in vars(thing).values():
            yield from _variables_in(each)
