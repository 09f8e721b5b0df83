"""A worker's selection for servers: the step of dgc.py, of one worker by itself.

Axes: P arena elements, K slots of a stage, C <= K selected elements.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import arena, dgc, halves, message, selection, warmup
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.residual import Arenas, Residual
from tf_dgc.transports.sums import Sparse


class Chosen(NamedTuple):
    """Elements of the arena that are to be pushed."""

    everything: tf.Tensor  # shape [], bool: values are all of the arena
    positions: tf.Tensor  # shape [C], int64, ascending
    values: tf.Tensor  # shape [C], of `value_dtype`
    whole: tf.Tensor  # shape [P], float32, where everything goes; else [0]
    scale: tf.Tensor  # shape [], float32, which values are to be multiplied by


class Selecting:
    """Accumulates gradients, and selects what is to be pushed.

    Attributes:
        slots: K of each stage of the warm-up; 0 where all of the arena costs less.
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
        self._stages = warmup.stages(residual.config)
        self.slots = [_slots_at(residual, stage.sparsity) for stage in self._stages]

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
        return none or [_no_rows(self._variables[0])], tuple(_none_of(self._config))

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
            chosen = self._chosen()
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

    def _chosen(self) -> Chosen:
        """Select at the present stage, and keep the rest."""
        step = self._residual.present_step()
        sparse = [i for i, slots in enumerate(self.slots) if slots]
        dense = [i for i in range(len(self.slots)) if i not in sparse]
        groups = [each for each in (sparse, dense) if each]
        branches = [
            functools.partial(self._some if each is sparse else self._all, each, step)
            for each in groups
        ]
        which = [
            int(each in dense and len(groups) > 1) for each in range(len(self.slots))
        ]
        with tf.device("CPU:0"):
            group = tf.constant(which)[warmup.stage_index(step, self._stages)]
        chosen = Chosen(*values.one_of(branches, group))
        self._residual.count()
        return chosen

    def _all(self, _: Sequence[int], step: tf.Tensor) -> Chosen:
        whole = tf.identity(self._residual.read())
        with tf.control_dependencies([whole]):
            self._residual.keep(None)
        none = tf.zeros([0], tf.as_dtype(self._config.value_dtype))
        nowhere = tf.zeros([0], tf.int64)
        return Chosen(tf.constant(True), nowhere, none, whole, tf.ones([]))

    def _some(self, stages: Sequence[int], step: tf.Tensor) -> Chosen:
        number = None
        if len(stages) > 1:
            number = warmup.stage_index(step, [self._stages[i] for i in stages])
        plans = [
            selection.plan(
                self._residual.layout,
                self._stages[i].sparsity,
                self._config.sample_fraction,
            )
            for i in stages
        ]
        plan = selection.one_of(plans, number)
        residual, peaks = self._residual.read(), self._residual.peaks()
        layout = self._residual.layout
        found = dgc.select(residual, peaks, layout, plan, self._config, step)
        sent = message.decoded(found.values, found.exponent)
        take = [
            functools.partial(self._take_out, self.slots[i], found.positions, sent)
            for i in stages
        ]
        with tf.control_dependencies([values.one_of(take, number)]):
            positions = tf.identity(found.positions)
        scale = message.power_of_two(-found.exponent)
        nothing = tf.zeros([0])
        return Chosen(tf.constant(False), positions, found.values, nothing, scale)

    def _take_out(self, slots: int, positions: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
        """Take what is sent out of u and v: sent + kept = accumulated."""
        unused = [[0, slots - tf.size(positions)]]
        size = tf.constant(self._residual.layout.size, tf.int64)
        where = tf.pad(positions, unused, constant_values=size)
        where, sent = (
            tf.ensure_shape(each, [slots]) for each in (where, tf.pad(sent, unused))
        )
        self._residual.keep(Sparse(where[tf.newaxis], sent[tf.newaxis]))
        return tf.size(positions)


def _slots_at(residual: Residual, sparsity: float) -> int:
    """Return K of a stage; 0 where all of the arena costs less."""
    layout = residual.layout
    slots = sum(selection.slots_per_segment(layout, sparsity))
    size = tf.as_dtype(residual.config.value_dtype).size
    sparse = slots * (2 + size) + 4 * halves.rooms(layout.size)
    return slots if sparsity and sparse < 4 * layout.elements else 0


def _none_of(config: DGCConfig) -> Chosen:
    """Return a selection of no elements."""
    nothing = tf.zeros([0], tf.as_dtype(config.value_dtype))
    positions, whole = tf.zeros([0], tf.int64), tf.zeros([0])
    return Chosen(tf.constant(False), positions, nothing, whole, tf.ones([]))


def _no_rows(variable: Any) -> tf.IndexedSlices:
    shape = variable.shape.as_list()
    nothing = tf.zeros([0, *shape[1:]], variable.dtype)
    rows = tf.zeros([0], tf.int64)
    return tf.IndexedSlices(nothing, rows, tf.constant(shape, tf.int64))
