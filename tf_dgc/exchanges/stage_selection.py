"""Selection of elements of a residual at a stage of the warm-up, for servers.

Axes: P arena elements, K slots of a stage, C <= K selected elements.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import dgc, halves, message, selection, warmup
from tf_dgc.exchanges.residual import Residual
from tf_dgc.transports.sums import Sparse


class Chosen(NamedTuple):
    """Elements of the arena that are to be pushed."""

    everything: tf.Tensor  # shape [], bool: values are all of the arena
    positions: tf.Tensor  # shape [C], int64, ascending
    values: tf.Tensor  # shape [C], of `value_dtype`
    whole: tf.Tensor  # shape [P], float32, where everything goes; else [0]
    scale: tf.Tensor  # shape [], float32, which values are to be multiplied by


class StageSelection:
    """Selection from one residual, as its warm-up goes on.

    Attributes:
        slots: K of each stage of the warm-up; 0 where all of the arena costs less.
    """

    def __init__(self, residual: Residual) -> None:
        """Take the residual."""
        self._residual = residual
        self._stages = warmup.stages(residual.config)
        self.slots = [_slots_at(residual, stage.sparsity) for stage in self._stages]

    def nothing(self) -> Chosen:
        """Return a selection of no elements."""
        nothing = tf.zeros([0], tf.as_dtype(self._residual.config.value_dtype))
        positions, whole = tf.zeros([0], tf.int64), tf.zeros([0])
        return Chosen(tf.constant(False), positions, nothing, whole, tf.ones([]))

    def take(self) -> Chosen:
        """Select at the present stage, and keep the rest; a step ends so."""
        step = self._residual.count.present()
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
        self._residual.count.add()
        return chosen

    def _all(self, _: Sequence[int], step: tf.Tensor) -> Chosen:
        whole = tf.identity(self._residual.read())
        with tf.control_dependencies([whole]):
            self._residual.keep(None)
        none = tf.zeros([0], tf.as_dtype(self._residual.config.value_dtype))
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
                self._residual.config.sample_fraction,
            )
            for i in stages
        ]
        plan = selection.one_of(plans, number)
        residual, peaks = self._residual.read(), self._residual.peaks()
        layout = self._residual.layout
        found = dgc.select(residual, peaks, layout, plan, self._residual.config, step)
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
