"""Callbacks: figures in the logs, and jobs that continue."""

import csv
import pathlib
import shutil
import tempfile
import threading
import warnings
from typing import Any
from unittest import mock

import features
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, outcomes, run_workers

import tf_dgc
from tf_dgc import callbacks
from tf_dgc.exchanges import state_files
from tf_dgc.strategies import epoch_ends, owners, positions, within_epoch
from tf_dgc.transports.local import LocalTransport

FIGURES = {
    "sent_bytes",
    "avoided_bytes",
    "compression",
    "density",
    "residual_norm",
    "stale",
}


def model_of(strategy: Any) -> keras.Model:
    """Return a model whose layers have random numbers and statistics of their own."""
    extra = keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.2)
    with strategy.scope():
        model = features.mlp(*[layer() for layer in extra])
        rate = keras.optimizers.schedules.CosineDecay(0.05, 40)
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


def compressing() -> Any:
    config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, warmup_steps=6)
    return tf_dgc.DGCStrategy(config, transport="local")


def averaging() -> Any:
    config = tf_dgc.AveragingConfig(period=3)
    return tf_dgc.ParameterAveragingStrategy(config, transport="local")


def wait_for_writers() -> None:
    """Wait until what was begun is written, as a test that is "killed" goes on."""
    for thread in threading.enumerate():
        if "Writer._run" in thread.name or "(_run)" in thread.name:
            thread.join()


def end_process(well: bool) -> None:
    """Do to the folders of backups what the end of this process does."""
    for owner in owners._owners.values():
        if well:
            owner.end()
        owner.release()
    owners._owners.clear()


@pytest.mark.long
class CompressionStatsTest(tf.test.TestCase):
    def test_figures_of_each_epoch_come_into_history(self) -> None:
        strategy = compressing()
        model = model_of(strategy)
        stats = callbacks.CompressionStats()
        found = model.fit(features.batches(), epochs=4, verbose=0, callbacks=[stats])
        self.assertContainsSubset(FIGURES, found.history)
        total = strategy.stats(total=True)
        self.assertEqual(sum(found.history["sent_bytes"]), int(total.sent_bytes))
        for epoch in range(4):
            log = {name: found.history[name][epoch] for name in FIGURES}
            dense = log["sent_bytes"] + log["avoided_bytes"]
            self.assertEqual(dense, int(total.dense_bytes) / 4)
            self.assertAlmostEqual(log["compression"], dense / log["sent_bytes"])
            self.assertBetween(log["stale"], 0.0, 1.0)
        density = found.history["density"]
        self.assertGreater(density[0], density[-1])  # the first epoch warms up
        self.assertAlmostEqual(
            found.history["residual_norm"][-1], float(total.residual_norm)
        )
        # What was not sent once in an epoch of 4 steps is at least that much.
        self.assertGreater(found.history["stale"][-1], 0.3)

    @pytest.mark.slow
    def test_rounds_of_averaging_are_told(self) -> None:
        config = tf_dgc.AveragingConfig(period=3)
        strategy = tf_dgc.ParameterAveragingStrategy(config, transport="local")
        model = model_of(strategy)
        stats = callbacks.CompressionStats()
        found = model.fit(features.batches(), epochs=2, verbose=0, callbacks=[stats])
        # Four steps an epoch: one round after three, one at the end.
        self.assertEqual(found.history["rounds"], [2, 2])
        self.assertEqual(found.history["period"], [3, 3])
        self.assertEqual(found.history["distance"], [0.0, 0.0])  # alone
        self.assertContainsSubset(FIGURES - {"stale"}, found.history)

    @pytest.mark.slow
    def test_figures_by_tensor(self) -> None:
        strategy = compressing()
        model = model_of(strategy)
        stats = callbacks.CompressionStats(by_tensor=True)
        found = model.fit(features.batches(), epochs=4, verbose=0, callbacks=[stats])
        names = [name for name in found.history if name.startswith("density/")]
        self.assertLen(names, 2)
        for name, tensor in zip(names, strategy.tensor_stats(), strict=True):
            self.assertEqual(name, f"density/{tensor.name}")
            self.assertEqual(found.history[name][-1], tensor.density)
        slots = {128: 13, 16: 2}
        for tensor in strategy.tensor_stats():
            self.assertLessEqual(tensor.density, 0.3)
            self.assertIn(tensor.elements, slots)
        sent = sum(t.density * t.elements for t in strategy.tensor_stats())
        self.assertAllClose(sent, sum(slots.values()), 1e-6)

    @pytest.mark.extended
    def test_figures_come_into_files_and_the_progress_bar(self) -> None:
        path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "log"
        bar = self.enterContext(mock.patch("sys.stdout.write"))
        model_of(compressing()).fit(
            features.batches(),
            epochs=2,
            verbose=2,
            callbacks=[callbacks.CompressionStats(), keras.callbacks.CSVLogger(path)],
        )
        with path.open() as file:
            rows = list(csv.DictReader(file))
        self.assertContainsSubset(FIGURES, rows[0])
        self.assertGreater(float(rows[1]["compression"]), 1.0)
        written = "".join(call.args[0] for call in bar.call_args_list)
        self.assertIn("compression: ", written)

    def test_dense_training_avoids_nothing(self) -> None:
        strategy = tf_dgc.DenseStrategy(transport="local")
        stats = callbacks.CompressionStats(by_tensor=True)
        found = model_of(strategy).fit(
            features.batches(), epochs=1, verbose=0, callbacks=[stats]
        )
        self.assertEqual(found.history["avoided_bytes"], [0])
        self.assertEqual(found.history["compression"], [1.0])
        self.assertNotIn("stale", found.history)

    def test_a_model_without_a_strategy_is_refused(self) -> None:
        for callback in (
            callbacks.CompressionStats(),
            callbacks.chief_only(callbacks.CompressionStats()),
        ):
            model = features.mlp()
            model.compile("sgd", "mse")
            with self.assertRaisesRegex(ValueError, "compiled in the scope of a strat"):
                model.fit(features.batches(), verbose=0, callbacks=[callback])


class Killed(Exception):
    """Ends a training, as a signal would."""


@pytest.mark.long
class BackupStateTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.backup = self.folder / "backup"
        self.addCleanup(end_process, False)

    def train(self, make: Any, killed_at: int | None = None, **backup: Any) -> Any:
        """Train 5 epochs of 4 steps; return weights and the epochs that ran."""
        keras.utils.set_random_seed(5)
        model = model_of(make())
        self.steps = 0

        def count(batch: int, logs: Any = None) -> None:
            if self.steps == killed_at:
                raise Killed
            self.steps += 1

        epochs: list[int] = []
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_begin=count,
            on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
        )
        found = [watch, callbacks.BackupState(self.backup, **backup)]
        model.fit(
            features.batches(), epochs=5, verbose=0, shuffle=False, callbacks=found
        )
        return [v.numpy().tobytes() for v in model.variables], epochs

    @parameterized.parameters(
        (compressing, 1),
        (compressing, 12),
        (lambda: tf_dgc.DenseStrategy(transport="local"), 7),
    )
    @pytest.mark.slow
    def test_a_job_that_was_killed_ends_as_one_that_was_not(
        self, make: Any, killed_at: int
    ) -> None:
        expected, _ = self.train(make)
        self.assertTrue((self.backup / "epoch-00005").exists())
        end_process(True)
        self.assertFalse(self.backup.exists())
        with self.assertRaises(Killed):
            self.train(make, killed_at)
        found, epochs = self.train(make)
        self.assertEqual(found, expected)
        self.assertEqual(epochs, list(range(killed_at // 4, 5)))

    @parameterized.parameters((compressing, 7, 2), (averaging, 7, 2))
    @pytest.mark.few(0, 1)
    def test_a_job_that_was_killed_within_an_epoch_loses_few_steps(
        self, make: Any, killed_at: int, save_freq: int
    ) -> None:
        self.check_few_are_lost(make, killed_at, save_freq)

    @parameterized.parameters(
        (compressing, 3, 1),
        (compressing, 18, 3),
        (lambda: tf_dgc.DenseStrategy(transport="local"), 6, 1),
    )
    @pytest.mark.slow
    def test_so_it_does_at_other_steps(
        self, make: Any, killed_at: int, save_freq: int
    ) -> None:
        self.check_few_are_lost(make, killed_at, save_freq)

    def check_few_are_lost(self, make: Any, killed_at: int, save_freq: int) -> None:
        expected, _ = self.train(make, save_freq=save_freq)
        end_process(True)
        with self.assertRaises(Killed):
            self.train(make, killed_at, save_freq=save_freq)
        wait_for_writers()
        steps = self.steps
        found, _ = self.train(make, save_freq=save_freq)
        self.assertEqual(found, expected)
        self.assertLessEqual(steps + self.steps, 20 + save_freq)

    def test_metrics_of_an_epoch_are_continued(self) -> None:
        def job(folder: str, killed: bool) -> Any:
            keras.utils.set_random_seed(5)
            with compressing().scope():
                model = features.mlp(keras.layers.Dropout(0.5))
                model.compile("sgd", "mse", metrics=["mae"])

            def begin(batch: int, logs: Any) -> None:
                if killed and batch == 2:
                    raise Killed

            watch = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
            backup = callbacks.BackupState(self.folder / folder, save_freq=1)
            data = features.batches()
            settings = {"verbose": 0, "shuffle": False, "epochs": 2}
            return model.fit(data, callbacks=[watch, backup], **settings).history

        expected = job("a", False)
        with self.assertRaises(Killed):
            job("b", True)
        wait_for_writers()
        self.assertEqual(job("b", False), expected)

    @parameterized.named_parameters(
        ("shuffled", lambda d: d.shuffle(9, seed=3), True),
        ("repeated", lambda d: d.shuffle(9, seed=3).repeat(), True),
        ("interleaved", lambda d: d.interleave(tf.data.Dataset.from_tensors), True),
        ("from_python", None, False),
    )
    @pytest.mark.few(1)
    def test_data_are_taken_up_where_they_were(self, change: Any, told: bool) -> None:
        rows = np.arange(24, dtype="float32").reshape(24, 1)

        def generate() -> Any:
            for _ in range(9):  # more than is read ahead
                yield from rows

        def job(folder: str, killed_at: int | None) -> list[bytes]:
            keras.utils.set_random_seed(5)  # of what shuffles, too
            data = tf.data.Dataset.from_tensor_slices(rows)
            if change is None:
                spec = tf.TensorSpec([1], tf.float32)
                data = tf.data.Dataset.from_generator(generate, output_signature=spec)
            else:
                data = change(data)
            data = data.batch(4).map(lambda x: (x, x)).prefetch(2)
            with tf_dgc.DenseStrategy(transport="local").scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(1e-3), "mse")

            def begin(batch: int, logs: Any) -> None:
                if batch == killed_at:
                    raise Killed

            watch = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
            backup = callbacks.BackupState(self.folder / folder, save_freq=2)
            found = {"callbacks": [watch, backup], "verbose": 0}
            model.fit(data, epochs=1, steps_per_epoch=6, **found)
            return [v.numpy().tobytes() for v in model.variables]

        expected = job("a", None)
        with self.assertRaises(Killed):
            job("b", 5)
        wait_for_writers()
        (place,) = (self.folder / "b").glob("*step-00000004")
        self.assertEqual(bool(list(place.glob("*.data.index"))), told)
        self.assertEqual(job("b", None), expected)

    @pytest.mark.slow
    def test_a_damaged_place_in_the_data_is_named(self) -> None:
        with self.assertRaises(Killed):
            self.train(compressing, 3, save_freq=1)
        wait_for_writers()
        (place,) = self.backup.glob("*step-00000003/rank-00000.data.index")
        place.write_bytes(b"rubbish")
        with self.assertRaisesRegex(ValueError, "data: damaged, or of other data"):
            self.train(compressing, save_freq=1)

    def test_data_that_end_before_the_place_of_a_backup_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "after 3 batches.* Received: 2 batch"):
            positions.read_again(iter([1, 2]), 3)

    @pytest.mark.slow
    def test_what_is_not_marked_as_whole_is_not_used(self) -> None:
        expected, _ = self.train(compressing, save_freq=1)
        end_process(True)
        with self.assertRaises(Killed):
            self.train(compressing, 3, save_freq=1)
        wait_for_writers()
        last = self.backup / "epoch-00000-step-00000003"
        (last / "rank-00000.whole").write_text("1")  # of another run
        before = self.backup / "epoch-00000-step-00000002"
        self.assertTrue(before.exists())
        found, _ = self.train(compressing, save_freq=1)
        self.assertEqual((found, self.steps), (expected, 18))

    @pytest.mark.slow
    def test_few_backups_are_kept(self) -> None:
        with self.assertRaises(Killed):
            self.train(compressing, 7, save_freq=1)
        wait_for_writers()
        names = sorted(path.name for path in self.backup.glob("epoch-*"))
        within = [f"epoch-00001-step-{step:08d}" for step in (1, 2, 3)]
        self.assertEqual(names, ["epoch-00001", *within])

    @pytest.mark.extended
    def test_a_disk_that_is_full_is_told_at_the_next_backup(self) -> None:
        error = OSError(28, "No space left on device")
        with (
            mock.patch.object(state_files, "prepare", side_effect=error),
            self.assertRaisesRegex(OSError, "No space left"),
        ):
            self.train(compressing, save_freq=1)

    @pytest.mark.slow
    def test_the_clock_decides_when(self) -> None:
        with mock.patch.object(within_epoch, "_ASKED", 2):
            for seconds, expected in (
                (1e-9, {"epoch-00000-step-00000002"}),
                (1e6, set()),
            ):
                with self.assertRaises(Killed):
                    self.train(compressing, 3, save_seconds=seconds)
                wait_for_writers()
                found = {path.name for path in self.backup.glob("epoch-*")}
                self.assertEqual(found, expected)
                shutil.rmtree(self.backup, ignore_errors=True)

    def test_intervals_are_checked(self) -> None:
        for bad in (0, -1, 1.5, True, "1"):
            with self.assertRaisesRegex(ValueError, "`save_freq` must be a number of"):
                callbacks.BackupState("x", save_freq=bad)
        for bad in (0, -1, float("nan"), float("inf"), "1"):
            with self.assertRaisesRegex(ValueError, "`save_seconds` must be a pos"):
                callbacks.BackupState("x", save_seconds=bad)
        with self.assertRaisesRegex(ValueError, "Only one of `save_freq` and"):
            callbacks.BackupState("x", save_freq=1, save_seconds=1)

    @pytest.mark.slow
    def test_what_other_callbacks_remember_is_continued(self) -> None:
        def job(folder: str, killed: bool) -> Any:
            keras.utils.set_random_seed(5)
            strategy = tf_dgc.DenseStrategy(transport="local")
            with strategy.scope():
                model = features.mlp()
                model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
            epochs = []

            def begin(epoch: int, logs: Any) -> None:
                if killed and epoch == 4:
                    raise Killed
                epochs.append(epoch)

            stopping = keras.callbacks.EarlyStopping(
                "loss", min_delta=0.1, patience=5, restore_best_weights=True
            )
            plateau = keras.callbacks.ReduceLROnPlateau(
                "loss", factor=0.5, patience=3, min_delta=0.1
            )
            found = [
                callbacks.BackupState(self.folder / folder),  # and acts last
                plateau,
                keras.callbacks.LambdaCallback(on_epoch_begin=begin),
                stopping,
            ]
            data = features.batches()
            model.fit(data, epochs=20, verbose=0, shuffle=False, callbacks=found)
            rate = float(model.optimizer.learning_rate)
            weights = [array.tobytes() for array in model.get_weights()]
            return rate, weights, stopping.best_epoch, epochs

        *expected, epochs = job("a", False)
        self.assertLess(expected[0], 0.05)  # the rate was reduced,
        self.assertLess(len(epochs), 20)  # it stopped early,
        self.assertLess(expected[2], 4)  # and the best was before the kill
        with self.assertRaises(Killed):
            job("b", True)
        *found, again = job("b", False)
        self.assertEqual(found, expected)
        self.assertEqual(again, epochs[4:])

    @parameterized.parameters(True, False)
    @pytest.mark.few(0, 1)
    def test_one_that_dies_in_validation_decides_as_it_would_have(
        self, known: bool
    ) -> None:
        def job(folder: str, killed: bool) -> Any:
            keras.utils.set_random_seed(5)
            with tf_dgc.DenseStrategy(transport="local").scope():
                model = features.mlp()
                model.compile(keras.optimizers.SGD(0.05), "mse")
            validations = iter(range(9))

            def maybe(logs: Any) -> None:
                if killed and next(validations) == 1:
                    raise Killed

            watch = keras.callbacks.Callback()
            watch.on_test_begin = maybe  # type: ignore[method-assign]
            plateau = keras.callbacks.ReduceLROnPlateau(
                "loss", factor=0.5, patience=1, min_delta=1.0
            )
            backup = callbacks.BackupState(self.folder / folder, save_freq=2)
            data = features.batches()
            if not known:
                data = data.filter(lambda *row: True)
                warnings.filterwarnings("ignore", "Your input ran out of data")
            history = model.fit(
                data,
                epochs=4,
                verbose=0,
                shuffle=False,
                validation_data=features.batches(32, 16),
                callbacks=[watch, plateau, backup],
            )
            weights = [array.tobytes() for array in model.get_weights()]
            return weights, history.history, history.epoch

        self.enterContext(warnings.catch_warnings())
        expected = job("a", False)
        self.assertLess(expected[1]["learning_rate"][-1], 0.05)
        with self.assertRaises(Killed):
            job("b", True)
        wait_for_writers()
        self.assertEqual(job("b", False), expected)

    @pytest.mark.slow
    def test_each_fit_of_a_script_goes_on_from_its_own_backup(self) -> None:
        def script(folder: str, killed: bool, first: bool = True) -> Any:
            keras.utils.set_random_seed(5)
            strategy = tf_dgc.DenseStrategy(transport="local")
            with strategy.scope():
                model = features.mlp()
                model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
            found = []
            begun: list[int] = []

            def begin(epoch: int, logs: Any) -> None:
                begun.append(epoch)
                if killed and len(begun) == 5:
                    raise Killed

            watch = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
            stopping = keras.callbacks.EarlyStopping("loss", min_delta=9, patience=1)
            for epochs, more in ((9, [stopping]), (4, [])):
                listed = [watch, *more, callbacks.BackupState(self.folder / folder)]
                history = model.fit(
                    features.batches(),
                    epochs=epochs,
                    verbose=0,
                    shuffle=False,
                    callbacks=listed,
                )
                weights = [array.tobytes() for array in model.get_weights()]
                found.append((weights, history.history, history.epoch))
            return found, begun

        expected, begun = script("a", False)
        self.assertEqual(begun, [0, 1, 0, 1, 2, 3])  # the first stops early
        with self.assertRaises(Killed):
            script("b", True)
        end_process(False)
        self.assertEqual(script("b", False), (expected, [2, 3]))

    def test_slots_of_an_optimizer_that_only_the_step_knows_are_continued(
        self,
    ) -> None:
        class Own(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.net = features.mlp()
                self.own = {"sgd": keras.optimizers.SGD(0.05, momentum=0.9)}

            def call(self, x: Any) -> Any:
                return self.net(x)

            def train_step(self, data: Any) -> dict[str, Any]:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
                variables = self.trainable_variables
                self.own["sgd"].apply(tape.gradient(loss, variables), variables)
                return {"loss": loss}

        def job(folder: str, killed: bool) -> list[bytes]:
            keras.utils.set_random_seed(5)
            with tf_dgc.DenseStrategy(transport="local").scope():
                model = Own()
                model.build((None, 8))
                model.compile()

            def begin(epoch: int, logs: Any) -> None:
                if killed and epoch == 2:
                    raise Killed

            watch = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
            found = [watch, callbacks.BackupState(self.folder / folder)]
            data = features.batches()
            model.fit(data, epochs=4, verbose=0, shuffle=False, callbacks=found)
            return [array.tobytes() for array in model.get_weights()]

        expected = job("a", False)
        with self.assertRaises(Killed):
            job("b", True)
        self.assertEqual(job("b", False), expected)

    @pytest.mark.slow
    def test_may_be_killed_again_and_again(self) -> None:
        expected, _ = self.train(compressing)
        end_process(True)
        for killed_at in (6, 2, 5):
            with self.assertRaises(Killed):
                self.train(compressing, killed_at)
        found, epochs = self.train(compressing)
        self.assertEqual(found, expected)
        self.assertEqual(epochs, [2, 3, 4])

    @pytest.mark.slow
    def test_a_backup_that_is_not_whole_is_not_used(self) -> None:
        with self.assertRaises(Killed):
            self.train(compressing, 9)
        broken = self.backup / "epoch-00003"
        broken.mkdir()
        for file in (self.backup / "epoch-00002").iterdir():
            if file.name != "manifest.json":  # the last to be written
                (broken / file.name).write_bytes(b"rubbish")
        _, epochs = self.train(compressing)
        self.assertEqual(epochs, [2, 3, 4])

    @pytest.mark.slow
    def test_a_second_fit_begins_at_its_own_epoch(self) -> None:
        with self.assertRaises(Killed):
            self.train(compressing, 9)
        model = model_of(compressing())
        callback = [callbacks.BackupState(self.backup)]
        settings = {"verbose": 0, "shuffle": False, "callbacks": callback}
        first = model.fit(features.batches(), epochs=4, **settings)
        second = model.fit(features.batches(), epochs=2, **settings)
        self.assertEqual((first.epoch, second.epoch), ([0, 1, 2, 3], [0, 1]))

    @pytest.mark.slow
    def test_other_optimizers_have_no_part_in_it(self) -> None:
        def two_phases(folder: str, first_epochs: int, steps: int | None) -> Any:
            keras.utils.set_random_seed(5)
            strategy = compressing()
            model = model_of(strategy)
            one = model.optimizer  # held, beyond its phase
            data = features.batches()
            model.fit(data, epochs=first_epochs, verbose=0, shuffle=False)
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
            count = iter(range(100))

            def maybe(batch: int, logs: Any = None) -> None:
                if next(count) == steps:
                    raise Killed

            watch = keras.callbacks.LambdaCallback(on_train_batch_begin=maybe)
            found = [watch, callbacks.BackupState(self.folder / folder)]
            model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=found)
            del one
            return [v.numpy().tobytes() for v in model.variables]

        expected = two_phases("a", 2, None)
        with self.assertRaises(Killed):
            two_phases("b", 2, 6)
        self.assertEqual(two_phases("b", 0, None), expected)

    @pytest.mark.slow
    def test_backups_stay_where_that_is_asked_for(self) -> None:
        self.train(compressing, delete_checkpoint=False)
        end_process(True)
        names = [path.name for path in self.backup.glob("epoch-*")]
        self.assertEqual(names, ["epoch-00005"])
        _, epochs = self.train(compressing)
        self.assertEqual(epochs, [])

    def test_workers_of_which_some_have_no_backup_stop(self) -> None:
        def work(transport: Loopback) -> int | None:
            folder = self.folder / str(transport.rank)
            return epoch_ends.last_common(folder, transport)

        self.assertEqual(run_workers(3, work), [None] * 3)
        for rank, epochs in enumerate([[1, 2], [2, 3], [2]]):
            for outcome in outcomes(3, work) if rank else []:
                self.assertRegex(str(outcome), r"no backup on ranks \[.*2\]. Copy it")
            for epoch in epochs:
                whole = self.folder / str(rank) / f"epoch-0000{epoch}"
                whole.mkdir(parents=True)
                (whole / "manifest.json").touch()
        self.assertEqual(run_workers(3, work), [(2, 0)] * 3)
        (whole / "manifest.json").unlink()  # begun there, and not whole
        self.assertEqual(run_workers(3, work), [None] * 3)

    def test_the_folder_has_a_name(self) -> None:
        with self.assertRaisesRegex(ValueError, "`backup_dir` must be the path of a"):
            callbacks.BackupState("")

    @pytest.mark.slow
    def test_a_backup_of_another_model_is_refused(self) -> None:
        with self.assertRaises(Killed):
            self.train(compressing, 9)
        strategy = compressing()
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        with self.assertRaises(ValueError):
            model.fit(
                features.batches(),
                verbose=0,
                callbacks=[callbacks.BackupState(self.backup)],
            )

    def fit_small(self, units: int, rows: int, optimizer: Any = "sgd") -> None:
        with tf_dgc.DenseStrategy(transport="local").scope():
            hidden = keras.layers.Dense(units, name="hidden")
            layers = [keras.Input((2,)), hidden, keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.get(optimizer), "mse")
        data = tf.data.Dataset.from_tensors((tf.ones([3, 2]), tf.ones([3, 1])))
        backup = callbacks.BackupState(self.backup)
        model.fit(data.repeat(rows), epochs=2, verbose=0, callbacks=[backup])
        end_process(False)

    @pytest.mark.extended
    def test_a_fit_that_is_passed_over_is_told(self) -> None:
        with self.assertNoLogs("tf_dgc", "WARNING"):
            self.fit_small(4, 3)
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            self.fit_small(4, 3)
        (told,) = logs.output
        self.assertIn("had ended in an earlier run of the job and is passed over", told)
        self.assertIn(f"To train anew, remove {self.backup}", told)
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            self.fit_small(4, 2)
        self.assertIn("epochs have 3 steps, those of this `fit` 2", logs.output[0])

    def test_data_of_other_rows_in_as_many_steps_are_told(self) -> None:
        def fit(rows: int, as_dataset: bool) -> None:
            with tf_dgc.DenseStrategy(transport="local").scope():
                model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            data: Any = np.ones([rows, 2], "float32"), np.ones([rows, 1], "float32")
            if as_dataset:
                batches = tf.data.Dataset.from_tensor_slices(data).shuffle(9).batch(4)
                data = (batches,)
            folder = f"{self.backup}/{as_dataset}"
            options = {} if as_dataset else {"batch_size": 4}
            backup = callbacks.BackupState(folder, delete_checkpoint=False)
            model.fit(*data, verbose=0, callbacks=[backup], **options)

        for as_dataset in (False, True):
            fit(15, as_dataset)
            with self.assertLogs("tf_dgc", "WARNING") as logs:
                fit(15, as_dataset)
            self.assertNotIn("rows", "".join(logs.output))
            with self.assertLogs("tf_dgc", "WARNING") as logs:
                fit(13, as_dataset)
            self.assertIn("they have [13] rows, and had [15]", "".join(logs.output))

    def test_a_variable_of_another_shape_is_named_without_its_values(self) -> None:
        self.fit_small(4, 3)
        with self.assertRaises(ValueError) as caught:
            self.fit_small(5, 3)
        told = str(caught.exception)
        self.assertIn("hidden/kernel' has shape (2, 4) in it, and (2, 5) here", told)
        self.assertNotIn("[", told)
        self.assertTrue(caught.exception.__suppress_context__)

    def test_a_backup_of_another_optimizer_is_refused(self) -> None:
        self.fit_small(4, 3)
        message = r"another optimizer: \['SGD'\] in it, and \['Adam'\] here"
        with self.assertRaisesRegex(ValueError, message):
            self.fit_small(4, 3, "adam")
        message = r"another optimizer: '\w+' has 2 variables in it, and 6 here"
        with self.assertRaisesRegex(ValueError, message):
            config = {"name": "SGD", "learning_rate": 0.1, "momentum": 0.9}
            self.fit_small(4, 3, {"class_name": "SGD", "config": config})


@pytest.mark.long
class ChiefOnlyTest(tf.test.TestCase):
    def test_runs_on_the_chief_and_nowhere_else(self) -> None:
        for rank, expected in ((0, 1), (1, 0)):
            transport = LocalTransport()
            transport.rank = rank
            strategy = tf_dgc.DenseStrategy(transport=transport)
            seen: list[int] = []
            inner = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, seen=seen: seen.append(epoch)
            )
            model = model_of(strategy)
            model.fit(
                features.batches(), verbose=0, callbacks=[callbacks.chief_only(inner)]
            )
            self.assertLen(seen, expected)

    def test_passes_on_every_hook(self) -> None:
        hooks = {n for n in dir(keras.callbacks.Callback) if n.startswith("on_")}
        inner = mock.create_autospec(keras.callbacks.Callback, instance=True)
        model = model_of(compressing())
        chief = [callbacks.chief_only(inner)]
        data = features.batches()
        model.fit(data, verbose=0, validation_data=data, callbacks=chief)
        model.predict(np.ones([4, 8]), verbose=0, callbacks=chief)
        called = {name for name in hooks if getattr(inner, name).called}
        unused = {"on_batch_begin", "on_batch_end"}  # old names of others
        self.assertEqual(called, hooks - unused)
        inner.set_params.assert_called()
        inner.set_model.assert_called_with(model)


if __name__ == "__main__":
    tf.test.main()
