"""Terms of numbers: by which sums of rows, and powers of N, one is made."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.known import (
    CONSTANT,
    COUNT,
    LINEAR,
    MEAN,
    SAME,
    SUM,
    THE_ROWS,
    Known,
    row_count,
)

Operation = _host.operations.Operation

_OF_FIRST = {"Sum", "Mean"}  # of numbers
_DIVISIONS = {"RealDiv", "DivNoNan", "Div", "Xdivy", "FloorDiv", "TruncateDiv"}


class NumberTerms:
    """Terms of the numbers of one step.

    Attributes:
        doubts: lines of divisions by what may be two things.
    """

    def __init__(
        self, static: int | None, workers: int, note: Callable[[Any, Known], None]
    ) -> None:
        """Begin without a number.

        Args:
            static: how many rows the batch has, where shapes tell.
            workers: N.
            note: takes a tensor, and what is known of it by now.
        """
        self._static, self._workers, self._note = static, workers, note
        self.doubts: list[str] = []

    def of(
        self, operation: Operation, inputs: list[Known]
    ) -> frozenset[tuple[str, int]] | None:
        """Return the terms of what is computed of numbers and constants."""
        found = [
            frozenset({(CONSTANT, 0)}) if each.kind == CONSTANT else each.terms
            for each in inputs
        ]
        kind = operation.kind
        if kind in SAME | _OF_FIRST:
            return found[0]
        if any(each is None for each in found):
            return None
        if kind in LINEAR:
            pairs = zip(found, operation.inputs, strict=True)
            parts = [each for each, t in pairs if each and not _is_zero(t)]
            return frozenset[tuple[str, int]]().union(*parts)
        if kind == "Mul":
            return _product(found[0], found[1]) or _product(found[1], found[0])
        if kind in _DIVISIONS:
            return self._quotient(operation, *found)
        return None

    def _quotient(self, operation: Operation, one: Any, by: Any) -> Any:
        sums = all(term == SUM for term, _ in one)
        if by == {(CONSTANT, 0)} and sums and self.tells_count(operation):
            by = {(COUNT, 0)}
        if len(by) != 1:
            return None
        ((term, power),) = by
        if term == CONSTANT:
            return frozenset((each, p - power) for each, p in one)
        if term == COUNT and sums:
            return frozenset((MEAN, p - power) for _, p in one)
        return None

    def tells_count(self, operation: Operation) -> bool:
        """Tell whether a divisor, that shapes have told in Python, is the rows."""
        told = operation.inputs[1]
        value = tf.get_static_value(told)
        if self._static is None or value is None or value.shape != ():
            return False
        before = _host.operations.of(operation.inputs[0])
        size = before and before.inputs and before.inputs[0].shape.num_elements()
        if value not in (self._static, size):
            return False
        if value != self._static and value == self._workers * self._static:
            # The rows of all, or the elements of this worker's rows.
            self.doubts.append(operation.line())
            return False
        if _host.operations.of(told) is not None:  # else equal ones may be one tensor
            self._note(told, row_count(THE_ROWS))
        return True


def _product(one: Any, by: Any) -> Any:
    if len(by) != 1:
        return None
    ((term, power),) = by
    if term == COUNT and all(each == MEAN for each, _ in one):
        return frozenset((SUM, p + power) for _, p in one)
    if term != CONSTANT:
        return None
    return frozenset((each, p + power) for each, p in one)


def _is_zero(tensor: Any) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and value.shape == () and value == 0
