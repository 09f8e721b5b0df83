"""The largest elements are exchanged, the rest is kept for later.

Axes: P arena elements, N workers, W of them in this process: one, but in a simulation.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import arena
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import formats, fused, local_gradients, modes
from tf_dgc.exchanges.base import (
    Apply,
    Exchange,
    Place,
    TakenOver,
    Update,
)
from tf_dgc.exchanges.figures import TensorStats
from tf_dgc.exchanges.held_back import HeldBack
from tf_dgc.exchanges.modes import SUM, Combining, Contribution, Mode, OwnSteps
from tf_dgc.exchanges.parts import Part, weighed_sum
from tf_dgc.exchanges.residual import OWNED, Residual
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport
from tf_dgc.transports.sums import SparseSum, Wire, Workers, no_traffic, one


class Compressed(Exchange):
    """Deep Gradient Compression of the large tensors, the small ones dense.

    Attributes:
        layout: of the arena of compressed tensors.
        residual: what this worker has not sent yet of them.
        mode: what is accumulated there.
    """

    residual: Residual
    mode: Mode

    def __init__(
        self,
        place: Place,
        taken_over: TakenOver | None,
        config: DGCConfig,
        workers: Callable[[Transport], Workers] = one,
        combining: Combining = SUM,
    ) -> None:
        """Create the variables outside of any graph: zero, but for momentum so far.

        Args:
            place: whose gradients, and with whom.
            taken_over: what the optimizer leaves to the exchange in the first step.
            config: the settings.
            workers: which the process is.
            combining: of what workers send; by default it is added up.
        """
        super().__init__(place)
        self._workers = workers(self.transport)
        shapes = [v.shape.as_list() for v in self.variables]
        self._large = [
            i
            for i, v in enumerate(self.variables)
            if arena.is_compressed(shapes[i], v.dtype, config.min_elements)
        ]
        self._small = [i for i in range(len(shapes)) if i not in self._large]
        self.layout = arena.build(
            [(self.variables[i].name, shapes[i]) for i in self._large]
        )
        config = formats.refuse_without_all_to_all(config, self.transport)
        config = formats.within_budget(config, self.layout, self._small, place)
        self.config = formats.decided(config, self.layout, self.transport.size)
        wire = Wire(self.transport, self._workers, self.layout, self.config, self.name)
        taken = modes.accumulated(self.config, taken_over, bool(self._large))
        earlier = [
            (o.residual, o.mode) for o in place.siblings if isinstance(o, Compressed)
        ]
        tensors, device = (self.variables, self._large), self.transport.device
        whole = fused.is_wanted(device) and not self._workers.axis
        figures = device if whole else "CPU:0"
        self.residual, self.mode = modes.opened(
            wire, *tensors, taken, earlier, combining, figures
        )
        clipping = local_gradients.Clipping(self.layout, self._large, self._small)
        self._clipping = [clipping]  # the first that takes gradients
        by = [fused.sums_by(wire, self.residual, self.mode)] if whole else []
        self._sums = formats.sums_of(wire, *by)
        if any(isinstance(each, fused.FusedSum) for each in self._sums):
            self._clipping.insert(0, fused.Front(self.layout, *tensors, device))
        self._held = HeldBack(self.residual, self.mode, self._sums)
        with tf.init_scope():  # begin alike with what is accumulated
            everybody, form = self.transport.everybody, modes.describe(taken)
            handshake.agree(everybody, "optimizers", {"accumulated": form})
            self._held.agree_on_slots(everybody)
        formats.tell(wire, self.variables)
        fused.tell(self._sums, wire)

    # The step: local -> wire -> local.

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Sum the small tensors, and what all select of the large ones."""
        taken_over = taken_over if self.mode.is_step else None
        modes.refuse_late(self.residual, taken_over)
        whole = self.transport.size if part is None else part.whole
        front = next(each for each in self._clipping if each.takes(local))
        clip = functools.partial(
            front.clipped,
            rate=[] if taken_over is None else [taken_over.learning_rate],
            clip_norm=self.config.clip_norm,
            workers=self.transport.size,
            whole=whole,
        )
        gradient, small, nonfinite, scale = self._workers.each(clip, local)

        # Wire 1. Before any state changes all must know whether the step counts.
        factors = self._workers.factors()
        if factors is not None:
            small = self._workers.each(_all_scaled, small, factors)
        seats = self._workers.seats(self.transport.size)
        args = self.transport, small, self.name, seats, nonfinite, part
        told = weighed_sum(*args, repeats=False)
        names = [*(v.name for v in self.variables), "the learning rate"]
        config, step = self.config, self.residual.step
        ok = local_gradients.all_finite(told.nonfinite, config, step, names)
        factor = told.factor if factors is None else factors
        summed = front.small(told.gradients)
        share = Contribution(gradient, scale, factor, summed, whole, taken_over)

        traffic = tf.cond(ok, functools.partial(self._send, share), no_traffic)
        found: list[Any] = [None] * len(local)
        flags = [self.mode.is_step and i in self._large for i in range(len(local))]
        if not self.mode.takes_small:
            for i, tensor in zip(self._small, summed, strict=True):
                found[i] = tensor
        for i, tensor in zip(self._large, self.mode.gradients(), strict=True):
            found[i] = None if tensor is None else tf.cast(tensor, local[i].dtype)
        with tf.device("CPU:0"):
            return Update(found, flags, ok, told.traffic + traffic, told.weight)

    def _send(self, share: Contribution) -> tf.Tensor:
        """Accumulate, sum at the present stage, keep the rest, apply the sum.

        Returns:
            See `sums.traffic_of`.
        """
        with self.residual.arenas.borrowed():
            step = self.residual.count.present()
            through = [
                functools.partial(self._through, s, share, step) for s in self._sums
            ]
            traffic = values.one_of(
                through, formats.number_at(step, self._sums, self.config)
            )
            self.residual.count.add()
        return traffic

    def _through(
        self, wire: SparseSum, share: Contribution, step: tf.Tensor
    ) -> tf.Tensor:
        """Take a step at the stages of one kind of sum."""
        if isinstance(wire, fused.FusedSum):
            return wire.through(share, step)
        if share.taken_over is not None:
            rate = tf.cast(share.taken_over.learning_rate, tf.float32)
            self.residual.fall(rate, self._held.scales)
        stage = wire.stage_at(step)
        kept = self.mode.add(share, whole=not any(wire.slots))
        total, used, traffic = wire(kept, step, stage)
        with tf.control_dependencies(tf.nest.flatten(total)):
            kept.keep(used)
        self.mode.apply(share, total, wire.slots, stage)
        return traffic

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """The residual, the velocity, and what optimizers keep of own steps."""
        return self._held.state

    @property
    def owed(self) -> Mapping[str, tf.Tensor]:
        """Return the residual of the owners, as arenas."""
        return self._held.owed

    @property
    def own_slots(self) -> Sequence[Any]:
        """Slots of the optimizer, where its steps are this worker's own."""
        return self.mode.steps.slots if isinstance(self.mode, OwnSteps) else ()

    @property
    def steps(self) -> int:
        """Number of exchanges that were done."""
        return int(self.residual.step)

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved, by owners or not."""
        left = dict(arrays)
        owned = tf.cast(left.pop(OWNED, 0.0), tf.float32)
        super().load(left, steps)
        self._held.take(owned)
        self.residual.loaded(steps)
        self._held.agree_on_slots(self.transport.everybody)

    def flush(self, variables: Sequence[Any], apply: Apply) -> None:
        """Apply, eagerly, what all workers keep back of variables; clear it."""
        self._held.flush(variables, apply, self.transport, f"{self.name}.flush")

    def kept(self) -> list[tf.Tensor]:
        """Return the residual; of several workers, one of the mean square."""
        mean = len(self._workers.ranks) ** 0.5
        return [part / mean for part in self._held.kept()]

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        return self.residual.coverage.stats(reset)


def _all_scaled(gradients: list[Any], factor: tf.Tensor) -> list[Any]:
    return [values.scaled(gradient, factor) for gradient in gradients]
