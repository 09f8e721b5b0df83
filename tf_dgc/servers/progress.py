"""Progress of a worker, as its own threads and other workers see it.

A thread that tells the servers that its process lives says nothing of the main thread,
which may hang. So it tells only while that moves: takes steps of any kind, or waits for
others. And of those it tells how many steps there were, so that workers that wait for
each other in different places find out.
"""

import time
from typing import Any

import tensorflow as tf


class Progress:
    """Counts what the main thread of a worker does.

    Attributes:
        steps: shape [], int64: of training, evaluation and prediction.
    """

    def __init__(self) -> None:
        """Begin to count."""
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            self.steps = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, synchronization=own
            )
        self._waits = 0
        self._last: Any = None
        self._since = time.monotonic()

    def step(self) -> None:
        """Count a step, where it is run or traced."""
        with tf.device("CPU:0"):
            self.steps.assign_add(1, read_value=False)

    def wait(self) -> None:
        """Count that this worker still waits for others."""
        self._waits += 1

    def idle(self) -> float:
        """Return the seconds since the main thread was last seen to move."""
        now, seen = time.monotonic(), (int(self.steps), self._waits)
        if seen != self._last:
            self._last, self._since = seen, now
        return now - self._since
