"""Large tensors of a step, of which the largest elements are summed.

Axis: P arena elements.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_dgc import values
from tf_dgc.exchanges import formats, fused
from tf_dgc.exchanges.modes import Contribution, Mode
from tf_dgc.exchanges.residual import Residual
from tf_dgc.transports.sums import SparseSum


class LargeTensors:
    """Accumulates what a worker has, sums the largest elements, and keeps the rest."""

    def __init__(
        self,
        residual: Residual,
        mode: Mode,
        sums: Sequence[SparseSum],
        scales: Sequence[Callable[[tf.Tensor], None]],
    ) -> None:
        """Take the state, and how it is exchanged.

        Args:
            residual: of this worker.
            mode: what is accumulated there.
            sums: of all stages.
            scales: multiply what waits elsewhere; see `Residual.fall`.
        """
        self._residual, self._mode = residual, mode
        self._sums, self._scales = sums, scales

    def send(self, share: Contribution) -> tf.Tensor:
        """Accumulate, sum at the present stage, keep the rest, apply the sum.

        Returns:
            See `sums.traffic_of`.
        """
        with self._residual.arenas.borrowed():
            step = self._residual.count.present()
            through = [
                functools.partial(self._through, each, share, step)
                for each in self._sums
            ]
            number = formats.number_at(step, self._sums, self._residual.config)
            traffic = values.one_of(through, number)
            self._residual.count.add()
        return traffic

    def _through(
        self, wire: SparseSum, share: Contribution, step: tf.Tensor
    ) -> tf.Tensor:
        """Take a step at the stages of one kind of sum."""
        if isinstance(wire, fused.FusedSum):
            return wire.through(share, step)
        if share.taken_over is not None:
            rate = tf.cast(share.taken_over.learning_rate, tf.float32)
            self._residual.fall(rate, self._scales)
        stage = wire.stage_at(step)
        kept = self._mode.add(share, whole=not any(wire.slots))
        total, used, traffic = wire(kept, step, stage)
        with tf.control_dependencies(tf.nest.flatten(total)):
            kept.keep(used)
        self._mode.apply(share, total, wire.slots, stage)
        return traffic
