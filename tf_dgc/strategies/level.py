"""Ends data on all workers at once, where each has its own and some have more.

Axis: N workers. In each step they tell whether they have a batch, and how large its
rows are. Who has none takes part with a batch of no rows, until nobody has one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.strategies import provenance
from tf_dgc.transports import Transport

_OWN, _NO_ROWS, _END = range(3)


def can_end(spec: Any) -> bool:
    """Tell whether there are batches of no rows of a spec."""
    kinds = tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec
    return all(
        isinstance(part, kinds) or provenance.is_none(part)
        for part in tf.nest.flatten(spec)
    )


def next_of(
    transport: Transport, optional: Any, spec: Any, end: Callable[[], Any]
) -> Any:
    """Return this worker's next batch; all workers call this, eagerly or in a graph.

    Args:
        transport: between them.
        optional: the worker's own next batch, or none.
        spec: of batches of any number of rows.
        end: ends the data, where nobody has a batch.
    """
    specs = [part for part in tf.nest.flatten(spec) if not provenance.is_none(part)]

    def tensors(batch: Any) -> list[tf.Tensor]:
        parts = [part for part in tf.nest.flatten(batch) if part is not None]
        return list(tf.nest.flatten(parts, expand_composites=True))

    def own_sizes() -> tf.Tensor:
        parts = [part for part in tf.nest.flatten(optional.get_value())]
        return _sizes([part for part in parts if part is not None])

    count = sum(_rank(part) for part in specs)
    has = optional.has_value()
    sizes = tf.cond(has, own_sizes, lambda: tf.zeros([count], tf.int64))
    own = tf.concat([[tf.cast(has, tf.int64)], tf.ensure_shape(sizes, [count])], axis=0)
    most = tf.reduce_max(transport.all_gather(own, "has_next"), axis=0)
    which = tf.where(has, _OWN, tf.where(most[0] > 0, _NO_ROWS, _END))
    flat = tf.switch_case(
        which,
        {
            _OWN: lambda: tensors(optional.get_value()),
            _NO_ROWS: lambda: tensors(_no_rows(specs, most[1:])),
            _END: lambda: tensors(end()),
        },
    )
    parts = iter(tf.nest.pack_sequence_as(specs, flat, expand_composites=True))
    batch = [
        None if provenance.is_none(part) else _shaped(next(parts), part)
        for part in tf.nest.flatten(spec)
    ]
    return tf.nest.pack_sequence_as(spec, batch)


def _shaped(part: Any, spec: Any) -> Any:
    return tf.ensure_shape(part, spec.shape) if isinstance(part, tf.Tensor) else part


def _rank(spec: Any) -> int:
    """Return how many sizes a row has that are told."""
    dense = isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec)
    return max(0, (spec.shape.rank or 0) - 1) if dense else 0


def _sizes(parts: Sequence[Any]) -> tf.Tensor:
    """Return the sizes of the rows of tensors, one after another: shape [count]."""
    shapes = [
        part.dense_shape if isinstance(part, tf.SparseTensor) else tf.shape(part)
        for part in parts
        if not isinstance(part, tf.RaggedTensor)
    ]
    rows = [tf.cast(shape[1:], tf.int64) for shape in shapes]
    return tf.concat([*rows, tf.zeros([0], tf.int64)], axis=0)


def _no_rows(specs: Sequence[Any], sizes: tf.Tensor) -> list[Any]:
    """Return tensors that have no rows, which were of some sizes if there were any."""
    parts, begin = [], 0
    for spec in specs:
        end = begin + _rank(spec)
        shape = tf.concat([tf.zeros([1], tf.int64), sizes[begin:end]], axis=0)
        begin = end
        if isinstance(spec, tf.RaggedTensorSpec):
            inner = spec.shape[1 + spec.ragged_rank :]
            values = tf.zeros([0, *(size or 0 for size in inner)], spec.dtype)
            splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
            parts.append(tf.RaggedTensor.from_nested_row_splits(values, splits))
        elif isinstance(spec, tf.SparseTensorSpec):
            places = tf.zeros([0, spec.shape.rank], tf.int64)
            parts.append(tf.SparseTensor(places, tf.zeros([0], spec.dtype), shape))
        else:
            parts.append(tf.zeros(shape, spec.dtype))
    return parts
