"""Numbers of a step in metrics and logs, as one process has them.

Keras would divide its own means by N. It is kept from that in steps of models, so that
what is added to them, or told by a metric, is what one process computes.
"""

import collections
from typing import Any

import tensorflow as tf

from tf_dgc.strategies.current import Current
from tf_dgc.strategies.cuts import NotKnown
from tf_dgc.strategies.losses import SUMMED
from tf_dgc.strategies.rows import Rows
from tf_dgc.transports.mesh import Mesh


class StepMeans:
    """Numbers that a step gives to metrics, or returns."""

    def __init__(
        self,
        mesh: Mesh,
        current: Current,
        rows: Rows,
        local: bool,
    ) -> None:
        """Take what is known of a step.

        Args:
            mesh: of the workers.
            current: the step that runs.
            rows: of this worker.
            local: whether a step is this worker's alone.
        """
        self._replicas, self._current = mesh.replicas, current
        self._rows, self._local = rows, local
        self._by_keras: collections.deque[Any] = collections.deque(maxlen=8)

    @property
    def leaves_undivided(self) -> bool:
        """Tell whether Keras is to leave its losses as they are: in steps of models."""
        return self._current.step.model is not None

    def note_divided(self, loss: Any) -> None:
        """Note a loss that Keras has divided by N."""
        self._by_keras.append(loss)

    def weighed(self, value: Any, given: Any) -> tuple[Any, Any]:
        """Return a number for a mean over steps, and what it counts beside others'.

        All workers call this in a step.

        Args:
            value: shape []: of this worker.
            given: shape []: the rows of which it is; None for a mean by steps.

        Returns:
            The number as one process has it, or what this worker has of it, and its
            weight: shape [], or what is given where that is right.
        """
        step = self._current.step
        if step.model is None:
            divided = any(value is each for each in self._by_keras)
            return (value * self._replicas if divided else value), given
        if self._local or step.in_branch():
            return value, given
        value, is_whole = self._whole(value)
        if given is None and not is_whole:
            given = self._rows.over.size * self._rows.own_share()
        return value, given

    def added(self, value: Any) -> Any:
        """Return what this worker adds to a sum over steps, to which all workers add.

        All workers call this in a step.

        Args:
            value: shape []: of this worker; what one process has of it is added once.
        """
        step = self._current.step
        if step.model is None or self._local or step.in_branch():
            return value
        if isinstance(value, tf.Tensor) and step.losses is not None:
            if step.losses.way_of([value]) == (SUMMED, 0):
                return value  # of this worker's rows
        # Who has no rows adds nothing.
        return tf.cast(self._whole(value)[0], tf.float32) * self._rows.share_of_all()

    def in_logs(self, value: Any) -> Any:
        """Return a number of logs as one process has it, but for means of rows."""
        if not isinstance(value, tf.Tensor) or value.shape.rank != 0:
            return value
        if not value.dtype.is_floating or self._local:
            return value
        return self._whole(value)[0]

    def _whole(self, value: Any) -> tuple[Any, bool]:
        """Return a number as one process has it, and whether it is of all rows."""
        losses = self._current.step.losses
        if not isinstance(value, tf.Tensor) or losses is None:
            return value, False
        way = losses.way_of([value])
        try:
            if way is None or way[0] == SUMMED:
                return losses.value([value]), True
        except NotKnown:
            return value, False
        scale = float(self._replicas) ** -way[1]
        return (value * tf.cast(scale, value.dtype) if way[1] else value), False


class OwnMeans(StepMeans):
    """Numbers of steps on servers, whose metrics are of each worker's own rows."""

    def weighed(self, value: Any, given: Any) -> tuple[Any, Any]:
        """Return both as they are."""
        return value, given

    def added(self, value: Any) -> Any:
        """Return a number as it is."""
        return value

    def in_logs(self, value: Any) -> Any:
        """Return a number as it is."""
        return value
