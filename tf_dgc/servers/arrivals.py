"""Arrivals of workers' gradients on servers, for steps that they take together.

Axis: W workers. All variables that workers share are on server 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc.servers.attendance import COMES, INSIDE, Attendance
from tf_dgc.servers.members import Members
from tf_dgc.servers.quorum import Quorum


class Arrived(NamedTuple):
    """Of whom a step is."""

    workers: tf.Tensor  # shape [K], int64; ascending
    weights: tf.Tensor  # shape [K], float32; in the mean, or all 0; see `now`


class Arrivals:
    """Arrivals: of which step each worker's gradient is that is there."""

    def __init__(
        self,
        make: Callable[..., Any],
        members: Members,
        attendance: Attendance,
        quorum: Quorum | None,
        own: tf.Variable,
        device: str,
    ) -> None:
        """Make the variables.

        Args:
            make: takes name, type and shape of a variable on server 0.
            members: of the job.
            attendance: of workers in rounds.
            quorum: that makes a step, or None.
            own: shape [], int64: the step of this worker's gradient.
            device: of server 0.
        """
        self._members, self._attendance, self._quorum = members, attendance, quorum
        self._own, self._device = own, device
        # Steps are told by their number plus 1: 0 is none.
        self._steps = make("arrived", shape=[members.workers])
        self._weights = make("weights", tf.float32, [members.workers])

    def begin(self) -> None:
        """Give first values: nobody has come."""
        for variable in (self._steps, self._weights):
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def arrive(self, weight: tf.Tensor) -> None:
        """Say that this worker's gradient is on the servers.

        Args:
            weight: shape [], float32; what it counts in the mean.
        """
        self._members.signs.show(self._members.put)
        with tf.device(self._device):
            self._members.put(self._weights, weight)
            given = [self._weights.read_value()]
        if self._quorum is not None:
            given += self._quorum.arrive()
        with tf.control_dependencies(given), tf.device(self._device):
            self._members.put(self._steps, self._own.read_value() + 1)

    def withdraw(self) -> None:
        """Take back that this worker's gradient is there: its step will not come."""
        with tf.device(self._device):
            self._members.put(self._steps, 0)

    def of(self, step: tf.Tensor) -> tf.Tensor:
        """Tell whose gradients of a step are there: shape [W], bool.

        Args:
            step: its number, on the device of the servers.
        """
        arrived: tf.Tensor = self._steps.read_value() == step + 1
        return arrived

    def now(self) -> Arrived:
        """Return whose gradients this worker's step is the mean of.

        The sum of their weights is 1. By a rule it is the share of those that have come
        of all that take part: others come in another step, which would count for all
        again.
        """
        own, own_round = self._own.read_value(), self._attendance.round.read_value()
        with tf.device(self._device):
            now = self.of(tf.identity(own))
            entries = self._attendance.entries.read_value()
            in_round = entries == tf.identity(own_round)
            came = now & in_round
            found = tf.where(came)[:, 0]
            with tf.control_dependencies([found]):
                weights = tf.gather(self._weights.read_value(), found)
            # Rows of one worker alone leave its gradient as it is.
            weights = tf.math.divide_no_nan(weights, tf.reduce_sum(weights))
            if self._quorum is not None:
                weights *= self._share(came, in_round)
            return Arrived(found, weights)

    def _share(self, came: tf.Tensor, in_round: tf.Tensor) -> tf.Tensor:
        """Return how large a part of those that take part has come: shape [], float32.

        Args:
            came: shape [W], bool.
            in_round: who is in the round, though it may be dead: shape [W], bool.
        """
        places = self._attendance.places.read_value()
        takes_part = in_round & ((places == INSIDE) | (places == COMES))
        everybody = came | (takes_part & self._attendance.holders.living())
        count = tf.math.count_nonzero
        return tf.cast(count(came) / count(everybody), tf.float32)

    def late(self) -> np.ndarray:
        """Tell which workers this step waits for, eagerly: shape [W], bool."""
        late = self._attendance.inside() & self._members.meetings.others()
        arrived: np.ndarray = self._steps.read_value().numpy()
        return late & (arrived != int(self._own) + 1)
