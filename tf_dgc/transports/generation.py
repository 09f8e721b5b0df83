"""Generations of workers: what was traced among some must not run among others."""

import tensorflow as tf


class Generation:
    """Set of workers, in the order of those that a process has been one of.

    Attributes:
        number: of this one, from 0.
    """

    def __init__(self) -> None:
        """Begin with the first."""
        self.number = 0
        with tf.init_scope(), tf.device("CPU:0"):
            self._now = tf.Variable(0, trainable=False, name="tf_dgc_world")

    def next(self) -> "Generation":
        """Return the one after this; what belongs to this one fails from now on."""
        later = Generation.__new__(Generation)
        later.number, later._now = self.number + 1, self._now
        self._now.assign(later.number)
        return later

    def require(self) -> tf.Operation:
        """Return what fails in a graph where this is not the present one."""
        return tf.debugging.Assert(
            self._now.read_value() == self.number,
            [
                "The workers have changed since this tf.function was traced. Make "
                "it inside the function that elastic training calls again."
            ],
        )
