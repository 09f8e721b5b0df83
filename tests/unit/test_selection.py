"""Tests of the selection."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_dgc.compression import arena as layout_lib
from tf_dgc.compression import selection as sparsify
from tf_dgc.compression.arena import Layout

steady = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
STEP = tf.constant(0, tf.int64)

shapes = st.tuples(st.integers(1, 30), st.integers(1, 30))
tables = st.lists(shapes, min_size=1, max_size=4)
sparsities = st.floats(0, 1, exclude_max=True)


def layout_of(*found: tuple[int, ...]) -> Layout:
    return layout_lib.build([(f"t{i}", shape) for i, shape in enumerate(found)])


def arena_of(layout: Layout, tensors: list[np.ndarray]) -> tf.Tensor:
    return layout_lib.flatten(layout, [tf.constant(t, tf.float32) for t in tensors])


def normal(layout: Layout, seed: int, scales: list[float] | None = None) -> list:
    random = np.random.default_rng(seed)
    return [
        (random.normal(size=segment.shape) * scale).astype(np.float32)
        for segment, scale in zip(
            layout.segments, scales or [1.0] * len(layout.segments), strict=True
        )
    ]


def thresholds(
    arena: tf.Tensor,
    layout: Layout,
    sparsity: float,
    sample_fraction: float,
    step: tf.Tensor,
) -> tf.Tensor:
    plan = sparsify.plan(layout, sparsity, sample_fraction)
    return sparsify.thresholds(arena, sparsify.peaks(arena), layout, plan, step)


def select(
    arena: tf.Tensor, layout: Layout, threshold: tf.Tensor, slots: list[int]
) -> tf.Tensor:
    found = sparsify.select(
        arena, sparsify.peaks(arena), layout, threshold, slots, STEP
    )
    np.testing.assert_array_equal(found[1], tf.gather(arena, found[0]))
    return found[0]


def selected(
    layout: Layout, arena: tf.Tensor, sparsity: float, fraction: float = 1.0
) -> np.ndarray:
    threshold = thresholds(arena, layout, sparsity, fraction, STEP)
    slots = sparsify.slots_per_segment(layout, sparsity)
    return select(arena, layout, threshold, slots).numpy()


def by_segment(layout: Layout, positions: np.ndarray) -> list[np.ndarray]:
    """Return the positions within each tensor."""
    return [
        positions[(positions >= s.offset) & (positions < s.offset + s.size)] - s.offset
        for s in layout.segments
    ]


class SlotsTest(tf.test.TestCase):
    @steady
    @given(tables, sparsities)
    def test_each_tensor_has_its_density_and_at_least_one(
        self, table: list, sparsity: float
    ) -> None:
        layout = layout_of(*table)
        found = sparsify.slots_per_segment(layout, sparsity)
        for segment, slots in zip(layout.segments, found, strict=True):
            self.assertBetween(slots, 1, segment.size)
            if slots > 1:
                wanted = segment.size * (1 - sparsity)
                self.assertLessEqual(abs(slots - wanted), 0.5 + 1e-6)

    def test_sparsity_zero_has_room_for_all(self) -> None:
        layout = layout_of((8, 16), (5, 7))
        self.assertEqual(sparsify.slots_per_segment(layout, 0.0), [128, 35])

    def test_one_in_a_thousand(self) -> None:
        layout = layout_of((1000, 1000), (10, 10))
        self.assertEqual(sparsify.slots_per_segment(layout, 0.999), [1000, 1])


class ExactSelectionTest(tf.test.TestCase):
    """Where the sample is the whole tensor."""

    @settings(steady, max_examples=50)
    @given(tables, sparsities, st.integers(0, 2**31))
    @pytest.mark.long
    def test_selection_is_the_top_k_of_each_tensor(
        self, table: list, sparsity: float, seed: int
    ) -> None:
        layout = layout_of(*table)
        tensors = normal(layout, seed)
        positions = selected(layout, arena_of(layout, tensors), sparsity)
        self.assertEqual(positions.dtype, np.int64)
        self.assertAllEqual(positions, np.unique(positions))
        for tensor, found in zip(tensors, by_segment(layout, positions), strict=True):
            count = max(1, round(tensor.size * (1 - sparsity)))
            magnitudes = np.abs(tensor).ravel()
            expected = np.argsort(-magnitudes, kind="stable")[:count]
            self.assertAllEqual(found, np.sort(expected))

    def test_small_tensors_are_exact_at_any_sample_fraction(self) -> None:
        layout = layout_of((100, 100), (30, 30))
        arena = arena_of(layout, normal(layout, 3))
        whole = selected(layout, arena, 0.99)
        self.assertAllEqual(selected(layout, arena, 0.99, fraction=1e-3), whole)
        self.assertLen(whole, 100 + 9)

    def test_tensors_of_different_scale_each_get_their_share(self) -> None:
        layout = layout_of((40, 50), (40, 50), (40, 50))
        tensors = normal(layout, 4, [1e-12, 1.0, 1e12])
        positions = selected(layout, arena_of(layout, tensors), 0.95)
        counts = [len(found) for found in by_segment(layout, positions)]
        self.assertEqual(counts, [100, 100, 100])

    def test_zeros_are_never_selected(self) -> None:
        layout = layout_of((20, 20), (20, 20), (3, 3))
        tensors = [np.zeros((20, 20)), np.zeros((20, 20)), np.zeros((3, 3))]
        for sparsity in (0.0, 0.5, 0.99):
            arena = arena_of(layout, tensors)
            self.assertEmpty(selected(layout, arena, sparsity))
        tensors[1][7, 3] = tensors[1][19, 19] = -1e-20
        positions = selected(layout, arena_of(layout, tensors), 0.5)
        self.assertAllEqual(by_segment(layout, positions)[1], [7 * 20 + 3, 399])
        self.assertLen(positions, 2)

    def test_padding_is_never_selected(self) -> None:
        layout = layout_of((1, 3), (1, 130))
        positions = selected(layout, arena_of(layout, normal(layout, 1)), 0.0)
        self.assertAllEqual(positions, [0, 1, 2, *range(128, 128 + 130)])

    def test_nan_is_never_selected(self) -> None:
        layout = layout_of((20, 20), (20, 20))
        tensors = normal(layout, 5)
        tensors[0][3, :5] = np.nan
        arena = arena_of(layout, tensors)
        for sparsity in (0.0, 0.5, 0.99):
            positions = selected(layout, arena, sparsity)
            self.assertAllEqual(
                np.isnan(arena.numpy()[positions]), [False] * positions.size
            )
            self.assertNotEmpty(by_segment(layout, positions)[1])
        threshold = tf.constant([0.1, 0.1])
        positions = select(arena, layout, threshold, [30, 20]).numpy()
        self.assertLen(positions, 50)
        self.assertFalse(np.isnan(arena.numpy()[positions]).any())

    def test_the_sign_does_not_matter(self) -> None:
        layout = layout_of((20, 20))
        (tensor,) = normal(layout, 6)
        positions = selected(layout, arena_of(layout, [tensor]), 0.9)
        for other in (-tensor, np.abs(tensor)):
            found = selected(layout, arena_of(layout, [other]), 0.9)
            self.assertAllEqual(found, positions)

    def test_an_empty_arena_has_no_thresholds(self) -> None:
        layout = layout_of()
        found = thresholds(tf.zeros([0]), layout, 0.9, 1.0, STEP)
        self.assertEqual(found.shape, [0])


class CrowdedSelectionTest(tf.test.TestCase):
    """Where more elements pass than there are slots."""

    def test_equal_elements_have_their_turns(self) -> None:
        layout, ones = layout_of((1, 64)), tf.ones([64])
        positions, seen = tf.range(64, dtype=tf.int64), set[int]()
        for step in range(64):
            of_step = tf.constant(step, tf.int64)
            chosen = sparsify.strongest(positions, ones, layout, [4], of_step)
            seen.update(chosen.numpy().tolist())
        self.assertEqual(seen, set(range(64)))

    @settings(steady, max_examples=50)
    @given(tables, st.floats(0.01, 0.99), st.integers(0, 2**31))
    @pytest.mark.long
    def test_each_tensor_sends_its_own_before_any_takes_what_is_left(
        self, table: list, share: float, seed: int
    ) -> None:
        layout = layout_of(*table)
        random = np.random.default_rng(seed)
        scales = 10.0 ** random.integers(-6, 6, size=len(table))
        tensors = normal(layout, seed, list(scales))
        # In some of them none pass, in others all do.
        least = [np.quantile(np.abs(t), random.uniform(0, 1.2) % 1) for t in tensors]
        passing = [
            np.sort(np.abs(t)[np.abs(t) >= np.float32(bound)])[::-1]
            for t, bound in zip(tensors, least, strict=True)
        ]
        slots = [max(1, int(share * tensor.size)) for tensor in tensors]
        positions = select(
            arena_of(layout, tensors), layout, tf.constant(np.float32(least)), slots
        ).numpy()
        self.assertAllEqual(positions, np.unique(positions))
        total = sum(len(values) for values in passing)
        self.assertLen(positions, min(sum(slots), total))
        nearest, farthest = [], []
        for tensor, own, values, found in zip(
            tensors, slots, passing, by_segment(layout, positions), strict=True
        ):
            self.assertGreaterEqual(len(found), min(own, len(values)))
            sent = np.sort(np.abs(tensor).ravel()[found])[::-1]
            self.assertAllEqual(sent, values[: len(sent)])
            nearest += list(values[len(sent) :][:1] / values[own - 1 :][:1])
            farthest += list(values[own : len(sent)][-1:] / values[own - 1 :][:1])
        if nearest and farthest:
            self.assertGreaterEqual(np.float32(min(farthest)), np.float32(max(nearest)))

    def test_a_sparse_tensor_whose_threshold_is_0_starves_no_other(self) -> None:
        layout = layout_of((20_000, 64), (256, 256))
        random = np.random.default_rng(0)
        for step in range(8):
            rows = np.zeros((20_000, 64), np.float32)
            # Somewhat more elements than the 1280 slots; the sample says they are less.
            touched = random.choice(20_000, 22, replace=False)
            rows[touched] = random.normal(size=(22, 64))
            arena = arena_of(layout, [rows, random.normal(size=(256, 256))])
            dense = thresholds(arena, layout, 0.999, 0.01, STEP + step)[1].numpy()
            threshold = tf.stack([sparsify.SMALLEST, dense])
            slots = sparsify.slots_per_segment(layout, 0.999)
            positions = select(arena, layout, threshold, slots).numpy()
            counts = [len(found) for found in by_segment(layout, positions)]
            passing = int((np.abs(arena.numpy()[rows.size :]) >= dense).sum())
            self.assertGreaterEqual(counts[1], min(passing, slots[1]))
            self.assertEqual(sum(counts), min(sum(slots), rows[touched].size + passing))

    def test_selection_never_truncates_by_position(self) -> None:
        layout = layout_of((100, 1000), (100, 1000))
        arena = arena_of(layout, normal(layout, 7))
        threshold = tf.constant([1e-6, 1e-6])  # all pass
        positions = select(arena, layout, threshold, [1000, 1000]).numpy()
        self.assertLen(positions, 2000)
        # Kolmogorov and Smirnov: 2.2 / sqrt(n) is passed once in 10,000 times.
        distance = np.abs(positions / layout.size - np.arange(2000) / 2000).max()
        self.assertLess(distance, 2.2 / np.sqrt(2000))

    @pytest.mark.long
    def test_tensors_with_one_slot_are_kept_as_often_as_others(self) -> None:
        layout = layout_of((1000, 2000), *[(32, 32)] * 10)
        slots = sum(sparsify.slots_per_segment(layout, 0.999))
        sent, crowded = np.zeros(10), 0
        for step in range(20):
            arena = arena_of(layout, normal(layout, 100 + step))
            positions = selected(layout, arena, 0.999, fraction=0.01)
            crowded += len(positions) == slots
            small = (positions - layout.segments[1].offset) // 1024
            sent += np.bincount(small[small >= 0], minlength=10) > 0
        self.assertBetween(crowded, 4, 16)
        self.assertGreater(np.mean(sent) / 20, 0.8)

    def test_exactly_full_keeps_every_candidate(self) -> None:
        layout = layout_of((10, 10))
        arena = arena_of(layout, normal(layout, 8))
        magnitudes = np.abs(arena.numpy())
        threshold = tf.constant([np.sort(magnitudes)[-30]])
        for slots in (30, 31, 100):
            positions = select(arena, layout, threshold, [slots]).numpy()
            expected = np.flatnonzero(magnitudes >= threshold.numpy())
            self.assertAllEqual(positions, expected)


class SampledThresholdsTest(tf.test.TestCase):
    """Where the sample is a part of the tensor."""

    # Of at least 64 sampled elements above the threshold, as `sparsify` promises.
    DEVIATION = 1 / np.sqrt(sparsify.MIN_SAMPLED_ABOVE)

    def assert_near(
        self, layout: Layout, arena: tf.Tensor, sparsity: float, steps: int = 16
    ) -> None:
        """The number that passes is within five deviations, and so is its mean."""
        magnitudes = np.abs(arena.numpy())
        wanted = sparsify.slots_per_segment(layout, sparsity)
        ratios = []
        for step in range(steps):
            found = thresholds(
                arena, layout, sparsity, 0.01, tf.constant(step, tf.int64)
            ).numpy()
            self.assertEqual(found.dtype, np.float32)
            ratios.append(
                [
                    (magnitudes[s.offset : s.offset + s.size] >= least).sum() / slots
                    for s, least, slots in zip(
                        layout.segments, found, wanted, strict=True
                    )
                ]
            )
        self.assertAllInRange(ratios, 1 - 5 * self.DEVIATION, 1 + 5 * self.DEVIATION)
        mean_deviation = self.DEVIATION / np.sqrt(steps)
        self.assertAllInRange(
            np.mean(ratios, axis=0), 1 - 5 * mean_deviation, 1 + 5 * mean_deviation
        )

    @pytest.mark.long
    def test_about_as_many_pass_as_there_are_slots(self) -> None:
        layout = layout_of((1024, 1000), (300, 1700))
        arena = arena_of(layout, normal(layout, 9, [1.0, 1e-6]))
        for sparsity in (0.75, 0.99, 0.999):
            with self.subTest(sparsity=sparsity):
                self.assert_near(layout, arena, sparsity)

    @pytest.mark.long
    def test_the_distribution_does_not_matter(self) -> None:
        layout = layout_of((1024, 1000))
        random = np.random.default_rng(10)
        for name, tensor in (
            ("uniform", random.uniform(-1, 1, (1024, 1000))),
            ("heavy tails", random.standard_cauchy((1024, 1000))),
            ("over all exponents", random.normal(size=(1024, 1000)) ** 15),
        ):
            with self.subTest(name):
                self.assert_near(layout, arena_of(layout, [tensor]), 0.999)

    @pytest.mark.long
    def test_rows_of_a_common_length_do_not_fool_the_sample(self) -> None:
        random = np.random.default_rng(11)
        for length in (96, 100, 128, 1000):
            layout = layout_of((400_000 // length, length))
            for faint in (slice(length // 2, None), slice(None, None, 2)):
                tensor = random.normal(size=layout.segments[0].shape)
                tensor[:, faint] *= 1e-3
                with self.subTest(length=length, faint=faint):
                    self.assert_near(layout, arena_of(layout, [tensor]), 0.99)

    def test_the_sample_starts_elsewhere_at_every_step(self) -> None:
        layout = layout_of((1024, 1000))
        arena = arena_of(layout, normal(layout, 12))
        found = {
            float(
                thresholds(arena, layout, 0.999, 0.01, tf.constant(step, tf.int64))[0]
            )
            for step in range(10)
        }
        self.assertLen(found, 10)

    def test_the_whole_sample_gives_the_exact_threshold(self) -> None:
        layout = layout_of((1024, 1000))
        arena = arena_of(layout, normal(layout, 13))
        found = thresholds(arena, layout, 0.999, 1.0, STEP)
        below, least = np.sort(np.abs(arena.numpy()))[-1025:-1023]
        self.assertEqual(found.numpy()[0], below / 2 + least / 2)
        self.assertBetween(found.numpy()[0], np.nextafter(below, least), least)

    def test_thresholds_of_zeros_are_positive(self) -> None:
        layout = layout_of((1024, 1000), (2, 2))
        found = thresholds(tf.zeros([layout.size]), layout, 0.999, 0.01, STEP)
        self.assertAllGreater(found, 0.0)

    def test_zeros_are_not_sent_for_want_of_others(self) -> None:
        layout = layout_of((1024, 1000))
        tensor = np.zeros((1024, 1000))
        tensor[::100, 77] = 1e-3
        positions = selected(layout, arena_of(layout, [tensor]), 0.999, fraction=0.01)
        self.assertAllEqual(positions, np.flatnonzero(tensor))

    @pytest.mark.long
    def test_any_sparsity_has_a_threshold_at_any_step(self) -> None:
        layout = layout_of((128, 100))
        arena = arena_of(layout, normal(layout, 14))
        for sparsity in (0.0, 0.001, 0.01):
            for step in range(97):
                found = thresholds(
                    arena, layout, sparsity, 0.01, tf.constant(step, tf.int64)
                )
                self.assertAllGreater(found, 0.0)

    @pytest.mark.long
    def test_in_a_graph_as_eagerly(self) -> None:
        layout = layout_of((512, 500), (20, 20))
        arena = arena_of(layout, normal(layout, 15))
        slots = sparsify.slots_per_segment(layout, 0.99)

        @tf.function
        def positions(step: tf.Tensor) -> tf.Tensor:
            threshold = thresholds(arena, layout, 0.99, 0.01, step)
            peaks = sparsify.peaks(arena)
            return sparsify.select(arena, peaks, layout, threshold, slots, step)[0]

        for number in range(3):
            step = tf.constant(number, tf.int64)
            threshold = thresholds(arena, layout, 0.99, 0.01, step)
            peaks = sparsify.peaks(arena)
            expected = sparsify.select(arena, peaks, layout, threshold, slots, step)
            self.assertAllEqual(positions(step), expected[0])


@pytest.mark.long
class PlanTest(tf.test.TestCase):
    @settings(steady, max_examples=10)
    @given(
        tables,
        st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.99, 0.999]), min_size=2),
        st.sampled_from([0.01, 1.0]),
        st.integers(0, 2**31),
    )
    @pytest.mark.extended
    def test_one_that_is_chosen_in_the_graph_selects_the_same(
        self, table: list, several: list[float], fraction: float, seed: int
    ) -> None:
        layout = layout_of(*table, (100, 200))
        arena = arena_of(layout, normal(layout, seed))
        plans = [sparsify.plan(layout, each, fraction) for each in several]
        step, peaks = tf.constant(seed, tf.int64), sparsify.peaks(arena)

        def chosen(plan: sparsify.Plan) -> tuple[tf.Tensor, ...]:
            threshold = sparsify.thresholds(arena, peaks, layout, plan, step)
            args = arena, peaks, layout, threshold, plan.slots, step
            return threshold, *sparsify.select(*args)

        shared = tf.function(lambda number: chosen(sparsify.one_of(plans, number)))
        for number, plan in enumerate(plans):
            found = shared(tf.constant(number))
            for part, expected in zip(found, chosen(plan), strict=True):
                self.assertAllEqual(part, expected)
        self.assertEqual(shared.experimental_get_tracing_count(), 1)


class PeaksTest(tf.test.TestCase):
    @settings(steady, max_examples=20)
    @given(st.integers(1, 5), st.integers(0, 2**31), st.sampled_from([(), (3,)]))
    def test_are_the_largest_magnitudes_of_their_lines(
        self, blocks: int, seed: int, axes: tuple[int, ...]
    ) -> None:
        random = np.random.default_rng(seed)
        shape = (*axes, blocks * layout_lib.BLOCK)
        arena = random.normal(size=shape) * 10.0 ** random.integers(-42, 38, shape)
        arena = arena.astype(np.float32)
        lines = np.abs(arena).reshape(*axes, -1, sparsify.LINE)
        expected = lines.max(axis=-1)
        self.assertAllEqual(sparsify.peaks(tf.constant(arena)), expected)

    def test_what_is_not_finite_comes_last(self) -> None:
        arena = np.zeros(2 * layout_lib.BLOCK, np.float32)
        arena[[3, 5, 131]] = np.nan, -np.inf, -np.inf
        found = sparsify.peaks(tf.constant(arena)).numpy()
        self.assertTrue(np.isnan(found[0]))
        self.assertEqual(found[128 // sparsify.LINE], np.inf)


if __name__ == "__main__":
    tf.test.main()
