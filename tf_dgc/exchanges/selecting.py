"""A worker's selection for servers: the step of dgc.py, of one worker by itself.

Axis: P arena elements.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import arena, dgc
from tf_dgc.exchanges.arenas import Arenas
from tf_dgc.exchanges.residual import Residual
from tf_dgc.exchanges.stage_selection import Chosen, StageSelection


class Selecting:
    """Accumulates gradients, of which some elements are pushed, and the rest is kept.

    Attributes:
        selection: of what is to be pushed.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        groups: tuple[list[int], list[int], list[int]],
        residual: Residual,
        dense: Arenas,
    ) -> None:
        """Take the state.

        Args:
            variables: that are trained.
            groups: indices of what is compressed, of what goes whole, of tables.
            residual: of the first.
            dense: the velocity of the second.
        """
        self._variables = variables
        self._large, self._small, self._tables = groups
        self._residual, self._dense = residual, dense
        self._config = residual.config
        self.selection = StageSelection(residual)

    def select(
        self,
        local: Sequence[Any],
        momentum: dgc.Momentum | None,
        wanted: tf.Tensor | None = None,
    ) -> tuple[list[Any], Chosen]:
        """Accumulate gradients; select what is to be pushed, and take it out.

        Args:
            local: this worker's gradients.
            momentum: of the optimizer, with its learning rate.
            wanted: shape [], bool: where False nothing is done, and what is returned
                does not count; None is True.

        Returns:
            For each variable the step that goes whole, or None; one at least, if only
            of no rows: with it the optimizer is called. And the rest.
        """
        if wanted is None:
            return self._select(local, momentum)
        whole = self._small or [0]  # a period of pushes leaves no place for tables

        def select() -> Any:
            steps, chosen = self._select(local, momentum)
            return [steps[i] for i in whole], tuple(chosen)

        def skip() -> Any:
            return self._nothing()

        given, chosen = tf.cond(wanted, select, skip)
        steps: list[Any] = [None] * len(self._variables)
        for i, step in zip(whole, given, strict=True):
            steps[i] = step
        return steps, Chosen(*chosen)

    def _nothing(self) -> tuple[list[Any], tuple[tf.Tensor, ...]]:
        """Return steps and a selection of a step that is not taken."""
        small = [self._variables[i] for i in self._small]
        none: list[Any] = [tf.zeros(v.shape, v.dtype) for v in small]
        return none or [_no_rows(self._variables[0])], tuple(self.selection.nothing())

    def _select(
        self, local: Sequence[Any], momentum: dgc.Momentum | None
    ) -> tuple[list[Any], Chosen]:
        rate = tf.cast(momentum.learning_rate if momentum else 0.0, tf.float32)
        gradients = self._clipped(local, rate)
        if self._residual.unit == "gradients":
            momentum = None
        elif momentum is not None:
            momentum = momentum._replace(learning_rate=rate, slots=())
        with self._residual.arenas.borrowed(), self._dense.borrowed():
            self._residual.fall(rate)
            found: list[Any] = [None] * len(gradients)
            steps = self._dense_steps(gradients, momentum, rate)
            for i, own in zip(self._small, steps, strict=True):
                found[i] = tf.cast(own, self._variables[i].dtype)
            for i in self._tables:
                found[i] = values.scaled(gradients[i], rate)
            large = [gradients[i] for i in self._large]
            self._residual.add(arena.flatten(self._residual.layout, large), momentum)
            if not (self._small or self._tables):
                found[0] = _no_rows(self._variables[0])
            chosen = self.selection.take()
        if momentum is None:
            chosen = chosen._replace(scale=rate * chosen.scale)
        return found, chosen

    def _clipped(self, local: Sequence[Any], rate: tf.Tensor) -> list[Any]:
        dense = [
            g if i in self._tables else tf.convert_to_tensor(g)
            for i, g in enumerate(local)
        ]
        names = [*(v.name for v in self._variables), "the learning rate"]
        bad = values.first_nonfinite(dense, [rate])

        def told() -> list[Any]:
            return [
                "A gradient holds NaN or infinity; this worker stops, nothing of it "
                "was pushed. Step and variable:",
                self._residual.step.read_value(),
                tf.gather(tf.constant(["", *names]), bad),
            ]

        with tf.control_dependencies([values.require(bad == 0, told)]):
            if self._config.clip_norm is None:
                return [values.copied(g) for g in dense]
            scale = dgc.clip_scale(dense, self._config.clip_norm, 1)
            return [values.scaled(g, scale) for g in dense]

    def _dense_steps(
        self, gradients: list[Any], momentum: dgc.Momentum | None, rate: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return the steps of the tensors that go whole."""
        layout, (velocity,) = self._dense.layout, self._dense.variables
        gradient = arena.flatten(layout, [gradients[i] for i in self._small])
        before = None if velocity is None else velocity.read_value()
        state = dgc.ArenaState(before, tf.zeros_like(gradient))
        after, step = dgc.accumulate(state, gradient, momentum)
        if velocity is not None:
            velocity.assign(after)
        if momentum is None:
            step = rate * step
        return arena.unflatten(layout, step)


def _no_rows(variable: Any) -> tf.IndexedSlices:
    shape = variable.shape.as_list()
    nothing = tf.zeros([0, *shape[1:]], variable.dtype)
    rows = tf.zeros([0], tf.int64)
    return tf.IndexedSlices(nothing, rows, tf.constant(shape, tf.int64))
