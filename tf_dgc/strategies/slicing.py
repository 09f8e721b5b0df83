"""Rows of batches: how many there are, a worker's, and none. Pure tensor functions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc.strategies import data_graphs
from tf_dgc.strategies.earlier_rows import EarlierRows

INPUTS, TARGETS, OTHERS = range(3)  # groups of the components of an element
_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


class Component(NamedTuple):
    """A part of an element."""

    name: str
    group: int
    rank: int | None  # of a tensor; -1 of what is none
    rows: int | None  # where its shape tells

    @property
    def has_rows(self) -> bool:
        """Tell whether this is a tensor with a first axis."""
        return self.rank is None or self.rank > 0


def components_of(spec: Any) -> list[Component]:
    """Return the components of an element, flat.

    Args:
        spec: (x, y, others ...), or x: tensors, or their specs, in any structure.
    """
    parts = spec if isinstance(spec, tuple) else (spec,)
    found = []
    for place, part in enumerate(parts):
        group = min(place, OTHERS)
        name = ("x", "y")[place] if place < OTHERS else f"element[{place}]"
        flat = tf.nest.flatten(part)
        names = _names(part, name)
        if len(names) != len(flat):
            names = [f"{name}[{i}]" for i in range(len(flat))]
        found += [_component(*pair, group) for pair in zip(names, flat, strict=True)]
    return found


def _component(name: str, part: Any, group: int) -> Component:
    shape = getattr(part, "shape", None)
    if shape is None or is_nothing(part) or data_graphs.is_none(part):
        return Component(name, group, -1, None)
    shape = tf.TensorShape(shape)
    return Component(name, group, shape.rank, shape[0] if shape.rank else None)


def anchor_of(components: Sequence[Component]) -> int | None:
    """Return the index of a component that has the rows of the batch, if one has.

    A target, or an input where there are none; one whose number of rows is not fixed.
    """
    rows = [(i, c) for i, c in enumerate(components) if c.has_rows]
    by_group = [[(i, c) for i, c in rows if c.group == g] for g in range(OTHERS + 1)]
    found = by_group[TARGETS] or by_group[INPUTS] or by_group[OTHERS]
    return min(found, key=lambda pair: pair[1].rows is not None)[0] if found else None


def _names(part: Any, name: str) -> list[str]:
    """Return the names of the tensors of a structure, in the order of tf.nest."""
    if isinstance(part, Mapping):
        pairs: Any = [(repr(key), part[key]) for key in sorted(part)]
    elif isinstance(part, (tuple, list)):
        pairs = enumerate(part)
    else:
        return [name]
    return [n for key, each in pairs for n in _names(each, f"{name}[{key}]")]


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


def row_count(args: Any) -> Any:
    """Return how many rows the batch has that a step gets.

    Args:
        args: of the step: an element, or (x, y, ...).

    Returns:
        An integer where that is known of tensors of a graph, a tensor of shape [] where
        it is not; None where there are no tensors with rows.
    """
    part = _with_rows(args)
    if part is None:
        return None
    rows = part.shape[0] if part.shape.rank else None
    return tf.cast(rows_in(part), tf.int32) if rows is None else rows


def tensors_of(args: Any) -> tuple[list[Any], list[tf.Tensor], int | None]:
    """Return the tensors of a batch, those that split ragged ones, and the rows.

    Args:
        args: as for `row_count`.

    Returns:
        Those that have the rows of the batch, sparse ones too, the splits, and how many
        rows there are, where shapes tell that.
    """
    parts, rows = tf.nest.flatten(args), row_count(args)
    known = rows if isinstance(rows, int) else None
    dense = [t for t in parts if isinstance(t, tf.Tensor) and t.shape.rank]
    dense = [t for t in dense if t.shape[0] == known]
    dense += [t for t in parts if isinstance(t, tf.SparseTensor)]
    splits = [t.row_splits for t in parts if isinstance(t, tf.RaggedTensor)]
    return dense, splits, known


def at_least_one_row(
    args: Any, earlier: EarlierRows | None = None
) -> tuple[Any, tf.Tensor]:
    """Add a row to what has none, as some layers refuse that.

    Args:
        args: as for `row_count`: tensors with rows along the first axis, ragged and
            sparse ones too, and anything that is no tensor.
        earlier: whose row it is where there is one; else it is of zeros.

    Returns:
        The structure, and how many rows the batch had: shape [], int32.
    """
    part = _with_rows(args)
    if part is None:
        return args, tf.ones([], tf.int32)
    count = tf.cast(rows_in(part), tf.int32)
    flat = tf.nest.flatten(args)
    places = [place for place, part in enumerate(flat) if _may_be_empty(part)]
    rows = earlier and earlier.of([flat[place] for place in places])
    for place, row in zip(places, rows or [None] * len(places), strict=True):
        flat[place] = _filled(flat[place], count == 0, row)
    return tf.nest.pack_sequence_as(args, flat), count


def _with_rows(args: Any) -> Any:
    """Return a tensor that has the rows of the batch; None where there is none."""
    one = isinstance(args, (tuple, list)) and len(args) == 1
    element = args[0] if one else tuple(args) if isinstance(args, list) else args
    flat = tf.nest.flatten(element)
    tensors = [part if isinstance(part, _TENSORS) else None for part in flat]
    components = components_of(tf.nest.pack_sequence_as(element, tensors))
    anchor = anchor_of(components)
    return None if anchor is None else flat[anchor]


def _may_be_empty(part: Any) -> bool:
    """Tell whether a tensor may have no rows; eagerly, whether one like it may."""
    if not isinstance(part, _TENSORS) or part.shape.rank == 0:
        return False
    return tf.executing_eagerly() or not (part.shape.rank and part.shape[0])


def _filled(part: Any, empty: tf.Tensor, kept: tf.Variable | None) -> Any:
    """Return a tensor with a row more, where it and the batch are empty."""
    empty &= tf.equal(rows_in(part), 0)  # what workers share may have rows
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
        if kept is not None:
            row = kept.read_value()
        else:
            row = tf.zeros(tf.concat([[1], tf.shape(part)[1:]], axis=0), part.dtype)
        return tf.concat([part, row], axis=0)

    filled = tf.cond(empty, with_row, lambda: tf.identity(part))
    if part.shape.rank is not None:
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


def rows_in(part: Any) -> Any:
    """Return how many rows a tensor of any kind has: shape [], an integer type."""
    if isinstance(part, tf.RaggedTensor):
        return part.nrows()
    return (part.dense_shape if isinstance(part, tf.SparseTensor) else tf.shape(part))[
        0
    ]


def sliced(part: Any, start: Any, stop: Any, size: int | None) -> Any:
    """Return rows of a tensor of any kind, or None as it is; one of `size` shares.

    Of some rows that may be all, or may be none, `size` is None.
    """
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
    # Some layers refuse a batch that is known to be empty, not one that is empty.
    length = whole // size if size and whole and whole % size == 0 else None
    return tf.compat.v1.placeholder_with_default(rows, [length, *part.shape[1:]])
