"""Losses computed again, of the sums over all workers."""

from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.cuts import Cuts
from tf_dgc.strategies.known import CONSTANT, COUNT, MEAN, ROWS


class Formula:
    """Function F of the cuts of a loss."""

    def __init__(self, cuts: Cuts, size: int) -> None:
        """Take the cuts.

        Args:
            cuts: of losses.
            size: N.
        """
        self._cuts, self._size = cuts, size

    def value(self, tensor: Any, given: dict[Any, tf.Tensor]) -> tf.Tensor:
        """Compute a tensor again, of the sums of all workers."""
        known = self._cuts.reading.of(tensor)
        if power := self._cuts.reading.power_of(tensor):  # one process is one
            one = tf.ones_like(tensor)
            scale = float(self._size) ** -power
            return (
                one if tensor.dtype.is_integer else tensor * tf.cast(scale, one.dtype)
            )
        if known.kind == CONSTANT:
            found = given.get(id(tensor))
            return tensor if found is None else tf.cast(found, tensor.dtype)
        if known.kind == ROWS or known.origin:
            found = given[id(tensor)]
            if known.origin == MEAN:
                count = given[COUNT, id(self._cuts.operation(tensor).inputs[0])]
                found = tf.math.divide_no_nan(found, count)
            for scale, divides in known.scales:
                by = tf.cast(self.value(scale, given), found.dtype)
                found = tf.math.divide_no_nan(found, by) if divides else found * by
            return tf.cast(found, tensor.dtype)
        operation = self._cuts.operation(tensor)
        inputs = [
            each
            if self._cuts.reading.power_of(each)
            and not self._cuts.reading.power_in(each, operation)
            else self.value(each, given)
            for each in operation.inputs
        ]
        if id(tensor) in self._cuts.reading.divided_by_rows:
            share = given[COUNT] / float(self._cuts.reading.static or 1)
            inputs[1] *= tf.cast(share, inputs[1].dtype)
        return _host.operations.again(operation, inputs)
