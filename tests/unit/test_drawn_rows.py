"""Random numbers with a seed are drawn for each row as one process draws them."""

from typing import Any

import drawn_rows
import keras
import pool
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import in_scopes

import tf_dgc


@pytest.mark.long
class DrawnRowsTest(parameterized.TestCase, tf.test.TestCase):
    def check(self, found: Any, expected: Any) -> None:
        for name, value in expected.items():
            self.assertAllClose(found[name], value, 1e-5, 1e-5, msg=name)

    @parameterized.parameters("normal", "gamma", "dropped", "categorical", "same")
    @pytest.mark.few(2, 5)
    def test_eager_steps_draw_for_rows_what_one_process_draws(self, kind: str) -> None:
        expected = drawn_rows.used(kind, eager=True)
        for found in in_scopes(2, lambda _: drawn_rows.used(kind, eager=True)):
            self.check(found, expected)

    def test_simulated_workers_draw_what_one_process_draws(self) -> None:
        expected = drawn_rows.used("gamma")
        with tf_dgc.simulate.SimulatedStrategy(3).scope():
            found = drawn_rows.used("gamma")
        self.check(found, expected)

    def test_layers_of_noise_draw_their_own_and_meet_nobody(self) -> None:
        x, y = drawn_rows.data()

        def work(strategy: Any) -> Any:
            layers = [keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile("sgd", "mse", run_eagerly=True)
            model.fit(x, y, batch_size=8, verbose=0)
            return {sent.name for sent in strategy.transport.sent}

        for names in in_scopes(2, work):
            self.assertNotIn("drawn_rows", names)
            self.assertNotIn("row_weights", names)

    def test_a_number_that_may_count_rows_is_told(self) -> None:
        def step(x: tf.Tensor) -> tf.Tensor:
            found = tf.random.stateless_normal([x.shape[0], 1], [1, 2])
            return found + tf.random.stateless_normal([7], [1, 2])

        def work(strategy: Any) -> Any:
            tf.Variable(0.0)  # without one, models of none would be refused later
            function = tf.function(step, autograph=False)
            return strategy.run(function, args=(tf.zeros([3, 1]),)).numpy()

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            found = in_scopes(2, work)
        self.assertLen(logs.output, 1)  # 7 is no multiple of the rows
        self.assertRegex(logs.output[0], "at .*test_drawn_rows.py:.* for 3 rows, which")
        drawn = tf.random.stateless_normal([7], [1, 2])
        rows = tf.random.stateless_normal([6, 1], [1, 2])
        self.assertAllClose(found[0], rows[:3] + drawn)
        self.assertAllClose(found[1], rows[3:] + drawn)


@pytest.mark.processes
class WorkersTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(False, True)
    @pytest.mark.extended
    def test_workers_draw_for_rows_what_one_process_draws(self, whole: bool) -> None:
        results = pool.run("collective", 2, "drawn_rows", "all_used", whole=whole)
        expected = drawn_rows.used(*drawn_rows.KINDS, whole=whole)
        for found in results:
            for name, value in expected.items():
                self.assertAllClose(found[name], value, 1e-4, 1e-4, name)
