"""Callbacks: figures in the logs, and jobs that continue."""

import csv
import pathlib
import tempfile
import types
from typing import Any
from unittest import mock

import features
import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, outcomes, run_workers

import tf_dgc
from tf_dgc import callbacks
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


class BackupStateTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.backup = self.folder / "backup"

    def train(self, make: Any, killed_at: int | None = None, **backup: Any) -> Any:
        """Train 5 epochs of 4 steps; return weights and the epochs that ran."""
        keras.utils.set_random_seed(5)
        model = model_of(make())
        step = iter(range(10**6))

        def count(batch: int, logs: Any = None) -> None:
            if next(step) == killed_at:
                raise Killed

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
    def test_a_job_that_was_killed_ends_as_one_that_was_not(
        self, make: Any, killed_at: int
    ) -> None:
        expected, _ = self.train(make)
        self.assertFalse(self.backup.exists())
        with self.assertRaises(Killed):
            self.train(make, killed_at)
        found, epochs = self.train(make)
        self.assertEqual(found, expected)
        self.assertEqual(epochs, list(range(killed_at // 4, 5)))

    def test_may_be_killed_again_and_again(self) -> None:
        expected, _ = self.train(compressing)
        for killed_at in (6, 2, 5):
            with self.assertRaises(Killed):
                self.train(compressing, killed_at)
        found, epochs = self.train(compressing)
        self.assertEqual(found, expected)
        self.assertEqual(epochs, [2, 3, 4])

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

    def test_a_second_fit_begins_at_its_own_epoch(self) -> None:
        with self.assertRaises(Killed):
            self.train(compressing, 9)
        model = model_of(compressing())
        callback = [callbacks.BackupState(self.backup)]
        settings = {"verbose": 0, "shuffle": False, "callbacks": callback}
        first = model.fit(features.batches(), epochs=4, **settings)
        second = model.fit(features.batches(), epochs=2, **settings)
        self.assertEqual((first.epoch, second.epoch), ([2, 3], [0, 1]))

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

    def test_backups_stay_where_that_is_asked_for(self) -> None:
        self.train(compressing, delete_checkpoint=False)
        names = [path.name for path in self.backup.iterdir()]
        self.assertEqual(names, ["epoch-00005"])
        _, epochs = self.train(compressing)
        self.assertEqual(epochs, [])

    def test_workers_of_which_some_have_no_backup_stop(self) -> None:
        def work(transport: Loopback) -> int | None:
            strategy = types.SimpleNamespace(transport=transport)
            callback = callbacks.BackupState(self.folder / str(transport.rank))
            return callback._last_common(strategy)

        self.assertEqual(run_workers(3, work), [None] * 3)
        for rank, epochs in enumerate([[1, 2], [2, 3], [2]]):
            for outcome in outcomes(3, work) if rank else []:
                self.assertRegex(str(outcome), r"no backup on ranks \[.*2\]. Copy it")
            for epoch in epochs:
                whole = self.folder / str(rank) / f"epoch-0000{epoch}"
                whole.mkdir(parents=True)
                (whole / "manifest.json").touch()
        self.assertEqual(run_workers(3, work), [2] * 3)
        (whole / "manifest.json").unlink()  # begun there, and not whole
        self.assertEqual(run_workers(3, work), [None] * 3)

    def test_the_folder_has_a_name(self) -> None:
        with self.assertRaisesRegex(ValueError, "`backup_dir` must be the path of a"):
            callbacks.BackupState("")

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
