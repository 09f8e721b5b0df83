"""Tests of what a worker selects for servers and keeps back: in this process."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc.compression import arena, dgc
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.pushed import Pushed
from tf_dgc.exchanges.selecting import Chosen

SHAPES = ([40, 30], [6, 5, 70], [9], [3, 4])
EXACT = {"sample_fraction": 1.0, "min_elements": 100}


def pushed_of(momentum: dgc.Momentum | None, **settings: Any) -> Pushed:
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    config = DGCConfig.paper(**{**EXACT, **settings})
    return Pushed(variables, momentum, config, "CPU:0", always=False)


def gradients(random: np.random.Generator) -> list[tf.Tensor]:
    return [tf.constant(random.integers(-9, 9, s), tf.float32) for s in SHAPES]


def sent_of(chosen: Chosen, size: int) -> np.ndarray:
    """Return what servers subtract, laid out as the arena."""
    if chosen.everything:
        return (chosen.whole * chosen.scale).numpy()
    sent = np.zeros(size, np.float32)
    values = tf.cast(chosen.values, tf.float32) * chosen.scale
    sent[chosen.positions.numpy()] = values.numpy()
    return sent


class PushedTest(tf.test.TestCase):
    def check_steps(self, nesterov: bool, masking: bool, **settings: Any) -> list[int]:
        """Compare with the recurrence in NumPy; return how many elements went."""
        momentum = dgc.Momentum(0.5, nesterov, 2.0)
        pushed = pushed_of(momentum, momentum_masking=masking, **settings)
        random, count = np.random.default_rng(2), []
        u = v = np.zeros(pushed.layout.size, np.float32)
        small = [np.zeros(shape, np.float32) for shape in SHAPES[2:]]
        select = tf.function(lambda *local: pushed.select(local, momentum))
        for number in range(10):
            local = gradients(random)
            steps, chosen = select(*local)
            g = 2 * arena.flatten(pushed.layout, local[:2]).numpy()
            u = 0.5 * (u + g) if nesterov else 0.5 * u + g
            v = v + u + g if nesterov else v + u
            sent = sent_of(chosen, v.size)
            where = np.flatnonzero(sent)
            count.append(v.size if chosen.everything else where.size)
            with self.subTest(step=number):
                self.assertAllEqual(sent[where], v[where])
                v = v - sent
                if masking and not chosen.everything:
                    u = np.where(sent != 0, 0, u)
                self.assertAllEqual(pushed.residual.v, v)
                self.assertAllEqual(pushed.residual.u, u)
                for i in (0, 1):
                    self.assertIsNone(steps[i])
                    segment = pushed.layout.segments[i]
                    own = slice(segment.offset, segment.offset + segment.size)
                    least = np.abs(sent[own][sent[own] != 0]).min()
                    self.assertLessEqual(np.abs(v[own]).max(), least)
                for i in (2, 3):
                    g = 2 * local[i].numpy()
                    m = small[i - 2]
                    m = small[i - 2] = 0.5 * (m + g) if nesterov else 0.5 * m + g
                    self.assertAllEqual(steps[i], m + g if nesterov else m)
        return count

    @pytest.mark.long
    def test_the_chief_goes_on_with_momentum_of_before(self) -> None:
        random = np.random.default_rng(5)
        for nesterov in (False, True):
            slots = [
                tf.Variable(random.normal(size=s), dtype=tf.float32) for s in SHAPES
            ]
            before = [slot.numpy() for slot in slots]
            momentum = dgc.Momentum(0.5, nesterov, 2.0, slots)
            chief = pushed_of(momentum, sparsity=0.0)
            for slot in slots:
                self.assertAllEqual(slot, tf.zeros_like(slot))
            chief.begin()
            local = gradients(random)
            steps, chosen = tf.function(chief.select)(local, momentum)
            moved = arena.unflatten(chief.layout, chosen.whole * chosen.scale)
            for step, g, m in zip([*moved, *steps[2:]], local, before, strict=True):
                m = 0.5 * -m + 2 * g.numpy()
                expected = 0.5 * m + 2 * g.numpy() if nesterov else m
                self.assertAllClose(step, expected)

    @pytest.mark.slow
    def test_what_is_sent_and_what_is_kept_is_what_was_accumulated(self) -> None:
        for nesterov, masking in ((False, True), (True, True), (False, False)):
            with self.subTest(nesterov=nesterov, masking=masking):
                count = self.check_steps(nesterov, masking, sparsity=0.95)
                self.assertAllLessEqual(count, 165)
                self.assertAllGreater(count, 120)

    @pytest.mark.long
    def test_a_warm_up_goes_from_everything_to_the_largest(self) -> None:
        settings = {"warmup_steps": 6, "warmup_stages": (0.1, 0.5, 0.8)}
        count = self.check_steps(False, True, sparsity=0.95, **settings)
        size = count[0]
        self.assertEqual(count[:2], [size] * 2)
        self.assertLess(max(count[2:4]), 0.51 * size)
        self.assertLess(max(count[4:6]), 0.21 * size)
        self.assertLess(max(count[6:]), 0.06 * size)

    @pytest.mark.extended
    def test_a_sparsity_of_0_sends_everything_and_leaves_momentum(self) -> None:
        count = self.check_steps(False, True, sparsity=0.0)
        self.assertEqual(len(set(count)), 1)

    def test_rounding_is_kept_back(self) -> None:
        for dtype in ("float16", "bfloat16"):
            pushed = pushed_of(None, sparsity=0.95, value_dtype=dtype)
            local = [g / 7 for g in gradients(np.random.default_rng(4))]
            _, chosen = pushed.select(local, dgc.Momentum(0.0, False, 1.0))
            sent = sent_of(chosen, pushed.layout.size)
            self.assertEqual(chosen.values.dtype.name, dtype)
            whole = arena.flatten(pushed.layout, local[:2])
            self.assertAllEqual(pushed.residual.v + sent, whole)
            where = sent != 0
            self.assertAllGreater(np.abs(pushed.residual.v.numpy()[where]).max(), 0)

    def test_gradients_that_were_accumulated_go_at_the_rate_of_now(self) -> None:
        pushed = pushed_of(None, sparsity=0.95, momentum_correction=False)
        random = np.random.default_rng(5)
        for rate in (1.0, 0.5):
            before = pushed.residual.v.numpy()
            local = gradients(random)
            momentum = dgc.Momentum(0.0, False, rate)
            steps, chosen = pushed.select(local, momentum)
            sent = sent_of(chosen, before.size) / rate
            whole = before + arena.flatten(pushed.layout, local[:2])
            self.assertAllEqual(pushed.residual.v + sent, whole)
            self.assertAllEqual(steps[2], rate * local[2])

    @pytest.mark.slow
    def test_nothing_happens_where_no_push_is_due(self) -> None:
        momentum = dgc.Momentum(0.5, False, 1.0)
        pushed = pushed_of(momentum, sparsity=0.95)
        select = tf.function(lambda due, *g: pushed.select(g, momentum, due))
        local = gradients(np.random.default_rng(6))
        select(tf.constant(False), *local)
        self.assertAllEqual(pushed.residual.v, np.zeros(pushed.layout.size))
        self.assertAllEqual(pushed.dense.variables[0], np.zeros(256))
        self.assertEqual(int(pushed.residual.step), 0)
        steps, chosen = select(tf.constant(True), *local)
        self.assertAllEqual(steps[2], local[2])
        self.assertGreater(tf.size(chosen.positions), 100)

    @pytest.mark.long
    def test_the_optimizer_is_called_where_all_is_compressed(self) -> None:
        variables = [tf.Variable(tf.zeros([20, 10]))]
        momentum = dgc.Momentum(0.0, False, 1.0)
        pushed = Pushed(variables, momentum, DGCConfig.paper(**EXACT), "CPU:0", False)
        for due in (None, tf.constant(True), tf.constant(False)):
            (step,), _ = pushed.select([tf.ones([20, 10])], momentum, due)
            self.assertAllEqual(tf.convert_to_tensor(step), tf.zeros([20, 10]))

    @pytest.mark.extended
    def test_what_is_not_finite_is_named_and_changes_nothing(self) -> None:
        momentum = dgc.Momentum(0.5, False, 1.0)
        pushed = pushed_of(momentum, sparsity=0.95)
        local = gradients(np.random.default_rng(7))
        local[1] = local[1] / 0
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "this worker stops, nothing of it"
        ):
            tf.function(lambda *g: pushed.select(g, momentum))(*local)
        self.assertAllEqual(pushed.residual.v, np.zeros(pushed.layout.size))

    def test_gradients_are_clipped_to_the_norm(self) -> None:
        pushed = pushed_of(None, sparsity=0.0, clip_norm=2.0)
        local = gradients(np.random.default_rng(8))
        steps, chosen = pushed.select(local, dgc.Momentum(0.0, False, 1.0))
        parts = [sent_of(chosen, pushed.layout.size), *steps[2:]]
        self.assertAllClose(tf.linalg.global_norm(list(map(tf.constant, parts))), 2.0)


if __name__ == "__main__":
    tf.test.main()
