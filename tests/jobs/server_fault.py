"""A worker of parameter servers to whom something happens; run by serving.py.

By SGD(1) and gradients of -1 each push adds 1 to each element, so that what servers
hold counts pushes. In a file each worker writes a byte for each step that it has taken.
"""

import os
import pathlib
import signal
import sys
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import serving

from tf_dgc.compression import arena
from tf_dgc.exchanges.downpour import ServedLargest

IDS, WIDTH = 32, 4


def serve() -> None:
    tf_dgc.DownpourStrategy()


class Counts(keras.Model):
    """Has a gradient of -1 of each element of its kernel, and of its table."""

    def __init__(self, table: bool) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=[6, 10], initializer="zeros", name="kernel")
        self.rows = None
        if table:
            self.rows = keras.layers.Embedding(IDS, WIDTH, "zeros")

    def call(self, ids: Any) -> Any:
        return self.rows(ids) if self.rows is not None else tf.cast(ids, tf.float32)

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any
    ) -> Any:
        loss = -tf.reduce_sum(self.kernel.value)
        if self.rows is not None:
            loss -= tf.reduce_sum(tf.reduce_mean(y_pred, 0))
        return loss


class Fault(keras.callbacks.Callback):
    """Notes each step; at one of them something happens, at once or some time later."""

    def __init__(self, path: pathlib.Path, kind: str, at: int, delay: float) -> None:
        super().__init__()
        self.path, self.kind, self.at, self.delay, self.steps = path, kind, at, delay, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with self.path.open("a") as file:
            file.write("x")
        self.steps += 1
        if self.steps != self.at:
            return
        print("the fault comes", file=sys.stderr, flush=True)
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(self.kind)
        if number is None:
            sys.exit(3)
        if self.delay:
            send = threading.Timer(self.delay, os.kill, [os.getpid(), number])
            send.daemon = True
            send.start()
        else:
            os.kill(os.getpid(), number)


def train(
    folder: str,
    fits: int,
    steps: int,
    table: bool,
    backup: bool,
    fault: list[Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train in several fits; tell what the servers hold, and what is kept back."""
    if settings.pop("compressed"):
        compression = {"sparsity": 0.9, "min_elements": 1, "sample_fraction": 1.0}
        settings["compression"] = tf_dgc.DGCConfig(**compression)
    config = tf_dgc.DownpourConfig(
        staleness_rate=False, table_bytes=64 if table else None, **settings
    )
    strategy = tf_dgc.DownpourStrategy(config)
    with strategy.scope():
        model = Counts(table)
        model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    rows = 4 * strategy.workers
    ids = np.tile(np.arange(IDS), (rows * steps, 1))
    own = pathlib.Path(folder, f"steps-{strategy.rank}")
    for number in range(fits):
        callbacks: list[Any] = [Fault(own, *(fault or ["", -1, 0.0]))]
        fault = None
        if backup:
            path = pathlib.Path(folder, f"backup-{number}")
            callbacks.append(tf_dgc.callbacks.BackupState(path))
        options = {"epochs": 2, "verbose": 0, "callbacks": callbacks}
        model.fit(ids, batch_size=rows, **options)
    strategy.barrier()
    kept = np.zeros([6, 10])
    for exchange in strategy._ledger.exchanges():
        if isinstance(exchange, ServedLargest):
            layout = exchange.pushed.layout
            kept = arena.unflatten(layout, exchange.pushed.residual.v)[0].numpy()
    found = {"kernel": strategy.inner.twins.of(model.kernel.value).read_value().numpy()}
    if table:
        found["table"] = strategy.read_rows(model.rows.embeddings, 0, IDS).numpy()
    return {
        "values": {name: value.tolist() for name, value in found.items()},
        "kept": kept.tolist(),
        "pushes": int(strategy.server_stats().pushes),
    }


if __name__ == "__main__":
    serving.main({"serve": serve, "train": train})
