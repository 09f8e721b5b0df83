"""The variables of a worker: velocity, residual, counters. Owns state, does no math."""

from typing import NamedTuple

import tensorflow as tf

from tf_dgc import dgc
from tf_dgc.layout import Layout


def _variable(value: tf.Tensor, name: str) -> tf.Variable:
    # NONE tells the strategy that the variable is the worker's own business.
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.NONE,
    )


class ArenaState:
    """The state of one optimizer's compressed tensors on one worker.

    Attributes:
        velocity: u, shape [P], float32; None where no momentum is corrected.
        residual: v, shape [P], float32.
        step: shape [], int64, number of exchanges done.
    """

    def __init__(self, layout: Layout, with_velocity: bool, device: str) -> None:
        """Create the variables, all zero, outside of any graph."""
        with tf.init_scope(), tf.device(device):
            zeros = tf.zeros([layout.size])
            self.velocity = _variable(zeros, "dgc_velocity") if with_velocity else None
            self.residual = _variable(zeros, "dgc_residual")
        with tf.init_scope(), tf.device("CPU:0"):
            self.step = _variable(tf.zeros([], tf.int64), "dgc_step")

    def read(self) -> dgc.State:
        """Return the present values of u and v."""
        velocity = None if self.velocity is None else self.velocity.read_value()
        return dgc.State(velocity, self.residual.read_value())

    def advance(self, state: dgc.State) -> None:
        """Assign u and v, and count a step."""
        if self.velocity is not None:
            self.velocity.assign(state.velocity)
        self.residual.assign(state.residual)
        self.step.assign_add(1)


class StepStats(NamedTuple):
    """What one worker sent, in the last step or in all steps.

    Bytes are those of the messages handed to the transport: header, padding and the
    densely reduced tensors included, the network's own framing not.
    """

    sent_bytes: tf.Tensor  # shape [], int64
    dense_bytes: tf.Tensor  # shape [], int64; what dense training would have sent
    sent_elements: tf.Tensor  # shape [], int64
    dense_elements: tf.Tensor  # shape [], int64; elements of all gradients
    residual_norm: tf.Tensor  # shape [], float32; Euclidean norm of what is kept


class Clock:
    """Counts steps: one ends where an optimizer comes for the second time.

    Attributes:
        step: shape [], int64.
    """

    def __init__(self) -> None:
        """Create the variable, zero, outside of any graph."""
        with tf.init_scope(), tf.device("CPU:0"):
            self.step = _variable(tf.zeros([], tf.int64), "dgc_clock")


class Counters:
    """Counts what a worker sends, by optimizer, in the order of StepStats."""

    def __init__(self, clock: Clock) -> None:
        """Create the variables, all zero, outside of any graph."""
        self._clock = clock
        with tf.init_scope(), tf.device("CPU:0"):
            self._step = _variable(tf.constant(-1, tf.int64), "dgc_counted_step")
            self._last = _variable(tf.zeros([4], tf.int64), "dgc_last")
            self.total = _variable(tf.zeros([4], tf.int64), "dgc_total")

    @property
    def last(self) -> tf.Tensor:
        """Figures of the last step of the clock, zero where it had none here."""
        return self._last * tf.cast(self._step == self._clock.step, tf.int64)

    def record(self, figures: tf.Tensor) -> None:
        """Take in one step's figures, shape [4], int64."""
        with tf.device("CPU:0"):
            again = tf.cast(self._step == self._clock.step, tf.int64)
            self._step.assign(self._clock.step.assign_add(again))
            self._last.assign(figures)
            self.total.assign_add(figures)
