#!/usr/bin/env python3
"""Train on parameter servers in the network laboratory, beside TensorFlow's own.

    scripts/bench_servers.py --rates 100mbit 1gbit

Each task is a host of its own, see netlab.py: servers, workers, and for the peer its
coordinator. Rows, of the same model and batches, with SGD:

    peer         tf.distribute.ParameterServerStrategy, in a loop of its own
    uncompressed DownpourStrategy
    compressed   the same with DGCConfig(sparsity=0.999)

Printed are, over the time in which all workers train: steps per second of all workers
together, bytes that the servers' interfaces received and sent for a step of a worker,
and the seconds of a step times the rate over these bytes: how much longer it took than
the busiest server's wire. Needs root, as netlab.py does.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

METHODS = ("peer", "uncompressed", "compressed")
FEATURES, WIDTH, CLASSES, BATCH = 1024, 2400, 10, 8
WARMUP = 3  # steps of a worker that do not count
SPARSITY = 0.999


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--rows", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="of a worker")
    parser.add_argument("--timeout", type=float, default=600.0, help="of a row")
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def layers() -> list[Any]:
    """Returns those of a model of 4.9 million weights, even on two servers."""
    import keras

    kinds = (WIDTH, "relu"), (FEATURES, "relu"), (CLASSES, None)
    inputs = keras.Input((FEATURES,))
    dense = [keras.layers.Dense(n, kind, use_bias=False) for n, kind in kinds]
    return [inputs, *dense]


def batches() -> Any:
    """Returns batches of one worker, for ever."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH, FEATURES)).astype("float32")
    y = random.integers(0, CLASSES, BATCH)
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH)


def octets() -> tuple[int, int]:
    """Returns what this host's interface has received and sent."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    found = line.partition(":")[2].split()
    return int(found[0]), int(found[8])


def watch(file: pathlib.Path) -> None:
    """Writes a line of the time and this host's bytes, again and again."""
    with file.open("a", buffering=1) as lines:
        while True:
            lines.write(json.dumps([time.monotonic(), *octets()]) + "\n")
            time.sleep(0.05)


def task(args: argparse.Namespace) -> None:
    """Is one task of a job, whose TF_CONFIG says which."""
    (method,) = args.rows
    own = json.loads(os.environ["TF_CONFIG"])["task"]
    name = f"{own['type']}{own['index']}"
    if own["type"] == "ps":
        file = args.folder / f"{name}.lines"
        threading.Thread(target=watch, args=[file], daemon=True).start()
    steps = (peer if method == "peer" else downpour)(args, method)
    (args.folder / f"{name}.json").write_text(json.dumps(steps))


def downpour(args: argparse.Namespace, method: str) -> list[float]:
    """Trains with this package; returns when each step of this worker ended."""
    import tf_dgc

    compression = (
        tf_dgc.DGCConfig(sparsity=SPARSITY) if method == "compressed" else None
    )
    strategy = tf_dgc.DownpourStrategy(tf_dgc.DownpourConfig(compression=compression))
    import keras

    times = []

    class Times(keras.callbacks.Callback):
        """Records, until the last worker is surely done."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.monotonic())
            if len(times) == WARMUP + args.steps:
                (args.folder / f"done{strategy.rank}").touch()
            done = len(list(args.folder.glob("done*")))
            self.model.stop_training = done == args.workers

    with strategy.scope():
        model = keras.Sequential(layers())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.001), loss)
    data = batches().unbatch().batch(BATCH * args.workers)
    model.fit(data, steps_per_epoch=10**6, verbose=0, callbacks=[Times()])
    return times


def peer(args: argparse.Namespace, method: str) -> list[float]:
    """Is a task of TensorFlow's own; its coordinator returns when steps were done."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    if resolver.task_type != "chief":
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
            # One that waits for a variable must not keep others from working.
            config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4),
        )
        server.join()
    import keras

    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = keras.Sequential(layers())
        optimizer = keras.optimizers.SGD(0.001)
        optimizer.build(model.trainable_variables)
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(iterator: Any) -> Any:
        def replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                found = loss(y, model(x, training=True))
            gradients = tape.gradient(found, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return found

        return strategy.run(replica, args=next(iterator))

    times = []
    for steps in (WARMUP, args.steps):
        for _ in range(steps * args.workers):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        times.append(time.monotonic())
    return times


def measured(args: argparse.Namespace, folder: pathlib.Path, method: str) -> list[Any]:
    """Returns steps per second of all, and bytes a step of each server: in, out."""
    files = sorted(folder.glob("chief*.json" if method == "peer" else "worker*.json"))
    times = [json.loads(file.read_text()) for file in files]
    if method == "peer":
        begin, end = times[0]
        steps = args.steps * args.workers
    else:
        begin = max(each[WARMUP - 1] for each in times)
        end = min(each[-1] for each in times)
        steps = sum(begin < at <= end for each in times for at in each)
    moved = []
    for file in sorted(folder.glob("ps*.lines")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        first = max(line for line in lines if line[0] <= begin)
        last = max(line for line in lines if line[0] <= end)
        moved.append(
            [(b - a) / steps for a, b in zip(first[1:], last[1:], strict=True)]
        )
    return [steps / (end - begin), moved]


def run(args: argparse.Namespace, rate: str, method: str) -> list[Any] | None:
    """Runs one row; returns what `measured` does, or None where it failed."""
    import netlab

    from tf_dgc.launcher import workers

    kinds = {"ps": args.servers, "worker": args.workers}
    if method == "peer":
        kinds["chief"] = 1
    tasks = [(kind, i) for kind, count in kinds.items() for i in range(count)]
    deadline = time.monotonic() + args.timeout
    with (
        tempfile.TemporaryDirectory() as name,
        netlab.Laboratory(len(tasks), rate) as lab,
    ):
        folder, cluster = pathlib.Path(name), {}
        for (kind, _), host in zip(tasks, lab.names, strict=True):
            cluster.setdefault(kind, []).append(f"{host}:{netlab.PORT}")
        awaited = []
        for host, (kind, index) in enumerate(tasks):
            config = {"cluster": cluster, "task": {"type": kind, "index": index}}
            own = {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "2"}
            command = [sys.executable, __file__, "--folder", name, "--rows", method]
            command += ["--workers", str(args.workers), "--steps", str(args.steps)]
            process = lab.start(host, command, own)
            for source in (process.stdout, process.stderr):
                prefix = f"[{kind}{index}] ".encode()
                given = (source, sys.stderr.buffer, prefix)
                threading.Thread(
                    target=workers.forward, args=given, daemon=True
                ).start()
            if kind == ("chief" if method == "peer" else "worker"):
                awaited.append(process)
        while any(p.poll() is None for p in awaited) and time.monotonic() < deadline:
            time.sleep(0.2)
        if any(process.poll() != 0 for process in awaited):
            return None
        return measured(args, folder, method)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and returns the exit status."""
    args = arguments(argv)
    if args.folder is not None:
        task(args)
        return 0
    import netlab

    from tf_dgc.lab.rates import bits_per_second

    netlab.end_on_signals()
    failed = False
    print(
        "| rate | row | steps per second | each server's bytes in, out | of the wire |"
    )
    print("|---|---|---|---|---|")
    for rate in args.rates:
        for method in args.rows:
            found = run(args, rate, method)
            if found is None:
                failed = True
                print(f"| {rate} | {method} | failed | | |", flush=True)
                continue
            pace, moved = found
            least = 8 * max(map(max, moved)) / bits_per_second(rate)
            told = "; ".join(f"{come:,.0f}, {go:,.0f}" for come, go in moved)
            row = (
                f"| {rate} | {method} | {pace:.3f} | {told} | {1 / pace / least:.2f} |"
            )
            print(row, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
