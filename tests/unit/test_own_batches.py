"""What `predict` makes of outputs of all kinds: threads against one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, run_workers

from tf_dgc.strategies import data
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

    def test_alone_there_are_only_its_own(self) -> None:
        def predicted(transport: Loopback) -> Any:
            own = OwnBatches(transport)
            x = tf.ones([transport.rank + 1, 2, 2])
            step = lambda args: tf.reduce_sum(args[0])  # noqa: E731
            return float(own.call(lambda: own.predict((x,), step)))

        self.assertEqual(run_workers(2, predicted), [4.0, 8.0])


if __name__ == "__main__":
    pytest.main([__file__])
