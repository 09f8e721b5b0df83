"""Which tensors of an element are divided among workers, and which all of them get."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc.strategies import data, first_builds
from tf_dgc.strategies.slicing import at_least_one_row, row_count

# B, K: rows of the batch, and of what its rows share.
OPEN, FIXED = None, 5


def element(rows: int, shared: int, group: str = "other") -> Any:
    users, items = np.arange(rows), np.arange(rows) + 10
    negatives = np.arange(shared) + 100
    return {
        "other": (users, items, negatives),
        "input": ((users, negatives), items),
        "named": ({"users": users, "negatives": negatives}, items),
        "first": ((negatives, users), items),
        "one": {"ids": users, "negatives": negatives},
        "last": {"users": users, "negatives": negatives},
    }[group]


def dataset(
    found: Iterable[Any], rows: int | None = None, shared: int | None = None
) -> tf.data.Dataset:
    """Return a dataset of elements, whose shapes tell these numbers of rows."""
    found = list(found)

    def spec(part: np.ndarray) -> tf.TensorSpec:
        known = shared if part.size and part[0] >= 100 else rows
        return tf.TensorSpec([known, *part.shape[1:]], part.dtype)

    signature = tf.nest.map_structure(spec, found[0])
    return tf.data.Dataset.from_generator(lambda: found, output_signature=signature)


def shares(whole: tf.data.Dataset, size: int = 2) -> list[list[Any]]:
    return [list(data.share_of(whole, rank, size)) for rank in range(size)]


def parts_of(found: Any) -> tuple[list[int], list[int]]:
    """Return the rows, and what is shared, of one worker's element."""
    flat = [part.numpy().tolist() for part in tf.nest.flatten(found)]
    rows = [part for part in flat if not part or part[0] < 100]
    shared = [part for part in flat if part and part[0] >= 100]
    return rows[0], shared[0]


class SharedTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        ("other", 7, 2),
        ("input", OPEN, 3),
        ("named", 7, 3),
        ("named", OPEN, 2),
        ("first", 7, 2),
        ("first", OPEN, 2),
    )
    @pytest.mark.few(3)
    @pytest.mark.long
    def test_what_rows_share_goes_to_all_workers_whole(
        self, group: str, rows: int | None, size: int
    ) -> None:
        whole = dataset([element(7, FIXED, group)] * 2, rows, FIXED)
        found = [[parts_of(e) for e in part] for part in shares(whole, size)]
        for step in range(2):
            rows_found = [row for part in found for row in part[step][0]]
            self.assertEqual(rows_found, list(range(7)))
            for part in found:
                self.assertEqual(part[step][1], list(range(100, 105)))

    def test_a_fixed_number_of_rows_is_no_chance(self) -> None:
        whole = dataset([element(n, FIXED, "named") for n in (8, 5, 8)], None, FIXED)
        for part in shares(whole):
            for each in part:
                self.assertLen(parts_of(each)[1], FIXED)

    @pytest.mark.long
    def test_what_was_seen_to_have_other_rows_is_not_divided_by_chance(self) -> None:
        for part in shares(dataset(element(n, FIXED) for n in (8, 5, 8))):
            self.assertEqual([len(parts_of(e)[1]) for e in part], [FIXED] * 3)

    def test_what_has_other_rows_later_stops(self) -> None:
        whole = data.share_of(dataset(element(n, 8) for n in (8, 8, 5)), 0, 2)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "as many rows as batches before.*"
        ):
            list(whole)

    @parameterized.parameters("input", "named", "one")
    @pytest.mark.long
    def test_where_only_one_batch_tells_it_is_refused(self, group: str) -> None:
        whole = data.share_of(dataset([element(8, 5, group)]), 0, 2)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            r"(?s)other numbers of rows.*ensure_shape.*Numbers of rows of x\[",
        ):
            list(whole)

    @parameterized.parameters("input", "one", "last")
    @pytest.mark.long
    def test_where_the_size_of_batches_is_known_it_tells(self, group: str) -> None:
        names = tf.data.Dataset.range(20).batch(8)

        def both(users: Any) -> Any:
            negatives = tf.boolean_mask(tf.range(100, 107, dtype=tf.int64), [True] * 7)
            key = "ids" if group == "one" else "users"
            named = {key: users, "negatives": negatives}
            return ((users, negatives), users + 10) if group == "input" else named

        whole = names.map(both)
        if group == "last":  # the first of them has seven rows, not eight
            with self.assertRaises(tf.errors.InvalidArgumentError):
                shares(whole)
            return
        found = shares(whole)
        self.assertEqual([len(parts_of(e)[0]) for e in found[1]], [4, 4, 2])
        for part in found:
            self.assertEqual([len(parts_of(e)[1]) for e in part], [7] * 3)

    @pytest.mark.long
    def test_scalars_are_of_all_rows(self) -> None:
        def with_scale(x: Any) -> Any:
            return {"x": x, "scale": tf.constant(3.0)}, x

        found = shares(tf.data.Dataset.range(6).batch(4).map(with_scale))
        for part in found:
            for x, _ in part:
                self.assertEqual(float(x["scale"]), 3.0)
        self.assertAllEqual([len(x["x"]) for x, _ in found[0]], [2, 1])

    def test_a_fixed_shape_is_told(self) -> None:
        data._tell_shared.cache_clear()
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            shares(dataset([element(8, FIXED, "named")], None, FIXED))
        self.assertRegex(logs.output[0], r"whole.*x\['negatives'\]")


class RefusedTest(parameterized.TestCase, tf.test.TestCase):
    def graphs(self, by_graph: bool, sizes: tuple[int, ...] = (5, 5, 5, 5)) -> Any:
        nodes = tf.RaggedTensor.from_row_lengths(np.ones([sum(sizes), 3]), sizes)
        edges = tf.RaggedTensor.from_row_lengths(
            np.zeros([2 * sum(sizes), 2], np.int64), 2 * np.array(sizes)
        )
        y = np.ones(len(sizes))
        batches = tf.data.Dataset.from_tensor_slices(((nodes, edges), y)).batch(2)

        def merged(x: Any, y: Any) -> Any:
            nodes, edges = (part.merge_dims(0, 1) for part in x)
            return (nodes, edges), y if by_graph else nodes[:, 0]

        return batches.map(merged)

    @parameterized.parameters(True, False)
    def test_graphs_that_are_merged_into_one(self, by_graph: bool) -> None:
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError,
            r"(?s)Graphs that are merged into one.*ragged.*x\[0\], x\[1\], y",
        ):
            list(data.share_of(self.graphs(by_graph), 0, 2))

    def test_graphs_of_python_code_that_grow(self) -> None:
        def graphs() -> Any:
            for nodes in (40, 30, 50):
                yield np.ones([nodes]), np.ones([nodes]), np.zeros([2 * nodes])

        spec = tuple(tf.TensorSpec([None], tf.float64) for _ in range(3))
        whole = tf.data.Dataset.from_generator(graphs, output_signature=spec)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "batches grow"):
            list(data.share_of(whole, 0, 2))

    def test_targets_by_token(self) -> None:
        whole = tf.data.Dataset.from_tensor_slices(np.ones([8, 3], np.int64)).batch(4)
        whole = whole.map(lambda x: (x, tf.reshape(x, [-1])))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "tokens"):
            list(data.share_of(whole, 0, 2))

    @parameterized.parameters(
        (np.ones([2, 8, 3]), np.ones([2, 24])),
        ((np.ones([2, 40]), np.ones([2, 80])), np.ones([2, 8])),
        (np.ones([2, 8]), {"class": np.ones([2, 8]), "tokens": np.ones([2, 24])}),
    )
    def test_shapes_that_do_not_fit(self, x: Any, y: Any) -> None:
        whole = tf.data.Dataset.from_tensor_slices((x, y))
        with self.assertRaisesRegex(
            ValueError, r"other numbers of rows.*Received: elements .*TensorSpec"
        ):
            data.share_of(whole, 0, 2)

    def test_images_without_batches(self) -> None:
        whole = tf.data.Dataset.from_tensor_slices((np.ones([4, 8, 8]), np.ones([4])))
        with self.assertRaisesRegex(ValueError, "must be batched"):
            data.share_of(whole, 0, 2)


class StepTest(tf.test.TestCase):
    """Steps count, and fill, the rows of the batch."""

    def test_rows_are_those_of_targets(self) -> None:
        negatives = tf.zeros([5])
        for args in (
            ((negatives, tf.zeros([3])), tf.zeros([3])),
            (((negatives, tf.zeros([3])), tf.zeros([3])),),
            ((tf.zeros([3]), None, negatives),),
            ({"scale": tf.constant(1.0), "x": tf.zeros([3])},),
        ):
            self.assertEqual(row_count(args), 3)

    def test_what_is_shared_gets_no_row(self) -> None:
        args = (tf.zeros([0, 2]), tf.zeros([0]), tf.zeros([5]), tf.constant(2.0), "a")
        filled, count = at_least_one_row((args,))
        self.assertEqual(int(count), 0)
        self.assertEqual(
            [tuple(p.shape) for p in filled[0][:4]], [(1, 2), (1,), (5,), ()]
        )

    def test_a_model_is_built_by_a_batch_with_scalars(self) -> None:
        batch = (tf.zeros([3, 2]), None, tf.constant(0.5))
        first_builds.refuse_stateful(keras.Sequential(), batch, 2)

    @pytest.mark.long
    def test_shapes_may_be_unknown(self) -> None:
        @tf.function(input_signature=[tf.TensorSpec(None)] * 2)
        def filled(x: tf.Tensor, y: tf.Tensor) -> Any:
            return at_least_one_row((x, y))

        (x, y), count = filled(tf.zeros([0, 2, 3]), tf.zeros([0]))
        self.assertEqual([x.shape, y.shape, int(count)], [(1, 2, 3), (1,), 0])


if __name__ == "__main__":
    pytest.main([__file__])
