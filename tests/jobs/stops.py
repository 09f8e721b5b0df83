"""Training that ends before its time: run by the workers of `pool.py`."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

STRATEGIES = {
    "dense": lambda: tf_dgc.DenseStrategy(),
    "dgc": lambda: tf_dgc.DGCStrategy(
        tf_dgc.DGCConfig(sparsity=0.5, min_elements=8, warmup_steps=0)
    ),
    "averaging": lambda: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(period=3)
    ),
    "post-local": lambda: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(period=3, synchronous_steps=20)
    ),
}


class StopsAt(keras.callbacks.Callback):
    """Ends training after some batches of the first epoch, or at its end."""

    def __init__(self, batches: int | None) -> None:
        super().__init__()
        self.batches = batches
        self.seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.batches is not None and batch + 1 >= self.batches:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.batches == -1:
            self.model.stop_training = True


class Counts(keras.Sequential):
    """Counts rows and steps, and is trained where the loss is more than `least`."""

    def __init__(self, layers: list[Any], least: float) -> None:
        super().__init__()
        self.least = least
        self.rows = keras.Variable(0.0, trainable=False)
        self.calls = tf.Variable(0, trainable=False)
        for layer in layers:
            self.add(layer)

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        self.calls.assign_add(1)
        tf.cond(
            loss > self.least,
            lambda: self.optimizer.apply(gradients, variables),
            lambda: None,
        )
        return {"loss": loss}


def model(kind: str, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(5)
    least = options.pop("least", None)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dense(1),
    ]
    made = keras.Sequential(layers) if least is None else Counts(layers, least)
    accumulate = options.pop("accumulate", None)
    optimizer = keras.optimizers.SGD(
        0.05, momentum=0.9, gradient_accumulation_steps=accumulate
    )
    made.compile(optimizer, "mse", **options)
    return made


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.RandomState(0).rand(96, 4).astype("float32")
    return x, x.sum(1, keepdims=True)


def fitted(made: keras.Model, batches: int | None, **options: Any) -> dict[str, Any]:
    """Train for up to two epochs of twelve batches; return what came of it."""
    stops = StopsAt(batches)
    options = {"epochs": 2, "batch_size": 8, "shuffle": False, "verbose": 0} | options
    history = made.fit(*data(), callbacks=[stops], **options)
    return {
        "seen": stops.seen,
        "iterations": int(made.optimizer.iterations),
        "counted": [int(getattr(made, name, 0)) for name in ("rows", "calls")],
        "weights": [w.tolist() for w in made.get_weights()],
        "trained": [w.numpy().tolist() for w in made.trainable_weights],
        "loss": history.history["loss"],
    }


def ended(kind: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train once for each case: batches by rank, and options of `model` and `fit`.

    Where all end after the same batch, once more on so much data.
    """
    strategy = STRATEGIES[kind]()
    found = []
    for case in cases:
        with strategy.scope():
            made = model(kind, **case.get("compile", {}))
        batches = case["batches"][strategy.rank]
        options = {"validation_data": data()} if case.get("validates") else {}
        found.append(fitted(made, batches, **options))
        if len({*case["batches"]}) == 1:
            each = case.get("compile", {}).get("steps_per_execution", 1)
            options |= {"epochs": 1, "steps_per_epoch": -(-batches // each) * each}
            with strategy.scope():
                made = model(kind, **case.get("compile", {}))
            found[-1]["expected"] = fitted(made, None, **options)
    return found


def ends_early(rank_of_less: int) -> None:
    """Train on data that end earlier on one worker, unknown to TensorFlow."""
    strategy = tf_dgc.DenseStrategy()
    less = strategy.rank == rank_of_less

    def rows() -> Any:
        for i in range(5 if less else 8):
            yield np.full([4, 4], i, "float32"), np.full([4, 1], i, "float32")

    with strategy.scope():
        made = model("dense")
    spec = tf.TensorSpec([4, 4]), tf.TensorSpec([4, 1])
    dataset = tf.data.Dataset.from_generator(rows, output_signature=spec)
    made.fit(dataset, verbose=0)
