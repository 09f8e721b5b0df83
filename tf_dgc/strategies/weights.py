"""Weights of a worker's gradients in the sum over workers.

Axis: N workers. The losses of a step are read in the operations by which they were
computed, see `losses.py`. Of a worker's n rows its gradient g counts in the exchange

    sum of (n / sum of n) * g         where the loss is a mean of rows
    sum of g                          where it is a sum, or anything else, of which the
                                      sums over all rows were exchanged before

An optimizer that adds up gradients of several steps has to know what those of a step
count when it takes them: they are weighed before, by N * n / sum of n, and then count
alike.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.exchanges import Part
from tf_dgc.strategies.current import Current
from tf_dgc.strategies.losses import SUMMED, WEIGHED
from tf_dgc.strategies.rows import Rows, SmallSteps
from tf_dgc.transports.mesh import Mesh


class GradientWeights:
    """Weights of the gradients that an optimizer applies, in the sum of all workers."""

    def __init__(
        self,
        mesh: Mesh,
        current: Current,
        rows: Rows,
        small_steps: SmallSteps,
        local: bool,
    ) -> None:
        """Take what is known of a step.

        Args:
            mesh: of the workers.
            current: the step that runs.
            rows: of this worker.
            small_steps: those in which this worker had rows.
            local: whether a step is this worker's alone.
        """
        self._mesh, self._current, self._rows = mesh, current, rows
        self._small_steps, self._local = small_steps, local

    def factors(self) -> tf.Tensor:
        """Return what the rows of each worker count in the gradients of all.

        For parts of weights, of which no other worker has a gradient. All workers call
        this, in a step. What is applied of gradients is multiplied by `Part.whole`, as
        elsewhere.

        Returns:
            shape [N], float32; 0 for a worker without rows.
        """
        step, workers = self._current.step, self._mesh.together.size
        if step.model is None or step.way == SUMMED:
            return tf.fill([workers], 1.0 / workers)
        return self._rows.shares()

    def factor(self, variables: Sequence[Any]) -> tf.Tensor:
        """Return what this worker's gradients of variables count in the sum of all.

        Shape [], float32.
        """
        step = self._current.step
        if step.is_done(variables):
            return tf.fill([], 1.0 / self._mesh.together.size)
        by_rows = step.is_by_rows(variables)
        return self._rows.own_share() if by_rows else tf.ones([])

    def part(
        self, optimizer: keras.optimizers.Optimizer, rate: Any, variables: Sequence[Any]
    ) -> Part:
        """Return what the gradients that an optimizer applies now count.

        Args:
            optimizer: of the user.
            rate: its learning rate.
            variables: that it trains.
        """
        step, one = self._current.step, tf.ones([])
        rate = tf.cast(rate, tf.float32)
        ways = {step.way_of(variable) for variable in variables}
        if step.model is None or ways == {SUMMED}:
            return Part(rate, one, self._mesh.replicas)
        if self._local:
            if _host.keras.follows_schedule(optimizer):  # by steps of its own
                rate = tf.constant(float("nan"))
            has_rows = ~self._rows.empty
            if accumulates(optimizer):
                has_rows = self._small_steps.since_last(optimizer)
            return Part(rate, tf.where(has_rows, one, 0.0), 1)
        if WEIGHED in ways:
            return Part(rate, one, 1)
        return Part(rate, self._rows.weight(), 1)

    def all_finite(
        self, finite: tf.Tensor, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tf.Tensor:
        """Return whether gradients are finite, but for those that count nothing."""
        if not self._current.step.may_be_empty:
            return finite
        parts = [
            tf.reduce_all(tf.math.is_finite(g))
            for g, v in zip(gradients, variables, strict=False)
            if g is not None and bands.is_split(v)
        ]
        return tf.logical_or(finite, self._rows.empty & tf.reduce_all(parts))


def accumulates(optimizer: Any) -> bool:
    """Tell whether an optimizer adds up gradients of several steps."""
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


class WeightsOnServers(GradientWeights):
    """Weights of gradients whose mean is taken on servers."""

    def part(
        self, optimizer: keras.optimizers.Optimizer, rate: Any, variables: Sequence[Any]
    ) -> Part:
        """Return what gradients count; in a loop of one's own all alike in a mean."""
        if self._current.step.model is None:
            return Part(rate, tf.ones([]), 1)
        return super().part(optimizer, rate, variables)
