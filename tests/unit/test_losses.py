"""Losses are read: whatever is made of sums over rows is what one process computes."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc import _host
from tf_dgc.strategies import cuts, known, losses, readings
from tf_dgc.strategies.losses import BY_ROWS, SUMMED
from tf_dgc.strategies.replicas import ReplicaCount

N = ReplicaCount(3)  # as a script gets it
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


def weighted_by_bins(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    counts = tf.histogram_fixed_width(y[:, 0], [-1.0, 1.0], 5)
    return tf.reduce_mean(squares(x, y, w)) * tf.cast(counts[0] + 2, tf.float32)


def of_confusions(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    z = x @ w
    classes, guessed = (tf.cast(each[:, 0] > 0, tf.int32) for each in (y, z))
    matrix = tf.math.confusion_matrix(classes, guessed, 2, z[:, 1] ** 2, tf.float32)
    return 1 - tf.linalg.trace(matrix) / tf.reduce_sum(matrix)


def mapped(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    def error(pair: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        return tf.reduce_mean(squares(pair[0][tf.newaxis], pair[1], w))

    return tf.reduce_mean(tf.map_fn(error, (x, y), fn_output_signature=tf.float32))


MEANS: dict[str, Form] = {
    "mapped": mapped,
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
    "by bins": weighted_by_bins,
    "of confusions": of_confusions,
    "largest of rows": lambda x, y, w, n: tf.reduce_max(squares(x, y, w)),
}


def correlation(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    z = tf.tanh(x @ w)
    a, b = y - tf.reduce_mean(y), z - tf.reduce_mean(z)
    squares_of_both = tf.reduce_sum(a * a) * tf.reduce_sum(b * b)
    return 1 - tf.reduce_sum(a * b) / tf.sqrt(squares_of_both)


def concordance(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    z = tf.tanh(x @ w)
    one, other = tf.reduce_mean(y, 0), tf.reduce_mean(z, 0)
    both = tf.reduce_mean((y - one) * (z - other), 0)
    spread = tf.math.reduce_variance(y, 0) + tf.math.reduce_variance(z, 0)
    return tf.reduce_sum(1 - 2 * both / (spread + tf.square(one - other)))


def explained(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    spread = tf.reduce_sum(tf.square(y - tf.reduce_mean(y, 0)))
    return tf.reduce_sum(squares(x, y, w)) / spread


def balanced(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    positive = tf.cast(y > 0, tf.float32)
    share = tf.reduce_sum(positive) / tf.cast(tf.size(positive), tf.float32)
    weights = positive * (1 - share) + (1 - positive) * share
    return tf.reduce_mean(weights * squares(x, y, w))


def standardized(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    def standard(z: tf.Tensor) -> tf.Tensor:
        return (z - tf.reduce_mean(z, 0)) / (tf.math.reduce_std(z, 0) + 0.1)

    rows = tf.cast(tf.shape(x)[0], tf.float32)
    products = tf.matmul(tf.transpose(standard(x @ w)), standard(y)) / rows
    return tf.reduce_sum(tf.square(products - tf.eye(2)))


def three_levels(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    z = tf.tanh(x @ w)
    z -= tf.reduce_mean(z, 0) * tf.reduce_sum(w)
    z /= tf.sqrt(tf.reduce_mean(tf.square(z), 0)) + 0.1
    large = tf.cast(z > tf.reduce_mean(z), tf.float32)
    return tf.reduce_sum(large * tf.square(z - y)) / tf.reduce_sum(large)


def above_half(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    each = squares(x, y, w)[:, 0]
    large = tf.cast(each > 0.5 * tf.reduce_max(each), tf.float32)
    return tf.reduce_sum(each * large) / tf.reduce_sum(large)


def stable(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    z = squares(x, y, w)
    largest = tf.reduce_max(z)
    return largest + tf.math.log(tf.reduce_sum(tf.exp(z - largest)))


def extent(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    z = tf.tanh(x @ w)
    return tf.reduce_sum(tf.square(tf.reduce_max(z, 0) - tf.reduce_min(z, 0)))


def if_any(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    mean = tf.reduce_mean(squares(x, y, w))
    some, every = tf.reduce_any(y > 0.8), tf.reduce_all(y > -9.0)
    return tf.where(some & every, 2.0 * mean, mean)


# Sums go back into each row.
NESTED: dict[str, Form] = {
    "correlation": correlation,
    "concordance": concordance,
    "explained": explained,
    "deviation": lambda x, y, w, n: (
        tf.reduce_mean(squares(x, y, w)) + tf.math.reduce_std(x @ w)
    ),
    "balanced": balanced,
    "standardized": standardized,
    "three levels": three_levels,
    "above half": above_half,
    "stable": stable,
    "square of a part": lambda x, y, w, n: tf.reduce_sum(
        tf.square(squares(x, y, w) / tf.reduce_sum(squares(x, y, w)))
    ),
    "vector of differences": lambda x, y, w, n: tf.reduce_mean(
        tf.abs(squares(x, y, w) - tf.reduce_mean(squares(x, y, w))), 1
    ),
}
OTHERS |= NESTED | {"extent": extent, "if any": if_any}
ALL = MEANS | SUMS | OTHERS


def similarities(x: tf.Tensor, y: tf.Tensor, w: tf.Variable, n: int) -> Any:
    z = tf.math.l2_normalize(x @ w, 1)
    labels = tf.range(tf.shape(x)[0])
    found = tf.matmul(z, z, transpose_b=True)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, found)
    return tf.reduce_mean(each)


def between(z: tf.Tensor) -> tf.Tensor:
    """Return differences of rows from one another."""
    return z[:, :1] - tf.transpose(z[:, :1])


# Rows meet rows.
MOVED: dict[str, Form] = {
    "similarities": similarities,
    "pairs": lambda x, y, w, n: tf.reduce_mean(
        tf.cast(between(y) > 0, tf.float32) * tf.nn.softplus(-between(x @ w))
    ),
    "pairs of a vector": lambda x, y, w, n: tf.reduce_mean(
        tf.square(y[:, 0] - (x @ w)[:, :1])
    ),
    "sorted": lambda x, y, w, n: tf.reduce_mean(
        tf.abs(tf.sort(x @ w, 0) - tf.sort(y, 0))
    ),
    "largest": lambda x, y, w, n: tf.reduce_mean(tf.math.top_k((x @ w)[:, 0], 2)[0]),
    "softmax over rows": lambda x, y, w, n: tf.reduce_sum(
        tf.nn.softmax(squares(x, y, w), 0) * y
    ),
    "so far": lambda x, y, w, n: tf.reduce_mean(
        y - tf.math.log(tf.cumsum(tf.exp(x @ w), 0))
    ),
    "of neighbors": lambda x, y, w, n: tf.reduce_mean(
        tf.abs((x @ w)[1:] - (x @ w)[:-1])
    ),
    "reversed": lambda x, y, w, n: tf.reduce_mean(squares(tf.reverse(x, [0]), y, w)),
    "rolled": lambda x, y, w, n: tf.reduce_mean(squares(tf.roll(x, 1, 0), y, w)),
    "shuffled": lambda x, y, w, n: tf.reduce_mean(squares(tf.random.shuffle(x), y, w)),
    "shuffled by a seed": lambda x, y, w, n: tf.reduce_mean(
        squares(tf.random.experimental.stateless_shuffle(x, [1, 2]), y, w)
    ),
    "chosen by place": lambda x, y, w, n: tf.reduce_mean(
        squares(tf.gather(x, tf.random.shuffle(tf.range(tf.shape(x)[0]))), y, w)
    ),
    "first half": lambda x, y, w, n: tf.reduce_mean(
        squares(x, y, w)[: tf.shape(x)[0] // 2]
    ),
    "weighted by place": lambda x, y, w, n: tf.reduce_mean(
        squares(x, y, w) * tf.cast(tf.range(tf.shape(x)[0]), tf.float32)[:, tf.newaxis]
    ),
    "weighted by a table": lambda x, y, w, n: tf.reduce_mean(
        squares(x, y, w) * tf.linspace(0.0, 1.0, 99)[: tf.shape(x)[0], tf.newaxis]
    ),
    "weighted by a slice": lambda x, y, w, n: tf.reduce_mean(
        squares(x, y, w) * tf.slice(tf.eye(99, 2), [0, 0], tf.shape(y))
    ),
}
# Eagerly nobody sees what Python computes outside of TensorFlow.
IN_GRAPHS: dict[str, Form] = {
    "weighted by NumPy": lambda x, y, w, n: tf.reduce_mean(
        squares(x, y, w)
        * tf.ensure_shape(
            tf.numpy_function(lambda a: a - a.mean(), [y], tf.float32), [None, 2]
        )
    ),
}

# Eagerly rows are taken apart by Python; a row alone is not what all workers have.
APART: dict[str, Form] = {
    "one alone": lambda x, y, w, n: tf.reduce_mean(tf.unstack(squares(x, y, w))[0]),
    "in another order": lambda x, y, w, n: tf.reduce_mean(
        tf.stack(tf.unstack(x @ w)[::-1]) * y
    ),
    "without the last": lambda x, y, w, n: tf.reduce_mean(
        tf.stack(tf.unstack(squares(x, y, w))[:-1])
    ),
    "each with the next": lambda x, y, w, n: tf.reduce_mean(
        tf.stack(
            [
                tf.abs(one - other)
                for one, other in itertools.pairwise(tf.unstack(x @ w))
            ]
        )
    ),
}


def data() -> tuple[tf.Tensor, tf.Tensor, tf.Variable]:
    random = tf.random.Generator.from_seed(4)
    y = random.normal([ROWS, 2])
    return random.normal([ROWS, 5]), y, tf.Variable(random.normal([5, 2]))


def of_share(
    form: Form,
    w: tf.Variable,
    totals: list[list[tf.Tensor]],
    rank: int,
    x: tf.Tensor,
    y: tf.Tensor,
) -> tuple[Any, Any, Any, list[list[tf.Tensor]]]:
    """Return way, loss, gradient and sums of the rows of one worker.

    Args:
        form: of the loss.
        w: what is trained.
        totals: of all workers, of the exchanges that are known.
        rank: of this worker.
        x: of this worker.
        y: of this worker.
    """
    local: list[list[tf.Tensor]] = []

    def total(numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        local.append(numbers)
        known = len(local) <= len(totals)
        return totals[len(local) - 1] if known else numbers

    static = None if x.shape[0] is None else int(x.shape[0])
    reading = readings.Reading([x, y], [], static)
    reading.asked = int(N)
    read = losses.Losses(reading, int(N), total, rank)
    with _host.operations.recorded():
        with tf.GradientTape() as tape:
            loss = form(x, y, w, N)
        way = read.way_of([loss])
        whole = read.whole([loss])
        gradient = tape.gradient(whole.targets, w, whole.upstream)
    return way, whole.value, gradient, local


class LossesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*ALL)
    @pytest.mark.few(12, 24)
    @pytest.mark.long
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

    @parameterized.parameters(*MOVED, *IN_GRAPHS)
    def test_what_moves_between_rows_is_told(self, name: str) -> None:
        self.check_told((MOVED | IN_GRAPHS)[name], eager=False)

    @parameterized.parameters(*MOVED)
    def test_what_moves_between_rows_is_told_eagerly(self, name: str) -> None:
        self.check_told(MOVED[name], eager=True)

    @parameterized.parameters(*APART)
    def test_rows_that_python_takes_apart_are_told(self, name: str) -> None:
        self.check_told(APART[name], eager=True)

    def test_rows_that_python_takes_one_by_one_are_read(self) -> None:
        self.check("mapped", eager=True)

    def test_rows_that_a_function_within_the_step_is_given_are_read(self) -> None:
        x, _, w = data()
        reading, found = readings.Reading([x], [], ROWS, workers=3), []

        @tf.function
        def within(x: tf.Tensor) -> None:
            found.extend(reading.of(tf.reduce_sum(x @ w)).terms)

        with _host.operations.recorded():
            within(x)
        self.assertEqual(found, [(known.SUM, 0)])

    def test_sparse_rows_are_read(self) -> None:
        _, _, w = data()
        found: list[Any] = []

        def call(x: tf.SparseTensor, y: tf.Tensor) -> None:
            reading = readings.Reading([y, x], [], None)
            wide = tf.SparseTensor(x.indices, 2.0 * x.values, x.dense_shape)
            loss = tf.reduce_mean((tf.sparse.sparse_dense_matmul(wide, w) - y) ** 2)
            turned = tf.sparse.sparse_dense_matmul(x, y, adjoint_a=True)
            read = losses.Losses(reading, int(N), list)
            found.extend([read.way_of([loss]), reading.of(turned).kind])

        signature = [tf.SparseTensorSpec([None, 5]), tf.TensorSpec([None, 2])]
        tf.function(call, signature, autograph=False).get_concrete_function()
        self.assertEqual(found, [(BY_ROWS, 0), known.UNKNOWN])

    def check_told(self, form: Form, eager: bool) -> None:
        x, y, w = data()

        def call(x: tf.Tensor, y: tf.Tensor) -> None:
            with self.assertRaises(cuts.NotKnown):
                of_share(form, w, [], 0, x, y)

        if eager:
            call(x, y)
            return
        signature = [tf.TensorSpec([None, 5]), tf.TensorSpec([None, 2])]
        tf.function(call, signature, autograph=False).get_concrete_function()

    def check(self, name: str, eager: bool, known: bool = False) -> None:
        form = ALL[name]
        x, y, w = data()
        with tf.GradientTape() as tape:
            loss = form(x, y, w, 1)
        expected = tape.gradient(loss, w)
        ways = set()

        def found(totals: list[list[tf.Tensor]]) -> list[Any]:
            results = []
            call = functools.partial(of_share, form, w, totals)
            if not eager:
                way: list[Any] = []

                def traced(rank: Any, x: tf.Tensor, y: tf.Tensor) -> Any:
                    found_way, *rest = of_share(form, w, totals, rank, x, y)
                    way[:] = found_way or ()
                    return rest

                number = tf.TensorSpec([], tf.int32)
                signature = [number, tf.TensorSpec([None, 5]), tf.TensorSpec([None, 2])]
                signature = None if known else signature
                function = tf.function(traced, signature, autograph=False)

                def call(rank: Any, x: tf.Tensor, y: tf.Tensor) -> Any:
                    rest = function(rank, x, y)
                    return tuple(way) or None, *rest

            for rank, (start, stop) in enumerate(SHARES):
                shares = x[start:stop], y[start:stop]
                way_found, *rest = call(tf.constant(rank), *shares)
                ways.add(way_found)
                results.append(rest)
            return results

        totals: list[list[tf.Tensor]] = []
        results = found(totals)
        while len(totals) < len(results[0][2]):
            exchanged = zip(*(each[2][len(totals)] for each in results), strict=True)
            totals.append([tf.add_n(list(each)) for each in exchanged])
            results = found(totals)
        total = tf.add_n([gradient for _, gradient, _ in results])
        self.assertAllClose(total, expected, 1e-5, 1e-5)
        for value, _, _ in results:
            self.assertAllClose(value, tf.reduce_sum(loss), 1e-5, 1e-5)
        (way,) = ways
        kind = None if way is None else way[0]
        wanted = BY_ROWS if name in MEANS else SUMMED if name in SUMS else None
        self.assertEqual(kind, wanted)


class InABranchTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*MEANS, *SUMS)
    def test_a_loss_of_rows_from_around_the_branch_is_read(self, name: str) -> None:
        form = (MEANS | SUMS)[name]
        ways = []

        def call(x: tf.Tensor, y: tf.Tensor, step: tf.Tensor) -> Any:
            reading = readings.Reading([x, y], [], None)
            reading.asked = int(N)
            read = losses.Losses(reading, int(N), lambda numbers: numbers)

            def branch() -> tf.Tensor:
                loss = form(x, y, w, N)
                ways.append(read.way_of([loss]))
                return tf.reduce_sum(loss)

            return tf.cond(step > 0, branch, lambda: 0.0)

        *_, w = data()
        rows = [tf.TensorSpec([None, 5]), tf.TensorSpec([None, 2])]
        signature = [*rows, tf.TensorSpec([], tf.int32)]
        tf.function(call, signature, autograph=False).get_concrete_function()
        kinds = {way and way[0] for way in ways}
        self.assertEqual(kinds, {BY_ROWS if name in MEANS else SUMMED})


# What a constant says of the rows of a batch of 12, of which a worker has 4.
COUNTED: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "reshaped to all": lambda x: tf.reshape(x, (12, -1)),
    "reshaped to all, with both sizes": lambda x: tf.reshape(x, (12, 2)),
    "some of the first": lambda x: x[:4],
    "those behind": lambda x: x[4:],
}
UNCOUNTED: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "reshaped to what there is": lambda x: tf.reshape(x, (-1, 3)),
    "reshaped by its own shape": lambda x: tf.reshape(x, (tf.shape(x)[0], -1)),
    "reshaped to a row of all": lambda x: tf.reshape(x, (1, -1, 6)),
    "up to its own number": lambda x: x[: tf.shape(x)[0]],
    "within rows": lambda x: x[:, 4:],
    "by one of its dimensions": lambda x: tf.reshape(
        x, [tf.unstack(tf.shape(x))[0], 6]
    ),
}
# Of shapes that are known: as many rows more, of which one kind is taken.
VIEWS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "the first view": lambda x: tf.concat([x, 2 * x], 0)[: x.shape[0]],
    "the second view": lambda x: tf.concat([x, 2 * x], 0)[x.shape[0] :],
    "pieces of rows": lambda x: tf.reshape(x, (x.shape[0] * 2, -1)),
    "heads that become rows": lambda x: tf.reshape(
        tf.reshape(x, (-1, 3, 2)), (x.shape[0] * 3, 2)
    ),
}


class CountedByConstantsTest(parameterized.TestCase, tf.test.TestCase):
    def kind_of(self, form: Any, rows: int | None) -> str:
        """Return what a reading says of what is made of rows."""
        found: list[str] = []

        def call(x: tf.Tensor) -> None:
            reading = readings.Reading([x], [], rows, workers=3)
            with _host.operations.recorded():
                found.append(reading.of(form(x)).kind)

        signature = [tf.TensorSpec([rows, 6])]
        tf.function(call, signature, autograph=False).get_concrete_function()
        return found[0]

    @parameterized.product(name=sorted(COUNTED), rows=[4, None])
    def test_a_constant_that_counts_rows_is_told(self, name: str, rows: Any) -> None:
        self.assertEqual(self.kind_of(COUNTED[name], rows), known.UNKNOWN)

    @parameterized.product(name=sorted(UNCOUNTED), rows=[4, None])
    def test_what_counts_none_is_read(self, name: str, rows: Any) -> None:
        self.assertEqual(self.kind_of(UNCOUNTED[name], rows), known.ROWS)

    @parameterized.parameters(*VIEWS)
    def test_views_of_rows_are_read(self, name: str) -> None:
        self.assertEqual(self.kind_of(VIEWS[name], 4), known.ROWS)


if __name__ == "__main__":
    tf.test.main()
