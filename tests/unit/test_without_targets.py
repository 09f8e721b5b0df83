"""Data without targets, which steps make themselves: loopback against one process."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from loopback import in_scopes


class Masked(keras.Model):
    """Hides a part of its inputs, and has them as targets."""

    def __init__(self) -> None:
        super().__init__()
        ones = {"kernel_initializer": "ones"}
        self.hidden = keras.layers.Dense(3, "tanh", **ones)
        self.last = keras.layers.Dense(4, **ones)

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))

    def train_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            p = self(x * tf.constant([1.0, 0.0, 1.0, 0.0]), training=True)
            loss = self.compute_loss(y=x, y_pred=p)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(x, x, p, None) | {"seen": loss}

    def test_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        p = self(x)
        loss = self.compute_loss(y=x, y_pred=p)
        return self.compute_metrics(x, x, p, None) | {"seen": loss}


def fitted() -> Any:
    """Train, evaluate and predict; of fewer rows than workers, too."""
    x = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
    model = Masked()
    sgd = keras.optimizers.SGD(0.1)
    model.compile(sgd, "mse", metrics=["mae"], run_eagerly=True)
    batches = tf.data.Dataset.from_tensor_slices(x).batch(6)
    history = model.fit(batches, epochs=2, verbose=0).history
    told, predicted = [], []
    for rows in (1, 2, 13):
        options = {"batch_size": 12, "verbose": 0}
        told.append(model.evaluate(x[:rows], return_dict=True, **options))
        predicted.append(model.predict(x[:rows], **options))
    return history, told, predicted, model.get_weights()


class Transitions(Masked):
    """Is trained by elements of more parts than Keras has names for."""

    def train_step(self, data: Any) -> Any:
        state, reward, other, weight = data
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(self(state) - self(other), 1) - reward
            loss = tf.reduce_mean(weight * tf.square(errors))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def of_four_parts() -> Any:
    """Train by elements of four parts."""
    random = np.random.default_rng(0)
    shapes = (13, 4), (13,), (13, 4), (13,)
    parts = [random.normal(size=shape).astype("float32") for shape in shapes]
    model = Transitions()
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    batches = tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(6)
    history = model.fit(batches, verbose=0).history
    return history, model.get_weights()


class Retrieval(Masked):
    """Takes two parts of an element for one input, as its step alone knows."""

    def call(self, both: Any) -> Any:
        users, items = both["users"], both["items"]
        return tf.reduce_sum(super().call(users) * super().call(items), -1)

    def train_step(self, data: Any) -> Any:
        users, items, wanted = data
        with tf.GradientTape() as tape:
            scores = self({"users": users, "items": items})
            loss = tf.reduce_mean(tf.square(scores - wanted))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def of_three_parts() -> Any:
    """Train by elements of three parts, which are no inputs, targets and weights."""
    random = np.random.default_rng(0)
    shapes = (13, 4), (13, 4), (13,)
    parts = [random.normal(size=shape).astype("float32") for shape in shapes]
    model = Retrieval()
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    batches = tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(6)
    history = model.fit(batches, verbose=0).history
    return history, model.get_weights()


@pytest.mark.long
class WithoutTargetsTest(tf.test.TestCase):
    @pytest.mark.extended
    def test_steps_that_make_their_targets_are_those_of_one_process(self) -> None:
        expected = fitted()
        for found in in_scopes(3, lambda strategy: fitted()):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    def test_elements_of_four_parts_are_those_of_one_process(self) -> None:
        expected = of_four_parts()
        for found in in_scopes(2, lambda strategy: of_four_parts()):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    def test_parts_that_a_step_alone_knows_are_those_of_one_process(self) -> None:
        expected = of_three_parts()
        for found in in_scopes(2, lambda strategy: of_three_parts()):
            self.assertAllClose(found, expected, 1e-5, 1e-5)


if __name__ == "__main__":
    tf.test.main()
