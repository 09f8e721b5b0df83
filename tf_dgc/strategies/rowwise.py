"""Maps of batches that give each row what it would get in any other batch.

Only operations are known here that give the same bits wherever a row stands.
"""

from typing import Any

import tensorflow as tf

# Element by element, of one shape, or with constants of fewer dimensions.
_BY_ELEMENT = frozenset(
    "Abs Add AddV2 Cast ClipByValue Div DivNoNan Equal Floor FloorDiv FloorMod Greater "
    "GreaterEqual Identity Less LessEqual LogicalAnd LogicalNot LogicalOr Maximum "
    "Minimum Mul Neg NotEqual RealDiv Relu Round SelectV2 Sign Sqrt Square "
    "SquaredDifference StopGradient Sub".split()
)
# Of images, the first axis of which counts them; all else are constants.
_BY_IMAGE = ("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor")


def maps_rows(graph: Any, parts: int) -> bool:
    """Tell whether a function maps each row of a batch for itself.

    Args:
        graph: of the function.
        parts: how many of its inputs are of the batch, the first ones.
    """
    rows = {tensor.ref() for tensor in graph.inputs[:parts]}
    if any(t.shape.rank in (None, 0) or t.shape[0] for t in graph.inputs[:parts]):
        return False
    for operation in graph.get_operations():
        if any(tensor.ref() in rows for tensor in operation.inputs):
            if not _keeps_rows(operation, rows):
                return False
            rows.update(tensor.ref() for tensor in operation.outputs)
    return all(tensor.ref() in rows for tensor in graph.outputs)


def _keeps_rows(operation: Any, rows: set[Any]) -> bool:
    others = operation.inputs[1:]
    constant = not any(tensor.ref() in rows for tensor in others)
    if operation.type in _BY_ELEMENT:
        rank = operation.outputs[0].shape.rank
        return rank is not None and all(
            tensor.shape.rank == rank
            if tensor.ref() in rows
            else _is_alike_for_rows(tensor.shape, rank)
            for tensor in operation.inputs
        )
    if operation.type in _BY_IMAGE:
        return constant
    if operation.type == "OneHot":
        return constant and operation.get_attr("axis") != 0
    if operation.type == "ExpandDims":
        axis = tf.get_static_value(others[0])
        return axis is not None and (axis > 0 or axis == -1)
    return False


def _is_alike_for_rows(shape: tf.TensorShape, rank: int) -> bool:
    """Tell whether a constant is the same for each row of a tensor of some rank."""
    if shape.rank is None:
        return False
    return bool(shape.rank < rank or (shape.rank == rank and shape[0] == 1))
