"""Tests of how batches are shared out."""

import time
import unittest
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from keras.src.trainers.data_adapters import (
    generator_data_adapter,
    py_dataset_adapter,
)

import tf_dgc
from tf_dgc import _host
from tf_dgc.exchanges import parts
from tf_dgc.strategies import (
    data,
    first_builds,
    patches,
    randomness,
    slicing,
    witness,
)

Policy = tf.data.experimental.AutoShardPolicy

# Before that Keras itself fails on None in a batch.
TAKES_NONE = unittest.skipIf(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 11), "an old Keras"
)


def with_policy(dataset: tf.data.Dataset, policy: Policy) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def shares(dataset: tf.data.Dataset, size: int) -> list[list[Any]]:
    """Return each worker's batches."""
    return [list(data.share_of(dataset, rank, size)) for rank in range(size)]


def joined(parts: Iterable[Any]) -> Any:
    """Join elements of any structure along their rows, as NumPy values or lists."""

    def join(*leaves: Any) -> Any:
        if isinstance(leaves[0], tf.SparseTensor):
            return np.concatenate([tf.sparse.to_dense(leaf) for leaf in leaves])
        if isinstance(leaves[0], tf.RaggedTensor):
            return tf.concat(leaves, axis=0).to_list()
        return np.concatenate([leaf.numpy() for leaf in leaves])

    return tf.nest.map_structure(join, *parts)


class RowTest(tf.test.TestCase):
    def test_what_has_no_rows_gets_one_of_zeros(self) -> None:
        for empty in (
            tf.zeros([0, 3]),
            {"a": tf.zeros([0, 2, 2], tf.int64), "b": None},
            tf.ragged.constant([], ragged_rank=1, dtype=tf.int32),
            (tf.RaggedTensor.from_tensor(tf.zeros([0, 2, 3]), ragged_rank=1),),
            (tf.sparse.from_dense(tf.zeros([0, 3])), tf.zeros([0])),
            (tf.constant([], tf.string), tf.zeros([0, 1])),
        ):
            found, count = slicing.at_least_one_row(empty)
            self.assertEqual(int(count), 0)
            for one, two in zip(
                tf.nest.flatten(found), tf.nest.flatten(empty), strict=True
            ):
                if two is not None:
                    self.assertEqual(row_count(one), 1)
                    self.assertEqual(one.shape[2:], two.shape[2:])
                    self.assertEqual(one.dtype, two.dtype)
                    joined([one])  # which refuses what is not sound

    def test_what_has_rows_keeps_them(self) -> None:
        rows = tf.reshape(tf.range(6), [2, 3])
        (found, _), count = slicing.at_least_one_row((rows, None))
        self.assertEqual(int(count), 2)
        self.assertAllEqual(found, rows)


def row_count(element: Any) -> int:
    part = tf.nest.flatten(element)[0]
    if isinstance(part, tf.RaggedTensor):
        return int(part.nrows())
    return int(
        (part.dense_shape if isinstance(part, tf.SparseTensor) else part.shape)[0]
    )


def structures(rows: int) -> dict[str, Any]:
    """Return tensors of `rows` rows, in the structures that Keras knows."""
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    y = np.arange(rows, dtype=np.int64)
    ragged = tf.ragged.constant([[i] * (i % 4) for i in range(rows)], tf.int32)
    sparse = tf.sparse.from_dense(x * (x % 2))
    return {
        "tensor": x,
        "tuple": (x, y),
        "dict": {"x": x, "y": y},
        "dict and labels": ({"a": x, "b": y}, y),
        "list of inputs": ((x, y), y),
        "sample weights": (x, y, x[:, 0]),
        "strings": (y.astype(str), y),
        "ragged": (ragged, y),
        "sparse": (sparse, y),
        "both": {"ragged": ragged, "sparse": sparse},
    }


@pytest.mark.long
class ShareOfTest(parameterized.TestCase, tf.test.TestCase):
    def assert_same(self, found: Any, expected: Any) -> None:
        tf.nest.assert_same_structure(found, expected)
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(a, b)

    @parameterized.product(name=list(structures(1)), sizes=[(13, 5, 2), (9, 4, 3)])
    @pytest.mark.few(5, 10)
    def test_shares_in_the_order_of_rank_are_the_global_batch(
        self, name: str, sizes: tuple[int, int, int]
    ) -> None:
        rows, batch, workers = sizes
        dataset = tf.data.Dataset.from_tensor_slices(structures(rows)[name])
        dataset = dataset.batch(batch)
        batches = list(dataset)
        found = shares(dataset, workers)
        for own in found:
            self.assertLen(own, len(batches))
        for step, whole in enumerate(batches):
            parts = joined(own[step] for own in found)
            self.assert_same(parts, joined([whole]))

    @parameterized.parameters(1, 2, 5, 12)
    def test_every_row_goes_to_one_worker_in_equal_shares(self, rows: int) -> None:
        dataset = tf.data.Dataset.range(rows).batch(rows)
        for workers in (1, 2, 3, 5):
            parts = [own[0].numpy() for own in shares(dataset, workers)]
            self.assertAllEqual(np.concatenate(parts), np.arange(rows))
            counts = [len(part) for part in parts]
            self.assertLessEqual(max(counts) - min(counts), 1)

    @parameterized.parameters((1, 4), (2, 4), (3, 7), (5, 3))
    def test_the_first_ranks_have_a_row_more_or_a_row_at_all(
        self, rows: int, workers: int
    ) -> None:
        x = np.arange(rows)
        dataset = tf.data.Dataset.from_tensor_slices((x, -x)).batch(rows)
        parts = [own[0] for own in shares(dataset, workers)]
        for inputs, targets in parts:
            self.assertAllEqual(targets, -inputs)
        counts = [len(inputs) for inputs, _ in parts]
        self.assertEqual(counts, sorted(counts, reverse=True))
        self.assertLessEqual(counts[0] - counts[-1], 1)

    @pytest.mark.extended
    def test_fewer_rows_than_workers_are_not_repeated(self) -> None:
        x = np.arange(2)
        for structure in (x, {"x": x}, (x,), ((x, x),), (x, x)):
            dataset = tf.data.Dataset.from_tensor_slices(structure).batch(4)
            with self.subTest(structure=structure):
                parts = [own[0] for own in shares(dataset, 4)]
                self.assert_same(joined(parts), joined(dataset))

    @parameterized.parameters((0,), ((0,),), ((0, 0),), (((0, 0),),), (({"a": 0},),))
    def test_the_structure_stays(self, structure: Any) -> None:
        tensors = tf.nest.map_structure(lambda _: np.arange(8), structure)
        dataset = tf.data.Dataset.from_tensor_slices(tensors).batch(4)
        for policy in (Policy.AUTO, Policy.OFF):
            own = data.share_of(with_policy(dataset, policy), 1, 2)
            tf.nest.assert_same_structure(own.element_spec, dataset.element_spec)

    def test_one_worker_takes_the_dataset_as_it_is(self) -> None:
        for dataset in (
            tf.data.Dataset.range(5),
            tf.data.Dataset.range(5).batch(2),
            with_policy(tf.data.Dataset.range(5).batch(2), Policy.FILE),
        ):
            self.assertIs(data.share_of(dataset, 0, 1), dataset)

    def test_none_stays_none(self) -> None:
        dataset = tf.data.Dataset.from_tensor_slices((np.arange(8), None))
        for own in shares(dataset.batch(4), 2):
            for x, nothing in own:
                self.assertLen(x, 2)
                self.assertIsNone(nothing)

    def test_static_shapes_stay_static(self) -> None:
        x, y = np.zeros((12, 3), np.float32), np.zeros((12,), np.int64)
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        fixed = dataset.batch(6, drop_remainder=True)
        for policy in (Policy.AUTO, Policy.OFF):
            own = data.share_of(with_policy(fixed, policy), 0, 3)
            self.assertEqual([s.shape for s in own.element_spec], [[2, 3], [2]])
            for rows, labels in own:
                self.assertEqual((rows.shape, labels.shape), ([2, 3], [2]))
        for rank in range(4):
            uneven = data.share_of(fixed, rank, 4)
            for element in uneven:
                for spec, part in zip(uneven.element_spec, element, strict=True):
                    self.assertTrue(spec.is_compatible_with(part))
        unknown = data.share_of(dataset.batch(6), 0, 3)
        self.assertEqual(
            [s.shape.as_list() for s in unknown.element_spec], [[None, 3], [None]]
        )

    def test_an_unknown_rank_is_split_too(self) -> None:
        dataset = tf.data.Dataset.range(8).batch(4)
        dataset = dataset.map(
            lambda x: tf.numpy_function(lambda rows: rows, [x], tf.int64)
        )
        found = shares(dataset, 2)
        self.assertAllEqual(found[0], [[0, 1], [4, 5]])
        self.assertAllEqual(found[1], [[2, 3], [6, 7]])

    @parameterized.parameters(*structures(1))
    @pytest.mark.few(4)
    def test_off_uses_up_the_workers_own_batches_in_several_steps(
        self, name: str
    ) -> None:
        dataset = tf.data.Dataset.from_tensor_slices(structures(12)[name]).batch(6)
        dataset = with_policy(dataset, Policy.OFF)
        whole = joined(dataset)
        for own in shares(dataset, 3):
            self.assertLen(own, 6)
            for element in own:
                self.assertEqual(row_count(element), 2)
            self.assert_same(joined(own), whole)

    def test_without_batches_there_is_nothing_to_split(self) -> None:
        for structure in (np.arange(4), (np.zeros((4, 3)), np.arange(4))):
            dataset = tf.data.Dataset.from_tensor_slices(structure)
            with self.assertRaisesRegex(
                ValueError,
                r"The dataset must be batched, to be split over 2 workers: call "
                r"`dataset\.batch\(global_batch_size\)`\. Received: elements "
                r".*TensorSpec",
            ):
                data.share_of(dataset, 0, 2)

    def test_auto_and_data_split_alike(self) -> None:
        dataset = tf.data.Dataset.range(8).batch(4)
        for policy in (Policy.AUTO, Policy.DATA):
            found = shares(with_policy(dataset, policy), 2)
            self.assertAllEqual(found, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]])


class WitnessTest(parameterized.TestCase, tf.test.TestCase):
    """Whether workers read the same, by the marks that come with their batches."""

    def refused(self, make: Any) -> str:
        """Return the error of the first batch that two workers read differently.

        Args:
            make: makes the dataset of a rank.
        """
        shares = [data.marked_share_of(make(rank), rank, 2) for rank in range(2)]
        names = tf.constant([*shares[0].names, *[""] * 4])
        for batches in zip(*(share.pairs for share in shares), strict=True):
            marks = tf.stack([mark for _, mark in batches])
            try:
                parts.refuse_other_data(marks, names)
            except tf.errors.InvalidArgumentError as error:
                return error.message
        return ""

    def batches(self, x: Any, y: Any, augment: Any = None) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        return (dataset if augment is None else dataset.map(augment, 2)).batch(4)

    @pytest.mark.long
    def test_the_component_that_differs_is_named_in_whatever_batch(self) -> None:
        x = np.arange(8.0)
        self.assertEqual(self.refused(lambda rank: self.batches(x, x)), "")
        for names in (("x", "y"), ("y", "x")):

            def make(rank: int, names: Any = names) -> tf.data.Dataset:
                other = np.where(x < 4, x, x + rank)  # in the second batch
                parts = {"x": other, "y": x}
                return self.batches(*({name: parts[name]} for name in names))

            error = self.refused(make)
            self.assertIn("The workers read different data; all stop", error)
            place = rf"element\[{names.index('x')}\]\['x'\]"
            self.assertRegex(error, rf"{place}\W+[0-9.]+,? [0-9.]+")

    @parameterized.parameters(
        (np.float32, 0.0), (np.float32, 1e6), (np.int64, 0), (bool, 0), (np.uint8, 9)
    )
    def test_neighbours_of_any_type_differ(self, dtype: Any, start: Any) -> None:
        x = (start + np.arange(8) % 2 * (1 + start / 1e3)).astype(dtype)
        make = lambda rank: self.batches(np.roll(x, rank), np.zeros(8))  # noqa: E731
        self.assertIn("different data", self.refused(make))

    @pytest.mark.long
    def test_features_stand_in_any_order_in_a_record(self) -> None:
        def record(number: float, turned: bool) -> bytes:
            value = tf.train.FloatList(value=[number])
            feature = tf.train.Feature(float_list=value)
            parts = [
                tf.train.Features(feature={key: feature}).SerializeToString()
                for key in ("xy"[::-1] if turned else "xy")
            ]
            features = b"".join(parts)  # a map, in this order
            return bytes([10, len(features)]) + features

        form = {key: tf.io.FixedLenFeature([], tf.float32) for key in "xy"}

        def parsed(text: tf.Tensor) -> Any:
            found = tf.io.parse_single_example(text, form)
            return found["x"], found["y"]

        def make(rank: int, roll: int = 0) -> tf.data.Dataset:
            numbers = np.roll(np.arange(8.0), roll * rank)
            records = [record(each, rank == 1) for each in numbers]
            dataset = tf.data.Dataset.from_tensor_slices(records)
            return dataset.map(parsed, 2).batch(4)

        self.assertEqual(self.refused(make), "")
        self.assertIn("different data", self.refused(lambda rank: make(rank, 1)))

    def test_other_texts_and_other_orders_in_a_row_differ(self) -> None:
        for x in (np.array(["a", "b"] * 4), np.arange(32).reshape(8, 4) % 4):

            def make(rank: int, x: Any = x) -> tf.data.Dataset:
                turned = np.roll(x, rank, axis=-1)
                return self.batches(turned, np.zeros(8))

            self.assertIn("different data", self.refused(make))

    def test_units_in_the_last_place_and_what_is_no_number_are_taken(self) -> None:
        x = np.random.default_rng(1).normal(size=[8, 3000]).astype(np.float32)
        x[0, :2] = np.nan, np.inf
        make = lambda rank: self.batches(x * (1 + rank * 3e-7), x)  # noqa: E731
        self.assertEqual(self.refused(make), "")

    def test_ragged_and_sparse_parts_count(self) -> None:
        for kind in (
            lambda x: tf.RaggedTensor.from_tensor(x, padding=0),
            tf.sparse.from_dense,
        ):

            def make(rank: int, kind: Any = kind) -> tf.data.Dataset:
                x = kind(tf.constant([[1, 2 + rank, 0], [4, 0, 0]]))
                return tf.data.Dataset.from_tensors((x, tf.zeros([2])))

            self.assertIn("different data", self.refused(make))

    def test_what_is_augmented_at_random_is_taken(self) -> None:
        def augment(x: tf.Tensor, y: tf.Tensor) -> Any:
            flip = tf.random.uniform([]) < 0.5
            return tf.cond(flip, lambda: (-x, -y), lambda: (x, y))

        x = np.arange(1.0, 257.0).reshape(8, 32)
        self.assertEqual(self.refused(lambda rank: self.batches(x, x, augment)), "")

    def test_what_is_augmented_is_compared_as_it_was_before(self) -> None:
        tf.random.set_seed(None)

        def augment(x: tf.Tensor, y: tf.Tensor) -> Any:
            return x + tf.random.normal([], dtype=x.dtype), y

        x = np.arange(8.0)
        make = lambda rank: self.batches(x[:: 1 - 2 * rank], 0 * x, augment)  # noqa: E731
        self.assertIn("before `Dataset.map`", self.refused(make))

    @pytest.mark.long
    def test_noise_of_python_code_in_inputs_is_taken_beside_targets(self) -> None:
        def make(rank: int, other: int = 0) -> tf.data.Dataset:
            def rows() -> Any:
                for i in range(8):
                    yield float(i + rank), float(i + other * rank)

            spec = tf.TensorSpec([]), tf.TensorSpec([])
            return tf.data.Dataset.from_generator(rows, output_signature=spec).batch(4)

        self.assertEqual(self.refused(make), "")
        self.assertIn("different data", self.refused(lambda rank: make(rank, 1)))

    def test_without_targets_all_is_compared(self) -> None:
        def make(rank: int) -> tf.data.Dataset:
            x = np.arange(8.0) + rank
            return tf.data.Dataset.from_tensor_slices((x, None)).batch(4)

        self.assertIn("different data", self.refused(make))

    @pytest.mark.long
    def test_datasets_in_any_order_come_in_one(self) -> None:
        patches.install()
        randomness.share(5)
        files = tf.data.Dataset.range(4)

        def slow(x: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(_slowly, [x], tf.int64), [])

        def read(i: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.range(4).map(lambda x: slow(4 * i + x))

        def told(dataset: tf.data.Dataset) -> tf.data.Dataset:
            options = tf.data.Options()
            options.deterministic = False
            return dataset.with_options(options)

        ordered = [4 * (i % 4) + i // 4 for i in range(16)]
        for dataset in (
            files.interleave(read, 4, 1, 4, deterministic=False).batch(4),
            files.interleave(read, 4, 1, 4).batch(
                4, num_parallel_calls=2, deterministic=False
            ),
            told(files.interleave(read, 4, 1, 4).batch(4)),
        ):
            shares = [data.share_of(dataset, rank, 2) for rank in range(2)]
            batches = zip(*shares, strict=True)
            found = [int(x) for pair in batches for rows in pair for x in rows]
            self.assertEqual(found, ordered)

    def test_a_mark_is_kept_when_its_element_is_read(self) -> None:
        kept = witness.Witness()
        x = np.arange(8.0)
        share = data.marked_share_of(self.batches(x, x), 0, 2)
        marks = [mark for _, mark in share.pairs]

        @tf.function
        def read(iterator: Any) -> Any:
            rows = next(iterator)
            return rows, kept.numbers.read_value()

        @tf.function
        def read_if_any(iterator: Any) -> Any:
            return iterator.get_next_as_optional()

        for steps in range(2):
            iterator = _host.iterators.MarkedIterator(kept.marks, share.pairs)
            self.assertEqual(iterator.element_spec, share.pairs.element_spec[0])
            for mark in marks:
                if steps:
                    optional = read_if_any(iterator)
                    self.assertLen(optional.get_value(), 2)
                else:
                    rows, numbers = read(iterator)
                    self.assertLen(rows, 2)
                    self.assertAllEqual(numbers, mark)
                self.assertAllEqual(kept.numbers, mark)
            self.assertFalse(iterator.get_next_as_optional().has_value())
            self.assertEmpty(list(iterator))


def _slowly(x: np.ndarray) -> np.ndarray:
    time.sleep(0.02 if x < 8 else 0.0)
    return x


class Numbered(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return np.ones((4, 1)), np.full((4, 1), float(index))


def numbered(count: int, *rest: Any) -> Any:
    for index in range(count):
        yield (*Numbered()[index], *rest)


@pytest.mark.long
class PythonDataTest(parameterized.TestCase, tf.test.TestCase):
    """What Python code gives under a strategy, of one worker."""

    def targets(self, source: Any, **fit: Any) -> list[list[float]]:
        """Return the target of each step, by epoch."""
        seen: list[list[float]] = []

        class Watching(keras.Model):
            def train_step(self, batch: Any) -> Any:
                y = tf.numpy_function(watch, [batch[1]], tf.float64)
                return super().train_step((batch[0], tf.ensure_shape(y, [None, 1])))

        def watch(y: np.ndarray) -> np.ndarray:
            seen[-1].append(float(y[0, 0]))
            return y

        begin = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: seen.append([])
        )
        with tf_dgc.DenseStrategy(transport="local").scope():
            inputs = keras.Input((1,))
            model = Watching(inputs, keras.layers.Dense(1)(inputs))
            model.compile("sgd", "mse")
        model.fit(source, verbose=0, shuffle=False, callbacks=[begin], **fit)
        return seen

    def test_states_of_other_rows_than_those_of_a_worker_are_refused(self) -> None:
        inputs = keras.Input(batch_shape=(8, 3, 1))
        recurrent = keras.layers.SimpleRNN(2, stateful=True, name="recurrent")
        model = keras.Model(inputs, recurrent(inputs))
        batch = np.zeros((4, 3, 1)), np.zeros((4, 2)), None
        with self.assertRaisesRegex(
            ValueError,
            r"`batch_shape` must begin with 4, the rows of one of 2 workers.*"
            r"Received: batch_shape=\(8, \.\.\.\), layers \['recurrent'\]",
        ):
            first_builds.refuse_stateful(model, batch, 2)
        with self.assertRaisesRegex(ValueError, "of 2 workers, and this one has none"):
            first_builds.refuse_stateful(model, (np.zeros((0, 3, 1)),), 2)
        first_builds.refuse_stateful(model, (np.zeros((8, 3, 1)),), 2)
        first_builds.refuse_stateful(model, batch, 1)
        outputs = keras.layers.SimpleRNN(2)(inputs)
        first_builds.refuse_stateful(keras.Model(inputs, outputs), batch, 2)

    @parameterized.parameters(1, 2)
    def test_an_epoch_of_a_py_dataset_has_every_batch_in_order(
        self, threads: int
    ) -> None:
        found = self.targets(Numbered(workers=threads), epochs=3)
        self.assertEqual(found, [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3)

    def test_no_batch_is_read_to_build_a_model(self) -> None:
        asked: list[int] = []

        class Asked(Numbered):
            def __getitem__(self, index: int) -> Any:
                asked.append(index)
                return super().__getitem__(index)

        random = np.random.default_rng(1)

        def drawn() -> Any:
            for _ in range(3):
                yield random.normal(size=(4, 1))

        spec = tf.TensorSpec([None, 1], tf.float64)

        def read() -> Any:
            nonlocal random
            asked.clear()
            random = np.random.default_rng(1)
            ones = {"kernel_initializer": "ones"}
            made = tf.data.Dataset.from_generator(drawn, output_signature=spec)
            made = made.apply(tf.data.experimental.assert_cardinality(3))
            for source in (Asked(), made):
                model = keras.Sequential([keras.layers.Dense(1, **ones)])
                found = model.predict(source, verbose=0)
            return sorted(asked), found

        expected = read()
        with tf_dgc.DenseStrategy(transport="local").scope():
            found = read()
        self.assertEqual(found[0], expected[0])
        self.assertAllClose(found[1], expected[1])

    def test_no_batch_of_a_generator_is_lost(self) -> None:
        found = self.targets(numbered(6), epochs=2, steps_per_epoch=3)
        self.assertEqual(found, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])

    @TAKES_NONE
    def test_none_in_a_batch_stays_none(self) -> None:
        found = self.targets(numbered(6, None), steps_per_epoch=6)
        self.assertEqual(found, [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])

    @TAKES_NONE
    def test_none_of_keras_is_shared_out(self) -> None:
        for rank in range(2):
            adapter = generator_data_adapter.GeneratorDataAdapter(numbered(3, None))
            own = list(data.share_of(adapter.get_tf_dataset(), rank, 2))
            self.assertEqual([len(x) for x, _, _ in own], [2, 2, 2])
            for _, _, nothing in own:
                self.assertFalse(nothing.has_value())

    def test_where_keras_reads_by_threads_nothing_is_read_ahead(self) -> None:
        asked: list[int] = []

        class Asked(Numbered):
            def __getitem__(self, index: int) -> Any:
                asked.append(index)
                return super().__getitem__(index)

        adapter = py_dataset_adapter.PyDatasetAdapter(Asked(workers=2))
        share = data.share_of(adapter.get_tf_dataset(), 0, 2)
        adapter.on_epoch_begin()
        for _, _ in zip(range(6), share, strict=False):
            pass
        self.assertTrue(adapter.enqueuer.is_running())  # who reads on stops it
        adapter.on_epoch_end()


if __name__ == "__main__":
    tf.test.main()
