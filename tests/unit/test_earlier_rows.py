"""What stands where a worker has no row: of an earlier batch, and it counts nothing."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import in_scopes

import tf_dgc
from tf_dgc.strategies import slicing
from tf_dgc.strategies.earlier_rows import EarlierRows

ROWS = np.random.default_rng(0).random((5, 4)) + np.array([2, 0, 0, 2])
ROWS = ROWS.astype(np.float32)
# What is made of rows, and cannot be made of zeros.
MADE: dict[str, tuple[Any, Callable[[tf.Tensor], tf.Tensor]]] = {
    "numbers": (np.char.mod("%.6f", ROWS), tf.strings.to_number),
    "inverse": (
        ROWS,
        lambda x: tf.reshape(tf.linalg.inv(tf.reshape(x, [-1, 2, 2])), [-1, 4]),
    ),
}


class EarlierRowsTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(True, False)
    def test_the_first_row_stands_where_there_is_none(self, traced: bool) -> None:
        earlier = EarlierRows()

        def filled(x: tf.Tensor, y: tf.Tensor) -> Any:
            return slicing.at_least_one_row((x, y), earlier)[0]

        if traced:
            forms = [tf.TensorSpec([None]), tf.TensorSpec([None, 2], tf.string)]
            filled = tf.function(filled, input_signature=forms)
        none = tf.zeros([0]), tf.constant([], tf.string, [0, 2])
        self.assertAllEqual(filled(*none)[0], [0.0])  # as long as there was none
        for x, y in (([3.0, 4.0], [["a", "b"], ["c", "d"]]), ([5.0], [["e", "f"]])):
            found = filled(tf.constant(x), tf.constant(y))
            self.assertAllEqual(found[0], x)
            self.assertAllEqual(found[1], y)
        found = filled(*none)
        self.assertAllEqual(found[0], [3.0])
        self.assertAllEqual(found[1], [["a", "b"]])

    def test_rows_are_kept_of_what_a_function_is_traced_for_later(self) -> None:
        earlier = EarlierRows()

        @tf.function
        def filled(x: tf.Tensor) -> Any:
            return slicing.at_least_one_row((x,), earlier)[0]

        form = [None, 2]
        for dtype in (tf.float32, tf.int32):  # variables are made in each trace
            x = tf.ones([3, 2], dtype)
            unknown = tf.function(
                lambda x: filled(tf.raw_ops.PlaceholderWithDefault(input=x, shape=form))
            )
            self.assertAllEqual(unknown(x)[0], x)

    @pytest.mark.long
    def test_a_part_may_have_no_row_where_others_have(self) -> None:
        earlier = EarlierRows()

        @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
        def filled(x: tf.Tensor, boxes: tf.Tensor) -> Any:
            return slicing.at_least_one_row(({"x": x}, x, boxes), earlier)[0]

        none = tf.zeros([0])
        self.assertAllEqual(filled(tf.constant([3.0]), none)[2], none)
        self.assertAllEqual(filled(none, none)[1], [0.0])  # none was complete
        filled(tf.constant([4.0]), tf.constant([5.0]))
        self.assertAllEqual(filled(none, none)[1], [4.0])

    def test_it_is_of_zeros_where_rows_may_have_another_form(self) -> None:
        earlier = EarlierRows()

        @tf.function(input_signature=[tf.TensorSpec([None, None])])
        def filled(x: tf.Tensor) -> Any:
            return slicing.at_least_one_row((x,), earlier)[0]

        filled(tf.ones([2, 3]))
        self.assertAllEqual(filled(tf.zeros([0, 2]))[0], [[0.0, 0.0]])

    @parameterized.parameters(list(MADE))
    @pytest.mark.few(1)
    @pytest.mark.long
    def test_a_model_that_takes_no_zeros_trains_as_on_one_worker(
        self, kind: str
    ) -> None:
        x, function = MADE[kind]
        y = ROWS[:, :1]

        def work(_: Any) -> Any:
            inputs = keras.Input((4,), dtype="float32" if x is ROWS else "string")
            made = keras.layers.Lambda(function, output_shape=(4,))(inputs)
            outputs = keras.layers.Dense(1, kernel_initializer="ones")(made)
            model = keras.Model(inputs, outputs)
            model.compile(keras.optimizers.SGD(0.01), "mse")
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
            found = [*model.fit(data, epochs=2, verbose=0).history["loss"]]
            found.append(model.evaluate(data, verbose=0))
            found.append(model.predict(data, verbose=0))
            return [*found, *model.get_weights()]

        (expected,) = in_scopes(1, work)
        for found in in_scopes(2, work, tf_dgc.DenseStrategy):
            for one, two in zip(found, expected, strict=True):
                self.assertAllClose(one, two, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    pytest.main([__file__])
