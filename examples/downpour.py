"""Train the digits asynchronously, on parameter servers.

In every task of a TF_CONFIG with jobs "ps" and "worker":

    python examples/downpour.py
    python examples/downpour.py --max-staleness 4 --slow 0.1
    python examples/downpour.py --sparsity 0.99

    tf-dgc-run -n 2 --ps 2 --restarts 3 examples/downpour.py --lost-after 20

Tasks of type "ps" serve until they get a signal. `--slow` lets worker 1 sleep in each
step, which holds the others back only where there is a bound of staleness. `--sparsity`
pushes the largest elements only, and fetches those that have changed, with SGD.
`--lost-after` kills worker 1 in the midst of the training; `--restarts` starts it anew.
"""

import argparse
import os
import signal
import sys
import time
from typing import Any

import keras
import tensorflow as tf
from digits import build, load

import tf_dgc


class Slow(keras.callbacks.Callback):
    """Sleeps after each step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Sleeps."""
        time.sleep(self.seconds)


class Lost(keras.callbacks.Callback):
    """Kills its worker after some steps, as if the machine had been taken away."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts steps."""
        self.steps -= 1
        if not self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fetch-period", type=int, default=1)
    parser.add_argument("--push-period", type=int, default=1)
    parser.add_argument("--max-staleness", type=int, help="by default no bound")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--sparsity", type=float, help="by default no compression")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of SGD")
    parser.add_argument("--width", type=int, default=128, help="of the dense layer")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds, of worker 1")
    parser.add_argument("--lost-after", type=int, metavar="S", help="steps of worker 1")
    parser.add_argument("--liveness", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers")
    parser.add_argument("--verbose", type=int, default=2, help="as in Model.fit")
    return parser.parse_args()


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    compression, optimizer = None, args.optimizer
    if args.sparsity is not None:
        compression = tf_dgc.DGCConfig(sparsity=args.sparsity)
    config = tf_dgc.DownpourConfig(
        fetch_period=args.fetch_period,
        push_period=args.push_period,
        max_staleness=args.max_staleness,
        compression=compression,
        liveness=args.liveness,
    )
    # Before any TensorFlow operation runs. A server stays here.
    strategy = tf_dgc.DownpourStrategy(config)
    train, validation, test = load()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build(args.width)
        if optimizer == "sgd" or compression is not None:
            optimizer = keras.optimizers.SGD(args.learning_rate, momentum=0.9)
        loss = "sparse_categorical_crossentropy"
        model.compile(optimizer, loss, metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=1)
    callbacks: list[Any] = [tf_dgc.callbacks.CompressionStats()]
    if args.slow and strategy.rank == 1:
        callbacks.append(Slow(args.slow))
    again = os.environ.get("TF_DGC_ATTEMPT", "0") != "0"
    if args.lost_after and strategy.rank == 1 and not again:
        callbacks.append(Lost(args.lost_after))
    begin = time.perf_counter()
    model.fit(
        data.batch(args.batch_size),
        validation_data=validation,
        epochs=args.epochs,
        shuffle=False,
        verbose=args.verbose if strategy.is_chief else 0,
        callbacks=callbacks,
    )
    seconds = time.perf_counter() - begin
    strategy.barrier()  # until all have ended
    _, accuracy = model.evaluate(*test, verbose=0)
    stats = strategy.server_stats()
    pushes = int(stats.pushes)
    staleness = float(stats.staleness) / max(pushes, 1)
    print(
        f"worker {strategy.rank}: {pushes} of {int(stats.all_pushes)} pushes in "
        f"{seconds:.1f} s, mean staleness {staleness:.2f}, {int(stats.sent_bytes):,} "
        f"bytes sent, {int(stats.received_bytes):,} received"
    )
    if strategy.is_chief:
        print(f"test accuracy      {accuracy:.2%} of {len(test[0])} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
