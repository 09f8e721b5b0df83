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
    header = message.make_format(0, layout.size, config.value_dtype)
    gathered = sums.GatherSum.cost(form, layout, workers)
    reduced = sums.DenseSum.cost(header, layout, workers)
    if sparsity == 0 or gathered.passed >= reduced.passed:
        return header
    return form


def cost(layout: Layout, sparsity: float, config: DGCConfig, workers: int) -> sums.Cost:
    """Return the cost of the arena's sum at a sparsity; arguments as above."""
    form = message_format(layout, sparsity, config, workers)
    kind = sums.GatherSum if form.slots else sums.DenseSum
    return kind.cost(form, layout, workers)


def sums_of(wire: sums.Wire) -> list[sums.SparseSum]:
    """Return the sums of the stages of a warm-up: each of what costs least.

    Those with messages share one, and so a graph.
    """
    stages = dict(enumerate(warmup.stages(wire.config)))
    forms = {
        i: message_format(wire.layout, stage.sparsity, wire.config, wire.transport.size)
        for i, stage in stages.items()
    }
    sparse = [i for i, form in forms.items() if form.slots]
    found: list[sums.SparseSum] = [
        sums.DenseSum(wire, {i: stages[i]}, [forms[i]])
        for i in stages
        if i not in sparse
    ]
    if sparse:
        own = {i: stages[i] for i in sparse}
        found.append(sums.GatherSum(wire, own, [forms[i] for i in sparse]))
    return found


def number_at(
    step: tf.Tensor, listed: Sequence[sums.SparseSum], config: DGCConfig
) -> tf.Tensor | None:
    """Return which of the sums a step is summed by, shape [], int32; of one None."""
    if len(listed) == 1:
        return None
    of_stage = {n: i for i, each in enumerate(listed) for n in each.numbers}
    stages = warmup.stages(config)
    with tf.device("CPU:0"):
        numbers = tf.constant([of_stage[n] for n in range(len(stages))])
        return numbers[warmup.stage_index(step, stages)]


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

    def sent(sparsity: float) -> int:
        return cost(layout, sparsity, config, size).sent

    found = budget.settled(config, layout, rest, sum(weights), sent)
    if transport.rank == 0:
        _logger.info(
            "%s keeps to its budget by sparsity=%.6f, value_dtype=%s, warmup_steps=%d",
            name,
            found.sparsity,
            found.value_dtype,
            found.warmup_steps,
        )
    return found


def tell(wire: sums.Wire, variables: Sequence[tf.Variable]) -> None:
    """Say how an exchange of variables begins."""
    tell_dense_stages(wire.config, wire.layout, wire.transport)
    tell_dense_types(wire.config, variables, wire.transport)
    if wire.layout.segments:
        stages = len(warmup.stages(wire.config))
        _logger.info("Compiling the exchange of %s: stages %d", wire.name, stages)


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
