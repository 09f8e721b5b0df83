"""Rules of what is computed of rows: rows again, or numbers of all of them."""

from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import row_axes
from tf_dgc.strategies.known import (
    ALIKE,
    CONSTANT,
    LARGEST,
    MEAN,
    NUMBER,
    ROW,
    ROWS,
    SAME,
    SCALE,
    SHAPE,
    SMALLEST,
    SPLITS,
    SUM,
    THE_ROWS,
    UNREAD,
    Known,
    enters,
    row_count,
)

Operation = _host.operations.Operation

_REDUCTIONS = {"Sum", "Mean"}
_EXTREMES = {"Max": LARGEST, "Any": LARGEST, "Min": SMALLEST, "All": SMALLEST}
_SUMS = {
    *("L2Loss", "UnsortedSegmentSum", "SegmentSum", "DenseBincount", "Bincount"),
    "HistogramFixedWidth",
}
_CHOOSING = {"GatherV2", "GatherNd"}  # by indices
_LOSE_PLACES = {"FloorMod", "Mod", "Sub"}  # of positions of rows


def of_rows(
    facts: row_axes.AxisFacts, tensor: Any, operation: Operation, inputs: list[Known]
) -> Known:
    """Judge what is computed of rows.

    Args:
        facts: about the batch.
        tensor: that is judged.
        operation: that makes it.
        inputs: what is known of its inputs.
    """
    kind, first = operation.kind, inputs[0]
    rows = {i: known for i, known in enumerate(inputs) if known.kind == ROWS}
    if kind in ("Shape", "ShapeN"):
        first = inputs[operation.output if kind == "ShapeN" else 0]
        return Known(SHAPE, first.extent) if first.kind == ROWS else ALIKE
    if kind == "Size":
        return row_count(first.extent)
    scales, nested = _scales(operation, inputs)
    if nested and (row_axes.is_opaque(kind) or _is_drawn(kind) or kind == "Where"):
        return UNREAD
    if kind == "Cast" and tensor.dtype.is_floating and _are_places(operation, first):
        return UNREAD
    by_row = kind == "DenseBincount" and tensor.shape.rank == 2
    known = tensor.shape.rank and tensor.shape[0] is not None
    if kind in _SUMS and known and not by_row:
        return _reduced(first, False, nested)
    if kind == "ScatterNd" and known and _scatters_rows(facts, tensor, inputs):
        return _reduced(inputs[1], False, nested)
    if kind == "L2Loss":
        return _reduced(first, False, nested)
    if kind == "Unpack" and not (scales or nested) and _is_along(operation, first):
        count = operation.attributes("num")
        return Known(ROW, (first.extent, count, operation.output))
    over_rows = kind in _REDUCTIONS | _EXTREMES.keys() and _is_over(
        operation, first.axis if first.kind == ROWS else None
    )
    if kind in _EXTREMES and (over_rows or tensor.shape.rank == 0):
        if scales or nested:
            return UNREAD
        origin = _EXTREMES[kind]
        return Known(NUMBER, first.extent, first.axis, (), None, origin)
    if over_rows:
        return _reduced(first, kind == "Mean", nested)
    if kind in _REDUCTIONS and not tensor.shape.rank:
        known = tensor.shape.rank == 0
        return _reduced(first, kind == "Mean", nested) if known else UNREAD
    if kind in ("MatMul", "Einsum") and _contracts(operation, inputs):
        return _reduced(Known(ROWS), False, nested)
    if kind == "SparseTensorDenseMatMul" and operation.attributes("adjoint_a"):
        return UNREAD  # rows meet rows
    try:
        at = {i: known.axis for i, known in rows.items()}
        axis = row_axes.after(facts, operation, tensor, at)
    except row_axes.Moved:
        return UNREAD
    found = list(rows.values())
    extent = found[0].extent
    if kind == "Where":
        extent = id(tensor)
    elif kind == "SparseTensorDenseMatMul" and inputs[2].kind == SHAPE:
        extent = inputs[2].extent
    elif kind == "StridedSlice" and extent == SPLITS:
        extent = THE_ROWS
    elif kind in _CHOOSING and 1 in rows:
        extent = rows[1].extent
    picks = kind == "Where" or any(each.picks for each in found)
    copies = max(each.copies for each in found)
    if kind == "ConcatV2" and _joins_rows(operation, axis):
        copies = sum(each.copies for each in found)
    if kind in ("Split", "SplitV") and _joins_rows(operation, axis):
        copies //= operation.attributes("num_split")
    picks = picks and kind not in _LOSE_PLACES
    return Known(ROWS, extent, axis, scales, nested=nested, picks=picks, copies=copies)


def of_one_row(operation: Operation, inputs: list[Known]) -> Known:
    """Judge what is made of single rows: of one of them, or of all in their order.

    So a function goes through rows in an eager step, as that of `tf.map_fn`.
    """
    kinds, extents = {each.kind for each in inputs}, [i.extent for i in inputs]
    if operation.kind == "Pack" and kinds == {ROW}:
        whole, count, _ = extents[0]
        if extents == [(whole, count, i) for i in range(count)]:
            rank = (operation.inputs[0].shape.rank or 0) + 1
            return Known(ROWS, whole, operation.attributes("axis") % rank)
    of = {each.extent for each in inputs if each.kind == ROW}
    if len(of) == 1 and kinds <= {ROW, CONSTANT}:
        return Known(ROW, of.pop())
    return UNREAD


def _reduced(source: Known, mean: bool, nested: bool) -> Known:
    """Judge the sum, or mean, of rows."""
    origin = MEAN if mean else SUM
    if mean and nested and (source.extent != THE_ROWS or source.axis is None):
        return UNREAD
    simple = not source.scales and (not mean or source.extent == THE_ROWS)
    terms = frozenset({(origin, 0)}) if simple and not nested else None
    scales = () if nested else source.scales
    return Known(NUMBER, source.extent, source.axis, scales, terms, origin, nested)


def _scatters_rows(facts: row_axes.AxisFacts, tensor: Any, inputs: list[Known]) -> bool:
    """Tell whether rows are added up where they tell, in what has no rows."""
    rows = [each.kind == ROWS and each.axis == 0 for each in inputs[:2]]
    alone = row_axes.axis_by_shape(facts, tensor) is None
    return all(rows) and not inputs[0].picks and alone


def _contracts(operation: Operation, inputs: list[Known]) -> bool:
    """Tell whether a product of matrices sums over rows."""
    if any(each.kind != ROWS or each.axis is None for each in inputs):
        return False
    at = [each.axis for each in inputs if each.axis is not None]
    if operation.kind == "Einsum":
        labels, out = row_axes.labels_of(operation)
        found = {label[axis] for label, axis in zip(labels, at, strict=True)}
        return len(found) == 1 and not found & set(out)
    axes = [
        int(operation.attributes("transpose_a")) ^ 1,
        int(operation.attributes("transpose_b")),
    ]
    return at == axes


def _scales(
    operation: Operation, inputs: list[Known]
) -> tuple[tuple[tuple[Any, bool], ...], bool]:
    """Return by what numbers rows have been multiplied, where all is known of it.

    Returns:
        These, and whether numbers go into the rows in another way.
    """
    kind, tensors = operation.kind, list(operation.inputs)
    pairs = list(zip(tensors, inputs, strict=True))
    made = [known for known in inputs if known.kind in (ROWS, NUMBER)]
    scaled = any(known.scales for known in made if known.kind == ROWS)
    numbers = [t for t, k in pairs if k.kind == NUMBER and enters(k, kind)]
    if any(known.nested for known in made if known.kind == ROWS):
        return (), True
    if not scaled and (not numbers or _is_drawn(kind)):
        return (), False
    if kind in SAME | {"Sum", "Mean", "Transpose"} and not numbers:
        keeps = kind != "Cast" or _is_cast(operation)
        return (inputs[0].scales, False) if keeps else ((), True)
    if kind in ("SelectV2", "Select") and inputs[1].kind == NUMBER and not scaled:
        zero = tf.get_static_value(tensors[2])
        if zero is not None and not zero.any() and tensors[1].shape.rank == 0:
            return ((tensors[1], False),), False
    if kind in SCALE and all(t.shape.rank == 0 for t in numbers):
        found = []
        for i, (tensor, known) in enumerate(pairs):
            inverse = kind != "Mul" and i == 1
            if known.kind == ROWS:
                found += [(c, by ^ inverse) for c, by in known.scales]
            elif known.kind == NUMBER:
                found.append((tensor, inverse))
        return tuple(found), False
    return (), True


def _is_over(operation: Operation, axis: int | None) -> bool:
    """Tell whether an operation reduces over an axis; False where nobody knows."""
    axes = tf.get_static_value(operation.inputs[1])
    rank = operation.inputs[0].shape.rank
    if None in (axis, rank) or axes is None:
        return False
    return axis in {int(each) % rank for each in axes.reshape([-1])}


def _is_cast(operation: Operation) -> bool:
    return bool(tf.as_dtype(operation.attributes("DstT")).is_floating)


def _are_places(operation: Operation, rows: Known) -> bool:
    """Tell whether an operation is given 0, 1, ..., by which workers count their rows.

    Not where something was added to that: the rows of other workers, maybe.
    """
    made: Operation | None = operation
    while made is not None and made.kind in SAME:
        made = _host.operations.of(made.inputs[0])
    return made is not None and made.kind == "Range" and rows.extent == THE_ROWS


def _is_drawn(kind: str) -> bool:
    return _host.tensorflow.is_stateful(kind) or kind.startswith("StatelessRandom")


def _joins_rows(operation: Operation, axis: int | None) -> bool:
    """Tell whether an operation joins tensors, or parts one, along their rows."""
    at = {"Split": 0, "SplitV": 2}.get(operation.kind, len(operation.inputs) - 1)
    along = tf.get_static_value(operation.inputs[at])
    rank = operation.inputs[1 if operation.kind == "Split" else 0].shape.rank
    return along is not None and bool(rank) and int(along) % rank == axis


def _is_along(operation: Operation, rows: Known) -> bool:
    """Tell whether an operation takes rows apart."""
    rank = operation.inputs[0].shape.rank
    return rank is not None and operation.attributes("axis") % rank == rows.axis
