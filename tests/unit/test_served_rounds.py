"""Tests of averaging on servers: local steps, and rounds; workers are threads."""

import functools
import gc
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import keras
import local_servers
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_dgc
from tf_dgc.compression import arena
from tf_dgc.exchanges.local_counts import CommonCount
from tf_dgc.exchanges.modes import Combining
from tf_dgc.exchanges.served_messages import UnsentChanges, combined

BATCH, FEATURES = 16, 4
OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def data(batches: int) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(5)
    x = drawn.normal(size=(BATCH * batches, FEATURES)).astype("float32")
    return x, x[:, :1] * 2 - x[:, 1:2]


def network(statistics: bool = False) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.Input([FEATURES]), keras.layers.Dense(5, "relu")]
    if statistics:
        layers.append(keras.layers.BatchNormalization(momentum=0.9))
    return keras.Sequential([*layers, keras.layers.Dense(1)])


def compiled(model: keras.Model, optimizer: Any) -> keras.Model:
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Call functions at the same time; return what they return."""
    found: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def call(k: int) -> None:
        try:
            found[k] = functions[k]()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=[k], daemon=True)
        for k in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        if thread.is_alive():
            raise AssertionError(f"it hangs; {errors}")
    if errors:
        raise errors[0]
    return found


class Lockstep:
    """W workers in one process by plain Keras: DiLoCo, round by round."""

    def __init__(self, workers: int, optimizer: Any, outer: Any, **options: Any):
        self.workers, self.outer = workers, outer()
        self.models = [
            compiled(network(**options), optimizer()) for _ in range(workers)
        ]
        self.agreed = network(**options)
        self.outer.build(self.agreed.trainable_variables)

    def fit(self, epochs: int, batches: int, period: int) -> list[np.ndarray]:
        x, y = data(batches)
        for _ in range(epochs):
            taken = 0
            for t in range(batches):
                for k, model in enumerate(self.models):
                    rows = BATCH // self.workers
                    own = slice(t * BATCH + k * rows, t * BATCH + (k + 1) * rows)
                    model.train_on_batch(x[own], y[own])
                taken += 1
                if taken == period:
                    self.meet()
                    taken = 0
            if taken:
                self.meet()
        return self.agreed.get_weights()

    def meet(self) -> None:
        changes = [
            np.mean([a - w for w in each], axis=0)
            for a, *each in zip(
                self.agreed.get_weights(),
                *[model.get_weights() for model in self.models],
                strict=True,
            )
        ]
        trained = {id(v) for v in self.agreed.trainable_variables}
        gradients = []
        for variable, change in zip(self.agreed.weights, changes, strict=True):
            if id(variable) in trained:
                gradients.append(tf.constant(change))
            else:
                variable.assign(variable.numpy() - change)
        self.outer.apply(gradients, self.agreed.trainable_variables)
        for model in self.models:
            model.set_weights(self.agreed.get_weights())


class EqualityTest(parameterized.TestCase):
    """Where all live, and a round is of all, it is DiLoCo in lockstep."""

    @parameterized.parameters(
        (2, "sgd", None, False),
        (2, "adam", OUTER, True),
        (2, "adam", None, False),
    )
    @pytest.mark.few(1)
    @pytest.mark.long
    def test_rounds_are_those_of_lockstep(
        self, workers: int, name: str, outer: Any, statistics: bool
    ) -> None:
        def optimizer() -> Any:
            rate = 0.05 if name == "sgd" else 0.01
            return keras.optimizers.get(
                {"class_name": name, "config": {"learning_rate": rate}}
            )

        def outer_optimizer() -> Any:
            return keras.optimizers.SGD(**(outer or {"learning_rate": 1.0}))

        twin = Lockstep(workers, optimizer, outer_optimizer, statistics=statistics)
        expected = twin.fit(2, 7, 3)
        x, y = data(7)
        given = None if outer is None else outer_optimizer
        with local_servers.Job(workers=workers) as job:
            strategies = [
                job.worker(k, local_steps=3, outer_optimizer=given)
                for k in range(workers)
            ]
            models = []
            for strategy in strategies:
                with strategy.scope():
                    models.append(compiled(network(statistics), optimizer()))
            batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
            in_threads(
                [
                    lambda m=m: m.fit(batches, epochs=2, verbose=0)  # type: ignore[misc]
                    for m in models
                ]
            )
            found = [model.get_weights() for model in models]
            for each in found[1:]:
                for own, first in zip(each, found[0], strict=True):
                    np.testing.assert_array_equal(own, first)
            for own, other in zip(found[0], expected, strict=True):
                np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-6)
            stats = strategies[0].server_stats()
            self.assertEqual(int(stats.pushes), 2 * 3)


class PaceTest(parameterized.TestCase):
    """Workers that are not equally fast, in rounds of all."""

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return data of which each worker has the rows of the other."""
        x, y = data(7)
        half = BATCH // 2
        for begin in range(0, len(x), BATCH):
            for array in (x, y):
                array[begin + half : begin + BATCH] = array[begin : begin + half]
        return x, y

    def fit(self, job: Any, callback: Any = None) -> list[keras.Model]:
        """Train two workers; return their models."""
        batches = tf.data.Dataset.from_tensor_slices(self.rows()).batch(BATCH)
        models = []
        for k in range(2):
            with job.worker(k, local_steps=3).scope():
                models.append(compiled(network(), keras.optimizers.SGD(0.05)))

        def train(k: int) -> None:
            given = [] if callback is None else [callback(k)]
            models[k].fit(batches, epochs=2, verbose=0, callbacks=given)

        in_threads([functools.partial(train, k) for k in range(2)])
        return models

    def test_who_begins_a_period_late_counts_its_own_steps_only(self) -> None:
        take, drawn = CommonCount.take, random.Random(3)

        def nap() -> np.bool_:
            time.sleep(drawn.random() * 0.1)
            return np.bool_(True)

        def late(count: CommonCount, uncounted: int) -> None:
            slept = tf.numpy_function(nap, [], tf.bool, stateful=True)
            with tf.control_dependencies([slept]):
                take(count, uncounted)

        with (
            mock.patch.object(CommonCount, "take", late),
            local_servers.Job(workers=2) as job,
        ):
            models = self.fit(job)
        self.assertEqual([int(m.optimizer.iterations) for m in models], [14, 14])

    @parameterized.parameters(0, 1)
    def test_weights_that_all_assign_within_a_round_are_those_of_one_process(
        self, late: int
    ) -> None:
        # SGD, as slots of Adam have what a slow worker saw: it may fetch the chief's
        # assignment before it comes to its own.
        values = [0.5 * value for value in network().get_weights()]

        class Assign(keras.callbacks.Callback):
            def __init__(self, k: int) -> None:
                super().__init__()
                self.late = k == late

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if batch == 4:
                    time.sleep(0.3 * self.late)
                    self.model.set_weights(values)

        plain, (x, y) = compiled(network(), keras.optimizers.SGD(0.05)), self.rows()
        for t in [*range(7), *range(7)]:
            if t == 4:
                plain.set_weights(values)
            own = slice(t * BATCH, (t + 1) * BATCH)
            plain.train_on_batch(x[own], y[own])
        with local_servers.Job(workers=2) as job:
            models = self.fit(job, Assign)
        for model in models:
            for own, one in zip(model.get_weights(), plain.get_weights(), strict=True):
                np.testing.assert_allclose(own, one, rtol=2e-5, atol=2e-6)


class ModelsTest(parameterized.TestCase):
    """Models that are trained one after another."""

    @parameterized.product(
        settings=[
            {"local_steps": 3},
            {"local_steps": 3, "quorum": 1, "grace": 60.0},
            {"synchronous": True},
            {},
        ],
        by_hand=[False, True],
    )
    @pytest.mark.few(3, 8)
    @pytest.mark.long
    def test_a_worker_may_keep_models_that_another_has_dropped(
        self, settings: dict[str, Any], by_hand: bool
    ) -> None:
        x, y = data(4)

        def train(strategy: Any) -> list[np.ndarray]:
            kept, weights = [], []
            for _ in range(3):
                with strategy.scope():
                    model = compiled(network(), keras.optimizers.SGD(0.05))
                if by_hand:
                    for at in range(0, len(x), BATCH):
                        model.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])
                    strategy.barrier()
                else:
                    model.fit(x, y, BATCH, verbose=0, shuffle=False)
                weights += model.get_weights()
                kept += [model] if strategy.is_chief else []
                del model
                gc.collect()
            return weights

        with local_servers.Job(workers=2) as job:
            workers = [job.worker(k, **settings) for k in range(2)]
            first, second = in_threads([lambda w=w: train(w) for w in workers])
        if settings and "quorum" not in settings:
            for own, other in zip(first, second, strict=True):
                np.testing.assert_array_equal(own, other)


class JoiningTest(parameterized.TestCase):
    def fit(self, strategy: Any, epochs: int = 1, **options: Any) -> keras.Model:
        with strategy.scope():
            model = compiled(network(), keras.optimizers.Adam(0.01))
        self.fit_again(model, epochs, **options)
        return model

    def fit_again(self, model: keras.Model, epochs: int, **options: Any) -> None:
        x, y = data(6)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        model.fit(batches, epochs=epochs, verbose=0, **options)

    @pytest.mark.extended
    def test_who_joins_has_what_the_servers_have_and_counts_steps_with_them(
        self,
    ) -> None:
        settings: dict[str, Any] = {"local_steps": 3, "quorum": 1, "grace": 5.0}
        with local_servers.Job(workers=2) as job:
            chief = job.worker(0, **settings)
            model = self.fit(chief, epochs=2)
            joins = job.worker(1, **settings)
            first: list[Any] = []

            class First(keras.callbacks.Callback):
                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    first.append(int(self.model.optimizer.iterations))

            other = self.fit(joins, callbacks=[First()])
            self.assertEqual(first[0], 12 + 1)
            self.fit_again(model, 1)
            self.assertEqual(int(model.optimizer.iterations), 18 + 6)
            self.assertEqual(int(other.optimizer.iterations), 18)

    def test_who_joins_goes_on_with_what_the_optimizer_of_another_keeps(self) -> None:
        settings: dict[str, Any] = {"local_steps": 3, "quorum": 1, "grace": 5.0}
        trains, ended = threading.Event(), threading.Event()
        kept: list[list[np.ndarray]] = []  # of the chief, after each step
        first: list[list[np.ndarray]] = []  # of the one that joins, after its first

        def slots(model: keras.Model) -> list[np.ndarray]:
            mean, square = model.optimizer._momentums, model.optimizer._velocities
            flat = [
                np.concatenate([np.ravel(v) for v in each]) for each in (mean, square)
            ]
            return [each.astype(float) for each in flat]

        class Chief(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                kept.append(slots(self.model))
                if len(kept) == 9:
                    trains.set()
                time.sleep(0.02)
                self.model.stop_training = ended.is_set()

        class Joins(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if not first:
                    first.append(slots(self.model))

        def join(job: local_servers.Job) -> None:
            trains.wait(60)
            try:
                self.fit(job.worker(1, **settings), callbacks=[Joins()])
            finally:
                ended.set()

        with local_servers.Job(workers=2) as job:
            chief = job.worker(0, **settings)
            in_threads(
                [
                    lambda: self.fit(chief, epochs=10**4, callbacks=[Chief()]),
                    lambda: join(job),
                ]
            )
        # Of Adam: mean <- 0.9 mean + 0.1 g; square <- 0.999 square + 0.001 g^2.
        ((mean, square),) = first
        gaps = [
            np.abs(((mean - 0.9 * m) / 0.1) ** 2 - (square - 0.999 * v) / 0.001).max()
            for m, v in kept
        ]
        self.assertLess(min(gaps), 1e-3)
        self.assertGreaterEqual(np.argmin(gaps), 8)

    @parameterized.parameters(False, True)
    def test_who_joins_where_nobody_trains_is_told_that_its_optimizer_is_new(
        self, died_while_it_answered: bool
    ) -> None:
        with local_servers.Job(workers=2) as job:
            chief = job.worker(0, local_steps=3, quorum=1)
            self.fit(chief)
            if died_while_it_answered:
                _, rounds = chief._ledger.exchanges()
                handover = rounds._common.handover
                for shared in handover._shared:
                    shared.assign(tf.zeros(shared.shape, shared.dtype))
                handover._given.assign(1)
                handover._begun.assign(2)
            with self.assertLogs("tf_dgc", "WARNING") as logs:
                self.fit(job.worker(1, local_steps=3, quorum=1))
        (line,) = [line for line in logs.output if "knows nothing of these" in line]
        self.assertIn("Worker 1 begins at step 6 of the others", line)

    def test_an_outer_step_that_goes_too_far_in_rounds_of_a_part_is_told(self) -> None:
        for quorum, outer, told in (
            (1, lambda: keras.optimizers.SGD(**OUTER), "makes 7 of a change of 1"),
            (1, lambda: keras.optimizers.SGD(0.5, 0.5), None),
            (1, None, None),
            (2, lambda: keras.optimizers.SGD(**OUTER), None),
        ):
            config = {"local_steps": 3, "quorum": quorum, "outer_optimizer": outer}
            with (
                self.subTest(config),
                local_servers.Job(workers=2) as job,
                self.assertLogs("tf_dgc") as logs,
            ):
                logging.getLogger("tf_dgc").warning("begins")
                self.fit(job.worker(0, grace=5.0, **config))
                found = [line for line in logs.output if "of a change of 1" in line]
                self.assertEqual(len(found), told is not None)
                self.assertTrue(all(str(told) in line for line in found))

    @pytest.mark.slow
    def test_weights_that_the_chief_loads_go_to_all(self) -> None:
        settings: dict[str, Any] = {"local_steps": 4}
        with local_servers.Job(workers=2) as job:
            strategies = [job.worker(k, **settings) for k in range(2)]
            models = in_threads(
                [lambda s=s: self.fit(s) for s in strategies]  # type: ignore[misc]
            )
            loaded = [np.full_like(w, 0.5) for w in models[0].get_weights()]
            models[0].set_weights(loaded)
            for model in models:
                model.optimizer.learning_rate = 0.0
            in_threads(
                [lambda m=m: self.fit_again(m, 1) for m in models]  # type: ignore[misc]
            )
            for model in models:
                for own, other in zip(model.get_weights(), loaded, strict=True):
                    np.testing.assert_array_equal(own, other)

    @pytest.mark.slow
    def test_a_change_that_is_no_number_ends_its_worker_alone(self) -> None:
        x, y = data(4)
        with local_servers.Job(workers=2) as job:
            strategies = [job.worker(k, local_steps=2, quorum=1) for k in range(2)]
            model = self.fit(strategies[0])
            with strategies[1].scope():
                other = compiled(network(), keras.optimizers.Adam(0.01))
            with self.assertRaisesRegex(
                tf.errors.InvalidArgumentError, "of this worker holds NaN or infinity"
            ):
                other.fit(x * np.inf, y, batch_size=BATCH, verbose=0)
            self.fit_again(model, 1)
            self.assertTrue(all(np.isfinite(w).all() for w in model.get_weights()))


class Ones(keras.Sequential):
    """Has a gradient of -1 for each element of a kernel."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return -tf.reduce_sum(self.layers[0].kernel.value)


class CompressionTest(parameterized.TestCase):
    COMPRESSION: ClassVar[dict[str, Any]] = {"min_elements": 1, "sample_fraction": 1.0}

    def compression(self, **given: Any) -> tf_dgc.DGCConfig:
        return tf_dgc.DGCConfig(**{**self.COMPRESSION, **given})

    @parameterized.parameters("sign", "float32", "log4")
    @pytest.mark.few(0, 1)
    def test_what_is_sent_and_what_is_kept_is_what_was_changed(self, kind: str) -> None:
        compression = self.compression(value_dtype=kind, sparsity=0.9)
        x = np.zeros([80, 10], "float32")
        with local_servers.Job(workers=1) as job:
            strategy = job.worker(0, local_steps=3, compression=compression)
            with strategy.scope():
                kernel = keras.layers.Dense(
                    10, use_bias=False, kernel_initializer="zeros"
                )
                model = Ones([keras.Input([10]), kernel])
                model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
            model.fit(x, batch_size=8, epochs=3, verbose=0)
            rounds = strategy.inner.local.rounds()[0]
            (kept,) = arena.unflatten(rounds.outer.layout, rounds.kept()[0])
            twin = strategy.inner.twins.of(model.layers[0].kernel.value)
            value = twin.read_value().numpy()
            np.testing.assert_allclose(value - kept, np.full([10, 10], 30.0), rtol=1e-5)
            self.assertGreater(np.count_nonzero(kept), 0)
            np.testing.assert_array_equal(value, model.layers[0].kernel.numpy())

    @parameterized.parameters(("mean", None), ("senders", None), ("auto", OUTER))
    @pytest.mark.few(0, 1)
    def test_workers_and_servers_have_the_same_bits(
        self, combine: str, outer: Any
    ) -> None:
        x, y = data(16)
        given = outer and {"class_name": "SGD", "config": outer}
        settings: dict[str, Any] = {
            "local_steps": 2,
            "compression": self.compression(),
            "combine": combine,
            "outer_optimizer": given,
        }
        with local_servers.Job(workers=2) as job:
            strategies = [job.worker(k, **settings) for k in range(2)]
            models = []
            for strategy in strategies:
                keras.utils.set_random_seed(3)
                with strategy.scope():
                    layers = [keras.layers.Dense(200, "relu") for _ in range(2)]
                    model = keras.Sequential(
                        [keras.Input([FEATURES]), *layers, keras.layers.Dense(1)]
                    )
                    models.append(compiled(model, keras.optimizers.Adam(0.01)))
            batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
            losses = in_threads(
                [
                    lambda m=m: m.fit(batches, epochs=2, verbose=0)  # type: ignore[misc]
                    for m in models
                ]
            )
            for strategy, model in zip(strategies, models, strict=True):
                for variable in model.trainable_variables:
                    twin = strategy.inner.twins.of(variable.value)
                    np.testing.assert_array_equal(twin.read_value(), variable.numpy())
            whole = sum(4 * v.shape.num_elements() for v in models[0].weights)
            stats = strategies[0].server_stats()
            self.assertEqual(int(stats.pushes), 16)
            self.assertLess(int(stats.sent_bytes), 16 * whole / 30)
            if outer is None:  # messages come down, but for the first round
                self.assertLess(int(stats.received_bytes), 3 * whole)
                for each in losses:
                    self.assertLess(each.history["loss"][-1], each.history["loss"][0])

    def test_messages_are_combined_as_they_say(self) -> None:
        drawn = np.random.default_rng(1)
        layout = arena.build([("a", [30, 10]), ("b", [7, 40])])
        config = self.compression(value_dtype="float32", sparsity=0.9)
        kept = [UnsentChanges(layout, config, 1.0, "CPU:0") for _ in range(3)]
        changes = [
            [
                tf.constant(drawn.normal(size=s.shape), tf.float32)
                for s in layout.segments
            ]
            for _ in kept
        ]
        found = [k.message(c) for k, c in zip(kept, changes, strict=True)]
        sent = np.stack(
            [
                arena.flatten(layout, c).numpy() - each.left.numpy()
                for c, each in zip(changes, found, strict=True)
            ]
        )
        words = tf.stack([each.words for each in found])
        # Of two of three, and where one alone goes farther than any may.
        for senders, own, farthest in itertools.product(
            (False, True), ([0.25, 0.0, 0.5], [0.06, 0.34, 0.6]), [4.0]
        ):
            weights = np.array(own, "float32")
            rule = Combining(senders)
            mean = combined(kept[0].form, words, tf.constant(weights), rule).numpy()
            twin = np.sum(weights[:, None] * sent, 0)
            if senders:
                total = np.sum(weights[:, None] * (sent != 0), 0)
                twin *= np.minimum(np.sum(weights) / np.maximum(total, 1e-9), farthest)
            np.testing.assert_allclose(mean, twin, rtol=1e-5, atol=1e-6)


class RefusedTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"quorum": 2}, "`quorum` must be None without `local_steps`"),
        ({"local_steps": 0}, "`local_steps` must be 1 or more"),
        ({"local_steps": 4, "grace": -1.0}, "`grace` must be a number of seconds"),
        ({"local_steps": 4, "push_period": 2}, "`push_period` must be 1 with"),
        ({"local_steps": 4, "synchronous": True}, "`synchronous` must be False with"),
    )
    def test_settings_that_do_not_go_together(self, given: Any, text: str) -> None:
        with self.assertRaisesRegex(ValueError, text):
            tf_dgc.DownpourConfig(**given)

    def test_settings_are_plain_values_and_back(self) -> None:
        config = tf_dgc.DownpourConfig(
            local_steps=8,
            outer_optimizer=lambda: keras.optimizers.SGD(0.7),
            quorum=3,
            grace=10,
        )
        again = tf_dgc.DownpourConfig.from_config(config.get_config())
        self.assertEqual(again.get_config(), config.get_config())
        self.assertEqual(again.outer_optimizer["class_name"], "SGD")

    def test_moving_averages_of_weights_are_refused(self) -> None:
        x, y = data(2)
        with local_servers.Job(workers=1) as job:
            strategy = job.worker(0, local_steps=2)
            with strategy.scope():
                sgd = keras.optimizers.SGD(0.1, use_ema=True)
                model = compiled(network(), sgd)
            with self.assertRaisesRegex(ValueError, "with use_ema=True. Leave it out"):
                model.fit(x, y, verbose=0)


if __name__ == "__main__":
    tf.test.main()
