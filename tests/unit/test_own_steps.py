"""Steps of the user's own, as guides have them: threads against plain Keras."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, outcomes, run_workers

import tf_dgc


class Own(keras.Model):
    """What is written once for training and evaluation, in several ways."""

    how = "guide"

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.loss_of(y, outputs)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.told(y, outputs, loss)

    def test_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self(x, training=False)
        return self.told(y, outputs, self.loss_of(y, outputs))

    def loss_of(self, y: Any, outputs: Any) -> Any:
        loss = self.compute_loss(y=y, y_pred=outputs)
        if self.how == "mixed":
            loss += 0.5 * keras.ops.mean(keras.ops.abs(outputs - y))
        return loss

    def told(self, y: Any, outputs: Any, loss: Any) -> Any:
        if self.how in ("value", "mixed"):
            return {"value": loss}
        for metric in self.metrics:
            if isinstance(metric, keras.metrics.Mean) and "mae" not in metric.name:
                metric.update_state(loss)
            else:
                metric.update_state(y, outputs)
        if self.how == "renamed":
            total, mae = self.metrics
            return {"total": total.result(), "more": {"error": mae.result()}}
        return {metric.name: metric.result() for metric in self.metrics}


class Tracking(Own):
    how = "renamed"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total = keras.metrics.Mean(name="of_all")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self) -> Any:
        return [self.total, self.mae]


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    return x, (x[:, :1] + x[:, 1:2] > 0).astype("float32")


def made(kind: Any, **kwargs: Any) -> Any:
    inputs = keras.Input((6,))
    normal = keras.initializers.RandomNormal(seed=1)
    options = {"kernel_initializer": normal, "kernel_regularizer": "l2"}
    hidden = keras.layers.Dense(5, activation="tanh", **options)(inputs)
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(hidden)
    model = kind(inputs, outputs)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(sgd, "mse", run_eagerly=True, **kwargs)
    return model


def strategies(transport: Loopback) -> list[Any]:
    config = tf_dgc.DGCConfig(sparsity=0.0, momentum_masking=False, min_elements=9)
    return [
        tf_dgc.DenseStrategy(transport=transport),
        tf_dgc.DGCStrategy(config, transport=transport),
    ]


class Repeating(keras.Model):
    """Gives more rows than it gets where it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: Any, training: bool | None = None) -> Any:
        found = self.dense(x)
        return found if training else tf.repeat(found, 3, axis=0)


@pytest.mark.long
class OwnStepsTest(parameterized.TestCase, tf.test.TestCase):
    def test_a_model_may_give_other_rows_where_it_does_not_train(self) -> None:
        x, y = data(17)

        def work() -> Any:
            model = Repeating()
            model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
            fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
            return model.fit(x, y, **fit).history, model.get_weights()

        def on_worker(transport: Loopback) -> Any:
            with tf_dgc.DenseStrategy(transport=transport).scope():
                return work()

        expected = work()
        for found in run_workers(2, on_worker):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    @parameterized.parameters(
        ("guide", 3, False),
        ("value", 2, False),
        ("mixed", 3, True),
        ("trackers", 2, False),
    )
    @pytest.mark.few(0, 1)
    def test_what_a_step_tells_is_what_one_process_tells(
        self, how: str, workers: int, compressed: bool
    ) -> None:
        kind = type("Own", (Tracking if how == "trackers" else Own,), {})
        kind.how = "renamed" if how == "trackers" else how
        metrics = ["mae", keras.metrics.AUC] if how == "guide" else []
        # Shares differ, and of the last batch only one worker has a row.
        x, y = data(17)

        def work() -> Any:
            own = [m if isinstance(m, str) else m(name="auc") for m in metrics]
            model = made(kind, metrics=own or None)
            fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
            seen = model.fit(x, y, epochs=2, validation_data=(x[:11], y[:11]), **fit)
            told = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
            return seen.history, told, model.get_weights()

        def on_worker(transport: Loopback) -> list[Any]:
            found = []
            for strategy in strategies(transport)[: 1 + compressed]:
                with strategy.scope():
                    found.append(work())
            return found

        expected = work()
        for results in run_workers(workers, on_worker):
            for found in results:
                self.assertEqual(set(found[0]), set(expected[0]))
                self.assertAllClose(found, expected, 1e-5, 1e-5)

    @pytest.mark.extended
    def test_a_metric_of_one_number_counts_by_rows(self) -> None:
        def error(y: Any, outputs: Any) -> Any:
            return keras.ops.mean(keras.ops.abs(y - outputs))

        x, y = data(17)

        def work() -> Any:
            model = made(keras.Model, metrics=[error])
            seen = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            return seen.history, model.evaluate(x, y, batch_size=5, verbose=0)

        def on_worker(transport: Loopback) -> Any:
            with tf_dgc.DenseStrategy(transport=transport).scope():
                return work()

        expected = work()
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            results = run_workers(3, on_worker)
        told = [line for line in logs.output if "'error' gives one number" in line]
        self.assertLen(told, 1)
        for found in results:
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    @parameterized.parameters(
        "mean", "sum", "root", "largest", "one", "rows", "weighted"
    )
    @pytest.mark.few(4)
    def test_a_sum_of_numbers_of_steps_counts_each_once(self, what: str) -> None:
        def told(errors: Any) -> tuple[Any, Any]:
            mean = tf.reduce_mean(errors)
            return {
                "mean": (mean, None),
                "sum": (tf.reduce_sum(errors), None),
                "root": (tf.sqrt(mean), None),
                "largest": (tf.reduce_max(errors), None),
                "one": (1.0, None),
                "rows": (tf.shape(errors)[0], None),
                "weighted": (mean, tf.shape(errors)[0]),
            }[what]

        def of_another_name(step: Any) -> Any:
            return lambda model, given: step(model, given)

        class Counts(keras.Model):
            def __init__(self, inputs: Any, outputs: Any) -> None:
                super().__init__(inputs, outputs)
                self.total = keras.metrics.Sum(name="total")

            @of_another_name
            def train_step(self, given: Any) -> Any:
                x, y = given
                self.total.update_state(*told(tf.square(y - self(x))))
                return {"total": self.total.result()}

            @of_another_name
            def test_step(self, given: Any) -> Any:
                return self.train_step(given)

        x, y = data(17)

        def work() -> Any:
            model = made(Counts)
            seen = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            tested = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
            return seen.history["total"], tested["total"]

        def on_worker(transport: Loopback) -> Any:
            with tf_dgc.DenseStrategy(transport=transport).scope():
                return work()

        expected = work()
        for found in run_workers(3, on_worker):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    @parameterized.parameters("a scalar", "an endpoint", "masks")
    @pytest.mark.few(1)
    def test_what_is_added_to_a_loss_is_divided_alike(self, how: str) -> None:
        x, y = data(13)
        words = np.abs(np.round(2 * x)).astype("int32")  # 0 is masked

        class Endpoint(keras.layers.Layer):
            def call(self, outputs: Any, targets: Any) -> Any:
                self.add_loss(keras.losses.MeanSquaredError()(targets, outputs))
                return outputs

        def error(y: Any, outputs: Any) -> Any:
            return keras.ops.mean(keras.ops.abs(y - outputs))

        def work() -> Any:
            normal = keras.initializers.RandomNormal(seed=1)
            options = {"kernel_initializer": normal, "kernel_regularizer": "l2"}
            inputs, targets = keras.Input((6,)), keras.Input((1,))
            model = made(keras.Model)
            if how == "an endpoint":
                outputs = keras.layers.Dense(1, **options)(inputs)
                outputs = Endpoint()(outputs, targets)
                model = keras.Model([inputs, targets], outputs)
            if how == "masks":
                table = keras.layers.Embedding(9, 3, "ones", mask_zero=True)
                last = keras.layers.Dense(1, **options)
                model = keras.Sequential([table, last])
            loss = {"a scalar": error, "masks": "mse"}.get(how)
            model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
            given = {"a scalar": (x, y), "masks": (words, words[..., np.newaxis])}
            read = given.get(how, ([x, y],))
            seen = model.fit(*read, batch_size=4, shuffle=False, verbose=0, epochs=2)
            told = model.evaluate(*read, batch_size=5, verbose=0)
            return seen.history, told, model.get_weights()

        def on_worker(transport: Loopback) -> Any:
            with tf_dgc.DenseStrategy(transport=transport).scope():
                return work()

        expected = work()
        for found in run_workers(3, on_worker):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    @parameterized.product(
        divide=(
            lambda g, n: g / n,
            lambda g, n: g / tf.cast(n, tf.float32),
            lambda g, n: g * (1.0 / n),
            lambda g, n: 2.0 * tf.identity(g / n),
        ),
        run_eagerly=(False, True),
    )
    @pytest.mark.few(2)
    def test_gradients_that_a_step_divides_by_n_are_those_of_one_process(
        self, divide: Any, run_eagerly: bool
    ) -> None:
        class Divides(keras.Model):
            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(y - self(x)))
                found = tape.gradient(loss, self.trainable_variables)
                workers = tf.distribute.get_strategy().num_replicas_in_sync
                found = [divide(g, workers) for g in found]
                self.optimizer.apply(found, self.trainable_variables)
                return {"loss": loss}

        x, y = data(17)

        def work() -> Any:
            inputs = keras.Input((6,))
            normal = keras.initializers.RandomNormal(seed=1)
            layer = keras.layers.Dense(1, kernel_initializer=normal)
            model = Divides(inputs, layer(inputs))
            model.compile(keras.optimizers.SGD(0.1), run_eagerly=run_eagerly)
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            return model.get_weights()

        def on_worker(transport: Loopback) -> Any:
            with tf_dgc.DenseStrategy(transport=transport).scope():
                return work()

        expected = work()
        for found in run_workers(2, on_worker):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    def test_a_loop_of_ones_own_tells_the_loss_of_one_process(self) -> None:
        def work(transport: Loopback) -> Any:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            with strategy.scope():
                told = keras.metrics.Mean()

            def step() -> Any:
                outputs = tf.fill([2, 1], float(transport.rank))
                loss = keras.losses.MeanSquaredError()(tf.zeros([2, 1]), outputs)
                told.update_state(loss)
                return loss

            found = strategy.run(step)
            return float(strategy.reduce("SUM", found, axis=None)), float(told.result())

        for found in run_workers(2, work):
            self.assertEqual(found, (0.5, 0.5))

    def test_a_batch_of_ones_own_is_predicted_and_trained_with_alone(self) -> None:
        x, y = data(5)

        def steps(strategy: Any, own: slice) -> Any:
            model = made(Own)
            alone = model.predict_on_batch(x[own])
            together = model.predict(x, batch_size=5, verbose=0)
            tested = model.test_on_batch(x[own], y[own])
            trained = x[own] if strategy else x, y[own] if strategy else y
            model.train_on_batch(*trained)
            if own.start == 0:  # others need not come
                model.predict_on_batch(x[own])
            return alone, together, tested, model.get_weights()

        def work(transport: Loopback) -> Any:
            own = slice(0, 4) if transport.rank == 0 else slice(4, 5)
            strategy = tf_dgc.DenseStrategy(transport=transport)
            with strategy.scope():
                return own, steps(strategy, own)

        for own, found in run_workers(2, work):
            self.assertAllClose(found, steps(None, own), 1e-5, 1e-5)

    @pytest.mark.extended
    def test_metrics_made_outside_of_the_scope_count_the_rows_of_all(self) -> None:
        x, y = data(13)

        def work(strategy: Any) -> Any:
            mae, auc = keras.metrics.MeanAbsoluteError(), keras.metrics.AUC(name="auc")
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = made(keras.Model, metrics=[mae], weighted_metrics=[auc])
            fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
            seen = model.fit(x, y, **fit, validation_data=(x[:3], y[:3]))
            return seen.history, model.evaluate(x, y, verbose=0), mae.result()

        expected = work(None)
        for found in run_workers(2, lambda t: work(tf_dgc.DenseStrategy(transport=t))):
            self.assertAllClose(found, expected, 1e-5, 1e-5)

    def test_metrics_of_no_model_made_outside_of_the_scope_are_refused(self) -> None:
        def work(transport: Loopback) -> None:
            mean = keras.metrics.Mean(name="seen")
            strategy = tf_dgc.DenseStrategy(transport=transport)
            strategy.run(lambda: mean.update_state(1.0))

        for error in outcomes(2, work):
            self.assertRegex(str(error), "'seen/total' of a metric.*`with strategy.sc")


if __name__ == "__main__":
    tf.test.main()
