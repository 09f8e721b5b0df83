"""A worker without rows changes nothing: threads against plain Keras, one process."""

from typing import Any

import keras
import numpy as np
import pool
import pytest
import tensorflow as tf
import without_rows
from absl.testing import parameterized
from loopback import Loopback, run_workers

import tf_dgc
from tf_dgc import _host

BATCH, data = without_rows.BATCH, without_rows.data


def dense(transport: Loopback) -> Any:
    return tf_dgc.DenseStrategy(transport=transport)


def averaging(transport: Loopback, **settings: Any) -> Any:
    config = tf_dgc.AveragingConfig(**{"period": 1} | settings)
    return tf_dgc.ParameterAveragingStrategy(config, transport=transport)


def in_scopes(make: Any, work: Any, size: int = 2) -> list[Any]:
    def run(transport: Loopback) -> Any:
        with make(transport).scope():
            return work()

    return run_workers(size, run)


class Clipping(keras.Sequential):
    """Clips the gradients of every other step."""

    def train_step(self, given: Any) -> Any:
        x, y = given
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x)))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.optimizer.iterations % 2 == 0:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.long
class AveragingTest(parameterized.TestCase, tf.test.TestCase):
    def trained(
        self, steps: int | None = None, epochs: int = 1, loss: Any = "mse"
    ) -> list[np.ndarray]:
        x, y = data()
        kind = Clipping if loss == "clipped" else keras.Sequential
        model = kind(
            [
                keras.Input((4,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3, kernel_initializer="ones"),
            ]
        )
        model.layers[0].trainable = False
        sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        if loss == "sum":
            loss = keras.losses.MeanSquaredError(reduction="sum")
        elif loss == "clipped":
            loss = None
        elif loss == "root":
            loss = lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p)))  # noqa: E731
        model.compile(sgd, loss, run_eagerly=True)
        fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        for _ in range(epochs):  # what was added up is there in the next `fit`
            model.fit(x, y, **fit)
        return model.get_weights()

    def test_who_has_no_rows_is_left_out_of_the_mean(self) -> None:
        expected = self.trained()
        for found in in_scopes(averaging, self.trained):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    @pytest.mark.slow
    def test_it_is_left_out_in_longer_periods(self) -> None:
        """Steps that others took are not halved."""

        def one() -> list[np.ndarray]:
            x, y = data()
            kernel, bias = np.ones([4, 3]), np.zeros(3)
            own = [(kernel.copy(), bias.copy()) for _ in range(2)]
            for begin in (0, 8, 16):
                for rank in range(2):
                    rows = np.array_split(np.arange(begin, min(begin + 8, 17)), 2)[rank]
                    if len(rows):
                        a = x[rows] / np.sqrt(1 + 1e-3)
                        w, b = own[rank]
                        error = 2 * (a @ w + b - y[rows]) / (len(rows) * 3)
                        own[rank] = w - 0.1 * a.T @ error, b - 0.1 * error.sum(0)
                if begin == 8:
                    own = [
                        tuple(np.mean(p, axis=0) for p in zip(*own, strict=True))
                    ] * 2
            return list(own[0])  # rank 1 had no rows since

        expected = one()
        for found in in_scopes(lambda t: averaging(t, period=2), self.trained):
            kernel, bias = found[-2:] if found[-1].ndim == 1 else found[2:4]
            self.assertAllClose(kernel, expected[0], 1e-5, 1e-5)
            self.assertAllClose(bias, expected[1], 1e-5, 1e-5)

    @pytest.mark.extended
    def test_a_small_step_without_rows_does_not_lose_those_before(self) -> None:
        x, y = data()
        kernel, bias = np.zeros([4, 3]), np.zeros(3)
        for rank in range(2):  # three small steps, which count alike on each
            for begin in (0, 8, 16):
                rows = np.array_split(np.arange(begin, min(begin + 8, 17)), 2)[rank]
                if len(rows):
                    a = x[rows] / np.sqrt(1 + 1e-3)
                    error = 2 * (a.sum(1, keepdims=True) - y[rows]) / (len(rows) * 3)
                    kernel += a.T @ error / 6
                    bias += error.sum(0) / 6
        for found in in_scopes(averaging, lambda: self.trained(3)):
            arrays = [w for w in found if w.shape in ((4, 3), (3,))]
            self.assertAllClose(arrays, [1 - 0.1 * kernel, -0.1 * bias], 1e-5, 1e-5)

    @parameterized.parameters(
        *((2, 3, "mse"), (3, 2, "mse"), (2, 2, "sum"), (2, 3, "root")),
        (2, 2, "clipped"),
    )
    @pytest.mark.few(0, 1)
    def test_small_steps_count_by_the_rows_of_all(
        self, workers: int, steps: int, loss: str
    ) -> None:
        expected = self.trained(steps, 2, loss)

        def dgc(transport: Loopback) -> Any:
            config = tf_dgc.DGCConfig(
                sparsity=0.0, momentum_masking=False, min_elements=9
            )
            return tf_dgc.DGCStrategy(config, transport=transport)

        for make in (dense,) if loss == "clipped" else (dense, dgc):
            work = lambda: self.trained(steps, 2, loss)  # noqa: E731
            for found in in_scopes(make, work, workers):
                self.assertAllClose(found, expected, 1e-5, 1e-5)


@pytest.mark.long
class TeacherTest(parameterized.TestCase, tf.test.TestCase):
    def test_teachers_and_counters_are_alike_on_all(self) -> None:
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            one, two = in_scopes(dense, lambda: without_rows.taught(run_eagerly=True))
        self.assertAllClose(one["student"], two["student"])
        self.assertAllClose(one["teacher"], two["teacher"])
        self.assertEqual((one["count"], two["count"]), (3.0, 3.0))
        self.assertEqual((one["rows"], two["rows"]), (17.0, 17.0))
        (told,) = [line for line in logs.output if "worker's rows" in line]
        self.assertRegex(told, "writes to [^,]*queue what")


class Gathering(keras.Sequential):
    """Notes what all workers have, in each step."""

    seen: list[np.ndarray]

    def train_step(self, given: Any) -> Any:
        x, _ = given
        with tf.GradientTape() as tape:
            own = self(x)
            if tf.distribute.has_strategy():
                own = tf.distribute.get_replica_context().all_gather(own, 0)
            loss = tf.reduce_mean(tf.matmul(own, own, transpose_b=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.seen.append(own.numpy())
        return {"loss": loss}


@pytest.mark.long
class GatheringTest(tf.test.TestCase):
    def test_the_row_of_zeros_is_not_gathered(self) -> None:
        def seen() -> list[np.ndarray]:
            dense = keras.layers.Dense(3, kernel_initializer="ones", use_bias=False)
            model = Gathering([keras.Input((4,)), dense])
            model.seen = []
            model.compile(keras.optimizers.SGD(0.0), run_eagerly=True)
            fit = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
            model.fit(*data(), **fit)
            return model.seen

        expected = seen()
        for found in in_scopes(dense, seen):
            self.assertEqual([len(each) for each in found], [8, 8, 1])
            for one, two in zip(found, expected, strict=True):
                self.assertAllClose(one, two)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(300)
class TracedTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_so_they_are_however_steps_are_traced(self) -> None:
        one, two = pool.run("collective", 2, "without_rows", "found", timeout=180)
        for first, second in zip(one, two, strict=True):
            for name in ("student", "teacher", "count"):
                self.assertAllClose(first[name], second[name])
                self.assertAllClose(first[name], one[0][name])
            self.assertEqual((first["rows"], second["rows"]), ([17.0], [17.0]))
            self.assertAllClose(first["moving mean"], one[0]["moving mean"])
            self.assertAllClose(second["moving mean"], two[0]["moving mean"])

    @pytest.mark.extended
    def test_models_take_no_zeros_and_predict_all_rows(self) -> None:
        expected = without_rows.of_texts()
        for workers in (2, 3):
            args = "collective", workers, "without_rows", "found_of_texts"
            for found in pool.run(*args, timeout=180):
                for name, values in expected.items():
                    self.assertAllClose(found[name], values, 1e-5, 1e-5, msg=name)


class FlowTest(parameterized.TestCase, tf.test.TestCase):
    """What a traced step writes to variables, of a row that stands for none."""

    def written(self, step: Any, *names: str) -> set[str]:
        variables = {name: tf.Variable(1.0) for name in names}
        found: set[str] = set()

        @tf.function(autograph=False)
        def traced(x: tf.Tensor) -> None:
            with _host.flow.Flow([x]) as flow:
                step(x, **variables)
            found.update(n for n, v in variables.items() if flow.wrote(v))

        traced(tf.ones([2]))
        with _host.flow.Flow([x := tf.ones([2])]) as flow:
            step(x, **variables)
        eager = {n for n, v in variables.items() if flow.wrote(v)}
        self.assertLessEqual(found, eager)  # functions that are called hide more
        return found

    def test_through_operations(self) -> None:
        def step(x: tf.Tensor, a: Any, b: Any, c: Any) -> None:
            a.assign(tf.reduce_sum(x))
            b.assign_add(1.0)
            c.assign(0.9 * a)  # what is read of a variable depends on nothing

        self.assertEqual(self.written(step, "a", "b", "c"), {"a"})

    def test_through_functions_branches_and_loops(self) -> None:
        @tf.function
        def inner(x: tf.Tensor, a: Any, b: Any) -> tf.Tensor:
            b.assign_add(1.0)
            a.assign(x[0])
            return x + 1.0

        def step(x: tf.Tensor, a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
            x = inner(x, a, b)
            tf.cond(b > 0.0, lambda: c.assign(x[1]), lambda: d.assign(2.0))
            add = lambda i, s: (i + 1, s + x[0])  # noqa: E731
            _, total = tf.while_loop(lambda i, s: i < 2, add, [0, 0.0])
            e.assign(total)

        self.assertEqual(self.written(step, *"abcde"), {"a", "c", "e"})

    def test_what_is_done_or_not_by_the_rows_depends_on_them(self) -> None:
        def step(x: tf.Tensor, a: Any, b: Any) -> None:
            tf.cond(x[0] > 0.0, lambda: a.assign(1.0), lambda: tf.constant(0.0))
            b.assign(1.0)

        @tf.function(autograph=False)
        def found(x: tf.Tensor) -> None:
            step(x, a, b)

        a, b = tf.Variable(0.0), tf.Variable(0.0)
        with _host.flow.Flow([x := tf.ones([2])]) as flow:
            found(x)
        self.assertTrue(flow.wrote(a))
        self.assertIn("a", self.written_in_graph(step))

    def test_a_loop_as_long_as_the_rows_only_reads_what_it_reads(self) -> None:
        def step(x: tf.Tensor, a: Any, b: Any) -> None:
            def once(i: tf.Tensor) -> tf.Tensor:
                a.assign_add(1.0)
                return i + 1 + tf.cast(0.0 * b, tf.int32)

            tf.while_loop(lambda i: tf.cast(i, x.dtype) < x[0], once, [0])

        self.assertEqual(self.written_in_graph(step), {"a"})

    def test_what_is_only_read_in_a_branch_or_a_loop_is_not_written(self) -> None:
        def step(x: tf.Tensor, a: Any, b: Any, c: Any) -> None:
            tf.cond(x[0] > 0.0, lambda: a + 1.0, lambda: b.assign(0.0) + 0.0)
            turns = tf.cast(tf.reduce_sum(x), tf.int32)

            def body(i: tf.Tensor) -> tf.Tensor:
                c.assign_add(1.0)
                tf.cond(a > 0.0, lambda: b.assign(2.0) + a, lambda: a + 0.0)
                return i + 1

            tf.while_loop(lambda i: i < turns, body, [0])

        variables = {name: tf.Variable(1.0) for name in "abc"}
        found: set[str] = set()

        @tf.function(autograph=False)
        def traced(x: tf.Tensor) -> None:
            with _host.flow.Flow([x]) as flow:
                step(x, **variables)
            found.update(n for n, v in variables.items() if flow.wrote(v))

        traced.get_concrete_function(tf.ones([2]))
        self.assertEqual(found, {"b", "c"})

    @parameterized.product(
        name=["SimpleRNN", "GRU", "LSTM", "Bidirectional"], masked=[True, False]
    )
    @pytest.mark.few(3, 8)
    @pytest.mark.long
    def test_recurrent_layers_write_to_no_weight(self, name: str, masked: bool) -> None:
        layer = (
            keras.layers.Bidirectional(keras.layers.LSTM(2))
            if name == "Bidirectional"
            else getattr(keras.layers, name)(2)
        )
        layer.build((None, None, 3))
        tokens = keras.layers.Embedding(5, 3, mask_zero=masked)
        tokens.build()

        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
        def traced(x: tf.Tensor) -> None:
            with _host.flow.Flow([x]) as flow:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(tokens(x)))
                tape.gradient(loss, [v.value for v in layer.trainable_variables])
            self.assertTrue(flow.reaches(loss))
            written = [v.path for v in layer.weights if flow.wrote(v.value)]
            self.assertEqual(written, [])

        traced.get_concrete_function()

    def written_in_graph(self, step: Any) -> set[str]:
        variables = {name: tf.Variable(1.0) for name in "ab"}
        found: set[str] = set()

        @tf.function(autograph=False)
        def traced(x: tf.Tensor) -> None:
            with _host.flow.Flow([x]) as flow:
                step(x, **variables)
            found.update(n for n, v in variables.items() if flow.wrote(v))

        traced(tf.ones([2]))
        self.assertNotIn("b", found)
        return found


if __name__ == "__main__":
    pytest.main([__file__])
