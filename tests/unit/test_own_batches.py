"""What `predict` makes of outputs of all kinds: threads against one process."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, in_scopes, outcomes, run_workers

import tf_dgc
from tf_dgc.strategies import data
from tf_dgc.strategies.handed_over import fingerprint
from tf_dgc.strategies.own_batches import OwnBatches

Tensors = Callable[[tf.Tensor], Any]


def ragged(x: tf.Tensor) -> tf.RaggedTensor:
    """Return a tensor of no, one or two rows of each row."""
    return tf.RaggedTensor.from_tensor(x, lengths=tf.cast(x[:, 0, 0], tf.int64) % 3)


OUTPUTS: dict[str, Tensors] = {
    "as many rows": lambda x: x,
    "tokens": lambda x: tf.reshape(x, [-1, 2]),
    "boxes": lambda x: ragged(x).merge_dims(0, 1),
    "ragged": ragged,
    "twice ragged": lambda x: tf.RaggedTensor.from_uniform_row_length(ragged(x), 1),
    "sparse": lambda x: tf.sparse.from_dense(x[:, 0] % 3),
    "texts": lambda x: tf.strings.as_string(x[:, :, 0]),
    "truths": lambda x: x[:, 0] % 2 > 0,
    "of the number of rows": lambda x: {
        "a": tf.fill([tf.shape(x)[0], 1], 0.1),
        "b": x[:, 0],
        "c": tf.zeros([2 * tf.shape(x)[0]], tf.int32),
    },
    "several": lambda x: {"a": x[:, 0], "b": (tf.reshape(x, [-1]), None)},
}


def values(output: Any) -> list[Any]:
    flat = tf.nest.flatten(output)
    flat = [
        tf.sparse.to_dense(v) if isinstance(v, tf.SparseTensor) else v for v in flat
    ]
    return [
        v.to_list() if isinstance(v, tf.RaggedTensor) else v.numpy().tolist()
        for v in flat
        if v is not None
    ]


class PredictTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(kind=list(OUTPUTS), rows=[7, 3, 2, 1])
    @pytest.mark.few(6)
    @pytest.mark.long
    def test_all_rows_come_in_the_order_of_one_process(
        self, kind: str, rows: int
    ) -> None:
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 2, 2) + 1
        expected = values(OUTPUTS[kind](tf.constant(x)))
        whole = tf.data.Dataset.from_tensors(x)

        def predicted(transport: Loopback) -> Any:
            (own,) = data.share_of(whole, transport.rank, 3)
            step = lambda args: OUTPUTS[kind](args[0])  # noqa: E731
            return values(OwnBatches(transport).predict((own,), step))

        for found in run_workers(3, predicted):
            self.assertEqual(found, expected)

    @parameterized.parameters(list(OUTPUTS))
    @pytest.mark.few(3)
    @pytest.mark.long
    def test_so_do_those_of_a_graph_that_knows_their_number(self, kind: str) -> None:
        x = np.arange(3 * 4, dtype=np.float32).reshape(3, 2, 2) + 1
        expected = values(OUTPUTS[kind](tf.constant(x)))
        whole = tf.data.Dataset.from_tensors(x)

        def predicted(transport: Loopback) -> Any:
            (mine,) = data.share_of(whole, transport.rank, 2)
            own = OwnBatches(transport)

            @tf.function(autograph=False)
            def predict(x: tf.Tensor) -> Any:
                found = own.predict((x,), lambda args: OUTPUTS[kind](args[0]))
                return [each for each in tf.nest.flatten(found) if each is not None]

            return values(predict(tf.ensure_shape(mine, [2 - transport.rank, 2, 2])))

        for found in run_workers(2, predicted):
            self.assertEqual(found, expected)

    def test_alone_there_are_only_its_own(self) -> None:
        def predicted(transport: Loopback) -> Any:
            own = OwnBatches(transport)
            x = tf.ones([transport.rank + 1, 2, 2])
            step = lambda args: tf.reduce_sum(args[0])  # noqa: E731
            return float(own.call(lambda: own.predict((x,), step)))

        self.assertEqual(run_workers(2, predicted), [4.0, 8.0])


class FixedTest(tf.test.TestCase):
    """Outputs that have as many rows whatever there is in a batch."""

    def predicted(self, step: Tensors, alone: bool = False) -> Any:
        def run(transport: Loopback) -> Any:
            own = OwnBatches(transport)
            form = tf.TensorSpec([None, 2, 2])

            @tf.function(autograph=False, input_signature=[form])
            def predict(x: tf.Tensor) -> Any:
                return own.predict((x,), lambda args: step(args[0]))

            x = tf.ones([3, 2, 2])
            return own.call(lambda: predict(x)) if alone else predict(x)

        (found,) = run_workers(1, run)
        return found

    def test_what_does_not_depend_on_rows_is_given_once(self) -> None:
        codes = tf.reshape(tf.range(6.0), [3, 2])
        found = self.predicted(lambda x: (x, codes + 1.0, tf.constant(2.0)))
        self.assertAllEqual(found[1], codes + 1.0)
        self.assertAllEqual(found[2], 2.0)

    def test_what_is_of_all_rows_is_refused(self) -> None:
        for step in (tf.reduce_sum, lambda x: tf.reduce_sum(x, 0, keepdims=True)):
            with self.assertRaisesRegex(
                tf.errors.InvalidArgumentError, "depends on the rows.*each worker"
            ):
                self.predicted(step)
            self.assertEqual(float(tf.reduce_sum(self.predicted(step, True))), 12.0)


def model() -> keras.Model:
    made = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    made.compile("sgd", "mse", run_eagerly=True)
    return made


class HandedOverTest(parameterized.TestCase, tf.test.TestCase):
    """Data that each worker has made for itself."""

    x = np.arange(14, dtype=np.float32).reshape(7, 2)

    @pytest.mark.long
    def test_each_predicts_what_it_hands_over(self) -> None:
        def predicted(strategy: Any) -> Any:
            made, own = model(), self.x[strategy.rank :: 2]
            alone = made.predict(own, batch_size=2, verbose=0)
            return alone, own.sum(1), made.predict(self.x, batch_size=2, verbose=0)

        for alone, expected, together in in_scopes(2, predicted):
            self.assertAllClose(alone[:, 0], expected)
            self.assertAllClose(together[:, 0], self.x.sum(1))

    @parameterized.parameters(True, False)
    def test_the_same_rows_of_all_in_train_on_batch_are_told(self, same: bool) -> None:
        def trained(strategy: Any) -> None:
            made, rows = model(), self.x if same else self.x[strategy.rank :: 2]
            for _ in range(2):
                made.train_on_batch(rows, rows[:, :1])

        with mock.patch("logging.Logger.warning") as warned:
            in_scopes(2, trained)
        told = [c for c in warned.call_args_list if "`train_on_batch`" in c.args[0]]
        self.assertLen(told, int(same))

    @parameterized.parameters("evaluate", "fit")
    def test_metrics_are_of_all(self, method: str) -> None:
        def evaluated(transport: Loopback) -> Any:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            with strategy.scope():
                own = self.x[strategy.rank :: 2]
                data = own, own[:, :1]
                if method == "evaluate":
                    return model().evaluate(*data, verbose=0)
                return model().fit(self.x, self.x[:, :1], validation_data=data)

        for error in outcomes(2, evaluated):
            self.assertIsInstance(error, ValueError)
            self.assertRegex(str(error), r"same data to `evaluate`.*\(4, 2\).*\(3, 2\)")

    def test_fingerprints_part_what_differs(self) -> None:
        large = np.zeros([2**15, 16], np.float32)
        other = large.copy()
        other[-1, 3] = 1.0
        frame = {"a": np.array(["x", None], object), "b": [large]}
        ragged = tf.ragged.constant([[1], [2, 3]])
        for one, two in (
            (large, other),
            (large, large[1:]),
            (large, large.astype(np.float64)),
            (frame, {**frame, "a": np.array(["y", None], object)}),
            (ragged, tf.ragged.constant([[1, 2], [3]])),
            (tf.data.Dataset.range(3), tf.data.Dataset.range(4)),
        ):
            self.assertNotEqual(fingerprint(one), fingerprint(two))
            self.assertEqual(fingerprint(one), fingerprint(one))
        for unknown in (None, iter([]), "text", [1.0]):
            self.assertEqual(fingerprint(unknown), [])


if __name__ == "__main__":
    pytest.main([__file__])
