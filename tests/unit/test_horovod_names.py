"""Scripts written for Horovod: its names, keywords and callbacks, in one process."""

import logging
import os
import tempfile
import threading
import unittest
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import launch
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Hub, Loopback, outcomes, run_workers

import tf_dgc
from tf_dgc import _host
from tf_dgc import horovod as hvd
from tf_dgc.horovod import operations
from tf_dgc.horovod.options import Options
from tf_dgc.transports.local import LocalTransport

LOCK = threading.Lock()  # Keras makes layers for one thread at a time
X = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(8, 3)
Y = X.sum(1, keepdims=True)


class Twins(LocalTransport):
    """Two workers of which the other does all that this one does."""

    name = "twins"

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Count each tensor twice."""
        return [tensor + tensor for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Stack a tensor on itself."""
        return tf.stack([tensor, tensor])

    def broadcast(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return the tensors."""
        return [tf.identity(tensor) for tensor in tensors]


class Halves:
    """A compressor as those of Horovod are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Cast to 16 bits."""
        return tf.cast(tensor, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: tf.DType) -> tf.Tensor:
        """Cast back."""
        return tf.cast(tensor, context)


def linear(optimizer: Any = None, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **options)
    return model


def by_two_workers(
    make: Callable[..., Any], count: int = 2, passes: int = 1
) -> list[list[np.ndarray]]:
    """Return each worker's variables, from zero, after gradients of 1 and of 3.

    Args:
        make: an optimizer, of a transport.
        count: of the variables, named v0, v1 and so on.
        passes: how often the gradient is applied.
    """

    def work(transport: Loopback) -> list[np.ndarray]:
        with LOCK:
            variables = [keras.Variable(tf.zeros([2]), name=f"v{i}") for i in range(2)]
            optimizer = make(transport)
            optimizer.build(variables[:count])
        gradient = tf.fill([2], 1.0 + 2 * transport.rank)
        for _ in range(passes):
            optimizer.apply([gradient] * count, variables[:count])
        return [np.array(variable) for variable in variables[:count]]

    return run_workers(2, work)


def distributed(optimizer: Any, *args: Any, **options: Any) -> Callable[..., Any]:
    def make(transport: Loopback) -> Any:
        own = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        return hvd.DistributedOptimizer(own, *args, over=transport, **options)

    return make


@unittest.skipUnless(
    hasattr(keras.optimizers, "MultiOptimizer"), "this Keras has no MultiOptimizer"
)
class MultiOptimizerTest(parameterized.TestCase, tf.test.TestCase):
    def by_map(self) -> Any:
        rates = keras.optimizers.OptimizerMap(keras.optimizers.SGD(1.0))
        rates["v1"] = keras.optimizers.SGD(0.5)
        return keras.optimizers.MultiOptimizer(rates)

    def by_function(self) -> Any:
        fast, slow = keras.optimizers.SGD(1.0), keras.optimizers.SGD(0.5)
        return keras.optimizers.MultiOptimizer(
            lambda variable: slow if variable.path == "v1" else fast
        )

    @parameterized.parameters("by_map", "by_function")
    def test_all_in_it_apply_the_mean(self, how: str) -> None:
        def make(transport: Loopback) -> Any:
            multi = getattr(self, how)()
            return hvd.DistributedOptimizer(multi, over=transport)

        for one, two in by_two_workers(make):
            self.assertAllClose(one, [-2.0, -2.0])
            self.assertAllClose(two, [-1.0, -1.0])

    def test_one_overflow_is_one_for_all(self) -> None:
        class Overflows(keras.optimizers.LossScaleOptimizer):
            def check_finite(self, gradients: list[Any]) -> Any:
                factor = np.inf if self.name == "worker1" else 1.0
                return super().check_finite([g * factor for g in gradients])

        def make(transport: Loopback) -> Any:
            name = f"worker{transport.rank}"
            scaling = Overflows(self.by_map(), initial_scale=1.0, name=name)
            return hvd.DistributedOptimizer(scaling, over=transport)

        for found in by_two_workers(make):
            self.assertAllClose(found, np.zeros([2, 2]))

    def test_what_is_in_it_is_distributed_once(self) -> None:
        multi = self.by_map()
        self.assertFalse(hvd.optimizer.is_distributed(multi))
        hvd.DistributedOptimizer(multi, over=LocalTransport())
        self.assertTrue(hvd.optimizer.is_distributed(multi))
        for part in (multi, *multi.optimizers):
            with self.assertRaisesRegex(ValueError, "is distributed already"):
                hvd.DistributedOptimizer(part, over=LocalTransport())

    def test_those_in_it_may_be_distributed_one_by_one(self) -> None:
        multi = self.by_map()
        for part in multi.optimizers:
            hvd.DistributedOptimizer(part, over=LocalTransport())
        self.assertTrue(hvd.optimizer.is_distributed(multi))

    def test_it_does_not_accumulate(self) -> None:
        with self.assertRaisesRegex(ValueError, "must be 1 for a MultiOptimizer"):
            hvd.DistributedOptimizer(
                self.by_map(), backward_passes_per_step=2, over=LocalTransport()
            )


class TrainsAloneTest(parameterized.TestCase, tf.test.TestCase):
    """What is not distributed is refused before the first step."""

    CALLBACKS = (
        hvd.callbacks.BroadcastVariables,
        hvd.callbacks.MetricAverage,
        lambda over: hvd.callbacks.LearningRateWarmupCallback(0.1, over=over),
    )

    @parameterized.parameters(*CALLBACKS)
    def test_a_forgotten_optimizer_is_refused_by_name(self, make: Any) -> None:
        model = linear(keras.optimizers.SGD(0.1, name="mine"))
        before = model.get_weights()
        with self.assertRaisesRegex(
            ValueError, "'mine' is not distributed.*hvd.DistributedOptimizer"
        ):
            model.fit(X, Y, verbose=0, callbacks=[make(over=Loopback(Hub(2), 0))])
        self.assertAllEqual(model.get_weights()[0], before[0])

    @parameterized.parameters(*CALLBACKS)
    @pytest.mark.long
    def test_one_worker_may_train_alone(self, make: Any) -> None:
        linear().fit(X, Y, verbose=0, callbacks=[make(over=LocalTransport())])

    def test_a_step_of_ones_own_may_exchange_by_itself(self) -> None:
        class Own(keras.Sequential):
            def train_step(self, batch: Any) -> dict[str, Any]:
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x) - y) ** 2)
                tape = hvd.DistributedGradientTape(tape, over=over)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
                return {"loss": loss}

        over = Twins()
        model = Own([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd")
        callback = hvd.callbacks.BroadcastVariables(over=over)
        model.fit(X, Y, verbose=0, callbacks=[callback])

    @parameterized.parameters(True, False)
    @pytest.mark.long
    def test_a_step_of_ones_own_that_does_not_is_refused(self, built: bool) -> None:
        class Own(keras.Sequential):
            def train_step(self, batch: Any) -> dict[str, Any]:
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x) - y) ** 2)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
                return {"loss": loss}

        def work(transport: Loopback) -> Any:
            with LOCK:
                first = [keras.Input((3,))] if built else []
                model = Own([*first, keras.layers.Dense(1)])
                model.compile("sgd", run_eagerly=True)
            callback = hvd.callbacks.BroadcastVariables(over=transport)
            rows = slice(transport.rank, None, 2)
            options = {"batch_size": 1, "verbose": 0, "callbacks": [callback]}
            return model.fit(X[rows], Y[rows], **options)

        for error in outcomes(2, work):
            self.assertRegex(str(error), "exchanges nothing.*trains alone.*hvd.Distri")

    @pytest.mark.long
    def test_a_loaded_model_is_refused_until_it_is_loaded_by_hvd(self) -> None:
        over = Twins()
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        model = linear(hvd.DistributedOptimizer(sgd, over=over))
        callbacks = [hvd.callbacks.BroadcastVariables(over=over)]
        fit: dict[str, Any] = {"batch_size": 4, "verbose": 0, "shuffle": False}
        model.fit(X, Y, callbacks=callbacks, **fit)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            plain = keras.models.load_model(path)
            loaded = hvd.load_model(path, over=over)
        with self.assertRaisesRegex(ValueError, "hvd.load_model"):
            plain.fit(X, Y, callbacks=callbacks, **fit)
        self.assertIs(type(loaded.optimizer), keras.optimizers.SGD)
        for each in (model, loaded):  # with the velocities that were saved
            each.fit(X, Y, callbacks=callbacks, **fit)
        self.assertAllClose(model.get_weights(), loaded.get_weights(), 1e-6, 1e-6)
        self.assertEqual(int(loaded.optimizer.iterations), 4)
        self.assertGreater(int(hvd.stats(loaded.optimizer).sent_bytes), 0)

    def test_loading_takes_what_horovods_takes(self) -> None:
        class Mine(keras.optimizers.SGD):
            pass

        trained = linear(Mine(0.1))
        untrained = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            trained.save(path)
            loaded = hvd.load_model(path, [Mine], over=LocalTransport())
            again = hvd.load_model(
                path,
                custom_objects={"Mine": Mine},
                compression=tf_dgc.DGCConfig(),
                over=LocalTransport(),
            )
            untrained.save(path)
            self.assertFalse(hvd.load_model(path).compiled)
        for model in (loaded, again):
            self.assertIs(type(model.optimizer), Mine)
            self.assertTrue(hvd.optimizer.is_distributed(model.optimizer))


@pytest.mark.long
class CompiledTest(parameterized.TestCase, tf.test.TestCase):
    """XLA, which cannot compile an exchange."""

    def compiled(self, how: Any) -> keras.Model:
        gpu = mock.Mock(device_type="GPU")
        gpu.name = "/physical_device:GPU:0"
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), over=Twins())
        devices = tf.config.list_physical_devices()
        with mock.patch.object(
            tf.config, "list_physical_devices", lambda kind=None: [*devices, gpu]
        ):
            model = linear(optimizer, jit_compile=how)
        self.assertTrue(model.jit_compile)
        return model

    @parameterized.product(
        how=(True, "auto"),
        callback=(hvd.callbacks.BroadcastVariables, hvd.callbacks.MetricAverage),
    )
    @pytest.mark.few(2)
    def test_callbacks_switch_it_off_in_time(self, how: Any, callback: Any) -> None:
        model = self.compiled(how)
        model.fit(X, Y, verbose=0, callbacks=[callback(over=Twins())])
        self.assertFalse(model.jit_compile)
        self.assertEqual(int(model.optimizer.iterations), 1)

    def test_callbacks_switch_it_off_after_it_was_refused(self) -> None:
        model = self.compiled(True)
        with self.assertRaisesRegex(ValueError, "`jit_compile` must be False"):
            model.fit(X, Y, verbose=0)
        callback = hvd.callbacks.BroadcastVariables(over=Twins())
        model.fit(X, Y, verbose=0, callbacks=[callback])
        self.assertEqual(int(model.optimizer.iterations), 1)

    @parameterized.parameters(True, "auto")
    def test_without_callbacks_it_is_refused_before_the_first_step(
        self, how: Any
    ) -> None:
        model = self.compiled(how)
        before = model.get_weights()
        with self.assertRaisesRegex(ValueError, "`jit_compile` must be False"):
            model.fit(X, Y, verbose=0)
        self.assertAllEqual(model.get_weights()[0], before[0])
        self.assertEqual(int(model.optimizer.iterations), 0)

    def test_compression_is_refused_on_one_worker_too(self) -> None:
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        config = tf_dgc.DGCConfig(min_elements=1)
        optimizer = hvd.DistributedOptimizer(sgd, config, over=LocalTransport())
        model = linear(optimizer, jit_compile=True)
        with self.assertRaisesRegex(ValueError, "`jit_compile` must be False"):
            model.fit(X, Y, verbose=0)
        self.assertEqual(int(model.optimizer.iterations), 0)

    def test_who_goes_on_without_the_momentum_of_before_is_told(self) -> None:
        for steps in (0, 2):
            sgd = keras.optimizers.SGD(0.1, momentum=0.9)
            config = tf_dgc.DGCConfig(min_elements=1)
            optimizer = hvd.DistributedOptimizer(sgd, config, over=LocalTransport())
            model = linear(optimizer)
            model.optimizer.build(model.trainable_variables)
            model.optimizer.iterations.assign(steps)
            with self.assertLogs("tf_dgc", "WARNING") as logs:
                logging.getLogger("tf_dgc").warning("begins")
                model.fit(X, Y, verbose=0, epochs=2)
            told = [text for text in logs.output if "without their momentum" in text]
            self.assertLen(told, int(steps > 0))

    def test_a_tape_in_a_compiled_function_is_refused(self) -> None:
        variable = tf.Variable([1.0, 2.0])

        @tf.function(jit_compile=True)
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable**2)
            return hvd.DistributedGradientTape(tape, over=Twins()).gradient(
                loss, [variable]
            )

        with self.assertRaisesRegex(ValueError, "`jit_compile` must be False"):
            step()

    def test_what_is_not_distributed_may_be_compiled_on_one_worker(self) -> None:
        model = linear(jit_compile=True)
        callback = hvd.callbacks.BroadcastVariables(over=LocalTransport())
        model.fit(X, Y, verbose=0, callbacks=[callback])
        self.assertTrue(model.jit_compile)


class KeywordsTest(parameterized.TestCase, tf.test.TestCase):
    """What Horovod's keywords mean for gradients of 1 and 3 at a rate of 1."""

    SGD = keras.optimizers.SGD(1.0)

    def assert_steps(self, make: Callable[..., Any], *steps: float, **how: Any) -> None:
        if len(steps) == 1:
            steps = steps * 2
        for variables, step in zip(by_two_workers(make, **how), steps, strict=True):
            for variable in variables:
                self.assertAllClose(variable, [-step, -step], 1e-6, 1e-6)

    def test_what_changes_no_result_is_taken(self) -> None:
        make = distributed(
            self.SGD,
            name="Mine",
            use_locking=True,
            device_dense="/cpu:0",
            device_sparse="/cpu:0",
            gradient_predivide_factor=2.0,
            num_groups=1,
            groups=[[]],
            sparse_as_dense=True,
        )
        self.assert_steps(make, 2.0)

    def test_what_is_unknown_is_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, "unexpected keyword argument 'averag'"):
            hvd.DistributedOptimizer(self.SGD, averag=True, over=LocalTransport())

    def test_passes_are_added_up_or_averaged(self) -> None:
        passes: dict[str, Any] = {"backward_passes_per_step": 2}
        self.assert_steps(distributed(self.SGD, **passes), 4.0, passes=2)
        passes["average_aggregated_gradients"] = True
        self.assert_steps(distributed(self.SGD, **passes), 2.0, passes=2)

    def test_passes_may_be_those_that_were_saved(self) -> None:
        sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        make = distributed(sgd, backward_passes_per_step=2)
        self.assert_steps(make, 4.0, passes=2)

    @parameterized.parameters((True, (0.5, 1.5)), (False, (1.0, 3.0)))
    def test_layers_may_stay_each_workers_own(
        self, scale: bool, steps: tuple[float, float]
    ) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            with LOCK:
                layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
                for layer in layers:
                    layer.build([None, 1])
                optimizer = hvd.PartialDistributedOptimizer(
                    keras.optimizers.SGD(1.0),
                    local_layers=layers[0],
                    scale_local_gradients=scale,
                    over=transport,
                )
                kernels = [layer.kernel for layer in layers]
                optimizer.build(kernels)
            before = [float(kernel[0, 0]) for kernel in kernels]
            gradient = tf.fill([1, 1], 1.0 + 2 * transport.rank)
            optimizer.apply([gradient, gradient], kernels)
            return [b - float(k[0, 0]) for b, k in zip(before, kernels, strict=True)]

        for (local, shared), step in zip(run_workers(2, work), steps, strict=True):
            self.assertAllClose([local, shared], [step, 2.0], 1e-5, 1e-5)

    @parameterized.parameters(None, tf_dgc.DGCConfig(sparsity=0.0, min_elements=1))
    @pytest.mark.long
    def test_an_optimizer_counts_a_step_once_whatever_is_local(
        self, config: Any
    ) -> None:
        gradients = [tf.constant([[0.5, -0.25]]), tf.constant([[0.1, 1.0]])]

        def trained(make: Callable[[Any, Any], Any]) -> list[np.ndarray]:
            layers = [
                keras.layers.Dense(2, kernel_initializer="zeros", use_bias=False)
                for _ in range(2)
            ]
            for layer in layers:
                layer.build([None, 1])
            kernels = [layer.kernel for layer in layers]
            optimizer = make(keras.optimizers.Nadam(0.1), layers[0])
            optimizer.build(kernels)
            for scale in (1.0, 2.0, 3.0):
                optimizer.apply([scale * g for g in gradients], kernels)
            return [*(k.numpy() for k in kernels), np.array(optimizer._u_product)]

        expected = trained(lambda optimizer, layer: optimizer)
        found = trained(
            lambda optimizer, layer: hvd.PartialDistributedOptimizer(
                optimizer, config, local_layers=layer, over=LocalTransport()
            )
        )
        self.assertAllClose(found, expected, 1e-6, 1e-6)

    def test_local_layers_sum_over_passes_as_others_do(self) -> None:
        layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
        for layer in layers:
            layer.build([None, 1])
        kernels = [layer.kernel for layer in layers]
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0),
            local_layers=layers[0],
            backward_passes_per_step=2,
            over=LocalTransport(),
        )
        optimizer.build(kernels)
        before = [k.numpy() for k in kernels]
        for _ in range(2):
            optimizer.apply([tf.ones([1, 1])] * 2, kernels)
        steps = [b - k.numpy() for b, k in zip(before, kernels, strict=True)]
        self.assertAllClose(steps, [[[2.0]]] * 2)

    @pytest.mark.long
    def test_slots_of_own_steps_are_not_those_of_rank_0(self) -> None:
        def work(transport: Loopback) -> tuple[np.ndarray, np.ndarray]:
            config = tf_dgc.DGCConfig(sparsity=0.5, min_elements=1)
            with LOCK:
                layer = keras.layers.Dense(8, kernel_initializer="ones", use_bias=False)
                model = keras.Sequential([keras.Input((8,)), layer])
                adam = keras.optimizers.Adam(0.01)
                hvd.DistributedOptimizer(adam, config, over=transport)
                model.compile(adam, "mse", run_eagerly=True)
                adam.build(model.trainable_variables)
            gradient = tf.fill([8, 8], 1.0 + transport.rank)
            adam.apply([gradient], model.trainable_variables)
            before = adam.variables[2].numpy()
            callback = hvd.callbacks.BroadcastVariables(over=transport)
            callback.set_model(model)
            callback.on_train_begin()
            return before, adam.variables[2].numpy()

        for before, after in run_workers(2, work):
            self.assertAllEqual(before, after)

    def test_local_layers_are_layers(self) -> None:
        with self.assertRaisesRegex(TypeError, "`local_layers` must be a layer"):
            hvd.PartialDistributedOptimizer(
                self.SGD, local_layers=["dense"], over=LocalTransport()
            )

    def test_a_tape_keeps_local_gradients(self) -> None:
        layer = keras.layers.Dense(1, use_bias=False)
        layer.build([None, 1])
        one, two = tf.Variable(2.0), tf.Variable(3.0)
        with tf.GradientTape(persistent=True) as tape:
            loss = one * two * tf.reduce_sum(layer.kernel)
        partial = hvd.PartialDistributedGradientTape(
            tape, local_layers=[layer], over=Twins()
        )
        partial.register_local_source(two)
        kernel = float(layer.kernel[0, 0])
        found = partial.gradient(loss, [layer.kernel, one, two])
        self.assertAllClose(found[0], [[6.0 / 2]])
        self.assertAllClose(found[1:], [3.0 * kernel, 2.0 * kernel / 2])
        self.assertAllClose(partial.gradient(loss, [two]), [2.0 * kernel / 2])

    def test_compression_makes_messages_smaller(self) -> None:
        sent = []
        for compression in (None, Halves):
            sgd = hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.5), compression=compression, over=Twins()
            )
            kernel, table = keras.Variable(tf.ones([8])), keras.Variable(tf.ones([4]))
            rows = tf.IndexedSlices(tf.ones([1]), tf.constant([2]), tf.constant([4]))
            sgd.apply([tf.ones([8]), rows], [kernel, table])
            self.assertAllClose(kernel, np.full(8, 0.5))
            self.assertAllClose(table, [1.0, 1.0, 0.5, 1.0])
            sent.append(int(hvd.stats(sgd).sent_bytes))
        self.assertEqual(sent[0] - sent[1], 8 * 2)

    def test_a_tapes_compression_and_density(self) -> None:
        table = tf.Variable(tf.ones([4, 2]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 1]))
        wrapped = hvd.DistributedGradientTape(
            tape, compression=Halves, sparse_as_dense=True, over=Twins()
        )
        found = wrapped.gradient(loss, table)
        self.assertIsInstance(found, tf.Tensor)
        self.assertAllEqual(found[:, 0], [0.0, 2.0, 0.0, 0.0])

    def test_compression_may_be_a_config(self) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.9)
        self.assertEqual(Options(compression=config).resolve(None)[0], config)
        with self.assertRaisesRegex(ValueError, "not be given beside a DGCConfig"):
            Options(compression=Halves).resolve(config)
        with self.assertRaisesRegex(TypeError, "`compression` must be hvd.Compr"):
            Options(compression="fp16").resolve(None)
        compressor = hvd.DGCCompressor(config, over=LocalTransport())
        with self.assertRaisesRegex(TypeError, "or a DGCConfig"):
            Options(compression=compressor).resolve(None)

    def test_nodes_and_process_sets_exclude_each_other(self) -> None:
        with self.assertRaisesRegex(ValueError, "`hierarchical` must be False within"):
            hvd.core.started(True, mock.Mock(process_set_id=3))
        with self.assertRaisesRegex(ValueError, "`process_set` must have been given"):
            hvd.core.started(False, mock.Mock(process_set_id=None))


class ClippingTest(parameterized.TestCase, tf.test.TestCase):
    """Workers have gradients [1, 1] and [3, 3] of each variable: their mean is 2."""

    @parameterized.parameters(
        ({"clipvalue": 1.5}, 1.5),
        ({"clipnorm": 2.0}, 2.0**0.5),
        ({"global_clipnorm": 2.0}, 1.0),
    )
    def test_the_mean_is_clipped(self, clips: dict[str, float], step: float) -> None:
        sgd = keras.optimizers.SGD(1.0, **clips)
        for own in by_two_workers(distributed(sgd)):
            self.assertAllClose(own, [[-step, -step]] * 2)

    def test_of_compressed_gradients_each_workers_own_is_with_a_warning(self) -> None:
        sgd = keras.optimizers.SGD(1.0, clipvalue=1.5)
        config = tf_dgc.DGCConfig(sparsity=0.0, min_elements=1)
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            found = by_two_workers(distributed(sgd, config))
        self.assertAllClose(found[0], [[-1.25, -1.25]] * 2)
        self.assertIn("DGCConfig(clip_norm=...)", "".join(logs.output))

    def test_weights_of_ones_own_are_clipped_by_themselves(self) -> None:
        def work(transport: Loopback) -> Any:
            with LOCK:
                mine = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
                mine.build((None, 2))
                shared = keras.Variable(tf.zeros([2, 1]), name="shared")
                sgd = hvd.DistributedOptimizer(
                    keras.optimizers.SGD(1.0, clipvalue=1.5),
                    local_layers=mine,
                    scale_local_gradients=False,
                    over=transport,
                )
                sgd.build([mine.kernel, shared])
            gradient = tf.fill([2, 1], 1.0 + 2 * transport.rank)
            sgd.apply([gradient] * 2, [mine.kernel, shared])
            return float(mine.kernel[0, 0]), float(shared[0, 0])

        self.assertEqual(run_workers(2, work), [(-1.0, -1.5), (-1.5, -1.5)])


class WarmupTest(parameterized.TestCase, tf.test.TestCase):
    """Learning rates as a function of the place in training."""

    def rates(
        self, warmup: Any, model: keras.Model, data: Any = None, **options: Any
    ) -> list[float]:
        found: list[float] = []
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: found.append(
                float(model.optimizer.learning_rate)
            )
        )
        callbacks = [warmup, watch]
        if data is not None:
            model.fit(data, verbose=0, callbacks=callbacks, **options)
        else:
            options = {"batch_size": 4, **options}
            model.fit(X, Y, verbose=0, callbacks=callbacks, **options)
        return found

    @pytest.mark.long
    def test_a_restart_goes_on_where_it_stopped(self) -> None:
        whole = self.rates(hvd.callbacks.LearningRateWarmup(4), linear(), epochs=3)
        self.assertAllClose(whole, [0.0, 0.025, 0.05, 0.075, 0.1, 0.1])
        for epoch in (1, 2):
            model = linear()
            rest = self.rates(
                hvd.callbacks.LearningRateWarmup(4),
                model,
                epochs=3,
                initial_epoch=epoch,
            )
            self.assertAllClose(rest, whole[2 * epoch :])

    @parameterized.parameters(1, 2)
    def test_the_goal_is_not_what_a_backup_brings_back(self, epoch: int) -> None:
        class Restore(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                self.model.optimizer.learning_rate = 0.075

        for order in (1, -1):
            model = linear()
            found: list[float] = []
            watch = keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda batch, logs, m=model, f=found: f.append(
                    float(m.optimizer.learning_rate)
                )
            )
            own = [Restore(), hvd.callbacks.LearningRateWarmup(4)][::order]
            model.fit(
                X,
                Y,
                batch_size=4,
                epochs=3,
                initial_epoch=epoch,
                verbose=0,
                callbacks=[*own, watch],
            )
            expected = [0.05, 0.075, 0.1, 0.1][2 * epoch - 2 :]
            self.assertAllClose(found, expected)

    def test_iterations_count_where_nobody_knows_the_length(self) -> None:
        def batches() -> tf.data.Dataset:
            return tf.data.Dataset.from_generator(
                lambda: iter([(X, Y)] * 2),
                output_signature=(tf.TensorSpec([8, 3]), tf.TensorSpec([8, 1])),
            )

        model = linear()
        model.optimizer.iterations.assign(2)
        warmup, rates = hvd.callbacks.LearningRateWarmup(4), []
        for epoch in (1, 2):
            options = {"initial_epoch": epoch, "epochs": epoch + 1}
            with warnings.catch_warnings():  # Keras says that the data has ended
                warnings.simplefilter("ignore", UserWarning)
                rates += self.rates(warmup, model, batches(), **options)
        self.assertAllClose(rates, [0.05, 0.075, 0.1, 0.1])

    def test_fits_of_one_epoch_each_go_on(self) -> None:
        warmup, model = hvd.callbacks.LearningRateWarmup(4), linear()
        rates = [*self.rates(warmup, model), *self.rates(warmup, model)]
        self.assertAllClose(rates, [0.0, 0.025, 0.05, 0.075])

    def test_steps_that_run_together_reach_the_goal(self) -> None:
        model = linear(steps_per_execution=4)
        warmup = hvd.callbacks.LearningRateWarmup(6)
        rates = self.rates(warmup, model, batch_size=1, epochs=2)
        self.assertAllClose(rates, [0.0, 0.1 * 4 / 6, 0.1, 0.1])

    def of_twins(self, callback: Any, epochs: int = 3, **options: Any) -> list[float]:
        sgd = keras.optimizers.SGD(0.1, momentum=0.5)
        model = linear(hvd.DistributedOptimizer(sgd, over=Twins()))
        return self.rates(callback, model, epochs=epochs, **options)

    @pytest.mark.slow
    def test_horovods_warmup_is_its_own_formula(self) -> None:
        def warmup() -> Any:
            return hvd.callbacks.LearningRateWarmupCallback(0.1, 2, over=Twins())

        size, batches = 2, 2
        places = [(e + (b + 1) / batches) / 2 for e in range(2) for b in range(batches)]
        expected = [0.1 / size * (place * (size - 1) + 1) for place in places]
        whole = self.of_twins(warmup())
        self.assertAllClose(whole, [*expected, 0.1, 0.1])
        for epoch in (1, 2):
            rest = self.of_twins(warmup(), initial_epoch=epoch)
            self.assertAllClose(rest, whole[2 * epoch :])

    @parameterized.parameters(
        ({"multiplier": 0.5}, [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]),
        (
            {"multiplier": lambda epoch: epoch + 1, "start_epoch": 1, "end_epoch": 2},
            [0.3, 0.3, 0.2, 0.2, 0.2, 0.2],
        ),
        (
            {"multiplier": lambda epoch: epoch + 1, "staircase": False},
            [0.1, 0.15, 0.2, 0.25, 0.3, 0.35],
        ),
    )
    def test_a_schedule_multiplies(self, options: Any, expected: list[float]) -> None:
        model = linear(keras.optimizers.SGD(0.3))
        schedule = hvd.callbacks.LearningRateScheduleCallback(
            0.1, **options, over=LocalTransport()
        )
        self.assertAllClose(self.rates(schedule, model, epochs=3), expected)
        self.assertAllClose(model.history.history["lr"], expected[1::2])

    @parameterized.parameters((True, 4.0), (False, 2.0))
    def test_velocities_change_with_the_rate_that_is_in_them(
        self, corrects: bool, expected: float
    ) -> None:
        sgd = keras.optimizers.SGD(0.1, momentum=0.5, use_ema=True)
        model = linear(sgd)
        sgd.build(model.trainable_variables)
        velocity, average = sgd.momentums[0], _host.keras.averages_of(sgd)[0]
        velocity.assign(tf.fill(velocity.shape, 2.0))
        average.assign(tf.ones_like(average))
        schedule = hvd.callbacks.LearningRateScheduleCallback(
            0.2, 1.0, momentum_correction=corrects, over=LocalTransport()
        )
        schedule.set_model(model)
        schedule.set_params({"steps": 2})
        schedule.on_train_begin()
        schedule.on_epoch_begin(0)
        for batch in range(2):  # at the second the rate does not change
            schedule.on_train_batch_begin(batch)
        self.assertAllClose(velocity, tf.fill(velocity.shape, expected))
        self.assertAllClose(average, tf.ones_like(average))

    def test_gradients_that_are_added_up_keep_their_size(self) -> None:
        over = LocalTransport()
        sgd = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0, momentum=0.9),
            backward_passes_per_step=2,
            over=over,
        )
        model = linear(sgd)
        sgd.build(model.trainable_variables)
        variables = model.trainable_variables
        before = [v.numpy() for v in variables]
        callback = hvd.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: 0.1 if epoch else 1.0, steps_per_epoch=1, over=over
        )
        callback.set_model(model)
        callback.set_params({"steps": 1})
        for epoch in range(2):
            callback.on_epoch_begin(epoch)
            callback.on_train_batch_begin(0)
            sgd.apply([tf.ones(v.shape) for v in variables], variables)
        for one, two in zip(before, variables, strict=True):
            self.assertAllClose(one - two.numpy(), tf.fill(one.shape, 0.2))


class VariablesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(0, 1)
    def test_variables_of_keras_and_tensorflow_become_those_of_the_root(
        self, root: int
    ) -> None:
        def work(transport: Loopback) -> list[Any]:
            with LOCK:
                variables = [
                    keras.Variable(tf.fill([2], 1.5 + transport.rank)),
                    tf.Variable(transport.rank == 0),
                    tf.Variable(10 + transport.rank),
                ]
            hvd.broadcast_variables(iter(variables), root, over=transport)
            return [np.array(tf.convert_to_tensor(v)) for v in variables]

        for kernel, flag, count in run_workers(2, work):
            self.assertAllEqual(kernel, [1.5 + root] * 2)
            self.assertEqual(flag, root == 0)
            self.assertEqual(count, 10 + root)

    def test_other_variables_are_refused(self) -> None:
        def work(transport: Loopback) -> None:
            with LOCK:
                variables = [tf.Variable(1.0)] * (1 + transport.rank)
            hvd.broadcast_variables(variables, over=transport)

        with self.assertRaisesRegex(ValueError, "`variable 1` differs"):
            run_workers(2, work)
        with self.assertRaisesRegex(ValueError, r"`root_rank` must be in \[0, 1\)"):
            hvd.broadcast_variables([], 1, over=LocalTransport())

    def test_what_one_worker_has_loaded_all_begin_with(self) -> None:
        def work(transport: Loopback) -> list[float]:
            with LOCK:
                adam = keras.optimizers.Adam(0.25)
                model = linear(hvd.DistributedOptimizer(adam, over=transport))
                if transport.rank == 0:
                    adam.build(model.trainable_variables)
                    adam.variables[2].assign(tf.ones_like(adam.variables[2]))
                    adam.iterations.assign(7)
                    adam.learning_rate = 0.5
                mine = model.layers[0].bias
                mine.assign([float(transport.rank)])
            callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
                root_rank=0, device="", local_variables=mine, over=transport
            )
            with LOCK:
                callback.set_model(model)
            callback.on_train_begin()
            momentum = float(tf.reduce_mean(adam.variables[2].value))
            rate = float(adam.learning_rate)
            return [int(adam.iterations), momentum, rate, float(mine[0])]

        first, second = run_workers(2, work)
        self.assertAllClose(first, [7, 1.0, 0.5, 0.0])
        self.assertAllClose(second, [7, 1.0, 0.5, 1.0])


class NormalizationTest(tf.test.TestCase):
    def test_it_is_that_of_one_worker_with_all_rows(self) -> None:
        parts = [tf.constant(X[:3]), tf.constant(X[3:])]
        weights = tf.constant(np.linspace(0.5, 2.0, 24, dtype=np.float32), shape=[8, 3])
        shares = [weights[:3], weights[3:]]

        def run(layer: Any, x: tf.Tensor, weight: tf.Tensor) -> list[np.ndarray]:
            with tf.GradientTape() as tape:
                tape.watch(x)
                out = layer(x, training=True)
                loss = tf.reduce_sum(weight * out**2)
            back = tape.gradient(loss, x)
            return [t.numpy() for t in (out, back, layer.moving_variance.value)]

        out, back, moving = run(
            keras.layers.BatchNormalization(), tf.constant(X), weights
        )

        def work(transport: Loopback) -> list[np.ndarray]:
            with LOCK:
                layer = hvd.SyncBatchNormalization(name="same", over=transport)
                layer.build([None, 3])
            return run(layer, parts[transport.rank], shares[transport.rank])

        one, two = run_workers(2, work)
        self.assertAllClose(np.concatenate([one[0], two[0]]), out, 1e-4, 1e-4)
        self.assertAllClose(np.concatenate([one[1], two[1]]), back, 1e-3, 1e-3)
        self.assertAllClose(one[2], moving, 1e-5, 1e-5)
        self.assertAllEqual(one[2], two[2])

    def test_a_mask_hides_rows_and_nobody_needs_any(self) -> None:
        steps = tf.constant(X, shape=[1, 8, 3])
        mask = tf.constant([[True] * 4 + [False] * 4])
        plain = keras.layers.BatchNormalization()
        expected = plain(steps[:, :4], training=True)

        def work(transport: Loopback) -> Any:
            with LOCK:
                layer = hvd.SyncBatchNormalization(name="same", over=transport)
                layer.build([None, 8, 3])
            rows = 1 - transport.rank
            return layer(steps[:rows], training=True, mask=mask[:rows]).numpy()

        found, _ = run_workers(2, work)
        self.assertAllClose(found[:, :4], expected, 1e-3, 1e-3)

    def test_it_is_saved_as_what_it_is(self) -> None:
        layer = hvd.SyncBatchNormalization(momentum=0.5, over=LocalTransport())
        model = keras.Sequential([keras.Input((3,)), layer])
        copy = keras.Sequential.from_config(model.get_config())
        self.assertIs(type(copy.layers[0]), hvd.SyncBatchNormalization)
        self.assertEqual(copy.layers[0].momentum, 0.5)


@pytest.mark.long
class NamesTest(parameterized.TestCase, tf.test.TestCase):
    def test_names_are_pinned(self) -> None:
        self.assertEqual(hvd.__all__, sorted(hvd.__all__))
        for name in hvd.__all__:
            self.assertTrue(hasattr(hvd, name), name)
        self.assertLessEqual({*hvd.__all__, *operations.BORROWED}, {*dir(hvd)})
        with self.assertRaisesRegex(AttributeError, "no attribute 'allreduc'"):
            _ = hvd.allreduc

    def test_all_of_horovods_names_are_there(self) -> None:
        launch.skip_without_horovod()
        import horovod.tensorflow
        import horovod.tensorflow.keras

        theirs = {
            *vars(horovod.tensorflow.keras),
            *vars(horovod.tensorflow),
        }
        own = {*dir(hvd), "elastic"}
        # Modules and helpers of theirs, and what is of TensorFlow 1.
        others = {
            *{"K", "check_extension", "check_num_rank_power_of_2", "compression"},
            *{"functions", "gradient_aggregation", "gradient_aggregation_eager"},
            *{"handle_average_backwards_compatibility", "inspect", "keras", "mpi_ops"},
            *{"is_version_greater_equal_than", "ops", "os", "refs_to_vars", "tf"},
            *{"split_list", "sync_batch_norm", "util", "vars_to_refs", "version"},
            *{"warnings", "LocalGradientAggregationHelper", "broadcast_object_fn"},
            *{"BroadcastGlobalVariablesHook", "process_set_included_op", "broadcast_"},
            "grouped_reducescatter",
        }
        missing = {n for n in theirs - own - others if not n.startswith("_")}
        self.assertEqual(missing, set())
        for name in operations.BORROWED:
            self.assertIs(getattr(hvd, name), getattr(horovod.tensorflow, name))
        self.assertIs(hvd.elastic.KerasState, hvd.elastic.State)
        for name in horovod.tensorflow.keras.elastic.__all__:
            self.assertTrue(hasattr(hvd.elastic, name), name)

    def test_ways_to_combine_gradients(self) -> None:
        launch.skip_without_horovod()
        self.assertFalse(Options(op=hvd.Average).resolve(None)[1].total)
        self.assertTrue(Options(op=hvd.Sum).resolve(None)[1].total)
        for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
            with self.assertRaisesRegex(ValueError, "must be hvd.Average or hvd.Sum"):
                Options(op=op).resolve(None)
        make = distributed(keras.optimizers.SGD(1.0), op=hvd.Sum)
        for one, _ in by_two_workers(make):
            self.assertAllClose(one, [-4.0, -4.0])
        none = Options(compression=hvd.Compression.none)
        config = tf_dgc.DGCConfig()
        self.assertEqual(none.resolve(config), (config, (False, None, False, 1)))

    @pytest.mark.extended
    def test_what_has_no_meaning_is_refused(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "Use hvd.broadcast_variables"):
            hvd.broadcast_global_variables(0)
        with self.assertRaisesRegex(RuntimeError, "`join` cannot be had.*as many"):
            hvd.join()
        with self.assertRaisesRegex(RuntimeError, "ModelCheckpoint"):
            hvd.callbacks.BestModelCheckpoint(monitor="loss")


if __name__ == "__main__":
    tf.test.main()
