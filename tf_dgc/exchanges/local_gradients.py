"""Gradients of a worker before any exchange: clipped, and searched for NaN and inf.

Axes: P arena elements, N workers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import arena, dgc
from tf_dgc.compression.arena import Division
from tf_dgc.config import DGCConfig


class Clipped(NamedTuple):
    """Gradients of one worker."""

    gradient: tf.Tensor  # of the arena, shape [P], float32, still to be clipped
    small: list[Any]  # of the other tensors, clipped
    nonfinite: tf.Tensor  # shape [], int32; number of what is not finite, from 1, or 0
    scale: tf.Tensor  # shape [], float32, that clips the arena's


class Clipping:
    """Clips gradients, and tells those of the arena from the small ones."""

    def __init__(self, division: Division) -> None:
        """Take which gradients are in the arena, and which are small."""
        self._large, self._small, self._layout = division

    def takes(self, local: Sequence[Any]) -> bool:
        """Tell whether it takes gradients."""
        return True

    def clipped(
        self,
        local: Sequence[Any],
        rate: Sequence[Any],
        clip_norm: float | None,
        workers: int,
        whole: int,
    ) -> Clipped:
        """Clip gradients; pure.

        Args:
            local: all gradients, by which what is not finite is numbered.
            rate: the learning rate, where it must be finite as well.
            clip_norm: the norm allowed to the mean gradient; None does not clip.
            workers: N.
            whole: N where each gradient is divided by N already; else 1.
        """
        large = [tf.convert_to_tensor(local[i]) for i in self._large]
        gradient = arena.flatten(self._layout, large)
        small = [local[i] for i in self._small]
        together, scale = [gradient, *small], tf.ones([])
        rates = [tf.cast(each, tf.float32) for each in rate]
        nonfinite = values.first_nonfinite(local, rates, together)
        if clip_norm is not None:
            # It is the norm of what is divided by N that is clipped.
            scale = dgc.clip_scale(together, clip_norm * (workers / whole), workers)
            small = [values.scaled(part, scale) for part in small]
        return Clipped(gradient, small, nonfinite, scale)

    def small(self, summed: Sequence[Any]) -> list[Any]:
        """Return small gradients by what `clipped` has returned of them, summed."""
        return list(summed)


def all_finite(
    votes: tf.Tensor, config: DGCConfig, step: tf.Variable, names: list[str]
) -> tf.Tensor:
    """Return whether all gradients are finite; raise where they must be.

    Args:
        votes: of each worker 0, or the number of what is not, from 1: shape [N].
        config: `nonfinite` counts.
        step: shape [], int64, steps done.
        names: of what is numbered.

    Raises:
        tf.errors.InvalidArgumentError: a worker's gradient is not finite.
    """
    with tf.device("CPU:0"):
        ok = tf.reduce_all(votes == 0)
        if config.nonfinite == "raise":
            with tf.control_dependencies([_refuse(votes, ok, step, names)]):
                ok = tf.identity(ok)
    return ok


def _refuse(
    votes: tf.Tensor, ok: tf.Tensor, step: tf.Variable, names: list[str]
) -> Any:
    """Raise InvalidArgumentError where a worker's gradient is not finite."""

    def told() -> list[Any]:
        rank = values.first_true(votes > 0)
        number = tf.clip_by_value(tf.cast(votes[rank], tf.int32), 0, len(names))
        name = tf.gather(tf.constant(["", *names]), number)
        return [
            "A gradient holds NaN or infinity; all workers stop, nothing of it was "
            "applied (DGCConfig(nonfinite='skip') leaves such steps out). Rank, step "
            "and variable:",
            rank,
            step.read_value(),
            name,
        ]

    return values.require(ok, told)
