"""The largest elements are exchanged, the rest is kept for later.

Axes: P arena elements, N workers, W of them in this process: one, but in a simulation.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.compression import arena
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import formats, fused, modes
from tf_dgc.exchanges.base import (
    Apply,
    Exchange,
    Place,
    TakenOver,
    Update,
)
from tf_dgc.exchanges.figures import TensorStats
from tf_dgc.exchanges.held_back import HeldBack
from tf_dgc.exchanges.large_tensors import LargeTensors
from tf_dgc.exchanges.local_gradients import Clipping
from tf_dgc.exchanges.modes import SUM, Combining, Mode, OwnSteps
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.residual import OWNED, Residual
from tf_dgc.exchanges.small_tensors import SmallTensors
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport
from tf_dgc.transports.sums import Wire, Workers, no_traffic, one


class Compressed(Exchange):
    """Deep Gradient Compression of the large tensors, the small ones dense.

    Attributes:
        layout: of the arena of compressed tensors.
        residual: what this worker has not sent yet of them.
        mode: what is accumulated there.
        sums: of all stages.
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
        self._division = arena.divide(self.variables, config.min_elements)
        large, small, self.layout = self._division
        config = formats.refuse_without_all_to_all(config, self.transport)
        config = formats.within_budget(config, self.layout, small, place)
        self.config = formats.decided(config, self.layout, self.transport.size)
        wire = Wire(self.transport, self._workers, self.layout, self.config, self.name)
        taken = modes.accumulated(self.config, taken_over, bool(large))
        earlier = [
            (o.residual, o.mode) for o in place.siblings if isinstance(o, Compressed)
        ]
        tensors, device = (self.variables, large), self.transport.device
        whole = fused.is_wanted(device) and not self._workers.axis
        figures = device if whole else "CPU:0"
        self.residual, self.mode = modes.opened(
            wire, *tensors, taken, earlier, combining, figures
        )
        by = [fused.sums_by(wire, self.residual, self.mode)] if whole else []
        self.sums = formats.sums_of(wire, *by)
        fronts = [Clipping(self._division)]
        if any(isinstance(each, fused.FusedSum) for each in self.sums):
            fronts.insert(0, fused.Front(self._division, self.variables, device))
        self._small = SmallTensors(wire, self.variables, fronts)
        own = self.residual, self.mode, self.sums
        self._held = HeldBack(*own)
        self._large = LargeTensors(*own, self._held.scales)
        with tf.init_scope():  # begin alike with what is accumulated
            everybody, form = self.transport.everybody, modes.describe(taken)
            handshake.agree(everybody, "optimizers", {"accumulated": form})
            self._held.agree_on_slots(everybody)
        formats.tell(wire, self.variables)
        fused.tell(self.sums, wire)

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
        # Before any state changes all must know whether the step counts.
        met = self._small.meet(local, taken_over, part, self.residual.step)
        share, ok, small_traffic, weight = met

        traffic = tf.cond(ok, functools.partial(self._large.send, share), no_traffic)
        numbers = self._division.large
        flags = [self.mode.is_step and i in numbers for i in range(len(local))]
        large = [
            None if tensor is None else tf.cast(tensor, local[i].dtype)
            for i, tensor in zip(numbers, self.mode.gradients(), strict=True)
        ]
        small = [None] * len(share.small) if self.mode.takes_small else share.small
        found = self._division.merged(large, small)
        with tf.device("CPU:0"):
            return Update(found, flags, ok, small_traffic + traffic, weight)

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
