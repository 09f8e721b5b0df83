"""What a worker's share of a batch counts: threads against plain Keras, one process."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, outcomes, run_workers

import tf_dgc

STRATEGIES: dict[str, Callable[[Loopback], Any]] = {
    "dense": lambda transport: tf_dgc.DenseStrategy(transport=transport),
    "dgc": lambda transport: tf_dgc.DGCStrategy(
        tf_dgc.DGCConfig(sparsity=0.0, momentum_masking=False, min_elements=9),
        transport=transport,
    ),
    "averaging": lambda transport: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(synchronous_steps=1000), transport=transport
    ),
}


def regression(rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 6)).astype("float32")
    return x, np.tanh(x[:, :2] @ random.normal(size=(2, 1))).astype("float32")


def layers(*extra: keras.layers.Layer) -> list[Any]:
    first = keras.layers.Dense(
        5,
        activation="tanh",
        kernel_initializer=keras.initializers.RandomNormal(seed=1),
        kernel_regularizer="l2",
    )
    last = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.RandomNormal(seed=2)
    )
    return [keras.Input((6,)), first, *extra, last]


def alike(
    work: Callable[[Any], Any], workers: int, *strategies: str
) -> tuple[Any, dict[str, list[Any]]]:
    """Return what `work` finds in one process, and on workers with each strategy.

    It is called in the scope of a strategy, or of none, and given that strategy.
    """

    def on_worker(make: Callable[[Loopback], Any]) -> Callable[[Loopback], Any]:
        def run(transport: Loopback) -> Any:
            strategy = make(transport)
            with strategy.scope():
                return work(strategy)

        return run

    chosen = {name: STRATEGIES[name] for name in strategies or STRATEGIES}
    found = {k: run_workers(workers, on_worker(make)) for k, make in chosen.items()}
    return work(None), found


@pytest.mark.long
class ShareTest(parameterized.TestCase, tf.test.TestCase):
    def assert_like_one_process(
        self,
        work: Callable[[Any], Any],
        workers: int,
        *strategies: str,
        tolerance: float = 1e-5,
    ) -> Any:
        expected, found = alike(work, workers, *strategies)
        for name, results in found.items():
            for rank, result in enumerate(results):
                with self.subTest(strategy=name, rank=rank):
                    self.assertAllClose(result, expected, tolerance, tolerance)
        return expected

    @parameterized.parameters(("SGD", 33, 3), ("Adam", 29, 3), ("SGD", 17, 2))
    @pytest.mark.few(0, 1)
    def test_every_batch_counts_as_in_one_process(
        self, optimizer: str, rows: int, workers: int
    ) -> None:
        x, y = regression(rows)

        def work(strategy: Any) -> Any:
            model = keras.Sequential(layers())
            model.compile(
                getattr(keras.optimizers, optimizer)(0.05),
                "mse",
                metrics=["mae"],
                weighted_metrics=["mse"],
                run_eagerly=True,
            )
            weights = np.linspace(0, 2, len(x), dtype="float32")
            fit = {"shuffle": False, "verbose": 0, "batch_size": 16, "epochs": 2}
            history = model.fit(x, y, sample_weight=weights, **fit)
            scores = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
            predicted = model.predict(x, batch_size=16, verbose=0)
            return history.history, scores, predicted, model.get_weights()

        self.assert_like_one_process(work, workers)

    @parameterized.parameters("keras", "by N", "not", "compute_loss", "global", "sum")
    @pytest.mark.few(2)
    def test_a_loss_counts_as_it_is_divided(self, how: str) -> None:
        x, y = regression(8)

        class Own(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                inputs, targets = data
                with tf.GradientTape() as tape:
                    outputs = self(inputs)
                    loss = loss_of(targets, outputs, how)
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
                return {"seen": tf.reduce_mean((targets - outputs) ** 2)}

        class OwnLoss(keras.Sequential):
            def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any):
                return tf.reduce_mean((y - y_pred) ** 2)

        kind = OwnLoss if how == "compute_loss" else Own

        def work(strategy: Any) -> Any:
            model = kind(
                [*layers()[:-2], keras.layers.Dense(1, kernel_initializer="ones")]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
            if how == "sum":
                model = keras.Sequential(model.layers)
                loss = keras.losses.MeanSquaredError(reduction="sum")
                model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=True)
            history = model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
            return model.get_weights(), list(history.history.values())

        self.assert_like_one_process(work, 2, "dense", "dgc")

    @pytest.mark.slow
    def test_an_optimizer_that_begins_with_the_weights_has_those_of_all(self) -> None:
        x, y = regression(17)

        def work(strategy: Any) -> Any:
            model = keras.Sequential(layers())
            # Where Keras alone builds it within a traced step it begins with zeros.
            made = keras.optimizers.ScheduleFreeAdamW(0.05)
            model.compile(made, "mse", run_eagerly=True)
            seen = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=2)
            return model.get_weights(), seen.history["loss"]

        if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
            self.assert_like_one_process(work, 2, "dense", "dgc")

    @parameterized.parameters(
        ("Adam", {"clipnorm": 0.05}),
        ("SGD", {"global_clipnorm": 0.05}),
        ("SGD", {"clipvalue": 0.01, "gradient_accumulation_steps": 2}),
    )
    @pytest.mark.few(0, 1)
    def test_what_was_summed_is_clipped(
        self, optimizer: str, clips: dict[str, Any]
    ) -> None:
        x, y = regression(16)

        def work(strategy: Any) -> Any:
            model = keras.Sequential(layers())
            made = getattr(keras.optimizers, optimizer)(0.5, **clips)
            model.compile(made, "mse", run_eagerly=True)
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=2)
            return model.get_weights(), list(clips.values())

        expected = self.assert_like_one_process(work, 2, "dense", "averaging")
        clips = {k: v for k, v in clips.items() if k == "gradient_accumulation_steps"}
        with self.assertRaises(AssertionError):  # they matter
            self.assertAllClose(work(None)[0], expected[0], 1e-3, 1e-3)

    @parameterized.parameters(
        {"clipnorm": 0.02}, {"global_clipnorm": 0.02}, {"clipvalue": 0.002}
    )
    @pytest.mark.slow
    def test_rows_that_repeat_are_clipped_before_they_are_added_up(
        self, **clips: float
    ) -> None:
        words = np.array([[1, 1, 2], [2, 1, 1], [3, 3, 1], [1, 2, 3]])
        y = np.linspace(-1.0, 1.0, 4, dtype=np.float32)[:, np.newaxis]

        def work(strategy: Any) -> Any:
            table = keras.layers.Embedding(
                5, 4, embeddings_initializer=keras.initializers.RandomNormal(seed=3)
            )
            last = keras.layers.Dense(1, kernel_initializer="ones")
            model = keras.Sequential(
                [keras.Input((3,), dtype="int32"), table, keras.layers.Flatten(), last]
            )
            sgd = keras.optimizers.SGD(0.5, **clips)
            model.compile(sgd, "mse", run_eagerly=True)
            model.fit(words, y, batch_size=4, shuffle=False, verbose=0, epochs=2)
            return model.get_weights(), []

        self.assert_like_one_process(work, 2, "dense", "averaging")

    @parameterized.parameters({"clipnorm": 1e-3}, {"global_clipnorm": 1e-3})
    @pytest.mark.few(1)
    def test_an_outer_optimizer_clips_as_keras_does(self, **clips: float) -> None:
        x, y = regression(8)
        config = tf_dgc.AveragingConfig(
            period=1, outer_optimizer=lambda: keras.optimizers.SGD(1.0, **clips)
        )

        def work(transport: Loopback) -> list[np.ndarray]:
            strategy = tf_dgc.ParameterAveragingStrategy(config, transport=transport)
            with strategy.scope():
                model = keras.Sequential(layers())
                model.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=True)
            before = model.get_weights()
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            pairs = zip(model.get_weights(), before, strict=True)
            return [after - old for after, old in pairs]

        for changes in run_workers(2, work):
            if "clipnorm" not in clips:
                changes = [np.concatenate([change.ravel() for change in changes])]
            norms = [float(np.linalg.norm(change)) for change in changes]
            self.assertAllClose(norms, [1e-3] * len(norms), 1e-3)

    @parameterized.parameters(
        "global", "norm", "value", "keras", "by norm", "exchange", "scaled"
    )
    @pytest.mark.few(1, 2)
    def test_a_step_clips_the_gradients_of_all_rows(self, how: str) -> None:
        x, y = regression(9)

        def work(strategy: Any) -> Any:
            class Clips(keras.Sequential):
                def train_step(self, data: Any) -> Any:
                    inputs, targets = data
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean((targets - self(inputs)) ** 2)
                    variables = self.trainable_variables
                    gradients = tape.gradient(loss, variables)
                    if how == "exchange" and strategy is not None:
                        gradients = strategy.exchange(gradients)
                    gradients = clipped(gradients, how)
                    self.optimizer.apply(gradients, variables)
                    return {"seen": loss}

            model = Clips(layers())
            model.compile(keras.optimizers.SGD(0.5), run_eagerly=True)
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            return model.get_weights(), []

        expected = self.assert_like_one_process(work, 2, "dense")
        with self.assertRaises(AssertionError):  # it matters
            how = "not"
            self.assertAllClose(work(None)[0], expected[0], 1e-3, 1e-3)

    @parameterized.product(how=["apart", "added", "moved"], summed=[False, True])
    @pytest.mark.few(0, 2)
    def test_gradients_are_exchanged_that_come_after_those_of_all(
        self, how: str, summed: bool
    ) -> None:
        x, y = regression(9)

        def loss_of_all(differences: Any) -> Any:
            total = tf.reduce_sum(differences)
            return total / 4 if summed else tf.reduce_mean(differences)

        def work(strategy: Any) -> Any:
            class Twice(keras.Sequential):
                def train_step(self, data: Any) -> Any:
                    inputs, targets = data
                    variables = self.trainable_variables
                    with tf.GradientTape() as tape:
                        loss = loss_of_all((targets - self(inputs)) ** 2)
                    first = tape.gradient(loss, variables)
                    if how == "moved":
                        first = strategy.exchange(first) if strategy else first
                        for variable, move in zip(variables, first, strict=True):
                            variable.assign_add(move)
                    first = clipped(first, "global")
                    with tf.GradientTape() as tape:
                        loss = loss_of_all(tf.abs(targets - self(inputs)))
                    second = tape.gradient(loss, variables)
                    if how == "added" and not summed:
                        pairs = zip(first, second, strict=True)
                        second = [one + two for one, two in pairs]
                    self.optimizer.apply(second, variables)
                    if how == "apart":
                        self.optimizer.apply(first, variables)
                    return {"seen": loss}

            model = Twice(layers())
            model.compile(keras.optimizers.SGD(0.1))
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            return model.get_weights(), []

        self.assert_like_one_process(work, 2, "dense")

    def test_weights_that_are_moved_by_a_workers_own_rows_are_named(self) -> None:
        x, y = regression(8)

        class Moves(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                inputs, targets = data
                variables = self.trainable_variables
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((targets - self(inputs)) ** 2)
                moves = tape.gradient(loss, variables)
                norm = tf.linalg.global_norm(moves)
                for variable, move in zip(variables, moves, strict=True):
                    variable.assign_add(move / norm)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((targets - self(inputs)) ** 2)
                gradients = tape.gradient(loss, variables)
                for variable, move in zip(variables, moves, strict=True):
                    variable.assign_sub(move / norm)
                self.optimizer.apply(gradients, variables)
                return {"seen": loss}

        def work(transport: Loopback) -> Any:
            with STRATEGIES["dense"](transport).scope():
                model = Moves(layers())
                model.compile(keras.optimizers.SGD(0.5))
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            return model.get_weights()

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            one, two = run_workers(2, work)
        self.assertLen([e for e in logs.output if "takes a gradient there" in e], 1)
        self.assertAllClose(one, two, 1e-5, 1e-5)

    def test_a_sum_divided_by_what_may_be_two_things_is_named(self) -> None:
        x, _ = regression(8)
        y = np.stack([x[:, 0], x[:, 1]], 1)

        def work(strategy: Any) -> Any:
            class Sums(keras.Sequential):
                def train_step(self, data: Any) -> Any:
                    inputs, targets = data
                    with tf.GradientTape() as tape:
                        # A worker has 4 rows of 2 elements, too.
                        loss = tf.reduce_sum((targets - self(inputs)) ** 2) / 8
                    variables = self.trainable_variables
                    self.optimizer.apply(tape.gradient(loss, variables), variables)
                    return {"seen": loss}

            model = Sums([*layers()[:-1], keras.layers.Dense(2, "tanh", False, "ones")])
            model.compile(keras.optimizers.SGD(0.5))
            history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
            return model.get_weights(), history["seen"]

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            self.assert_like_one_process(work, 2, "dense")
        self.assertLen([e for e in logs.output if "taken for the rows" in e], 1)

    def test_a_step_that_clips_what_is_compressed_is_told(self) -> None:
        x, y = regression(8)

        class Clips(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                inputs, targets = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((targets - self(inputs)) ** 2)
                variables = self.trainable_variables
                gradients = tape.gradient(loss, variables)
                self.optimizer.apply(clipped(gradients, "global"), variables)
                with pytest.raises(ValueError, match="with DGCConfig"):
                    self.distribute_strategy.exchange(gradients)
                return {"seen": loss}

        def work(transport: Loopback) -> None:
            strategy = STRATEGIES["dgc"](transport)
            with strategy.scope():
                model = Clips(layers())
                model.compile(keras.optimizers.SGD(0.5), run_eagerly=True)
            with pytest.raises(RuntimeError, match="in a step of a model"):
                strategy.exchange([])
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            run_workers(2, work)
        told = [line for line in logs.output if "each worker clips its own" in line]
        self.assertLen(told, 1)
        self.assertRegex(told[0], r"at \S+test_share.py:\d+ before")

    @pytest.mark.extended
    def test_classes_have_weights(self) -> None:
        x, _ = regression(11)
        y = np.arange(11) % 3

        def work(strategy: Any) -> Any:
            last = keras.layers.Dense(3, kernel_initializer="ones")
            model = keras.Sequential([*layers()[:-1], last])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.5), loss, run_eagerly=True)
            weights = {0: 0.25, 1: 1.0, 2: 3.0}
            fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
            model.fit(x, y, class_weight=weights, **fit)
            return model.get_weights(), []

        self.assert_like_one_process(work, 2, "dense", "dgc")

    def test_a_loss_that_is_no_sum_or_mean_is_told_with_its_line(self) -> None:
        x, y = regression(8)

        def smallest(targets: Any, outputs: Any) -> Any:
            return tf.reduce_mean(tf.sort((targets - outputs) ** 2, 0)[:1])

        def work(transport: Loopback) -> None:
            with tf_dgc.DenseStrategy(transport=transport).scope():
                model = keras.Sequential(layers())
                model.compile("sgd", smallest, run_eagerly=True)
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            run_workers(2, work)
        told = [line for line in logs.output if "sums and means over rows" in line]
        self.assertLen(told, 1)

    @pytest.mark.slow
    def test_what_is_kept_back_when_a_model_is_compiled_anew_is_told(self) -> None:
        x, y = regression(8)

        def work(transport: Loopback) -> None:
            config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
            strategy = tf_dgc.DGCStrategy(config, transport=transport)
            fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
            with strategy.scope():
                model = keras.Sequential(layers())
                for name in ("flushed", "lost", "last"):
                    sgd = keras.optimizers.SGD(0.1, name=name)
                    model.compile(sgd, "mse", run_eagerly=True)
                    model.fit(x, y, **fit)
                    if name == "flushed":
                        strategy.flush(model)

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            run_workers(2, work)
        told = [line for line in logs.output if "compiled anew" in line]
        self.assertLen(told, 2)
        for line in told:
            self.assertRegex(line, "of 'lost'.*strategy.flush")

    @parameterized.parameters("dense", "dgc", "averaging", "rounds")
    @pytest.mark.few(1)
    def test_a_learning_rate_of_ones_own_is_refused_on_all(self, name: str) -> None:
        x, y = regression(16)

        def work(transport: Loopback) -> None:
            if name == "rounds":
                config = tf_dgc.AveragingConfig(period=2)
                strategy = tf_dgc.ParameterAveragingStrategy(
                    config, transport=transport
                )
            else:
                strategy = STRATEGIES[name](transport)
            with strategy.scope():
                model = keras.Sequential(layers())
                model.compile("sgd", "mse", run_eagerly=True)
            fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
            model.fit(x, y, **fit)

            def change(batch: int, logs: Any = None) -> None:
                if transport.rank == 1:
                    model.optimizer.learning_rate = 0.125

            own = keras.callbacks.LambdaCallback(on_train_batch_begin=change)
            model.fit(x, y, callbacks=[own], **fit)

        for error in outcomes(2, work):
            self.assertRegex(str(error), r"learning rate must be the same on all")
            self.assertRegex(str(error).replace("\n", " "), r"\b1\b.*0\.125.*0\.01")

    def test_without_rows_what_forward_passes_change_stays(self) -> None:
        class Auto(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(1.0 / self(x, training=True))
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
                return {"loss": loss}

        def work(transport: Loopback) -> Any:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            with strategy.scope():
                norm = keras.layers.BatchNormalization(gamma_initializer="zeros")
                square = keras.layers.Lambda(lambda x: x + tf.norm(x, axis=1)[:, None])
                model = Auto([keras.Input((6,)), square, norm])
                model.compile(
                    keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3)),
                    run_eagerly=True,
                )
            before = norm.moving_mean.numpy()
            norm.beta.assign(tf.ones([6]))
            history = model.fit(np.ones((1, 6), "float32"), verbose=0)
            same = np.array_equal(before, norm.moving_mean.numpy())
            iterations = int(model.optimizer.inner_optimizer.iterations)
            return same, iterations, history.history, model.get_weights()

        first, second = run_workers(2, work)
        self.assertEqual((first[0], second[0]), (False, False))  # by the one row
        self.assertEqual((first[1], second[1]), (1, 1))
        self.assertAllEqual(first[2]["loss"], second[2]["loss"])
        for one, two in zip(first[3], second[3], strict=True):
            self.assertTrue(np.isfinite(one).all())
            self.assertAllEqual(one, two)

    def test_all_see_the_same_logs_whatever_is_in_them(self) -> None:
        def work(transport: Loopback) -> Any:
            rank = transport.rank
            share = tf_dgc.DenseStrategy(transport=transport).inner.share
            share.rows.begin([3.0, 1.0, 0.0][rank])
            logs = {
                "loss": tf.constant([1.0, 5.0, float("nan")][rank]),
                "vector": np.array([0.0, rank]),
                "name": f"of {rank}",
                "half": tf.constant(1.0 + rank, tf.bfloat16),
                "same": 7,
                "strange": object,
            }
            own = logs if rank else logs | {"chief": 1.5}
            return share.logs.agree(own, share.rows.last())

        found = run_workers(3, work)
        for logs in found:
            self.assertEqual((logs["loss"], logs["half"]), (2.0, 1.25))
            self.assertAllClose(logs["vector"], [0.0, 0.25])
            self.assertEqual(logs["name"], "of 0")
            self.assertEqual((logs["same"], logs["chief"]), (7, 1.5))
            self.assertIs(logs["strange"], object)


def clipped(gradients: list[Any], how: str) -> list[Any]:
    if how in ("global", "exchange"):
        return tf.clip_by_global_norm(gradients, 0.02)[0]
    if how == "norm":
        return [tf.clip_by_norm(g, 0.01) for g in gradients]
    if how == "value":
        return [tf.clip_by_value(g, -0.01, 0.01) for g in gradients]
    if how == "keras":
        return [keras.ops.clip(g, -0.01, 0.01) for g in gradients]
    if how == "by norm":
        scale = 0.02 / tf.linalg.global_norm(gradients)
        return [scale * g for g in gradients]
    if how == "scaled":
        return tf.clip_by_global_norm([0.5 * g for g in gradients], 0.02)[0]
    return gradients


def loss_of(targets: Any, outputs: Any, how: str) -> Any:
    losses = tf.reduce_sum((targets - outputs) ** 2, axis=1)
    if how == "keras":
        return keras.losses.MeanSquaredError()(targets, outputs)
    if how == "by N":
        return (
            tf.reduce_mean(losses) / tf.distribute.get_strategy().num_replicas_in_sync
        )
    if how == "global":
        return tf.nn.compute_average_loss(losses, global_batch_size=5)
    return tf.reduce_mean(losses)


if __name__ == "__main__":
    tf.test.main()
