"""Steps in which a worker has no rows: run by the workers of `pool.py`, or threads."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

ROWS, BATCH = 17, 8  # of the last batch only rank 0 has a row


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    return x, random.normal(size=(ROWS, 3)).astype("float32")


class Teaching(keras.Model):
    """Trains a student, whose weights a teacher follows; keeps and counts."""

    def __init__(self) -> None:
        super().__init__()
        ones = {"kernel_initializer": "ones"}
        self.student = keras.Sequential(
            [keras.layers.BatchNormalization(), keras.layers.Dense(3, **ones)]
        )
        self.teacher = keras.layers.Dense(3, trainable=False, **ones)
        self.count = self.add_weight(name="count", trainable=False, initializer="zeros")
        self.queue = self.add_weight(
            name="queue", shape=(4, 3), trainable=False, initializer="zeros"
        )
        self.rows = tf.Variable(0.0, trainable=False)

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.student(x, training=training)

    def train_step(self, given: Any) -> Any:
        x, y = given
        seen = self.teacher(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        variables = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        dense = self.student.layers[-1]
        for old, new in zip(self.teacher.weights, dense.weights, strict=True):
            old.assign(0.9 * old + 0.1 * new)
        self.count.assign_add(1.0)
        self.queue.assign(tf.concat([seen, self.queue], axis=0)[:4])
        self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return {"loss": loss}


class InAFunction(Teaching):
    """The same, as older recipes have it."""

    @tf.function
    def train_step(self, given: Any) -> Any:
        return super().train_step(given)


def taught(in_a_function: bool = False, **settings: Any) -> dict[str, Any]:
    """Train, in the scope of a strategy or of none; return what became of the model."""
    x, y = data()
    model = InAFunction() if in_a_function else Teaching()
    model.compile(keras.optimizers.SGD(0.1), **settings)
    for layer in (model.student, model.teacher):
        layer.build((None, 4))
    fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, **fit)
    return {
        "student": [v.numpy() for v in model.student.trainable_variables],
        "teacher": model.teacher.get_weights(),
        "count": float(model.count),
        "moving mean": model.student.layers[0].moving_mean.numpy(),
        "rows": float(model.rows),
    }


def found() -> list[dict[str, list[Any]]]:
    """Return the same, of steps in a graph, in a function of it, and in a loop."""
    strategy = tf_dgc.DenseStrategy()
    with strategy.scope():
        results = [
            taught(),
            taught(in_a_function=True),
            taught(steps_per_execution=3),
        ]
    as_lists = lambda v: np.asarray(v).tolist()  # noqa: E731
    return [
        {k: [as_lists(v) for v in tf.nest.flatten(r)] for k, r in each.items()}
        for each in results
    ]


class OfTexts(keras.Model):
    """Reads numbers, of which an empty text is none; tells a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3, kernel_initializer="ones")

    def call(self, texts: Any) -> Any:
        return self.dense(tf.strings.to_number(texts))

    def predict_step(self, given: Any) -> Any:
        texts, _, _ = keras.utils.unpack_x_y_sample_weight(given)
        return self(texts), tf.fill([tf.shape(texts)[0], 1], 0.5)


def of_texts() -> dict[str, Any]:
    """Train and predict, in the scope of a strategy or of none."""
    x, y = data()
    texts = tf.constant(np.char.mod("%.6f", x))
    batches = tf.data.Dataset.from_tensor_slices((texts, y)).batch(BATCH)
    model = OfTexts()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    losses = model.fit(batches, epochs=2, verbose=0).history["loss"]
    outputs, halves = model.predict(batches, verbose=0)
    return {
        "losses": losses,
        "evaluated": model.evaluate(batches, verbose=0),
        "outputs": outputs.tolist(),
        "halves": halves.tolist(),
    }


def found_of_texts() -> dict[str, Any]:
    """Return the same, of a worker."""
    with tf_dgc.DenseStrategy().scope():
        return of_texts()
