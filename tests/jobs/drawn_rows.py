"""Random numbers with a seed, of rows: run by the workers of `pool.py`, or threads."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

ROWS, BATCH = 17, 8  # of the last batch only rank 0 has a row
SEED = (3, 1)
KINDS = (
    "normal uniform integers truncated gamma poisson binomial categorical "
    "parameterized of_keras flipped dropped split looped drawn_twice same"
).split()


def noise(kind: str, x: tf.Tensor) -> tf.Tensor:
    """Return what is drawn for rows: shape [rows, 1] or [rows, 4]."""
    rows, stateless = tf.shape(x)[0], tf.random
    if kind == "normal":
        return stateless.stateless_normal([rows, 1], SEED)
    if kind == "uniform":
        return stateless.stateless_uniform(tf.shape(x), SEED, -1.0, 2.0)
    if kind == "integers":
        drawn = stateless.stateless_uniform([rows, 4], SEED, 0, 9, tf.int32)
        return tf.cast(drawn, tf.float32) / 9.0
    if kind == "truncated":
        return stateless.stateless_truncated_normal([rows, 1], SEED)
    if kind == "gamma":
        return stateless.stateless_gamma([rows, 4], SEED, alpha=1.0 + x**2)
    if kind == "poisson":
        return stateless.stateless_poisson([rows, 1], SEED, 3.0 + x[:, :1], tf.float32)
    if kind == "binomial":
        half = tf.fill([rows, 1], 0.5)
        return stateless.stateless_binomial([rows, 1], SEED, 8.0, half, tf.float32)
    if kind == "categorical":
        return tf.cast(stateless.stateless_categorical(x, 4, SEED), tf.float32) / 4.0
    if kind == "parameterized":
        draw = stateless.stateless_parameterized_truncated_normal
        return draw([rows, 4], SEED, x, 1.0, x - 1.0, x + 2.0)
    if kind == "of_keras":
        return keras.random.normal((rows, 1), seed=5)
    if kind == "flipped":
        images = tf.reshape(x, [-1, 2, 2, 1])
        flipped = tf.image.stateless_random_flip_left_right(images, SEED)
        return tf.reshape(flipped, [-1, 4])
    if kind == "dropped":
        return keras.random.dropout(x, 0.5, seed=4)
    if kind == "split":
        seeds = tf.random.split(SEED, num=2)
        return stateless.stateless_normal([rows, 1], seeds[1])
    if kind == "looped":

        def add(i: tf.Tensor, sums: tf.Tensor) -> Any:
            drawn = stateless.stateless_normal(tf.shape(sums), tf.stack([7, i]))
            return i + 1, sums + drawn

        begin = tf.constant(0), tf.zeros_like(x)
        return tf.while_loop(lambda i, _: i < 3, add, begin)[1]
    if kind == "drawn_twice":
        one = stateless.stateless_normal([rows, 1], SEED)
        return one * stateless.stateless_normal([rows, 1], SEED)
    return tf.reduce_sum(stateless.stateless_normal([3, 4], SEED), 0, keepdims=True)


class Noisy(keras.Model):
    """Adds random numbers, for which it has a seed, wherever it is called."""

    kinds: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.dense(x + sum(noise(kind, x) for kind in self.kinds))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - y + noise(self.kinds[0], x)[:, :1]
            loss = tf.reduce_mean(error**2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    return x, x[:, :1]


def used(*kinds: str, eager: bool = False, whole: bool = False) -> dict[str, Any]:
    """Train, evaluate and predict; `whole` batches have a size that shapes tell."""
    model = Noisy()
    model.kinds = kinds
    model.compile(keras.optimizers.SGD(1e-4), "mse", run_eagerly=eager)
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH, whole)
    history = model.fit(batches, verbose=0).history
    found = model.evaluate(batches, verbose=0)
    predicted = model.predict(batches.map(lambda x, y: x), verbose=0)
    alone = model.predict_on_batch(data()[0])
    weights = [array.tolist() for array in model.get_weights()]
    return {
        "loss": history["loss"],
        "evaluated": found,
        "predicted": predicted.tolist(),
        "alone": alone.tolist(),
        "weights": weights,
    }


def all_used(whole: bool) -> dict[str, Any]:
    """Return the same of all kinds together, on a worker of several."""
    with tf_dgc.DenseStrategy().scope():
        return used(*KINDS, whole=whole)
