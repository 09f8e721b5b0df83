"""What workers and servers do in the tests of `test_downpour.py`; run by serving.py."""

import hashlib
import os
import pathlib
import random
import signal
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc.compression import arena
from tf_dgc.exchanges.opened import Subset

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import serving


def strategy_of(**settings: Any) -> tf_dgc.DownpourStrategy:
    if settings.get("compression") is not None:
        settings["compression"] = tf_dgc.DGCConfig(**settings["compression"])
    return tf_dgc.DownpourStrategy(tf_dgc.DownpourConfig(**settings))


def serve() -> None:
    strategy_of()


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(5)
    x = drawn.normal(size=(rows, 12)).astype("float32")
    return x, (x[:, :3].sum(1) > 0).astype("int32") + (x[:, 4] > 1)


def perceptron(width: int = 64, **options: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([12]),
            keras.layers.Dense(width, "relu", **options),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(width, "relu"),
            keras.layers.Dense(3),
        ]
    )


def compiled(model: keras.Model, optimizer: Any, **options: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer, loss, metrics=["accuracy"], **({"jit_compile": False} | options)
    )
    return model


def digest(variables: Any) -> str:
    return hashlib.md5(b"".join(v.numpy().tobytes() for v in variables)).hexdigest()


# One worker.

_SCHEDULE = {"initial_learning_rate": 0.01, "decay_steps": 7, "decay_rate": 0.9}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(**_SCHEDULE), weight_decay=0.01
    ),
    "averages": lambda: keras.optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7
    ),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "whole": lambda: keras.optimizers.Muon(0.01, weight_decay=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


def _trained(name: str) -> list[np.ndarray]:
    """Train for 50 steps; return what there is then."""
    keras.utils.set_random_seed(3)
    constraint = keras.constraints.MaxNorm(0.8) if name == "averages" else None
    model = perceptron(kernel_constraint=constraint)
    steps = 5 if name == "sgd" else 1
    compiled(model, OPTIMIZERS[name](), steps_per_execution=steps)
    x, y = data(25 * 16)
    fitted = model.fit(
        x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x[:50], y[:50])
    )
    found = [v.numpy() for v in model.weights]
    found += [v.numpy() for v in model.optimizer.variables]
    found += [np.array(values) for _, values in sorted(fitted.history.items())]
    found += [
        model.predict(x[:21], verbose=0),
        np.array(model.evaluate(x, y, verbose=0)),
    ]
    return found


def _loop(strategy: Any) -> list[np.ndarray]:
    """Train by a loop of one's own, eagerly and in a graph."""
    keras.utils.set_random_seed(4)
    table = keras.Variable(np.ones((9, 4), "float32"))
    scale = keras.Variable(np.ones((9, 4), "float32") / 2)
    optimizer = keras.optimizers.Adam(0.01)
    rows = tf.constant([1, 3, 8])  # Keras squares one by one those that repeat

    def step(of: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            product = tf.gather(table.value, of) * tf.gather(scale.value, of)
            loss = tf.reduce_sum(product**2)
        variables = [table, scale]
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    run = step if strategy is None else lambda of: strategy.run(step, (of,))
    graph = tf.function(run)
    for i in range(6):
        (run if i % 2 else graph)(rows - i % 2)
    return [v.numpy() for v in (table, scale, *optimizer.variables)]


def alone(names: list[str]) -> dict[str, Any]:
    """Tell what differs from plain Keras, of one worker."""
    plain = {name: _trained(name) for name in names} | {"loop": _loop(None)}
    strategy = strategy_of()
    with strategy.scope():
        found = {name: _trained(name) for name in names}
        found["loop"] = _loop(strategy)
    differ = {}
    for name, arrays in plain.items():
        pairs = list(zip(arrays, found[name], strict=True))
        differ[name] = [i for i, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]
    twins = strategy.inner.twins._pairs.values()
    return {
        "differ": differ,
        "pieces": max(len(pair.twin.pieces) for pair in twins),
        "staleness": float(strategy.server_stats().staleness),
    }


# Several workers.

ROWS, WIDTH = 23, 7


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Return gradients of integers: of a table, a matrix and a vector."""
    drawn = np.random.default_rng([rank, step])
    return {
        "indices": drawn.integers(0, ROWS, 5),
        "values": drawn.integers(-9, 9, (5, WIDTH)).astype("float32"),
        "matrix": drawn.integers(-9, 9, (WIDTH, 3)).astype("float32"),
        "vector": drawn.integers(-9, 9, (3,)).astype("float32"),
    }


def integers(steps: int, **settings: Any) -> dict[str, Any]:
    """Push integers, at a pace that is drawn."""
    strategy = strategy_of(staleness_rate=False, **settings)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(shape, "float32"))
            for shape in ((ROWS, WIDTH), (WIDTH, 3), (3,))
        ]
        optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def step(indices: Any, values: Any, matrix: Any, vector: Any) -> None:
        def apply(indices: Any, values: Any, matrix: Any, vector: Any) -> None:
            table = tf.IndexedSlices(values, indices, tf.constant([ROWS, WIDTH]))
            optimizer.apply([table, matrix, vector], variables)

        strategy.run(apply, (indices, values, matrix, vector))

    drawn, apart = random.Random(strategy.rank), 0
    for number in range(steps):
        step(**gradients(strategy.rank, number))
        (exchange,) = strategy._ledger.exchanges()
        if exchange.clocks is not None:
            clocks = exchange.clocks.clocks.numpy()
            inside = clocks[clocks < 2**62]
            apart = max(apart, int(inside.max() - inside.min()))
        time.sleep(drawn.random() * 0.02)
    strategy.barrier()
    twins = [strategy.inner.twins.of(v.value) for v in variables]
    pairs = zip(variables, twins, strict=True)
    (exchange,) = strategy._ledger.exchanges()
    kept = [np.zeros(v.shape) for v in variables]
    if settings.get("compression") is not None:
        pushed = exchange.pushed
        parts = arena.unflatten(pushed.layout, pushed.residual.v)
        for i, part in zip(pushed._large, parts, strict=True):
            kept[i] = part.numpy()
    stats = strategy.server_stats()
    return {
        "kept": [each.tolist() for each in kept],
        "bytes": [int(stats.sent_bytes), int(stats.received_bytes)],
        "found": [v.numpy().tolist() for v in variables],
        "alike": [bool(np.array_equal(v, twin)) for v, twin in pairs],
        "pieces": [len(twin.pieces) for twin in twins],
        "all": int(exchange.version),
        "own": int(strategy.server_stats().pushes),
        "apart": apart,
    }


def fit(backup: str = "", epochs: int = 2, **settings: Any) -> dict[str, Any]:
    """Train with `fit`; what each worker reads, evaluates and predicts."""
    strategy = strategy_of(**settings)
    x, y = data(203)
    with strategy.scope():
        model = perceptron(width=20)
        compiled(model, keras.optimizers.SGD(0.1))
    rows = tf.data.Dataset.range(203).shuffle(203)
    rows = rows.map(lambda i: (tf.gather(x, i), tf.gather(y, i)))
    callbacks: list[Any] = [tf_dgc.callbacks.CompressionStats()]
    if backup:
        callbacks.append(tf_dgc.callbacks.BackupState(backup, delete_checkpoint=False))
    history = model.fit(
        rows.batch(40),
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
        validation_data=(x, y),
    ).history
    strategy.barrier()
    return {
        "history": history,
        "epochs": len(history["loss"]),
        "digest": digest(model.trainable_variables),
        "alike": all(
            np.array_equal(v, strategy.inner.twins.of(v.value))
            for v in model.trainable_variables
        ),
        "evaluated": model.evaluate(x, y, verbose=0),
        "predicted": list(model.predict(x, verbose=0).shape),
        "iterations": int(model.optimizer.iterations),
        "pushes": int(strategy.server_stats().pushes),
        "selected": strategy._ledger.exchanges()[0].steps,
    }


# What is refused, and what fails.


def absent() -> dict[str, Any]:
    """Come before the chief, or in its absence."""
    strategy_of()
    return {}


def outside() -> dict[str, Any]:
    """Make a model outside of the scope; compile for XLA; apply gradients past it."""
    strategy = strategy_of()
    told = []
    x, y = data(16)

    def fails(*args: Any, **options: Any) -> None:
        with strategy.scope():
            model = compiled(perceptron(8), keras.optimizers.SGD(0.05), **options)
        model.fit(x, y, verbose=0)

    def past() -> None:
        with strategy.scope():
            variable = keras.Variable(np.ones(3, "float32"))
            optimizer = keras.optimizers.SGD(1.0)
        optimizer.apply([tf.ones(3)], [variable])

    for attempt in (
        lambda: compiled(perceptron(8), keras.optimizers.SGD(0.05)).fit(x, y),
        lambda: fails(jit_compile=True),
        past,
    ):
        try:
            attempt()
            told.append("")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return {"told": told}


def compressed() -> dict[str, Any]:
    """Train alone with everything pushed; what is refused, and what is flushed."""
    _, y = data(100)
    x = np.random.default_rng(6).normal(size=(100, 12)).astype("float32")

    def trained(so_far: float = 0.0, **options: Any) -> keras.Model:
        keras.utils.set_random_seed(7)
        sgd = keras.optimizers.SGD(0.05, momentum=0.9, **options)
        model = compiled(perceptron(20), sgd)
        sgd.build(model.trainable_variables)
        for slot in sgd.momentums:  # as of a model that was loaded
            slot.assign(tf.fill(slot.shape, so_far))
        model.fit(x, y, batch_size=10, verbose=0)
        return model

    kinds: list[dict[str, Any]] = [{"nesterov": True}, {"weight_decay": 0.1}]
    kinds.append({"so_far": 0.01})
    plain = [trained(**kind).get_weights() for kind in kinds]
    settings = {"sparsity": 0.99, "warmup_steps": 16, "warmup_stages": [0.0]}
    settings |= {"min_elements": 1}
    strategy = strategy_of(compression=settings)
    differ, told = [], []
    with strategy.scope():
        for kind, weights in zip(kinds, plain, strict=True):
            pairs = zip(trained(**kind).get_weights(), weights, strict=True)
            differ.append(max(np.abs(a - b).max() for a, b in pairs))
        model = trained()
        model.fit(x, y, batch_size=10, verbose=0)  # not everything any more
    (exchange,) = strategy._ledger.exchanges(Subset([model.optimizer], []))
    pushed = exchange.pushed
    kept = arena.unflatten(pushed.layout, pushed.residual.v)
    before = {i: model.trainable_variables[i].numpy() for i in pushed._large}
    strategy.flush(model)
    after = [model.trainable_variables[i].numpy() for i in pushed._large]
    flushed = max(
        float(np.abs(b - k.numpy() - a).max())
        for b, k, a in zip(before.values(), kept, after, strict=True)
    )
    for name, factor in (("adam", 1.0), ("sgd", np.inf)):
        with strategy.scope():
            other = compiled(perceptron(8), name)
        try:
            other.fit(factor * x, y, verbose=0)
            told.append("")
        except (ValueError, tf.errors.OpError) as error:
            told.append(str(error))
    return {
        "differ": list(map(float, differ)),
        "kept": float(max(np.abs(k).max() for k in kept)),
        "left": float(tf.reduce_max(tf.abs(pushed.residual.v))),
        "flushed": flushed,
        "told": told,
    }


def _fitted(
    of: int, eagerly: bool, both: bool, nadam: bool, follows: bool = False
) -> list[np.ndarray]:
    """Train on batches of `of` rows, the last of 3.

    The rate falls from epoch to epoch; who follows the chief decides otherwise.
    """
    x, y = data(83)
    found = []
    sgd = {"momentum": 0.9, "weight_decay": 0.01, "global_clipnorm": 0.3}
    optimizers = [keras.optimizers.SGD(0.05, nesterov=True, **sgd)]
    if both:
        optimizers.append(keras.optimizers.Adam(0.01, use_ema=True))
    if nadam:  # changes something before each step
        optimizers.append(keras.optimizers.Nadam(0.01))
    for optimizer in optimizers:
        keras.utils.set_random_seed(8)
        layers = [keras.Input([12]), keras.layers.Dense(1200, "relu")]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        compiled(model, optimizer, run_eagerly=eagerly)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(of)
        rate = 0.04 if optimizer is optimizers[0] else 0.01
        falls = keras.callbacks.LearningRateScheduler(
            lambda epoch, _, rate=rate: 9.0 if follows else rate / (1 + epoch)
        )
        epochs = 1 if eagerly else 2
        model.fit(batches, epochs=epochs, verbose=0, callbacks=[falls])
        found += [v.numpy() for v in model.trainable_variables]
        found.append(np.array(int(optimizer.iterations)))
    return found


def _counted(strategy: Any) -> float:
    """Take 4 steps of one's own with the others, by gradients 1, 2, ...; -1 a unit."""
    with strategy.scope():
        variable = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
    gradient = tf.constant(strategy.rank + 1.0)

    @tf.function
    def step() -> None:
        strategy.run(lambda: optimizer.apply([gradient], [variable]))

    for i in range(4):
        step()
        if i == 1:
            strategy.barrier()
    strategy.barrier()
    return float(variable.numpy())


def _of_chosen(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    chosen = tf.cast(tf.equal(y, 1.0), p.dtype)
    errors = tf.reduce_sum(tf.square(y - p) * chosen)
    return tf.math.divide_no_nan(errors, tf.reduce_sum(chosen))


def _by_losses(eagerly: bool) -> list[np.ndarray]:
    """Train with losses that are no means of rows; the last batch has one row."""
    squares, found = keras.losses.MeanSquaredError, []
    for loss in (squares(reduction="sum"), squares(reduction=None), _of_chosen):
        keras.utils.set_random_seed(8)
        model = keras.Sequential([keras.Input([12]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=eagerly)
        x, y = data(41)
        y = y.astype("float32")[:, None]
        model.fit(x, y, batch_size=20, shuffle=False, epochs=2, verbose=0)
        found += [v.numpy() for v in model.trainable_variables]
    return found


def together(
    eagerly: bool = False, both: bool = False, nadam: bool = False
) -> dict[str, Any]:
    """Take steps with the others; tell how far they are from those of one process."""
    plain = _fitted(20, eagerly, both, nadam)
    by_losses = _by_losses(eagerly)
    strategy = strategy_of(synchronous=True)
    with strategy.scope():
        found = _fitted(20, eagerly, both, nadam, strategy.rank > 0)
    stats = strategy.server_stats()
    figures = [int(stats.pushes), int(stats.dropped), int(stats.all_pushes)]
    with strategy.scope():
        pairs = zip(_by_losses(eagerly), by_losses, strict=True)
        differ_by_losses = [float(np.abs(a - b).max()) for a, b in pairs]
    pairs = zip(plain, found, strict=True)
    return {
        "differ": [float(np.abs(a - b).max()) for a, b in pairs],
        "differ by losses": differ_by_losses,
        "digest": hashlib.md5(b"".join(v.tobytes() for v in found)).hexdigest(),
        "figures": figures,
        "loop": _counted(strategy),
        "pieces": max(len(p.twin.pieces) for p in strategy.inner.twins._pairs.values()),
    }


def train(
    steps: int = 400,
    width: int = 8,
    pause: float = 0.02,
    slow: int | None = None,
    dies: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train for a time, a step after the other; one of the workers ten times slower.

    One that dies does so between two steps, of which it is then to take no part.
    """
    strategy = strategy_of(**settings)
    pause *= 10 if strategy.rank == slow else 1
    with strategy.scope():
        model = compiled(perceptron(width), keras.optimizers.SGD(0.05))
    x, y = data(steps * 8 * strategy.workers)

    class Pace(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch % 10 == 0:
                print(f"step {batch}", file=sys.stderr, flush=True)
            if batch == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(pause)

    batch = 8 * strategy.workers
    model.fit(x, y, batch_size=batch, verbose=0, callbacks=[Pace()])
    strategy.barrier()
    return {
        "dropped": int(strategy.server_stats().dropped),
        "digest": digest(model.trainable_variables),
        "loss": model.evaluate(x[:400], y[:400], verbose=0)[0],
        "finite": all(np.isfinite(v).all() for v in model.get_weights()),
        "pushes": int(strategy.server_stats().pushes),
        "all": int(strategy.server_stats().all_pushes),
    }


CASES = serve, alone, integers, fit, absent, outside, compressed, together, train

if __name__ == "__main__":
    serving.main({each.__name__: each for each in CASES})
