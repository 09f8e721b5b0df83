"""Copy that a worker has of what is on servers: its version, and what nobody trains."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.servers.turns import Turns


class ServerExtras:
    """Variables that nobody trains, such as a moving mean, beside those that are.

    What the servers have of each is the mean of what workers have.

    Attributes:
        own: of this worker.
        shared: on the servers.
    """

    def __init__(self, others: Sequence[tuple[Any, Any]]) -> None:
        """Take those among pairs of a worker's variable and that of the servers."""
        pairs = [(own, shared) for own, shared in others if not own.trainable]
        self.own: list[Any] = [own for own, _ in pairs]
        self.shared: list[Any] = [shared for _, shared in pairs]
        self._pairs = pairs

    def pull(self) -> None:
        """Let this worker's be what is on the servers."""
        for own, shared in self._pairs:
            _host.shared.bypassed(own, "assign")(shared.read_value())

    def give(self) -> None:
        """Let the servers have this worker's."""
        for own, shared in self._pairs:
            shared.assign(own.read_value())

    def subtract(self, means: Sequence[Any]) -> None:
        """Subtract the means of all workers' changes, in pieces, on the servers."""
        for shared, mean in zip(self.shared, means, strict=True):
            with tf.device(shared.device):
                shared.assign_sub(tf.identity(mean.joined()))


class CopyVersion:
    """Version of the servers' variables of which a worker's copy is, bit for bit.

    Attributes:
        base: shape [], int64; -1 where it may be of two.
    """

    def __init__(self, turns: Turns, version: Any) -> None:
        """Create it, outside of any graph.

        Args:
            turns: of the rounds.
            version: of the variables on the servers.
        """
        self._turns, self._version = turns, version
        with tf.init_scope(), tf.device("CPU:0"):
            self.base = own_variable(tf.constant(-1, tf.int64), "round_base")

    def of_servers(self) -> tf.Tensor:
        """Return the round to come, the version, whether one is being applied."""
        number, applied = self._turns.state()
        with tf.device(self._version.device):
            found = [number, self._version.read_value(), tf.cast(applied, tf.int64)]
            state = tf.stack(found)
        with tf.device("CPU:0"):
            return tf.identity(state)

    def is_one_behind(self, state: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Tell whether the servers have one round more: that of a step, and no other.

        Args:
            state: of the servers.
            step: number of the round.
        """
        return (state[0] == step + 1) & (state[1] == self.base.read_value() + 1)

    def note(self, before: tf.Tensor, now: tf.Tensor) -> None:
        """Note that a copy was made between two states of the servers."""
        quiet = tf.reduce_all(now[:2] == before[:2]) & (now[2] == 0)
        self.base.assign(tf.where(quiet, now[1], -1))
