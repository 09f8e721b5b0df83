"""Loops that apply gradients outside of `strategy.run`, and data without a batch."""

import traceback
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, in_scopes, outcomes

import tf_dgc
from tf_dgc._host import tracebacks
from tf_dgc.strategies import unused

TOLD = "An optimizer applies this worker's own gradient to "


def apply(optimizer: Any, gradient: Any, variable: Any) -> None:
    optimizer.apply([gradient], [variable])


def apply_pairs(optimizer: Any, gradient: Any, variable: Any) -> None:
    optimizer.apply_gradients([(gradient, variable)])


def nested(optimizer: Any, gradient: Any, variable: Any) -> None:
    tf.function(lambda g: apply(optimizer, g, variable))(gradient)


FORMS = {
    "eager": apply,
    "pairs": apply_pairs,
    "function": lambda *args: tf.function(lambda g: apply(args[0], g, args[2]))(
        args[1]
    ),
    "nested": lambda *args: tf.function(lambda g: nested(args[0], g, args[2]))(args[1]),
}
OPTIMIZERS = {
    "plain": lambda: keras.optimizers.SGD(0.1),
    "decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


class OutsideTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(form=list(FORMS), kind=list(OPTIMIZERS))
    def test_several_workers_are_told_to_run_the_step(
        self, form: str, kind: str
    ) -> None:
        def work(transport: Loopback) -> Any:
            with tf_dgc.DenseStrategy(transport=transport).scope():
                image = tf.Variable(tf.ones([3]))  # of no model
                FORMS[form](OPTIMIZERS[kind](), tf.ones([3]), image)

        for error in outcomes(2, work):
            self.assertIsInstance(error, RuntimeError)
            *_, last = traceback.format_exception(tracebacks.brief(error))
            self.assertStartsWith(last, f"RuntimeError: {TOLD}")
            self.assertIn("`strategy.run(train_step, args=(x, y))`", last)

    @parameterized.product(form=list(FORMS), scope=[True, False])
    def test_one_worker_applies_its_gradients(self, form: str, scope: bool) -> None:
        strategy = tf_dgc.DenseStrategy(transport="local")
        with strategy.scope():
            variable, optimizer = tf.Variable([1.0]), keras.optimizers.SGD(0.5)
            if scope:
                FORMS[form](optimizer, tf.ones([1]), variable)
        if not scope:
            FORMS[form](optimizer, tf.ones([1]), variable)
        self.assertAllClose(variable, [0.5])

    def test_the_remedy_that_is_told_exchanges(self) -> None:
        def work(strategy: Any) -> Any:
            variable, optimizer = tf.Variable([1.0]), keras.optimizers.SGD(0.5)
            rows = tf.data.Dataset.from_tensor_slices([1.0, 3.0]).batch(2)
            for batch in strategy.experimental_distribute_dataset(rows):
                strategy.run(lambda g: apply(optimizer, g, variable), args=(batch,))
            return variable.numpy()

        for found in in_scopes(2, work):
            self.assertAllClose(found, [1.0 - 0.5 * (1.0 + 3.0)])

    @pytest.mark.long
    def test_a_job_that_has_run_no_step_is_told_at_its_end(self) -> None:
        def work(strategy: Any, step: Any) -> None:
            weights = tf.Variable([1.0])
            weights.assign_sub([0.5])
            step(strategy)
            unused.warn(strategy.extended, strategy.mesh)

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            in_scopes(2, lambda strategy: work(strategy, lambda _: None))
        (told,) = logs.output  # the chief's
        self.assertIn("The strategy has run no step", told)
        with self.assertNoLogs("tf_dgc", "WARNING"):
            in_scopes(2, lambda strategy: work(strategy, lambda s: s.run(lambda: 1)))

            def pass_over(strategy: Any) -> None:
                x = tf.ones([4, 2])
                model_of(True, True).fit(x, x[:, :1], verbose=0, initial_epoch=1)

            in_scopes(2, lambda strategy: work(strategy, pass_over))


def model_of(built: bool, eager: bool) -> Any:
    layers = [keras.Input((2,))] if built else []
    ones = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([*layers, ones])
    sgd = keras.optimizers.SGD(0.1)  # without rows Adam counts steps in plain Keras
    model.compile(sgd, "mse", metrics=["mae"], run_eagerly=eager)
    return model


def told(function: Any) -> Any:
    """Return what a function returns, or what it raises."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def without_rows(built: bool, eager: bool) -> list[Any]:
    """Return what each function makes of data without rows, then of some."""
    rows = np.ones([5, 2], np.float32), np.zeros([5, 1], np.float32)
    none = rows[0][:0], rows[1][:0]
    dataset = tf.data.Dataset.from_tensor_slices(rows).filter(lambda *_: False).batch(2)
    model = model_of(built, eager)
    first = [
        told(lambda: model_of(built, eager).evaluate(*none, verbose=0)),
        told(lambda: model_of(built, eager).evaluate(dataset, verbose=0)),
        told(lambda: model_of(built, eager).predict(none[0], verbose=0)),
        told(lambda: model_of(built, eager).fit(dataset, verbose=0).history),
        told(lambda: model.fit(*none, epochs=2, verbose=0).history),
    ]
    assert not any("StopIteration" in str(each) for each in first)
    then = [
        model.fit(*rows, validation_data=none, verbose=0).history["loss"],
        told(lambda: model.evaluate(*none, verbose=0)),
        model.get_weights(),
    ]
    return [first, *then]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
class EmptyTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(True, False)
    @pytest.mark.few(0, 1)
    def test_data_without_a_batch_are_what_they_are_to_one_process(
        self, built: bool
    ) -> None:
        expected = without_rows(built, eager=False)
        for workers in (1, 2):
            for found in in_scopes(workers, lambda _: without_rows(built, eager=True)):
                self.assertEqual(found[0], expected[0])
                self.assertAllClose(found[1:], expected[1:])


if __name__ == "__main__":
    tf.test.main()
