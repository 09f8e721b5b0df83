"""The variables of a worker: velocity, residual, counters. Owns state, does no math."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc import dgc, inplace, sparsify
from tf_dgc import layout as layout_lib
from tf_dgc.layout import Layout


def _variable(value: tf.Tensor, name: str) -> tf.Variable:
    # NONE tells the strategy that the variable is the worker's own business.
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.NONE,
    )


def _by_device(variables: Sequence[tf.Variable]) -> dict[str, list[int]]:
    """Return the indices of the variables that are on each device."""
    found: dict[str, list[int]] = {}
    for i, variable in enumerate(variables):
        found.setdefault(variable.device, []).append(i)
    return found


class ArenaState:
    """The state of one optimizer's compressed tensors on one worker.

    All changes are in place. Positions that are not below P, and stand for unused slots
    of a message, change nothing.

    Attributes:
        velocity: u, float32; None where no momentum is corrected.
        residual: v, of the same shape: [P], or [N, P] where one process is N workers.
        step: shape [], int64, number of exchanges done.
    """

    def __init__(self, shape: list[int], with_velocity: bool, device: str) -> None:
        """Create the variables, all zero, outside of any graph."""
        self._device = device
        with tf.init_scope(), tf.device(device):
            zeros = tf.zeros(shape)
            self.velocity = _variable(zeros, "dgc_velocity") if with_velocity else None
            self.residual = _variable(zeros, "dgc_residual")
        with tf.init_scope(), tf.device("CPU:0"):
            self.step = _variable(tf.zeros([], tf.int64), "dgc_step")

    @functools.cached_property
    def total(self) -> tf.Variable:
        """What all workers sent in the last step where it was summed, shape [P]."""
        with tf.init_scope(), tf.device(self._device):
            return _variable(tf.zeros(self.residual.shape[-1:]), "dgc_total")

    def accumulate(
        self, gradient: tf.Tensor, scale: tf.Tensor, momentum: dgc.Momentum | None
    ) -> tf.Tensor:
        """Add a gradient, as `dgc.accumulate` does.

        Args:
            gradient: g, shape of v, float32.
            scale: factor of the gradient, shape of v without the last axis.
            momentum: see `dgc.accumulate`.

        Returns:
            `sparsify.peaks` of v.
        """
        if momentum is not None:
            rate = tf.cast(momentum.learning_rate, tf.float32)
            momentum = momentum._replace(learning_rate=rate)
        state = dgc.State(self.velocity, self.residual)
        args = gradient, momentum, scale
        inplace.update(self._device, dgc.accumulate, state, *args)
        return inplace.call(self._device, sparsify.peaks, self.residual)

    def keep(
        self, worker: int, positions: tf.Tensor, sent: tf.Tensor, masking: bool
    ) -> None:
        """Take what was sent out of u and v: sent + kept = accumulated.

        Args:
            worker: whose state this is, of those that this process is.
            positions: shape [K], int64, without repetition.
            sent: shape [K], float32, of v.
            masking: momentum factor masking; clears u where something was sent.
        """
        where = positions[:, tf.newaxis]
        if self.residual.shape.rank > 1:
            where = tf.pad(where, [[0, 0], [1, 0]], constant_values=worker)
        state = dgc.State(self.velocity if masking else None, self.residual)
        inplace.update(self._device, dgc.keep, state, where, sent)

    def sum_up(self, positions: tf.Tensor, values: tf.Tensor) -> None:
        """Put the sum of what N workers sent into `total`.

        Args:
            positions: shape [N, K], int64, each worker's without repetition.
            values: shape [N, K], float32.
        """
        args = self.total, positions, values
        inplace.update(self._device, sparsify.densify, *args)

    def tensors(self, layout: Layout) -> list[tf.Tensor]:
        """Return `total` as the T tensors that it holds."""
        return layout_lib.unflatten(layout, self.total.read_value())

    def subtract(
        self,
        layout: Layout,
        weights: Sequence[tf.Variable],
        positions: tf.Tensor,
        values: tf.Tensor,
    ) -> None:
        """Subtract what N workers sent from the tensors of the arena themselves.

        Args:
            layout: T segments.
            weights: T variables, float32, on any devices.
            positions: shape [N, K], int64, each worker's ascending.
            values: shape [N, K], float32.
        """
        workers, slots = positions.shape
        if not weights or not slots:
            return
        # So many places of a message are looked at for each tensor, again and again
        # until all of its own were.
        share = [segment.size / layout.elements for segment in layout.segments]
        rooms = [min(slots, int(2 * slots * part) + 64) for part in share]

        def look(rank: tf.Tensor, turn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            bounds = layout_lib.bounds(layout, positions[rank])
            begins = tf.minimum(bounds[:-1] + turn * rooms, slots)
            for device, own in _by_device(weights).items():
                inplace.update(
                    device,
                    sparsify.subtract,
                    [weights[i] for i in own],
                    positions[rank],
                    values[rank],
                    tf.gather(begins, own),
                    [layout.segments[i].offset for i in own],
                    [rooms[i] for i in own],
                )
            more = tf.reduce_any(begins + rooms < bounds[1:])
            return tf.where(more, rank, rank + 1), tf.where(more, turn + 1, 0)

        # One worker after the other, so that the weights have the same bits everywhere.
        start = tf.zeros([], tf.int64), tf.zeros([], tf.int64)
        tf.while_loop(
            lambda rank, _: rank < workers, look, start, parallel_iterations=1
        )

    def subtract_densely(
        self, layout: Layout, weights: Sequence[tf.Variable], summed: tf.Tensor
    ) -> None:
        """Subtract an arena, shape [P], from its T tensors themselves, float32."""
        for device, own in _by_device(weights).items():
            offsets = [layout.segments[i].offset for i in own]
            parts = [weights[i] for i in own]
            inplace.update(device, layout_lib.subtract, parts, summed, offsets)

    def clear(self, masking: bool) -> None:
        """Take everything out that was kept back."""
        self.residual.assign(tf.zeros_like(self.residual))
        if masking and self.velocity is not None:
            self.velocity.assign(tf.zeros_like(self.velocity))

    def arrays(self) -> dict[str, tf.Variable]:
        """Return u and v by name."""
        found = {"residual": self.residual, "velocity": self.velocity}
        return {name: v for name, v in found.items() if v is not None}


class AveragingState:
    """Where one optimizer's worker stands between rounds of averaging.

    Attributes:
        steps: shape [], int64, steps done.
        position: shape [], int64, local steps since the last round.
        unsettled: shape [], int64, steps since statistics were averaged.
        period: shape [], int64, local steps between two rounds.
        rounds: shape [], int64, rounds done.
        first_loss: shape [], float64, of the first round; NaN before it.
        distance: shape [], float32, of this worker's parameters from those agreed on,
            before the last round.
        anchor: the parameters when the period began; none for plain averages.
    """

    def __init__(
        self, period: int, parameters: Sequence[tf.Variable], device: str
    ) -> None:
        """Create the variables, outside of any graph.

        Args:
            period: the first.
            parameters: of which an anchor is kept.
            device: for the anchor.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.zeros([], tf.int64)
            self.steps = _variable(zero, "averaging_steps")
            self.position = _variable(zero, "averaging_position")
            self.unsettled = _variable(zero, "averaging_unsettled")
            self.period = _variable(tf.constant(period, tf.int64), "averaging_period")
            self.rounds = _variable(zero, "averaging_rounds")
            unknown = tf.constant(math.nan, tf.float64)
            self.first_loss = _variable(unknown, "averaging_first_loss")
            self.distance = _variable(tf.zeros([]), "averaging_distance")
        with tf.init_scope(), tf.device(device):
            self.anchor = [
                _variable(tf.zeros(p.shape, p.dtype), "averaging_anchor")
                for p in parameters
            ]

    def drop_anchor(self, parameters: Sequence[tf.Variable]) -> None:
        """Remember the parameters, where there is an anchor."""
        if self.anchor:
            for anchor, parameter in zip(self.anchor, parameters, strict=True):
                anchor.assign(parameter)

    def arrays(self) -> dict[str, tf.Variable]:
        """Return by name what is saved."""
        found = dict(vars(self))
        anchor = found.pop("anchor")
        return found | {f"anchor {i}": v for i, v in enumerate(anchor)}


class RoundStats(NamedTuple):
    """How a worker's averaging goes on; of several optimizers, the last to begin."""

    rounds: tf.Tensor  # shape [], int64; done so far
    period: tf.Tensor  # shape [], int64; local steps between two of them
    position: tf.Tensor  # shape [], int64; local steps since the last
    distance: tf.Tensor  # shape [], float32; see AveragingState


class TensorStats(NamedTuple):
    """What one worker sent of one compressed tensor, since the figures were reset."""

    name: str
    elements: int
    density: float  # of its elements were sent in a step, on average
    stale: float  # share of its elements that were not sent once


class Coverage:
    """Counts, by tensor, which elements of an arena a worker sends."""

    def __init__(self, layout: Layout, device: str) -> None:
        """Create the variables, zero, outside of any graph."""
        self._layout, self._device = layout, device
        with tf.init_scope(), tf.device(device):
            self._sent = _variable(tf.zeros([layout.size], tf.bool), "dgc_sent")
        with tf.init_scope(), tf.device("CPU:0"):
            tensors = len(layout.segments)
            self._counts = _variable(tf.zeros([tensors], tf.int64), "dgc_counts")
            self._steps = _variable(tf.zeros([], tf.int64), "dgc_counted_steps")

    def record(self, positions: tf.Tensor) -> None:
        """Take in the positions sent in one step, shape [K], int64, ascending.

        Those that are not below P stand for unused slots of a message.
        """
        inplace.update(self._device, sparsify.mark, self._sent, positions)
        self._counts.assign_add(layout_lib.count_by_segment(self._layout, positions))
        self._steps.assign_add(1)

    def record_all(self) -> None:
        """Take in a step that sent everything."""
        self._sent.assign(tf.ones_like(self._sent))
        sizes = [s.size for s in self._layout.segments]
        self._counts.assign_add(tf.constant(sizes, tf.int64, [len(sizes)]))
        self._steps.assign_add(1)

    def stats(self) -> list[TensorStats]:
        """Return the figures of each tensor, eagerly."""
        sent, counts = self._sent.numpy(), self._counts.numpy()
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
        for variable in (self._sent, self._counts, self._steps):
            variable.assign(tf.zeros_like(variable))


class ReplicaState:
    """When the replicas of one optimizer's variables were compared.

    Attributes:
        steps: shape [], int64, steps taken, of averaging at the last round.
        compared: shape [], int64, steps taken at the last comparison.
    """

    def __init__(self) -> None:
        """Create the variables, zero, outside of any graph."""
        with tf.init_scope(), tf.device("CPU:0"):
            self.steps = _variable(tf.zeros([], tf.int64), "replica_steps")
            self.compared = _variable(tf.zeros([], tf.int64), "replica_compared")


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
        total: sum of the figures of all steps, shape [4], int64, as in StepStats.
    """

    def __init__(self) -> None:
        """Create the variable, zero, outside of any graph."""
        with tf.init_scope(), tf.device("CPU:0"):
            self.step = _variable(tf.zeros([], tf.int64), "dgc_clock")
            self.total = _variable(tf.zeros([4], tf.int64), "dgc_total")


class Counters:
    """Counts what a worker sends, by optimizer, in the order of StepStats."""

    def __init__(self, clock: Clock) -> None:
        """Create the variables, all zero, outside of any graph."""
        self._clock = clock
        with tf.init_scope(), tf.device("CPU:0"):
            self._step = _variable(tf.constant(-1, tf.int64), "dgc_counted_step")
            self._last = _variable(tf.zeros([4], tf.int64), "dgc_last")

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
            self._clock.total.assign_add(figures)

    def add(self, figures: tf.Tensor) -> None:
        """Take in what was sent for the last step after it was recorded, shape [4]."""
        with tf.device("CPU:0"):
            self._last.assign_add(figures)
            self._clock.total.assign_add(figures)
