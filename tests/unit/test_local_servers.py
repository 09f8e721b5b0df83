"""Tests of workers of parameter servers, all in this process."""

import os
import pathlib
import tempfile
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
from tf_dgc.servers import clocks
from tf_dgc.strategies import owners

ROWS, WIDTH = 32, 4


class Rows(keras.metrics.Metric):
    """Counts the rows that it is given."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(tf.cast(tf.shape(y)[0], tf.float32))

    def result(self) -> Any:
        return self.count + 0.0


def linear(strategy: Any, rate: float = 0.01) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.SGD(rate), "mse", metrics=[Rows()], jit_compile=False
        )
    return model


def embedding(strategy: Any, **options: Any) -> keras.Model:
    """Return a model whose table is on the servers only."""
    layers = keras.layers
    with strategy.scope():
        table = layers.Embedding(ROWS, WIDTH, embeddings_initializer="zeros")
        model = keras.Sequential([*options.get("before", []), table, layers.Flatten()])
        model.compile(keras.optimizers.Adagrad(0.1), "mse", jit_compile=False)
    return model


def forget_owners() -> None:
    """Give folders of backups up, as a process that is killed does."""
    for owner in owners._owners.values():
        owner.release()
    owners._owners.clear()


class DataTest(parameterized.TestCase):
    @pytest.mark.long
    def test_validation_takes_all_rows_whoever_has_distributed_the_data(self) -> None:
        x = np.zeros([64, 4], "float32")
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
        with local_servers.Job(workers=2) as job:
            strategy = job.worker(0)
            model = linear(strategy)
            for given in (data, strategy.experimental_distribute_dataset(data)):
                for validation in (
                    data,
                    strategy.experimental_distribute_dataset(data),
                ):
                    logs = model.fit(
                        given,
                        steps_per_epoch=4,
                        validation_data=validation,
                        validation_steps=4,
                        verbose=0,
                    )
                    self.assertEqual(logs.history["rows"], [32.0])
                    self.assertEqual(logs.history["val_rows"], [64.0])
            evaluated = model.evaluate(validation, verbose=0, return_dict=True)
            self.assertEqual(evaluated["rows"], 64.0)


class CallbacksTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
            "EarlyStopping must be without `restore_best_weights=True`.*"
            "ModelCheckpoint.path, save_best_only=True",
        ),
        (
            keras.callbacks.TensorBoard("never", histogram_freq=1),
            "TensorBoard must be without `histogram_freq`",
        ),
    )
    @pytest.mark.long
    def test_what_needs_whole_tables_is_refused_before_training(
        self, callback: Any, text: str
    ) -> None:
        x = np.zeros([8, 1], "int32")
        y = np.zeros([8, WIDTH], "float32")
        with local_servers.Job(workers=1) as job:
            strategy = job.worker(0, table_bytes=64)
            for before in ([], [keras.Input([1], dtype="int32")]):
                model = embedding(strategy, before=before)
                with self.assertRaisesRegex(ValueError, text):
                    model.fit(x, y, verbose=0, callbacks=[callback])
                self.assertEqual(int(strategy.server_stats().pushes), 0)
            stops = keras.callbacks.EarlyStopping("loss")
            model.fit(x, y, verbose=0, callbacks=[stops])

    @pytest.mark.long
    def test_a_table_that_fit_builds_is_on_the_servers(self) -> None:
        x = np.zeros([8, 1], "int32")
        with local_servers.Job(workers=1) as job:
            strategy = job.worker(0, table_bytes=64)
            model = embedding(strategy)
            model.fit(x, np.zeros([8, WIDTH], "float32"), verbose=0)
            rows = strategy.read_rows(model.layers[0].embeddings, 0, 2)
            self.assertEqual(rows.shape, [2, WIDTH])


class Gathering(keras.Sequential):
    """Compares the rows that it gathers with one another."""

    def train_step(self, given: Any) -> Any:
        x, _ = given
        with tf.GradientTape() as tape:
            rows = tf.distribute.get_replica_context().all_gather(self(x), 0)
            loss = tf.reduce_mean(tf.matmul(rows, rows, transpose_b=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"seen": loss}


class Late(keras.Model):
    """Makes a variable of TensorFlow while its first step is traced."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.scale, self.dense = None, layers[-1]
        self.of_scale = keras.optimizers.SGD(0.1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, given: Any) -> Any:
        if self.scale is None:
            self.scale = tf.Variable(lambda: tf.ones([3]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self(given[0] * self.scale))
        self.of_scale.apply(tape.gradient(loss, [self.scale]), [self.scale])
        return {"seen": loss}


class Drawing(keras.Sequential):
    """Keeps what its step draws for the rows of a batch, by a seed."""

    def train_step(self, given: Any) -> Any:
        x, _ = given
        drawn = tf.random.stateless_normal([tf.shape(x)[0]], [3, 1])
        self.drawn.assign(drawn)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x) * drawn[:, None])
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"seen": loss}


@pytest.mark.long
class StepsTest(parameterized.TestCase):
    def model(self, strategy: Any, kind: type[Any]) -> Any:
        with strategy.scope():
            model = kind([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        return model

    def test_a_loss_of_rows_that_are_gathered_has_a_gradient_on_any_worker(
        self,
    ) -> None:
        x = np.ones([8, 3], "float32")
        with local_servers.Job(workers=2) as job:
            for rank in range(2):
                model = self.model(job.worker(rank), Gathering)
                model.fit(x, x, batch_size=4, verbose=0)
                self.assertTrue(np.isfinite(model.get_weights()[0]).all())

    @parameterized.parameters(False, True)
    def test_a_seed_draws_for_rows_of_each_worker_what_is_drawn_for_those_of_all(
        self, eager: bool
    ) -> None:
        x = np.ones([8, 3], "float32")
        found = []
        with local_servers.Job(workers=2) as job:
            for rank in range(2):
                model = self.model(job.worker(rank), Drawing)
                model.drawn = tf.Variable(tf.zeros([4]), trainable=False)
                model.run_eagerly = eager
                model.fit(x, x, batch_size=8, verbose=0)
                found.extend(model.drawn.numpy())
        self.assertEqual(found, list(tf.random.stateless_normal([8], [3, 1]).numpy()))

    def test_a_variable_without_a_value_is_named(self) -> None:
        x = np.ones([8, 3], "float32")
        with local_servers.Job(workers=1) as job:
            model = self.model(job.worker(0), Late)
            with self.assertRaisesRegex(ValueError, "while the first step is traced"):
                model.fit(x, x, verbose=0)


def ones(strategy: Any) -> keras.Model:
    """Return a model whose loss has a gradient of -1 for each element, by SGD(1)."""

    class Ones(keras.Sequential):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return -tf.reduce_sum(self.layers[0].kernel.value)

    with strategy.scope():
        dense = keras.layers.Dense(10, use_bias=False, kernel_initializer="zeros")
        model = Ones([keras.Input([10]), dense])
        model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    return model


class SuccessionTest(parameterized.TestCase):
    """A chief that comes again finds newer values than those it loads."""

    def folder(self) -> str:
        return self.enterContext(tempfile.TemporaryDirectory())

    def values(self, strategy: Any, model: keras.Model) -> list[np.ndarray]:
        """Return what servers have: a table, its slot, a kernel, and its slot."""
        optimizer = model.optimizer
        table, kernel = model.layers[0].embeddings, model.layers[-1].kernel
        slots = optimizer._accumulators
        return [
            strategy.read_rows(table, 0, ROWS).numpy(),
            strategy.read_rows(slots[0], 0, ROWS).numpy(),
            strategy.inner.twins.of(kernel.value).read_value().numpy(),
            np.array(slots[1].value.read_value()),
        ]

    def model(self, strategy: Any) -> keras.Model:
        layers = keras.layers
        with strategy.scope():
            table = layers.Embedding(ROWS, WIDTH, embeddings_initializer="ones")
            model = keras.Sequential(
                [
                    keras.Input([1], dtype="int32"),
                    table,
                    layers.Flatten(),
                    layers.Dense(1, use_bias=False),
                ]
            )
            model.compile(keras.optimizers.Adagrad(0.1), "mse", jit_compile=False)
        return model

    def fit(self, model: keras.Model, rows: int = ROWS, **options: Any) -> None:
        x = np.arange(rows, dtype="int32")[:, np.newaxis]
        model.fit(x, 5.0 + 0 * x, batch_size=8, verbose=0, shuffle=False, **options)

    def check_alike(self, found: list[np.ndarray], expected: list[np.ndarray]) -> None:
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(own, other)

    @parameterized.parameters("weights", "model state")
    @pytest.mark.extended
    def test_what_it_loads_is_older_than_what_servers_have(self, kind: str) -> None:
        folder = pathlib.Path(self.folder())
        path = pathlib.Path(self.folder(), "early.weights.h5")
        with local_servers.Job(workers=2) as job:
            first = job.worker(0, table_bytes=64)
            model = self.model(first)
            backup = tf_dgc.callbacks.BackupState(folder, delete_checkpoint=False)
            self.fit(model, callbacks=[backup])
            model.save_weights(path)
            early = self.values(first, model)
            self.fit(model, initial_epoch=1, epochs=3)
            newest = self.values(first, model)
            job.kill(first)
            again = job.worker(0, table_bytes=64)
            other = self.model(again)
            with again.scope():
                other.optimizer.build(other.trainable_variables)
            if kind == "weights":
                other.load_weights(path)
            table = again.read_rows(other.layers[0].embeddings, 0, ROWS).numpy()
            self.check_alike([table], newest[:1])
            callbacks = [tf_dgc.callbacks.BackupState(folder)]
            self.fit(
                other,
                rows=8,
                epochs=2,
                callbacks=callbacks if kind != "weights" else [],
            )
            found = self.values(again, other)
            if kind == "weights":  # the others need no steps of this `fit` any more
                self.check_alike(found, newest)
                self.fit(other, rows=8, epochs=2)
                found = self.values(again, other)
            # Its steps were of the first rows; of squares of gradients it is the sum.
            self.check_alike(
                [part[8:] for part in found[:2]], [n[8:] for n in newest[:2]]
            )
            np.testing.assert_array_less(newest[3] - 1e-6, found[3])
            # In its second `fit` the one before it has trained; then nobody has.
            if kind != "weights":
                self.fit(other, rows=8)
            other.load_weights(path)
            table = again.read_rows(other.layers[0].embeddings, 0, ROWS).numpy()
            self.check_alike([table], early[:1])

    @pytest.mark.extended
    def test_what_others_load_is_left_alone(self) -> None:
        path = pathlib.Path(self.folder(), "early.weights.h5")
        with local_servers.Job(workers=2) as job:
            strategies = [job.worker(k, table_bytes=64) for k in range(2)]
            models = [self.model(strategy) for strategy in strategies]
            self.fit(models[0])
            models[0].save_weights(path)
            self.fit(models[1])
            newest = self.values(strategies[0], models[0])
            models[1].load_weights(path)
            self.check_alike(self.values(strategies[0], models[0]), newest)

    @pytest.mark.slow
    def test_nothing_that_was_pushed_is_kept_back_again(self) -> None:
        folder = self.folder()
        compression = tf_dgc.DGCConfig(
            sparsity=0.9, min_elements=1, sample_fraction=1.0
        )
        x, steps = np.zeros([80, 10], "float32"), 0
        with local_servers.Job(workers=1) as job:
            for epochs in (1, 2):  # ten steps each
                strategy = job.worker(0, compression=compression)
                model = ones(strategy)
                backup = tf_dgc.callbacks.BackupState(folder, delete_checkpoint=False)
                model.fit(x, batch_size=8, epochs=epochs, verbose=0, callbacks=[backup])
                steps += 10
                if epochs == 1:
                    model.fit(x, batch_size=8, verbose=0)
                    steps += 10
                (exchange,) = strategy._ledger.exchanges()
                pushed = exchange.pushed
                (kept,) = arena.unflatten(pushed.layout, pushed.residual.v)
                (twin,) = (
                    strategy.inner.twins.of(v.value) for v in model.trainable_variables
                )
                counted = twin.read_value().numpy() - kept.numpy()
                self.assertLessEqual(counted.max(), steps)
                self.assertGreater(counted.min(), 0)
                self.assertEqual(exchange.steps, steps if epochs == 1 else 20)
                job.kill(strategy)


class PassedOverTest(parameterized.TestCase):
    """A job that is started again, on new servers, behind the end of a `fit`."""

    @parameterized.parameters(False, True)
    @pytest.mark.extended
    def test_all_workers_have_the_weights_of_the_backup(self, stops: bool) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        x = np.ones([16, 4], "float32")

        def fit(strategy: Any) -> tuple[list[np.ndarray], list[int]]:
            model, epochs = linear(strategy), []
            noted = keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: epochs.append(epoch)
            )
            callbacks = [noted, tf_dgc.callbacks.BackupState(folder)]
            if stops:
                early = keras.callbacks.EarlyStopping("loss", 1e9, patience=0)
                callbacks.append(early)
            model.fit(x, x[:, :1], 8, epochs=3, verbose=0, callbacks=callbacks)
            model.evaluate(x, x[:, :1], verbose=0)
            return model.get_weights(), epochs

        with local_servers.Job(workers=2) as job:
            weights, epochs = fit(job.worker(0))
            self.assertLen(epochs, 2 if stops else 3)
            forget_owners()
        with local_servers.Job(workers=2) as job:
            for rank in range(2):  # whose models begin with other weights
                found, epochs = fit(job.worker(rank))
                self.assertEqual(epochs, [])
                for own, expected in zip(found, weights, strict=True):
                    np.testing.assert_array_equal(own, expected)
            forget_owners()


class SeveralFitsTest(parameterized.TestCase):
    """Who comes when others train another model by now."""

    KINDS: ClassVar[list[dict[str, Any]]] = [
        {},
        {"synchronous": True},
        {"local_steps": 3},
        {"local_steps": 3, "quorum": 1, "grace": 5.0},
        {"compression": tf_dgc.DGCConfig(sparsity=0.5, min_elements=1)},
        {"compression": tf_dgc.DGCConfig(min_elements=1), "local_steps": 3},
    ]

    def fits(
        self, strategy: Any, folder: str | None, last: int, eagerly: bool = False
    ) -> list[Any]:
        """Train two models; return weights and history after each `fit`."""
        x, found = np.ones([16, 4], "float32"), []
        for i, width in enumerate((2, 3)):
            with strategy.scope():
                layers = keras.layers.Dense(width), keras.layers.Dense(1)
                model = keras.Sequential([keras.Input([4]), *layers])
                optimizer = keras.optimizers.SGD(0.01)
                model.compile(optimizer, "mse", run_eagerly=eagerly, jit_compile=False)
            backup = tf_dgc.callbacks.BackupState(folder) if folder else None
            history = model.fit(
                *(x, x[:, :1], 8),
                epochs=2 if i == 0 else last,
                verbose=0,
                callbacks=[backup] if backup else [],
            )
            found.append((model.get_weights(), history.history))
        return found

    def check(self, own: Any, expected: Any) -> None:
        """Check that what was passed over is as another worker has left it."""
        for value, other in zip(own[0], expected[0], strict=True):
            np.testing.assert_array_equal(value, other)
        np.testing.assert_allclose(own[1]["loss"], expected[1]["loss"])

    @parameterized.product(settings=KINDS, with_backup=[False, True])
    @pytest.mark.few(3, 12)
    @pytest.mark.long
    def test_a_chief_that_comes_again_passes_over_what_it_has_ended(
        self, settings: dict[str, Any], with_backup: bool
    ) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        given = folder if with_backup else None
        with local_servers.Job(workers=1) as job:
            chief = job.worker(0, **settings)
            before = self.fits(chief, given, 1)
            job.kill(chief)
            forget_owners()
            after = self.fits(job.worker(0, **settings), given, 2)
            forget_owners()
        self.check(after[0], before[0])
        self.assertLen(after[1][1]["loss"], 2)
        self.assertFalse(np.array_equal(after[1][0][0], before[1][0][0]))

    @parameterized.parameters({}, {"local_steps": 3})
    @pytest.mark.few(1, 2)
    @pytest.mark.long
    def test_so_it_is_where_steps_run_eagerly(self, **settings: Any) -> None:
        with local_servers.Job(workers=1) as job:
            chief = job.worker(0, **settings)
            before = self.fits(chief, None, 1, eagerly=True)
            job.kill(chief)
            after = self.fits(job.worker(0, **settings), None, 2, eagerly=True)
        self.check(after[0], before[0])
        self.assertFalse(np.array_equal(after[1][0][0], before[1][0][0]))

    @parameterized.product(settings=[KINDS[0], KINDS[3]], with_backup=[False, True])
    @pytest.mark.few(2, 4)
    @pytest.mark.long
    def test_another_worker_passes_over_what_the_chief_has_ended(
        self, settings: dict[str, Any], with_backup: bool
    ) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        given = folder if with_backup else None
        with local_servers.Job(workers=2) as job:
            before = self.fits(job.worker(0, **settings), given, 2)
            with self.assertLogs("tf_dgc", "WARNING") as logs:
                after = self.fits(job.worker(1, **settings), given, 2)
            forget_owners()
        self.check(after[0], before[0])
        (line,) = [line for line in logs.output if "passes it over" in line]
        self.assertIn("Worker 1 came when `fit` number 1 of its script was over", line)


class RatesTest(parameterized.TestCase):
    """The chief's learning rate counts for all workers."""

    def rate_after(self, model: keras.Model, **options: Any) -> float:
        x = np.zeros([8, 4], "float32")
        model.fit(x, x[:, :1], batch_size=8, verbose=0, **options)
        return float(model.optimizer.learning_rate)

    @pytest.mark.extended
    def test_others_take_the_rate_of_the_chief_whatever_they_decide(self) -> None:
        with local_servers.Job(workers=2) as job:
            chief, model = (first := job.worker(0)), linear(first, 0.5)
            self.rate_after(model)
            other = linear(job.worker(1), 0.125)
            with self.assertLogs("tf_dgc", "WARNING") as logs:
                self.assertEqual(self.rate_after(other), 0.5)
            self.assertIn(
                "The learning rate of worker 1 is 0.125, that of worker 0, the chief, "
                "0.5: the chief's counts for all",
                logs.output[0],
            )
            model.optimizer.learning_rate = 0.25
            self.rate_after(model)
            decides = keras.callbacks.LearningRateScheduler(lambda epoch: 1.0)
            self.assertEqual(self.rate_after(other, callbacks=[decides]), 0.25)
            job.kill(chief)
            again = linear(job.worker(0), 0.5)
            self.assertEqual(self.rate_after(again), 0.25)

    @pytest.mark.long
    def test_other_settings_that_differ_are_named(self) -> None:
        with local_servers.Job(workers=2) as job:
            schedules = keras.optimizers.schedules
            for strategy, rate, clip in (
                (job.worker(0), schedules.ExponentialDecay(0.1, 10, 0.5), 1.0),
                (job.worker(1), schedules.ExponentialDecay(0.2, 10, 0.5), 2.0),
            ):
                model = linear(strategy)
                with strategy.scope():
                    optimizer = keras.optimizers.SGD(rate, clipnorm=clip)
                    model.compile(optimizer, "mse", jit_compile=False)
                if strategy.is_chief:
                    self.rate_after(model)
                    continue
                with self.assertRaisesRegex(
                    ValueError,
                    "All workers must have the same optimizers. Received: `clipnorm` "
                    "differs: 1.0 on rank 0; 2.0 on rank 1. `learning_rate` differs",
                ):
                    self.rate_after(model)


class EndTest(parameterized.TestCase):
    def test_who_is_started_again_is_taken_in(self) -> None:
        with local_servers.Job(workers=1) as job:
            job.end(job.worker(0))
            with self.assertRaisesRegex(ValueError, "The servers must be new"):
                job.worker(0)
            with mock.patch.dict(os.environ, {"TF_DGC_ATTEMPT": "1"}):
                job.end(job.worker(0))


class HeartbeatTest(parameterized.TestCase):
    def test_who_has_the_place_of_a_dead_worker_and_is_starting_is_not_waited_for(
        self,
    ) -> None:
        x = np.zeros([64, 4], "float32")
        waits = mock.Mock(side_effect=AssertionError("it waits"))
        settings: dict[str, Any] = {"max_staleness": 1, "liveness": 1.0}
        with local_servers.Job(workers=2) as job:
            strategies = [job.worker(k, **settings) for k in range(2)]
            models = [linear(strategy) for strategy in strategies]
            models[0].fit(x, x[:, :1], batch_size=32, verbose=0)
            with mock.patch.object(clocks.Clocks, "leave"):  # it is killed within `fit`
                models[1].fit(x, x[:, :1], batch_size=32, verbose=0)
            job.kill(strategies[1])
            job.worker(1, **settings)
            with mock.patch.object(clocks.Clocks, "_nap", waits):
                models[0].fit(x, x[:, :1], batch_size=4, verbose=0)

    @parameterized.parameters({"synchronous": True}, {"local_steps": 1})
    def test_steps_are_signs_of_life_as_well(self, **settings: Any) -> None:
        with local_servers.Job(workers=1) as job:
            strategy = job.worker(0, **settings)
            members, x = strategy._members, np.zeros([16, 4], "float32")
            model = linear(strategy)
            model.fit(x, x[:, :1], 8, verbose=0)
            members.pulse.end()  # as where its thread has no processor
            members.put(members.signs.seen, 1.0)
            self.assertFalse(members.living().numpy().any())
            model.fit(x, x[:, :1], 8, verbose=0)
            self.assertTrue(members.living().numpy().all())

    def test_who_is_not_heard_of_is_named_to_people_and_to_itself(self) -> None:
        with local_servers.Job(workers=2) as job:
            chief, other = (job.worker(k, liveness=60.0) for k in range(2))
            members = chief._members, other._members
            for each in members:
                each.pulse.end()
                each.beat()
            with self.assertLogs("tf_dgc") as logs:
                members[1].put(members[1].signs.seen, 1.0)
                members[0].beat()
                members[0].beat()
                members[1].signs._beaten -= 100.0
                members[1].beat()
                members[0].beat()
        told = [line.removeprefix("WARNING:tf_dgc:") for line in logs.output]
        self.assertLen(told, 3)
        for line, text in zip(
            told,
            [
                "Worker 1 was not heard of for 60 s",
                "This worker was not",
                "Worker 1 is",
            ],
            strict=True,
        ):
            self.assertStartsWith(line, text)

    def test_a_worker_whose_main_thread_hangs_counts_as_gone(self) -> None:
        with local_servers.Job(workers=2) as job:
            strategy = job.worker(0)
            members = strategy._members
            moves = members.meetings.moves
            members.pulse.end()

            def beats() -> bool:
                members.put(members.signs.seen, 0.0)
                self.assertTrue(members.beat())  # the place is its own
                return bool(members.living()[0])

            self.assertTrue(beats())
            moves._since -= 1e6  # as if for a long time nothing had moved
            with self.assertLogs("tf_dgc", "WARNING") as logs:
                self.assertFalse(beats())
            self.assertIn("This worker has taken no step for", logs.output[0])
            for move in (moves.wait, lambda: strategy.run(lambda: None)):
                moves._since -= 1e6
                move()
                self.assertTrue(beats())
                self.assertFalse(moves.idle() > 1e5)


if __name__ == "__main__":
    tf.test.main()
