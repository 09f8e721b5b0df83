"""Moving statistics are the mean of those of all workers where workers meet."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import in_scopes

KWARGS: dict[str, Any] = {"batch_size": 8, "verbose": 0}


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def made() -> keras.Model:
    dense = keras.layers.Dense(2, kernel_initializer="ones")
    layers = [keras.Input((3,)), keras.layers.BatchNormalization(), dense]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    return model


def statistics(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in model.non_trainable_variables if "moving" in v.name]


@pytest.mark.long
class StatisticsTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(2, 3)
    @pytest.mark.few(0, 1)
    def test_after_fit_all_have_the_mean_and_evaluate_what_is_saved(
        self, workers: int
    ) -> None:
        x, y = data()

        def work(strategy: Any) -> Any:
            model, own = made(), []

            def note(batch: int, logs: Any) -> None:
                own[:] = statistics(model)

            watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
            model.fit(x, y, **KWARGS, epochs=2, shuffle=False, callbacks=[watch])
            found = statistics(model)
            told = model.evaluate(x, y, **KWARGS), model.predict(x, **KWARGS)
            self.assertAllEqual(statistics(model), found)
            return list(own), found, told, model.get_weights()

        found = in_scopes(workers, work)
        own = [each[0] for each in found]
        self.assertNotAllClose(own[0], own[1])
        for _, settled, (loss, outputs), weights in found:
            self.assertAllClose(settled, np.mean(own, axis=0))
            self.assertAllEqual(settled, found[0][1])
            with tf.distribute.OneDeviceStrategy("CPU:0").scope():
                saved = made()
            saved.set_weights(weights)
            self.assertAllClose(outputs, saved(x), 1e-5)
            self.assertAllClose(loss, float(tf.reduce_mean((saved(x) - y) ** 2)), 1e-5)


if __name__ == "__main__":
    tf.test.main()
