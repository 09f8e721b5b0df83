"""Lets one collective of a process through at a time, and counts them."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

END = "end"  # in the place of names of collectives, before a number of batches
STEP = "a step"  # in their place, where they are in a graph
FLIGHT = "a round in flight"  # or in a thread of their own
GROUP = "a step of a site"  # or in a group that counts its own


class Turnstile:
    """Orders collectives as the program does, on every worker alike.

    In a graph nothing else would: Horovod's operations count as stateless, and two of
    the same name must not be under way at once.

    Attributes:
        calls: shape [], int64, odd while this worker is inside a collective.
        place: the name of the collective that it is in eagerly; None in a graph.
    """

    place: str | None = None
    _end: str | None = None

    def __init__(self, unnamed: str = STEP) -> None:
        """Create the counter. This starts TensorFlow.

        Args:
            unnamed: where this worker is where there is no `place`.
        """
        self._unnamed = unnamed
        with tf.init_scope(), tf.device("CPU:0"):
            self.calls = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, name="tf_dgc_calls"
            )

    @property
    def where(self) -> str:
        """Place of this worker, as far as that is known here."""
        return self.place or self._unnamed

    @contextlib.contextmanager
    def entered(
        self, tensor: tf.Tensor, name: str
    ) -> Iterator[Callable[[tf.Tensor], tf.Tensor]]:
        """Count the operations made inside as one collective.

        Args:
            tensor: what the collective waits for before it starts.
            name: of the collective, the same on every worker.

        Yields:
            A function that takes the collective's result and returns it, counted.
        """

        def leave(result: tf.Tensor) -> tf.Tensor:
            with _after(result):
                left = self.calls.assign_add(1, read_value=False)
            with _after(left):
                return tf.identity(result)

        with self.at(name):  # before others can ask for it
            with _after(tensor):
                enter = self.calls.assign_add(1, read_value=False)
            with _after(enter):
                yield leave

    @contextlib.contextmanager
    def at_end(self, batches: int) -> Iterator[None]:
        """Let `place` be the end of this worker's data, eagerly."""
        self._end = f"{END} {batches}"
        try:
            yield
        finally:
            self._end = None

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Let `place` be a name for a while, eagerly."""
        if not tf.executing_eagerly():
            yield
            return
        self.place = self._end or name
        try:
            yield
        finally:
            self.place = None


def _after(
    operation: tf.Operation | tf.Tensor | None,
) -> contextlib.AbstractContextManager:
    """Order what is made inside after `operation`; None where there is no graph."""
    return tf.control_dependencies([] if operation is None else [operation])
