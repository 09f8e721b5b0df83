"""Sums over the rows of all workers, of which losses are made, level by level.

Axis: N workers. See `losses.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.cuts import Cut, Cuts, widened
from tf_dgc.strategies.formulas import Formula
from tf_dgc.strategies.known import NUMBER, ROWS
from tf_dgc.strategies.totals import CutTotals


class Given(NamedTuple):
    """Sums over all workers.

    Attributes:
        numbers: by the keys of cuts.
        leaves: those that are computed of nothing else here, with their cuts.
    """

    numbers: dict[Any, tf.Tensor]
    leaves: list[tuple[Cut, tf.Tensor]]


class LossSums:
    """Sums of the losses of one step, each of which is exchanged once.

    Attributes:
        totals: of cuts.
        present: cut that counts workers with rows.
    """

    def __init__(
        self,
        cuts: Cuts,
        formula: Formula,
        total: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        size: int,
        rank: Any,
    ) -> None:
        """Begin with none.

        Args:
            cuts: of losses.
            formula: of them.
            total: returns the sums of numbers over all workers, all of which call it.
            size: N.
            rank: of this worker.
        """
        self._cuts, self._formula, self._total = cuts, formula, total
        self.totals = CutTotals(total, size, rank)
        self.present = Cut("present", None, tf.ones([]), 1.0)

    def given(
        self, cuts: Sequence[Cut], tape: tf.GradientTape | None
    ) -> tuple[Given, list[tuple[Any, tf.Tensor]]]:
        """Return sums over all workers, and tensors of which rows are computed again.

        Args:
            cuts: of the loss.
            tape: that runs, and follows what is returned; None for no gradient.
        """
        levels = self._cuts.by_level(cuts)
        levels[0] = [self.present, *levels[0]]
        leaves: list[tuple[Cut, tf.Tensor]] = []
        own = OwnTensors(tape)
        numbers: dict[Any, tf.Tensor] = {}
        entering: dict[Any, tf.Tensor] = {}  # as they are in rows
        for i, level in enumerate(levels):
            if i:
                entering |= self._entered(levels[i - 1], numbers)
            local = [self._local(cut, entering, own) for cut in level]
            for cut, total in zip(level, self.totals.of(level, local), strict=True):
                numbers[cut.key] = total
                if tape is not None and not cut.nested and cut.key == id(cut.tensor):
                    tape.watch(total)
                    leaves.append((cut, total))
        return Given(numbers, leaves), list(own.handles.values())

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
        own: "OwnTensors",
    ) -> Any:
        """Return a sum over this worker's rows, with sums of all in each row."""
        if not cut.nested:
            return cut.local
        order, leaves = self._cuts.followed(cut)
        made: dict[int, Any] = {}
        constants: dict[Any, tf.Tensor] = {}
        for leaf in leaves:
            known = self._cuts.reading.of(leaf)
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
                if self._cuts.reading.power_of(each)
                and not self._cuts.reading.power_in(each, operation)
                else made.get(id(each), each)
                for each in operation.inputs
            ]
            made[id(tensor)] = _host.operations.again(operation, inputs)
        found = made[id(cut.tensor)]
        wide = widened(found)
        if self._cuts.reading.of(cut.tensor).kind == ROWS:
            wide = tf.reduce_sum(wide)
        return tf.math.multiply_no_nan(wide, tf.cast(cut.inverse, wide.dtype))


class OwnTensors:
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
