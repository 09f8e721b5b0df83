"""Simulated workers do what real ones do, bit for bit where they share the code."""

import collections
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import features
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import compressing, exchange, only
from loopback import OWNER, Loopback, run_workers

import tf_dgc
from tf_dgc import simulate
from tf_dgc.compression.dgc import Momentum
from tf_dgc.exchanges import Dense, EachStep, Ledger
from tf_dgc.transports.base import Transport

# What works on the gradients of single workers, or has a step that is no `train_step`.
ONLY_REAL = {
    "accumulation_and_steps_per_execution",
    "custom_loop",
    "gradient_accumulation",
    "loss_scaling",
    "mixed_precision",
    "synchronized_batch_norm",
    "two_optimizers",
}
LIKE_ONE = sorted(features.FEATURES.keys() - ONLY_REAL)
NOTHING_LEFT_OUT = {"sparsity": 0.0, "momentum_masking": False, "min_elements": 1}
SHAPES = ((8, 16), (5,), (3, 7, 4))


def gradients_of(worker: int, step: int) -> list[tf.Tensor]:
    random = np.random.default_rng([worker, step])
    return [tf.constant(random.normal(size=s), tf.float32) for s in SHAPES]


def variables_of() -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def sgd(**settings: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, **settings)


def small_model(strategy: Any, make_optimizer: Callable[[], Any] = sgd) -> keras.Model:
    with strategy.scope():
        model = features.mlp()
        model.compile(make_optimizer(), "mse")
    return model


class LikeOneWorkerCase(parameterized.TestCase, tf.test.TestCase):
    def assert_like_one_worker(self, name: str) -> None:
        self.enterContext(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Your input ran out of data")
        keras.utils.set_random_seed(3)
        expected = features.FEATURES[name](None)
        for config in (None, tf_dgc.DGCConfig(**NOTHING_LEFT_OUT)):
            keras.utils.set_random_seed(3)
            found = features.FEATURES[name](simulate.SimulatedStrategy(4, config))
            self.assertEqual(found.keys(), expected.keys())
            for key in expected.keys() - {"crc"}:
                self.assertAllClose(found[key], expected[key], 1e-5, 1e-5, msg=key)


@pytest.mark.long
class LikeOneWorkerTest(LikeOneWorkerCase):
    @parameterized.parameters(
        "nesterov", "embedding", "last_batch_uneven", "a_saved_model_goes_on"
    )
    @pytest.mark.few(1)
    def test_train_as_one_worker_where_nothing_is_left_out(self, name: str) -> None:
        self.assert_like_one_worker(name)


@pytest.mark.slow
class LikeOneWorkerInAllTest(LikeOneWorkerCase):
    @parameterized.named_parameters(*[(name, name) for name in LIKE_ONE])
    @pytest.mark.few(1)
    def test_train_as_one_worker_where_nothing_is_left_out(self, name: str) -> None:
        self.assert_like_one_worker(name)


@pytest.mark.long
class SimulatedWorkersTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(
        workers=[1, 3],
        momentum=[None, Momentum(0.9, False, 0.3)],
        settings=[
            {},
            {"warmup_steps": 4, "warmup_stages": (0.5, 0.75)},
            {"clip_norm": 1.0, "value_dtype": "bfloat16", "momentum_masking": False},
            {"value_dtype": "sign", "warmup_steps": 2, "warmup_stages": (0.5,)},
            {"value_dtype": "log4"},
            NOTHING_LEFT_OUT,
        ],
    )
    @pytest.mark.few(2)
    def test_exchange_the_same_bits_as_real_ones(
        self, workers: int, momentum: Momentum | None, settings: dict[str, Any]
    ) -> None:
        config = tf_dgc.DGCConfig(**({"sparsity": 0.9, "min_elements": 0} | settings))
        steps = 6

        def real(transport: Loopback) -> list[Any]:
            synchronizer = compressing(transport, config)
            variables = variables_of()
            found = []
            for step in range(steps):
                own = gradients_of(transport.rank, step)
                each = exchange(synchronizer, OWNER, own, variables, momentum)
                found.append((each.gradients, each.finished))
            arena = only(synchronizer)
            return [found, arena.residual.v.numpy(), synchronizer.stats(True)]

        expected = run_workers(workers, real)
        make = simulate.each_simulated_step(config)
        synchronizer = Ledger(simulate.Stacked(workers), make)
        variables = variables_of()
        for step in range(steps):
            stacked = [
                tf.stack(parts)
                for parts in zip(
                    *[gradients_of(w, step) for w in range(workers)], strict=True
                )
            ]
            found = exchange(synchronizer, OWNER, stacked, variables, momentum)
            gradients, compressed = expected[0][0][step]
            self.assertEqual(found.finished, compressed)
            for one, two in zip(found.gradients, gradients, strict=True):
                self.assertAllEqual(one, two, msg=f"step {step}")
        arena = only(synchronizer)
        self.assertAllEqual(arena.residual.v, [r for _, r, _ in expected])
        own, others = synchronizer.stats(True), expected[0][2]
        self.assertEqual([int(x) for x in own[:4]], [int(x) for x in others[:4]])
        self.assertEqual(int(own.received_bytes), int(others.received_bytes))

    @parameterized.product(
        make=[lambda: sgd(momentum=0.9), lambda: keras.optimizers.Adam(0.01)],
        clip_norm=[None, 0.05],
    )
    @pytest.mark.few(0, 1)
    def test_weigh_shares_of_unequal_rows_as_real_ones(
        self, make: Callable[[], Any], clip_norm: float | None
    ) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, clip_norm=clip_norm)
        x, y = features.regression(13)

        def fit(strategy: Any) -> list[np.ndarray]:
            with strategy.scope():
                layers = [
                    keras.layers.Dense(
                        units, kernel_initializer=keras.initializers.GlorotUniform(1)
                    )
                    for units in (16, 1)
                ]
                model = keras.Sequential([keras.Input((8,)), *layers])
                model.compile(make(), "mse", run_eagerly=True)
            # The last of four batches has one row, for one of the workers.
            model.fit(x, y, batch_size=4, shuffle=False, epochs=2, verbose=0)
            return model.get_weights()

        expected = run_workers(
            2, lambda over: fit(tf_dgc.DGCStrategy(config, transport=over))
        )[0]
        found = fit(simulate.SimulatedStrategy(2, config))
        for one, two in zip(found, expected, strict=True):
            self.assertAllClose(one, two, 1e-5, 1e-6)

    @pytest.mark.extended
    def test_compress_as_many_as_there_are(self) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.995, min_elements=1)
        strategy = simulate.SimulatedStrategy(64, config)
        self.assertEqual(strategy.num_replicas_in_sync, 64)
        with strategy.scope():
            wide = [keras.layers.Dense(200, "tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((8,)), *wide])
            model.compile(sgd(momentum=0.9), "mse")
        history = model.fit(features.batches(64, 64), epochs=3, verbose=0)
        self.assertLess(history.history["loss"][-1], history.history["loss"][0])
        stats = strategy.stats()
        self.assertEqual(int(stats.dense_bytes), 4 * model.count_params())
        self.assertEqual(int(stats.sent_elements), 8 + 1 + 200 + 1)
        self.assertGreater(float(stats.residual_norm), 0.0)

    @pytest.mark.extended
    def test_not_finite_on_one_stops_all(self) -> None:
        strategy = simulate.SimulatedStrategy(4, tf_dgc.DGCConfig(min_elements=1))
        model = small_model(strategy)
        x, y = features.regression(16)
        x[9] = np.inf
        before = model.get_weights()
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "holds NaN or inf"):
            model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        for one, two in zip(before, model.get_weights(), strict=True):
            self.assertAllEqual(one, two)

    def test_dense_ones_sum_over_workers(self) -> None:
        loopback = simulate.Stacked(3)
        stacked = [tf.reshape(tf.range(6.0), [3, 2])]
        variables = [tf.Variable(tf.zeros([2]))]
        found = exchange(Ledger(loopback, Dense), OWNER, stacked, variables)
        self.assertAllEqual(found.gradients[0], [6.0, 9.0])

    def test_rows_go_to_their_workers(self) -> None:
        rows = tf.reshape(tf.range(18), [3, 3, 2])  # from whom, to whom, what
        found = simulate.Stacked(3).all_to_all(rows, "rows")
        self.assertAllEqual(found, tf.transpose(rows, [1, 0, 2]))


class Own(keras.Model):
    """A model with a training step of its own, of which `how` tells the loss."""

    how = "mean"

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(y - self(x, training=True))
            loss = self.loss_of(errors, y) + 0.01 * tf.add_n(self.losses)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        if self.how == "clipped":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"seen": tf.reduce_sum(loss), "mean error": tf.reduce_mean(errors)}

    def loss_of(self, errors: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if self.how == "global batch":
            rows = tf.reduce_mean(errors, -1)
            return tf.nn.compute_average_loss(rows, global_batch_size=16)
        if self.how == "vector":
            return tf.reduce_mean(errors, -1)
        if self.how == "by N":
            workers = tf.distribute.get_strategy().num_replicas_in_sync
            return tf.reduce_mean(errors) / workers
        if self.how == "masked":
            mask = tf.cast(y > 0, errors.dtype)
            return tf.reduce_sum(errors * mask) / tf.reduce_sum(mask)
        return tf.reduce_mean(errors)


def masked(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    mask = tf.cast(y > 0, p.dtype)
    return tf.reduce_sum(tf.square(y - p) * mask) / tf.reduce_sum(mask)


class Penalised(keras.layers.Layer):
    """Adds a mean over its rows to the loss."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return x


# What is compiled, or of `Own.how`.
LOSSES: dict[str, Any] = {
    "scalar": lambda y, p: tf.reduce_mean(tf.square(y - p)),
    "sum": keras.losses.MeanSquaredError(reduction="sum"),
    "masked in a function": masked,
    "dice": lambda y, p: keras.losses.Dice()(tf.abs(y), tf.sigmoid(p)),
    "largest": lambda y, p: tf.reduce_max(tf.square(y - p)),
    "root": lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p)) + 0.1),
    **dict.fromkeys(("mean", "vector", "global batch", "by N", "masked", "clipped")),
}


def fitted(name: str, strategy: Any, eager: bool = False) -> dict[str, Any]:
    """Return what a model has and tells after two epochs of unequal shares."""
    loss, x, y = LOSSES[name], *features.regression(37)
    with features.scope(strategy):
        inputs = keras.Input((8,))
        dense = keras.layers.Dense(
            5,
            activation="tanh",
            kernel_initializer=keras.initializers.GlorotUniform(1),
            kernel_regularizer="l2",
        )
        outputs = Penalised()(dense(inputs))
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(outputs)
        kind = keras.Model if loss else type("Own", (Own,), {"how": name})
        model = kind(inputs, outputs)
        sgd = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(sgd, loss, metrics=["mae"] if loss else None, run_eagerly=eager)
    fit = {"batch_size": 18, "epochs": 2, "shuffle": False, "verbose": 0}
    return features.outcome(model, model.fit(x, y, **fit))


@pytest.mark.long
class LossesTest(parameterized.TestCase, tf.test.TestCase):
    def assert_like_one_process(
        self, name: str, config: Any = None, eager: bool = False
    ) -> None:
        expected = fitted(name, None, eager)
        if name == "by N":  # which is 1 there
            expected = fitted("mean", None, eager)
        found = fitted(name, simulate.SimulatedStrategy(3, config), eager)
        for key in ("history", "norms"):
            self.assertAllClose(found[key], expected[key], 1e-5, 1e-5, msg=key)

    @parameterized.parameters(*LOSSES)
    @pytest.mark.few(0, 2)
    def test_gradients_of_simulated_workers_add_up(self, name: str) -> None:
        self.assert_like_one_process(name)

    def test_what_is_clipped_after_all_were_summed_is_not_warned_of(self) -> None:
        with self.assertNoLogs("tf_dgc", "WARNING"):
            fitted("clipped", simulate.SimulatedStrategy(2))

    @parameterized.parameters("sum", "masked")
    @pytest.mark.slow
    def test_so_they_do_where_they_are_compressed(self, name: str) -> None:
        self.assert_like_one_process(name, tf_dgc.DGCConfig(**NOTHING_LEFT_OUT))

    @parameterized.parameters(*LOSSES)
    @pytest.mark.slow
    def test_so_they_do_eagerly(self, name: str) -> None:
        self.assert_like_one_process(name, eager=True)

    @pytest.mark.slow
    def test_workers_that_meet_draw_once(self) -> None:
        """Sums are of the same random numbers as the gradients."""

        def work(strategy: Any) -> Any:
            x, y = features.regression(32)
            with strategy.scope():
                inputs = keras.Input((8,))
                drop = keras.layers.Dropout(0.5, seed=4)
                normal = keras.layers.BatchNormalization()
                outputs = keras.layers.Dense(1, kernel_initializer="ones")(
                    drop(normal(inputs))
                )
                model = keras.Model(inputs, outputs)
                model.compile(keras.optimizers.SGD(0.1), self.loss, metrics=["mae"])
            history = model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            weights = [v for v in model.weights if "seed" not in v.path]
            seed = [int(v[1]) for v in drop.variables]
            return history.history, [v.numpy() for v in weights], seed

        def met(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
            ones = tf.ones_like(p)
            return tf.reduce_sum(tf.square(y - p)) / tf.reduce_sum(ones)

        self.loss: Any = "mse"
        expected = work(simulate.SimulatedStrategy(2))
        self.loss = met
        self.assertAllClose(work(simulate.SimulatedStrategy(2)), expected, 1e-5, 1e-5)


@pytest.mark.long
class SizeOfGraphTest(parameterized.TestCase, tf.test.TestCase):
    """As many operations for 3 workers as for 256, those that XLA compiles included."""

    # So many elements that tf.zeros makes the same operation for 3 and for 256.
    SHAPES = ((48, 64), (5,))

    def operations(
        self, transport: Transport, ledger: Ledger, momentum: Momentum | None
    ) -> collections.Counter[str]:
        """Return how many operations of each type a worker's step has."""
        variables = [tf.Variable(tf.zeros(shape)) for shape in self.SHAPES]
        first = [transport.size] * isinstance(transport, simulate.Stacked)

        def step(*local: tf.Tensor) -> list[Any]:
            found = ledger.gradients(OWNER, list(local), variables, momentum)
            return [gradient for gradient in found.gradients if gradient is not None]

        specs = [tf.TensorSpec([*first, *shape]) for shape in self.SHAPES]
        traced = tf.function(step, autograph=False).get_concrete_function(*specs)
        graph = traced.graph.as_graph_def()
        nodes = [graph.node, *(each.node_def for each in graph.library.function)]
        # Few zeros are a constant, many are filled in.
        return collections.Counter(
            node.op for own in nodes for node in own if "zeros_like" not in node.name
        )

    @parameterized.product(
        simulated=[True, False],
        # Changes the weights, sums gradients.
        momentum=[Momentum(0.9, False, 0.3), None],
        by=["allgather", "owners"],
    )
    @pytest.mark.few(0, 1)
    def test_does_not_depend_on_the_number_of_workers(
        self, simulated: bool, momentum: Momentum | None, by: str
    ) -> None:
        config = tf_dgc.DGCConfig(
            sparsity=0.999, min_elements=48, clip_norm=1.0, exchange=by
        )
        found = []
        for workers in (3, 256):
            transport = simulate.Stacked(workers) if simulated else Crowd(workers)
            make = (simulate.each_simulated_step if simulated else EachStep)(config)
            found.append(self.operations(transport, Ledger(transport, make), momentum))
        few, many = found
        self.assertGreater(few["TensorScatterAdd"] + few["TensorScatterSub"], 1)
        self.assertEqual(few, many)


class Crowd(Transport):
    """One of N workers that all send the same."""

    name = "loopback"

    def __init__(self, workers: int) -> None:
        self.rank, self.size, self.device = 0, workers, "/device:CPU:0"

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return N times the tensors."""
        return [tensor * tf.cast(self.size, tensor.dtype) for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensor N times."""
        return tf.tile(tensor[tf.newaxis], [self.size] + [1] * tensor.shape.rank)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensor."""
        return tf.identity(tensor)


class RefusalTest(parameterized.TestCase, tf.test.TestCase):
    def test_arguments(self) -> None:
        for wrong in (0, -1):
            with self.assertRaisesRegex(ValueError, "`workers` must be 1 or more. Rec"):
                simulate.SimulatedStrategy(wrong)
        for kind in (True, 2.0, "2"):
            with self.assertRaisesRegex(TypeError, "`workers` must be an integer. Re"):
                simulate.SimulatedStrategy(kind)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "`config` must be a DGCConfig or None"):
            simulate.SimulatedStrategy(2, {"sparsity": 0.9})  # type: ignore[arg-type]

    @parameterized.parameters(
        ("clipnorm", 1.0),
        ("global_clipnorm", 1.0),
        ("clipvalue", 1.0),
        ("gradient_accumulation_steps", 2),
    )
    def test_optimizers_that_touch_gradients_of_single_workers(
        self, name: str, value: Any
    ) -> None:
        strategy = simulate.SimulatedStrategy(2)
        model = small_model(strategy, lambda: sgd(**{name: value}))
        with self.assertRaisesRegex(ValueError, f"single workers alone.*{name}"):
            model.fit(features.batches(), verbose=0)

    def test_a_step_that_is_a_function_of_tensorflow(self) -> None:
        class Traced(keras.Sequential):
            @tf.function
            def train_step(self, given: Any) -> Any:
                return {"loss": tf.reduce_sum(self(given[0]))}

        with simulate.SimulatedStrategy(2).scope():
            model = Traced([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile(sgd())
        with self.assertRaisesRegex(ValueError, "under `tf.function` cannot be simula"):
            model.fit(features.batches(), verbose=0)

    @pytest.mark.extended
    def test_state_of_another_number_of_workers(self) -> None:
        config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        strategy = simulate.SimulatedStrategy(3, config)
        small_model(strategy).fit(features.batches(), verbose=0)
        strategy.save_state(folder)
        strategy.restore_state(folder)
        for workers in (2, 4):
            other = simulate.SimulatedStrategy(workers, config)
            with self.assertRaisesRegex(ValueError, f"'world_size' must be {workers}"):
                other.restore_state(folder)

    def test_loss_scaling(self) -> None:
        strategy = simulate.SimulatedStrategy(2)
        scaled = keras.optimizers.LossScaleOptimizer
        model = small_model(strategy, lambda: scaled(sgd()))
        with self.assertRaisesRegex(ValueError, "single workers alone.*loss scaling"):
            model.fit(features.batches(), verbose=0)

    def test_synchronized_batch_normalization(self) -> None:
        strategy = simulate.SimulatedStrategy(2)
        with strategy.scope():
            layers = [keras.layers.BatchNormalization(synchronized=True)]
            model = features.mlp(*layers)
            model.compile(sgd(), "mse")
        with self.assertRaisesRegex(ValueError, "reduce over the others"):
            model.fit(features.batches(), verbose=0)

    @pytest.mark.long
    def test_a_step_that_applies_twice(self) -> None:
        class Twice(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.layer = keras.layers.Dense(1)

            def call(self, x: Any) -> Any:
                return self.layer(x)

            def train_step(self, data: Any) -> Any:
                super().train_step(data)
                return super().train_step(data)

        strategy = simulate.SimulatedStrategy(2)
        with strategy.scope():
            model = Twice()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        with self.assertRaisesRegex(ValueError, "gradients once, .* Received: 2 times"):
            model.fit(features.batches(), verbose=0)
        self.assertNotIn("apply", vars(model.optimizer))

    def test_a_second_optimizer(self) -> None:
        with self.assertRaisesRegex(ValueError, "gradients of `model.optimizer`"):
            features.FEATURES["two_optimizers"](simulate.SimulatedStrategy(2))


if __name__ == "__main__":
    tf.test.main()
