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

Over a grid of R x C workers messages, and tensors of 64 KiB or less, wait less:

    all-reduce   2 (C - 1) / C  S / B + (R - 1) S / B + (2 C + R - 3) L
    all-gather         (N - 1)  M / B + (R + C - 2) L
    all-to-all   (2 N - R - C)  M / B + (R + C - 2) L

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
worker, reading data, and accuracy. A latency that is not given counts as none; with
one, a second line tells of a grid, where the workers make one of three rows or more.
Bytes are those that a worker receives, as `StepStats.received_bytes` counts them.
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
import importlib
import sys
from collections.abc import Callable, Sequence

import keras

from tf_dgc.config import PAPER, AveragingConfig, DGCConfig
from tf_dgc.exchanges.formats import message_format
from tf_dgc.lab import rates
from tf_dgc.lab.measure import ModelError, measure
from tf_dgc.prediction.costs import (
    Measured,
    Network,
    Prediction,
    Tensors,
    choose,
    predict,
)
from tf_dgc.transports import grid

STRATEGIES = ("dense", "DGC", "averaging")
WORKERS = tuple(2**i for i in range(11))


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


def networks(workers: int, network: Network) -> dict[str, Network]:
    """Return the networks to predict for, by the first cell of their lines.

    Args:
        workers: N.
        network: between them, in a ring.
    """
    found = {f"{workers}": network}
    if network.latency and grid.sides(workers)[0] >= grid.LEAST_SIDE:
        found[f"{workers} grid"] = network._replace(grid=True)
    return found


def table(
    predictions: dict[str, dict[str, Prediction]], notes: dict[str, tuple[str, str]]
) -> str:
    """Return lines of text, one for each number of workers, and one for its grid."""
    names = list(next(iter(predictions.values()), STRATEGIES))
    heads = [f"{f'{name} s':>11} {'bytes':>15}" for name in names]
    lines = [" ".join([f"{'workers':9}", *heads, " fastest"])]
    for first, found in predictions.items():
        cells = [
            f"{found[name].seconds:11.4g} {found[name].received_bytes:15,.0f}"
            for name in names
        ]
        best, reason = notes[first]
        cells += [f" {best:10} {reason}".rstrip()]
        lines.append(" ".join([f"{first:9}", *cells]))
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
    ring = Network(bandwidth, args.latency)
    predictions, notes = {}, {}
    for workers in sorted(set(args.workers)):
        for first, network in networks(workers, ring).items():
            found = predict(measured, tensors, config, args.period, workers, network)
            predictions[first] = found
            notes[first] = choose(found, tensors, config, workers)
    sys.stdout.write(
        f"{describe(measured, tensors, config)}\n\n"
        "Predicted seconds of a step, and bytes that each worker receives in it,\n"
        f"at {args.bandwidth} and {args.latency:g} s; averaging every {args.period} "
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
