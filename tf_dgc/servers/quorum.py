"""Quorum of a step in which nothing is dropped: when it is taken, and of whom it was.

Axis: W workers. All variables are on server 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.servers.members import Members


class Rule(NamedTuple):
    """Rule of when a step is taken where who comes late counts in the next one."""

    quorum: int | None = None  # workers that make a step; None is all that take part
    grace: float | None = None  # seconds from the first of them; None sets no end


class Quorum:
    """Workers that make a step, and a mark for each whose gradient was in one.

    Attributes:
        rule: when a step is taken.
    """

    def __init__(
        self, rule: Rule, make: Callable[..., Any], members: Members, device: str
    ) -> None:
        """Make the variables.

        Args:
            rule: when a step is taken.
            make: takes name, type and shape of a variable on server 0.
            members: of the job.
            device: of server 0.
        """
        self.rule, self._members, self._device = rule, members, device
        each = [members.workers]
        self._times = make("times", tf.float64, each)  # of arrival
        self._counted = make("counted", shape=each)  # in this step, plus 1

    def begin(self) -> None:
        """Give first values: nobody has come."""
        for variable in (self._times, self._counted):
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def arrive(self) -> list[tf.Tensor]:
        """Note the time at which this worker arrives; return what comes after it."""
        with tf.device(self._device):
            self._members.put(self._times, tf.timestamp())
            return [self._times.read_value()]

    def is_ready(self, arrived: tf.Tensor, needed: tf.Tensor) -> tf.Tensor:
        """Tell whether a step is to be taken: shape [], bool; on server 0.

        Args:
            arrived: whose gradients are there, shape [W], bool.
            needed: how many take part, shape [], int64.
        """
        quorum, grace = self.rule
        if quorum is not None:
            needed = tf.minimum(needed, quorum)
        ready = tf.math.count_nonzero(arrived) >= needed
        if grace is not None:
            times = self._times.read_value()
            first = tf.reduce_min(tf.where(arrived, times, times.dtype.max))
            ready |= tf.timestamp() - first > grace
        return ready

    def note(self, workers: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Note whose gradients a step is of.

        Args:
            workers: shape [K], int64.
            step: its number, shape [], int64.

        Returns:
            What comes after that.
        """
        with tf.device(self._device):
            before = self._counted.read_value()
            marks = tf.fill(tf.shape(workers), tf.identity(step) + 1)
            places = tf.identity(workers)[:, tf.newaxis]
            self._counted.assign(tf.tensor_scatter_nd_update(before, places, marks))
            noted: tf.Tensor = self._counted.read_value()
            return noted

    def has(self, step: tf.Tensor) -> tf.Tensor:
        """Tell whether this worker's gradient was in a step: shape [], bool."""
        with tf.device(self._device):
            mark = self._counted.read_value()[self._members.index]
        with tf.device("CPU:0"):
            return tf.identity(mark) == step + 1

    def inherit(self, appliers: Any, step: tf.Tensor) -> tf.Tensor:
        """Apply a step in the place of a worker that has died; return True.

        Args:
            appliers: of steps, a variable of shape [W].
            step: its number, shape [], int64.
        """
        with tf.device(self._device):
            dead = (appliers.read_value() == step + 1) & ~self._members.living()
            named = tf.where(dead)[:, 0]
        with tf.device("CPU:0"):
            expelled = tf.numpy_function(
                self._members.expel, [named], tf.bool, stateful=True
            )
        with tf.control_dependencies([expelled]), tf.device(self._device):
            self._members.put(appliers, step + 1)
        return tf.constant(True)
