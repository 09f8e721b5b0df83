"""Tests of how batches are shared out."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc import data

Policy = tf.data.experimental.AutoShardPolicy


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
            (tf.constant([], tf.string), tf.zeros([0, 1])),
        ):
            found, count = data.at_least_one_row(empty)
            self.assertEqual(int(count), 0)
            for one, two in zip(
                tf.nest.flatten(found), tf.nest.flatten(empty), strict=True
            ):
                if two is not None:
                    self.assertEqual(one.shape, [1, *two.shape[1:]])
                    self.assertEqual(one.dtype, two.dtype)

    def test_what_has_rows_keeps_them(self) -> None:
        rows = tf.reshape(tf.range(6), [2, 3])
        (found, _), count = data.at_least_one_row((rows, None))
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


class ShareOfTest(parameterized.TestCase, tf.test.TestCase):
    def assert_same(self, found: Any, expected: Any) -> None:
        tf.nest.assert_same_structure(found, expected)
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(a, b)

    @parameterized.product(name=list(structures(1)), sizes=[(13, 5, 2), (9, 4, 3)])
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
            if row_count(whole) >= workers:
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

    @parameterized.parameters((1, 4), (2, 4), (3, 7))
    def test_fewer_rows_than_workers_are_repeated(
        self, rows: int, workers: int
    ) -> None:
        x = np.arange(rows)
        dataset = tf.data.Dataset.from_tensor_slices((x, -x)).batch(workers)
        seen = set()
        for (part,) in shares(dataset, workers):
            self.assertLen(part[0], 1)
            self.assertAllEqual(part[1], -part[0])
            seen.add(int(part[0][0]))
        self.assertEqual(seen, set(range(rows)))

    def test_fewer_rows_than_workers_are_not_repeated_in_predict(self) -> None:
        x = np.arange(2)
        for structure in (x, {"x": x}, (x,), ((x, x),)):
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

    def test_sharding_by_file_is_refused(self) -> None:
        dataset = tf.data.Dataset.range(8).batch(4)
        for policy in (Policy.FILE, Policy.HINT):
            with self.assertRaisesRegex(
                ValueError,
                r"`auto_shard_policy` must be AUTO, DATA or OFF\. Received: .*"
                rf"{policy.name}.*`files\.shard\(",
            ):
                data.share_of(with_policy(dataset, policy), 0, 2)

    def test_auto_and_data_split_alike(self) -> None:
        dataset = tf.data.Dataset.range(8).batch(4)
        for policy in (Policy.AUTO, Policy.DATA):
            found = shares(with_policy(dataset, policy), 2)
            self.assertAllEqual(found, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]])


if __name__ == "__main__":
    tf.test.main()
