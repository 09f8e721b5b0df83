"""Models whose workers step together at a site, and sites average: threads, eagerly."""

import os
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, outcomes, run_workers

import tf_dgc

ALL_SENT = tf_dgc.DGCConfig(sparsity=0.0, momentum_masking=False, min_elements=9)


class Clipping(keras.Model):
    """Clips the gradient by its norm, which is that of all rows."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(clipped, self.trainable_variables)
        return {"loss": loss}


class StopsAt(keras.callbacks.Callback):
    def __init__(self, batch: int | None) -> None:
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            self.model.stop_training = True


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    return x, (x[:, :1] + x[:, 1:2] > 0).astype("float32")


def made(kind: Any = keras.Model, optimizer: Any = None, **options: Any) -> Any:
    inputs = keras.Input((6,))
    normal = keras.initializers.RandomNormal(seed=1)
    hidden = keras.layers.Dense(
        5, "tanh", kernel_initializer=normal, kernel_regularizer="l2"
    )
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(hidden(inputs))
    model = kind(inputs, outputs)
    options = {"run_eagerly": True, "metrics": ["mae"]} | options
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **options)
    return model


def averaging(transport: Loopback, **settings: Any) -> Any:
    config = tf_dgc.AveragingConfig(**({"within": "dense"} | settings))
    return tf_dgc.ParameterAveragingStrategy(config, transport=transport)


def at(sites: str) -> Any:
    return mock.patch.dict(os.environ, TF_DGC_SITES=",".join(sites))


@pytest.mark.long
class SiteStepsTest(parameterized.TestCase, tf.test.TestCase):
    def assert_as_one(self, sites: str, work: Any, **settings: Any) -> None:
        def on_worker(transport: Loopback) -> Any:
            with averaging(transport, **settings).scope():
                return work()

        expected = work()
        with at(sites):
            results = run_workers(len(sites), on_worker)
        for found in results:
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    @parameterized.product(sites=("aabb", "abaa", "aab"), within=("dense", ALL_SENT))
    @pytest.mark.few(0, 1)
    def test_rounds_of_one_step_are_dense_training(
        self, sites: str, within: Any
    ) -> None:
        x, y = data(21)  # of the last batch, some workers have no row

        def work() -> Any:
            model = made()
            fit = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}
            seen = model.fit(x, y, validation_data=(x[:7], y[:7]), **fit)
            return seen.history, model.get_weights(), model.predict(x, verbose=0)

        self.assert_as_one(sites, work, within=within, period=1)

    @parameterized.parameters("sum", "ratio")
    @pytest.mark.slow
    def test_losses_of_sums_are_estimated_of_all_rows(self, how: str) -> None:
        x, y = data(24)

        def ratio(y: Any, outputs: Any) -> Any:
            return tf.reduce_sum((outputs - y) ** 2) / tf.reduce_sum(1.0 + y)

        def work() -> Any:
            # Each half of a batch is the same, so that a site knows what all have.
            rows = np.concatenate([x[:12].reshape(3, 4, 6)] * 2, 1).reshape(24, 6)
            wanted = np.concatenate([y[:12].reshape(3, 4, 1)] * 2, 1).reshape(24, 1)
            model = made(metrics=[])
            loss = keras.losses.MeanSquaredError(reduction="sum")
            sgd = keras.optimizers.SGD(0.01)
            model.compile(sgd, ratio if how == "ratio" else loss, run_eagerly=True)
            fit = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}
            seen = model.fit(rows, wanted, **fit)
            return seen.history, model.get_weights()

        self.assert_as_one("aabb", work, period=1)

    @parameterized.parameters(keras.Model, Clipping)
    @pytest.mark.slow
    def test_one_site_is_dense_training(self, kind: Any) -> None:
        x, y = data(21)

        def work() -> Any:
            optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
            model = made(kind, optimizer, metrics=None)
            fit = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}
            seen = model.fit(x, y, **fit)
            return seen.history, model.get_weights()

        self.assert_as_one("aaa", work, period=2)

    @pytest.mark.extended
    def test_a_loop_of_ones_own_divides_by_all_workers(self) -> None:
        x, y = data(24)

        def loop(strategy: Any) -> Any:
            with strategy.scope():
                model = made(metrics=[])
            workers = strategy.num_replicas_in_sync

            def step(x: Any, y: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2) / workers
                found = tape.gradient(loss, model.trainable_variables)
                model.optimizer.apply(found, model.trainable_variables)

            rank = getattr(strategy, "rank", 0)
            for start in range(0, 24, 8):
                size = 8 // workers
                rows = slice(start + rank * size, start + (rank + 1) * size)
                strategy.run(step, (tf.constant(x[rows]), tf.constant(y[rows])))
            return model.get_weights()

        expected = loop(tf.distribute.get_strategy())
        with at("aabb"):
            found = run_workers(4, lambda t: loop(averaging(t, period=1)))
        for each in found:
            self.assertAllClose(each, expected, 1e-5, 1e-5)

    @parameterized.product(
        within=("dense", tf_dgc.DGCConfig(sparsity=0.5, min_elements=9)),
        settings=({}, {"overlap": 2}, {"synchronous_steps": 2}),
    )
    @pytest.mark.few(0, 1)
    def test_all_end_alike(self, within: Any, settings: Any) -> None:
        if "synchronous_steps" in settings and within != "dense":
            return
        x, y = data(48)

        def work(transport: Loopback) -> Any:
            strategy = averaging(transport, period=3, within=within, **settings)
            with strategy.scope():
                layers = [keras.layers.Dense(5), keras.layers.BatchNormalization()]
                model = keras.Sequential([keras.Input((6,)), *layers])
                sgd = keras.optimizers.SGD(0.05, momentum=0.9)
                model.compile(sgd, "mse", run_eagerly=True)
            fit = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}
            seen = model.fit(x, y, **fit).history
            ended = model.get_weights()
            strategy.flush(model)
            kept = float(strategy.stats().residual_norm)
            return seen, ended, model.get_weights(), kept

        with at("aabb"):
            found = run_workers(4, work)
        self.assertLess(found[0][0]["loss"][1], found[0][0]["loss"][0])
        self.assertEqual(found[0][3], 0.0)
        for each in found[1:]:
            for one, two in zip(
                found[0][1] + found[0][2], each[1] + each[2], strict=True
            ):
                np.testing.assert_array_equal(one, two)
            self.assertEqual(each[0], found[0][0])

    @parameterized.product(
        asks=((None, None, None, 3), (3, 3, 3, 3), (None, 8, None, None)),
        overlap=(None, 3),
    )
    @pytest.mark.few(0, 1)
    def test_training_ends_with_a_round_whoever_asks(
        self, asks: Any, overlap: Any
    ) -> None:
        x, y = data(80)

        def work(transport: Loopback) -> Any:
            strategy = averaging(transport, period=4, overlap=overlap)
            with strategy.scope():
                model = made()
            stops = StopsAt(asks[transport.rank])
            fit = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}
            seen = model.fit(x, y, callbacks=[stops], **fit)
            return len(seen.epoch), int(model.optimizer.iterations), model.get_weights()

        def shorter(transport: Loopback) -> Any:
            with averaging(transport, period=4, overlap=overlap).scope():
                model = made()
            model.fit(x[:32], y[:32], batch_size=8, shuffle=False, verbose=0)
            return model.get_weights()

        with at("aabb"):
            found = run_workers(4, work)
            # Of all at once it is as in one process, where a round has told so in time.
            taken_back = None not in asks and overlap is None
            expected = run_workers(4, shorter)[0] if taken_back else found[0][2]
        steps = 4 if taken_back else 8 if 3 in asks and overlap is None else 10
        for each in found:
            self.assertEqual(each[:2], (1, steps))
            for one, two in zip(expected, each[2], strict=True):
                self.assertAllClose(one, two, 1e-6, 1e-6)
            for one, two in zip(found[0][2], each[2], strict=True):
                np.testing.assert_array_equal(one, two)

    @pytest.mark.extended
    def test_what_cannot_be_is_refused_before_workers_meet(self) -> None:
        for settings, why in (
            ({"within": "dgc"}, "None, 'dense', or a DGCConfig"),
            ({"within": tf_dgc.DGCConfig(exchange="owners")}, "'owners'"),
            ({"within": tf_dgc.DGCConfig(nonfinite="skip")}, "nonfinite='raise'"),
            ({"within": tf_dgc.DGCConfig(hierarchical=True)}, "hierarchical=False"),
            (
                {"within": tf_dgc.DGCConfig(), "synchronous_steps": 3},
                "synchronous_steps",
            ),
        ):
            with self.assertRaisesRegex(ValueError, f"`within` must be .*{why}"):
                tf_dgc.AveragingConfig(**settings)
        with self.assertRaisesRegex(ValueError, "two levels are not chosen"):
            tf_dgc.AutoStrategy(
                averaging=tf_dgc.AveragingConfig(within="dense"), transport="local"
            )
        config = tf_dgc.AveragingConfig(within=ALL_SENT)
        again = tf_dgc.AveragingConfig.from_config(config.get_config())
        self.assertEqual(again, config)
        with at("aab"):
            found = outcomes(2, lambda transport: averaging(transport))
        for error in found:
            self.assertIsInstance(error, ValueError)
            self.assertIn("name the site of each worker", str(error))
