"""A worker without rows changes nothing: threads against plain Keras, one process."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, run_workers

import tf_dgc

ROWS, BATCH = 17, 8  # of the last batch only rank 0 has a row


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    return x, random.normal(size=(ROWS, 3)).astype("float32")


def dense(transport: Loopback) -> Any:
    return tf_dgc.DenseStrategy(transport=transport)


def averaging(transport: Loopback, **settings: Any) -> Any:
    config = tf_dgc.AveragingConfig(**{"period": 1} | settings)
    return tf_dgc.ParameterAveragingStrategy(config, transport=transport)


def in_scopes(make: Any, work: Any, size: int = 2) -> list[Any]:
    def run(transport: Loopback) -> Any:
        with make(transport).scope():
            return work()

    return run_workers(size, run)


@pytest.mark.long
class AveragingTest(parameterized.TestCase, tf.test.TestCase):
    def trained(self, steps: int | None = None, epochs: int = 1) -> list[np.ndarray]:
        x, y = data()
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3, kernel_initializer="ones"),
            ]
        )
        model.layers[0].trainable = False
        sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        model.compile(sgd, "mse", run_eagerly=True)
        fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(x, y, epochs=epochs, **fit)
        return model.get_weights()

    def test_who_has_no_rows_is_left_out_of_the_mean(self) -> None:
        expected = self.trained()
        for found in in_scopes(averaging, self.trained):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    @pytest.mark.slow
    def test_it_is_left_out_in_longer_periods(self) -> None:
        """Steps that others took are not halved."""

        def one() -> list[np.ndarray]:
            x, y = data()
            kernel, bias = np.ones([4, 3]), np.zeros(3)
            own = [(kernel.copy(), bias.copy()) for _ in range(2)]
            for begin in (0, 8, 16):
                for rank in range(2):
                    rows = np.array_split(np.arange(begin, min(begin + 8, 17)), 2)[rank]
                    if len(rows):
                        a = x[rows] / np.sqrt(1 + 1e-3)
                        w, b = own[rank]
                        error = 2 * (a @ w + b - y[rows]) / (len(rows) * 3)
                        own[rank] = w - 0.1 * a.T @ error, b - 0.1 * error.sum(0)
                if begin == 8:
                    own = [
                        tuple(np.mean(p, axis=0) for p in zip(*own, strict=True))
                    ] * 2
            return list(own[0])  # rank 1 had no rows since

        expected = one()
        for found in in_scopes(lambda t: averaging(t, period=2), self.trained):
            kernel, bias = found[-2:] if found[-1].ndim == 1 else found[2:4]
            self.assertAllClose(kernel, expected[0], 1e-5, 1e-5)
            self.assertAllClose(bias, expected[1], 1e-5, 1e-5)

    def test_a_small_step_without_rows_does_not_lose_those_before(self) -> None:
        expected = in_scopes(dense, lambda: self.trained(3))[0]
        for found in in_scopes(averaging, lambda: self.trained(3)):
            self.assertAllClose(found, expected, 1e-5, 1e-5)


if __name__ == "__main__":
    pytest.main([__file__])
