"""Gradients that an optimizer applies, as they can become one with those of others.

Axis: N workers. What they count in the exchange is told in `weights.py`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands, values
from tf_dgc.strategies import replicas
from tf_dgc.strategies.current import Current, Step, parts_of
from tf_dgc.strategies.early import Early
from tf_dgc.strategies.losses import SUMMED, WEIGHED
from tf_dgc.strategies.rows import Rows
from tf_dgc.strategies.uses import AtOnce
from tf_dgc.strategies.weights import accumulates
from tf_dgc.transports.mesh import Mesh


class AppliedGradients:
    """Gradients that a step hands to an optimizer."""

    def __init__(
        self,
        mesh: Mesh,
        current: Current,
        rows: Rows,
        early: Early,
        at_once: AtOnce,
        local: bool,
    ) -> None:
        """Take what is known of a step.

        Args:
            mesh: of the workers.
            current: the step that runs.
            rows: of this worker.
            early: gradients that were exchanged before.
            at_once: follows what a step makes of its gradients.
            local: whether a step is this worker's alone.
        """
        self._mesh, self._current, self._rows = mesh, current, rows
        self._early, self._at_once, self._local = early, at_once, local
        self._are_taken = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Leave gradients alone that `applied` has returned, in this context."""
        before, self._are_taken = self._are_taken, True
        try:
            yield
        finally:
            self._are_taken = before

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
        if accumulates(optimizer) and not self._local:
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
        return values.scaled(gradient, float(self._mesh.replicas) ** -power)

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
        counts = {SUMMED: self._rows.others, WEIGHED: 1.0 / self._mesh.together.size}
        own, other = (
            tf.constant(counts[each]) if each in counts else self._rows.own_share()
            for each in (way, to)
        )
        return values.scaled(gradient, tf.math.divide_no_nan(own, other))


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
