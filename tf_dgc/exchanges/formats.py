"""How a step's tensors travel at each stage: chosen by what that costs, and said."""

import logging
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_dgc.compression import arena, budget, message, selection, warmup
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.transports import sums
from tf_dgc.transports.base import Transport

_logger = logging.getLogger("tf_dgc")

_TOLD_BYTES = 12  # of each worker, beside the small tensors: see `parts.weighed_sum`


def message_format(
    layout: Layout, sparsity: float, config: DGCConfig, workers: int
) -> message.Format:
    """Choose the form of a message.

    Where a worker would receive more than in a ring all-reduce of float32, the message
    is a mere header and the arena is reduced densely.

    Args:
        layout: of the arena.
        sparsity: of the stage.
        config: `value_dtype` counts.
        workers: N.

    Returns:
        A format of no slots where dense is cheaper.
    """
    slots = sum(selection.slots_per_segment(layout, sparsity))
    begins = [segment.offset for segment in layout.segments]
    form = message.make_format(slots, layout.size, config.value_dtype, begins)
    dense = sums.ring_cost(layout.elements)
    if sparsity == 0 or sums.GatherSum.cost(form, workers) >= dense:
        return message.make_format(0, layout.size, config.value_dtype)
    return form


def within_budget(
    config: DGCConfig,
    layout: Layout,
    variables: Sequence[tf.Variable],
    small: Sequence[int],
    transport: Transport,
    name: str,
) -> DGCConfig:
    """Return settings with a sparsity, where there is a budget instead; say so.

    Args:
        config: the settings.
        layout: of the arena.
        variables: of the optimizer.
        small: the indices of those that are not in the arena.
        transport: between the workers.
        name: of the exchange.

    Raises:
        ValueError: the budget is less than the least that can be sent.
    """
    if not config.has_budget:
        return config
    size = transport.size
    weights = [v.shape.num_elements() * v.dtype.size for v in variables]
    rest = sum(weights[i] for i in small) + _TOLD_BYTES * size

    def cost(sparsity: float) -> int:
        form = message_format(layout, sparsity, config, size)
        return form.bytes + (0 if form.slots else 4 * layout.size)

    found = budget.settled(config, layout, rest, sum(weights), cost)
    if transport.rank == 0:
        _logger.info(
            "%s keeps to its budget by sparsity=%.6f, value_dtype=%s, warmup_steps=%d",
            name,
            found.sparsity,
            found.value_dtype,
            found.warmup_steps,
        )
    return found


def tell_dense_stages(config: DGCConfig, layout: Layout, transport: Transport) -> None:
    """Warn of stages that send all, as that is less."""
    size = transport.size
    found = [
        f"{stage.sparsity:.2%}"
        for stage in warmup.stages(config)
        if stage.sparsity
        and layout.size
        and not message_format(layout, stage.sparsity, config, size).slots
    ]
    if found and transport.rank == 0:
        _logger.warning(
            "Exchanged densely, as messages would cost more on %d workers: the "
            "stages of sparsity %s",
            size,
            ", ".join(found),
        )


def tell_dense_types(
    config: DGCConfig, variables: Sequence[tf.Variable], transport: Transport
) -> None:
    """Warn of large tensors of types that are not compressed."""
    elements: dict[str, int] = {}
    for v in variables:
        shape, least = v.shape.as_list(), config.min_elements
        large = arena.is_compressed(shape, tf.float32, least)
        if large and not arena.is_compressed(shape, v.dtype, least):
            count = elements.get(v.dtype.name, 0) + math.prod(shape)
            elements[v.dtype.name] = count
    if elements and transport.rank == 0:
        _logger.warning(
            "Exchanged densely, as only %s are compressed: %s",
            ", ".join(dtype.name for dtype in arena.COMPRESSED_DTYPES),
            ", ".join(f"{n} elements of {name}" for name, n in elements.items()),
        )
