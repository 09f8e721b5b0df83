"""Totals of the cuts of a loss over workers: sums, and extremes.

Axis: N workers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.strategies.cuts import Cut, widened
from tf_dgc.strategies.known import LARGEST


class CutTotals:
    """Totals over workers, each of which is exchanged once in a step.

    Attributes:
        winners: what this worker's extremes count in the gradient of those of all.
    """

    def __init__(
        self,
        total: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        size: int,
        rank: Any,
    ) -> None:
        """Begin with none.

        Args:
            total: returns the sums of numbers over all workers, all of which call it.
            size: N.
            rank: of this worker.
        """
        self._total, self._size, self._rank = total, size, rank
        self._totals: dict[Any, tf.Tensor] = {}  # by the keys of cuts
        self.winners: dict[Any, tf.Tensor] = {}

    def of(self, cuts: Sequence[Cut], local: Sequence[Any]) -> list[tf.Tensor]:
        """Return sums over all workers, and constants as they are."""
        made = [
            (c, mine) for c, mine in zip(cuts, local, strict=True) if mine is not None
        ]
        missing = [(c, mine) for c, mine in made if c.key not in self._totals]
        if missing:
            stopped = [tf.stop_gradient(mine) for _, mine in missing]
            given = [
                self._spread(mine) if cut.best else mine
                for (cut, _), mine in zip(missing, stopped, strict=True)
            ]
            if any(cut.best for cut, _ in missing):
                given.append(self._spread(tf.ones([])))
            found = self._total(given)
            for (cut, mine), total in zip(missing, found, strict=False):
                self._totals[cut.key] = (
                    self._best(cut, mine, total, found[-1]) if cut.best else total
                )
        return [
            widened(cut.tensor)
            if mine is None
            else _crossed(mine, self._totals[cut.key])
            if cut.nested
            else tf.identity(self._totals[cut.key])
            for cut, mine in zip(cuts, local, strict=True)
        ]

    def _spread(self, mine: tf.Tensor) -> tf.Tensor:
        """Return zeros for all workers, shape [N, *S], with what this one has."""
        own = tf.reshape(
            tf.range(self._size) == self._rank, [-1] + [1] * mine.shape.rank
        )
        return tf.where(own, mine, tf.zeros_like(mine))

    def _best(
        self, cut: Cut, mine: tf.Tensor, every: tf.Tensor, present: tf.Tensor
    ) -> tf.Tensor:
        """Return the largest, or smallest, of what workers with rows have.

        Args:
            cut: what it is of.
            mine: of this worker: shape [S].
            every: of all: shape [N, *S].
            present: not 0 for workers that have rows: shape [N].
        """
        large = cut.best == LARGEST
        present = tf.reshape(present, [-1] + [1] * mine.shape.rank)
        worst = tf.constant(float("-inf" if large else "inf"), every.dtype)
        by = tf.cast(present, every.dtype)
        every = tf.where(present > 0.0, every / by, worst)
        found = (tf.reduce_max if large else tf.reduce_min)(every, axis=0)
        winners = tf.reduce_sum(tf.cast(every == found, every.dtype), axis=0)
        won = tf.cast(mine == found, every.dtype)
        self.winners[cut.key] = tf.math.divide_no_nan(won, winners)
        return found


def _crossed(local: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Return a sum over workers, which grows as what each of them adds."""

    @tf.custom_gradient
    def cross(mine: tf.Tensor) -> Any:
        return tf.identity(total), lambda slope: slope

    return cross(local)
