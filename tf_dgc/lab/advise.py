"""Predict whether compression pays, before there is a cluster.

    python -m tf_dgc.advise --model module:function --workers 4 16 --bandwidth 1gbit

`function` takes nothing and returns a new Keras model, compiled or not, whenever it is
called; each is trained for a few steps on synthetic data. What those steps take on this
machine, and the network that the arguments describe, are all that goes into the table
it prints. N workers, each with a link of bandwidth B both ways and latency L, hand S
bytes to a ring all-reduce and messages of M bytes to a ring all-gather:

    all-reduce   2 (N - 1) / N  S / B + 2 (N - 1) L
    all-gather         (N - 1)  M / B +   (N - 1) L
    all-to-all         (N - 1)  M / B +   (N - 1) L    M from each to each

    dense        step + all-reduce of the gradients
    DGC          step, compressed + (N - 1) * one more message, read and added
                 + all-gather of the messages + all-reduce of the small tensors
    owners       step, compressed + as many more, read and added, as owners receive
                 and pass on + all-to-all + all-gather + all-reduce of the small tensors
    averaging    step + (a round + all-reduce of parameters and moving statistics
                 + all-gather of headers) / period
    split        step + activations of large dense layers, by columns or by rows as
                 `tf_dgc.layers.ways` counts and chooses, and back
                 + all-reduce of the rest

Nothing of an exchange runs beside the backward pass in this package, so times add up.
B is best measured while all workers send: then it holds what headers and processors
take of a link. Not in the table: summing what a ring brings, waiting for the slowest
worker, reading data, and accuracy. A latency that is not given counts as none.
Gradients of embeddings count as dense ones.

References:
    Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of
    workstations, J. Parallel Distrib. Comput. 69 (2009) (ring all-reduce),
    https://doi.org/10.1016/j.jpdc.2008.09.002
    Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in
    MPICH, Int. J. High Perform. Comput. Appl. 19 (2005), section 4.1 (ring all-gather),
    https://doi.org/10.1177/1094342005051521
"""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

from tf_dgc.config import PAPER, AveragingConfig, DGCConfig
from tf_dgc.exchanges.formats import kind_at, message_format
from tf_dgc.exchanges.owner_sum import ROOM, VERDICT_BYTES, Forms, OwnerSum
from tf_dgc.lab import rates
from tf_dgc.lab.measure import HEADER_BYTES, Measured, ModelError, Tensors, measure

STRATEGIES = ("dense", "DGC", "averaging")
WORKERS = tuple(2**i for i in range(11))


class Network(NamedTuple):
    """The link of each worker.

    Attributes:
        bandwidth: B, bits per second each way.
        latency: L, seconds.
    """

    bandwidth: float
    latency: float = 0.0


class Traffic(NamedTuple):
    """What a worker hands to the transport in a step, on average."""

    reduced: float  # S, bytes of all-reduces
    gathered: float  # M, bytes of all-gathers
    reductions: float  # number of them
    gatherings: float
    swapped: float = 0  # bytes from each worker to each other, of all-to-alls
    swaps: float = 0

    def wire_bytes(self, workers: int) -> float:
        """Return the bytes that each of N workers sends, and receives; no headers."""
        ring = 2 * (workers - 1) / workers * self.reduced
        return ring + (workers - 1) * (self.gathered + self.swapped)

    def seconds(self, workers: int, network: Network) -> float:
        """Return the seconds that N workers' wires are busy or waited for."""
        rings = 2 * self.reductions + self.gatherings + self.swaps
        hops = (workers - 1) * rings
        bits = 8 * self.wire_bytes(workers)
        return bits / network.bandwidth + hops * network.latency


class Prediction(NamedTuple):
    """A step of one worker with one strategy.

    Attributes:
        seconds: of the step.
        wire_bytes: bytes that are sent; as many are received.
    """

    seconds: float
    wire_bytes: float


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
) -> dict[str, Traffic]:
    """Return what each strategy hands to the transport in a step on N workers."""
    form = message_format(tensors.layout, config.sparsity, config, workers)
    arena = 0 if form.slots else 4 * tensors.layout.size
    rest = tensors.rest_bytes + 4 * workers  # and a flag of each worker
    averaged = tensors.gradient_bytes + tensors.statistic_bytes
    found = {
        "dense": Traffic(tensors.gradient_bytes, 0, 1, 0),
        "DGC": Traffic(rest + arena, form.bytes, 2 if arena else 1, 1),
        "averaging": Traffic(*[x / period for x in (averaged, HEADER_BYTES, 1, 1)]),
    }
    if tensors.layout.size:
        found["owners"] = found["DGC"]
        if (owners := by_owners(tensors, config, workers)) is not None:
            parts = owners.parts.bytes, 1
            passed_on = owners.sums.bytes + VERDICT_BYTES
            found["owners"] = Traffic(rest, passed_on, 1, 1, *parts)
    if (split := tensors.split).exchanges:
        rest = tensors.gradient_bytes - split.weight_bytes
        activations = split.activation_bytes(workers)
        found["split"] = Traffic(rest, activations, 1, split.exchanges)
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
    found = {}
    for name, exchange in exchanges(tensors, config, period, workers).items():
        seconds = times[name] + exchange.seconds(workers, network)
        found[name] = Prediction(seconds, exchange.wire_bytes(workers))
    return found


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


def load(name: str) -> Callable[[], keras.Model]:
    """Return the function of "module:function".

    Raises:
        ValueError: there is none.
    """
    module, _, function = name.partition(":")
    rule = f"`--model` must be module:function. Received: {name!r}"
    if not module or not function:
        raise ValueError(rule)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # what it imports is missing
        raise ValueError(f"{rule}: {error}") from error
    if not callable(found):
        raise ValueError(f"{rule}: no function {function!r} there")
    return found


def table(
    predictions: dict[int, dict[str, Prediction]], notes: dict[int, tuple[str, str]]
) -> str:
    """Return lines of text, one for each number of workers."""
    names = list(next(iter(predictions.values()), STRATEGIES))
    heads = [f"{f'{name} s':>11} {'bytes':>15}" for name in names]
    lines = [" ".join(["workers", *heads, " fastest"])]
    for workers, found in predictions.items():
        cells = [
            f"{found[name].seconds:11.4g} {found[name].wire_bytes:15,.0f}"
            for name in names
        ]
        best, reason = notes[workers]
        cells += [f" {best:10} {reason}".rstrip()]
        lines.append(" ".join([f"{workers:7}", *cells]))
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_dgc.advise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="MODULE:FUNCTION")
    add("--workers", type=int, nargs="+", default=WORKERS, help="N (1 2 4 ... 1024)")
    bandwidth = "of each worker, both ways, while all send (1gbit)"
    add("--bandwidth", default="1gbit", help=bandwidth)
    add("--latency", type=float, default=0.0, help="of a message, in seconds (0)")
    add("--batch-size", type=int, default=32, help="rows of a worker's batch (32)")
    add("--steps", type=int, default=10, help="timed with each strategy (10)")
    add("--sparsity", type=float, default=PAPER["sparsity"], help="of DGC (0.999)")
    add("--period", type=int, default=AveragingConfig.period, help="of averaging (16)")
    return parser


def check(
    args: argparse.Namespace,
) -> tuple[float, DGCConfig, Callable[[], keras.Model]]:
    """Return the bandwidth in bits per second, the settings, and the function.

    Raises:
        ValueError: an argument is out of its range.
    """
    for name in ("workers", "batch-size", "steps", "period"):
        given = getattr(args, name.replace("-", "_"))
        least = given if isinstance(given, int) else min(given)
        if least < 1:
            raise ValueError(f"`--{name}` must be 1 or more. Received: {least}")
    if not 0 <= args.latency < float("inf"):
        raise ValueError(f"`--latency` must be 0 or more. Received: {args.latency}")
    bandwidth = rates.bits_per_second(args.bandwidth, "--bandwidth")
    return bandwidth, DGCConfig(sparsity=args.sparsity), load(args.model)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, predict and print; return the exit status."""
    parser = arguments()
    args = parser.parse_args(argv)
    try:
        bandwidth, config, make = check(args)
    except ValueError as error:
        parser.error(str(error))
    try:
        measured, tensors = measure(make, config, args.batch_size, args.steps)
    except ModelError as error:
        parser.error(f"--model {args.model}: {error}")
    network = Network(bandwidth, args.latency)
    predictions, notes = {}, {}
    for workers in sorted(set(args.workers)):
        found = predict(measured, tensors, config, args.period, workers, network)
        predictions[workers] = found
        notes[workers] = choose(found, tensors, config, workers)
    sys.stdout.write(
        f"{describe(measured, tensors, config)}\n\n"
        f"Predicted seconds of a step, and bytes that each worker sends in it (and "
        f"receives as many),\nat {args.bandwidth}; averaging every {args.period} "
        f"steps.\n\n{table(predictions, notes)}\n\n"
        "Accuracy is not predicted; averaging changes training the most.\n"
    )
    return 0


def describe(measured: Measured, tensors: Tensors, config: DGCConfig) -> str:
    """Return as lines of text what was measured."""
    form = message_format(tensors.layout, config.sparsity, config, 1)
    lines = [
        f"{tensors.gradient_bytes:,} bytes of gradients, {tensors.rest_bytes:,} of "
        f"them never compressed; a message has {form.bytes:,} bytes.",
        "Measured here, in seconds:",
    ]
    for meaning, seconds in (
        ("training step", measured.dense),
        (f"training step with DGC, sparsity {config.sparsity:g}", measured.compressed),
        ("each further message, read and added", measured.message),
        ("round of averaging", measured.round),
    ):
        lines.append(f"  {meaning:44} {seconds:9.4g}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
