"""Tests of what is known to be alike on workers that read the same data."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, run_workers

import tf_dgc
from tf_dgc.strategies import provenance, randomness

X = np.arange(8.0)


def pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, X))


def noisy(x: tf.Tensor, y: tf.Tensor) -> Any:
    return x + tf.random.normal([], dtype=tf.float64), y


def both(x: tf.Tensor, y: tf.Tensor) -> Any:
    number = tf.random.uniform([], dtype=tf.float64)
    return tf.cond(number < 0.5, lambda: (x, y), lambda: (-x, -y))


def by_python(x: tf.Tensor, y: tf.Tensor) -> Any:
    return x, tf.numpy_function(lambda rows: rows, [y], tf.float64)


def by_keras() -> tf.data.Dataset:
    flip = keras.layers.RandomFlip()
    return pairs().map(lambda x, y: (flip(tf.reshape(x, [1, 1, 1])), y))


def looked_up(x: tf.Tensor, y: tf.Tensor) -> Any:
    lookup = keras.layers.StringLookup(vocabulary=["0.0", "1.0"])
    return x, lookup(tf.strings.as_string(y))


def seeded(x: tf.Tensor, y: tf.Tensor) -> Any:
    return x, y + tf.random.normal([], seed=1, dtype=tf.float64)


def swapped(x: tf.Tensor, y: tf.Tensor) -> Any:
    return y, x


def made(x: tf.Tensor, y: tf.Tensor) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(noisy(x, y))


def generated() -> tf.data.Dataset:
    spec = tf.TensorSpec([], tf.float64)
    return tf.data.Dataset.from_generator(
        lambda: zip(X, X, strict=True), output_signature=(spec, spec)
    )


def drawn_alike() -> tf.data.Dataset:
    shuffle = randomness.permutation_by(1)
    return tf.data.Dataset.range(1).map(lambda _: shuffle(tf.range(3, dtype=tf.int64)))


CASES = {
    "plain": (pairs, [False, False]),
    "shuffled": (lambda: pairs().shuffle(4).batch(2).repeat(2), [False, False]),
    "inputs": (lambda: pairs().map(noisy).batch(2).prefetch(1), [True, False]),
    "both": (lambda: pairs().map(both).shuffle(8), [True, True]),
    "carried along": (lambda: pairs().map(noisy).map(swapped), [False, True]),
    "python": (lambda: pairs().map(by_python), [False, True]),
    "generator of keras": (by_keras, [True, False]),
    "table": (lambda: pairs().map(looked_up), [False, False]),
    "in order": (lambda: pairs().map(seeded), [False, False]),
    "in parallel": (lambda: pairs().map(seeded, 2), [False, True]),
    "filter": (
        lambda: pairs().filter(lambda *_: tf.random.uniform([]) < 0.5),
        [False, False],
    ),
    "flat map": (lambda: pairs().flat_map(made), [True, True]),
    "zip": (
        lambda: tf.data.Dataset.zip((pairs().map(noisy), pairs())),
        [True, False, False, False],
    ),
    "concatenation": (lambda: pairs().concatenate(pairs().map(noisy)), [True, False]),
    "one or the other": (
        lambda: tf.data.Dataset.sample_from_datasets([pairs(), pairs().map(noisy)]),
        [True, False],
    ),
    "generator": (generated, [False, False]),
    "drawn alike": (drawn_alike, [False]),
    "nothing": (lambda: tf.data.Dataset.from_tensors((X, None)), [False, False]),
    "ragged": (lambda: pairs().map(noisy).ragged_batch(3), [True, False]),
    "dictionary": (
        lambda: pairs().map(noisy).map(lambda x, y: {"b": x, "a": y}),
        [False, True],
    ),
}


class RandomPartsTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*CASES)
    def test_parts_that_depend_on_chance_are_told(self, name: str) -> None:
        make, expected = CASES[name]
        tf.random.set_seed(None)
        self.assertEqual(provenance.random_parts(make()), expected)

    def test_with_a_seed_workers_draw_alike_where_elements_come_in_order(self) -> None:
        tf.random.set_seed(1)
        found = [provenance.random_parts(pairs().map(both, n)) for n in (None, 2)]
        self.assertEqual(found, [[False, False], [True, True]])


class ChanceTest(parameterized.TestCase):
    """What decides which elements there are, must do so alike on all workers."""

    def setUp(self) -> None:
        super().setUp()
        tf.random.set_seed(None)

    @parameterized.named_parameters(
        ("filter", lambda data: data.filter(lambda *_: tf.random.uniform([]) < 0.5)),
        (
            "filter of what a map drew",
            lambda data: (
                data.map(lambda x, y: (x, y, tf.random.uniform([])))
                .shuffle(4)
                .filter(lambda x, y, drawn: drawn < 0.5)
                .map(lambda x, y, drawn: (x, y))
            ),
        ),
        (
            "take while what a map drew",
            lambda data: data.map(noisy).take_while(lambda x, y: x < 9.0),
        ),
        (
            "flat_map",
            lambda data: data.flat_map(
                lambda x, y: tf.data.Dataset.from_tensors((x, y)).repeat(
                    tf.random.uniform([], maxval=3, dtype=tf.int64)
                )
            ),
        ),
    )
    @pytest.mark.long
    def test_without_a_seed_it_is_told(self, change: Any) -> None:
        data = change(pairs()).map(noisy).batch(4)
        self.assertTrue(provenance.decided_by_chance(data))

        def work(transport: Loopback) -> None:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            for _ in range(2):
                strategy.experimental_distribute_dataset(change(pairs()).batch(4))

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            run_workers(2, work)
        self.assertEqual(sum("without a seed" in each for each in logs.output), 2)

    @parameterized.named_parameters(
        (
            "seeded filter",
            lambda data: data.filter(lambda *_: tf.random.uniform([], seed=3) < 0.5),
        ),
        ("other filter", lambda data: data.filter(lambda x, _: x > 3.0)),
        (
            "filter beside what a map drew",
            lambda data: data.map(noisy).filter(lambda x, y: y > 3.0),
        ),
        (
            "filter of what Python code made",
            lambda data: data.map(by_python).filter(lambda x, y: y > 3.0),
        ),
        ("map", lambda data: data.map(noisy)),
        ("shuffle", lambda data: data.shuffle(4)),
        (
            "shuffle within",
            lambda data: data.flat_map(
                lambda x, _: tf.data.Dataset.from_tensors((x, x)).shuffle(4)
            ),
        ),
        (
            "random numbers within",
            lambda data: data.flat_map(
                lambda x, y: tf.data.Dataset.zip(
                    tf.data.Dataset.random().take(2), tf.data.Dataset.range(2)
                )
            ),
        ),
    )
    def test_what_all_draw_alike_is_not(self, change: Any) -> None:
        self.assertFalse(provenance.decided_by_chance(change(pairs()).batch(4)))


if __name__ == "__main__":
    tf.test.main()
