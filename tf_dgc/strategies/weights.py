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

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands, values
from tf_dgc.exchanges import Part
from tf_dgc.strategies import replicas
from tf_dgc.strategies.current import Current, Step, parts_of
from tf_dgc.strategies.early import Early
from tf_dgc.strategies.losses import SUMMED, WEIGHED
from tf_dgc.strategies.rows import Rows, SmallSteps
from tf_dgc.strategies.uses import AtOnce
from tf_dgc.transports import Transport


class GradientWeights:
    """Weights of the gradients that an optimizer applies."""

    def __init__(
        self,
        transport: Transport,
        current: Current,
        rows: Rows,
        early: Early,
        at_once: AtOnce,
        small_steps: SmallSteps,
        local: bool,
        replicas: int,
    ) -> None:
        """Take what is known of a step.

        Args:
            transport: between the workers of the step.
            current: the step that runs.
            rows: of this worker.
            early: gradients that were exchanged before.
            at_once: follows what a step makes of its gradients.
            small_steps: those in which this worker had rows.
            local: whether a step is this worker's alone.
            replicas: by how many workers scripts divide losses.
        """
        self._transport, self._current = transport, current
        self._replicas = replicas
        self._rows, self._early, self._at_once = rows, early, at_once
        self._small_steps, self._local = small_steps, local
        self._are_taken = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Leave gradients alone that `applied` has returned, in this context."""
        before, self._are_taken = self._are_taken, True
        try:
            yield
        finally:
            self._are_taken = before

    # Gradients.

    def applied(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> Sequence[Any]:
        """Return gradients that are zero where there were no rows to compute them.

        Those of parts are of the rows of all workers.

        Args:
            gradients: that are to be applied.
            variables: what they belong to.
            optimizer: that applies them, or adds them up.
        """
        step = self._current.step
        if step.model is None or self._are_taken:
            return gradients
        if step.losses is not None:
            parts = [part for gradient in gradients for part in parts_of(gradient)]
            self._at_once.look_at_applied(parts, step.losses.reading)
        step.updated |= {id(_host.keras.plain(v)) for v in variables}
        if tf.executing_eagerly():
            step.applied.append(_host.operations.own_line())
        gradients = [self._undivided(gradient) for gradient in gradients]
        gradients = self._of_one_way(gradients, variables)
        if step.may_be_empty:
            present = ~self._rows.empty
            gradients = _zero_unless(present, gradients, variables, step)
        if _accumulates(optimizer) and not self._local:
            gradients = self._alike(gradients, variables)
        return gradients

    def _undivided(self, gradient: Any) -> Any:
        """Return a gradient that a step has divided by N as one process has it."""
        step = self._current.step
        if gradient is None or step.losses is None:
            return gradient
        computed = {
            id(p) for all_, _ in step.computed for g in all_ for p in parts_of(g)
        }
        part = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        guess = step.losses.reading.power_of
        power = replicas.power_between(part, computed, guess)
        return values.scaled(gradient, float(self._replicas) ** -power)

    def _of_one_way(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[Any]:
        """Return gradients that become one with those of others in the same way."""
        step = self._current.step
        keys = [id(_host.keras.plain(v)) for v in variables]
        for key, gradient in zip(keys, gradients, strict=True):
            if key in step.before:
                before = step.before[key]
                step.ways[key] = self._early.way_after_exchange(gradient, before)
        ways = [step.way_of(variable) for variable in variables]
        if len(set(ways)) <= 1:
            return gradients
        step.ways |= dict.fromkeys(keys, SUMMED)
        return [
            self.converted(g, way, SUMMED)
            for g, way in zip(gradients, ways, strict=True)
        ]

    def _alike(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[Any]:
        """Return gradients that count alike in all steps, so that they can be added."""
        step = self._current.step
        found = [
            g if bands.is_split(v) else self.converted(g, step.way_of(v), WEIGHED)
            for g, v in zip(gradients, variables, strict=True)
        ]
        step.ways |= {id(_host.keras.plain(v)): WEIGHED for v in variables}
        return found

    def converted(self, gradient: Any, way: str, to: str) -> Any:
        """Return a gradient that becomes one with those of others in another way."""
        if gradient is None or way == to or self._local:
            return gradient
        counts = {SUMMED: self._rows.others, WEIGHED: 1.0 / self._transport.size}
        own, other = (
            tf.constant(counts[each]) if each in counts else self._rows.own_share()
            for each in (way, to)
        )
        return values.scaled(gradient, tf.math.divide_no_nan(own, other))

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

    # Weights.

    def factors(self) -> tf.Tensor:
        """Return what the rows of each worker count in the gradients of all.

        For parts of weights, of which no other worker has a gradient. All workers call
        this, in a step. What is applied of gradients is multiplied by `Part.whole`, as
        elsewhere.

        Returns:
            shape [N], float32; 0 for a worker without rows.
        """
        step = self._current.step
        if step.model is None or step.way == SUMMED:
            return tf.fill([self._transport.size], 1.0 / self._transport.size)
        return self._rows.shares()

    def factor(self, variables: Sequence[Any]) -> tf.Tensor:
        """Return what this worker's gradients of variables count in the sum of all.

        Shape [], float32.
        """
        step = self._current.step
        if step.is_done(variables):
            return tf.fill([], 1.0 / self._transport.size)
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
            return Part(rate, one, self._replicas)
        if self._local:
            if _host.keras.follows_schedule(optimizer):  # by steps of its own
                rate = tf.constant(float("nan"))
            has_rows = ~self._rows.empty
            if _accumulates(optimizer):
                has_rows = self._small_steps.since_last(optimizer)
            return Part(rate, tf.where(has_rows, one, 0.0), 1)
        if WEIGHED in ways:
            return Part(rate, one, 1)
        return Part(rate, self._rows.weight(), 1)


def _zero_unless(
    present: tf.Tensor, gradients: Sequence[Any], variables: Sequence[Any], step: Step
) -> list[Any]:
    """Return gradients that are zero where there were no rows to compute them."""
    return [
        g
        if g is None or bands.is_split(v) or step.is_done([v])
        else values.zero_unless(present, g)
        for g, v in zip(gradients, variables, strict=True)
    ]


def _accumulates(optimizer: Any) -> bool:
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
