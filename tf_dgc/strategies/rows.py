"""Rows of this worker in the step that runs, and its share in those of all workers.

Axis: N workers.
"""

import weakref
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.current import Current, graph
from tf_dgc.transports import Transport
from tf_dgc.transports.mesh import Mesh


class Rows:
    """Number of rows that this worker has in a step.

    Variables hold what differs from step to step, as functions that are traced once
    may be called in many steps.
    """

    def __init__(self, mesh: Mesh, current: Current) -> None:
        """Create the variables, outside of any graph.

        Args:
            mesh: of the workers.
            current: the step that runs.
        """
        self._mesh, self._current = mesh, current
        own = tf.VariableSynchronization.NONE
        # What is done next depends on them.
        with tf.init_scope(), tf.device("CPU:0"):
            self._rows, self._usual = (
                tf.Variable(value, trainable=False, synchronization=own)
                for value in (1.0, 0.0)
            )

    def begin(self, rows: Any) -> None:
        """Begin a step with so many rows; None where nobody can tell."""
        self._rows.assign(1.0 if rows is None else tf.cast(rows, tf.float32))

    def last(self) -> float:
        """Return how many rows the last step had, eagerly."""
        return float(self._rows)

    @property
    def empty(self) -> tf.Tensor:
        """Tell whether this worker has no row in the step that runs: shape [], bool."""
        if not self._current.step.may_be_empty:
            return tf.constant(False)
        return self._rows.read_value() == 0.0

    def with_rows(self, value: Any) -> Any:
        """Return what a step computes by row; nothing where there are no rows.

        Args:
            value: a tensor, with rows along its first axis.
        """
        flow = _host.flow.current()
        if not self._current.step.may_be_empty or flow is None:
            return value
        if not tf.is_tensor(value) or not value.shape.rank or not flow.reaches(value):
            return value
        return value[: tf.where(self.empty, 0, tf.shape(value)[0])]

    def counted(self, value: Any) -> Any:
        """Return what this worker adds to a sum over all: nothing without rows."""
        if not self._current.step.may_be_empty:
            return value
        empty = self.empty
        return tf.nest.map_structure(
            lambda each: tf.where(empty, tf.zeros_like(each), each),
            value,
            expand_composites=True,
        )

    # Among those of all workers.

    @property
    def over(self) -> Transport:
        """Transport between the workers of the step that runs; of all where none does.

        What is evaluated, and does not train, all workers compute together.
        """
        trains = self._current.step.trains
        return self._mesh.together if trains else self._mesh.everybody

    @property
    def others(self) -> float:
        """All workers for each one of the step: sums over these stand for all rows."""
        return self._mesh.everybody.size / self.over.size

    def shares(self) -> tf.Tensor:
        """Return the share of each worker in the rows of all: shape [N], float32.

        All workers call this.
        """
        shares, now = self._current.step.shares, graph()
        if now not in shares:
            counts = self.counts()
            shares[now] = tf.math.divide_no_nan(counts, tf.reduce_sum(counts))
        return shares[now]

    def counts(self) -> tf.Tensor:
        """Return how many rows each worker has: shape [N], float32; all call this."""
        counts, now = self._current.step.counts, graph()
        if now not in counts:
            counts[now] = self.over.all_gather(self._counting(), "row_weights")
        return counts[now]

    def as_if_alike(self) -> tf.Tensor:
        """Return the same where workers do not meet: as many rows as this one has."""
        return tf.fill([self._mesh.everybody.size], self._rows.read_value())

    def own_share(self) -> tf.Tensor:
        """Return the share of this worker in the rows of all: shape [], float32."""
        return self.shares()[self.over.rank]

    def share_of_all(self) -> tf.Tensor:
        """Return about the same in those of all workers, where a step is of some."""
        own = self.own_share()
        return own if self.others == 1.0 else own / self.others

    def weight(self) -> tf.Tensor:
        """Return the rows of this worker as a multiple of what is usual: shape []."""
        self._agree_on_usual()
        with tf.device("CPU:0"):
            return self._counting() / self._usual.read_value()

    def _counting(self) -> tf.Tensor:
        """Return how many rows count: shape [], float32."""
        return tf.where(self.empty, 0.0, self._rows.read_value())

    def _agree_on_usual(self) -> None:
        """Agree in the first step on what is usual, so that weights are about 1.

        Among all workers, so that their sites can compare.
        """

        def gather() -> None:
            own = self._rows.read_value()
            rows = self._mesh.everybody.all_gather(own, "usual_rows")
            self._usual.assign(tf.maximum(tf.reduce_max(rows), 1.0))

        counts = self._current.step.counts.items()
        before = [count for traced, count in counts if traced is graph()]
        with tf.device("CPU:0"), tf.control_dependencies(before):  # in one order
            unknown = self._usual == 0.0
        tf.cond(unknown, gather, lambda: None)


class SmallSteps:
    """Steps in which this worker had rows, between two that optimizers apply."""

    def __init__(self) -> None:
        """Create the counter, outside of any graph."""
        self._count = _counter()
        self._applied: weakref.WeakKeyDictionary[Any, tf.Variable] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def count(self) -> int:
        """Number of them so far, eagerly."""
        return int(self._count.numpy())

    def note(self, has_rows: tf.Tensor) -> None:
        """Count a step: `has_rows` has shape [], bool."""
        self._count.assign_add(tf.cast(has_rows, tf.int64))

    def since_last(self, optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
        """Tell whether there was such a step since an optimizer was last asked for.

        Args:
            optimizer: that accumulates gradients, and applies them now.

        Returns:
            shape [], bool.
        """
        if optimizer not in self._applied:
            self._applied[optimizer] = _counter()
        before = self._applied[optimizer]
        found = self._count > before.read_value()
        before.assign(self._count)
        return found


def _counter() -> tf.Variable:
    own = tf.VariableSynchronization.NONE
    with tf.init_scope(), tf.device("CPU:0"):
        zero = tf.zeros([], tf.int64)
        return tf.Variable(zero, trainable=False, synchronization=own)
