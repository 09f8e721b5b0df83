"""Tests of data of workers' own: sharded by TensorFlow, and ended on all at once."""

import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import loopback
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_dgc
from tf_dgc.strategies import data

Policy = tf.data.experimental.AutoShardPolicy
HINT = tf.data.experimental.SHARD_HINT


def with_policy(dataset: tf.data.Dataset, policy: Policy) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


class ShardedTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.files, self.rows = [], []
        for i, count in enumerate((9, 2, 4)):
            self.files.append(str(self.folder / str(i)))
            rows = [f"{i}.{k}".encode() for k in range(count)]
            with tf.io.TFRecordWriter(self.files[-1]) as writer:
                for row in rows:
                    writer.write(row)
            self.rows += rows

    def interleaved(self) -> tf.data.Dataset:
        files = tf.data.Dataset.list_files(str(self.folder / "*"), shuffle=True)
        return files.interleave(tf.data.TFRecordDataset)

    def hinted(self) -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices(self.files).shard(HINT, HINT)
        return files.flat_map(tf.data.TFRecordDataset)

    @parameterized.product(kind=["records", "interleaved", "hinted"], size=[2, 3])
    def test_each_row_is_one_workers_and_steps_are_no_larger_than_a_batch(
        self, kind: str, size: int
    ) -> None:
        tf.random.set_seed(1)
        make = {
            "records": lambda: tf.data.TFRecordDataset(self.files).shuffle(4),
            "interleaved": self.interleaved,
            "hinted": self.hinted,
        }[kind]
        policy = Policy.HINT if kind == "hinted" else Policy.FILE
        found = []
        for rank in range(size):
            tf.random.set_seed(1)  # as all workers shuffle alike
            dataset = with_policy(make().batch(4).prefetch(1), policy)
            found.append([list(x.numpy()) for x in data.share_of(dataset, rank, size)])
        rows = [row for own in found for step in own for row in step]
        self.assertCountEqual(rows, self.rows)
        for step in range(max(map(len, found))):
            of_all = [own[step] for own in found if step < len(own)]
            self.assertLessEqual(sum(map(len, of_all)), 4)

    def test_batches_of_a_size_that_is_not_known_are_used_up_too(self) -> None:
        found = []
        for rank in range(2):
            dataset = tf.data.TFRecordDataset(self.files).batch(4).map(tf.strings.upper)
            dataset = dataset.map(
                lambda x: tf.ensure_shape(tf.boolean_mask(x, x != ""), [None])
            )
            own = data.share_of(with_policy(dataset, Policy.FILE), rank, 2)
            found += [row for step in own for row in step.numpy()]
        self.assertCountEqual(found, self.rows)

    def test_fewer_files_than_workers_are_refused(self) -> None:
        for dataset in (tf.data.TFRecordDataset(self.files), self.interleaved()):
            dataset = with_policy(dataset.batch(4), Policy.FILE)
            for rank in range(4):
                with self.assertRaisesRegex(
                    ValueError,
                    r"`AutoShardPolicy\.FILE` needs at least as many files as workers\."
                    r" Received: 3 files, 4 workers",
                ):
                    data.share_of(dataset, rank, 4)

    def test_what_reads_no_files_is_refused(self) -> None:
        read = tf.data.Dataset.from_tensor_slices(self.files).map(tf.io.read_file)
        for dataset in (tf.data.Dataset.range(8), read):
            with self.assertRaisesRegex(
                ValueError,
                r"`AutoShardPolicy\.FILE` needs files that are read by TFRecordDataset"
                r".* Received: .*unshardable",
            ):
                data.share_of(with_policy(dataset.batch(4), Policy.FILE), 0, 2)

    def test_a_policy_of_hints_without_one_is_refused(self) -> None:
        dataset = tf.data.TFRecordDataset(self.files).batch(4)
        with self.assertRaisesRegex(
            ValueError, r"`AutoShardPolicy\.HINT` needs `dataset\.shard\(SHARD_HINT"
        ):
            data.share_of(with_policy(dataset, Policy.HINT), 0, 2)


def structures(rows: int) -> Any:
    """Return tensors of every kind, in a structure."""
    x = np.arange(1.0, rows * 3 + 1, dtype=np.float32).reshape(rows, 3)
    y = np.arange(rows)
    ragged = tf.ragged.constant([[i] * (i % 4) for i in range(rows)], tf.int32)
    return {"x": x, "ragged": ragged, "text": y.astype(str)}, (
        y,
        tf.sparse.from_dense(x),
    )


class EndTest(parameterized.TestCase, tf.test.TestCase):
    """Two workers, in a thread each."""

    def batches(self, make: Callable[[int], tf.data.Dataset]) -> list[list[Any]]:
        lock = threading.Lock()

        def work(transport: loopback.Loopback) -> list[Any]:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            with lock:  # tf.data is traced
                own = make(transport.rank)
            split = strategy.distribute_datasets_from_function(lambda context: own)
            return list(split)

        return loopback.run_workers(2, work)

    def unknown(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.filter(lambda *_: True)

    @parameterized.parameters((5, 2), (0, 3), (4, 4), (0, 0))
    def test_who_ends_first_gets_batches_of_no_rows_of_the_same_kinds(
        self, *counts: int
    ) -> None:
        def make(rank: int) -> tf.data.Dataset:
            dataset = tf.data.Dataset.from_tensor_slices(structures(8))
            return self.unknown(dataset.repeat().batch(2).take(counts[rank]))

        found = self.batches(make)
        spec = make(0).element_spec
        for own, count in zip(found, counts, strict=True):
            self.assertLen(own, max(counts))
            for i, batch in enumerate(own):
                tf.nest.assert_same_structure(batch, spec, expand_composites=True)
                (parts, (y, sparse)) = batch
                rows = 2 if i < count else 0
                self.assertEqual(parts["x"].shape, [rows, 3])
                self.assertEqual(parts["text"].shape, [rows])
                self.assertEqual(parts["ragged"].nrows(), rows)
                self.assertEqual(y.shape, [rows])
                self.assertAllEqual(sparse.dense_shape, [rows, 3])

    def test_sizes_that_only_others_know_are_theirs(self) -> None:
        def make(rank: int) -> tf.data.Dataset:
            dataset = tf.data.Dataset.from_tensor_slices(np.zeros((2, 5, 7)))
            dataset = self.unknown(dataset.batch(1).take(1 + rank))
            anything = tf.TensorSpec([None, None, None], tf.float64)
            return dataset.map(
                lambda x: tf.ensure_shape(
                    tf.py_function(lambda y: y, [x], tf.float64), anything.shape
                )
            )

        first, _ = self.batches(make)
        self.assertEqual([x.shape for x in first], [[1, 5, 7], [0, 5, 7]])

    def test_none_stays_none(self) -> None:
        def make(rank: int) -> tf.data.Dataset:
            dataset = tf.data.Dataset.from_tensor_slices((np.arange(4.0), None))
            return self.unknown(dataset.batch(2).take(1 + rank))

        first, _ = self.batches(make)
        self.assertEqual([len(x) for x, _ in first], [2, 0])
        self.assertEqual([nothing for _, nothing in first], [None, None])

    def test_known_numbers_of_batches_that_differ_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "the same data.*number of batches"):
            self.batches(lambda rank: tf.data.Dataset.range(4).batch(1 + rank))


if __name__ == "__main__":
    tf.test.main()
