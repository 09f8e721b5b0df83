"""Judgement of what an operation makes of its inputs: rows, numbers or shapes."""

from typing import Any

from tf_dgc import _host
from tf_dgc.strategies import row_axes, row_rules
from tf_dgc.strategies.known import (
    ALIKE,
    CONSTANT,
    COUNT,
    NUMBER,
    ROW,
    ROWS,
    SCALE,
    SHAPE,
    SUM,
    THE_ROWS,
    UNKNOWN,
    UNREAD,
    Known,
    enters,
    row_count,
)
from tf_dgc.strategies.number_terms import NumberTerms
from tf_dgc.strategies.row_shapes import RowShapes

Operation = _host.operations.Operation

_MEETINGS = ("Collective", "Horovod")

_CUTTING = {"Slice", "StridedSlice"}
_CREATING = {"Fill", "BroadcastTo", "Tile", "Zeros", "Empty"}


class Judge:
    """Rules of operations, in the order in which they are asked.

    Attributes:
        divided_by_rows: ids of what was divided by a number of Python that tells them.
    """

    def __init__(
        self, facts: row_axes.AxisFacts, shapes: RowShapes, terms: NumberTerms
    ) -> None:
        """Take what is known of a step.

        Args:
            facts: about its rows.
            shapes: of tensors.
            terms: of numbers.
        """
        self._facts, self._shapes, self._terms = facts, shapes, terms
        self.divided_by_rows: set[int] = set()

    def of(self, tensor: Any, operation: Operation, inputs: list[Known]) -> Known:
        """Return what an operation makes of its inputs.

        Args:
            tensor: an output of the operation.
            operation: with inputs.
            inputs: what is known of them.
        """
        kind, own = operation.kind, operation.output
        if kind == "IdentityN":
            inputs = inputs[own : own + 1]
            if inputs[0].nested:  # its gradient may be another
                return UNREAD
            return inputs[0]
        if any(each.kind == ROW for each in inputs):
            return row_rules.of_one_row(operation, inputs)
        if kind == "Prod" and self._shapes.is_shape(operation.inputs[0]):
            return row_count(THE_ROWS)
        if kind == "Fill" and self._shapes.is_shape(operation.inputs[0]):
            number = inputs[1].kind == NUMBER and enters(inputs[1], kind)
            return Known(ROWS, nested=number)
        if kind == "StridedSlice" and self._shapes.is_eager_shape(operation.inputs[0]):
            return self._shapes.of_shape(tensor, operation, [Known(SHAPE), *inputs[1:]])
        if all(i.kind == CONSTANT for i in inputs) or kind.startswith(_MEETINGS):
            return ALIKE
        if kind == "Range":
            return self._shapes.range(tensor, inputs)
        if SHAPE not in {each.kind for each in inputs[:1]} or kind in _CREATING:
            places = row_axes.places(operation)
            sized = [inputs[i] for i in places if i < len(inputs)]
            if kind in _CUTTING and _is_by_place(inputs[0], sized):
                return UNREAD
            values = [ALIKE if i in places else each for i, each in enumerate(inputs)]
            if kind in _CREATING and self._shapes.makes_rows(tensor, sized, values):
                return self._shapes.created(tensor, values)
            inputs = values if kind not in _CREATING else inputs
        kinds = {each.kind for each in inputs}
        if kinds <= {CONSTANT}:
            return ALIKE
        if _is_unknown(operation, inputs):
            return UNREAD
        if ROWS in kinds:
            return row_rules.of_rows(self._facts, tensor, operation, inputs)
        if UNKNOWN in kinds:
            return UNREAD
        if SHAPE in kinds:
            return self._shapes.of_shape(tensor, operation, inputs)
        stateful = _host.tensorflow.is_stateful(kind) or kind in row_axes.CALLS
        if stateful and self._facts.static is None and self._shapes.has_rows(tensor):
            return Known(ROWS, axis=self._shapes.by_shape(tensor))
        if stateful:
            return UNREAD
        if kind in ("Pack", "ConcatV2") and tensor.dtype.is_integer:
            counts = [each for each in inputs if each.origin == COUNT]
            if counts and tensor.shape.rank == 1:
                return Known(SHAPE, counts[0].extent)
        if kind in SCALE - {"Mul"} and inputs[1].kind == CONSTANT:
            sums = inputs[0].origin == SUM or inputs[0].terms == frozenset({(SUM, 0)})
            told = _host.operations.of(operation.inputs[1])
            if sums and self._terms.tells_count(operation) and told is None:
                self.divided_by_rows.add(id(tensor))
        counts_rows = all(each.picks for each in inputs if each.kind == NUMBER)
        picks = counts_rows and not tensor.dtype.is_floating
        return Known(NUMBER, terms=self._terms.of(operation, inputs), picks=picks)


def _is_by_place(given: Known, sized: list[Known]) -> bool:
    """Tell whether rows take what all workers have by their places in a batch."""
    by_rows = any(e.kind == SHAPE and e.extent == THE_ROWS for e in sized)
    return given.kind == CONSTANT and by_rows


def _is_unknown(operation: Operation, inputs: list[Known]) -> bool:
    """Tell whether something unknown becomes a value of what is computed."""
    opaque = row_axes.is_opaque(operation.kind)
    return any(
        known.kind == UNKNOWN and (not opaque or tensor.dtype.is_floating)
        for tensor, known in zip(operation.inputs, inputs, strict=True)
    )
