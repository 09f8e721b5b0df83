"""What tasks do in the tests of `test_embedding_tables.py`; run by serving.py."""

import pathlib
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import serving

ROWS, WIDTH = 100, 8
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "clipped": lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.01),
}


def strategy_of(**settings: Any) -> tf_dgc.DownpourStrategy:
    settings = {"table_bytes": 4 * ROWS * WIDTH} | settings
    return tf_dgc.DownpourStrategy(tf_dgc.DownpourConfig(**settings))


def serve() -> None:
    strategy_of()


def data(batches: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Return batches of 16, in none of which a row of the table comes twice."""
    drawn = np.random.default_rng(3)
    ids = [drawn.permutation(ROWS)[:48].reshape(16, 3) for _ in range(batches)]
    return np.concatenate(ids), drawn.normal(size=(16 * batches, 1)).astype("float32")


def model_of(optimizer: Any, steps: int = 1, **options: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input([3], dtype="int64"),
            keras.layers.Embedding(ROWS, WIDTH, **options),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", jit_compile=False, steps_per_execution=steps)
    return model


def fit(model: keras.Model, **options: Any) -> list[float]:
    options = {"batch_size": 16, "shuffle": False, "verbose": 0} | options
    return model.fit(*data(), **options).history["loss"]


def rows_of(strategy: tf_dgc.DownpourStrategy, model: keras.Model) -> np.ndarray:
    return strategy.read_rows(model.layers[0].embeddings, 0, ROWS).numpy()


def alone(folder: str) -> dict[str, Any]:
    """Do what one worker can."""
    strategy = strategy_of()
    return {
        "equal": equal(strategy),
        "saved": saved(strategy, folder),
        "refused": refused(strategy),
    }


def equal(strategy: tf_dgc.DownpourStrategy) -> dict[str, list[float]]:
    """Return how far models come apart from those that hold their table."""
    x, y = data()
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        with strategy.scope():
            model = model_of(optimizer(), steps=5 if name == "adagrad" else 1)
        plain = model_of(optimizer())
        first = rows_of(strategy, model)
        plain.layers[0].embeddings.assign(first)
        plain.layers[2].kernel.assign(model.layers[2].kernel)
        losses = np.subtract(fit(model, epochs=2), fit(plain, epochs=2))
        table = plain.layers[0].embeddings.numpy()
        predicted = model.predict(x, verbose=0) - plain.predict(x, verbose=0)
        evaluated = model.evaluate(x, y, verbose=0) - plain.evaluate(x, y, verbose=0)
        apart = [rows_of(strategy, model) - table, losses, predicted, evaluated]
        largest = [float(np.abs(each).max()) for each in apart]
        found[name] = [*largest, float(np.abs(first - table).max())]
    return found


def saved(strategy: tf_dgc.DownpourStrategy, folder: str) -> dict[str, float]:
    """Save and load in all ways; return what must be zero."""
    with strategy.scope():
        model = model_of(OPTIMIZERS["adagrad"]())
    x, y = data()
    fit(model)
    loss = model.evaluate(x, y, verbose=0)
    model.save(f"{folder}/model.keras")
    model.save_weights(f"{folder}/model.weights.h5")
    fit(model)
    expected = rows_of(strategy, model)
    found = {}
    model.load_weights(f"{folder}/model.weights.h5")
    found["weights"] = model.evaluate(x, y, verbose=0) - loss
    alone = keras.models.load_model(f"{folder}/model.keras")
    found["alone"] = alone.evaluate(x, y, verbose=0) - loss
    with strategy.scope():
        again = keras.models.load_model(f"{folder}/model.keras")
    found["again"] = again.evaluate(x, y, verbose=0) - loss
    fit(again)  # with what the optimizer keeps
    found["trained on"] = float(np.abs(rows_of(strategy, again) - expected).max())
    return found


def backed_up(folder: str, epochs: int) -> dict[str, Any]:
    strategy = strategy_of()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = model_of(OPTIMIZERS["adagrad"]())
    backup = tf_dgc.callbacks.BackupState(folder, delete_checkpoint=False)
    fit(model, epochs=epochs, callbacks=[backup])
    return {"rows": rows_of(strategy, model).tolist()}


def together(rank: int) -> dict[str, Any]:
    """Train with others, each its own rows."""
    strategy = strategy_of(liveness=5.0)
    with strategy.scope():
        model = model_of(OPTIMIZERS["sgd"]())
    first = rows_of(strategy, model)
    losses = fit(model, epochs=10)
    strategy.barrier()
    moved = float(np.abs(rows_of(strategy, model) - first).max())
    rows = rows_of(strategy, model).tolist()
    received = int(strategy.server_stats().received_bytes)
    return {"losses": losses, "moved": moved, "rows": rows, "received": received}


def refused(strategy: tf_dgc.DownpourStrategy) -> list[str]:
    """Return the errors of what tables cannot have."""
    told = []

    def refuse(make: Any) -> None:
        try:
            make()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("no error")

    def train(optimizer: Any = "SGD", settings: Any = None, **options: Any) -> None:
        with strategy.scope():
            kind = getattr(keras.optimizers, optimizer)
            model = model_of(kind(**(settings or {})), **options)
        fit(model)

    with strategy.scope():
        model = model_of("sgd")
    for make in (
        model.get_weights,
        lambda: model.layers[0](np.array([[ROWS, 0, 0]])),
        lambda: model.layers[0](tf.ragged.constant([[1], [2, 3]])),
        lambda: strategy.read_rows(model.layers[2].kernel, 0, 1),
        lambda: train(embeddings_regularizer="l2"),
        lambda: train(embeddings_constraint="max_norm"),
        lambda: train(embeddings_initializer="glorot_uniform"),
        lambda: train(lora_rank=2),
        lambda: train(settings={"weight_decay": 0.1}),
        lambda: train(settings={"use_ema": True}),
        lambda: train(settings={"gradient_accumulation_steps": 2}),
        lambda: fit(
            model, callbacks=[tf_dgc.callbacks.BackupState("never", save_freq=5)]
        ),
        lambda: train("Lamb"),
        lambda: train("Adafactor"),
    ):
        refuse(make)
    return told


if __name__ == "__main__":
    cases = [serve, alone, backed_up, together]
    serving.main({case.__name__: case for case in cases})
