"""Models inside of a strategy's scope, outside of it, and half inside."""

import weakref
from typing import Any
from unittest import mock

import features
import keras
import numpy as np
import pytest
import tensorflow as tf
from loopback import Hub, Loopback

import tf_dgc
from tf_dgc.strategies import randomness, watched
from tf_dgc.transports import handshake

X = np.ones((8, 8), "float32")
Y = X[:, :1]


def first_of_two() -> tf_dgc.DenseStrategy:
    """Return the strategy of a worker whose peer is not there."""
    with (
        mock.patch.object(handshake, "agree"),
        mock.patch.object(randomness, "agree"),
        mock.patch("atexit.register"),
    ):
        return tf_dgc.DenseStrategy(transport=Loopback(Hub(2), 0))


def compiled() -> keras.Model:
    model = features.mlp()
    model.compile("adam", "mse")
    return model


class OutsideTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        others = mock.patch.object(watched, "of_several", weakref.WeakSet())
        self.enterContext(others)  # those of other tests

    def test_training_a_model_where_nothing_is_in_the_scope_is_refused(self) -> None:
        own = first_of_two()
        model = compiled()
        before = model.get_weights()
        for train in (
            lambda: model.fit(X, Y, verbose=0),
            lambda: model.train_on_batch(X, Y),
        ):
            with self.assertRaisesRegex(
                ValueError,
                "model 'sequential.*' was made outside the scope of the strategy, so "
                "each worker trains it by itself: build and compile it inside `with "
                "strategy.scope",
            ):
                train()
        for one, two in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)
        self.assertFalse(own.extended.used)

    @pytest.mark.long
    def test_beside_others_a_model_outside_is_trained_and_told_once(self) -> None:
        own = first_of_two()
        own.extended.used = True
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            model = compiled()
            for _ in range(2):
                model.fit(X, Y, verbose=0)
        (line,) = logs.output
        self.assertRegex(line, "was made outside the scope.* Where that is not meant")

    def test_it_cannot_have_metrics_of_the_strategy(self) -> None:
        own = first_of_two()
        own.extended.used = True
        with own.scope():
            metric = keras.metrics.AUC(name="shared")
        model = features.mlp()
        model.compile("adam", "mse", metrics=[metric])
        with self.assertRaisesRegex(ValueError, "meet for them.*: metrics shared"):
            model.fit(X, Y, verbose=0)

    def test_what_is_not_trained_may_be_outside(self) -> None:
        own = first_of_two()
        with self.assertNoLogs("tf_dgc", "WARNING"):
            model = compiled()
            model.evaluate(X, Y, verbose=0)
            model.predict(X, verbose=0)
        self.assertFalse(own.extended.used)

    @pytest.mark.long
    def test_one_worker_may_train_outside(self) -> None:
        own = tf_dgc.DenseStrategy(transport="local")
        with self.assertNoLogs("tf_dgc", "WARNING"):
            compiled().fit(X, Y, verbose=0)
        self.assertFalse(own.extended.used)

    def test_optimizers_with_slots_are_refused_by_the_same_words(self) -> None:
        own = tf_dgc.DenseStrategy(transport="local")
        with own.scope():
            model = features.mlp()
        model.compile("adam", "mse")
        with self.assertRaisesRegex(
            ValueError,
            "optimizer 'adam.*' was made outside the .* Build and compile the model",
        ):
            model.fit(X, Y, verbose=0)

    @pytest.mark.long
    def test_a_strategy_that_was_set_for_all_is_a_scope(self) -> None:
        own = tf_dgc.DenseStrategy(transport="local")
        tf.distribute.experimental_set_strategy(own)
        try:
            model = compiled()
            model.fit(X, Y, verbose=0)
        finally:
            tf.distribute.experimental_set_strategy(None)
        self.assertIs(model.distribute_strategy, own)
        self.assertTrue(own.extended.used)


class BuildingTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_models_without_call_train_as_without_a_strategy(self) -> None:
        def trained(strategy: Any) -> dict[str, Any]:
            keras.utils.set_random_seed(1)
            return features.models_without_call(strategy)

        expected = trained(None)
        for each in (
            tf_dgc.DenseStrategy(transport="local"),
            tf_dgc.ParameterAveragingStrategy(transport="local"),
        ):
            found = trained(each)
            self.assertAllClose(found["norms"], expected["norms"], 1e-6, 1e-6)
            loss = found["history"]["loss"]
            self.assertAllClose(loss, expected["history"]["loss"], 1e-6, 1e-6)

    def test_other_models_are_built_before_they_are_traced(self) -> None:
        own = tf_dgc.DenseStrategy(transport="local")
        with own.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.make_train_function = mock.Mock(side_effect=KeyboardInterrupt)
        with self.assertRaises(KeyboardInterrupt):
            model.fit(X, Y, verbose=0)
        self.assertTrue(model.built)


if __name__ == "__main__":
    tf.test.main()
