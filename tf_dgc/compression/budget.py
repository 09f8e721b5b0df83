"""A budget of bytes -> sparsity and warm-up. Pure functions of shapes.

Half of the bytes of a training go into its warm-up, where its length is known; see
docs/evidence/accuracy.md.
"""

import math
from collections.abc import Callable

from tf_dgc.compression import warmup
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig

# Of the bytes of a training, and of its steps at most.
WARMUP_SHARE = 0.5
_TURNS = 40  # of bisection
_MOST = 1 - 2.0**-40  # sparsity, at which each tensor sends one element


def settled(
    config: DGCConfig,
    layout: Layout,
    rest: int,
    dense: int,
    cost: Callable[[float], int],
    part: float = 1.0,
) -> DGCConfig:
    """Return settings with a sparsity, and a warm-up, that keep to a budget.

    Args:
        config: settings; without a budget they are returned as they are.
        layout: of the arena.
        rest: bytes that a worker sends in each step beside what is of the arena.
        dense: bytes of dense training.
        cost: bytes that are of the arena at a sparsity.
        part: of `bytes_per_step` that is for these tensors; others have the rest.

    Raises:
        ValueError: the budget is less than the least that can be sent.
    """
    if not config.has_budget:
        return config
    whole = dense / (config.ratio or 1.0)
    if config.bytes_per_step is not None:
        whole = part * config.bytes_per_step
    left, least = whole - rest, cost(_MOST)
    if not layout.size or left >= cost(0.0) or config.ratio == 1.0:
        return config.without_budget(0.0)
    if left < least:
        name, bound = "bytes_per_step", f"{math.ceil((least + rest) / part)} or more"
        if config.ratio is not None:
            name, bound = "ratio", f"{dense / (least + rest):.4g} or less"
        raise ValueError(
            f"`{name}` must be {bound} here: of {dense} bytes of gradients {rest} are "
            "sent densely, and with them one element of each compressed tensor. "
            f"Received: {name}={getattr(config, name)!r}"
        )
    flat = config.without_budget(_sparsity(cost, left))
    if config.total_steps is None:
        return flat
    each = max(left * (1 - WARMUP_SHARE), least)
    climbing = config.without_budget(_sparsity(cost, each), 1000)
    stages = [cost(stage.sparsity) for stage in warmup.stages(climbing)]
    if len(stages) == 1:
        return flat
    more = sum(stages[:-1]) / len(stages[:-1]) - stages[-1]
    share = min((left - stages[-1]) / more, WARMUP_SHARE)
    length = int(config.total_steps * share)
    return config.without_budget(climbing.sparsity, length)


def _sparsity(cost: Callable[[float], int], most: float) -> float:
    """Return the least sparsity that costs at most so many bytes."""
    low, high = 0.0, _MOST  # too dear, and cheap enough
    for _ in range(_TURNS):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= most else (middle, high)
    return high
