"""Reading of a loss: which sums over the rows of a batch it is made of.

    one process     loss = F(S_1, S_2, ...)     each S a sum over all rows, or constant
    N workers       S_i = sum over workers of s_i,k

A mean is S / n, a masked mean S / (sum of the mask), Dice a ratio of three sums. The
operations by which the loss was computed are followed back to these sums.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.replicas import power_of

Operation = _host.operations.Operation

# What a tensor is, of this worker's rows.
CONSTANT = "constant"  # the same on all workers
ROWS = "rows"  # has a row, or several, of each row along an axis
SHAPE = "shape"  # the dimensions of such
NUMBER = "number"  # computed of sums over rows
UNKNOWN = "unknown"

# Terms of numbers, each with the power of N that multiplies it.
MEAN, SUM, COUNT = "mean", "sum", "count"
_THE_ROWS = "the rows"  # extent: as many as the batch has, or a multiple
SPLITS = "splits"  # one more, of ragged tensors

_LINEAR = {"AddV2", "Add", "AddN", "Sub", "Pack"}
_OF_FIRST = {"Sum", "Mean"}  # of numbers
_SAME = {
    *("Identity", "IdentityN", "Cast", "Reshape", "Squeeze", "ExpandDims"),
    *("EnsureShape", "StopGradient", "PreventGradient", "CheckNumerics", "Snapshot"),
    *("PlaceholderWithDefault", "Neg"),
}
_DIVISIONS = {"RealDiv", "DivNoNan", "Div", "Xdivy", "FloorDiv", "TruncateDiv"}
_REDUCTIONS = {"Sum", "Mean"}
_ALONG_AXES = {"Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "Transpose"}
_SUMS = {"L2Loss", "UnsortedSegmentSum", "SegmentSum", "DenseBincount", "Bincount"}
_CHOOSING = {"GatherV2", "GatherNd"}  # by indices
_PICKING = {"StridedSlice", "Slice", "GatherV2", "Split", "SplitV", "Unpack"}


class Known(NamedTuple):
    """What is known of a tensor.

    Attributes:
        kind: see above.
        extent: of rows: what their number depends on.
        axis: of rows.
        scales: of rows: numbers, shape [], by which all of them were multiplied, and
            whether they were divided instead.
        terms: of a number: pairs of a term and a power of N; None for others.
        origin: of a number that is made of rows: MEAN, SUM or COUNT.
    """

    kind: str
    extent: Any = _THE_ROWS
    axis: int = 0
    scales: tuple[tuple[Any, bool], ...] = ()
    terms: frozenset[tuple[str, int]] | None = frozenset()
    origin: str = ""


_CONSTANT, _UNKNOWN = Known(CONSTANT), Known(UNKNOWN)


class Reading:
    """What is known of the tensors of one step."""

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
        self._static, self._workers = static, workers
        self.doubts: list[str] = []  # lines of divisions by what may be two things
        self.asked = 0  # N, where the step itself has asked for it
        self._kept = [*rows, *splits]
        self._known = {id(each): Known(ROWS) for each in rows}
        self._known |= {id(each): Known(ROWS, SPLITS) for each in splits}

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
            missing = [each for each in inputs if id(each) not in self._known]
            if missing:
                waiting.extend(missing)
                continue
            self._kept.append(last)
            self._known[id(last)] = self._judged(last, operation)
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

    def may_count(self, tensor: Any) -> bool:
        """Tell whether a constant may be the number of rows, which shapes have told."""
        value = tf.get_static_value(tensor)
        if value is None or self._static in (None, 1):
            return False
        return bool((value != 0).all() and (value % self._static == 0).all())

    def note_same(self, tensor: Any) -> None:
        """Note a tensor that is the same on all workers."""
        self._kept.append(tensor)
        self._known[id(tensor)] = _CONSTANT

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
            return self._leaf(tensor)
        inputs = [self._known[id(each)] for each in operation.inputs]
        if operation.kind == "IdentityN":
            inputs = inputs[operation.output : operation.output + 1]
        if operation.kind in _ALONG_AXES and inputs[0].kind != SHAPE:
            # Axes are numbers, too.
            inputs = [*inputs[:1], *[_CONSTANT for _ in inputs[1:]]]
        if operation.kind == "Prod" and self._is_shape(operation.inputs[0]):
            return _count(_THE_ROWS)
        kinds = {each.kind for each in inputs}
        if operation.kind == "Fill" and self._is_shape(operation.inputs[0]):
            return Known(ROWS)
        if kinds <= {CONSTANT} or operation.kind.startswith(("Collective", "Horovod")):
            return _CONSTANT
        if ROWS in kinds:
            return self._of_rows(tensor, operation, inputs)
        if UNKNOWN in kinds:
            by_shape = self._static is None and self._has_rows(tensor)
            return Known(ROWS) if by_shape else _UNKNOWN
        if SHAPE in kinds:
            return self._of_shape(tensor, operation, inputs)
        if self._static is None and self._has_rows(tensor):
            return Known(ROWS)
        if _host.tensorflow.is_stateful(operation.kind) or _calls(operation):
            return _UNKNOWN
        if operation.kind in ("Pack", "ConcatV2") and tensor.dtype.is_integer:
            counts = [each for each in inputs if each.origin == COUNT]
            if counts and tensor.shape.rank == 1:
                return Known(SHAPE, counts[0].extent)
        return Known(NUMBER, terms=self._terms(operation, inputs))

    def _leaf(self, tensor: Any) -> Known:
        """Judge what nothing is known of: a constant, or an argument of a function."""
        if self._static is None:
            rows = tensor.dtype != tf.resource and self._has_rows(tensor)
            return Known(ROWS, id(tensor)) if rows else _CONSTANT
        name = "" if hasattr(tensor, "numpy") else tensor.op.name.rpartition("/")[2]
        if name.startswith("Shape") and self._is_shape(tensor):
            return Known(SHAPE)
        if name.startswith("Size") and self._is_size(tensor):
            return _count(_THE_ROWS)
        return Known(ROWS) if self._is_one_number_for_rows(tensor) else _CONSTANT

    def _is_size(self, tensor: Any) -> bool:
        """Tell whether `tf.size(rows)`, which shapes have told, may be this number."""
        value = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
        return value is not None and bool(value) and value % self._static == 0

    def _is_one_number_for_rows(self, tensor: Any) -> bool:
        """Tell whether this may be `tf.ones_like(rows)`, of shapes that are known."""
        rank = tensor.shape.rank or 0
        if rank <= (self._static == 1) or tensor.shape[0] != self._static:
            return False
        value = tf.get_static_value(tensor)
        return value is not None and bool((value == value.reshape([-1])[:1]).all())

    def _is_shape(self, tensor: Any) -> bool:
        """Tell whether a vector of numbers, as Keras makes it, is the shape of rows."""
        if self._static is None or not tensor.dtype.is_integer:
            return False
        value = tf.get_static_value(tensor) if tensor.shape.rank == 1 else None
        return value is not None and value.size > 0 and value[0] == self._static

    def _has_rows(self, tensor: Any) -> bool:
        shape = tensor.shape
        if shape.rank is None:
            return True
        if self._static is None:
            return any(size is None for size in shape)
        return bool(shape.rank and shape[0] and shape[0] % self._static == 0)

    def _keeps_rows(
        self, tensor: Any, operation: Operation, inputs: list[Known]
    ) -> bool:
        """Tell whether what is computed of rows has rows, too."""
        if self._has_rows(tensor) or self._static is None or not tensor.shape.rank:
            return self._has_rows(tensor)
        if operation.kind == "Where":
            return True
        pairs = zip(operation.inputs, inputs, strict=True)
        same = [t for t, known in pairs if known.kind == ROWS and t.shape.rank]
        return any(t.shape[0] == tensor.shape[0] for t in same)

    def _axis(self, tensor: Any, otherwise: int) -> int:
        if self._static is not None or tensor.shape.rank is None:
            return otherwise
        found = [i for i, size in enumerate(tensor.shape) if size is None]
        return found[0] if found else otherwise

    def _of_rows(self, tensor: Any, operation: Operation, inputs: list[Known]) -> Known:
        kind, first = operation.kind, inputs[0]
        if kind in ("Shape", "ShapeN"):
            return Known(SHAPE, first.extent)
        if kind == "Size":
            return _count(first.extent)
        if kind in _SUMS:
            return self._reduced(first, mean=False)
        if kind in _REDUCTIONS and first.kind == ROWS:
            axes = tf.get_static_value(operation.inputs[1])
            rank = operation.inputs[0].shape.rank
            if axes is None or rank is None:
                return _UNKNOWN
            if first.axis in {int(axis) % rank for axis in axes.reshape([-1])}:
                return self._reduced(first, kind == "Mean")
        if kind == "MatMul" and self._contracts(operation, inputs):
            return self._reduced(Known(ROWS), mean=False)
        if not self._keeps_rows(tensor, operation, inputs):
            return _UNKNOWN
        rows = [each for each in inputs if each.kind == ROWS]
        extent = rows[0].extent
        if kind == "Where":
            extent = id(tensor)
        elif kind == "StridedSlice" and extent == SPLITS:
            extent = _THE_ROWS
        elif kind in _CHOOSING and inputs[1].kind == ROWS:
            extent = inputs[1].extent
        scales = self._scales(operation, inputs)
        return Known(ROWS, extent, self._axis(tensor, rows[0].axis), scales)

    def _reduced(self, source: Known, mean: bool) -> Known:
        """Judge the sum, or mean, of rows."""
        origin = MEAN if mean else SUM
        simple = not source.scales and (not mean or source.extent == _THE_ROWS)
        terms = frozenset({(origin, 0)}) if simple else None
        return Known(NUMBER, source.extent, source.axis, source.scales, terms, origin)

    def _contracts(self, operation: Operation, inputs: list[Known]) -> bool:
        """Tell whether a product of matrices sums over rows."""
        axes = [
            int(operation.attributes("transpose_a")) ^ 1,
            int(operation.attributes("transpose_b")),
        ]
        return all(
            each.kind == ROWS and each.axis == axis
            for each, axis in zip(inputs, axes, strict=True)
        )

    def _scales(
        self, operation: Operation, inputs: list[Known]
    ) -> tuple[tuple[Any, bool], ...]:
        """Return by what numbers rows have been multiplied, where that is known."""
        kind, tensors = operation.kind, list(operation.inputs)
        if kind in _SAME | {"Sum", "Mean", "Transpose"}:
            return inputs[0].scales
        if kind in ("SelectV2", "Select") and inputs[1].kind == NUMBER:
            zero = tf.get_static_value(tensors[2])
            if zero is not None and not zero.any() and tensors[1].shape.rank == 0:
                return ((tensors[1], False),)
        if kind == "Mul" or kind in _DIVISIONS:
            divides, found = kind != "Mul", []
            for i, (tensor, known) in enumerate(zip(tensors, inputs, strict=True)):
                inverse = divides and i == 1
                if known.kind == ROWS:
                    found += [(c, by ^ inverse) for c, by in known.scales]
                elif known.kind in (NUMBER, UNKNOWN) and tensor.shape.rank == 0:
                    found.append((tensor, inverse))
            return tuple(found)
        return ()

    def _of_shape(
        self, tensor: Any, operation: Operation, inputs: list[Known]
    ) -> Known:
        """Judge what is computed of the dimensions of rows."""
        extent = next(each.extent for each in inputs if each.kind == SHAPE)
        if operation.kind in _PICKING and inputs[0].kind == SHAPE:
            begin = tf.get_static_value(operation.inputs[1])
            first = begin is not None and int(begin.reshape([-1])[0]) == 0
            if operation.kind == "StridedSlice":
                first = first or bool(operation.attributes("begin_mask") & 1)
            if not first:
                return _CONSTANT
        if tensor.shape.rank == 0:
            return _count(extent)
        if tensor.shape.rank == 1 and tensor.dtype.is_integer:
            return Known(SHAPE, extent)
        return Known(ROWS, extent) if self._has_rows(tensor) else _CONSTANT

    def _terms(
        self, operation: Operation, inputs: list[Known]
    ) -> frozenset[tuple[str, int]] | None:
        """Return the terms of what is computed of numbers and constants."""
        found = [
            frozenset({(CONSTANT, 0)}) if each.kind == CONSTANT else each.terms
            for each in inputs
        ]
        kind = operation.kind
        if kind in _SAME | _OF_FIRST:
            return found[0]
        if any(each is None for each in found):
            return None
        if kind in _LINEAR:
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
        if by == {(CONSTANT, 0)} and self._static is not None and sums:
            by = self._count_told_as_number(operation, by)
        if len(by) != 1:
            return None
        ((term, power),) = by
        if term == CONSTANT:
            return frozenset((each, p - power) for each, p in one)
        if term == COUNT and sums:
            return frozenset((MEAN, p - power) for _, p in one)
        return None

    def _count_told_as_number(self, operation: Operation, by: Any) -> Any:
        """Eagerly what shapes tell are numbers of Python."""
        told = operation.inputs[1]
        value = tf.get_static_value(told)
        before = _host.operations.of(operation.inputs[0])
        size = before and before.inputs and before.inputs[0].shape.num_elements()
        if value is None or value.shape != () or value not in (self._static, size):
            return by
        if value != self._static and value == self._workers * (self._static or 0):
            # The rows of all, or the elements of this worker's rows.
            self.doubts.append(operation.line())
            return by
        if _host.operations.of(told) is not None:  # else equal ones may be one tensor
            self._known[id(told)] = _count(_THE_ROWS)
        return frozenset({(COUNT, 0)})


def _count(extent: Any) -> Known:
    term = COUNT if extent == _THE_ROWS else SUM
    return Known(NUMBER, extent, terms=frozenset({(term, 0)}), origin=COUNT)


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


def _calls(operation: Operation) -> bool:
    return operation.kind in (
        *("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While"),
        *("StatelessWhile", "PyFunc", "EagerPyFunc", "PyFuncStateless"),
    )
