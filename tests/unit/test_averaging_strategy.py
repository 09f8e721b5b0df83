"""The strategy of parameter averaging, alone: what it asks of models and settings."""

from typing import Any
from unittest import mock

import features
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import only

import tf_dgc


def averaging(**settings: Any) -> tf_dgc.ParameterAveragingStrategy:
    config = tf_dgc.AveragingConfig(**settings)
    return tf_dgc.ParameterAveragingStrategy(config, transport="local")


def fit(
    strategy: Any, *layers: keras.layers.Layer, compiled: Any = None, **arguments: Any
) -> keras.Model:
    with strategy.scope():
        model = features.mlp(*layers)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "mse", **(compiled or {}))
    keras.utils.set_random_seed(2)
    model.fit(features.batches(), verbose=0, shuffle=False, **arguments)
    return model


def averaged_by(strategy: Any) -> list[str]:
    """Return the names of what is averaged beside the parameters."""
    exchange = only(strategy._ledger)
    return [variable.name.split("/")[-1] for variable in exchange.averaged]


@pytest.mark.long
class ParameterAveragingStrategyTest(parameterized.TestCase, tf.test.TestCase):
    def test_the_config_must_be_its_own(self) -> None:
        for config in (tf_dgc.DGCConfig(), 16, {"period": 16}):
            with self.assertRaisesRegex(TypeError, "must be an AveragingConfig"):
                tf_dgc.ParameterAveragingStrategy(config, transport="local")
        self.assertEqual(averaging().config, tf_dgc.AveragingConfig())

    @pytest.mark.slow
    def test_alone_and_plain_it_is_keras(self) -> None:
        keras.utils.set_random_seed(1)
        expected = fit(tf.distribute.get_strategy(), epochs=2)
        keras.utils.set_random_seed(1)
        found = fit(averaging(period=3), epochs=2)
        for one, two in zip(expected.get_weights(), found.get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)

    @parameterized.parameters({}, {"steps_per_execution": 3}, {"run_eagerly": True})
    @pytest.mark.slow
    def test_alone_a_round_in_flight_changes_nothing(self, **compiled: Any) -> None:
        keras.utils.set_random_seed(1)
        expected = fit(tf.distribute.get_strategy(), epochs=2)
        keras.utils.set_random_seed(1)
        strategy = averaging(period=3, overlap=2)
        found = fit(strategy, compiled=compiled, epochs=2)
        for one, two in zip(expected.get_weights(), found.get_weights(), strict=True):
            self.assertAllClose(one, two, 1e-5, 1e-5)
        self.assertGreaterEqual(int(strategy.round_stats().rounds), 4)

    @parameterized.parameters(("SGD", 16, 4), ("SGD", 2, 1), ("Adam", 16, 16))
    def test_an_overlap_is_chosen_by_the_optimizer(
        self, name: str, period: int, expected: int
    ) -> None:
        strategy = averaging(period=period, overlap="auto")
        optimizer = getattr(keras.optimizers, name)(0.1)
        self.assertEqual(strategy.inner._overlap_of(optimizer), expected)

    @parameterized.parameters((0.9, 1, True), (0.5, 40, False), (None, 1, False))
    @pytest.mark.few(1)
    def test_rounds_too_few_for_their_density_are_told(
        self, sparsity: float | None, epochs: int, told: bool
    ) -> None:
        compression = None
        if sparsity is not None:
            compression = tf_dgc.DGCConfig(sparsity=sparsity, min_elements=1)
        strategy = averaging(period=2, compression=compression)
        with mock.patch.object(strategy.inner.core, "warn") as warn:
            fit(strategy, epochs=epochs)
        said = [text for call in warn.call_args_list for text in call.args[0]]
        self.assertEqual(any("rounds, in each of which" in t for t in said), told)

    @parameterized.parameters(
        (("adam",), 0.05, False),
        (("sgd",), 0.05, True),
        (("adam", 800), 0.2, False),
        (("adam", 160), None, True),
        (("sgd", 160), None, True),
    )
    def test_settings_are_chosen_for_slow_networks(
        self, given: Any, density: float | None, outer: bool
    ) -> None:
        name, *steps = given
        config = tf_dgc.AveragingConfig.auto(
            name, total_steps=steps[0] if steps else None
        )
        self.assertEqual(config.overlap, "auto")
        self.assertEqual(config.outer_optimizer is not None, outer)
        if density is None:
            self.assertIsNone(config.compression)
        else:
            self.assertAlmostEqual(config.compression.sparsity, 1 - density)
            self.assertEqual(config.compression.value_dtype, "sign")
        again = tf_dgc.AveragingConfig.from_config(config.get_config())
        self.assertEqual(again, config)
        other = tf_dgc.AveragingConfig.auto(name, overlap=None, period=4)
        self.assertEqual((other.overlap, other.period), (None, 4))

    @parameterized.parameters(
        (("*",), ["moving_mean:0", "moving_variance:0"]),
        (("*/moving_mean",), ["moving_mean:0"]),
        (("gamma", "*/batch*/moving_v?riance"), ["moving_variance:0"]),
        ((), []),
    )
    @pytest.mark.few(2)
    def test_patterns_choose_what_is_averaged(
        self, patterns: tuple[str, ...], expected: list[str]
    ) -> None:
        strategy = averaging(non_trainable=patterns)
        layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)
        fit(strategy, *layers)
        self.assertEqual(averaged_by(strategy), expected)

    @pytest.mark.slow
    def test_a_pattern_that_matches_nothing_is_told(self) -> None:
        strategy = averaging(non_trainable=("moving_mean", "*"))
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            fit(strategy, keras.layers.BatchNormalization())
        (line,) = logs.output
        self.assertRegex(line, "'moving_mean' matches none of .*/moving_mean'")

    def test_the_loss_is_followed_where_a_step_is_a_tf_function(self) -> None:
        strategy = averaging(period="adaptive", min_period=1, max_period=4)
        with strategy.scope():
            model = features.mlp()
            optimizer = keras.optimizers.SGD(0.1)

        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        for _ in range(30):
            loss = strategy.run(step, features.regression())
        self.assertEqual(float(strategy.inner._averaging.loss), float(loss))
        self.assertLess(int(strategy.round_stats().period), 4)

    def test_frozen_layers_and_other_models_are_not_averaged(self) -> None:
        strategy = averaging()
        with strategy.scope():
            other = features.mlp(keras.layers.BatchNormalization())
            model = features.mlp(keras.layers.BatchNormalization())
            model.layers[0].trainable = False
            model.compile("sgd", "mse")
        model.fit(features.batches(), verbose=0)
        self.assertEqual(averaged_by(strategy), ["moving_mean:0", "moving_variance:0"])
        self.assertLen(other.non_trainable_weights, 2)

    @pytest.mark.slow
    def test_averages_of_weights_are_averaged_and_slots_where_asked(self) -> None:
        for average_slots, expected in ((False, 4), (True, 8)):
            strategy = averaging(average_slots=average_slots)
            with strategy.scope():
                model = features.mlp()
                sgd = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True)
                model.compile(sgd, "mse")
            model.fit(features.batches(), verbose=0)
            self.assertLen(averaged_by(strategy), expected)

    def test_a_loop_of_ones_own_averages_all_statistics_of_the_scope(self) -> None:
        strategy = averaging(period="adaptive")
        with strategy.scope():
            model = features.mlp(keras.layers.BatchNormalization())
            optimizer = keras.optimizers.Adam()

        def step(x: Any, y: Any, found: str) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            results = {"loss": loss, "dictionary": {"loss": loss}, "none": None}
            return results[found]

        x, y = features.regression()
        for found in ("loss", "dictionary"):
            strategy.run(step, (x, y, found))
        with self.assertRaisesRegex(ValueError, "must return it, or a dictionary"):
            strategy.run(step, (x, y, "none"))
        self.assertEqual(averaged_by(strategy), ["moving_mean:0", "moving_variance:0"])
        self.assertEqual(int(strategy.round_stats().position), 3)
        strategy.flush(model)
        self.assertEqual([int(f) for f in strategy.round_stats()[:3]], [1, 64, 0])

    @parameterized.parameters("instance", "function", "settings")
    @pytest.mark.few(0, 1)
    def test_an_outer_optimizer_steps_as_keras_does(self, given: str) -> None:
        # Alone, the mean is one's own: the outer optimizer sees what a period changed.
        def make() -> keras.optimizers.Optimizer:
            return keras.optimizers.Adam(0.01)

        settings = {"class_name": "Adam", "config": {"learning_rate": 0.01}}
        outer = {"instance": make(), "function": make, "settings": settings}[given]
        keras.utils.set_random_seed(1)
        start = [w.copy() for w in features.mlp().get_weights()]
        keras.utils.set_random_seed(1)
        local = fit(tf.distribute.get_strategy()).get_weights()
        keras.utils.set_random_seed(1)
        found = fit(averaging(period=4, outer_optimizer=outer)).get_weights()
        expected = [keras.Variable(w) for w in start]
        adam = make()
        adam.apply([a - b for a, b in zip(start, local, strict=True)], expected)
        for one, two in zip(found, expected, strict=True):
            self.assertAllClose(one, two.numpy(), 1e-6, 1e-6)

    def test_constraints_hold_after_an_outer_step(self) -> None:
        def outer() -> keras.optimizers.Optimizer:
            return keras.optimizers.SGD(5.0)

        strategy = averaging(period=2, outer_optimizer=outer)
        layer = keras.layers.Dense(4, kernel_constraint=keras.constraints.NonNeg())
        fit(strategy, layer, epochs=2)
        self.assertAllGreaterEqual(layer.kernel, 0.0)

    @pytest.mark.slow
    def test_constraints_hold_after_rounds_and_flush(self) -> None:
        compression = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
        strategy = averaging(period=3, compression=compression)
        layer = keras.layers.Dense(4, kernel_constraint=keras.constraints.UnitNorm())
        model = fit(strategy, layer, epochs=2)
        self.assertAllClose(tf.norm(layer.kernel, axis=0), [1.0] * 4)
        strategy.flush(model)
        self.assertAllClose(tf.norm(layer.kernel, axis=0), [1.0] * 4)

    def test_masks_of_infinity_are_no_broken_parameters(self) -> None:
        class Masked(keras.layers.Layer):
            def build(self, shape: Any) -> None:
                start = keras.initializers.Constant(-np.inf)
                self.mask = self.add_weight((3,), start, trainable=False)

            def call(self, x: Any) -> Any:
                return x

        fit(averaging(period=2), Masked())

    @pytest.mark.slow
    def test_evaluation_and_prediction_do_not_change_a_training(self) -> None:
        # Epochs end with a round anyway; what evaluates after it finds nothing to do.
        keras.utils.set_random_seed(1)
        plain = fit(averaging(period=3), epochs=2)
        keras.utils.set_random_seed(1)
        data = features.batches(40)
        watched = fit(averaging(period=3), epochs=2, validation_data=data)
        for one, two in zip(plain.get_weights(), watched.get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)


if __name__ == "__main__":
    tf.test.main()
