"""Tests of the list of what is replaced in Keras and TensorFlow."""

import ast
import inspect
import pathlib
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from loopback import in_scopes
from tensorflow.python.autograph.impl import api

import tf_dgc
from tf_dgc import _host
from tf_dgc.strategies import patches

ROOT = pathlib.Path(tf_dgc.__file__).parent
X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X[:, :1]


def now() -> dict[tuple[Any, str], Any]:
    """Return what stands in each place of the list."""
    return {place: vars(place[0]).get(place[1]) for place in patches.replaced()}


def loss_of_fit(strategy: tf.distribute.Strategy) -> float:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return float(model.fit(X, Y, batch_size=8, verbose=0).history["loss"][-1])


def file_of(value: Any) -> str:
    return "" if inspect.ismodule(value) else value.__code__.co_filename


class PatchesTest(tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        patches.remove()
        self.addCleanup(patches.install)  # for strategies of other tests

    @pytest.mark.long
    def test_removed_they_leave_keras_and_tensorflow_as_they_were(self) -> None:
        before = now()
        for (owner, name), value in before.items():
            self.assertNotIn(str(ROOT), file_of(value), f"{owner}.{name}")
        plain = loss_of_fit(tf.distribute.get_strategy())
        for _ in range(2):  # and are installed again
            own = loss_of_fit(tf_dgc.DenseStrategy(transport="local"))
            self.assertEqual(own, plain)
            for place, value in now().items():
                self.assertIsNot(value, before[place], place)
            patches.remove()
            for place, value in now().items():
                self.assertIs(value, before[place], place)
        self.assertEqual(loss_of_fit(tf.distribute.get_strategy()), plain)

    def test_installing_twice_replaces_once(self) -> None:
        patches.install()
        once = now()
        patches.install()
        for place, value in now().items():
            self.assertIs(value, once[place], place)

    def test_what_others_put_around_them_stays(self) -> None:
        patches.install()
        calls, ours = [], keras.Model.predict

        def predict(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return ours(model, *args, **kwargs)

        owner, name = _host.patches.target("predict")
        setattr(owner, name, predict)
        try:
            patches.remove()
            self.assertIs(vars(owner)[name], predict)
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
            self.assertEqual(model.predict(X, verbose=0).shape, (16, 1))
            self.assertLen(calls, 1)
        finally:
            setattr(owner, name, inspect.unwrap(ours))

    def test_each_has_a_reason(self) -> None:
        for patch in patches.PATCHES:
            self.assertGreater(len(patch.reason.split()), 2, patch)

    @pytest.mark.long
    def test_no_other_module_replaces_anything(self) -> None:
        for path in ROOT.rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("_host/", "verify/")) or path == pathlib.Path(
                patches.__file__
            ):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                where = f"{name}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Attribute):
                    self.assertNotEqual(ast.unparse(node), "_host.patches", where)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    root = ast.unparse(node).split(".")[0]
                    if name != "strategies/randomness.py":  # while a batch is ordered
                        self.assertNotIn(root, ("keras", "tf"), where)


if __name__ == "__main__":
    tf.test.main()


class ConversionTest(tf.test.TestCase):
    def test_autograph_converts_functions_of_scripts_and_none_of_the_package(
        self,
    ) -> None:
        converted: list[str] = []
        convert = api._convert_actual

        def noted(function: Any, context: Any) -> Any:
            converted.append(function.__module__)
            return convert(function, context)

        def train(strategy: Any) -> list[float]:
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
            rows = tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (x, y))
            shared = strategy.experimental_distribute_dataset(rows.batch(8))

            def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                    if tf.shape(x)[0] < 0:  # which needs a conversion
                        loss = 2.0 * loss
                gradients = tape.gradient(loss, model.trainable_variables)
                gradients, _ = tf.clip_by_global_norm(gradients, 1e3)
                pairs = zip(gradients, model.trainable_variables, strict=True)
                optimizer.apply_gradients(pairs)
                return loss

            @tf.function
            def run(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
                loss = strategy.run(step, args=(x, y))
                return strategy.reduce("SUM", loss, axis=None)

            return [float(run(x, y)) for x, y in shared]

        with mock.patch.object(api, "_convert_actual", noted):
            first, second = in_scopes(2, train)
        self.assertAllEqual(first, second)
        self.assertIn(__name__, converted)
        self.assertEmpty([name for name in converted if name.startswith("tf_dgc")])
