"""Budgets in bytes: what is sent keeps to them, and uses them."""

from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st
from loopback import Loopback, run_workers

import tf_dgc
from tf_dgc.compression import arena, budget, warmup
from tf_dgc.exchanges.formats import message_format

REST = 1000
steady = hypothesis.settings(deadline=None, derandomize=True, max_examples=60)


class Tensors:
    """Tensors of an arena, and what messages of them cost on some workers."""

    def __init__(self, sizes: list[int], workers: int, **settings: Any) -> None:
        self.config = tf_dgc.DGCConfig(**settings)
        shapes = [(f"v{i}", (size, 10)) for i, size in enumerate(sizes)]
        self.layout, self.workers = arena.build(shapes), workers
        self.dense = REST + 4 * self.layout.elements

    def cost(self, sparsity: float) -> int:
        form = message_format(self.layout, sparsity, self.config, self.workers)
        return form.bytes + (0 if form.slots else 4 * self.layout.size)

    @property
    def settled(self) -> tf_dgc.DGCConfig:
        args = self.config, self.layout, REST, self.dense, self.cost
        return budget.settled(*args)

    def mean_bytes(self, steps: int) -> float:
        stages = warmup.stages(self.settled)
        ends = [*(stage.first_step for stage in stages[1:]), steps]
        lengths = [end - s.first_step for end, s in zip(ends, stages, strict=True)]
        costs = [self.cost(stage.sparsity) for stage in stages]
        return REST + np.dot(lengths, costs) / steps


tensors = {
    "sizes": st.lists(st.integers(50, 9999), min_size=1, max_size=5),
    "workers": st.integers(1, 300),
    "ratio": st.floats(4, 30),
    "value_dtype": st.sampled_from(["sign", "log4", "float32"]),
}


@pytest.mark.long
class BudgetTest(parameterized.TestCase, tf.test.TestCase):
    @steady
    @hypothesis.given(**tensors)
    def test_each_step_keeps_to_it_and_a_denser_one_would_not(
        self, sizes: list[int], workers: int, **settings: Any
    ) -> None:
        found = Tensors(sizes, workers, **settings)
        whole = found.dense / settings["ratio"]
        try:
            sparsity = found.settled.sparsity
        except ValueError:
            self.assertGreater(REST + found.cost(1 - 1e-9), whole)
            return
        self.assertLessEqual(REST + found.cost(sparsity), whole)
        denser = max(0.0, sparsity - 11 / found.layout.elements)
        if sparsity:
            self.assertGreater(REST + found.cost(denser), whole)

    @steady
    @hypothesis.given(steps=st.integers(50, 10**6), **tensors)
    def test_of_known_length_the_mean_keeps_to_it(
        self, sizes: list[int], workers: int, steps: int, **settings: Any
    ) -> None:
        found = Tensors(sizes, workers, total_steps=steps, **settings)
        whole = found.dense / settings["ratio"]
        hypothesis.assume(REST + found.cost(1 - 1e-9) < whole)
        self.assertLessEqual(found.mean_bytes(steps), whole)
        self.assertLessEqual(found.settled.warmup_steps, steps / 2)

    def test_a_long_training_uses_nearly_all_of_it_in_both_halves(self) -> None:
        found = Tensors([90_000, 9_000], 4, ratio=100, total_steps=10**6)
        share = found.mean_bytes(10**6) / (found.dense / 100)
        self.assertBetween(share, 0.99, 1.0)
        late = found.cost(found.settled.sparsity)
        self.assertAllClose(late / (found.dense / 100 - REST), 0.5, 0.01)

    def test_where_all_fits_all_is_sent_densely(self) -> None:
        for settings in ({"ratio": 1.0}, {"bytes_per_step": 10**9}):
            self.assertEqual(Tensors([500], 3, **settings).settled.sparsity, 0.0)

    def test_what_cannot_be_kept_to_is_refused_with_the_bound(self) -> None:
        rule = r"`bytes_per_step` must be (\d+) or more here: of 21000 bytes .*=9$"
        with self.assertRaisesRegex(ValueError, rule) as caught:
            _ = Tensors([500], 3, bytes_per_step=9).settled
        least = int(str(caught.exception).split()[3])
        self.assertEqual(REST + Tensors([500], 3).cost(1 - 1e-9), least)
        with self.assertRaisesRegex(ValueError, r"`ratio` must be 20.* or less here"):
            _ = Tensors([500], 3, ratio=25).settled
        _ = Tensors([500], 3, bytes_per_step=least).settled

    @parameterized.parameters(
        ({"bytes_per_step": 9000}, 9000), ({"ratio": 20}, (4 * 97 * 512 + 4) / 20)
    )
    @pytest.mark.few(0, 1)
    def test_a_training_sends_as_much_as_it_says(
        self, settings: dict[str, Any], most: float
    ) -> None:
        strategy = tf_dgc.simulate.SimulatedStrategy(3, tf_dgc.DGCConfig(**settings))
        with strategy.scope():
            wide = keras.layers.Dense(512, "relu", use_bias=False)
            model = keras.Sequential([keras.Input((96,)), wide, keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.01), "mse")
        x = np.random.default_rng(0).normal(size=(24, 96)).astype(np.float32)
        model.fit(x, x[:, :1], batch_size=12, verbose=0)
        self.assertBetween(int(strategy.stats().sent_bytes), 0.98 * most, most)

    @pytest.mark.slow
    def test_optimizers_of_a_model_share_it(self) -> None:
        x = np.random.default_rng(0).normal(size=(24, 96)).astype(np.float32)

        class Both(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.wide = keras.layers.Dense(512, use_bias=False)
                self.narrow = keras.layers.Dense(64, use_bias=False)

            def build(self, shape: Any) -> None:
                self.wide.build((None, 96))
                self.narrow.build((None, 512))
                self.built = True

            def call(self, x: Any) -> Any:
                return self.narrow(self.wide(x))

            def train_step(self, x: Any) -> Any:
                with tf.GradientTape(persistent=True) as tape:
                    loss = tf.reduce_mean(self(x) ** 2)
                for optimizer, layer in zip(self.both, self.layers, strict=True):
                    weights = layer.trainable_variables
                    optimizer.apply(tape.gradient(loss, weights), weights)
                return {"loss": loss}

        def work(transport: Loopback) -> int:
            config = tf_dgc.DGCConfig(bytes_per_step=9000)
            strategy = tf_dgc.DGCStrategy(config, transport=transport)
            with strategy.scope():
                model = Both()
                model.compile(run_eagerly=True)
                model.both = [keras.optimizers.SGD(0.01), keras.optimizers.Adam()]
            model.fit(x, batch_size=12, shuffle=False, verbose=0)
            return int(strategy.stats(total=True).sent_bytes) // 2

        for sent in run_workers(2, work):
            self.assertBetween(sent, 0.97 * 9000, 9000)


if __name__ == "__main__":
    tf.test.main()
