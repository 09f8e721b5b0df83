"""Models with split layers and without: run by the workers of `pool.py`.

What is returned does not depend on the number of workers.
"""

from collections.abc import Callable
from typing import Any

import features
import keras
import numpy as np
import tensorflow as tf

import tf_dgc

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01),
    "accumulated": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.05, clipvalue=0.01),
    "averaged": lambda: keras.optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.9),
}


def data(rows: int = 90) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 6, 6, 1)).astype("float32")
    return x, random.integers(0, 5, rows).astype("int32")


def network() -> keras.Model:
    """Return a model of odd sizes; a layer of three units is used twice."""
    twice = keras.layers.Dense(7, activation="tanh", name="twice")
    inputs = keras.Input((6, 6, 1))
    x = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    x = keras.layers.Dense(3, name="of_pixels")(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(
        33,
        activation="relu",
        kernel_regularizer=keras.regularizers.L2(1e-2),
        kernel_constraint=keras.constraints.MaxNorm(1.0),
        name="regular",
    )(x)
    x = keras.layers.Dense(7, use_bias=False, name="without_bias")(x)
    x = twice(twice(x))
    return keras.Model(inputs, keras.layers.Dense(5, name="last")(x))


def is_dense(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Dense)


def numbers(variables: Any) -> list[list[float]]:
    found = [v.numpy() for v in variables if "seed" not in v.path]
    return [np.asarray(each, np.float64).ravel().tolist() for each in found]


def trained(
    strategy: str,
    transport: str,
    optimizer: str,
    batch: int = 20,
    policy: str = "float32",
) -> dict[str, Any]:
    """Train for 4 epochs; return what is known of it.

    Without a strategy the model is not split.
    """
    own = features.STRATEGIES[strategy](transport)
    split = own is not None
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    x, y = data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with features.scope(own):
        model = network()
        if split:
            model = tf_dgc.split_dense(model, 1)
        model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"])
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    history = model.fit(batches, epochs=4, verbose=0, shuffle=False)
    evaluated = model.evaluate(x, y, batch_size=20, verbose=0)
    predicted = model.predict(x[:21], batch_size=20, verbose=0)
    whole = tf_dgc.joined(model) if split else model
    kernels = [
        (*layer.kernel.shape, getattr(layer, "by", "none"))
        for layer in model.layers
        if is_dense(layer)
    ]
    return {
        "kernels": kernels,
        "classes": sorted({type(layer).__name__ for layer in whole.layers}),
        "weights": numbers(whole.variables),
        "slots": numbers(whole.optimizer.variables),
        "history": {k: [float(v) for v in h] for k, h in history.history.items()},
        "evaluated": [float(v) for v in evaluated],
        "predicted": predicted.ravel().tolist(),
    }
