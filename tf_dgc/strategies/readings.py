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
from tf_dgc.strategies import row_axes
from tf_dgc.strategies.judgement import Judge
from tf_dgc.strategies.known import (
    ALIKE,
    CONSTANT,
    COUNT,
    LINEAR,
    NUMBER,
    ROWS,
    SAME,
    SCALE,
    SHAPE,
    SPLITS,
    UNKNOWN,
    UNREAD,
    Known,
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
        workers: N.
        shapes: of tensors, by which some facts are told.
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
            rows: tensors of the batch, dense and sparse ones, each with rows along the
                first axis.
            splits: where the rows of ragged ones begin and end.
            static: how many rows, where shapes tell.
            workers: N.
        """
        self.static, self.workers, self.asked = static, workers, 0
        self._kept = [*rows, *splits]
        self._parts = [each for each in rows if isinstance(each, tf.Tensor)]
        self._known = dict[int, Known]()
        for each in rows:
            self._known |= _known_of(each)
        self._known |= {id(each): Known(ROWS, SPLITS) for each in splits}
        facts = row_axes.AxisFacts(
            static,
            lambda t: self.of(t).origin == COUNT or self.of(t).kind == SHAPE,
            lambda tensor: self.of(tensor).picks,
            lambda tensor: self.of(tensor).copies,
            workers,
        )
        self.shapes = RowShapes(facts)
        self._terms = NumberTerms(static, workers, self._note)
        self._judge = Judge(facts, self.shapes, self._terms)

    @property
    def divided_by_rows(self) -> set[int]:
        """Ids of what was divided by a number of Python that tells the rows."""
        return self._judge.divided_by_rows

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

    def _judged(self, tensor: Any, operation: Operation | None) -> Known:
        """Judge a tensor whose inputs are known."""
        if power := self.power_of(tensor):
            return Known(NUMBER, terms=frozenset({(CONSTANT, power)}))
        if operation is not None and operation.kind == "Placeholder":
            return self._argument(tensor)
        if operation is None or operation.kind == "Const":
            return self.shapes.leaf(tensor)
        inputs = [self._known[id(each)] for each in operation.inputs]
        return self._judge.of(tensor, operation, inputs)

    def _argument(self, tensor: Any) -> Known:
        """Judge an argument of a function within the step, as of one that is the step.

        What looks like a part of the batch is one.
        """
        if self.static is None or not tensor.dtype.is_floating or not tensor.shape.rank:
            return self.shapes.leaf(tensor)
        if tensor.shape[0] is None:
            return UNREAD
        alike = any(
            part.dtype == tensor.dtype and part.shape == tensor.shape
            for part in self._parts
        )
        return Known(ROWS) if alike else self.shapes.leaf(tensor)


def _known_of(rows: Any) -> dict[int, Known]:
    """Return what is known of the tensors of rows, by their identity."""
    if not isinstance(rows, tf.SparseTensor):
        return {id(rows): Known(ROWS)}
    values = Known(ROWS, id(rows))  # as many as there are
    known = {id(rows.indices): values, id(rows.values): values}
    return known | {id(rows.dense_shape): Known(SHAPE)}


def _outer(tensor: Any, operation: Operation | None) -> Any:
    """Return what a tensor of a branch, or of a loop, has from the graph around it."""
    if operation is None or operation.kind != "Placeholder":
        return None
    found = _host.flow.outside(tensor.graph, tensor)
    return None if found is tensor or hasattr(found, "numpy") else found
