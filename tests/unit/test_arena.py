"""Tests of the arena's table."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_dgc.compression import arena as layout_lib
from tf_dgc.compression.arena import BLOCK

steady = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

shapes = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)
tables = st.lists(shapes, max_size=5).map(
    lambda found: [(f"t{i}", shape) for i, shape in enumerate(found)]
)


class IsCompressedTest(tf.test.TestCase):
    def test_only_tensors_of_rank_two_and_more_are(self) -> None:
        for shape, expected in (
            ((), False),
            ((10_000,), False),
            ((100, 100), True),
            ((10, 10, 10, 10), True),
        ):
            found = layout_lib.is_compressed(shape, tf.float32, 0)
            self.assertEqual(found, expected, shape)

    def test_only_floats_that_float32_holds_are(self) -> None:
        for dtype in (tf.float32, tf.float16, tf.bfloat16, "float32"):
            self.assertTrue(layout_lib.is_compressed((4, 4), dtype, 0), dtype)
        for dtype in (tf.float64, tf.int32, tf.complex64, tf.bool):
            self.assertFalse(layout_lib.is_compressed((4, 4), dtype, 0), dtype)

    def test_tensors_below_min_elements_are_not(self) -> None:
        self.assertTrue(layout_lib.is_compressed((8, 16), tf.float32, 128))
        self.assertFalse(layout_lib.is_compressed((8, 16), tf.float32, 129))

    def test_tensors_without_elements_are_not(self) -> None:
        self.assertFalse(layout_lib.is_compressed((0, 16), tf.float32, 0))


class DivideTest(tf.test.TestCase):
    def test_what_is_compressed_is_in_the_arena_and_all_have_their_order(self) -> None:
        tensors = [
            tf.Variable(tf.zeros(shape, dtype), name=f"t{i}")
            for i, (shape, dtype) in enumerate(
                [
                    ([4], tf.float32),
                    ([2, 4], tf.float32),
                    ([2, 2], tf.float32),
                    ([4, 4], tf.bfloat16),
                ]
            )
        ]
        for least, dtypes, large in (
            (8, layout_lib.COMPRESSED_DTYPES, [1, 3]),
            (8, [tf.float32], [1]),
            (math.inf, [tf.float32], []),
        ):
            found = layout_lib.divide(tensors, least, dtypes)
            self.assertEqual(found.large, large)
            self.assertEqual(found.small, [i for i in range(4) if i not in large])
            shapes = [segment.shape for segment in found.layout.segments]
            self.assertEqual(shapes, [tuple(tensors[i].shape) for i in large])
            self.assertEqual(found.merged(found.large, found.small), [0, 1, 2, 3])


class BuildTest(tf.test.TestCase):
    @steady
    @given(tables)
    def test_segments_lie_end_to_end_in_whole_blocks(self, table: list) -> None:
        layout = layout_lib.build(table)
        self.assertEqual([(s.name, s.shape) for s in layout.segments], table)
        offset = 0
        for segment in layout.segments:
            self.assertEqual(segment.offset, offset)
            self.assertEqual(segment.offset % BLOCK, 0)
            self.assertEqual(segment.size, np.prod(segment.shape))
            offset += -(-segment.size // BLOCK) * BLOCK
        self.assertEqual(layout.size, offset)
        self.assertEqual(layout.elements, sum(np.prod(shape) for _, shape in table))

    @steady
    @given(tables, st.integers(0, 2**31))
    @pytest.mark.long
    def test_bounds_say_where_each_segment_begins_among_positions(
        self, table: list, seed: int
    ) -> None:
        layout = layout_lib.build(table)
        random = np.random.default_rng(seed)
        positions = np.flatnonzero(random.random(layout.size) < 0.3)
        unused = np.full(seed % 3, layout.size)
        bounds = layout_lib.bounds(layout, tf.constant([*positions, *unused], tf.int64))
        self.assertEqual(bounds.shape, [len(layout.segments) + 1])
        self.assertEqual(bounds[-1], len(positions))
        for begin, end, segment in zip(
            bounds[:-1], bounds[1:], layout.segments, strict=True
        ):
            padded = -(-segment.size // BLOCK) * BLOCK
            inside = (positions >= segment.offset) & (
                positions < segment.offset + padded
            )
            self.assertAllEqual(np.arange(begin, end), np.flatnonzero(inside))

    def test_positions_fit_in_31_bits(self) -> None:
        layout = layout_lib.build([("a", (2**16, 2**15 - 1)), ("b", (2**9, 127))])
        self.assertEqual(layout.size, 2**31 - 2**9)
        with self.assertRaisesRegex(
            ValueError, r"fewer than 2\*\*31 elements .* Received: 2147483648 elements"
        ):
            layout_lib.build([("a", (2**16, 2**15))])


class ChecksumTest(tf.test.TestCase):
    def test_shapes_and_order_count_but_not_names(self) -> None:
        def checksum(*table: tuple[str, tuple[int, ...]]) -> int:
            return layout_lib.checksum(layout_lib.build(table))

        found = checksum(("a", (3, 4)), ("b", (5, 6)))
        self.assertEqual(found, checksum(("c", (3, 4)), ("d", (5, 6))))
        for other in (
            checksum(("a", (4, 3)), ("b", (5, 6))),
            checksum(("a", (12, 1)), ("b", (5, 6))),
            checksum(("b", (5, 6)), ("a", (3, 4))),
            checksum(("a", (3, 4))),
            checksum(),
        ):
            self.assertNotEqual(found, other)

    @steady
    @given(tables)
    def test_fits_in_an_int32(self, table: list) -> None:
        found = layout_lib.checksum(layout_lib.build(table))
        self.assertIsInstance(found, int)
        self.assertEqual(int(tf.constant(found, tf.int32)), found)


class FlattenTest(tf.test.TestCase):
    @settings(steady, max_examples=50)
    @given(tables, st.integers(0, 2**31))
    def test_unflatten_inverts_flatten(self, table: list, seed: int) -> None:
        layout = layout_lib.build(table)
        random = np.random.default_rng(seed)
        tensors = [random.normal(size=s).astype(np.float32) for _, s in table]
        arena = layout_lib.flatten(layout, tensors)
        self.assertEqual(arena.dtype, tf.float32)
        self.assertEqual(arena.shape, [layout.size])
        for tensor, found in zip(
            tensors, layout_lib.unflatten(layout, arena), strict=True
        ):
            self.assertEqual(found.shape, tensor.shape)
            self.assertAllEqual(found, tensor)

    def test_padding_is_zero(self) -> None:
        layout = layout_lib.build([("a", (1, 3)), ("b", (1, BLOCK)), ("c", (1, 1))])
        arena = layout_lib.flatten(
            layout, [tf.ones([1, 3]), tf.ones([1, BLOCK]), tf.ones([1, 1])]
        ).numpy()
        expected = np.zeros(3 * BLOCK)
        expected[:3] = expected[BLOCK : 2 * BLOCK] = expected[2 * BLOCK] = 1
        self.assertAllEqual(arena, expected)

    def test_half_floats_enter_exactly(self) -> None:
        layout = layout_lib.build([("a", (2, 2))])
        for dtype in (tf.float16, tf.bfloat16):
            tensor = tf.cast([[0.1, -2.0], [3e-5, 300.0]], dtype)
            arena = layout_lib.flatten(layout, [tensor])
            self.assertAllEqual(arena[:4], tf.reshape(tf.cast(tensor, tf.float32), -1))

    def test_every_segment_needs_its_tensor(self) -> None:
        layout = layout_lib.build([("a", (2, 2)), ("b", (2, 2))])
        with self.assertRaisesRegex(ValueError, "zip"):
            layout_lib.flatten(layout, [tf.ones([2, 2])])

    def test_no_tensors_are_an_empty_arena(self) -> None:
        layout = layout_lib.build([])
        self.assertEqual(layout_lib.flatten(layout, []).shape, [0])
        self.assertEqual(layout_lib.unflatten(layout, tf.zeros([0])), [])


if __name__ == "__main__":
    tf.test.main()
