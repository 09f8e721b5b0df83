"""Tests of what is compared before the first step of a `fit`."""

import sys
from typing import Any
from unittest import mock

import keras
import loopback
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_dgc
from tf_dgc.strategies import compared, fits


def model(units: int = 2) -> keras.Model:
    """Return a model with weights, some of them frozen, and with statistics."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    frozen = keras.layers.Dense(4, trainable=False, name="frozen")
    x = keras.layers.Dropout(0.5)(frozen(inputs))
    x = keras.layers.BatchNormalization(name="norm")(x)
    found = keras.Model(inputs, keras.layers.Dense(units, name="last")(x))
    found.compile("adam", "mse", metrics=["mae"])
    found.optimizer.build(found.trainable_variables)
    return found


@pytest.mark.long
class EndOfFitTest(parameterized.TestCase, tf.test.TestCase):
    """A training that is shorter than the steps between two comparisons."""

    def trained(self, change: float, strategy: str, when: str = "batch") -> list[Any]:
        x = np.ones((8, 3), "float32")

        def work(transport: loopback.Loopback) -> Any:
            with getattr(tf_dgc, strategy)(transport=transport).scope():
                own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
                own.compile("sgd", "mse")

            def moves(*_: Any, **__: Any) -> None:
                if transport.rank == 1:
                    own.set_weights([w + change for w in own.get_weights()])

            name = {"batch": "on_train_batch_end", "end": "on_train_end"}[when]
            callback = keras.callbacks.LambdaCallback(**{name: moves})
            y = np.zeros((8, 2), "float32")
            own.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
            return own.get_weights()

        return loopback.run_workers(2, work)

    @parameterized.product(strategy=["DenseStrategy"], when=["batch", "end"])
    @pytest.mark.few(0, 1)
    def test_weights_set_on_one_worker_stop_all(self, strategy: str, when: str) -> None:
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "drifted apart"):
            self.trained(1.0, strategy, when)

    @pytest.mark.slow
    def test_weights_that_differ_by_rounding_become_those_of_the_chief(self) -> None:
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            one, other = self.trained(1e-8, "DenseStrategy", "end")
        self.assertLen([e for e in logs.output if "by rounding" in e], 1)
        self.assertAllEqual(one[0], other[0])

    @pytest.mark.extended
    def test_where_the_environment_says_never_nothing_is_compared(self) -> None:
        with mock.patch.dict("os.environ", TF_DGC_CHECK_STEPS="0"):
            one, other = self.trained(1.0, "DenseStrategy", "end")
        self.assertNotAllClose(one[0], other[0])


class LeavesTest(tf.test.TestCase):
    """A `sys.exit()` within `fit`, of one worker or of all."""

    def left(self, all_leave: bool) -> None:
        strategy = tf_dgc.DenseStrategy(transport="local")
        run = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: sys.exit(0))
        with strategy.scope():
            own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            own.compile("sgd", "mse")
        with (
            mock.patch.object(strategy._core, "share", mock.Mock()),
            mock.patch.object(strategy.transport, "all_leave", lambda: all_leave),
        ):
            with fits._noted("fit", own):
                run.on_epoch_end(0)

    def test_of_all_ends_as_in_one_process(self) -> None:
        with self.assertRaises(SystemExit) as found:
            self.left(all_leave=True)
        self.assertEqual(found.exception.code, 0)

    def test_of_one_is_a_failure_that_names_the_run(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "left `fit` by `sys.exit`"):
            self.left(all_leave=False)


class TakeOverTest(tf.test.TestCase):
    def taken(self, *models: keras.Model, quiet: bool = False) -> list[Any]:
        def work(transport: loopback.Loopback) -> Any:
            return compared.take_over(models[transport.rank], transport, quiet)

        return loopback.run_workers(len(models), work)

    def assert_alike(self, one: keras.Model, other: keras.Model) -> None:
        for a, b in zip(one.variables, other.variables, strict=True):
            self.assertAllEqual(a.numpy(), b.numpy())

    @pytest.mark.long
    def test_where_nothing_differs_little_is_sent(self) -> None:
        models = model(), model()
        sent = []

        def work(transport: loopback.Loopback) -> Any:
            found = compared.take_over(models[transport.rank], transport, False)
            sent.append([call.bytes for call in transport.sent])
            return found

        self.assertEqual(loopback.run_workers(2, work), [([], [])] * 2)
        self.assertEqual(sent, [[16], [16]])

    @pytest.mark.long
    def test_the_value_of_the_chief_is_taken_and_the_variable_named(self) -> None:
        models = model(), model(), model()
        kernel, bias = models[2].get_layer("frozen").get_weights()
        models[2].get_layer("frozen").set_weights([kernel + 1e-6, bias])
        slot = models[2].optimizer.variables[3]
        slot.assign(np.ones(slot.shape))
        for paths, ranks in self.taken(*models):
            self.assertEqual(ranks, [2])
            self.assertLen(paths, 2)
            self.assertEqual(paths[0], "frozen/kernel")
        self.assertAllEqual(models[2].get_layer("frozen").get_weights()[0], kernel)
        self.assert_alike(models[0], models[2])

    def test_a_warning_names_some(self) -> None:
        told = compared.warning(["frozen/kernel"] * 10, [2])
        self.assertRegex(told, r"ranks \[2\].*'frozen/kernel', .* and 2 more$")

    @pytest.mark.long
    def test_what_steps_change_on_each_worker_is_taken_without_a_word(self) -> None:
        models = model(), model()
        norm = models[1].get_layer("norm")
        norm.moving_mean.assign(np.full(4, 3.0))
        for variable in models[1].variables:
            if variable.name == "seed_generator_state":
                variable.assign(variable + 1)
        self.assertEqual(self.taken(*models, quiet=True), [([], [])] * 2)
        self.assert_alike(*models)
        norm.moving_mean.assign(np.full(4, 3.0))
        (paths, _), _ = self.taken(*models)
        self.assertEqual(paths, ["norm/moving_mean"])

    def test_other_models_are_left_to_the_comparison_of_what_is_trained(self) -> None:
        self.assertEqual(self.taken(model(2), model(3)), [([], [])] * 2)


if __name__ == "__main__":
    tf.test.main()
