"""Models with split layers compute what they compute without. Workers are threads."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, Sent, in_scopes, outcomes, run_workers

import tf_dgc
from tf_dgc.layers import SplitDense, ways

ROWS, INPUTS = 20, 6
X = np.random.default_rng(0).normal(size=(ROWS, INPUTS)).astype("float32")
Y = np.random.default_rng(1).integers(0, 5, ROWS)
SPARSE = keras.losses.SparseCategoricalCrossentropy
pytestmark = pytest.mark.long


def dense(units: int, seed: int, name: str, **arguments: Any) -> keras.layers.Dense:
    drawn = keras.initializers.GlorotUniform(seed)  # threads share what has no seed
    return keras.layers.Dense(units, kernel_initializer=drawn, name=name, **arguments)


def fitted(model: keras.Model, optimizer: Any = None, **compiled: Any) -> Any:
    """Train a model; return losses and whole weights."""
    compiled = {"loss": SPARSE(from_logits=True), "run_eagerly": True, **compiled}
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), **compiled)
    history = model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    loss = model.evaluate(X, Y, batch_size=10, verbose=0, return_dict=True)["loss"]
    variables = [_whole(v) for v in model.trainable_variables]
    return history.history["loss"], loss, variables


def _whole(variable: Any) -> np.ndarray:
    return np.asarray(tf_dgc.layers.models.whole_value(variable))


class EqualTest(parameterized.TestCase, tf.test.TestCase):
    def check(
        self,
        make: Callable[[], keras.Model],
        workers: int = 2,
        split: Callable[[Any], Any] = lambda model: tf_dgc.split_dense(model, 1),
        **compiled: Any,
    ) -> None:
        """Compare what a model gives on one worker with what it gives in parts."""
        losses, evaluated, weights = fitted(make(), **compiled)

        def work(strategy: Any) -> Any:
            return fitted(split(make()), **compiled)

        for found in in_scopes(workers, work):
            self.assertAllClose(found[0], losses, 1e-5, 1e-5)
            self.assertAllClose(found[1], evaluated, 1e-5, 1e-5)
            self.assertEqual(len(found[2]), len(weights))
            for one, other in zip(found[2], weights, strict=True):
                self.assertAllClose(one, other, 1e-5, 1e-5)

    @parameterized.parameters(2, 3, 4)
    @pytest.mark.few(1)
    def test_in_a_chain_of_layers(self, workers: int) -> None:
        def make() -> keras.Model:
            return keras.Sequential(
                [
                    keras.Input((INPUTS,)),
                    dense(11, 1, "a", activation="relu", kernel_regularizer="l2"),
                    dense(9, 2, "b", activation="tanh", bias_initializer="ones"),
                    dense(7, 3, "c", activation="softplus", use_bias=False),
                    dense(5, 4, "d"),
                ]
            )

        self.check(make, workers)

    @pytest.mark.extended
    def test_in_a_frozen_layer_too(self) -> None:
        def make() -> keras.Model:
            layers = [dense(9, 1, "a", activation="relu"), dense(5, 2, "b")]
            layers[0].trainable = False
            return keras.Sequential([keras.Input((INPUTS,)), *layers])

        self.check(make)

    @pytest.mark.extended
    def test_with_a_penalty_on_what_a_layer_puts_out(self) -> None:
        def make() -> keras.Model:
            last = dense(5, 2, "b", activity_regularizer=keras.regularizers.L2(0.1))
            return keras.Sequential([keras.Input((INPUTS,)), last])

        self.check(make)

    @pytest.mark.extended
    def test_where_rows_are_masked(self) -> None:
        x = np.random.default_rng(2).integers(0, 4, (ROWS, 3))
        y = np.random.default_rng(3).integers(0, 5, (ROWS, 3))

        def fit(split: bool) -> Any:
            vectors = keras.initializers.RandomUniform(seed=3)
            table = keras.layers.Embedding(4, 6, vectors, mask_zero=True)
            model = keras.Sequential([keras.Input((3,), dtype="int32"), table])
            model.add(dense(9, 1, "a", activation="relu"))
            model.add(dense(5, 2, "b"))
            model = tf_dgc.split_dense(model, 1) if split else model
            model.compile("sgd", SPARSE(from_logits=True), run_eagerly=True)
            history = model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
            return history.history["loss"], [_whole(v) for v in model.weights]

        losses, weights = fit(False)
        for found in in_scopes(2, lambda strategy: fit(True)):
            self.assertAllClose(found[0], losses, 1e-5, 1e-5)
            for one, other in zip(found[1], weights, strict=True):
                self.assertAllClose(one, other, 1e-5, 1e-5)

    @pytest.mark.extended
    def test_in_a_step_of_ones_own_whose_loss_nobody_divides(self) -> None:
        @keras.saving.register_keras_serializable("test")
        class Own(keras.Model):
            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape() as tape:
                    found = SPARSE(from_logits=True, reduction=None)(y, self(x))
                    loss = tf.reduce_mean(found) + tf.add_n(self.losses)
                found = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(found, self.trainable_variables)
                return {"loss": loss}

        def make() -> keras.Model:
            inputs = keras.Input((INPUTS,))
            x = dense(9, 1, "a", activation="relu", kernel_regularizer="l2")(inputs)
            return Own(inputs, dense(5, 2, "b")(x))

        _, _, weights = fitted(make())
        for _, _, found in in_scopes(
            2, lambda _: fitted(tf_dgc.split_dense(make(), 1))
        ):
            for one, other in zip(found, weights, strict=True):
                self.assertAllClose(one, other, 1e-5, 1e-5)

    @pytest.mark.extended
    def test_in_a_step_that_divides_its_gradients_at_the_end(self) -> None:
        class Divides(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape() as tape:
                    found = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x))
                    loss = tf.reduce_mean(found)
                found = tape.gradient(loss, self.trainable_variables)
                workers = tf.distribute.get_strategy().num_replicas_in_sync
                found = [g / workers for g in found]
                self.optimizer.apply(found, self.trainable_variables)
                return {"loss": loss}

        def make(kind: Any = keras.layers.Dense) -> keras.Model:
            drawn = keras.initializers.GlorotUniform(1)
            return Divides([keras.Input((INPUTS,)), kind(5, kernel_initializer=drawn)])

        _, _, weights = fitted(make())
        for _, _, found in in_scopes(2, lambda _: fitted(make(SplitDense))):
            for one, other in zip(found, weights, strict=True):
                self.assertAllClose(one, other, 1e-5, 1e-5)


class CopyTest(tf.test.TestCase):
    def test_a_layer_of_two_models_is_one_in_the_copy(self) -> None:
        shared = dense(6, 1, "shared")
        inner = keras.Sequential([keras.Input((INPUTS,)), shared])
        inputs = keras.Input((INPUTS,))
        model = keras.Model(inputs, shared(inner(inputs)))
        split = tf_dgc.split_dense(model, 1)
        self.assertLen(split.trainable_variables, 2)
        self.assertAllClose(split(X), model(X))

    def test_it_is_not_compiled_and_the_model_is_still(self) -> None:
        model = keras.Sequential([keras.Input((INPUTS,)), dense(6, 1, "a")])
        model.compile("sgd", "mse")
        self.assertFalse(tf_dgc.split_dense(model, 1).compiled)
        self.assertTrue(model.compiled)

    def test_single_variables_stay_frozen(self) -> None:
        model = keras.Sequential([keras.Input((INPUTS,)), dense(6, 1, "a")])
        model.layers[0].bias.trainable = False
        split = tf_dgc.split_dense(model, 1)
        self.assertLen(split.trainable_variables, 1)
        self.assertFalse(split.layers[0].bias.trainable)

    def test_what_was_adapted_stays_so(self) -> None:
        normal = keras.layers.Normalization()
        normal.adapt(X)
        model = keras.Sequential([keras.Input((INPUTS,)), normal, dense(6, 1, "a")])
        self.assertAllClose(tf_dgc.split_dense(model, 1)(X), model(X))

    def test_a_class_that_keras_would_not_copy_is_refused(self) -> None:
        class Own(keras.Sequential):
            pass

        class Mine(keras.Model):
            def __init__(self, width: int) -> None:
                inputs = keras.Input((INPUTS,))
                super().__init__(inputs, keras.layers.Dense(width)(inputs))

        for model in (Own([keras.Input((INPUTS,)), dense(6, 1, "a")]), Mine(6)):
            with self.assertRaisesRegex(TypeError, "of a class that Keras can clone"):
                tf_dgc.split_dense(model, 1)


class WaysTest(parameterized.TestCase, tf.test.TestCase):
    def chain(self, *units: int, **arguments: Any) -> keras.Model:
        inputs = keras.Input((units[0],))
        x = inputs
        for i, each in enumerate(units[1:]):
            x = dense(each, i, f"layer{i}", **arguments)(x)
        return keras.Model(inputs, x)

    def chosen(self, model: keras.Model, workers: int) -> list[str]:
        found = ways.chosen(model, lambda e: type(e) is keras.layers.Dense, workers)
        return [found[id(each)] for each in model.layers if id(each) in found]

    def test_least_is_sent(self) -> None:
        self.assertEqual(self.chosen(self.chain(400, 40), 4), ["rows"])
        self.assertEqual(self.chosen(self.chain(40, 400), 4), ["columns"])
        self.assertEqual(self.chosen(self.chain(64, 64, 10), 4), ["columns", "rows"])
        vgg = self.chain(2508, 409, 409, 100, activation="relu")
        self.assertEqual(self.chosen(vgg, 4), ["rows", "columns", "rows"])

    def test_what_reads_units_in_between_keeps_them_at_home(self) -> None:
        softmax = self.chain(64, 64, 10, activation="softmax")
        self.assertEqual(ways.followers(softmax), {})
        plain = self.chain(64, 64, 10)
        self.assertLen(ways.followers(plain), 1)
        both = [plain.get_layer("layer0").output, plain.output]
        self.assertEqual(ways.followers(keras.Model(plain.inputs, both)), {})

    def test_what_looks_at_rows_is_cut_by_rows(self) -> None:
        norm = keras.constraints.UnitNorm(axis=1)
        self.assertEqual(
            ways.possible(dense(4, 1, "a", kernel_constraint=norm)), ["rows"]
        )

    @parameterized.parameters(("columns", "rows"), ("rows", "columns"))
    @pytest.mark.few(1)
    def test_what_is_sent_is_what_is_counted_on(self, *by: str) -> None:
        inputs, middle, units, workers = 12, 8, 4, 2

        def run(transport: Loopback) -> Any:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            with strategy.scope():
                layers = [
                    SplitDense(n, by=way, use_bias=False)
                    for n, way in zip((middle, units), by, strict=True)
                ]
                model = keras.Sequential([keras.Input((inputs,)), *layers])
                model.compile("sgd", "mse", run_eagerly=True)
            x, y = np.ones((2, inputs)), np.ones((2, units))
            model.train_on_batch(x, y)
            first = len(transport.sent)
            model.fit(x, y, batch_size=2, verbose=0)
            moved = [s for s in transport.sent[first:] if s.name.startswith("split")]
            floats = [s for s in moved if s.arrays[0].dtype == np.float32]
            # What an all-to-all keeps is not sent; a gather sends its rows to each.
            return sum(map(numbers, floats))

        def numbers(sent: Sent) -> int:
            # A gather sends its rows to each of the others, who keeps nothing back.
            kept = workers if sent.call == "all_to_all" else 1
            return sent.arrays[0].size // kept * (workers - 1)

        after = by[0] == "columns"
        one, other = ways.WayForm(inputs, middle), ways.WayForm(middle, units)
        forth = ways.numbers_sent(by[0], one, workers, False)
        forth += ways.numbers_sent(by[1], other, workers, after)
        # One row a worker, forth and back; nobody asks for the gradient of the inputs.
        expected = 2 * forth - (inputs if after else inputs / workers)
        for found in run_workers(workers, run):
            self.assertEqual(found, expected)


class StateTest(tf.test.TestCase):
    def model(self, by: str) -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((INPUTS,)), SplitDense(5, by=by)])
        model.compile("adam", SPARSE(from_logits=True), run_eagerly=True)
        return model

    @pytest.mark.extended
    def test_a_state_of_columns_is_taken_over_by_rows_of_more_workers(self) -> None:
        with tempfile.TemporaryDirectory() as folder:

            def saved(strategy: Any) -> Any:
                model = self.model("columns")
                model.fit(X, Y, batch_size=10, verbose=0, shuffle=False)
                strategy.save_state(folder, model)
                return [_whole(v) for v in model.optimizer.variables[2:]]

            expected = in_scopes(2, saved)[0]

            def run(transport: Loopback) -> Any:
                strategy = tf_dgc.DenseStrategy(transport=transport)
                with strategy.scope():
                    model = self.model("rows")
                strategy.restore_state(folder, model)  # outside of the scope
                return [_whole(v) for v in model.optimizer.variables[2:]]

            for found in run_workers(3, run):
                for one, other in zip(found[:2], expected[:2], strict=True):
                    self.assertAllEqual(one, other)

    def test_a_checkpoint_of_tensorflow_is_refused_on_all_workers(self) -> None:
        with tempfile.TemporaryDirectory() as folder:

            def run(transport: Loopback) -> Any:
                strategy = tf_dgc.DenseStrategy(transport=transport)
                with strategy.scope():
                    model = self.model("columns")
                path = str(pathlib.Path(folder, "checkpoint"))
                return tf.train.Checkpoint(model=model).save(path)

            for error in outcomes(2, run):
                self.assertIsInstance(error, ValueError)
                self.assertRegex(str(error), "part of one of 2 workers.*joined")


class BuildTest(tf.test.TestCase):
    def test_a_layer_that_is_made_frozen_can_be_trained_later(self) -> None:
        def work(strategy: Any) -> Any:
            layer = SplitDense(5, trainable=False)
            layer.build((None, INPUTS))
            before = layer.kernel.trainable
            layer.trainable = True
            return before, layer.kernel.trainable, len(layer.trainable_variables)

        self.assertEqual(in_scopes(2, work), [(False, True, 2)] * 2)

    def test_a_layer_that_is_built_in_a_traced_function_gets_its_part(self) -> None:
        def work(strategy: Any) -> Any:
            layer = SplitDense(5)

            @tf.function
            def build() -> None:
                if not layer.built:
                    layer.build((None, INPUTS))

            build()
            return layer.kernel.shape

        self.assertEqual(in_scopes(2, work), [(INPUTS, 3)] * 2)


if __name__ == "__main__":
    tf.test.main()
