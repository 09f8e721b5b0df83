"""Workers end `evaluate` and `predict` after the same batch, as one process does."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from loopback import in_scopes


class Ends(keras.callbacks.Callback):
    """Ends a run after its second batch."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating = batch == 1

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_predicting = batch == 1


def results(ends: bool) -> Any:
    """Return what is evaluated and predicted; some workers have no callback."""
    x = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    options = {"batch_size": 4, "verbose": 0, "callbacks": [Ends()] if ends else None}
    data = x, x[:, :1]
    told = [model.evaluate(*data, **options), model.predict(x, **options)]
    del options["callbacks"]  # the next runs are of all batches
    return [*told, model.evaluate(*data, **options), model.predict(x, **options)]


@pytest.mark.long
class EarlyEndsTest(tf.test.TestCase):
    @pytest.mark.extended
    def test_all_end_after_the_batch_after_which_one_does(self) -> None:
        expected = results(True)
        self.assertLen(expected[1], 8)
        self.assertLen(expected[3], 13)
        for found in in_scopes(3, lambda strategy: results(strategy.rank == 1)):
            for one, other in zip(found, expected, strict=True):
                self.assertAllClose(one, other, 1e-5, 1e-5)


if __name__ == "__main__":
    tf.test.main()
