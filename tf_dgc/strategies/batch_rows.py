"""Rows of batches, seen while data are read: which tensors have those of the batch.

What shapes cannot tell, numbers of rows do, and those of the batches before.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.strategies.slicing import INPUTS, OTHERS, Component
from tf_dgc.values import require

ADVICE = (
    "An element must be (x, y, ...) in which y, and at least one tensor of x, have a "
    "row for each of the batch. Graphs that are merged into one, or tokens of all "
    "sequences in one tensor, cannot be divided: give ragged or padded tensors, with a "
    "row for each graph or sequence, and merge them in the model; or let each worker "
    "make its own batches, by `strategy.distribute_datasets_from_function`. A tensor "
    "that all rows share goes to all workers whole where its shape has its number of "
    "rows (`tf.ensure_shape`), and the others have None"
)


class Memory(NamedTuple):
    """Memory of the batches before: see `BatchRows`."""

    first: tf.Variable  # rows of the first batch; shape [], int64, 0 before it
    alike: tf.Variable  # shape [divisible], bool: had as many rows as the batch
    other: tf.Variable  # likewise, or another number


class BatchRows:
    """Rows of a batch: which tensors have them, by what is in it and was before."""

    def __init__(
        self,
        components: Sequence[Component],
        must: Sequence[bool],
        has_targets: bool,
        batch: int | None,
    ) -> None:
        """Take what shapes tell.

        Args:
            components: that may have the rows of the batch.
            must: of each, whether it has them by its shape.
            has_targets: whether an element has targets.
            batch: the most rows that a batch has, if that is known.
        """
        self._components, self._must = list(components), list(must)
        self._has_targets, self._batch = has_targets, batch

    def memory(self) -> Memory:
        """Return variables for what is seen of batches."""
        own, count = tf.VariableSynchronization.NONE, len(self._components)
        with tf.init_scope(), tf.device("CPU:0"):
            values = tf.zeros([], tf.int64), *[tf.zeros([count], tf.bool)] * 2
            return Memory(
                *(
                    tf.Variable(value, trainable=False, synchronization=own)
                    for value in values
                )
            )

    def by_rows(
        self, numbers: tf.Tensor, count: tf.Tensor, memory: Memory | None
    ) -> tf.Tensor:
        """Tell which components have the rows of the batch, shape [divisible], bool.

        Args:
            numbers: of rows that they have, shape [divisible].
            count: of rows of the batch, shape [].
            memory: of the dataset.

        Raises:
            tf.errors.InvalidArgumentError: that cannot be told.
        """
        equal = numbers == count
        if len(self._components) == 1:
            return equal
        names = ", ".join(c.name for c in self._components)

        def told() -> list[Any]:
            text = "The tensors of a batch have other numbers of rows. "
            return [f"{text}{ADVICE}. Numbers of rows of {names}:", numbers]

        first = None if memory is None else memory.first.read_value()
        require(self._fits(equal, count, first), told, summarize=-1)
        if memory is None or first is None:
            return equal
        alike, other = memory.alike.read_value(), memory.other.read_value()
        # Nodes of graphs are now more, now less than those of the first batch.
        steady = tf.reduce_all(equal) | (first == 0) | (count <= first)

        def told_later() -> list[Any]:
            text = (
                "A tensor has had as many rows as batches before, and has not now, or "
                "batches grow: whether it is to be divided cannot be told. "
            )
            return [f"{text}{ADVICE}. Numbers of rows of {names}:", numbers]

        changed = tf.reduce_any(alike & ~other & ~equal)
        require(steady & ~changed, told_later, summarize=-1)
        memory.first.assign(tf.where(first == 0, count, first))
        memory.alike.assign(alike | equal)
        memory.other.assign(other | ~equal)
        return equal & ~other

    def _fits(
        self, equal: tf.Tensor, count: tf.Tensor, first: tf.Tensor | None
    ) -> tf.Tensor:
        """Tell whether numbers of rows leave no doubt: shape [], bool."""
        fits = tf.reduce_all(equal | ~tf.constant(self._must))
        inputs = [c.group == INPUTS for c in self._components]
        if any(inputs):
            fits &= tf.reduce_any(equal & tf.constant(inputs))
        targets = self._has_targets
        if self._batch is None:
            # Targets and inputs have as many rows; what follows them might have others.
            others = [targets and c.group == OTHERS for c in self._components]
            return fits & tf.reduce_all(equal | tf.constant(others))
        if targets:
            return fits & (tf.reduce_all(equal) | (count <= self._batch))
        whole = [tf.equal(n, self._batch) for n in (count, first) if n is not None]
        return fits & (tf.reduce_all(equal) | tf.reduce_any(tf.stack(whole)))
