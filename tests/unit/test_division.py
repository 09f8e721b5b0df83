"""Tests of what is read in models: which losses are sums of rows."""

import keras
import tensorflow as tf

from tf_dgc.strategies import division


class SumsTest(tf.test.TestCase):
    def test_losses_may_be_sums_but_metrics_are_no_losses(self) -> None:
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.total = keras.metrics.Sum()
        model.compile("sgd", "mse", metrics=[keras.metrics.Sum()])
        self.assertEqual(division.sums_of(model), [])
        loss = keras.losses.MeanSquaredError(reduction="sum")
        model.compile("sgd", loss)
        self.assertEqual(division.sums_of(model), [loss])


if __name__ == "__main__":
    tf.test.main()
