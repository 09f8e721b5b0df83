"""Tests of workers of parameter servers, all in this process."""

from typing import Any

import keras
import local_servers
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

ROWS, WIDTH = 32, 4


class Rows(keras.metrics.Metric):
    """Counts the rows that it is given."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(tf.cast(tf.shape(y)[0], tf.float32))

    def result(self) -> Any:
        return self.count + 0.0


def linear(strategy: Any, rate: float = 0.01) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.SGD(rate), "mse", metrics=[Rows()], jit_compile=False
        )
    return model


def embedding(strategy: Any, **options: Any) -> keras.Model:
    """Return a model whose table is on the servers only."""
    layers = keras.layers
    with strategy.scope():
        table = layers.Embedding(ROWS, WIDTH, embeddings_initializer="zeros")
        model = keras.Sequential([*options.get("before", []), table, layers.Flatten()])
        model.compile(keras.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    return model


class DataTest(parameterized.TestCase):
    def test_validation_takes_all_rows_whoever_has_distributed_the_data(self) -> None:
        x = np.zeros([64, 4], "float32")
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
        with local_servers.Job(workers=2) as job:
            strategy = job.worker(0)
            model = linear(strategy)
            for given in (data, strategy.experimental_distribute_dataset(data)):
                for validation in (
                    data,
                    strategy.experimental_distribute_dataset(data),
                ):
                    logs = model.fit(
                        given,
                        steps_per_epoch=4,
                        validation_data=validation,
                        validation_steps=4,
                        verbose=0,
                    )
                    self.assertEqual(logs.history["rows"], [32.0])
                    self.assertEqual(logs.history["val_rows"], [64.0])
            evaluated = model.evaluate(validation, verbose=0, return_dict=True)
            self.assertEqual(evaluated["rows"], 64.0)


class CallbacksTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
            "EarlyStopping must be without `restore_best_weights=True`.*"
            "ModelCheckpoint.path, save_best_only=True",
        ),
        (
            keras.callbacks.TensorBoard("never", histogram_freq=1),
            "TensorBoard must be without `histogram_freq`",
        ),
    )
    def test_what_needs_whole_tables_is_refused_before_training(
        self, callback: Any, text: str
    ) -> None:
        x = np.zeros([8, 1], "int32")
        y = np.zeros([8, WIDTH], "float32")
        with local_servers.Job(workers=1) as job:
            strategy = job.worker(0, table_bytes=64)
            for before in ([], [keras.Input([1], dtype="int32")]):
                model = embedding(strategy, before=before)
                with self.assertRaisesRegex(ValueError, text):
                    model.fit(x, y, verbose=0, callbacks=[callback])
                self.assertEqual(int(strategy.server_stats().pushes), 0)
            stops = keras.callbacks.EarlyStopping("loss")
            model.fit(x, y, verbose=0, callbacks=[stops])


if __name__ == "__main__":
    tf.test.main()
