"""Cuts of a loss: the sums over rows, and constants, of which it is made."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import readings, row_axes
from tf_dgc.strategies.known import (
    CONSTANT,
    COUNT,
    LARGEST,
    MEAN,
    NUMBER,
    ROW,
    ROWS,
    SMALLEST,
    SPLITS,
    UNKNOWN,
)


class Cut(NamedTuple):
    """One tensor of a loss that is made of rows, or the same on all workers.

    Attributes:
        key: what tells it from others.
        tensor: itself; or of which it is the number of rows.
        local: sum over this worker's rows, shape [S]; None for constants.
        inverse: by what the sum was divided to be the tensor: shape [].
        nested: whether sums of all go into its rows, which are computed again.
        best: LARGEST or SMALLEST, where that of all workers is wanted, not their sum.
    """

    key: Any
    tensor: Any
    local: Any
    inverse: Any
    nested: bool = False
    best: str = ""


class NotKnown(Exception):
    """Raised where a loss is made of something else.

    Attributes:
        line: of the user's code; may be empty.
    """

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


class Cuts:
    """Cuts of the losses of a step."""

    def __init__(self, reading: readings.Reading, size: int) -> None:
        """Begin with none.

        Args:
            reading: of the step's tensors.
            size: N.
        """
        self.reading, self._size = reading, size
        self._cuts: dict[Any, Cut] = {}

    def of(self, targets: Sequence[Any]) -> list[Cut]:
        """Return what tensors are computed of.

        Raises:
            NotKnown: something else than sums over rows.
        """
        return list({c.key: c for t in targets for c in self.parts(t)}.values())

    def parts(self, tensor: Any) -> Iterator[Cut]:
        """Yield what a tensor is computed of."""
        known = self.reading.of(tensor)
        if known.kind in (UNKNOWN, ROW):
            raise NotKnown(self.reading.line_of(tensor))
        if known.kind == CONSTANT or self.reading.power_of(tensor):
            if tensor.dtype.is_floating and not self.reading.power_of(tensor):
                yield Cut(id(tensor), tensor, None, 1.0)
            return
        if known.kind == ROWS or known.origin:
            for scale, _ in known.scales:
                yield from self.parts(scale)
            if known.origin == MEAN:
                yield self._count_of(tensor)
            yield self._sum_of(tensor)
            return
        if id(tensor) in self.reading.divided_by_rows:
            yield self._rows()
        for each in self.operation(tensor).inputs:
            yield from self.parts(each)

    def operation(self, tensor: Any) -> Any:
        """Return the operation that makes a tensor."""
        operation = _host.operations.of(tensor)
        if operation is None:
            raise NotKnown("")
        return operation

    def _rows(self) -> Cut:
        """Return the number of rows where shapes tell it."""
        return Cut(COUNT, None, tf.constant(float(self.reading.static or 0)), 1.0)

    def _count_of(self, tensor: Any) -> Cut:
        """Return the number of rows of which a tensor is the mean."""
        source, axis = self.operation(tensor).inputs[0], self.reading.of(tensor).axis
        if axis is None:
            raise NotKnown(self.operation(tensor).line())
        key = COUNT, id(source)
        if key not in self._cuts:
            number = tf.shape(source)[axis]
            self._cuts[key] = Cut(key, source, widened(number), 1.0)
        return self._cuts[key]

    def _sum_of(self, tensor: Any) -> Cut:
        known, key = self.reading.of(tensor), id(tensor)
        if key in self._cuts:
            return self._cuts[key]
        best = known.origin if known.origin in (LARGEST, SMALLEST) else ""
        if known.kind == NUMBER and not tensor.shape.is_fully_defined():
            raise NotKnown(self.reading.line_of(tensor))  # workers may have other sizes
        inverse = tf.ones([])
        if known.origin == MEAN:
            inverse *= self._count_of(tensor).local
        if known.nested:
            self._cuts[key] = Cut(key, tensor, None, inverse, True)
            return self._cuts[key]
        for scale, divides in known.scales:
            scale = widened(scale)
            if divides:
                inverse *= scale
            else:
                inverse = tf.math.divide_no_nan(inverse, scale)
        found = widened(tensor)
        found = tf.reduce_sum(found) if known.kind == ROWS else found
        if known.extent == SPLITS:  # one more than rows, of all workers, too
            found = found - 1.0 + 1.0 / self._size
        # There may be a mean of nothing.
        local = tf.math.multiply_no_nan(found, tf.cast(inverse, found.dtype))
        local = found if best else local
        self._cuts[key] = Cut(key, tensor, local, inverse, best=best)
        return self._cuts[key]

    # Level by level.

    def by_level(self, cuts: Sequence[Cut]) -> list[list[Cut]]:
        """Return cuts, and those of which their rows are made, by level."""
        levels: dict[Any, int] = {}
        known: dict[Any, Cut] = {}

        def level(cut: Cut) -> int:
            if cut.key not in levels:
                known[cut.key] = cut
                inner = self._inner(cut)
                levels[cut.key] = 1 + max(map(level, inner)) if inner else 0
            return levels[cut.key]

        for cut in cuts:
            level(cut)
        return [
            [known[key] for key, at in levels.items() if at == i]
            for i in range(1 + max(levels.values(), default=0))
        ]

    def _inner(self, cut: Cut) -> list[Cut]:
        """Return those of which rows of a cut are made."""
        if not cut.nested:
            return []
        _, leaves = self.followed(cut)
        numbers = [t for t in leaves if self.reading.of(t).kind == NUMBER]
        return [c for c in self.of(numbers) if c.local is not None or c.nested]

    def followed(self, cut: Cut) -> tuple[list[Any], list[Any]]:
        """Return the tensors to be computed again, in order, and what they are of."""
        order, leaves, seen = [], [], set[int]()
        waiting = [(cut.tensor, False)]
        while waiting:
            tensor, is_ready = waiting.pop()
            if is_ready:
                order.append(tensor)
                continue
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            known = self.reading.of(tensor)
            if tensor is cut.tensor or (
                known.kind == ROWS and (known.nested or known.scales)
            ):
                waiting.append((tensor, True))
                waiting.extend((t, False) for t in self._values_of(tensor))
            else:
                leaves.append(tensor)
        return order, leaves

    def _values_of(self, tensor: Any) -> list[Any]:
        operation = self.operation(tensor)
        places = row_axes.places(operation)
        return [t for i, t in enumerate(operation.inputs) if i not in places]


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor as float32, or float64 where it is that."""
    wide = tf.float64 if tensor.dtype == tf.float64 else tf.float32
    return tf.cast(tensor, wide)
