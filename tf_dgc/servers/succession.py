"""A worker that begins where others have trained before, and repeats its script.

What they have done by now, a `fit` that is over, it passes over: nobody waits for it
there, and its steps would change what others have finished.

If it is the chief: until it comes to the `fit` in which one before it trained, and in
that, what its script loads or assigns was on the servers already; what they have by now
is newer. So nothing of it goes there: neither what a table held at first, nor a backup.
"""

import tensorflow as tf

from tf_dgc.servers.shared import Servers

_NOBODY = -1  # has trained
_LOOP = 0  # of a script's own, in the place of the number of a `fit`


class Succession:
    """Rule by which what a worker assigns outside of steps goes to the servers.

    Attributes:
        passes: whether a `fit` is passed over now.
    """

    def __init__(self, servers: Servers, is_chief: bool) -> None:
        """Make the variables.

        Args:
            servers: of the job.
            is_chief: whether this worker's assignments count at all.
        """
        self._is_chief, self.passes = is_chief, False
        self._trained = servers.variable("trained", tf.int64)
        self._before = self._fit = _NOBODY
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            self._current, self._told = (
                tf.Variable(
                    tf.constant(value, tf.int64), trainable=False, synchronization=own
                )
                for value in (_LOOP, _NOBODY)
            )
            self.counts_now = tf.Variable(
                is_chief, trainable=False, synchronization=own
            )

    def begin(self) -> None:
        """Give first values: nobody has trained."""
        self._trained.assign(_NOBODY)

    def join(self) -> None:
        """Look how far the chief, or one before it, has come."""
        self._before = int(self._trained.read_value())
        self.enter(_LOOP)

    @property
    def counts(self) -> bool:
        """Rule by which what a worker assigns outside of steps goes to the servers."""
        return self._is_chief and self._fit > self._before

    @property
    def is_over(self) -> bool:
        """Tell whether this `fit` was over before this worker came."""
        return 0 < self._fit < self._before

    @property
    def repeats(self) -> bool:
        """Tell whether this chief does again what one before it has done."""
        return self._is_chief and not self.counts

    def enter(self, fit: int) -> None:
        """Begin a `fit`, by its number, from 1."""
        self._fit = fit
        self._current.assign(fit)
        self.counts_now.assign(self.counts)

    def leave(self) -> None:
        """End a `fit`; after the last that one before this has begun, all counts."""
        if self._fit >= self._before:
            self._end()

    def _end(self) -> None:
        self._before = _NOBODY
        self.counts_now.assign(self.counts)

    def trains(self, fits: bool) -> None:
        """Note, eagerly, a first step; in a loop of the script's own nothing repeats.

        Args:
            fits: whether the step is one of `fit`.
        """
        if not fits:
            self._end()

    def tell(self) -> None:
        """Let a chief after this one know that it has taken a step of this `fit`."""
        current = self._current.read_value()

        def tell() -> None:
            self._trained.assign(tf.maximum(self._trained.read_value(), current))
            self._told.assign(current)

        tf.cond(current != self._told.read_value(), tell, lambda: None)
