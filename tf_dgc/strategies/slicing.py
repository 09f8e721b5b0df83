"""Rows of batches: how many there are, a worker's, and none. Pure tensor functions."""

from typing import Any

import numpy as np
import tensorflow as tf

_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


def rows_of(spec: Any, element: tuple[Any, ...], rank: Any, size: int) -> Any:
    """Return one worker's rows of a global batch, in the structure of `spec`.

    Args:
        spec: any structure of `element`'s parts.
        element: of tensors, None among them.
        rank: an integer, or a tensor of shape [] and any integer type.
        size: N.
    """
    flat = tf.nest.flatten(element)
    count = tf.cast(
        next(_row_count(part) for part in flat if not is_nothing(part)), "int64"
    )
    start, stop = bounds(count, rank, size)
    rows = [sliced(part, start, stop, size) for part in flat]
    return tf.nest.pack_sequence_as(spec, rows)


def bounds(count: tf.Tensor, rank: Any, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return where a worker's rows begin and end, of a batch of `count` rows.

    The first ranks get a row more where N does not divide them.
    """
    rank = tf.cast(rank, count.dtype)
    each, more = count // size, count % size
    start = rank * each + tf.minimum(rank, more)
    return start, start + each + tf.cast(rank < more, count.dtype)


def as_tensors(structure: Any) -> Any:
    """Return a structure with tensors for its arrays, as steps that are traced see it.

    Keras gives what `train_on_batch` takes to eager steps as it is.
    """
    return tf.nest.map_structure(
        lambda part: (
            tf.convert_to_tensor(part)
            if isinstance(part, np.ndarray) and part.dtype != object
            else part
        ),
        structure,
    )


def row_count(structure: Any) -> Any:
    """Return how many rows the tensors of a structure have.

    Returns:
        An integer where that is known of tensors of a graph, a tensor of shape [] where
        it is not; None where they have no rows, or not as many.
    """
    flat = [part for part in tf.nest.flatten(structure) if isinstance(part, _TENSORS)]
    if not flat or any(part.shape.rank in (None, 0) for part in flat):
        return None
    known = {part.shape[0] for part in flat} - {None}
    if len(known) > 1:
        return None
    return known.pop() if known else tf.cast(_row_count(flat[0]), tf.int32)


def at_least_one_row(structure: Any) -> tuple[Any, tf.Tensor]:
    """Add a row of zeros to what has none, as some layers refuse that.

    Args:
        structure: tensors with rows along the first axis, ragged and sparse ones too,
            and anything that is no tensor.

    Returns:
        The structure, and how many rows it had: shape [], int32.
    """
    flat = tf.nest.flatten(structure)
    first = next(part for part in flat if isinstance(part, _TENSORS))
    count = tf.cast(_row_count(first), tf.int32)
    filled = [
        _filled(part, count == 0) if isinstance(part, _TENSORS) else part
        for part in flat
    ]
    return tf.nest.pack_sequence_as(structure, filled), count


def _filled(part: Any, empty: tf.Tensor) -> Any:
    """Return a tensor with a row of zeros more, where it is empty."""
    if isinstance(part, tf.SparseTensor):
        shape = part.dense_shape
        more = tf.cast(empty, shape.dtype)
        shape = tf.concat([shape[:1] + more, shape[1:]], axis=0)
        return tf.SparseTensor(part.indices, part.values, shape)
    if isinstance(part, tf.RaggedTensor):
        inner = part.flat_values.shape[1:]
        row = tf.zeros([1] * (1 + part.ragged_rank) + inner, part.dtype)
        more = tf.RaggedTensor.from_tensor(
            row, ragged_rank=part.ragged_rank, row_splits_dtype=part.row_splits.dtype
        )
        return tf.concat([part, more[: tf.cast(empty, tf.int32)]], axis=0)

    def with_row() -> tf.Tensor:
        row = tf.zeros(tf.concat([[1], tf.shape(part)[1:]], axis=0), part.dtype)
        return tf.concat([part, row], axis=0)

    filled = tf.cond(empty, with_row, lambda: tf.identity(part))
    filled.set_shape([part.shape[0] or None, *part.shape[1:]])
    return filled


def first_of(dataset: tf.data.Dataset) -> Any:
    """Return the first element, with None where Keras put something else for it."""
    element = next(iter(dataset))
    return tf.nest.map_structure(
        lambda part: None if is_nothing(part) else part, element
    )


def is_nothing(part: Any) -> bool:
    """Tell whether this is None, or what Keras puts for it into a dataset."""
    return part is None or isinstance(part, tf.experimental.Optional)


def _row_count(part: Any) -> Any:
    if isinstance(part, tf.RaggedTensor):
        return part.nrows()
    return (part.dense_shape if isinstance(part, tf.SparseTensor) else tf.shape(part))[
        0
    ]


def sliced(part: Any, start: Any, stop: Any, size: int) -> Any:
    """Return rows of a tensor of any kind, or None as it is; one of `size` shares."""
    if is_nothing(part):
        return part
    if isinstance(part, tf.SparseTensor):
        rest = part.dense_shape[1:]
        begin = tf.concat([[start], tf.zeros_like(rest)], axis=0)
        return tf.sparse.slice(part, begin, tf.concat([[stop - start], rest], axis=0))
    rows = part[start:stop]
    if not isinstance(rows, tf.Tensor) or rows.shape.rank is None:
        return rows
    whole = part.shape[0]
    even = whole is not None and whole > 0 and whole % size == 0
    # Some layers refuse a batch that is known to be empty, not one that is empty.
    length = whole // size if even else None
    return tf.compat.v1.placeholder_with_default(rows, [length, *part.shape[1:]])
