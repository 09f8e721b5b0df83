#!/usr/bin/env python
"""Train with one worker slower than the others; tell what the job's pace is.

    scripts/bench_pace.py --seconds 20

Each step sleeps, so that the cores do not limit. Printed are steps per second: of each
worker alone, with the same model and sleep, of them together with `DownpourStrategy`,
and with the synchronous strategies, which go at the pace of the slowest; then of a job
of which a worker is killed in the midst and another takes its place.

A worker records when each of its steps ended. What counts is the time in which all have
taken a few steps and none has ended.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

FEATURES, WIDTH, CLASSES, BATCH = 64, 128, 10, 32
FIRST = 5  # steps that do not count
KILLED = 60.0  # seconds of the job in which a worker is killed after a third


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds a step")
    parser.add_argument("--slow", type=float, default=0.25, help="the last worker's")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    parser.add_argument("--strategy", default="downpour", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> None:
    """Trains as one worker, or serves; leaves the times of its steps in a file."""
    import tf_dgc

    strategies: dict[str, Any] = {
        "downpour": tf_dgc.DownpourStrategy,
        "dense": tf_dgc.DenseStrategy,
        "dgc": tf_dgc.DGCStrategy,
    }
    strategy = strategies[args.strategy]()
    import keras
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * args.workers, FEATURES)).astype("float32")
    y = random.integers(0, CLASSES, len(x))
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(len(x))
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
    rank = strategy.rank
    last = rank == args.workers - 1
    pause = args.slow if last else args.sleep
    asynchronous = args.strategy == "downpour"
    steps = 10**6 if asynchronous else int(args.seconds / max(args.slow, args.sleep))
    path = args.worker / f"{rank}.{os.getpid()}.json"
    first = not any(args.worker.glob(f"{rank}.*.json"))
    path.write_text("[]")

    times: list[float] = []

    class Pace(keras.callbacks.Callback):
        """Sleeps, and records."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(pause)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.monotonic())
            ran = times[-1] - times[0]
            if args.kill and rank == 1 and first and ran > args.seconds / 3:
                path.write_text(json.dumps(times))
                os.kill(os.getpid(), signal.SIGKILL)
            if asynchronous and ran > args.seconds:
                self.model.stop_training = True

    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[Pace()])
    path.write_text(json.dumps(times))


def job(args: argparse.Namespace, workers: int, strategy: str, *more: str) -> Any:
    """Runs a job; returns the times of each process's steps, by rank and start."""
    with tempfile.TemporaryDirectory() as folder:
        servers = [] if strategy != "downpour" else ["--ps", str(args.servers)]
        command = [sys.executable, "-m", "tf_dgc.run", "-n", str(workers), *servers]
        command += ["--restarts", "1"] if "--kill" in more else []
        command += ["--timeout", "300", __file__, "--worker", folder]
        command += ["--strategy", strategy, "--workers", str(workers)]
        seconds = max(args.seconds, KILLED * ("--kill" in more))
        command += ["--seconds", str(seconds), *more]
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=HERE.parent)
        found = sorted(
            pathlib.Path(folder).glob("*.json"),
            key=lambda path: (path.name.partition(".")[0], path.stat().st_mtime),
        )
        return [json.loads(path.read_text()) for path in found]


def pace(times: Sequence[Sequence[float]], begin: float = 0, end: float = 1e9) -> float:
    """Returns steps per second of all, while all of them ran."""
    begin = max(begin, *(each[FIRST] for each in times))
    end = min(end, *(each[-1] for each in times))
    counts = [sum(begin < at <= end for at in each) for each in times]
    return sum(counts) / (end - begin)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and returns the exit status."""
    args = arguments(argv)
    if args.worker is not None:
        work(args)
        return 0
    pauses = {"fast": args.sleep, "slow": args.slow}
    alone = {
        name: pace(job(args, 1, "downpour", "--slow", str(seconds)))
        for name, seconds in pauses.items()
    }
    whole = (args.workers - 1) * alone["fast"] + alone["slow"]
    rows = {f"alone, {name}": each for name, each in alone.items()}
    rows["all of them, alone"] = whole
    own = ("--sleep", str(args.sleep), "--slow", str(args.slow))
    for strategy in ("downpour", "dense", "dgc"):
        rows[strategy] = pace(job(args, args.workers, strategy, *own))
    print("| | steps per second | of the sum |\n|---|---|---|")
    for name, each in rows.items():
        print(f"| {name} | {each:.1f} | {each / whole:.2f} |")
    found = job(args, args.workers, "downpour", *own, "--kill")
    killed, joined = found[1], found[2]
    others = [found[0], *found[3:]]
    spans = {
        "before": (0.0, killed[-1]),
        "between": (killed[-1], joined[0]),
        "after": (joined[0], 1e9),
    }
    print("\nOne is killed, another takes its place; steps per second of the others:")
    for name, span in spans.items():
        print(f"  {name:8} {pace(others, *span):.1f}")
    gap = joined[0] - killed[-1]
    print(f"  {gap:.1f} s after the last step of the one the other took its first, and")
    print(f"  {len(joined)} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
