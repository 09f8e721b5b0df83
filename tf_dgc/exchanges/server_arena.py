"""Arena of tensors on the servers, which a worker changes and follows.

Axes: P arena elements, K slots of a stage, C <= K selected elements.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.compression import halves
from tf_dgc.compression.arena import Layout
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.stage_selection import Chosen
from tf_dgc.servers.shared import Servers, Twins
from tf_dgc.servers.stamped_part import Pushers
from tf_dgc.servers.stamps import ALL, Stamped


class ServerArena:
    """Compressed tensors on the servers, and how much a worker has seen of them."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        workers: Pushers,
        twins: Twins,
        layout: Layout,
        mirrors: Sequence[Any],
        always: bool,
    ) -> None:
        """Make handles of what is on the servers.

        Args:
            name: prefix of the names there.
            servers: of the job.
            workers: of the job.
            twins: server variables of the worker's.
            layout: of the arena.
            mirrors: this worker's variables.
            always: whether all of it changes in each push.
        """
        self._layout, self._mirrors, self._twins = layout, list(mirrors), twins
        found: list[Any] = [twins.of(variable) for variable in mirrors]
        rivals: list[Any] = twins.stamped_of(found)
        self._stamped = Stamped(name, servers, workers, layout, found, rivals)
        self._stamped.always.assign(always)
        with tf.init_scope(), tf.device("CPU:0"):
            parts = len(self._stamped.parts)
            since = tf.fill([parts, 2], tf.constant(ALL, tf.int64))
            self._since = own_variable(since, "downpour_since")
            self._assigned = own_variable(tf.zeros([], tf.int64), "downpour_seen")
        twins.stamped.append(self._stamped)

    def begin(self) -> None:
        """Give first values to what is on the servers; the chief does."""
        self._stamped.begin()

    # Up.

    def cost(self, chosen: Chosen) -> tf.Tensor:
        """Return the bytes and elements of a push: shape [2], int64."""
        count = tf.size(chosen.positions, tf.int64)
        rooms = sum(halves.rooms(part.size) for part in self._stamped.parts)
        some = count * (2 + chosen.values.dtype.size) + 4 * rooms
        elements = tf.constant(self._layout.elements, tf.int64)
        return tf.where(
            chosen.everything,
            tf.stack([4 * elements, elements]),
            tf.stack([some, count]),
        )

    def push(self, chosen: Chosen, scale: tf.Tensor, slots: Sequence[int]) -> None:
        """Push what was selected.

        Args:
            chosen: elements.
            scale: shape [], float32, which they are multiplied by.
            slots: K of each stage; 0 where everything goes.
        """

        def some() -> None:
            self._stamped.push(chosen.positions, chosen.values, scale)

        def everything() -> None:
            whole = tf.ensure_shape(chosen.whole, [self._layout.size])
            self._stamped.push_all(whole, scale)

        if all(slots):
            some()
        elif not any(slots):
            everything()
        else:
            tf.cond(chosen.everything, everything, some)

    def push_all(self, steps: tf.Tensor) -> None:
        """Push an arena, shape [P], eagerly; wait until servers have it."""
        self._stamped.push_all(steps, tf.ones([]))
        self._stamped.wait()

    # Down.

    def pull(self) -> tf.Tensor:
        """Fetch what has changed since the last time; return bytes, shape [], int64."""
        with tf.device("CPU:0"):
            assigned = tf.identity(self._twins.assigned.read_value())
            afresh = assigned != self._assigned.read_value()
            since = tf.where(afresh, tf.constant(ALL, tf.int64), self._since)
        times, size = self._stamped.pull(self._mirrors, since)
        with tf.device("CPU:0"):
            self._since.assign(times)
            self._assigned.assign(assigned)
        return size
