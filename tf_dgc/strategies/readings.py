"""Reading of a loss: which sums over the rows of a batch it is made of.

    one process     loss = F(S_1, S_2, ...)     each S a sum over all rows, or constant
    N workers       S_i = sum over workers of s_i,k

A mean is S / n, a masked mean S / (sum of the mask), Dice a ratio of three sums. The
operations by which the loss was computed are followed back to these sums.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import row_axes, row_rules
from tf_dgc.strategies.known import (
    ALIKE,
    CONSTANT,
    COUNT,
    LINEAR,
    NUMBER,
    ROW,
    ROWS,
    SAME,
    SCALE,
    SHAPE,
    SPLITS,
    SUM,
    THE_ROWS,
    UNKNOWN,
    UNREAD,
    Known,
    enters,
    row_count,
)
from tf_dgc.strategies.number_terms import NumberTerms
from tf_dgc.strategies.replicas import power_of
from tf_dgc.strategies.row_shapes import RowShapes

Operation = _host.operations.Operation

_MEETINGS = ("Collective", "Horovod")

_CREATING = {"Fill", "BroadcastTo", "Tile", "Zeros", "Empty"}


class Reading:
    """Facts about the tensors of one step.

    Attributes:
        static: how many rows the batch has, where shapes tell.
        shapes: of tensors, by which some facts are told.
        divided_by_rows: ids of what was divided by a number of Python that tells them.
        asked: N, where the step itself has asked for it.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        splits: Sequence[Any],
        static: int | None,
        workers: int = 1,
    ) -> None:
        """Begin with the batch.

        Args:
            rows: tensors of the batch, each with rows along the first axis.
            splits: where the rows of ragged ones begin and end.
            static: how many rows, where shapes tell.
            workers: N.
        """
        self.static, self.asked = static, 0
        self.divided_by_rows: set[int] = set()
        self._kept = [*rows, *splits]
        self._known = {id(each): Known(ROWS) for each in rows}
        self._known |= {id(each): Known(ROWS, SPLITS) for each in splits}
        self._facts = row_axes.AxisFacts(
            static,
            lambda t: self.of(t).origin == COUNT or self.of(t).kind == SHAPE,
            lambda tensor: self.of(tensor).picks,
            lambda tensor: self.of(tensor).copies,
            workers,
        )
        self.shapes = RowShapes(self._facts)
        self._terms = NumberTerms(static, workers, self._note)

    @property
    def doubts(self) -> list[str]:
        """Lines of divisions by what may be two things."""
        return self._terms.doubts

    def _note(self, tensor: Any, known: Known) -> None:
        self._known[id(tensor)] = known

    def of(self, tensor: Any) -> Known:
        """Return what is known of a tensor."""
        waiting = [tensor]
        while waiting:
            last = waiting[-1]
            if id(last) in self._known:
                waiting.pop()
                continue
            operation = _host.operations.of(last)
            inputs = [] if operation is None else list(operation.inputs)
            outer = _outer(last, operation)
            if outer is not None:
                inputs = [outer]
            missing = [each for each in inputs if id(each) not in self._known]
            if missing:
                waiting.extend(missing)
                continue
            self._kept.append(last)
            known = None if outer is None else self._known[id(outer)]
            self._known[id(last)] = known or self._judged(last, operation)
            waiting.pop()
        return self._known[id(tensor)]

    def power_of(self, tensor: Any) -> int:
        """Return the power of N that a constant stands for, or 0."""
        power, scalar = power_of(tensor), tensor.shape.rank == 0
        number = tensor.dtype.is_floating or tensor.dtype.is_integer
        if power or not (self.asked and scalar and number):
            return power
        operation = _host.operations.of(tensor)
        literal = operation is None or operation.kind == "Const"
        if not literal:
            return 0
        # N became a number of Python.
        value = tf.get_static_value(tensor)
        if value is None:
            return 0
        numbers: dict[float, int] = {self.asked: 1}
        if tensor.dtype.is_floating:
            numbers[1 / self.asked] = -1
        found = [p for n, p in numbers.items() if value == value.dtype.type(n)]
        return found[0] if found else 0

    def power_in(self, tensor: Any, operation: Operation) -> int:
        """Return the power of N that a constant stands for in an operation, or 0."""
        return self.power_of(tensor) if operation.kind in SCALE | LINEAR | SAME else 0

    def note_same(self, tensor: Any) -> None:
        """Note a tensor that is the same on all workers."""
        self._kept.append(tensor)
        self._known[id(tensor)] = ALIKE

    def note_rows(self, tensor: Any) -> None:
        """Note a tensor that has for each row what one process has for it."""
        self._kept.append(tensor)
        self._known[id(tensor)] = Known(ROWS, axis=self.shapes.by_shape(tensor))

    def line_of(self, tensor: Any) -> str:
        """Return the line of the user's code where knowledge ends."""
        operation = _host.operations.of(tensor)
        while operation is not None:
            inputs = [t for t in operation.inputs if self.of(t).kind == UNKNOWN]
            if not inputs:
                break
            tensor, operation = inputs[0], _host.operations.of(inputs[0])
        return operation.line() if operation is not None else ""

    # Judgement of one tensor, whose inputs are known.

    def _judged(self, tensor: Any, operation: Operation | None) -> Known:
        if power := self.power_of(tensor):
            return Known(NUMBER, terms=frozenset({(CONSTANT, power)}))
        if operation is None or operation.kind in ("Const", "Placeholder"):
            return self.shapes.leaf(tensor)
        inputs = [self._known[id(each)] for each in operation.inputs]
        kind, own = operation.kind, operation.output
        if kind == "IdentityN":
            inputs = inputs[own : own + 1]
            if inputs[0].nested:  # its gradient may be another
                return UNREAD
            return inputs[0]
        if any(each.kind == ROW for each in inputs):
            return row_rules.of_one_row(operation, inputs)
        if kind == "Prod" and self.shapes.is_shape(operation.inputs[0]):
            return row_count(THE_ROWS)
        if kind == "Fill" and self.shapes.is_shape(operation.inputs[0]):
            number = inputs[1].kind == NUMBER and enters(inputs[1], kind)
            return Known(ROWS, nested=number)
        if kind == "StridedSlice" and self.shapes.is_eager_shape(operation.inputs[0]):
            return self.shapes.of_shape(tensor, operation, [Known(SHAPE), *inputs[1:]])
        if all(i.kind == CONSTANT for i in inputs) or kind.startswith(_MEETINGS):
            return ALIKE
        if kind == "Range":
            return self.shapes.range(tensor, inputs)
        if SHAPE not in {each.kind for each in inputs[:1]} or kind in _CREATING:
            places = row_axes.places(operation)
            sized = [inputs[i] for i in places if i < len(inputs)]
            values = [ALIKE if i in places else each for i, each in enumerate(inputs)]
            if kind in _CREATING and self.shapes.makes_rows(tensor, sized, values):
                return self.shapes.created(tensor, values)
            inputs = values if kind not in _CREATING else inputs
        kinds = {each.kind for each in inputs}
        if kinds <= {CONSTANT}:
            return ALIKE
        if self._is_unknown(operation, inputs):
            return UNREAD
        if ROWS in kinds:
            return row_rules.of_rows(self._facts, tensor, operation, inputs)
        if UNKNOWN in kinds:
            return UNREAD
        if SHAPE in kinds:
            return self.shapes.of_shape(tensor, operation, inputs)
        stateful = _host.tensorflow.is_stateful(kind) or kind in row_axes.CALLS
        if stateful and self.static is None and self.shapes.has_rows(tensor):
            return Known(ROWS, axis=self.shapes.by_shape(tensor))
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

    def _is_unknown(self, operation: Operation, inputs: list[Known]) -> bool:
        """Tell whether something unknown becomes a value of what is computed."""
        opaque = row_axes.is_opaque(operation.kind)
        return any(
            known.kind == UNKNOWN and (not opaque or tensor.dtype.is_floating)
            for tensor, known in zip(operation.inputs, inputs, strict=True)
        )


def _outer(tensor: Any, operation: Operation | None) -> Any:
    """Return what a tensor of a branch, or of a loop, has from the graph around it."""
    if operation is None or operation.kind != "Placeholder":
        return None
    found = _host.flow.outside(tensor.graph, tensor)
    return None if found is tensor or hasattr(found, "numpy") else found
