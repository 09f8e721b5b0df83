"""Steps of each worker, and how far one may be ahead.

Axis: W workers.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.servers.holders import Holders
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers

NOWHERE = np.iinfo(np.int64).max  # clock of a worker that holds nobody back


class Clocks:
    """Numbers of steps that workers have taken: the bound of staleness.

    References:
        Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel
        Parameter Server, NIPS 2013.
    """

    def __init__(self, name: str, servers: Servers, members: Members, bound: int):
        """Make the variables.

        Args:
            name: prefix of theirs.
            servers: of the job.
            members: its workers.
            bound: steps that a worker may be ahead of the slowest.
        """
        self._members, self._bound = members, bound
        self._device = servers.devices[0]
        workers = members.workers

        def make(kind: str) -> Any:
            return servers.variable(f"{name}.{kind}", tf.int64, [workers])

        self.clocks, self._holders = make("clocks"), Holders(make, members)
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            self.own = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, synchronization=own
            )
            self._inside = tf.Variable(False, trainable=False, synchronization=own)

    def begin(self) -> None:
        """Give first values: nobody has begun."""
        self.clocks.assign(tf.fill(self.clocks.shape, tf.constant(NOWHERE, tf.int64)))
        self._holders.begin()

    def slowest(self) -> tf.Tensor:
        """Return the least clock of the living: shape [], int64."""
        living = self._holders.living()
        with tf.device(self._device):
            return tf.reduce_min(tf.where(living, self.clocks.read_value(), NOWHERE))

    def step(self) -> None:
        """Count a step of this worker; who comes anew begins beside the slowest."""

        def enter() -> None:
            slowest = self.slowest()
            new = tf.where(slowest == NOWHERE, self.own.read_value(), slowest)
            self.own.assign(new)
            self._inside.assign(True)
            self._set(new)
            self._holders.join()

        tf.cond(self._inside.read_value(), lambda: None, enter)
        self._set(self.own.assign_add(1, read_value=True))

    def _set(self, value: Any) -> None:
        with tf.device(self._device):
            self._members.put(self.clocks, value)

    def wait(self) -> None:
        """Wait while this worker is too far ahead."""

        def ahead() -> tf.Tensor:
            slowest = self.slowest()
            with tf.device("CPU:0"):
                return self.own.read_value() - tf.identity(slowest) > self._bound

        def sleep(_: tf.Tensor) -> list[tf.Tensor]:
            with tf.device("CPU:0"):
                slept = tf.numpy_function(self._nap, [began], tf.bool, stateful=True)
            with tf.control_dependencies([slept]):
                return [ahead()]

        with tf.device("CPU:0"):
            began = tf.timestamp()
        tf.while_loop(lambda too_far: too_far, sleep, [ahead()], parallel_iterations=1)

    def _nap(self, began: Any) -> Any:
        return self._members.meetings.naps.nap(began, self._slow, "`max_staleness`")

    def _slow(self) -> np.ndarray:
        """Tell which workers are too far behind this one: shape [W], bool."""
        slow: np.ndarray = (
            self.clocks.read_value().numpy() < int(self.own) - self._bound
        )
        return slow & self._members.meetings.others()

    def leave(self) -> None:
        """Hold nobody back, eagerly; the next step begins anew."""
        if bool(self._inside):
            self._inside.assign(False)
            self._set(NOWHERE)
