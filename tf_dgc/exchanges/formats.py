"""Formats of a step's tensors at each stage: chosen by what they cost, and reported."""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.compression import arena, budget, message, warmup
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.base import Place
from tf_dgc.exchanges.owner_sum import OwnerSum
from tf_dgc.exchanges.parts import TOLD_BYTES
from tf_dgc.transports import sums
from tf_dgc.transports.base import Transport

_logger = logging.getLogger("tf_dgc")

# The network by which "auto" chooses, and what owners must gain there.
_BANDWIDTH = 125e6  # bytes in a second, 1 Gbit/s
_LATENCY = 1e-4  # seconds of a message
_GAIN = 0.1
_FEW = 32  # workers


def message_format(
    layout: Layout, sparsity: float, config: DGCConfig, workers: int
) -> message.Format:
    """Return the form of a message that all workers gather.

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
    args = layout, sparsity, config, workers
    found: message.Format = _cheaper(sums.GatherSum, *args).form(*args)
    return found


def kind_at(
    layout: Layout, sparsity: float, config: DGCConfig, workers: int
) -> type[sums.SparseSum]:
    """Return the kind of sum at a sparsity; arguments as above, no `exchange` open."""
    sparse = OwnerSum if config.exchange == "owners" and workers > 1 else sums.GatherSum
    return _cheaper(sparse, layout, sparsity, config, workers)


def _cheaper(
    sparse: type[sums.SparseSum],
    layout: Layout,
    sparsity: float,
    config: DGCConfig,
    workers: int,
) -> type[sums.SparseSum]:
    """Return a sparse kind, or the dense one where fewer bytes pass a worker then."""
    if sparsity == 0:
        return sums.DenseSum
    sent, reduced = (
        _cost(kind, layout, sparsity, config, workers)
        for kind in (sparse, sums.DenseSum)
    )
    return sums.DenseSum if sent.passed >= reduced.passed else sparse


def _cost(kind: type[sums.SparseSum], *args: Any) -> sums.Cost:
    layout, _, _, workers = args
    return kind.cost(kind.form(*args), layout, workers)


def cost(layout: Layout, sparsity: float, config: DGCConfig, workers: int) -> sums.Cost:
    """Return the cost of the arena's sum at a sparsity; arguments as above."""
    config = decided(config, layout, workers, sparsity)
    args = layout, sparsity, config, workers
    return _cost(kind_at(*args), *args)


def decided(
    config: DGCConfig,
    layout: Layout,
    workers: int,
    sparsity: float | None = None,
) -> DGCConfig:
    """Return settings whose `exchange` is not "auto".

    Args:
        config: the settings.
        layout: of the arena.
        workers: N.
        sparsity: that stays; by default of the settings.
    """
    if config.exchange != "auto":
        return config
    chosen = "allgather"
    if workers > _FEW and layout.size:
        args = layout, config.sparsity if sparsity is None else sparsity
        owners, gathered = (
            _cost(kind, *args, config, workers).seconds(_BANDWIDTH, _LATENCY)
            for kind in (OwnerSum, sums.GatherSum)
        )
        if owners <= (1 - _GAIN) * gathered:
            chosen = "owners"
    return dataclasses.replace(config, exchange=chosen)


def refuse_without_all_to_all(config: DGCConfig, transport: Transport) -> DGCConfig:
    """Return settings that a transport can keep to.

    Raises:
        ValueError: it sends all rows to everybody, and owners are asked for.
    """
    if type(transport.everybody).all_to_all is not Transport.all_to_all:
        return config
    if config.exchange == "owners":
        raise ValueError(
            "`exchange` must be 'allgather' or 'auto' with a transport that has no "
            f"all-to-all. Received: exchange='owners', transport {transport.name!r}"
        )
    return dataclasses.replace(config, exchange="allgather")


def sums_of(
    wire: sums.Wire,
    fused: Callable[[int, warmup.Stage], sums.SparseSum | None] = lambda *_: None,
) -> list[sums.SparseSum]:
    """Return the sums of the stages of a warm-up: each of what costs least.

    Those with messages of one form share one, and so a graph; but for those that are
    compiled.

    Args:
        wire: of the exchange.
        fused: returns a sum of a stage whose messages all gather, by itself; or None.
    """
    stages = dict(enumerate(warmup.stages(wire.config)))
    args = wire.config, wire.transport.size
    kinds = {
        i: kind_at(wire.layout, stage.sparsity, *args) for i, stage in stages.items()
    }
    found: list[sums.SparseSum] = [
        kind(wire, {i: stages[i]}) for i, kind in kinds.items() if kind is sums.DenseSum
    ]
    sparse = {i: stages[i] for i, kind in kinds.items() if kind is not sums.DenseSum}
    for i in list(sparse):
        if kinds[i] is sums.GatherSum and (own := fused(i, sparse[i])) is not None:
            del sparse[i]
            found.append(own)
    # Of one kind, whose messages differ by no more than their sizes.
    groups: dict[Any, dict[int, warmup.Stage]] = {}
    for i, stage in sparse.items():
        form = kinds[i].form(wire.layout, stage.sparsity, *args)
        groups.setdefault(getattr(form, "low_bits", None), {})[i] = stage
    return found + [kinds[max(own)](wire, own) for own in groups.values()]


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
    config: DGCConfig, layout: Layout, small: Sequence[int], place: Place
) -> DGCConfig:
    """Return settings with a sparsity, where there is a budget instead; say so.

    Args:
        config: the settings.
        layout: of the arena.
        small: the indices of variables that are not in the arena.
        place: of the exchange.

    Raises:
        ValueError: the budget is less than the least that can be sent.
    """
    if not config.has_budget:
        return config
    size = place.transport.size
    weights = [v.shape.num_elements() * v.dtype.size for v in place.variables]
    told = TOLD_BYTES * place.transport.everybody.size
    rest = sum(weights[i] for i in small) + told

    def sent(sparsity: float) -> int:
        return cost(layout, sparsity, config, size).sent

    found = budget.settled(config, layout, rest, sum(weights), sent, place.part)
    if place.transport.everybody.rank == 0:
        _logger.info(
            "%s keeps to its budget by sparsity=%.6f, value_dtype=%s, warmup_steps=%d",
            place.name,
            found.sparsity,
            found.value_dtype,
            found.warmup_steps,
        )
    return found


def tell(wire: sums.Wire, variables: Sequence[tf.Variable]) -> None:
    """Say how an exchange of variables begins."""
    tell_dense_stages(wire.config, wire.layout, wire.transport)
    if wire.config.exchange == "owners" and wire.transport.everybody.rank == 0:
        _logger.info("%s is summed by owners on %s", wire.name, _told(wire.transport))
    tell_dense_types(wire.config, variables, wire.transport)
    if wire.layout.segments:
        stages = len(warmup.stages(wire.config))
        _logger.info("Compiling the exchange of %s: stages %d", wire.name, stages)


def tell_gathered(
    config: DGCConfig, layout: Layout, transport: Transport, combine: str
) -> None:
    """Say where owners would be chosen, but for means over those that sent.

    Args:
        config: of a round.
        layout: of its arena.
        transport: between the workers.
        combine: see `AveragingConfig`.
    """
    wished = dataclasses.replace(config, exchange="auto")
    wished = decided(wished, layout, transport.size)
    if combine != "mean" and wished.exchange == "owners" and transport.rank == 0:
        _logger.info(
            "Changes go from everybody to everybody, as combine=%r may need to know "
            "who has sent; with combine='mean' owners sum them, which takes less time "
            "on %d workers",
            combine,
            transport.size,
        )


def tell_dense_stages(config: DGCConfig, layout: Layout, transport: Transport) -> None:
    """Warn of stages that send all, as that is less."""
    size = transport.size
    found = [
        f"{stage.sparsity:.2%}"
        for stage in warmup.stages(config)
        if stage.sparsity
        and layout.size
        and kind_at(layout, stage.sparsity, config, size) is sums.DenseSum
    ]
    if found and transport.everybody.rank == 0:
        _logger.warning(
            "Exchanged densely, as messages would cost more on %s: the stages of "
            "sparsity %s",
            _told(transport),
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
    if elements and transport.everybody.rank == 0:
        _logger.warning(
            "Exchanged densely, as only %s are compressed: %s",
            ", ".join(dtype.name for dtype in arena.COMPRESSED_DTYPES),
            ", ".join(f"{n} elements of {name}" for name, n in elements.items()),
        )


def _told(transport: Transport) -> str:
    """Say how many exchange messages."""
    unit = "workers" if transport.everybody is transport else "hosts"
    return f"{transport.size} {unit}"
