"""Traffic of a worker with the servers: its counts, and what a push costs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc._host.shared import Table
from tf_dgc.exchanges.inplace import own_variable


class ServerStats(NamedTuple):
    """Traffic of a worker with the servers, since it began.

    Attributes:
        pushes: of this worker; shape [], int64.
        pulls: fetches of this worker; shape [], int64.
        staleness: sum over its pushes; shape [], float64.
        sent_bytes: gradients; shape [], int64.
        received_bytes: parameters; shape [], int64.
        all_pushes: pushes of all workers, as far as it knows; of steps, where they are
            taken together; shape [], int64.
        dropped: its gradients that came too late for a step; shape [], int64.
    """

    pushes: tf.Tensor
    pulls: tf.Tensor
    staleness: tf.Tensor
    sent_bytes: tf.Tensor
    received_bytes: tf.Tensor
    all_pushes: tf.Tensor
    dropped: tf.Tensor


class Totals:
    """Counts, since this worker began."""

    def __init__(self) -> None:
        """Create the variables, zero, outside of any graph."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = own_variable(tf.zeros([6], tf.int64), "downpour_counts")
            self._stale = own_variable(tf.zeros([], tf.float64), "downpour_staleness")

    def add(
        self,
        pushes: Any = 0,
        pulls: Any = 0,
        sent: Any = 0,
        received: Any = 0,
        stale: Any = None,
        dropped: Any = 0,
    ) -> None:
        """Add to them."""
        with tf.device("CPU:0"):
            added = pushes, pulls, sent, received, 0, dropped
            self._counts.assign_add(tf.stack([tf.cast(v, tf.int64) for v in added]))
            if stale is not None:
                self._stale.assign_add(stale)

    def know(self, version: tf.Tensor) -> None:
        """Note how many pushes there were of all workers."""
        with tf.device("CPU:0"):
            now = self._counts.read_value()
            self._counts.assign(tf.concat([now[:4], [version], now[5:]], 0))

    def stats(self) -> ServerStats:
        """Return them."""
        pushes, pulls, *counts = tf.unstack(self._counts, 6)
        return ServerStats(pushes, pulls, self._stale.read_value(), *counts)


def size(variables: Sequence[Any]) -> tf.Tensor:
    """Return the bytes of copies, shape [], int64."""
    own = [v for v in variables if not isinstance(v, Table)]
    total = sum(v.shape.num_elements() * v.dtype.size for v in own)
    return tf.constant(total, tf.int64)


def traffic(sent: tf.Tensor) -> tf.Tensor:
    """Return `sums.traffic_of` bytes and elements, shape [2], of a push.

    What is fetched does not come with a step's gradients: `ServerStats` has it.
    """
    return tf.concat([sent, tf.zeros([1], tf.int64)], axis=0)


def cost(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the bytes and the elements of gradients: shape [2], int64."""
    total, elements = tf.zeros([], tf.int64), tf.zeros([], tf.int64)
    for gradient in gradients:
        sparse = isinstance(gradient, tf.IndexedSlices)
        values = gradient.values if sparse else gradient
        count = tf.size(values, tf.int64)
        elements += count
        total += count * values.dtype.size
        if sparse:
            total += tf.size(gradient.indices, tf.int64) * gradient.indices.dtype.size
    return tf.stack([total, elements])
