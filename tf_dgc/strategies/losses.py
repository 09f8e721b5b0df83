"""Losses of a step as one process has them, and what their gradients count.

Axis: N workers. A loss is F(S_1, S_2, ...) of sums over the rows of all workers, see
`readings.py`. Where F is a mean over rows, or a sum, gradients are computed as they
are, and weighed in the exchange, which sends nothing more. Of anything else the sums
are exchanged before the backward pass, and the gradient that a worker computes is

    sum over i of  dF/dS_i (at the sums of all)  *  ds_i/dw (of its own rows)

so that the gradients of the workers add up to that of one process.

A sum may go back into each row, of which another sum is made, as the means of a
correlation do. Then the rows are computed again, with the sums of all, level by level:

    level 0     S_1 = total of s_1(rows)
    level 1     S_2 = total of s_2(rows, S_1)       F(S_1, S_2)

and what S_1 counts by way of rows, dF/dS_2 * ds_2/dS_1, is a sum over workers, too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import readings, row_axes
from tf_dgc.strategies.readings import (
    CONSTANT,
    COUNT,
    LARGEST,
    MEAN,
    NUMBER,
    ROW,
    ROWS,
    SMALLEST,
    SUM,
    UNKNOWN,
)

# Ways in which gradients of workers become one: a mean by rows, or a sum.
BY_ROWS, SUMMED = "by rows", "summed"
DONE = "done"  # they are those of all workers
WEIGHED = "weighed"  # by rows, before they count alike


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


class _Given(NamedTuple):
    """Sums over all workers.

    Attributes:
        numbers: by the keys of cuts.
        leaves: those that are computed of nothing else here, with their cuts.
    """

    numbers: dict[Any, tf.Tensor]
    leaves: list[tuple[Cut, tf.Tensor]]


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
        rank: Any = 0,
    ) -> None:
        """Begin with none.

        Args:
            reading: of the step's tensors.
            size: N.
            total: returns the sums of numbers over all workers, all of which call it.
            rank: of this worker.
        """
        self.reading, self._size, self._total = reading, size, total
        self._rank = rank
        self._totals: dict[Any, tf.Tensor] = {}  # by the keys of cuts
        # What this worker's extremes count in the gradient of those of all.
        self._winners: dict[Any, tf.Tensor] = {}
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
            elif known.kind == ROWS and not (known.scales or known.nested):
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
        cuts = self._cuts_of(targets)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            given, own = self._given(cuts, tape)
            value = self._sum(targets, given.numbers)
        present = given.numbers[self._present.key]
        handles = [h for _, h in (*given.leaves, *own)]
        slopes = iter(tape.gradient(value, handles))
        found: dict[int, tuple[Any, list[tf.Tensor]]] = {}
        for cut, _ in given.leaves:
            slope = next(slopes)
            if slope is not None:
                part = self._upstream(cut, slope, present)
                found.setdefault(id(cut.tensor), (cut.tensor, []))[1].append(part)
        for tensor, _ in own:
            slope = next(slopes)
            if slope is not None:
                slope = tf.convert_to_tensor(slope)
                found.setdefault(id(tensor), (tensor, []))[1].append(slope)
        return Whole(
            value,
            [tensor for tensor, _ in found.values()],
            [tf.add_n(parts) for _, parts in found.values()],
        )

    def value(self, targets: Sequence[Any]) -> tf.Tensor:
        """Return the loss of all workers, which call this, without its gradient.

        Raises:
            NotKnown: it is not made of sums over rows.
        """
        given, _ = self._given(self._cuts_of(targets), None)
        return self._sum(targets, given.numbers)

    def again(self, tensor: Any) -> tf.Tensor:
        """Return a number, of any type, as one process has it; all workers call this.

        Raises:
            NotKnown: it is not made of sums over rows.
        """
        given, _ = self._given(self._cuts_of([tensor]), None)
        return self._value(tensor, given.numbers)

    def _cuts_of(self, targets: Sequence[Any]) -> list[Cut]:
        return list({c.key: c for t in targets for c in self._parts(t)}.values())

    def _sum(self, targets: Sequence[Any], given: dict[Any, tf.Tensor]) -> tf.Tensor:
        parts = [tf.reduce_sum(self._value(each, given)) for each in targets]
        return tf.add_n([tf.cast(each, parts[0].dtype) for each in parts])

    def _upstream(self, cut: Cut, slope: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
        tensor = cut.tensor
        if cut.local is None:  # all workers compute the same of it
            return tf.cast(slope / tf.cast(present, slope.dtype), tensor.dtype)
        inverse = self._winners[cut.key] if cut.best else cut.inverse
        by = tf.cast(slope * tf.cast(inverse, slope.dtype), tensor.dtype)
        return tf.broadcast_to(by, tf.shape(tensor))

    # The sums.

    def _parts(self, tensor: Any) -> Iterator[Cut]:
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
                yield from self._parts(scale)
            if known.origin == MEAN:
                yield self._count_of(tensor)
            yield self._sum_of(tensor)
            return
        if id(tensor) in self.reading.divided_by_rows:
            yield self._rows()
        for each in self._operation(tensor).inputs:
            yield from self._parts(each)

    def _operation(self, tensor: Any) -> Any:
        operation = _host.operations.of(tensor)
        if operation is None:
            raise NotKnown("")
        return operation

    def _rows(self) -> Cut:
        """Return the number of rows where shapes tell it."""
        return Cut(COUNT, None, tf.constant(float(self.reading.static or 0)), 1.0)

    def _count_of(self, tensor: Any) -> Cut:
        """Return the number of rows of which a tensor is the mean."""
        source, axis = self._operation(tensor).inputs[0], self.reading.of(tensor).axis
        if axis is None:
            raise NotKnown(self._operation(tensor).line())
        key = COUNT, id(source)
        if key not in self._cuts:
            number = tf.shape(source)[axis]
            self._cuts[key] = Cut(key, source, _number(number), 1.0)
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
        local = found if best else local
        self._cuts[key] = Cut(key, tensor, local, inverse, best=best)
        return self._cuts[key]

    # Level by level.

    def _levels(self, cuts: Sequence[Cut]) -> list[list[Cut]]:
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
        _, leaves = self._followed(cut)
        numbers = [t for t in leaves if self.reading.of(t).kind == NUMBER]
        return [c for c in self._cuts_of(numbers) if c.local is not None or c.nested]

    def _followed(self, cut: Cut) -> tuple[list[Any], list[Any]]:
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
        operation = self._operation(tensor)
        places = row_axes.places(operation)
        return [t for i, t in enumerate(operation.inputs) if i not in places]

    def _given(
        self, cuts: Sequence[Cut], tape: tf.GradientTape | None
    ) -> tuple["_Given", list[tuple[Any, tf.Tensor]]]:
        """Return sums over all workers, and tensors of which rows are computed again.

        Args:
            cuts: of the loss.
            tape: that runs, and follows what is returned; None for no gradient.
        """
        levels = self._levels(cuts)
        levels[0] = [self._present, *levels[0]]
        leaves: list[tuple[Cut, tf.Tensor]] = []
        own: dict[int, tuple[Any, tf.Tensor]] = {}
        numbers: dict[Any, tf.Tensor] = {}
        entering: dict[Any, tf.Tensor] = {}  # as they are in rows
        for i, level in enumerate(levels):
            if i:
                entering |= self._entered(levels[i - 1], numbers)
            local = [self._local(cut, entering, own, tape) for cut in level]
            for cut, number in zip(level, self._summed(level, local), strict=True):
                numbers[cut.key] = number
                if tape is not None and not cut.nested and cut.key == id(cut.tensor):
                    tape.watch(number)
                    leaves.append((cut, number))
        return _Given(numbers, leaves), list(own.values())

    def _entered(
        self, cuts: Sequence[Cut], numbers: dict[Any, tf.Tensor]
    ) -> dict[Any, tf.Tensor]:
        """Return sums as they go into rows: of all workers is what they count there."""
        made = [cut.key for cut in cuts if cut.local is not None or cut.nested]

        @tf.custom_gradient
        def enter(*found: tf.Tensor) -> Any:
            def slopes(*each: tf.Tensor) -> Any:
                return self._total(list(each))

            return [tf.identity(number) for number in found], slopes

        return dict(zip(made, enter(*[numbers[key] for key in made]), strict=True))

    def _local(
        self,
        cut: Cut,
        entering: dict[Any, tf.Tensor],
        own: dict[int, tuple[Any, tf.Tensor]],
        tape: tf.GradientTape | None,
    ) -> Any:
        """Return a sum over this worker's rows, with sums of all in each row."""
        if not cut.nested:
            return cut.local
        order, leaves = self._followed(cut)
        made: dict[int, Any] = {}
        constants: dict[Any, tf.Tensor] = {}
        for leaf in leaves:
            known = self.reading.of(leaf)
            if known.kind == NUMBER:
                for part in self._cuts_of([leaf]):
                    if part.local is None and not part.nested:
                        handle = self._own(part.tensor, own, tape)
                        constants[part.key] = handle
                made[id(leaf)] = self._value(leaf, entering | constants)
            else:
                made[id(leaf)] = self._own(leaf, own, tape)
        for tensor in order:
            operation = self._operation(tensor)
            inputs = [
                each
                if self.reading.power_of(each)
                and not self.reading.power_in(each, operation)
                else made.get(id(each), each)
                for each in operation.inputs
            ]
            made[id(tensor)] = _host.operations.again(operation, inputs)
        found = made[id(cut.tensor)]
        wide = _number(found)
        if self.reading.of(cut.tensor).kind == ROWS:
            wide = tf.reduce_sum(wide)
        return tf.math.multiply_no_nan(wide, tf.cast(cut.inverse, wide.dtype))

    def _own(
        self,
        tensor: Any,
        own: dict[int, tuple[Any, tf.Tensor]],
        tape: tf.GradientTape | None,
    ) -> Any:
        """Return a tensor of this worker, which the tape follows."""
        if tape is None or not tensor.dtype.is_floating:
            return tensor
        if id(tensor) not in own:
            with tape.stop_recording():
                own[id(tensor)] = tensor, tf.identity(tensor)
            tape.watch(own[id(tensor)][1])
        return own[id(tensor)][1]

    def _summed(self, cuts: Sequence[Cut], local: Sequence[Any]) -> list[tf.Tensor]:
        """Return sums over all workers, and constants as they are."""
        made = [
            (c, mine) for c, mine in zip(cuts, local, strict=True) if mine is not None
        ]
        missing = [(c, mine) for c, mine in made if c.key not in self._totals]
        if missing:
            stopped = [tf.stop_gradient(mine) for _, mine in missing]
            given = [
                self._spread(mine) if cut.best else mine
                for (cut, _), mine in zip(missing, stopped, strict=True)
            ]
            if any(cut.best for cut, _ in missing):
                given.append(self._spread(tf.ones([])))
            found = self._total(given)
            for (cut, mine), total in zip(missing, found, strict=False):
                self._totals[cut.key] = (
                    self._best(cut, mine, total, found[-1]) if cut.best else total
                )
        return [
            _number(cut.tensor)
            if mine is None
            else _crossed(mine, self._totals[cut.key])
            if cut.nested
            else tf.identity(self._totals[cut.key])
            for cut, mine in zip(cuts, local, strict=True)
        ]

    def _spread(self, mine: tf.Tensor) -> tf.Tensor:
        """Return zeros for all workers, shape [N, *S], with what this one has."""
        own = tf.reshape(
            tf.range(self._size) == self._rank, [-1] + [1] * mine.shape.rank
        )
        return tf.where(own, mine, tf.zeros_like(mine))

    def _best(
        self, cut: Cut, mine: tf.Tensor, every: tf.Tensor, present: tf.Tensor
    ) -> tf.Tensor:
        """Return the largest, or smallest, of what workers with rows have.

        Args:
            cut: what it is of.
            mine: of this worker: shape [S].
            every: of all: shape [N, *S].
            present: not 0 for workers that have rows: shape [N].
        """
        large = cut.best == LARGEST
        present = tf.reshape(present, [-1] + [1] * mine.shape.rank)
        worst = tf.constant(float("-inf" if large else "inf"), every.dtype)
        by = tf.cast(present, every.dtype)
        every = tf.where(present > 0.0, every / by, worst)
        found = (tf.reduce_max if large else tf.reduce_min)(every, axis=0)
        winners = tf.reduce_sum(tf.cast(every == found, every.dtype), axis=0)
        won = tf.cast(mine == found, every.dtype)
        self._winners[cut.key] = tf.math.divide_no_nan(won, winners)
        return found

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
        inputs = [
            each
            if self.reading.power_of(each)
            and not self.reading.power_in(each, operation)
            else self._value(each, given)
            for each in operation.inputs
        ]
        if id(tensor) in self.reading.divided_by_rows:
            share = given[COUNT] / float(self.reading.static or 1)
            inputs[1] *= tf.cast(share, inputs[1].dtype)
        return _host.operations.again(operation, inputs)


def _number(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor as float32, or float64 where it is that."""
    wide = tf.float64 if tensor.dtype == tf.float64 else tf.float32
    return tf.cast(tensor, wide)


def _crossed(local: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Return a sum over workers, which grows as what each of them adds."""

    @tf.custom_gradient
    def cross(mine: tf.Tensor) -> Any:
        return tf.identity(total), lambda slope: slope

    return cross(local)
