"""Marks of when workers that average have last met."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Mark(NamedTuple):
    """Mark that tells whether something has changed."""

    steps: int
    statistics: int  # checksum


class SettledMark:
    """Mark of when all workers last met, or of when a state was restored.

    Attributes:
        within: whether that state was saved in the midst of a period.
    """

    def __init__(self, taken: tf.Variable, statistics: Sequence[Any]) -> None:
        """Begin before any step.

        Args:
            taken: number of steps.
            statistics: of layers, which forward passes change, too.
        """
        self._taken, self._statistics = taken, statistics
        self._mark = Mark(0, -1)  # of statistics that are none: they may have moved
        self.within = self._resumed = False
        self._first = True  # no gradients yet

    def _now(self) -> Mark:
        crc = 0
        for variable in self._statistics:
            crc = zlib.crc32(variable.numpy().tobytes(), crc)
        return Mark(int(self._taken), crc)

    @property
    def waits(self) -> bool:
        """Tell whether it was restored within a period, and not trained since."""
        return self._resumed and self._mark.steps == int(self._taken)

    def changed(self) -> bool:
        """Tell, eagerly, whether anything has moved since."""
        return self._mark != self._now()

    def statistics_changed(self) -> bool:
        """Tell, eagerly, whether statistics have."""
        return self._mark.statistics != self._now().statistics

    def set(self, resumed: bool = False, within: bool = False) -> None:
        """Set the mark here, eagerly.

        Args:
            resumed: whether a state was restored.
            within: whether that was saved in the midst of a period.
        """
        self._mark, self._resumed = self._now(), resumed
        self.within = within if resumed else self.within

    def refuse_late(self) -> None:
        """Refuse what was restored when the step had its gradients already."""
        first, self._first = self._first, False
        late = first and self._resumed and tf.executing_eagerly()
        if late and self.within:
            raise ValueError(
                "What was saved in the midst of a period must be restored before a "
                "step computes its gradient. Received: `restore_state` before the "
                "first step of a model with run_eagerly=True. Train a step before it."
            )
