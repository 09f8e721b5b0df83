"""Combination of compressed changes, by the optimizer that has made them."""

import keras

from tf_dgc import optimizers
from tf_dgc.config import AveragingConfig, DownpourConfig
from tf_dgc.exchanges.modes import Combining

SENDERS_DECAY = 0.95  # of what was not sent, in Sarfi et al., arXiv:2508.15706


def combining_of(
    optimizer: keras.optimizers.Optimizer, config: AveragingConfig | DownpourConfig
) -> Combining:
    """Return what becomes of compressed changes that an optimizer has made.

    Args:
        optimizer: of the user.
        config: `combine`, `error_decay`, and whether there is an outer optimizer.
    """
    rule = config.combine
    if rule == "auto":
        plain = config.outer_optimizer is not None or config.compression is None
        short = not plain and optimizers.normalizes_steps(optimizer)
        rule = "senders" if short else "mean"
    decay = config.error_decay
    if decay is None:
        decay = SENDERS_DECAY if rule == "senders" else 1.0
    return Combining(rule == "senders", decay)
