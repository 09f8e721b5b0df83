"""Tests of the selection of a fixed size, beside that of lists."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from test_fuzz import FORMATS, as_message, mutated, selection

from tf_dgc.compression import arena as layout_lib
from tf_dgc.compression import dgc, fixed
from tf_dgc.compression import message as packing
from tf_dgc.compression import selection as sparsify
from tf_dgc.compression.arena import Layout
from tf_dgc.compression.message import Format
from tf_dgc.config import VALUE_DTYPES, DGCConfig

SHAPES = ((130, 150), (16, 16), (3, 3), (100, 90), (130, 150))


def layout_of(*found: tuple[int, ...]) -> Layout:
    return layout_lib.build([(f"t{i}", shape) for i, shape in enumerate(found)])


def arena_of(layout: Layout, tensors: list[np.ndarray]) -> tf.Tensor:
    return layout_lib.flatten(layout, [tf.constant(t, tf.float32) for t in tensors])


def drawn(kind: str, seed: int) -> list[np.ndarray]:
    """Return tensors: of other scales each, with many equal elements, or zeros."""
    random, found = np.random.default_rng(seed), []
    for shape, scale in zip(SHAPES, (1.0, 1e-3, 5.0, 2.0, 1e6), strict=True):
        tensor = random.normal(size=shape) * scale
        if kind == "equal":
            tensor = np.round(4 * tensor / scale) * scale
        if kind == "sparse":
            tensor *= random.random(shape) < 0.02
        found.append(tensor.astype(np.float32))
    return found


class Selection:
    """Thresholds and what is selected by them, compiled."""

    def __init__(self, layout: Layout, sparsity: float, fraction: float) -> None:
        self.layout = layout
        self.plan = sparsify.plan(layout, sparsity, fraction)
        self.slots = self.plan.slots.tolist()
        self._known = fixed.tables(layout, self.plan)
        self._both = tf.function(self._found, jit_compile=True, autograph=False)
        self.by = tf.function(self._selected, jit_compile=True, autograph=False)

    def _found(self, arena: tf.Tensor, step: tf.Tensor, known: Any) -> Any:
        args = arena, self.layout, self.plan, known, step
        threshold = fixed.thresholds(*args)
        return threshold, *self._selected(arena, threshold, step, known)

    def _selected(self, arena: Any, threshold: Any, step: Any, known: Any) -> Any:
        return fixed.select(arena, self.layout, threshold, self.slots, known, step)

    def at(self, arena: tf.Tensor, step: int) -> Any:
        return self._both(arena, tf.constant(step, tf.int64), self._known)

    def above(self, arena: tf.Tensor, threshold: Any, step: int) -> np.ndarray:
        args = tf.constant(threshold), tf.constant(step, tf.int64), self._known
        positions, _, count = self.by(arena, *args)
        return positions.numpy()[: int(count)]


class SelectionTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters((0.99, 0.01), (0.9, 1.0))
    @pytest.mark.few(0, 1)
    def test_is_that_of_lists_to_the_last_of_equal_elements(
        self, sparsity: float, fraction: float
    ) -> None:
        own = Selection(layout_of(*SHAPES), sparsity, fraction)
        crowded = 0
        for number, kind in enumerate(("plain", "equal", "sparse", "plain", "plain")):
            arena, step = arena_of(own.layout, drawn(kind, number)), 3 * number
            peaks, at = sparsify.peaks(arena), tf.constant(step, tf.int64)
            least = sparsify.thresholds(arena, peaks, own.layout, own.plan, at)
            args = arena, peaks, own.layout, least, own.plan.slots, at
            positions, values = sparsify.select(*args)
            threshold, where, what, count = own.at(arena, step)
            self.assertAllEqual(threshold, least, kind)
            self.assertAllEqual(where[: int(count)], positions, kind)
            self.assertAllEqual(what[: int(count)], values, kind)
            self.assertTrue(np.all(where[int(count) :] == own.layout.size), kind)
            crowded += int(count) == sum(own.slots)
        self.assertGreater(crowded, 0)

    @pytest.mark.slow
    def test_nan_and_padding_are_never_selected(self) -> None:
        own = Selection(layout_of((20, 20), (1, 3)), 0.9, 1.0)
        tensors = [np.random.default_rng(5).normal(size=(20, 20)), np.ones((1, 3))]
        tensors[0][3, :5] = np.nan
        arena = arena_of(own.layout, tensors)
        _, where, what, count = own.at(arena, 0)
        self.assertAllEqual(np.isfinite(what), [True] * len(what))
        self.assertAllLess(where[: int(count)], 512 + 3)
        self.assertGreater(int(count), 30)


class CrowdedTest(tf.test.TestCase):
    """More elements pass than there is room for among the candidates."""

    @pytest.mark.slow
    def test_each_tensor_sends_its_own_and_each_part_has_its_turn(self) -> None:
        own = Selection(layout_of((40, 100), (50, 100), (30, 100)), 0.99, 1.0)
        random = np.random.default_rng(1)
        signs = random.choice([-1.0, 1.0], size=(40, 100))
        tensors = [signs, random.normal(size=(50, 100)), random.normal(size=(30, 100))]
        # Of the first all are equal, of the second all pass, of the third few do.
        threshold = np.float32([1.0, 1e-6, 2.7])
        arena, sent = arena_of(own.layout, tensors), np.zeros(own.layout.size)
        passing = int((np.abs(tensors[2]) >= threshold[2]).sum())
        steps = 60
        for step in range(steps):
            found = own.above(arena, threshold, step)
            self.assertLen(found, sum(own.slots))
            self.assertAllEqual(found, np.unique(found))
            sent[found] += 1
            counts = [
                int(((found >= s.offset) & (found < s.offset + s.size)).sum())
                for s in own.layout.segments
            ]
            self.assertGreaterEqual(counts[0], own.slots[0])
            self.assertGreaterEqual(counts[1], own.slots[1])
            self.assertGreaterEqual(counts[2], min(own.slots[2], passing))
        # Of equal elements each part of the tensor has its turn, if not as often: the
        # order among equals moves over the candidates of all tensors together.
        tenths = sent[:4000].reshape(10, -1).sum(axis=1)
        expected = sent[:4000].sum() / 10
        self.assertAllGreater(tenths, 0.25 * expected)
        self.assertLess(sent[:4000].max(), steps / 4)

    @pytest.mark.long
    def test_what_is_over_the_threshold_goes_before_what_equals_it(self) -> None:
        own = Selection(layout_of((100, 100)), 0.99, 1.0)
        tensor = np.ones((100, 100))
        large = np.random.default_rng(2).permutation(10_000)[:60]
        tensor.reshape(-1)[large] = np.arange(60) + 2.0
        arena = arena_of(own.layout, [tensor])
        found = own.above(arena, np.float32([1.0]), 7)
        self.assertLen(found, 100)
        self.assertContainsSubset(large.tolist(), found.tolist())


@pytest.mark.long
class MessageTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*VALUE_DTYPES)
    @pytest.mark.few(1)
    def test_is_that_of_lists_to_the_bit(self, value_dtype: str) -> None:
        layout = layout_of((60, 50), (16, 16), (3, 3))
        config = DGCConfig(value_dtype=value_dtype, sparsity=0.97)
        plan = sparsify.plan(layout, 0.97, config.sample_fraction)
        known = fixed.tables(layout, plan)
        begins = [segment.offset for segment in layout.segments]
        args = int(plan.slots.sum()), layout.size, value_dtype, begins
        form = packing.make_format(*args)

        @tf.function(jit_compile=True, autograph=False)
        def sent(residual: tf.Tensor, step: tf.Tensor, known: Any) -> tf.Tensor:
            args = residual, layout, plan, known, form, value_dtype, step
            return fixed.send(*args)

        for number in range(4):
            random = np.random.default_rng(number)
            tensors = [
                random.normal(size=s.shape) * 10.0 ** random.integers(-6, 4)
                for s in layout.segments
            ]
            if number == 3:  # nothing of a tensor, and few elements of another
                tensors[1][:] = 0.0
                tensors[0][1:] = 0.0
            residual, step = arena_of(layout, tensors), tf.constant(number, tf.int64)
            expected = dgc.send(
                residual,
                sparsify.peaks(residual),
                form=form,
                layout=layout,
                sparsities=[0.97],
                config=config,
                step=step,
            )
            self.assertAllEqual(sent(residual, step, known), expected)

    @parameterized.parameters(*FORMATS[:-1])
    @pytest.mark.slow
    def test_is_read_as_by_lists_whatever_its_words_are(self, *form: Any) -> None:
        form, random = Format(*form), np.random.default_rng(0)

        def by_lists(messages: tf.Tensor) -> Any:
            found = packing.unpack(form, messages)
            found = found._replace(values=packing.numbers(form, found))
            return found, packing.faults(form, messages, found)

        @tf.function(jit_compile=True, autograph=False)
        def read(messages: tf.Tensor) -> Any:
            return fixed.read(form, messages)

        valid = [selection(form, random) for _ in range(50)]
        whole = 0
        for _ in range(10):
            sources = random.integers(len(valid), size=(100, 2))
            messages = [
                as_message(
                    form, mutated(random, valid[one].tobytes(), valid[two].tobytes())
                )
                for one, two in sources
            ]
            messages[::2] = [valid[one] for one, _ in sources[::2]]
            messages = tf.constant(np.stack(messages))
            (found, faults), (expected, wrong) = read(messages), by_lists(messages)
            self.assertAllEqual(faults, wrong)
            sound = (wrong == 0).numpy()
            for field in ("positions", "values", "scales"):
                own, other = (getattr(x, field).numpy() for x in (found, expected))
                self.assertAllEqual(own[sound], other[sound], field)
            self.assertAllEqual(found.header, expected.header)
            whole += int(sound.sum())
        self.assertGreater(whole, 400)


if __name__ == "__main__":
    tf.test.main()
