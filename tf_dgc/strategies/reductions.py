"""Reductions that scripts and metrics ask of a strategy."""

from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import Transport
from tf_dgc.transports.mesh import Mesh


class Reductions:
    """Sums, means and rows of values that each worker has one of."""

    def __init__(self, mesh: Mesh) -> None:
        """Take the workers."""
        self._mesh = mesh

    def reduced(self, reduce_op: Any, values: list[Any], over: Transport) -> Any:
        """Return the sums, or means, of values, over workers that all call this."""
        flat = [_own_value(part) for part in tf.nest.flatten(values)]
        dense = [part for part in flat if isinstance(part, tf.Tensor)]
        read = any(map(_host.distribute.is_metric_variable, values))
        name = "metric" if read else "reduce"
        sums = iter(over.all_reduce(dense, name))
        summed = [
            next(sums)
            if isinstance(part, tf.Tensor)
            else over.sum_slices(part, f"reduce.slices{i}")
            for i, part in enumerate(flat)
        ]
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            summed = [part / tf.cast(over.size, part.dtype) for part in summed]
        return tf.nest.pack_sequence_as(values, summed)

    def of_first(self, value: Any) -> tf.Tensor:
        """Return what rank 0 has of a variable of a metric; all workers call this."""
        return self._mesh.everybody.broadcast([_own_value(value)], "metric.first")[0]

    def gathered(self, value: Any, axis: int) -> tf.Tensor:
        """Return the rows of all workers along an axis; all workers call this."""
        value = _own_value(value)
        order = list(range(value.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        rows = tf.transpose(value, order)
        return tf.transpose(
            self._mesh.everybody.all_gather_ragged(rows, "gather"), order
        )


def _own_value(value: Any) -> tf.Tensor | tf.IndexedSlices:
    """Return this worker's component of a value as a tensor or IndexedSlices."""
    if found := _host.distribute.components_of(value):
        value = found[0]
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(value)
