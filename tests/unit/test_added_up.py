"""Metrics of users: what workers keep adds up, or is told by name."""

import logging
from typing import Any

import features
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras import ops
from loopback import in_scopes

from tf_dgc import simulate
from tf_dgc._host import operations


class Kept(keras.metrics.Metric):
    """Keeps one number, in one of several ways."""

    def __init__(self, how: str, aggregation: str = "sum") -> None:
        super().__init__(name=f"{how}_{aggregation}")
        self.how = how
        self.kept = self.add_variable((), "zeros", aggregation=aggregation, name=how)

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        errors, rows = ops.square(y - p), ops.cast(ops.shape(y)[0], "float32")
        mask = ops.cast(y > 0, "float32")
        kept = self.kept
        if self.how == "sum":
            kept.assign(kept + ops.sum(errors))
        elif self.how == "rows":
            kept.assign_add(rows)
        elif self.how == "rows of means":
            kept.assign_add(rows * ops.mean(errors))
        elif self.how == "chosen":
            kept.assign_add(ops.sum(ops.where(y > 0, errors, 0.0)) - ops.sum(mask))
        elif self.how == "largest":
            kept.assign(ops.maximum(kept, ops.max(ops.abs(y))))
        elif self.how == "steps":
            kept.assign_add(1.0)
        elif self.how == "means":
            kept.assign_add(ops.mean(errors))
        elif self.how == "last":
            kept.assign(ops.mean(y))
        elif self.how == "moving":
            kept.assign_add(0.5 * (ops.mean(y) - kept))
        elif self.how == "means of chosen":
            kept.assign_add(rows * ops.sum(errors * mask) / ops.sum(mask))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.kept)


class Perplexity(keras.metrics.Metric):
    """Calls a loss of Keras that is a sum, and divides by what it counts."""

    def __init__(self) -> None:
        super().__init__(name="perplexity")
        self.entropy = keras.losses.BinaryCrossentropy(
            from_logits=True, reduction="sum"
        )
        self.total = self.add_weight((), "zeros", name="total")
        self.count = self.add_weight((), "zeros", name="count")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(self.entropy(ops.sigmoid(y), p))
        self.count.assign_add(ops.cast(ops.shape(y)[0], "float32"))

    def result(self) -> Any:
        return ops.exp(ops.divide_no_nan(self.total, self.count))


SUMS = ("sum", "rows", "rows of means", "chosen")
OTHERS = ("largest", "steps", "means", "last", "moving", "means of chosen")


def fitted(eager: bool) -> dict[str, float]:
    """Return what metrics tell of one epoch."""
    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(inputs)
    model = keras.Model(inputs, outputs)
    own = [Kept(how) for how in (*SUMS, *OTHERS)]
    told = [Kept("largest", "mean"), Kept("largest", "only_first_replica")]
    known = ["mae", keras.metrics.R2Score(), keras.metrics.RootMeanSquaredError()]
    metrics = [*own, *told, *known, Perplexity()]
    sgd = keras.optimizers.SGD(0.01)
    model.compile(sgd, "mse", metrics=metrics, run_eagerly=eager)
    x, y = features.regression(18)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    return {k: v[0] for k, v in model.fit(x, y, **fit).history.items()}


@pytest.mark.long
class AddedUpTest(parameterized.TestCase, tf.test.TestCase):
    def check_told(self, lines: list[str]) -> None:
        told = [line for line in lines if "does not add up" in line]
        self.assertLen(told, len(OTHERS))
        for how in OTHERS:
            self.assertTrue(any(f"metric '{how}_sum' keeps in" in x for x in told), how)

    @pytest.mark.extended
    def test_what_adds_up_is_that_of_one_process_and_all_else_is_told(self) -> None:
        expected = fitted(True)
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            results = in_scopes(2, lambda strategy: fitted(True))
        self.check_told(logs.output)
        alike = [*(f"{how}_sum" for how in SUMS), "mae", "loss", "perplexity"]
        for found in results:
            for name in [*alike, "r2_score", "root_mean_squared_error"]:
                self.assertAllClose(found[name], expected[name], 1e-5, 1e-5, msg=name)
        y = np.abs(features.regression(18)[1])
        of_first = np.concatenate([y[:4], y[8:12], y[16:17]]).max()
        of_second = np.concatenate([y[4:8], y[12:16], y[17:]]).max()
        for found in results:
            self.assertAllClose(found["largest_only_first_replica"], of_first)
            self.assertAllClose(found["largest_mean"], (of_first + of_second) / 2)

    @pytest.mark.extended
    def test_so_it_is_told_of_a_step_that_is_traced(self) -> None:
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            with simulate.SimulatedStrategy(2).scope():
                fitted(False)
        self.check_told(logs.output)


class WritesTest(tf.test.TestCase):
    def test_those_of_a_function_within_a_step_are_found(self) -> None:
        variable, found = tf.Variable(0.0), []

        @tf.function
        def within() -> None:
            variable.assign_add(1.0)

        @tf.function
        def step() -> None:
            with operations.recorded() as writes:
                within()
                found.extend(writes())

        step()
        self.assertEqual([w.handle is variable.handle for w in found], [True])


MIXING = {
    "centred": lambda: keras.layers.Lambda(
        lambda x: x - tf.reduce_mean(x, axis=0, keepdims=True)
    ),
    "normalized": keras.layers.BatchNormalization,  # in training only, as is known
    "by rows": lambda: keras.layers.Lambda(
        lambda x: x - tf.reduce_mean(x, axis=1, keepdims=True)
    ),
}


@pytest.mark.long
class MetRowsTest(parameterized.TestCase, tf.test.TestCase):
    """Metrics and predictions that depend on which rows a worker has."""

    @parameterized.parameters(list(MIXING))
    @pytest.mark.few(0, 1)
    def test_are_told_where_a_model_adds_up_rows(self, mixing: str) -> None:
        x, y = features.regression(8)

        def work(_: Any) -> None:
            layers = [MIXING[mixing](), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input(x.shape[1:]), *layers])
            model.compile("sgd", "mse", metrics=["mae"])
            model.fit(x, y, batch_size=4, verbose=0, validation_data=(x, y))
            model.predict(x, verbose=0)

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            logging.getLogger("tf_dgc").warning("None.")
            in_scopes(2, work)
        told = [line for line in logs.output if "over the rows of a batch" in line]
        self.assertLen(told, 2 if mixing == "centred" else 0)


if __name__ == "__main__":
    tf.test.main()
