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

from tf_dgc.strategies import readings
from tf_dgc.strategies.cuts import Cut, Cuts
from tf_dgc.strategies.formulas import Formula
from tf_dgc.strategies.known import CONSTANT, MEAN, NUMBER, ROWS, SUM
from tf_dgc.strategies.loss_sums import LossSums

# Ways in which gradients of workers become one: a mean by rows, or a sum.
BY_ROWS, SUMMED = "by rows", "summed"
DONE = "done"  # they are those of all workers
WEIGHED = "weighed"  # by rows, before they count alike


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
        self.reading, self._cuts = reading, Cuts(reading, size)
        self._formula = Formula(self._cuts, size if replicas is None else replicas)
        self._sums = LossSums(self._cuts, self._formula, total, size, rank)

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
            given, own = self._sums.given(cuts, tape)
            value = self._sum(targets, given.numbers)
        present = given.numbers[self._sums.present.key]
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
        given, _ = self._sums.given(self._cuts.of(targets), None)
        return self._sum(targets, given.numbers)

    def again(self, tensor: Any) -> tf.Tensor:
        """Return a number, of any type, as one process has it; all workers call this.

        Raises:
            NotKnown: it is not made of sums over rows.
        """
        given, _ = self._sums.given(self._cuts.of([tensor]), None)
        return self._formula.value(tensor, given.numbers)

    def _sum(self, targets: Sequence[Any], given: dict[Any, tf.Tensor]) -> tf.Tensor:
        parts = [tf.reduce_sum(self._formula.value(each, given)) for each in targets]
        return tf.add_n([tf.cast(each, parts[0].dtype) for each in parts])

    def _upstream(self, cut: Cut, slope: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
        tensor = cut.tensor
        if cut.local is None:  # all workers compute the same of it
            return tf.cast(slope / tf.cast(present, slope.dtype), tensor.dtype)
        inverse = self._sums.totals.winners[cut.key] if cut.best else cut.inverse
        by = tf.cast(slope * tf.cast(inverse, slope.dtype), tensor.dtype)
        return tf.broadcast_to(by, tf.shape(tensor))
