"""Strategies of one worker, and what is asked of optimizers, models and GPUs."""

import contextlib
import functools
import gc
import logging
import os
import sys
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Hub, Loopback, outcomes, run_workers

import tf_dgc
from tf_dgc import optimizers
from tf_dgc.compression.dgc import Momentum
from tf_dgc.transports import base, collective, horovod
from tf_dgc.transports.local import LocalTransport

CORRECTING = tf_dgc.DGCConfig()


@pytest.mark.long
class StrategyTest(parameterized.TestCase, tf.test.TestCase):
    def test_the_config_is_a_config(self) -> None:
        with self.assertRaisesRegex(TypeError, "`config` must be a DGCConfig. Rec"):
            tf_dgc.DGCStrategy({"sparsity": 0.9})

    def test_knows_who_it_is(self) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.5)
        strategy = tf_dgc.DGCStrategy(config, transport="local")
        self.assertIsInstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.assertEqual((strategy.rank, strategy.num_replicas_in_sync), (0, 1))
        self.assertTrue(strategy.is_chief)
        self.assertIs(strategy.config, config)
        self.assertEqual(strategy.transport.name, "local")
        self.assertIsNone(tf_dgc.DenseStrategy(transport="local").config)

    def test_a_share_of_the_data_is_iterated_by_tf_data_itself(self) -> None:
        # MultiDeviceIterator, TensorFlow's own choice, crashes when it is deleted.
        strategy = tf_dgc.DenseStrategy(transport="local")
        dataset = tf.data.Dataset.range(6).batch(2)
        shared = strategy.experimental_distribute_dataset(dataset)
        self.assertIsInstance(shared, tf.distribute.DistributedDataset)
        self.assertIs(type(iter(shared)), type(iter(dataset)))

        @tf.function
        def total(batches: Any) -> tf.Tensor:
            found = tf.zeros([], tf.int64)
            for batch in batches:
                found += tf.reduce_sum(batch)
            return found

        self.assertEqual(int(total(iter(shared))), 15)

    @parameterized.parameters(
        lambda: tf_dgc.DenseStrategy(transport="local"),
        lambda: tf_dgc.DGCStrategy(tf_dgc.DGCConfig(min_elements=1), transport="local"),
        lambda: tf_dgc.ParameterAveragingStrategy(transport="local"),
    )
    @pytest.mark.few(1)
    def test_a_step_is_traced_once(self, make: Any) -> None:
        strategy = make()
        with strategy.scope():
            weights = keras.Variable(np.ones((8, 8), np.float32))
            sgd = keras.optimizers.SGD(0.1, momentum=0.9)
            sgd.build([weights])
        traced = []

        def step() -> None:
            traced.append(sgd)
            sgd.apply([tf.ones([8, 8])], [weights])

        train = tf.function(lambda: strategy.run(step), autograph=False)
        for _ in range(2):
            train()
        self.assertLen(traced, 1)

    def test_flush_applies_what_frozen_layers_are_owed(self) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
        strategy = tf_dgc.DGCStrategy(config, transport="local")
        with strategy.scope():
            layers = [keras.layers.Dense(8), keras.layers.Dense(4)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
        model.fit(x, x, batch_size=8, verbose=0)
        layers[0].trainable = False
        before = layers[0].kernel.numpy()
        self.assertGreater(float(strategy.stats().residual_norm), 0.0)
        strategy.flush(model)
        self.assertEqual(float(strategy.stats().residual_norm), 0.0)
        self.assertNotAllClose(layers[0].kernel, before)

    def test_what_is_not_compressed_for_its_type_is_told_once(self) -> None:
        strategy = tf_dgc.DGCStrategy(tf_dgc.DGCConfig(), transport="local")
        with strategy.scope():
            layers = [keras.layers.Dense(64, dtype="float64") for _ in range(2)]
            model = keras.Sequential([keras.Input((32,), dtype="float64"), *layers])
            model.compile(keras.optimizers.SGD(0.05), "mse")
        x = np.ones((8, 32))
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
        (told,) = [line for line in logs.output if "float64" in line]
        self.assertRegex(told, "only float32, .*are compressed: 6144 elements of float")

    @pytest.mark.slow
    def test_flush_applies_all_that_is_owed(self) -> None:
        # A linear loss: its gradient does not depend on the weights.
        def loss(_: Any, outputs: Any) -> Any:
            return tf.reduce_mean(outputs)

        def trained(config: tf_dgc.DGCConfig, flush: bool) -> np.ndarray:
            strategy = tf_dgc.DGCStrategy(config, transport="local")
            with strategy.scope():
                ones = {"kernel_initializer": "ones", "use_bias": False}
                model = keras.Sequential([keras.layers.Dense(6, **ones)])
                model.compile(keras.optimizers.SGD(0.1), loss)
            random = np.random.default_rng(0)
            x = random.normal(size=(64, 5)).astype(np.float32)
            model.fit(x, x, batch_size=8, epochs=2, shuffle=False, verbose=0)
            if flush:
                iterations = int(model.optimizer.iterations)
                strategy.flush(model)
                self.assertEqual(float(strategy.stats().residual_norm), 0.0)
                self.assertEqual(int(model.optimizer.iterations), iterations)
            return model.get_weights()[0]

        sparse = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
        dense = trained(tf_dgc.DGCConfig(sparsity=0.0, min_elements=1), flush=False)
        self.assertNotAllClose(trained(sparse, flush=False), dense, 1e-3, 1e-3)
        self.assertAllClose(trained(sparse, flush=True), dense, 1e-5, 1e-5)

    @parameterized.parameters("float32", "bfloat16", "mixed_bfloat16", "mixed_float16")
    @pytest.mark.few(1)
    def test_flush_keeps_constraints_in_any_type(self, policy: str) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
        strategy = tf_dgc.DGCStrategy(config, transport="local")
        with strategy.scope():
            limit = keras.constraints.MaxNorm(0.3)
            layer = keras.layers.Dense(6, kernel_constraint=limit, dtype=policy)
            model = keras.Sequential([layer, keras.layers.Dense(1, dtype=policy)])
            model.compile(keras.optimizers.SGD(0.2, momentum=0.9), "mse")
        x = np.ones((8, 5), np.float32)
        model.fit(x, 9 * x[:, :1], epochs=3, verbose=0)
        self.assertGreater(float(strategy.stats().residual_norm), 0.0)
        strategy.flush(model)
        self.assertEqual(float(strategy.stats().residual_norm), 0.0)
        norms = np.linalg.norm(np.float32(layer.kernel.numpy()), axis=0)
        self.assertAllLessEqual(norms, 0.302)

    def test_flush_is_of_all_optimizers_and_needs_no_compiled_model(self) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
        strategy = tf_dgc.DGCStrategy(config, transport="local")
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6)])
            kernel = model.trainable_variables[:1]
            pair = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]
            for optimizer in pair:
                optimizer.build(kernel)
        for optimizer in pair:
            strategy.run(optimizer.apply, ([tf.random.normal([5, 6])], kernel))
        strategy.flush(model)
        self.assertEqual(float(strategy.stats().residual_norm), 0.0)

    def test_totals_outlive_optimizers(self) -> None:
        strategy = tf_dgc.DGCStrategy(transport="local")
        for fits in (1, 2):
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(4)])
                model.compile("sgd", "mse")
            model.fit(np.ones((8, 3)), np.ones((8, 4)), verbose=0)
            del model
            gc.collect()
            total = strategy.stats(total=True)
            self.assertEqual(int(total.dense_elements), 16 * fits)

    def test_takes_a_transport_of_ones_own(self) -> None:
        class Own(LocalTransport):
            name = "own"

        transport = Own()
        self.assertIs(tf_dgc.DenseStrategy(transport=transport).transport, transport)

    @pytest.mark.extended
    def test_training_goes_on_where_a_second_model_is_trained(self) -> None:
        strategy = tf_dgc.DGCStrategy(
            tf_dgc.DGCConfig(sparsity=0.5, min_elements=1), transport="local"
        )
        for _ in range(2):
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(4)])
                model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            x = np.ones((8, 3), np.float32)
            history = model.fit(x, np.zeros((8, 4)), epochs=3, verbose=0)
            self.assertLess(history.history["loss"][-1], history.history["loss"][0])
            stats = strategy.stats()
            self.assertEqual(int(stats.dense_elements), 16)
            self.assertEqual(int(stats.sent_elements), 6 + 4)

    def test_saved_models_say_nothing_of_the_strategy(self) -> None:
        strategy = tf_dgc.DGCStrategy(transport="local")
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(64)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(np.ones((8, 3)), np.zeros((8, 64)), verbose=0)
        path = f"{self.get_temp_dir()}/model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
        self.assertEqual(loaded.optimizer.get_config()["momentum"], 0.9)
        self.assertAllEqual(loaded.get_weights()[0], model.get_weights()[0])
        self.assertLen(loaded.optimizer.variables, len(model.optimizer.variables))


class LoadedMomentumTest(parameterized.TestCase, tf.test.TestCase):
    def test_who_goes_on_without_the_momentum_of_before_is_told(self) -> None:
        folder = self.get_temp_dir()

        def made(strategy: Any, momentum: float = 0.9) -> keras.Model:
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(512)])
                model.compile(keras.optimizers.SGD(0.1, momentum=momentum), "mse")
            return model

        def fit(model: keras.Model) -> list[str]:
            with self.assertLogs("tf_dgc", "WARNING") as logs:
                logging.getLogger("tf_dgc").warning("begins")
                model.fit(np.ones((8, 3)), np.zeros((8, 512)), verbose=0)
            return [text for text in logs.output if "without their momentum" in text]

        def loaded(strategy: Any, name: str) -> keras.Model:
            with strategy.scope():
                return keras.models.load_model(f"{folder}/{name}.keras")

        strategy = tf_dgc.DGCStrategy(transport="local")
        for name, model in (
            ("compressed", made(strategy)),
            ("none", made(strategy, 0.0)),
            ("plain", made(tf.distribute.get_strategy())),
        ):
            self.assertEmpty(fit(model) + fit(model))
            model.save(f"{folder}/{name}.keras")
        (told,) = fit(loaded(strategy, "compressed"))
        self.assertIn("has taken 2 steps before", told)
        dense = tf_dgc.DenseStrategy(transport="local")
        for other, name in ((strategy, "none"), (strategy, "plain"), (dense, "plain")):
            self.assertEmpty(fit(loaded(other, name)))


class OverwritingTest(parameterized.TestCase, tf.test.TestCase):
    """`ema_overwrite_frequency`, between threads."""

    def trained(self, strategy: Any, rank: int = 0) -> np.ndarray:
        """Return the weights after seven steps, of which two overwrite them."""
        workers = strategy.num_replicas_in_sync
        with strategy.scope():
            weights = keras.Variable(np.zeros((4, 1), "float32"))
            average = {"use_ema": True, "ema_momentum": 0.8}
            optimizer = keras.optimizers.SGD(
                0.1, momentum=0.9, ema_overwrite_frequency=3, **average
            )
            optimizer.build([weights])

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.matmul(x, weights) - 1.0) ** 2) / workers
            optimizer.apply([tape.gradient(loss, weights.value)], [weights])

        x = np.random.default_rng(0).normal(size=(7, workers, 8 // workers, 4))
        for batch in x.reshape(7, workers, -1, 4).astype("float32"):
            strategy.run(step, (batch[rank],))
        return weights.numpy()

    @parameterized.parameters("dense", "dgc", "averaging")
    @pytest.mark.long
    def test_weights_are_overwritten_as_on_one_worker(self, name: str) -> None:
        def strategy_of(transport: Any) -> Any:
            everything = tf_dgc.DGCConfig(
                sparsity=0.0, min_elements=1, momentum_masking=False
            )
            each = tf_dgc.AveragingConfig(period=1, average_slots=True)
            return {
                "dense": lambda: tf_dgc.DenseStrategy(transport=transport),
                "dgc": lambda: tf_dgc.DGCStrategy(everything, transport=transport),
                "averaging": lambda: tf_dgc.ParameterAveragingStrategy(
                    each, transport=transport
                ),
            }[name]()

        expected = self.trained(tf.distribute.get_strategy())
        self.assertAllClose(self.trained(strategy_of("local")), expected, 1e-6, 1e-6)
        for found in run_workers(2, lambda t: self.trained(strategy_of(t), t.rank)):
            self.assertAllClose(found, expected, 1e-5, 1e-5)


def numbers(length: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(2 * max(length, 1)).batch(2).take(length)


LENGTHS = {
    "3": numbers(3),
    "4": numbers(4),
    "0": numbers(0),
    "'unknown'": numbers(3).filter(lambda _: True),
    "'endless'": numbers(3).repeat(),
}


class LengthTest(parameterized.TestCase, tf.test.TestCase):
    """How many batches the workers have, between threads."""

    def outcomes(self, *names: str) -> list[Any]:
        def work(transport: Loopback) -> None:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            strategy.extended.used = True
            strategy.experimental_distribute_dataset(LENGTHS[names[transport.rank]])

        return outcomes(len(names), work)

    @parameterized.parameters(*LENGTHS)
    def test_is_the_same(self, name: str) -> None:
        self.assertEqual(self.outcomes(name, name), [None, None])

    @parameterized.parameters(*LENGTHS)
    def test_is_refused_where_it_is_not(self, name: str) -> None:
        other = "4" if name == "3" else "3"
        for error in self.outcomes(other, name):
            self.assertIsInstance(error, ValueError)
            self.assertIn(
                "All workers must have the same data. Received: `number of batches` "
                f"differs: {other} on ranks [0]; {name} on ranks [1].",
                str(error),
            )


_HAS_MUON = hasattr(keras.optimizers, "Muon")  # since Keras 3.11


class Weighted(keras.optimizers.SGD):
    """Changes what SGD does with a gradient."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(2.0 * gradient, variable, learning_rate)


@pytest.mark.long
class OptimizersTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (keras.optimizers.SGD(momentum=0.9), Momentum(0.9, False, 0.1)),
        (keras.optimizers.SGD(momentum=0.5, nesterov=True), Momentum(0.5, True, 0.1)),
        (keras.optimizers.SGD(), Momentum(0.0, False, 0.1)),
        (keras.optimizers.Adam(), None),
        (Weighted(0.1, momentum=0.9), None),
        *([(keras.optimizers.Muon(), None)] if _HAS_MUON else []),
    )
    @pytest.mark.few(2)
    def test_the_step_is_taken_over_from_plain_sgd(
        self, optimizer: Any, expected: Momentum | None
    ) -> None:
        self.assertEqual(optimizers.momentum_of(optimizer, 0.1), expected)

    def test_suspended_momentum_comes_back_whatever_happens(self) -> None:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        with (
            contextlib.suppress(KeyError),
            optimizers.suspended_momentum(optimizer),
        ):
            self.assertEqual(optimizer.momentum, 0.0)
            raise KeyError
        self.assertEqual(optimizer.momentum, 0.9)

    @parameterized.parameters(
        (keras.optimizers.SGD(0.1, momentum=0.9), CORRECTING, []),
        (keras.optimizers.Adam(), None, []),
        (keras.optimizers.Adam(), tf_dgc.AveragingConfig(), []),
        (keras.optimizers.Adam(), tf_dgc.DGCConfig(momentum_correction=False), []),
        (keras.optimizers.Adam(), CORRECTING, []),
        (Weighted(0.1), CORRECTING, []),
        (keras.optimizers.Ftrl(), CORRECTING, ["accumulated, and not its own steps"]),
        (
            keras.optimizers.SGD(clipnorm=2.0),
            CORRECTING,
            [r"\(clipnorm=2.0\), before.*DGCConfig\(clip_norm"],
        ),
        (
            keras.optimizers.Adam(global_clipnorm=2.0),
            CORRECTING,
            [r"\(global_clipnorm=2.0\), before"],
        ),
        (keras.optimizers.SGD(clipvalue=2.0), None, []),
        (keras.optimizers.Adam(clipnorm=2.0), tf_dgc.AveragingConfig(), []),
    )
    def test_warnings(self, optimizer: Any, config: Any, found: list) -> None:
        warnings = optimizers.warnings_about(optimizer, 2, config)
        self.assertLen(warnings, len(found))
        for warning, pattern in zip(warnings, found, strict=True):
            self.assertRegex(warning, pattern)

    def test_a_warning_is_given_once(self) -> None:
        strategy = tf_dgc.DGCStrategy(transport="local")
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            for _ in range(2):
                with strategy.scope():
                    model = keras.Sequential([keras.layers.Dense(1)])
                    model.compile(keras.optimizers.Ftrl(name="a"), "mse")
                model.fit(np.ones((8, 3)), np.zeros((8, 1)), verbose=0)
        self.assertLen(logs.output, 1)

    def test_steps_and_updates_of_another_keras_are_refused(self) -> None:
        # As tf_keras has them, which need not be installed.
        def run_step(data: Any) -> None:
            self.fail("it ran")

        run_step.__module__ = "tf_keras.src.engine.training"

        class OfKeras2:
            def update(self, strategy: Any, gradients: Any) -> None:
                self.fail("it ran")

            def apply(self, gradient: Any) -> None:
                context = tf.distribute.get_replica_context()
                context.merge_call(functools.partial(self.update), (gradient,))

        OfKeras2.__module__ = "tf_keras.src.optimizers.optimizer"

        class Own(OfKeras2):
            pass

        plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        strategy = tf_dgc.DGCStrategy(transport="local")
        with strategy.scope():
            variable = tf.Variable(1.0)
        one = tf.constant(1.0)
        for step, module in (
            (lambda: strategy.run(run_step, (one,)), "engine.training"),
            (lambda: strategy.run(tf.function(run_step), (one,)), "engine.training"),
            (lambda: strategy.run(Own().apply, (one,)), "optimizers.optimizer"),
            (
                lambda: strategy.run(lambda: Own().apply(one)),
                "optimizers.optimizer",
            ),
            (
                lambda: strategy.run(lambda: plain.apply_gradients([(one, variable)])),
                "tensorflow.python.training.optimizer",
            ),
        ):
            with self.assertRaisesRegex(
                ValueError,
                rf"must be those of Keras 3;.* Received: what .*{module} defines\. "
                "Use `keras` in the place of `tf_keras`",
            ):
                step()
        self.assertEqual(float(variable), 1.0)

    def test_one_worker_may_use_xla(self) -> None:
        strategy = tf_dgc.DenseStrategy(transport="local")
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=True)
        model.fit(np.ones((8, 3)), np.zeros((8, 1)), verbose=0)

    def test_nor_may_what_exchanges(self) -> None:
        model = mock.Mock(jit_compile=True)
        for strategy in (
            mock.Mock(transport=mock.Mock(size=2), config=None),
            tf_dgc.DGCStrategy(transport="local"),
            tf_dgc.ParameterAveragingStrategy(transport="local"),
        ):
            with self.assertRaisesRegex(ValueError, "`jit_compile` must not be True:"):
                optimizers.check_model(model, strategy)

    def test_a_wrapped_optimizer_is_looked_into(self) -> None:
        inner = keras.optimizers.SGD()
        strategy = tf_dgc.DenseStrategy(transport="local")
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
        with self.assertRaisesRegex(
            ValueError, r"'(?i:sgd)\w*' was made outside the scope"
        ):
            optimizers.check_model(model, strategy)


class GpuTest(parameterized.TestCase, tf.test.TestCase):
    def claim(
        self, gpus: list, visible: list, rank: int, workers: int, late: bool = False
    ) -> list:
        """Return the calls of `set_visible_devices` with GPUs that are not there."""
        with (
            mock.patch.object(tf.config, "list_physical_devices", return_value=gpus),
            mock.patch.object(tf.config, "get_visible_devices", return_value=visible),
            mock.patch.object(tf.config, "set_visible_devices") as claimed,
        ):
            claimed.side_effect = RuntimeError if late else None
            base.claim_gpu(rank, workers)
        return claimed.call_args_list

    def test_each_worker_takes_the_gpu_of_its_local_rank(self) -> None:
        gpus = ["g0", "g1", "g2"]
        for rank in range(3):
            self.assertEqual(
                self.claim(gpus, gpus, rank, 3), [mock.call(gpus[rank], "GPU")]
            )

    def test_what_the_user_chose_stays(self) -> None:
        for visible in ([], ["g1"], ["g1", "g2"]):
            self.assertEqual(self.claim(["g0", "g1", "g2"], visible, 0, 2), [])

    def test_nothing_is_claimed_where_there_is_no_choice(self) -> None:
        self.assertEqual(self.claim([], [], 1, 2), [])
        self.assertEqual(self.claim(["g0"], ["g0"], 1, 2), [])

    def test_more_workers_than_gpus_share_them_and_are_told(self) -> None:
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            calls = self.claim(["g0", "g1"], ["g0", "g1"], 3, 4)
        self.assertEqual(calls, [mock.call("g1", "GPU")])
        self.assertIn("4 workers share the 2 GPUs", logs.output[0])

    def test_too_late_to_claim_is_told(self) -> None:
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            self.claim(["g0", "g1"], ["g0", "g1"], 1, 2, late=True)
        self.assertIn("TensorFlow has already started", logs.output[0])

    @parameterized.parameters(
        tf_dgc.DenseStrategy, tf_dgc.DGCStrategy, tf_dgc.ParameterAveragingStrategy
    )
    @pytest.mark.long
    def test_keras_does_not_choose_xla_beside_a_gpu(self, make: Any) -> None:
        strategy = make(transport=Loopback(Hub(1), 0))
        devices = tf.config.list_physical_devices()
        gpu = mock.Mock(device_type="GPU")
        with mock.patch.object(
            tf.config, "list_physical_devices", lambda kind=None: [*devices, gpu]
        ):
            plain = keras.Sequential([keras.layers.Dense(1)])
            plain.compile("sgd", "mse")
            self.assertTrue(plain.jit_compile)
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(1)])
                model.compile("sgd", "mse", jit_compile="auto")
        self.assertFalse(model.jit_compile)
        model.fit(np.ones((8, 3)), np.zeros((8, 1)), verbose=0)

    def test_the_kind_of_collectives(self) -> None:
        known = tf.distribute.experimental.CommunicationImplementation
        name, visible = "TF_DGC_COLLECTIVES", "get_visible_devices"
        for text, found in (
            ("", known.AUTO),
            ("ring", known.RING),
            ("AUTO", known.AUTO),
        ):
            with mock.patch.dict("os.environ", {name: text}):
                self.assertEqual(collective.implementation(), found)
        with mock.patch.dict("os.environ", {name: "mpi"}):
            with self.assertRaisesRegex(
                ValueError, "one of AUTO, RING, NCCL. Received"
            ):
                collective.implementation()
        with mock.patch.dict("os.environ", {name: "nccl"}):
            error = "sees none. Received: TF_DGC_COLL"
            with mock.patch.object(tf.config, visible, return_value=[]):
                with self.assertRaisesRegex(ValueError, error):
                    collective.implementation()
            with mock.patch.object(tf.config, visible, return_value=["g0"]):
                self.assertEqual(collective.implementation(), known.NCCL)

    def test_horovod_without_nccl_works_on_the_host_and_says_so(self) -> None:
        without = mock.Mock(**{"nccl_built.return_value": 0})
        with self.assertLogs("tf_dgc", "INFO") as logs:
            self.assertEqual(
                horovod.wire_device(without, "/device:GPU:0"), "/device:CPU:0"
            )
        self.assertIn("HOROVOD_GPU_OPERATIONS=NCCL", logs.output[0])
        with self.assertNoLogs("tf_dgc", "INFO"):
            nccl = mock.Mock(**{"nccl_built.return_value": 22104})
            self.assertEqual(
                horovod.wire_device(nccl, "/device:GPU:0"), "/device:GPU:0"
            )
            self.assertEqual(
                horovod.wire_device(without, "/device:CPU:0"), "/device:CPU:0"
            )


class NoHorovodTest(tf.test.TestCase):
    def test_a_missing_horovod_says_how_to_get_it(self) -> None:
        # None in sys.modules makes an import raise ImportError.
        names = {"horovod": None, "horovod.tensorflow": None}
        with (
            mock.patch.dict(sys.modules, names),
            mock.patch.dict("os.environ"),
            self.assertRaisesRegex(ImportError, "run scripts/install_horovod.sh"),
        ):
            horovod.initialize(10.0)

    def test_half_of_what_horovodrun_tells_names_what_is_missing(self) -> None:
        half = {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}
        hvd = mock.Mock(**{"size.return_value": 2, "rank.return_value": 0})
        modules = {"horovod": mock.Mock(tensorflow=hvd), "horovod.tensorflow": hvd}
        with (
            mock.patch.dict(sys.modules, modules),
            mock.patch.dict("os.environ", half, clear=True),
        ):
            with self.assertRaisesRegex(
                RuntimeError,
                "Received: HOROVOD_SIZE=2, no HOROVOD_GLOO_RENDEZVOUS_ADDR, no .*_PORT",
            ):
                horovod.initialize(10.0)
            hvd.init.assert_not_called()
            os.environ["OMPI_COMM_WORLD_SIZE"] = "2"  # MPI tells the rest
            self.assertEqual(horovod.initialize(10.0), (0, 2))

    def test_one_without_mpi_does_not_take_processes_of_srun_for_jobs(self) -> None:
        alone = mock.Mock(**{"size.return_value": 1, "rank.return_value": 0})
        modules = {"horovod": mock.Mock(tensorflow=alone), "horovod.tensorflow": alone}
        with mock.patch.dict(sys.modules, modules), mock.patch.dict("os.environ"):
            for name in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
                os.environ.pop(name, None)
            os.environ["SLURM_STEP_NUM_TASKS"] = "1"
            self.assertEqual(horovod.initialize(10.0), (0, 1))
            os.environ["SLURM_STEP_NUM_TASKS"] = "3"
            with self.assertRaisesRegex(
                RuntimeError, r"hvd.size\(\)=1, SLURM_STEP_NUM_TASKS=3\. Use horovodrun"
            ):
                horovod.initialize(10.0)


if __name__ == "__main__":
    tf.test.main()
