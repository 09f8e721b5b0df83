"""Parameters that all workers had when a period began, and steps from there."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import averaging
from tf_dgc.exchanges import applied
from tf_dgc.exchanges.inplace import own_variable

# Steps an owner's variables along gradients, as the outer optimizer does.
Outer = Callable[[list[Any], Sequence[Any]], None]


class Anchor:
    """Parameters that all workers agreed on last; none for plain averages.

    Attributes:
        values: of the variables.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        outer: Outer | None,
        device: str,
        earlier: Sequence["Anchor"],
    ) -> None:
        """Create the variables, outside of any graph.

        Args:
            variables: whose values these are; none where there is no anchor.
            outer: the outer optimizer's step; None subtracts.
            device: where they are.
            earlier: of the same owner, with variables in common, which have the
                anchors of these.
        """
        self._variables, self._outer = variables, outer
        known = {
            id(variable): value
            for each in earlier
            for variable, value in zip(each._variables, each.values, strict=True)
        }
        self._is_new = [id(v) not in known for v in variables]
        with tf.init_scope(), tf.device(device):
            for v in variables:
                if id(v) not in known:
                    zeros = tf.zeros(v.shape, v.dtype)
                    known[id(v)] = own_variable(zeros, "averaging_anchor")
        self.values: list[tf.Variable] = [known[id(v)] for v in variables]
        with tf.init_scope(), tf.device("CPU:0"):
            self._missing = own_variable(tf.constant(True), "averaging_unanchored")

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return bool(self.values)

    def drop(self) -> None:
        """Remember the parameters."""
        for value, variable in zip(self.values, self._variables, strict=True):
            value.assign(variable)

    def drop_first(self) -> None:
        """Remember, the first time, the parameters that no exchange before has had."""
        if not self.values:
            return
        # Not before: a model may be built while its step is traced.
        with tf.device("CPU:0"):
            first_time = tf.identity(self._missing.read_value())

        def drop() -> None:
            for value, variable, is_new in zip(
                self.values, self._variables, self._is_new, strict=True
            ):
                if is_new:
                    value.assign(variable)
            self._missing.assign(False)

        tf.cond(first_time, drop, lambda: None)

    def changes(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return by how much other values of the parameters are less."""
        anchor = [value.read_value() for value in self.values]
        return averaging.outer_gradients(anchor, own)

    def step(self, gradients: list[Any], applies: tf.Tensor | None = None) -> None:
        """Let the variables be a step away from here.

        Args:
            gradients: outer ones.
            applies: whether to step, shape [], bool; None always does.
        """
        for variable, value in zip(self._variables, self.values, strict=True):
            variable.assign(value)

        def step() -> None:
            self.take(gradients, self._variables)

        if applies is None:
            step()
        else:
            tf.cond(applies, step, lambda: None)

    def take(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        """Step variables from where they are."""
        if self._outer is not None:
            self._outer(gradients, variables)
            return
        applied.subtract_all(variables, gradients)

    def loaded(self, taken: tf.Variable) -> None:
        """Take what was loaded for what all had, if steps were taken before it."""
        self._missing.assign(taken == 0)
