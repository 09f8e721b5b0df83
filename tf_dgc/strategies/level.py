"""Ends data on all workers at once, where each has its own and some have more.

Axis: N workers. In each step they tell whether they have a batch, and how large its
rows are. Who has none takes part with a batch of no rows, until nobody has one.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.strategies import data_graphs
from tf_dgc.transports import Transport


def can_end(spec: Any) -> bool:
    """Tell whether there are batches of no rows of a spec."""
    kinds = tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec
    return all(
        isinstance(part, kinds) or data_graphs.is_none(part)
        for part in tf.nest.flatten(spec)
    )


def agreed(transport: Transport, optional: Any, spec: Any) -> Any:
    """Return this worker's next batch; all workers call this, eagerly or in a graph.

    Args:
        transport: between them.
        optional: tf.experimental.Optional of the worker's own next batch.
        spec: of batches, of any number of rows.

    Returns:
        An Optional that has a batch, maybe of no rows, where any worker has one.
    """
    specs = [part for part in tf.nest.flatten(spec) if not data_graphs.is_none(part)]

    def own() -> list[Any]:
        flat = tf.nest.flatten(optional.get_value())
        return [part for part in flat if part is not None]

    def tensors(parts: list[Any]) -> list[tf.Tensor]:
        return list(tf.nest.flatten(parts, expand_composites=True))

    count = sum(map(_sizes_told, specs))
    has = optional.has_value()
    nothing = tf.zeros([count], tf.int64)
    sizes = tf.cond(
        has, lambda: tf.ensure_shape(_sizes(own()), [count]), lambda: nothing
    )
    told = tf.concat([[tf.cast(has, tf.int64)], sizes], axis=0)
    most = tf.reduce_max(transport.all_gather(told, "has_next"), axis=0)
    flat = tf.cond(
        has, lambda: tensors(own()), lambda: tensors(_no_rows(specs, most[1:]))
    )
    parts = iter(tf.nest.pack_sequence_as(specs, flat, expand_composites=True))
    batch = [
        None if data_graphs.is_none(part) else _shaped(next(parts), part)
        for part in tf.nest.flatten(spec)
    ]
    return tf.cond(
        most[0] > 0,
        lambda: tf.experimental.Optional.from_value(
            tf.nest.pack_sequence_as(spec, batch)
        ),
        lambda: tf.experimental.Optional.empty(spec),
    )


def _shaped(part: Any, spec: Any) -> Any:
    return tf.ensure_shape(part, spec.shape) if isinstance(part, tf.Tensor) else part


def _sizes_told(spec: Any) -> int:
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
        rows = sizes[begin : begin + _sizes_told(spec)]
        begin += _sizes_told(spec)
        known = [spec.shape[1 + i] for i in range(rows.shape[0])]
        row = [rows[i] if size is None else size for i, size in enumerate(known)]
        shape = tf.stack([tf.cast(size, tf.int64) for size in (0, *row)])
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
