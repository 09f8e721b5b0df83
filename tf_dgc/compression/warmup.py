"""Step -> sparsity: the warm-up as a static list of stages. Pure functions."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.config import DGCConfig


class Stage(NamedTuple):
    """A stretch of training at one sparsity."""

    first_step: int  # optimizer step at which the stage begins
    sparsity: float  # fraction not sent


def stages(config: DGCConfig) -> tuple[Stage, ...]:
    """List the stages of the warm-up and, last, the sparsity that stays.

    Args:
        config: `warmup_steps` are shared out evenly over those `warmup_stages`
            that lie below `sparsity`.

    Returns:
        At least one stage; the first begins at step 0, no two at the same step.
    """
    climbing = [s for s in config.warmup_stages if s < config.sparsity]
    if not config.warmup_steps or not climbing:
        return (Stage(0, config.sparsity),)
    found: dict[int, float] = {}
    for index, sparsity in enumerate([*climbing, config.sparsity]):
        found[index * config.warmup_steps // len(climbing)] = sparsity
    return tuple(Stage(*item) for item in found.items())


def stage_index(step: tf.Tensor, listed: Sequence[Stage]) -> tf.Tensor:
    """Return the index of the stage that `step` lies in.

    Args:
        step: shape [], int64, optimizer steps done so far.
        listed: what `stages` returned.

    Returns:
        shape [], int32.
    """
    with tf.device("CPU:0"):  # which chooses what is done
        starts = tf.constant([stage.first_step for stage in listed[1:]], tf.int64)
        return tf.reduce_sum(tf.cast(step >= starts, tf.int32))
