"""Losses are read: whatever is made of sums over rows is what one process computes."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc import _host
from tf_dgc.strategies import losses, readings
from tf_dgc.strategies.losses import BY_ROWS, SUMMED
from tf_dgc.strategies.replicas import Replicas

N = Replicas(3)  # as a script gets it
ROWS = 7
SHARES = ((0, 3), (3, 6), (6, 7))
Form = Callable[[tf.Tensor, tf.Tensor, tf.Variable, int], tf.Tensor]


def squares(x: tf.Tensor, y: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    """Return errors, shape [rows, 2]."""
    return tf.square(y - tf.tanh(x @ w))


def masked_by_keras(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> tf.Tensor:
    outputs = tf.tanh(x @ w)[:, :, tf.newaxis]
    outputs._keras_mask = y > 0
    return keras.losses.MeanSquaredError()(y[:, :, tf.newaxis], outputs)


def of_chosen(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> tf.Tensor:
    chosen = tf.boolean_mask(squares(x, y, w), y[:, 0] > 0)
    return tf.reduce_mean(chosen)


def by_positives(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> tf.Tensor:
    positives = tf.reduce_sum(tf.cast(y > 0, tf.float32))
    each = squares(x, y, w) / tf.maximum(positives, 1.0)
    return tf.reduce_sum(tf.reduce_sum(each, axis=1))


def rate_of_rows(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> tf.Tensor:
    rows = tf.cast(tf.shape(x)[0], tf.float32)
    elements = tf.cast(tf.size(y), tf.float32)
    errors = squares(x, y, w)
    return tf.reduce_sum(errors) / rows + tf.reduce_sum(errors) / elements


def by_ones(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> tf.Tensor:
    errors = squares(x, y, w)
    ones = tf.fill(tf.shape(errors), 2.0) * tf.ones_like(errors) - tf.zeros_like(y)
    return 2.0 * tf.reduce_sum(errors) / tf.reduce_sum(ones)


def decorrelated(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> tf.Tensor:
    z = x @ w
    products = tf.matmul(z, z, transpose_a=True) / tf.cast(tf.shape(z)[0], tf.float32)
    return tf.reduce_sum(tf.square(products - tf.eye(2)))


def by_a_global_batch(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    each = tf.reduce_mean(squares(x, y, w), -1)
    return tf.nn.compute_average_loss(each, global_batch_size=ROWS)


def weighted_by_classes(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    classes = tf.cast(y[:, 0] > 0, tf.int32)
    each = tf.reduce_mean(squares(x, y, w), -1)
    sums = tf.math.unsorted_segment_sum(each, classes, 2)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(each), classes, 2)
    return tf.reduce_mean(tf.math.divide_no_nan(sums, counts))


MEANS: dict[str, Form] = {
    "mean": lambda x, y, w, n: tf.reduce_mean(squares(x, y, w)),
    "mean of means": lambda x, y, w, n: tf.reduce_mean(
        tf.reduce_mean(squares(x, y, w), 1)
    ),
    "of Keras": lambda x, y, w, n: keras.losses.MeanSquaredError()(y, tf.tanh(x @ w)),
    "by N": lambda x, y, w, n: tf.reduce_mean(squares(x, y, w)) / n,
    "times 1/N": lambda x, y, w, n: (1.0 / n) * tf.reduce_mean(squares(x, y, w)),
    "and a penalty": lambda x, y, w, n: (
        tf.reduce_mean(squares(x, y, w)) + 0.1 * tf.nn.l2_loss(w)
    ),
    "sum by rows": rate_of_rows,
    "sum by rows times N": lambda x, y, w, n: (
        tf.reduce_sum(squares(x, y, w)) / tf.cast(tf.shape(x)[0] * n, tf.float32)
    ),
}
SUMS: dict[str, Form] = {
    "sum": lambda x, y, w, n: tf.reduce_sum(squares(x, y, w)),
    "vector": lambda x, y, w, n: tf.reduce_mean(squares(x, y, w), 1),
    "global batch": by_a_global_batch,
    "sum of Keras": lambda x, y, w, n: keras.losses.MeanSquaredError(reduction="sum")(
        y, tf.tanh(x @ w)
    ),
}
OTHERS: dict[str, Form] = {
    "masked": lambda x, y, w, n: (
        tf.reduce_sum(squares(x, y, w) * tf.cast(y > 0, tf.float32))
        / tf.reduce_sum(tf.cast(y > 0, tf.float32))
    ),
    "masked by Keras": masked_by_keras,
    "of chosen": of_chosen,
    "by ones": by_ones,
    "by positives": by_positives,
    "dice": lambda x, y, w, n: keras.losses.Dice()(tf.abs(y), tf.sigmoid(x @ w)),
    "root": lambda x, y, w, n: tf.sqrt(tf.reduce_mean(squares(x, y, w)) + 0.1),
    "sum and mean": lambda x, y, w, n: (
        tf.reduce_mean(squares(x, y, w)) + 0.01 * tf.reduce_sum(tf.square(x @ w))
    ),
    "sum and penalty": lambda x, y, w, n: (
        tf.reduce_sum(squares(x, y, w)) + tf.nn.l2_loss(w)
    ),
    "mean and term by N": lambda x, y, w, n: (
        tf.reduce_mean(squares(x, y, w)) + tf.reduce_mean(tf.square(x @ w)) / n
    ),
    "decorrelated": decorrelated,
    "by classes": weighted_by_classes,
}
ALL = MEANS | SUMS | OTHERS


def data() -> tuple[tf.Tensor, tf.Tensor, tf.Variable]:
    random = tf.random.Generator.from_seed(4)
    y = random.normal([ROWS, 2])
    return random.normal([ROWS, 5]), y, tf.Variable(random.normal([5, 2]))


def of_share(
    form: Form,
    w: tf.Variable,
    totals: list[tf.Tensor] | None,
    x: tf.Tensor,
    y: tf.Tensor,
) -> tuple[Any, Any, Any, list[tf.Tensor]]:
    """Return way, loss, gradient and sums of the rows of one worker."""
    local: list[tf.Tensor] = []

    def total(numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        local.extend(numbers)
        return numbers if totals is None else totals

    static = None if x.shape[0] is None else int(x.shape[0])
    reading = readings.Reading([x, y], [], static)
    reading.asked = int(N)
    read = losses.Losses(reading, int(N), total)
    with _host.operations.recorded():
        with tf.GradientTape() as tape:
            loss = form(x, y, w, N)
        way = read.way_of([loss])
        whole = read.whole([loss])
        gradient = tape.gradient(whole.targets, w, whole.upstream)
    return way, whole.value, gradient, local


class LossesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*ALL)
    def test_gradients_of_shares_add_up(self, name: str) -> None:
        self.check(name, eager=False)

    @parameterized.parameters(*ALL)
    @pytest.mark.slow
    def test_gradients_of_shares_add_up_eagerly(self, name: str) -> None:
        self.check(name, eager=True)

    @parameterized.parameters(*ALL)
    @pytest.mark.slow
    def test_gradients_of_shares_whose_shapes_are_known_add_up(self, name: str) -> None:
        self.check(name, eager=False, known=True)

    def check(self, name: str, eager: bool, known: bool = False) -> None:
        form = ALL[name]
        x, y, w = data()
        with tf.GradientTape() as tape:
            loss = form(x, y, w, 1)
        expected = tape.gradient(loss, w)
        ways = set()

        def found(totals: list[tf.Tensor] | None) -> list[Any]:
            results = []
            call = functools.partial(of_share, form, w, totals)
            if not eager:
                way: list[Any] = []

                def traced(x: tf.Tensor, y: tf.Tensor) -> Any:
                    found_way, *rest = of_share(form, w, totals, x, y)
                    way[:] = found_way or ()
                    return rest

                signature = [tf.TensorSpec([None, 5]), tf.TensorSpec([None, 2])]
                signature = None if known else signature
                function = tf.function(traced, signature, autograph=False)

                def call(x: tf.Tensor, y: tf.Tensor) -> Any:
                    rest = function(x, y)
                    return tuple(way) or None, *rest

            for start, stop in SHARES:
                way_found, *rest = call(x[start:stop], y[start:stop])
                ways.add(way_found)
                results.append(rest)
            return results

        sums = zip(*(local for _, _, local in found(None)), strict=True)
        results = found([tf.add_n(list(each)) for each in sums])
        total = tf.add_n([gradient for _, gradient, _ in results])
        self.assertAllClose(total, expected, 1e-5, 1e-5)
        for value, _, _ in results:
            self.assertAllClose(value, tf.reduce_sum(loss), 1e-5, 1e-5)
        (way,) = ways
        kind = None if way is None else way[0]
        wanted = BY_ROWS if name in MEANS else SUMMED if name in SUMS else None
        self.assertEqual(kind, wanted)


if __name__ == "__main__":
    tf.test.main()
