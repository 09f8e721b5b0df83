#!/usr/bin/env python
"""Train for long on two real workers; tell whether anything grows or drifts.

    scripts/soak.py --steps 20000 --json soak.json --plot soak.png
    scripts/soak.py --launch horovodrun
    scripts/soak.py --servers 2 --steps 10000 --json servers.json
    scripts/soak.py --servers 2 --steps 10000 --compress

Deep Gradient Compression with momentum, of a small model, on noise that no model fits,
so that gradients stay what they are. With `--servers`, asynchronous SGD on parameter
servers; with `--compress`, of what Deep Gradient Compression selects. At the end of
each window of steps each worker records its memory, the norm of what it keeps back, the
median time of a step, and a checksum of its weights. The first tenth of the run may do
what it wants; behind it

* memory (resident, by medians of tenths of the run) must not grow beyond a limit, that
  of servers neither,
* the norm must stay below twice the largest of the run's first half,
* the checksums of all workers must be equal in each window; asynchronously, after a
  barrier behind the last step, and weights finite in each window, and
* the last window's step must not take much longer than the second window's.

The exit status is 1 where one of these does not hold.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

WORKERS = 2
MEMORY_MB = 16.0
RESIDUAL_RATIO = 2.0
TIME_RATIO = 1.5
BATCH, FEATURES, WIDTH = 32, 64, 128


class Window(NamedTuple):
    """What a worker records at the end of some steps."""

    step: int
    memory_mb: float  # resident
    residual_norm: float
    step_ms: float  # median
    processor_ms: float  # of all threads, a step
    checksum: int  # of the weights; with servers, the last one's after a barrier
    weight_norm: float
    servers_mb: Sequence[float] = ()  # resident, of each server


class Verdict(NamedTuple):
    """One of the questions, its answer, and the figure behind it."""

    question: str
    well: bool
    figure: str


def memory_growth(memory: Sequence[float]) -> float:
    """Returns by how many MB the last tenth of a run is above the second tenth."""
    tenth = max(1, len(memory) // 10)
    second, last = memory[tenth : 2 * tenth], memory[-tenth:]
    return statistics.median(last) - statistics.median(second)


def verdicts(
    workers: Sequence[Sequence[Window]],
    memory_mb: float = MEMORY_MB,
    time_ratio: float = TIME_RATIO,
    *,
    asynchronous: bool = False,
    compressed: bool = True,
) -> list[Verdict]:
    """Answers the questions.

    Args:
        workers: the windows of each worker, three at least.
        memory_mb: that may be grown by.
        time_ratio: that the last window's step may take, of the second window's.
        asynchronous: weights are compared at the end only, and must be finite before.
        compressed: something is kept back.

    Raises:
        ValueError: there are too few windows, or not as many on all workers.
    """
    counts = {len(windows) for windows in workers}
    if len(counts) != 1 or min(counts) < 3:
        raise ValueError(
            "`workers` must have as many windows each, three at least. Received: "
            f"{[len(windows) for windows in workers]}"
        )
    found = [_memory(workers, memory_mb)]
    if compressed:
        found.append(_residual(workers))
    if asynchronous:
        found.append(_finite(workers))
    found.append(_same(workers, asynchronous))
    slower = max(own[-1].step_ms / own[1].step_ms for own in workers)
    figure = f"last window's median over the second's {slower:.2f}"
    figure += f", limit {time_ratio:g}"
    return [*found, Verdict("steps take as long", slower <= time_ratio, figure)]


def _memory(workers: Sequence[Sequence[Window]], limit: float) -> Verdict:
    series = [[w.memory_mb for w in windows] for windows in workers]
    servers = [w.servers_mb for w in workers[0]]
    growth = max(map(memory_growth, series))
    figure = f"grew by {growth:.1f} MB"
    if servers[0]:
        of_servers = max(map(memory_growth, zip(*servers, strict=True)))
        figure += f", servers by {of_servers:.1f} MB"
        growth = max(growth, of_servers)
    figure += f", limit {limit:g} MB"
    return Verdict("memory is flat", growth <= limit, figure)


def _residual(workers: Sequence[Sequence[Window]]) -> Verdict:
    norms = [[w.residual_norm for w in windows] for windows in workers]
    half = -(-len(norms[0]) // 2)
    ratio = max(max(own[half:]) / max(max(own[:half]), 1e-30) for own in norms)
    finite = all(math.isfinite(norm) for own in norms for norm in own)
    return Verdict(
        "residual is bounded",
        finite and ratio <= RESIDUAL_RATIO,
        f"second half's largest over first half's {ratio:.2f}, "
        f"limit {RESIDUAL_RATIO:g}",
    )


def _finite(workers: Sequence[Sequence[Window]]) -> Verdict:
    steps = [w.step for own in workers for w in own if not math.isfinite(w.weight_norm)]
    figure = f"not at step {min(steps)}" if steps else f"{len(workers[0])} windows"
    return Verdict("weights are finite", not steps, figure)


def _same(workers: Sequence[Sequence[Window]], at_end: bool) -> Verdict:
    rows = list(zip(*workers, strict=True))[-1 if at_end else 0 :]
    apart = [
        row[0].step for row in rows if len({(w.step, w.checksum) for w in row}) > 1
    ]
    figure = f"bit-identical in all {len(rows)} windows"
    if at_end:
        figure = "bit-identical after the last step"
    if apart:
        figure = f"they part at step {apart[0]}"
    return Verdict("weights are the same", not apart, figure)


def resident_mb(process: str = "self") -> float:
    """Returns the memory that a process, this or a numbered one, has now, in MB."""
    pages = int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def process_of(args: argparse.Namespace, server: int) -> pathlib.Path:
    """Returns the file of the number of a server's process."""
    return pathlib.Path(args.worker, f"server-{server}")


def train(args: argparse.Namespace) -> None:
    """Trains as one of the workers, and writes what it recorded; or serves."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_dgc

    config = tf_dgc.DGCConfig(
        sparsity=0.99, min_elements=1000, warmup_steps=args.window
    )
    strategy: Any
    if args.servers:
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        if task["type"] == "ps":
            process_of(args, task["index"]).write_text(str(os.getpid()))
        compression = config if args.compress else None
        settings = tf_dgc.DownpourConfig(compression=compression)
        strategy = tf_dgc.DownpourStrategy(settings)  # a server stays here
    else:
        strategy = tf_dgc.DGCStrategy(config)
    servers = [process_of(args, k).read_text() for k in range(args.servers)]
    # On the servers, momentum and gradients that come late do not go together.
    momentum = 0.9 if args.compress else 0.0
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
        model = keras.Sequential(
            [keras.Input((FEATURES,)), *hidden, keras.layers.Dense(10)]
        )
        model.compile(keras.optimizers.SGD(0.01, momentum), "mse")
    random = np.random.default_rng(1)
    x = random.normal(size=(100 * BATCH, FEATURES)).astype("float32")
    y = random.normal(size=(100 * BATCH, 10)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    windows: list[Window] = []

    def weights() -> np.ndarray:
        return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])

    class Record(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._times = [time.perf_counter()]
            self._processor = time.process_time()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._times.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            processor = time.process_time() - self._processor
            pairs = zip(self._times[1:], self._times, strict=False)
            now = weights()
            windows.append(
                Window(
                    step=(epoch + 1) * args.window,
                    memory_mb=resident_mb(),
                    residual_norm=float(strategy.stats().residual_norm),
                    step_ms=1e3 * statistics.median(b - a for b, a in pairs),
                    processor_ms=1e3 * processor / args.window,
                    checksum=zlib.crc32(now),
                    weight_norm=float(np.linalg.norm(now)),
                    servers_mb=list(map(resident_mb, servers)),
                )
            )

    model.fit(
        data,
        epochs=args.steps // args.window,
        steps_per_epoch=args.window,
        shuffle=False,
        verbose=0,
        callbacks=[Record()],
    )
    if args.servers:
        strategy.barrier()
        windows[-1] = windows[-1]._replace(checksum=zlib.crc32(weights()))
    rows = [window._asdict() for window in windows]
    (args.worker / f"{strategy.rank}.json").write_text(json.dumps(rows))


def run(args: argparse.Namespace) -> list[list[Window]]:
    """Runs the workers; returns the windows of each.

    Raises:
        subprocess.CalledProcessError: a worker failed.
    """
    if args.launch == "run_local":
        launcher = [sys.executable, str(HERE / "run_local.py"), "-n", str(WORKERS)]
        launcher += ["--ps", str(args.servers), "--"]
    else:
        launcher = ["horovodrun", "-np", str(WORKERS)]
    with tempfile.TemporaryDirectory() as folder:
        own = ["--worker", folder, "--steps", str(args.steps)]
        own += ["--window", str(args.window), "--servers", str(args.servers)]
        own += ["--compress"] if args.compress else []
        command = [*launcher, sys.executable, str(pathlib.Path(__file__)), *own]
        subprocess.run(command, check=True)
        files = [pathlib.Path(folder) / f"{rank}.json" for rank in range(WORKERS)]
        found = [json.loads(file.read_text()) for file in files]
    return [[Window(**row) for row in rows] for rows in found]


def draw(workers: Sequence[Sequence[Window]], file: pathlib.Path) -> None:
    """Draws what was recorded over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {
        "memory_mb": "resident memory, MB",
        "residual_norm": "norm of what is kept back",
        "step_ms": "median step, ms",
        "processor_ms": "processor time of a step, ms",
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6))
    for axis, (name, label) in zip(axes.flat, names.items(), strict=True):
        for rank, windows in enumerate(workers):
            steps = [window.step for window in windows]
            values = [getattr(window, name) for window in windows]
            axis.plot(steps, values, label=f"rank {rank}")
        if name == "memory_mb":
            series = zip(*[window.servers_mb for window in workers[0]], strict=True)
            for server, values in enumerate(series):
                axis.plot(steps, values, label=f"server {server}")
        axis.set(xlabel="step", ylabel=label)
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and judges; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000, help="of each worker")
    parser.add_argument("--window", type=int, help="steps (a hundredth of all)")
    parser.add_argument(
        "--launch", choices=("run_local", "horovodrun"), default="run_local"
    )
    parser.add_argument("--servers", type=int, default=0, help="parameter servers")
    parser.add_argument(
        "--compress", action="store_true", help="with servers; without them always"
    )
    parser.add_argument("--memory-mb", type=float, default=MEMORY_MB, help="limit")
    parser.add_argument("--time-ratio", type=float, default=TIME_RATIO, help="limit")
    parser.add_argument("--json", type=pathlib.Path, help="write what was recorded")
    parser.add_argument("--plot", type=pathlib.Path, help="draw it")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.window = args.window or max(1, args.steps // 100)
    if args.window < 1 or args.steps < 3 * args.window:
        parser.error(
            "there must be three windows at least. Received: "
            f"--steps {args.steps} --window {args.window}"
        )
    if args.servers and args.launch != "run_local":
        parser.error(f"`--servers` needs run_local. Received: --launch {args.launch}")
    args.compress = args.compress or not args.servers
    if args.worker:
        train(args)
        return 0
    workers = run(args)
    limits = args.memory_mb, args.time_ratio
    found = verdicts(
        workers, *limits, asynchronous=args.servers > 0, compressed=args.compress
    )
    if args.json:
        rows = [[window._asdict() for window in windows] for windows in workers]
        args.json.write_text(json.dumps(rows, indent=1))
    if args.plot:
        draw(workers, args.plot)
    for question, well, figure in found:
        print(f"{'yes' if well else 'NO':4} {question}: {figure}")
    return int(not all(verdict.well for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
