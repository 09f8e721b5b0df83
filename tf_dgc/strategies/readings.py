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
from tf_dgc.strategies import row_axes
from tf_dgc.strategies.replicas import power_of

Operation = _host.operations.Operation

# What a tensor is, of this worker's rows.
CONSTANT = "constant"  # the same on all workers
ROWS = "rows"  # has a row, or several, of each row along an axis
ROW = "row"  # made of one row, as in a loop of Python over them; `extent` says of which
SHAPE = "shape"  # the dimensions of such
NUMBER = "number"  # computed of sums over rows
UNKNOWN = "unknown"

_MEETINGS = ("Collective", "Horovod")

# Terms of numbers, each with the power of N that multiplies it.
MEAN, SUM, COUNT = "mean", "sum", "count"
LARGEST, SMALLEST = "largest", "smallest"
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
_SCALE = {"Mul", "RealDiv", "DivNoNan", "Div"}
_REDUCTIONS = {"Sum", "Mean"}
_EXTREMES = {"Max": LARGEST, "Any": LARGEST, "Min": SMALLEST, "All": SMALLEST}
_SUMS = {"L2Loss", "UnsortedSegmentSum", "SegmentSum", "DenseBincount", "Bincount"}
_CHOOSING = {"GatherV2", "GatherNd"}  # by indices
_CREATING = {"Fill", "BroadcastTo", "Tile", "Zeros", "Empty"}
_LOSE_PLACES = {"FloorMod", "Mod", "Sub"}  # of positions of rows
_PICKING = {"StridedSlice", "Slice", "GatherV2", "Split", "SplitV", "Unpack"}


class Known(NamedTuple):
    """Facts about a tensor.

    Attributes:
        kind: see above.
        extent: of rows: what their number depends on.
        axis: of rows; None where it is not known which.
        scales: of rows: numbers, shape [], by which all of them were multiplied, and
            whether they were divided instead.
        terms: of a number: pairs of a term and a power of N; None for others.
        origin: of a number that is made of rows: MEAN, SUM, COUNT, LARGEST or SMALLEST.
        nested: of rows, and of numbers that are made of them: whether numbers have gone
            into each row otherwise than by `scales`.
        picks: of rows: whether they may be positions of rows, in their order; of a
            number: whether it only counts rows, and is no float.
        copies: of rows: how many times.
    """

    kind: str
    extent: Any = _THE_ROWS
    axis: int | None = 0
    scales: tuple[tuple[Any, bool], ...] = ()
    terms: frozenset[tuple[str, int]] | None = frozenset()
    origin: str = ""
    nested: bool = False
    picks: bool = False
    copies: int = 1


_CONSTANT, _UNKNOWN = Known(CONSTANT), Known(UNKNOWN)


class Reading:
    """Facts about the tensors of one step."""

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
        self.static, self._workers = static, workers
        self.divided_by_rows: set[int] = set()  # by a number of Python that tells them
        self.doubts: list[str] = []  # lines of divisions by what may be two things
        self.asked = 0  # N, where the step itself has asked for it
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

    def may_count(self, tensor: Any) -> bool:
        """Tell whether a constant may be the number of rows, which shapes have told."""
        value = tf.get_static_value(tensor)
        if value is None or self.static in (None, 1):
            return False
        return bool((value != 0).all() and (value % self.static == 0).all())

    def counts(self, tensor: Any) -> bool:
        """Tell whether a constant is the number of rows, which shapes have told."""
        value = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
        return value is not None and self.static is not None and value == self.static

    def power_in(self, tensor: Any, operation: Operation) -> int:
        """Return the power of N that a constant stands for in an operation, or 0."""
        return (
            self.power_of(tensor) if operation.kind in _SCALE | _LINEAR | _SAME else 0
        )

    def note_same(self, tensor: Any) -> None:
        """Note a tensor that is the same on all workers."""
        self._kept.append(tensor)
        self._known[id(tensor)] = _CONSTANT

    def note_rows(self, tensor: Any) -> None:
        """Note a tensor that has for each row what one process has for it."""
        self._kept.append(tensor)
        self._known[id(tensor)] = Known(ROWS, axis=self._by_shape(tensor))

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
        kind, own = operation.kind, operation.output
        if kind == "IdentityN":
            inputs = inputs[own : own + 1]
            if inputs[0].nested:  # its gradient may be another
                return _UNKNOWN
            return inputs[0]
        if any(each.kind == ROW for each in inputs):
            return self._of_one_row(operation, inputs)
        if kind == "Prod" and self._is_shape(operation.inputs[0]):
            return _count(_THE_ROWS)
        if kind == "Fill" and self._is_shape(operation.inputs[0]):
            number = inputs[1].kind == NUMBER and _enters(inputs[1], kind)
            return Known(ROWS, nested=number)
        if kind == "StridedSlice" and self._is_eager_shape(operation.inputs[0]):
            return self._of_shape(tensor, operation, [Known(SHAPE), *inputs[1:]])
        if all(i.kind == CONSTANT for i in inputs) or kind.startswith(_MEETINGS):
            return _CONSTANT
        if kind == "Range":
            return self._range(tensor, inputs)
        if SHAPE not in {each.kind for each in inputs[:1]} or kind in _CREATING:
            places = row_axes.places(operation)
            sized = [inputs[i] for i in places if i < len(inputs)]
            values = [
                _CONSTANT if i in places else each for i, each in enumerate(inputs)
            ]
            if kind in _CREATING and self._makes_rows(tensor, sized, values):
                return self._created(tensor, values)
            inputs = values if kind not in _CREATING else inputs
        kinds = {each.kind for each in inputs}
        if kinds <= {CONSTANT}:
            return _CONSTANT
        if self._is_unknown(operation, inputs):
            return _UNKNOWN
        if ROWS in kinds:
            return self._of_rows(tensor, operation, inputs)
        if UNKNOWN in kinds:
            return _UNKNOWN
        if SHAPE in kinds:
            return self._of_shape(tensor, operation, inputs)
        stateful = _host.tensorflow.is_stateful(kind) or kind in row_axes.CALLS
        if stateful and self.static is None and self._has_rows(tensor):
            return Known(ROWS, axis=self._by_shape(tensor))
        if stateful:
            return _UNKNOWN
        if kind in ("Pack", "ConcatV2") and tensor.dtype.is_integer:
            counts = [each for each in inputs if each.origin == COUNT]
            if counts and tensor.shape.rank == 1:
                return Known(SHAPE, counts[0].extent)
        if kind in _SCALE - {"Mul"} and inputs[1].kind == CONSTANT:
            sums = inputs[0].origin == SUM or inputs[0].terms == frozenset({(SUM, 0)})
            told = _host.operations.of(operation.inputs[1])
            if sums and self._tells_count(operation) and told is None:
                self.divided_by_rows.add(id(tensor))
        counts_rows = all(each.picks for each in inputs if each.kind == NUMBER)
        picks = counts_rows and not tensor.dtype.is_floating
        return Known(NUMBER, terms=self._terms(operation, inputs), picks=picks)

    def _is_unknown(self, operation: Operation, inputs: list[Known]) -> bool:
        """Tell whether something unknown becomes a value of what is computed."""
        opaque = row_axes.is_opaque(operation.kind)
        return any(
            known.kind == UNKNOWN and (not opaque or tensor.dtype.is_floating)
            for tensor, known in zip(operation.inputs, inputs, strict=True)
        )

    def _of_one_row(self, operation: Operation, inputs: list[Known]) -> Known:
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
        return _UNKNOWN

    # What is made of as many rows as there are.

    def _range(self, tensor: Any, inputs: list[Known]) -> Known:
        kinds = {each.kind for each in inputs}
        if kinds <= {CONSTANT, NUMBER} and self._has_rows(tensor):
            extent = next((i.extent for i in inputs if i.origin == COUNT), id(tensor))
            return Known(ROWS, extent, picks=True)
        return _CONSTANT  # positions within rows

    def _makes_rows(self, tensor: Any, sized: list[Known], values: list[Known]) -> bool:
        sizes = any(each.kind in (SHAPE, NUMBER, ROWS) for each in sized)
        own = any(each.kind in (ROWS, UNKNOWN) for each in values)
        has_rows = self._has_rows(tensor) or self._by_shape(tensor) is not None
        return sizes and not own and has_rows

    def _created(self, tensor: Any, values: list[Known]) -> Known:
        nested = any(e.kind == NUMBER and _enters(e, "Fill") for e in values)
        return Known(ROWS, axis=self._by_shape(tensor), nested=nested)

    def _by_shape(self, tensor: Any) -> int | None:
        return row_axes.axis_by_shape(self._facts, tensor)

    def _leaf(self, tensor: Any) -> Known:
        """Judge what nothing is known of: a constant, or an argument of a function."""
        if self.static is None:
            rows = tensor.dtype != tf.resource and self._has_rows(tensor)
            axis = self._by_shape(tensor)
            return Known(ROWS, id(tensor), axis) if rows else _CONSTANT
        name = "" if hasattr(tensor, "numpy") else tensor.op.name.rpartition("/")[2]
        if name.startswith("Shape") and self._is_shape(tensor):
            return Known(SHAPE)
        if name.startswith("Size") and self._is_size(tensor):
            return _count(_THE_ROWS)
        return Known(ROWS) if self._is_one_number_for_rows(tensor) else _CONSTANT

    def _is_size(self, tensor: Any) -> bool:
        """Tell whether `tf.size(rows)`, which shapes have told, may be this number."""
        value = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
        return value is not None and bool(value) and value % self.static == 0

    def _is_one_number_for_rows(self, tensor: Any) -> bool:
        """Tell whether this may be `tf.ones_like(rows)`, of shapes that are known."""
        rank = tensor.shape.rank or 0
        if rank <= (self.static == 1) or tensor.shape[0] != self.static:
            return False
        value = tf.get_static_value(tensor)
        return value is not None and bool((value == value.reshape([-1])[:1]).all())

    def _is_shape(self, tensor: Any) -> bool:
        """Tell whether a vector of numbers, as Keras makes it, is the shape of rows."""
        if self.static is None or not tensor.dtype.is_integer:
            return False
        value = tf.get_static_value(tensor) if tensor.shape.rank == 1 else None
        return value is not None and value.size > 0 and value[0] == self.static

    def _is_eager_shape(self, tensor: Any) -> bool:
        """Tell whether this is `tf.shape(rows)`, which is a constant eagerly."""
        made = hasattr(tensor, "numpy") and _host.operations.of(tensor) is None
        return made and self._is_shape(tensor)

    def _has_rows(self, tensor: Any) -> bool:
        shape = tensor.shape
        if shape.rank is None:
            return True
        if self.static is None:
            return any(size is None for size in shape)
        return bool(shape.rank and shape[0] and shape[0] % self.static == 0)

    def _of_rows(self, tensor: Any, operation: Operation, inputs: list[Known]) -> Known:
        kind, first = operation.kind, inputs[0]
        rows = {i: known for i, known in enumerate(inputs) if known.kind == ROWS}
        if kind in ("Shape", "ShapeN"):
            first = inputs[operation.output if kind == "ShapeN" else 0]
            return Known(SHAPE, first.extent) if first.kind == ROWS else _CONSTANT
        if kind == "Size":
            return _count(first.extent)
        scales, nested = self._scales(operation, inputs)
        if nested and (row_axes.is_opaque(kind) or _is_drawn(kind) or kind == "Where"):
            return _UNKNOWN
        by_row = kind == "DenseBincount" and tensor.shape.rank == 2
        known = tensor.shape.rank and tensor.shape[0] is not None
        if kind in _SUMS and known and not by_row:
            return self._reduced(first, False, nested)
        if kind == "L2Loss":
            return self._reduced(first, False, nested)
        if kind == "Unpack" and not (scales or nested) and _is_along(operation, first):
            count = operation.attributes("num")
            return Known(ROW, (first.extent, count, operation.output))
        over_rows = kind in _REDUCTIONS | _EXTREMES.keys() and _is_over(
            operation, first.axis if first.kind == ROWS else None
        )
        if kind in _EXTREMES and (over_rows or tensor.shape.rank == 0):
            if scales or nested:
                return _UNKNOWN
            origin = _EXTREMES[kind]
            return Known(NUMBER, first.extent, first.axis, (), None, origin)
        if over_rows:
            return self._reduced(first, kind == "Mean", nested)
        if kind in _REDUCTIONS and not tensor.shape.rank:
            known = tensor.shape.rank == 0
            return self._reduced(first, kind == "Mean", nested) if known else _UNKNOWN
        if kind in ("MatMul", "Einsum") and self._contracts(operation, inputs):
            return self._reduced(Known(ROWS), False, nested)
        try:
            at = {i: known.axis for i, known in rows.items()}
            axis = row_axes.after(self._facts, operation, tensor, at)
        except row_axes.Moved:
            return _UNKNOWN
        found = list(rows.values())
        extent = found[0].extent
        if kind == "Where":
            extent = id(tensor)
        elif kind == "StridedSlice" and extent == SPLITS:
            extent = _THE_ROWS
        elif kind in _CHOOSING and 1 in rows:
            extent = rows[1].extent
        picks = kind == "Where" or any(each.picks for each in found)
        copies = max(each.copies for each in found)
        if kind == "ConcatV2" and _joins_rows(operation, axis):
            copies = sum(each.copies for each in found)
        if kind in ("Split", "SplitV") and _joins_rows(operation, axis):
            copies //= operation.attributes("num_split")
        picks = picks and kind not in _LOSE_PLACES
        return Known(
            ROWS, extent, axis, scales, nested=nested, picks=picks, copies=copies
        )

    def _reduced(self, source: Known, mean: bool, nested: bool) -> Known:
        """Judge the sum, or mean, of rows."""
        origin = MEAN if mean else SUM
        if mean and nested and (source.extent != _THE_ROWS or source.axis is None):
            return _UNKNOWN
        simple = not source.scales and (not mean or source.extent == _THE_ROWS)
        terms = frozenset({(origin, 0)}) if simple and not nested else None
        scales = () if nested else source.scales
        return Known(NUMBER, source.extent, source.axis, scales, terms, origin, nested)

    def _contracts(self, operation: Operation, inputs: list[Known]) -> bool:
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
        self, operation: Operation, inputs: list[Known]
    ) -> tuple[tuple[tuple[Any, bool], ...], bool]:
        """Return by what numbers rows have been multiplied, where all is known of it.

        Returns:
            These, and whether numbers go into the rows in another way.
        """
        kind, tensors = operation.kind, list(operation.inputs)
        pairs = list(zip(tensors, inputs, strict=True))
        made = [known for known in inputs if known.kind in (ROWS, NUMBER)]
        scaled = any(known.scales for known in made if known.kind == ROWS)
        numbers = [t for t, k in pairs if k.kind == NUMBER and _enters(k, kind)]
        if any(known.nested for known in made if known.kind == ROWS):
            return (), True
        if not scaled and (not numbers or _is_drawn(kind)):
            return (), False
        if kind in _SAME | {"Sum", "Mean", "Transpose"} and not numbers:
            keeps = kind != "Cast" or _is_cast(operation)
            return (inputs[0].scales, False) if keeps else ((), True)
        if kind in ("SelectV2", "Select") and inputs[1].kind == NUMBER and not scaled:
            zero = tf.get_static_value(tensors[2])
            if zero is not None and not zero.any() and tensors[1].shape.rank == 0:
                return ((tensors[1], False),), False
        if kind in _SCALE and all(t.shape.rank == 0 for t in numbers):
            found = []
            for i, (tensor, known) in enumerate(pairs):
                inverse = kind != "Mul" and i == 1
                if known.kind == ROWS:
                    found += [(c, by ^ inverse) for c, by in known.scales]
                elif known.kind == NUMBER:
                    found.append((tensor, inverse))
            return tuple(found), False
        return (), True

    def _of_shape(
        self, tensor: Any, operation: Operation, inputs: list[Known]
    ) -> Known:
        """Judge what is computed of the dimensions of rows."""
        extent = next(each.extent for each in inputs if each.kind == SHAPE)
        if operation.kind in _PICKING and inputs[0].kind == SHAPE:
            if operation.kind in ("SplitV", "Unpack"):
                first = operation.output == 0
            else:
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
        if by == {(CONSTANT, 0)} and sums and self._tells_count(operation):
            by = {(COUNT, 0)}
        if len(by) != 1:
            return None
        ((term, power),) = by
        if term == CONSTANT:
            return frozenset((each, p - power) for each, p in one)
        if term == COUNT and sums:
            return frozenset((MEAN, p - power) for _, p in one)
        return None

    def _tells_count(self, operation: Operation) -> bool:
        """Tell whether a divisor, that shapes have told in Python, is the rows."""
        told = operation.inputs[1]
        value = tf.get_static_value(told)
        if self.static is None or value is None or value.shape != ():
            return False
        before = _host.operations.of(operation.inputs[0])
        size = before and before.inputs and before.inputs[0].shape.num_elements()
        if value not in (self.static, size):
            return False
        if value != self.static and value == self._workers * self.static:
            # The rows of all, or the elements of this worker's rows.
            self.doubts.append(operation.line())
            return False
        if _host.operations.of(told) is not None:  # else equal ones may be one tensor
            self._known[id(told)] = _count(_THE_ROWS)
        return True


def _outer(tensor: Any, operation: Operation | None) -> Any:
    """Return what a tensor of a branch, or of a loop, has from the graph around it."""
    if operation is None or operation.kind != "Placeholder":
        return None
    found = _host.flow.outside(tensor.graph, tensor)
    return None if found is tensor or hasattr(found, "numpy") else found


def _count(extent: Any) -> Known:
    term = COUNT if extent == _THE_ROWS else SUM
    terms = frozenset({(term, 0)})
    return Known(NUMBER, extent, terms=terms, origin=COUNT, picks=True)


def _product(one: Any, by: Any) -> Any:
    if len(by) != 1:
        return None
    ((term, power),) = by
    if term == COUNT and all(each == MEAN for each, _ in one):
        return frozenset((SUM, p + power) for _, p in one)
    if term != CONSTANT:
        return None
    return frozenset((each, p + power) for each, p in one)


def _is_over(operation: Operation, axis: int | None) -> bool:
    """Tell whether an operation reduces over an axis; False where nobody knows."""
    axes = tf.get_static_value(operation.inputs[1])
    rank = operation.inputs[0].shape.rank
    if None in (axis, rank) or axes is None:
        return False
    return axis in {int(each) % rank for each in axes.reshape([-1])}


def _is_along(operation: Operation, rows: Known) -> bool:
    """Tell whether an operation takes rows apart."""
    rank = operation.inputs[0].shape.rank
    return rank is not None and operation.attributes("axis") % rank == rows.axis


def _is_zero(tensor: Any) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and value.shape == () and value == 0


def _is_cast(operation: Operation) -> bool:
    return bool(tf.as_dtype(operation.attributes("DstT")).is_floating)


def _enters(number: Known, kind: str) -> bool:
    """Tell whether a number makes values of rows that depend on other rows.

    What may be N counts only where it multiplies, or divides.
    """
    powers = bool(number.terms) and all(t == CONSTANT for t, _ in number.terms or ())
    return not number.picks and (kind in _SCALE or not powers)


def _is_drawn(kind: str) -> bool:
    return _host.tensorflow.is_stateful(kind) or kind.startswith("StatelessRandom")


def _joins_rows(operation: Operation, axis: int | None) -> bool:
    """Tell whether an operation joins tensors, or parts one, along their rows."""
    at = {"Split": 0, "SplitV": 2}.get(operation.kind, len(operation.inputs) - 1)
    along = tf.get_static_value(operation.inputs[at])
    rank = operation.inputs[1 if operation.kind == "Split" else 0].shape.rank
    return along is not None and bool(rank) and int(along) % rank == axis
