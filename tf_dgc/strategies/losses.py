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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import readings
from tf_dgc.strategies.cuts import Cut, Cuts, widened
from tf_dgc.strategies.formulas import Formula
from tf_dgc.strategies.known import CONSTANT, MEAN, NUMBER, ROWS, SUM
from tf_dgc.strategies.totals import CutTotals

# Ways in which gradients of workers become one: a mean by rows, or a sum.
BY_ROWS, SUMMED = "by rows", "summed"
DONE = "done"  # they are those of all workers
WEIGHED = "weighed"  # by rows, before they count alike


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


class Losses:
    """Losses of one step, while it is traced, or run eagerly."""

    def __init__(
        self,
        reading: readings.Reading,
        size: int,
        total: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        rank: Any = 0,
        replicas: int | None = None,
    ) -> None:
        """Begin with none.

        Args:
            reading: of the step's tensors.
            size: N.
            total: returns the sums of numbers over all workers, all of which call it.
            rank: of this worker.
            replicas: by how many workers the step divides; by default N.
        """
        self.reading, self._total = reading, total
        self._cuts = Cuts(reading, size)
        self._totals = CutTotals(total, size, rank)
        self._formula = Formula(self._cuts, size if replicas is None else replicas)
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
        cuts = self._cuts.of(targets)
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
        given, _ = self._given(self._cuts.of(targets), None)
        return self._sum(targets, given.numbers)

    def again(self, tensor: Any) -> tf.Tensor:
        """Return a number, of any type, as one process has it; all workers call this.

        Raises:
            NotKnown: it is not made of sums over rows.
        """
        given, _ = self._given(self._cuts.of([tensor]), None)
        return self._formula.value(tensor, given.numbers)

    def _sum(self, targets: Sequence[Any], given: dict[Any, tf.Tensor]) -> tf.Tensor:
        parts = [tf.reduce_sum(self._formula.value(each, given)) for each in targets]
        return tf.add_n([tf.cast(each, parts[0].dtype) for each in parts])

    def _upstream(self, cut: Cut, slope: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
        tensor = cut.tensor
        if cut.local is None:  # all workers compute the same of it
            return tf.cast(slope / tf.cast(present, slope.dtype), tensor.dtype)
        inverse = self._totals.winners[cut.key] if cut.best else cut.inverse
        by = tf.cast(slope * tf.cast(inverse, slope.dtype), tensor.dtype)
        return tf.broadcast_to(by, tf.shape(tensor))

    def _given(
        self, cuts: Sequence[Cut], tape: tf.GradientTape | None
    ) -> tuple["_Given", list[tuple[Any, tf.Tensor]]]:
        """Return sums over all workers, and tensors of which rows are computed again.

        Args:
            cuts: of the loss.
            tape: that runs, and follows what is returned; None for no gradient.
        """
        levels = self._cuts.by_level(cuts)
        levels[0] = [self._present, *levels[0]]
        leaves: list[tuple[Cut, tf.Tensor]] = []
        own = _Own(tape)
        numbers: dict[Any, tf.Tensor] = {}
        entering: dict[Any, tf.Tensor] = {}  # as they are in rows
        for i, level in enumerate(levels):
            if i:
                entering |= self._entered(levels[i - 1], numbers)
            local = [self._local(cut, entering, own) for cut in level]
            for cut, total in zip(level, self._totals.of(level, local), strict=True):
                numbers[cut.key] = total
                if tape is not None and not cut.nested and cut.key == id(cut.tensor):
                    tape.watch(total)
                    leaves.append((cut, total))
        return _Given(numbers, leaves), list(own.handles.values())

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
        own: "_Own",
    ) -> Any:
        """Return a sum over this worker's rows, with sums of all in each row."""
        if not cut.nested:
            return cut.local
        order, leaves = self._cuts.followed(cut)
        made: dict[int, Any] = {}
        constants: dict[Any, tf.Tensor] = {}
        for leaf in leaves:
            known = self.reading.of(leaf)
            if known.kind == NUMBER:
                for part in self._cuts.of([leaf]):
                    if part.local is None and not part.nested:
                        handle = own.of(part.tensor)
                        constants[part.key] = handle
                made[id(leaf)] = self._formula.value(leaf, entering | constants)
            else:
                made[id(leaf)] = own.of(leaf)
        for tensor in order:
            operation = self._cuts.operation(tensor)
            inputs = [
                each
                if self.reading.power_of(each)
                and not self.reading.power_in(each, operation)
                else made.get(id(each), each)
                for each in operation.inputs
            ]
            made[id(tensor)] = _host.operations.again(operation, inputs)
        found = made[id(cut.tensor)]
        wide = widened(found)
        if self.reading.of(cut.tensor).kind == ROWS:
            wide = tf.reduce_sum(wide)
        return tf.math.multiply_no_nan(wide, tf.cast(cut.inverse, wide.dtype))


class _Own:
    """Tensors of this worker, of which rows are computed again.

    Attributes:
        handles: of each tensor what a tape follows, by identity.
    """

    def __init__(self, tape: tf.GradientTape | None) -> None:
        self._tape = tape
        self.handles: dict[int, tuple[Any, tf.Tensor]] = {}

    def of(self, tensor: Any) -> Any:
        """Return a tensor of this worker, which the tape follows."""
        tape = self._tape
        if tape is None or not tensor.dtype.is_floating:
            return tensor
        if id(tensor) not in self.handles:
            with tape.stop_recording():
                self.handles[id(tensor)] = tensor, tf.identity(tensor)
            tape.watch(self.handles[id(tensor)][1])
        return self.handles[id(tensor)][1]
