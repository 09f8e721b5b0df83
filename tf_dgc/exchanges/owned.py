"""Residual of the owners of a sum: what they have added up, and not passed on.

Axes: N workers, W of them in this process: one, but in a simulation; P arena elements,
R elements of a region.
"""

import functools

import tensorflow as tf

from tf_dgc.compression import regions
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports.sums import Owned, Sparse, Wire


class OwnedRegion(Owned):
    """z of `owner_sum.py`: residual of the region that a worker owns.

    Attributes:
        ranks: of the workers in this process, shape [*axis], int64.
    """

    def __init__(self, wire: Wire) -> None:
        """Create it, zero, outside of any graph."""
        self._wire, self._device = wire, wire.transport.device
        self._sizes = {"elements": wire.layout.size, "workers": wire.transport.size}
        size = regions.size_of(wire.layout.size, wire.transport.size)
        with tf.init_scope(), tf.device(self._device):
            zeros = tf.zeros([*wire.workers.axis, size])
            self._z = own_variable(zeros, "dgc_owned")

    @property
    def ranks(self) -> tf.Tensor:
        """Owners in this process."""
        ranks = tf.constant(list(self._wire.workers.ranks), tf.int64)
        return tf.reshape(ranks, self._wire.workers.axis)

    # A sum.

    def added(self, received: Sparse) -> tuple[tf.Tensor, tf.Tensor]:
        """Return r, z and all that was received, and the peaks of its blocks."""
        args = self._z, *received
        found: tuple[tf.Tensor, tf.Tensor]
        found = inplace.call(self._device, regions.summed, *args)
        return found

    def keep_rest(self, region: tf.Tensor, passed_on: Sparse) -> None:
        """Keep r, but for what is passed on of it."""
        args = self._z, region, *passed_on
        inplace.update(self._device, regions.kept, *args)

    # Between sums.

    def read(self) -> tf.Tensor:
        """Return z, shape [*axis, R]."""
        return self._z.read_value()

    def whole(self) -> tf.Tensor:
        """Return z in its place in arenas."""
        spread = functools.partial(regions.spread, **self._sizes)
        return self._wire.workers.each(spread, self._z.read_value(), self.ranks)

    def keep(self, arena: tf.Tensor) -> tf.Tensor:
        """Keep back each owner's region of its arena; return the rest."""
        size, workers = self._sizes.values()

        def parted(own: tf.Tensor, rank: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            region = regions.part(own, rank, workers)
            return region, own - regions.spread(region, rank, workers, size)

        own, rest = self._wire.workers.each(parted, arena, self.ranks)
        self._z.assign(own)
        return rest

    def scale(self, by: tf.Tensor) -> None:
        """Multiply z by numbers of the elements of the arena, shape [P]."""
        workers = self._sizes["workers"]

        def scaled(region: tf.Tensor, rank: tf.Tensor) -> tf.Tensor:
            return region * regions.part(by, rank, workers)

        args = self._z.read_value(), self.ranks
        self._z.assign(self._wire.workers.each(scaled, *args))
