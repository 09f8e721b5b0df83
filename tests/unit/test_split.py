"""Tests of how a worker's rows are chosen before the maps that make them."""

import gc
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import loopback
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_dgc
from tf_dgc.strategies import data, elements, positions, split

X, Y = np.arange(26.0).reshape(13, 2), np.arange(13)
AUTOTUNE = tf.data.AUTOTUNE


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def double(x: tf.Tensor, y: tf.Tensor) -> Any:
    return x * 2, y + 1


def to_ragged(x: tf.Tensor, y: tf.Tensor) -> Any:
    return tf.RaggedTensor.from_row_lengths(tf.range(y), [y]), y


def to_dict(x: tf.Tensor, y: tf.Tensor) -> Any:
    return {"b": x, "a": (y, y)}, y


def looked_up() -> tf.data.Dataset:
    lookup = keras.layers.StringLookup(vocabulary=["0", "1", "2"])
    return rows().map(lambda x, y: (x, lookup(tf.strings.as_string(y))))


def assert_same(found: Any, expected: Any) -> None:
    """Check that two lists of elements are the same bits."""
    found, expected = (
        tf.nest.flatten(each, expand_composites=True) for each in (found, expected)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


PROVABLE: dict[str, Callable[[], tf.data.Dataset]] = {
    "map": lambda: rows().map(double).batch(4),
    "parallel": lambda: rows().map(double, 4).batch(5, num_parallel_calls=2),
    "in any order": lambda: rows().map(double, 4, deterministic=False).batch(4),
    "prefetched": lambda: rows().map(double).prefetch(3).batch(4).prefetch(AUTOTUNE),
    "dropped": lambda: rows().map(double).batch(6, drop_remainder=True),
    "dropped unevenly": lambda: rows().map(double).batch(5, drop_remainder=True),
    "few rows": lambda: rows().map(double).batch(2),
    "more than all": lambda: rows().map(double).batch(20),
    "shuffled before": lambda: rows().shuffle(5).map(double).batch(4),
    "shuffled after": lambda: rows().map(double).shuffle(5).map(double, 2).batch(4),
    "one order": lambda: (
        rows().map(double).shuffle(13, reshuffle_each_iteration=False).batch(4)
    ),
    "repeated": lambda: (
        rows().map(double).repeat(3).skip(2).take(20).batch(4).repeat(2).skip(1)
    ),
    "shuffled and repeated": lambda: (
        rows().shuffle(13).map(double).repeat(3).batch(4, drop_remainder=True)
    ),
    "shuffled between, repeated": lambda: (
        rows().map(double).shuffle(13).map(double).repeat(3).batch(4)
    ),
    "sharded": lambda: rows().map(double).shard(2, 1).batch(4),
    "endless": lambda: rows().map(double).repeat().batch(4).take(9),
    "dictionary": lambda: rows().map(to_dict).batch(4),
    "ragged": lambda: rows().map(to_ragged).batch(4),
    "sparse": lambda: rows().map(lambda x, y: (tf.sparse.from_dense(x), y)).batch(4),
    "none": lambda: rows().map(lambda x, y: (x, None, y)).batch(4),
    "one tensor": lambda: tf.data.Dataset.range(13).map(lambda x: x * x).batch(4),
    "table": lambda: looked_up().batch(4),
    "filter before": lambda: rows().filter(lambda x, y: y > 3).map(double).batch(4),
    "cached before": lambda: rows().map(double).cache().map(double).batch(4),
    "options": lambda: (
        rows().map(double).with_options(tf.data.Options()).batch(4).take(3)
    ),
    "rows of batches": lambda: (
        rows()
        .map(double)
        .batch(4)
        .map(lambda x, y: ((tf.cast(x, tf.float32) - [[1.0, 3.0]]) / 255.0, y), 2)
        .map(lambda x, y: {"x": tf.maximum(x, 0.0), "y": tf.one_hot(y, 14)})
        .prefetch(1)
    ),
    "images of batches": lambda: (
        rows()
        .map(lambda x, y: (tf.reshape(x, [1, 2, 1]), y))
        .batch(4)
        .map(lambda x, y: (tf.image.resize(x, [3, 3]), tf.expand_dims(y, -1)))
    ),
    "one tensor of batches": lambda: (
        tf.data.Dataset.range(13)
        .map(lambda x: x * x)
        .batch(4)
        .map(lambda x: tf.cast(x, tf.float32))
    ),
    "stateless": lambda: (
        rows()
        .map(lambda x, y: (tf.numpy_function(np.sqrt, [x], x.dtype, False), y))
        .batch(4)
    ),
}
NOT_PROVABLE: dict[str, Callable[[], tf.data.Dataset]] = {
    "no map": lambda: rows().batch(4),
    "mean of batches": lambda: (
        rows().map(double).batch(4).map(lambda x, y: (x - tf.reduce_mean(x), y))
    ),
    "reversed batches": lambda: (
        rows().map(double).batch(4).map(lambda x, y: (x[::-1], y))
    ),
    "columns over rows": lambda: (
        rows().map(double).batch(2).map(lambda x, y: (x + tf.cast(y, x.dtype), y))
    ),
    "constants by rows": lambda: (
        rows()
        .map(double)
        .batch(2)
        .map(lambda x, y: (x, y + tf.range(2, dtype=y.dtype)))
    ),
    "what is no row": lambda: (
        rows().map(double).batch(4).map(lambda x, y: (x, tf.zeros([4])))
    ),
    "batches of a known size": lambda: (
        rows().map(double).batch(4, drop_remainder=True).map(double)
    ),
    "filter after": lambda: rows().map(double).filter(lambda x, y: y > 3).batch(4),
    "cached after": lambda: rows().map(double).cache().batch(4),
    "padded": lambda: rows().map(to_dict).padded_batch(4),
    "shuffled batches": lambda: rows().map(double).batch(4).shuffle(3),
    "python": lambda: (
        rows().map(lambda x, y: (tf.numpy_function(np.sqrt, [x], x.dtype), y)).batch(4)
    ),
    "seeded": lambda: (
        rows()
        .map(lambda x, y: (x + tf.random.normal([], seed=1, dtype=x.dtype), y))
        .batch(4)
    ),
    "seeded within": lambda: (
        rows()
        .map(
            lambda x, y: tf.cond(
                y > 3,
                lambda: (x + tf.random.normal([], seed=1, dtype=x.dtype), y),
                lambda: (x, y),
            )
        )
        .batch(4)
    ),
    "any shape": lambda: (
        tf.data.Dataset.from_generator(
            lambda: iter([[1.0], [2.0, 3.0]]),
            output_signature=tf.TensorSpec([None], tf.float32),
        )
        .map(tf.reduce_sum)
        .batch(2)
    ),
}


class ShareOfTest(parameterized.TestCase, tf.test.TestCase):
    """A worker's rows are those of whole batches, bit for bit."""

    @parameterized.parameters(*PROVABLE)
    @pytest.mark.few(7, 14)
    @pytest.mark.long
    def test_rows_are_those_of_global_batches_in_every_epoch(self, name: str) -> None:
        def made() -> tf.data.Dataset:
            tf.random.set_seed(3)  # the same orders each time
            return PROVABLE[name]()

        size = 3
        whole = made()
        epochs = [list(whole) for _ in range(2)]
        for rank in (0, 2):
            dataset = made()
            spec = dataset.element_spec
            share = split.share_of(dataset, rank, size)
            assert share is not None
            own = share.rows()
            if name != "in any order":  # where there is none to compare with
                layout = elements.ElementLayout(dataset.element_spec, size)
                plain = data.own_rows(dataset, layout, rank).rows()
                self.assertEqual(own.element_spec, plain.element_spec)
            self.assertEqual(own.cardinality(), dataset.cardinality())
            for batches in epochs:
                parts = [_rows_of(spec, each, rank, size) for each in batches]
                if name != "in any order":
                    assert_same(list(own), parts)
                else:
                    self.assertLen(list(own), len(parts))

    @parameterized.parameters(*NOT_PROVABLE)
    def test_what_is_not_provable_is_left_alone(self, name: str) -> None:
        self.assertIsNone(split.share_of(NOT_PROVABLE[name](), 0, 2))

    @parameterized.parameters(2, 4)
    def test_each_worker_makes_its_own_rows_only(self, size: int) -> None:
        made: list[int] = []

        def decode(x: np.ndarray) -> np.ndarray:
            made.append(int(x))
            return x

        whole = tf.data.Dataset.range(24)
        whole = whole.map(
            lambda x: tf.numpy_function(decode, [x], tf.int64, stateful=False), AUTOTUNE
        ).batch(8)
        for rank in range(size):
            made.clear()
            own = np.concatenate(list(data.share_of(whole, rank, size)))
            self.assertCountEqual(made, own)
            self.assertLen(made, 24 // size)

    @pytest.mark.long
    def test_a_second_fit_goes_on_where_the_first_ended(self) -> None:
        tf.random.set_seed(3)
        whole = rows().map(double).shuffle(13).batch(4)
        tf.random.set_seed(3)
        again = rows().map(double).shuffle(13).batch(4)
        for _ in range(3):
            own = split.share_of(again, 0, 2)
            assert own is not None
            assert_same(
                list(own.rows()), [_rows_of(whole.element_spec, b, 0, 2) for b in whole]
            )
        del again, own
        gc.collect()
        self.assertEmpty(split._shuffled)

    def test_an_iterator_is_taken_up_where_it_was_left(self) -> None:
        def iterator() -> Iterator[Any]:
            tf.random.set_seed(3)
            dataset = rows().map(double).shuffle(5).repeat(3).map(double, 2).batch(4)
            return iter(data.share_of(dataset, 1, 2))

        path = pathlib.Path(tempfile.mkdtemp(), "state")
        first = iterator()
        for _ in range(4):
            next(first)
        state = positions.read_state(first)
        assert state is not None
        positions.write_state(state, path)
        second = iterator()
        positions.take_up(second, path)
        assert_same(list(second), list(first))


def _rows_of(spec: Any, element: Any, rank: int, size: int) -> Any:
    return elements.ElementLayout(spec, size).rows_of(element, rank)


class EvidenceTest(parameterized.TestCase, tf.test.TestCase):
    """Whether workers read the same is known from what targets are made of."""

    def mark(self, dataset: tf.data.Dataset) -> list[float]:
        share = split.share_of(dataset, 0, 2)
        assert share is not None
        _, mark = next(iter(share.pairs))
        return list(mark.numpy())

    def files(self, folder: str, names: str, classes: str) -> tf.data.Dataset:
        paths = [f"{folder}/{c}/{n}.png" for n, c in zip(names, classes, strict=True)]
        return tf.data.Dataset.from_tensor_slices(paths)

    @pytest.mark.long
    def test_inputs_and_targets_of_all_rows_count(self) -> None:
        def made(x: Any, y: Any) -> list[float]:
            dataset = tf.data.Dataset.from_tensor_slices((x, y))
            return self.mark(dataset.map(double).batch(13))

        self.assertEqual(made(X, Y), made(X, Y))
        self.assertNotEqual(made(X, Y), made(X[::-1], Y))
        self.assertNotEqual(made(X, Y), made(X, Y + 7))

    @pytest.mark.long
    def test_folders_of_a_machine_do_not_count(self) -> None:
        def parsed(path: tf.Tensor) -> Any:
            parts = tf.strings.split(path, "/")
            return path, tf.cast(parts[-2] == "a", tf.int32)

        def made(*files: str) -> list[float]:
            return self.mark(self.files(*files).map(parsed).batch(4))

        self.assertEqual(made("/here", "123", "aab"), made("/far/away", "123", "aab"))
        self.assertNotEqual(made("/here", "123", "aab"), made("/here", "123", "aba"))
        self.assertNotEqual(made("/here", "123", "aab"), made("/here", "321", "aab"))

    @pytest.mark.long
    def test_of_files_without_targets_no_folder_counts(self) -> None:
        def made(*files: str) -> list[float]:
            return self.mark(self.files(*files).map(tf.strings.length).batch(4))

        self.assertEqual(made("/here", "123", "aaa"), made("/far", "123", "bbb"))
        self.assertNotEqual(made("/here", "123", "aaa"), made("/here", "321", "aaa"))


class StateTest(tf.test.TestCase):
    """Maps that read what may be written while their elements are made."""

    def assert_proved(self, expected: bool, dataset: tf.data.Dataset) -> None:
        self.assertEqual(split.share_of(dataset.batch(4), 0, 2) is not None, expected)

    def test_a_variable_may_be_read_where_nothing_before_writes(self) -> None:
        level = tf.Variable(0.0, trainable=False)

        def count(x: Any, y: Any) -> Any:
            level.assign_add(1.0)
            return x, y

        def read(x: Any, y: Any) -> Any:
            return x * tf.cast(level, x.dtype), y

        def generate() -> Iterator[Any]:
            for row in zip(X, Y, strict=True):
                level.assign(0.5)
                yield row

        spec = rows().element_spec
        generated = tf.data.Dataset.from_generator(generate, output_signature=spec)
        self.assert_proved(True, rows().map(read))
        self.assert_proved(True, rows().shuffle(4).map(double).map(read))
        self.assert_proved(False, rows().map(count).map(read))
        self.assert_proved(False, rows().map(count).shuffle(4).map(read))
        self.assert_proved(False, generated.map(read))
        self.assert_proved(True, generated.map(double))
        self.assertTrue(split.assigns(rows().map(count).map(double).batch(4)))
        self.assertFalse(split.assigns(generated.map(read).batch(4)))


class WorkTest(parameterized.TestCase, tf.test.TestCase):
    """What is done N times is told, once."""

    @parameterized.named_parameters(
        ("nothing", lambda: rows().map(double).filter(lambda x, y: y > 3).batch(4), ""),
        (
            "decoding after the batch",
            lambda: rows().batch(4).map(lambda x, y: (resized(x), y)),
            "Map (ResizeBilinear)",
        ),
        (
            "python",
            lambda: (
                rows()
                .map(lambda x, y: (tf.numpy_function(np.sqrt, [x], x.dtype), y), 2)
                .batch(4)
            ),
            "ParallelMap (PyFunc)",
        ),
        (
            "generator",
            lambda: tf.data.Dataset.from_generator(
                lambda: iter([1.0]), output_signature=tf.TensorSpec([], tf.float32)
            ).batch(1),
            "FlatMap (PyFunc)",
        ),
        (
            "split",
            lambda: rows().map(lambda x, y: (resized([x]), y)).batch(4),
            "",
        ),
        (
            "cached",
            lambda: rows().map(lambda x, y: (resized([x]), y)).cache().batch(4),
            "",
        ),
    )
    def test_only_what_takes_long_and_is_not_split_is_named(
        self, make: Callable[[], tf.data.Dataset], expected: str
    ) -> None:
        self.assertIn(expected, "; ".join(split.work_for_others(make())))
        if not expected:
            self.assertEmpty(split.work_for_others(make()))

    def test_it_is_said_once_by_a_strategy_of_several_workers(self) -> None:
        def work(transport: loopback.Loopback) -> None:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            for _ in range(2):
                python = lambda x, y: (  # noqa: E731
                    tf.numpy_function(np.sqrt, [x], x.dtype),
                    y,
                )
                strategy.experimental_distribute_dataset(rows().map(python).batch(4))

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            loopback.run_workers(2, work)
        told = [each for each in logs.output if "for all rows" in each]
        self.assertLen(told, 2)
        self.assertIn("Map (PyFunc)", told[0])
        self.assertIn("AutoShardPolicy.FILE", told[0])


def resized(x: Any) -> tf.Tensor:
    images = tf.reshape(x, [-1, 1, 2, 1])
    return tf.image.resize(images, [2, 2])


if __name__ == "__main__":
    tf.test.main()
