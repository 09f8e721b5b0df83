"""Everything is exchanged."""

from typing import Any

import tensorflow as tf

from tf_dgc.exchanges.base import Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.parts import Part, weighed_sum
from tf_dgc.transports import sums


class Dense(Exchange):
    """Plain synchronous data parallelism."""

    def __init__(self, place: Place, taken_over: TakenOver | None = None) -> None:
        """Keep nothing; the optimizer's momentum stays its own."""
        super().__init__(place)

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Sum them."""
        transport, finished = self.transport, [False] * len(local)
        repeats = self.clips
        if part is None:
            found = sums.dense(transport, local, self.name, repeats=repeats)
            return Update(found.gradients, finished, None, found.traffic)
        seat = tf.one_hot(transport.rank, transport.size)
        zero = tf.zeros([])
        told = weighed_sum(transport, local, self.name, seat, zero, part, repeats)
        return Update(told.gradients, finished, None, told.traffic, told.weight)
