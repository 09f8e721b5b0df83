"""Losses of a step as one process has them, and what their gradients count.

Axis: N workers. A loss is F(S_1, S_2, ...) of sums over the rows of all workers, see
`readings.py`. Where F is a mean over rows, or a sum, gradients are computed as they
are, and weighed in the exchange, which sends nothing more. Of anything else the sums
are exchanged before the backward pass, and the gradient that a worker computes is

    sum over i of  dF/dS_i (at the sums of all)  *  ds_i/dw (of its own rows)

so that the gradients of the workers add up to that of one process.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import readings
from tf_dgc.strategies.readings import CONSTANT, COUNT, MEAN, NUMBER, ROWS, SUM, UNKNOWN

# Ways in which gradients of workers become one: a mean by rows, or a sum.
BY_ROWS, SUMMED = "by rows", "summed"
DONE = "done"  # they are those of all workers


class Cut(NamedTuple):
    """One tensor of a loss that is made of rows, or the same on all workers.

    Attributes:
        key: what tells it from others.
        tensor: itself; or of which it is the number of rows.
        local: sum over this worker's rows, shape [S]; None for constants.
        inverse: by what the sum was divided to be the tensor: shape [].
    """

    key: Any
    tensor: Any
    local: Any
    inverse: Any


class Whole(NamedTuple):
    """A loss of the rows of all workers.

    Attributes:
        value: shape [].
        targets: tensors of this worker.
        upstream: what each counts in the loss, of the same shapes.
    """

    value: tf.Tensor
    targets: list[Any]
    upstream: list[Any]


class NotKnown(Exception):
    """Raised where a loss is made of something else.

    Attributes:
        line: of the user's code; may be empty.
    """

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


class Losses:
    """Losses of one step, while it is traced, or run eagerly."""

    def __init__(
        self,
        reading: readings.Reading,
        size: int,
        total: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        """Begin with none.

        Args:
            reading: of the step's tensors.
            size: N.
            total: returns the sums of numbers over all workers, all of which call it.
        """
        self.reading, self._size, self._total = reading, size, total
        self._totals: dict[Any, tf.Tensor] = {}  # by the keys of cuts
        self._cuts: dict[Any, Cut] = {}
        # Workers that have rows.
        self._present = Cut("present", None, tf.ones([]), 1.0)

    def way_of(self, targets: Sequence[Any]) -> tuple[str, int] | None:
        """Return how gradients of losses become one, where that needs no more numbers.

        Args:
            targets: tensors, of which the sum of all elements is the loss.

        Returns:
            BY_ROWS or SUMMED, and a power of N that multiplies the losses; None for
            what is a mixture, or something else.
        """
        terms: set[tuple[str, int]] = set()
        for each in targets:
            known = self.reading.of(each)
            if known.kind == CONSTANT:
                terms.add((CONSTANT, 0))
            elif known.kind == ROWS and not known.scales:
                terms.add((SUM, 0))
            elif known.kind == NUMBER and known.terms is not None:
                terms |= known.terms
            else:
                return None
        kinds, powers = {kind for kind, _ in terms}, {power for _, power in terms}
        if len(powers) != 1:
            return None
        if kinds <= {MEAN, CONSTANT}:
            return BY_ROWS, powers.pop()
        return (SUMMED, powers.pop()) if kinds == {SUM} else None

    def whole(self, targets: Sequence[Any]) -> Whole:
        """Return the loss of all workers, which call this.

        Raises:
            NotKnown: it is not made of sums over rows.
        """
        cuts = list({c.key: c for t in targets for c in self._parts(t)}.values())
        present, *sums = self._summed([self._present, *cuts])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sums)
            given = {c.key: found for c, found in zip(cuts, sums, strict=True)}
            parts = [tf.reduce_sum(self._value(each, given)) for each in targets]
            value = tf.add_n([tf.cast(each, parts[0].dtype) for each in parts])
        slopes = tape.gradient(value, sums)
        kept = [
            (cut, slope)
            for cut, slope in zip(cuts, slopes, strict=True)
            if slope is not None and cut.key == id(cut.tensor)
        ]
        return Whole(
            value,
            [cut.tensor for cut, _ in kept],
            [self._upstream(cut, slope, present) for cut, slope in kept],
        )

    def _upstream(self, cut: Cut, slope: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
        tensor = cut.tensor
        if cut.local is None:  # all workers compute the same of it
            return tf.cast(slope / tf.cast(present, slope.dtype), tensor.dtype)
        by = tf.cast(slope * tf.cast(cut.inverse, slope.dtype), tensor.dtype)
        return tf.broadcast_to(by, tf.shape(tensor))

    # The sums.

    def _parts(self, tensor: Any) -> Iterator[Cut]:
        """Yield what a tensor is computed of."""
        known = self.reading.of(tensor)
        if known.kind == UNKNOWN:
            raise NotKnown(self.reading.line_of(tensor))
        if known.kind == CONSTANT or self.reading.power_of(tensor):
            if tensor.dtype.is_floating and not self.reading.power_of(tensor):
                yield Cut(id(tensor), tensor, None, 1.0)
            return
        if known.kind == ROWS or known.origin:
            for scale, _ in known.scales:
                yield from self._parts(scale)
            if known.origin == MEAN:
                yield self._count_of(tensor)
            yield self._sum_of(tensor)
            return
        for each in self._operation(tensor).inputs:
            yield from self._parts(each)

    def _operation(self, tensor: Any) -> Any:
        operation = _host.operations.of(tensor)
        if operation is None:
            raise NotKnown("")
        return operation

    def _count_of(self, tensor: Any) -> Cut:
        """Return the number of rows of which a tensor is the mean."""
        source = self._operation(tensor).inputs[0]
        key = COUNT, id(source)
        if key not in self._cuts:
            number = tf.shape(source)[self.reading.of(tensor).axis]
            self._cuts[key] = Cut(key, source, _number(number), 1.0)
        return self._cuts[key]

    def _sum_of(self, tensor: Any) -> Cut:
        known, key = self.reading.of(tensor), id(tensor)
        if key in self._cuts:
            return self._cuts[key]
        inverse = tf.ones([])
        if known.origin == MEAN:
            inverse *= self._count_of(tensor).local
        for scale, divides in known.scales:
            scale = _number(scale)
            if divides:
                inverse *= scale
            else:
                inverse = tf.math.divide_no_nan(inverse, scale)
        found = _number(tensor)
        found = tf.reduce_sum(found) if known.kind == ROWS else found
        if known.extent == readings.SPLITS:  # one more than rows, of all workers, too
            found = found - 1.0 + 1.0 / self._size
        # There may be a mean of nothing.
        local = tf.math.multiply_no_nan(found, tf.cast(inverse, found.dtype))
        self._cuts[key] = Cut(key, tensor, local, inverse)
        return self._cuts[key]

    def _summed(self, cuts: Sequence[Cut]) -> list[tf.Tensor]:
        """Return sums over all workers, and constants as they are."""
        made = [cut for cut in cuts if cut.local is not None]
        missing = [cut for cut in made if cut.key not in self._totals]
        if missing:
            found = self._total([cut.local for cut in missing])
            self._totals |= {c.key: t for c, t in zip(missing, found, strict=True)}
        return [
            _number(cut.tensor) if cut.local is None else self._totals[cut.key]
            for cut in cuts
        ]

    # F.

    def _value(self, tensor: Any, given: dict[Any, tf.Tensor]) -> tf.Tensor:
        """Compute a tensor again, of the sums of all workers."""
        known = self.reading.of(tensor)
        if power := self.reading.power_of(tensor):  # one process is one
            one = tf.ones_like(tensor)
            scale = float(self._size) ** -power
            return (
                one if tensor.dtype.is_integer else tensor * tf.cast(scale, one.dtype)
            )
        if known.kind == CONSTANT:
            found = given.get(id(tensor))
            return tensor if found is None else tf.cast(found, tensor.dtype)
        if known.kind == ROWS or known.origin:
            found = given[id(tensor)]
            if known.origin == MEAN:
                count = given[COUNT, id(self._operation(tensor).inputs[0])]
                found = tf.math.divide_no_nan(found, count)
            for scale, divides in known.scales:
                by = tf.cast(self._value(scale, given), found.dtype)
                found = tf.math.divide_no_nan(found, by) if divides else found * by
            return tf.cast(found, tensor.dtype)
        operation = self._operation(tensor)
        inputs = [self._value(each, given) for each in operation.inputs]
        return _host.operations.again(operation, inputs)


def _number(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor as float32, or float64 where it is that."""
    wide = tf.float64 if tensor.dtype == tf.float64 else tf.float32
    return tf.cast(tensor, wide)
