"""Figures that a worker counts: of a step, of a round, of each tensor."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.compression import arena
from tf_dgc.compression.arena import Layout
from tf_dgc.exchanges.inplace import own_variable


class RoundStats(NamedTuple):
    """Progress of averaging on a worker; of several optimizers, the last to begin.

    Attributes:
        rounds: number of rounds so far; shape [], int64.
        period: local steps between two rounds; shape [], int64.
        position: local steps since the last round; shape [], int64.
        distance: Euclidean distance of this worker's parameters from those agreed on,
            before the last round; shape [], float32.
    """

    rounds: tf.Tensor
    period: tf.Tensor
    position: tf.Tensor
    distance: tf.Tensor


class TensorStats(NamedTuple):
    """Traffic of one compressed tensor on one worker, since the figures were reset.

    Attributes:
        name: of the variable.
        elements: of the tensor.
        density: mean fraction of its elements that was sent in a step.
        stale: fraction of its elements that was not sent once.
    """

    name: str
    elements: int
    density: float
    stale: float


class Coverage:
    """Counts, by tensor, which elements of an arena a worker sends.

    Attributes:
        sent: which were sent, shape [P], bool.
        counts: how many of each tensor, shape [T], int64.
    """

    def __init__(self, layout: Layout, device: str, counts_on: str) -> None:
        """Create the variables, zero, outside of any graph."""
        self._layout = layout
        with tf.init_scope(), tf.device(device):
            self.sent = own_variable(tf.zeros([layout.size], tf.bool), "dgc_sent")
        with tf.init_scope(), tf.device(counts_on):
            tensors = len(layout.segments)
            self.counts = own_variable(tf.zeros([tensors], tf.int64), "dgc_counts")
        with tf.init_scope(), tf.device("CPU:0"):
            self._steps = own_variable(tf.zeros([], tf.int64), "dgc_counted_steps")

    def record(self, positions: tf.Tensor) -> None:
        """Count the positions sent in one step, shape [K], int64, ascending.

        Those that are not below P stand for unused slots of a message. Whoever calls
        this has marked them in `sent`.
        """
        self.counts.assign_add(arena.count_by_segment(self._layout, positions))
        self.count()

    def count(self) -> None:
        """Count a step, whose elements are counted."""
        self._steps.assign_add(1)

    def record_all(self) -> None:
        """Take in a step that sent everything."""
        self.sent.assign(tf.ones_like(self.sent))
        sizes = [s.size for s in self._layout.segments]
        self.counts.assign_add(tf.constant(sizes, tf.int64, [len(sizes)]))
        self.count()

    def stats(self, reset: bool = False) -> list[TensorStats]:
        """Return the figures of each tensor, eagerly; then start anew, if told so."""
        found = self._stats()
        if reset:
            self.reset()
        return found

    def _stats(self) -> list[TensorStats]:
        sent, counts = self.sent.numpy(), self.counts.numpy()
        steps = max(int(self._steps), 1)
        return [
            TensorStats(
                segment.name,
                segment.size,
                float(count) / (steps * segment.size),
                1.0 - float(sent[segment.offset :][: segment.size].mean()),
            )
            for segment, count in zip(self._layout.segments, counts, strict=True)
        ]

    def reset(self) -> None:
        """Start anew."""
        for variable in (self.sent, self.counts, self._steps):
            variable.assign(tf.zeros_like(variable))


COUNTED = 5  # figures of a step


def counted(traffic: Any, size: int = 0, elements: int = 0) -> tf.Tensor:
    """Return the figures of a step: shape [COUNTED], int64, on the host.

    Args:
        traffic: what `sums.traffic_of` returned.
        size: bytes of all gradients.
        elements: of all gradients.

    Returns:
        Bytes sent, all bytes, elements sent, all elements, bytes received.
    """
    with tf.device("CPU:0"):
        sent, sent_elements, received = tf.unstack(traffic)
        return tf.stack([sent, size, sent_elements, elements, received])


class StepStats(NamedTuple):
    """Traffic of one worker, in the last step or in all steps.

    Bytes are those handed to the transport: messages with header and padding, densely
    reduced tensors, and what tells each worker's rows; the network's own framing not.
    With `hierarchical` they are those between hosts, the same for all workers of a
    host, where each takes part in a dense sum of all gradients, which is not counted.
    So it is with sites of averaging: what they exchange within is not counted.

    Attributes:
        sent_bytes: shape [], int64.
        dense_bytes: bytes of all gradients, as they are; shape [], int64.
        sent_elements: shape [], int64.
        dense_elements: elements of all gradients; shape [], int64.
        residual_norm: Euclidean norm of what is kept; shape [], float32.
        received_bytes: bytes from other workers: N - 1 messages of an all-gather; N - 1
            to this owner and those of other owners; 2 (N - 1) / N of dense tensors;
            shape [], int64.
    """

    sent_bytes: tf.Tensor
    dense_bytes: tf.Tensor
    sent_elements: tf.Tensor
    dense_elements: tf.Tensor
    residual_norm: tf.Tensor
    received_bytes: tf.Tensor


def step_stats(figures: tf.Tensor, residual_norm: tf.Tensor) -> StepStats:
    """Return figures, as of `counted`, and the norm of what is kept, by name."""
    *before, received = tf.unstack(figures, COUNTED)
    return StepStats._make([*before, residual_norm, received])


class Clock:
    """Counts steps: one ends where an optimizer comes for the second time.

    Attributes:
        step: shape [], int64.
        total: sum of the figures of all steps, as of `counted`.
    """

    def __init__(self) -> None:
        """Create the variable, zero, outside of any graph."""
        with tf.init_scope(), tf.device("CPU:0"):
            self.step = own_variable(tf.zeros([], tf.int64), "dgc_clock")
            self.total = own_variable(tf.zeros([COUNTED], tf.int64), "dgc_total")


class Counters:
    """Counts what a worker sends and receives, by optimizer."""

    def __init__(self, clock: Clock) -> None:
        """Create the variables, all zero, outside of any graph."""
        self._clock = clock
        with tf.init_scope(), tf.device("CPU:0"):
            self._step = own_variable(tf.constant(-1, tf.int64), "dgc_counted_step")
            self._last = own_variable(tf.zeros([COUNTED], tf.int64), "dgc_last")

    @property
    def last(self) -> tf.Tensor:
        """Figures of the last step of the clock, zero where it had none here."""
        return self._last * tf.cast(self._step == self._clock.step, tf.int64)

    def record(self, figures: tf.Tensor) -> None:
        """Take in one step's figures, as of `counted`."""
        with tf.device("CPU:0"):
            again = tf.cast(self._step == self._clock.step, tf.int64)
            self._step.assign(self._clock.step.assign_add(again))
            self._last.assign(figures)
            self._clock.total.assign_add(figures)

    def add(self, figures: tf.Tensor) -> None:
        """Take in what travelled for the last step after it was recorded."""
        with tf.device("CPU:0"):
            self._last.assign_add(figures)
            self._clock.total.assign_add(figures)


def last_step(counters: Sequence[Counters]) -> tf.Tensor:
    """Return the figures of the last step of the clock, of several optimizers."""
    return sum([each.last for each in counters], tf.zeros([COUNTED], tf.int64))
