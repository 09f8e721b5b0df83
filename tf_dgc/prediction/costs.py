"""Model of what a step costs with each strategy. Pure functions.

N workers, each with a link of bandwidth B both ways and latency L, hand S bytes to a
ring all-reduce, messages of M bytes to a ring all-gather, and messages of M bytes to
each other worker in an all-to-all:

                    bytes received       messages waited for
    all-reduce   2 (N - 1) / N  S        2 (N - 1)
    all-gather         (N - 1)  M           N - 1
    all-to-all         (N - 1)  M           N - 1

Over a grid of R rows and C columns, N = R C, small tensors wait less:

    all-reduce   2 (C - 1) / C  S + (R - 1) S         2 (C - 1) + R - 1
    all-gather         (N - 1)  M                     R + C - 2
    all-to-all      (2 N - R - C)  M                  R + C - 2

Each collective takes its bytes / B, and L for each message that it waits for. Bytes
received are counted as of rings, over a grid, too, as `StepStats` does.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tf_dgc import averaging
from tf_dgc.compression import arena
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.formats import kind_at, message_format
from tf_dgc.exchanges.owner_messages import Forms
from tf_dgc.exchanges.owner_sum import ROOM, VERDICT_BYTES, OwnerSum
from tf_dgc.exchanges.parts import TOLD_BYTES
from tf_dgc.transports import grid

HEADER_BYTES = 8 * len(averaging.RoundHeader._fields)  # of a round of averaging


class SplitLayers(Protocol):
    """Dense layers that are worth splitting."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of their kernels, which are exchanged no more."""

    @property
    def exchanges(self) -> int:
        """All-gathers, and other collectives with as many hops."""

    def activation_bytes(self, workers: int) -> float:
        """Return what goes to or from each other worker: activations, gradients."""


class Tensors(NamedTuple):
    """Tensors that a model has to exchange."""

    layout: Layout  # of what DGC compresses
    gradient_bytes: int  # all gradients
    rest_bytes: int  # those that DGC leaves dense
    statistic_bytes: int  # averaged beside the parameters
    split: SplitLayers | None = None  # of dense layers


class Measured(NamedTuple):
    """Times of a worker on this machine, in seconds."""

    dense: float  # training step of a worker that is alone
    compressed: float  # the same with DGC, its own message read and added
    uncompressed: float  # the same in a stage that DGC exchanges densely
    message: float  # to read and add one more message
    round: float  # of averaging


def tensors_of(
    variables: Sequence[Any], config: DGCConfig, statistics: Sequence[Any] = ()
) -> Tensors:
    """Return what a model exchanges.

    Args:
        variables: its trainable variables, of static shapes.
        config: `min_elements` counts.
        statistics: what is averaged beside these.
    """
    compressed, rest = [], []
    for variable in variables:
        shape, dtype = tuple(variable.shape), tf.as_dtype(variable.dtype)
        if arena.is_compressed(shape, dtype, config.min_elements):
            compressed.append(variable)
        else:
            rest.append(variable)
    layout = arena.build([(v.name, tuple(v.shape)) for v in compressed])
    return Tensors(layout, _bytes(variables), _bytes(rest), _bytes(statistics))


def _bytes(variables: Sequence[Any]) -> int:
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


class Network(NamedTuple):
    """The link of each worker.

    Attributes:
        bandwidth: B, bits per second each way.
        latency: L, seconds.
        grid: whether small tensors go over a grid of the workers.
    """

    bandwidth: float
    latency: float = 0.0
    grid: bool = False


class Call(NamedTuple):
    """A collective of all workers.

    Attributes:
        bytes: S, or M.
        share: how often it is called in a step, on average.
    """

    bytes: float
    share: float = 1.0


class AllReduce(Call):
    """A sum of tensors."""

    def received(self, workers: int) -> float:
        """Return the bytes that a worker receives, as in a ring."""
        return 2 * self.bytes * (workers - 1) / workers

    def passed(self, workers: int, network: Network) -> tuple[float, int]:
        """Return the bytes that a worker receives, and the messages it waits for."""
        if not network.grid or self.bytes > grid.MOST_BYTES:
            return self.received(workers), 2 * (workers - 1)
        rows, columns = grid.sides(workers)
        ring = 2 * self.bytes * (columns - 1) / columns
        return ring + (rows - 1) * self.bytes, 2 * (columns - 1) + rows - 1


class AllGather(Call):
    """A message from each to all."""

    def received(self, workers: int) -> float:
        """Return the bytes that a worker receives."""
        return (workers - 1) * self.bytes

    def passed(self, workers: int, network: Network) -> tuple[float, int]:
        """Return the bytes that a worker receives, and the messages it waits for."""
        hops = sum(grid.sides(workers)) - 2 if network.grid else workers - 1
        return self.received(workers), hops


class AllToAll(AllGather):
    """A message from each to each."""

    def passed(self, workers: int, network: Network) -> tuple[float, int]:
        """Return the bytes that a worker receives, and the messages it waits for."""
        if not network.grid:
            return super().passed(workers, network)
        sides = sum(grid.sides(workers))
        return (2 * workers - sides) * self.bytes, sides - 2


Collective = AllReduce | AllGather


class Prediction(NamedTuple):
    """A step of one worker with one strategy.

    Attributes:
        seconds: of the step.
        received_bytes: from other workers, as `StepStats` counts them; with split
            layers activations, too.
    """

    seconds: float
    received_bytes: float


def received(calls: Sequence[Collective], workers: int) -> float:
    """Return the bytes that each of N workers receives in a step."""
    return sum(call.share * call.received(workers) for call in calls)


def seconds(calls: Sequence[Collective], workers: int, network: Network) -> float:
    """Return the seconds that collectives of N workers take in a step."""
    total = 0.0
    for call in calls:
        passed, hops = call.passed(workers, network)
        total += call.share * (8 * passed / network.bandwidth + hops * network.latency)
    return total


def sends_messages(tensors: Tensors, config: DGCConfig, workers: int) -> bool:
    """Tell whether DGC sends messages: they cost less than dense tensors would."""
    form = message_format(tensors.layout, config.sparsity, config, workers)
    return form.slots > 0


def by_owners(tensors: Tensors, config: DGCConfig, workers: int) -> Forms | None:
    """Return the messages of an exchange by owners; None where there are none."""
    config = dataclasses.replace(config, exchange="owners")
    args = tensors.layout, config.sparsity, config, workers
    return OwnerSum.form(*args) if kind_at(*args) is OwnerSum else None


def exchanges(
    tensors: Tensors, config: DGCConfig, period: int, workers: int
) -> dict[str, list[Collective]]:
    """Return the collectives of a step of N workers with each strategy."""
    told = TOLD_BYTES * workers
    form = message_format(tensors.layout, config.sparsity, config, workers)
    rest = AllReduce(tensors.rest_bytes + told)
    gathered: list[Collective] = [rest, AllGather(form.bytes)]
    if not form.slots and tensors.layout.size:
        gathered.append(AllReduce(4 * tensors.layout.size))
    averaged = tensors.gradient_bytes + tensors.statistic_bytes
    share = 1 / period
    found: dict[str, list[Collective]] = {
        "dense": [AllReduce(tensors.gradient_bytes + told)],
        "DGC": gathered,
        "averaging": [AllReduce(averaged, share), AllGather(HEADER_BYTES, share)],
    }
    if tensors.layout.size:
        found["owners"] = gathered
        if (owners := by_owners(tensors, config, workers)) is not None:
            passed_on = owners.sums.bytes + VERDICT_BYTES
            found["owners"] = [rest, AllToAll(owners.parts.bytes), AllGather(passed_on)]
    if (split := tensors.split) is not None and split.exchanges:
        left = tensors.gradient_bytes - split.weight_bytes
        activations = split.activation_bytes(workers) / split.exchanges
        travel = AllGather(activations, split.exchanges)
        found["split"] = [AllReduce(left + told), travel]
    return found


def predict(
    measured: Measured,
    tensors: Tensors,
    config: DGCConfig,
    period: int,
    workers: int,
    network: Network,
) -> dict[str, Prediction]:
    """Predict a step of N workers with each strategy.

    Args:
        measured: on this machine.
        tensors: of the model.
        config: of DGC; the sparsity that stays after the warm-up.
        period: local steps between two rounds of averaging.
        workers: N, 1 or more.
        network: between them.
    """
    sends = sends_messages(tensors, config, workers)
    base = measured.compressed if sends else measured.uncompressed
    gathered = base + (workers - 1) * measured.message if sends else base
    owners = gathered
    if by_owners(tensors, config, workers) is not None:
        read = ROOM + min(config.growth, workers)  # messages, of which one is measured
        owners = measured.compressed + (read - 1) * measured.message
    times = {
        "dense": measured.dense,
        "DGC": gathered,
        "owners": owners,
        "averaging": measured.dense + measured.round / period,
        # Of N times the rows an N-th of the units is computed.
        "split": measured.dense,
    }
    return {
        name: Prediction(
            times[name] + seconds(calls, workers, network), received(calls, workers)
        )
        for name, calls in exchanges(tensors, config, period, workers).items()
    }


def choose(
    predictions: dict[str, Prediction],
    tensors: Tensors,
    config: DGCConfig,
    workers: int,
) -> tuple[str, str]:
    """Return the strategy with the shortest step, and why compression does not pay.

    Args:
        predictions: for each strategy.
        tensors: of the model.
        config: of DGC.
        workers: N; one worker is best without any.

    Returns:
        A name and a reason; the reason is empty where DGC is faster than dense.
    """
    if workers == 1:
        return "dense", "one worker has nobody to send to"
    best = min(predictions, key=lambda name: predictions[name].seconds)
    if not tensors.layout.size:
        return best, "DGC: no tensor is large enough to compress"
    if not sends_messages(tensors, config, workers):
        return best, "DGC: messages would cost more than dense tensors"
    if predictions["DGC"].seconds >= predictions["dense"].seconds:
        return best, "DGC: its work takes longer than it saves"
    return best, ""
