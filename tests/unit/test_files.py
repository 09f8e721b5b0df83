"""Files of scripts that run on each of several workers, here threads."""

import csv
import errno
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import features
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, run_workers

import tf_dgc
from tf_dgc.callbacks import chief_only
from tf_dgc.strategies import files
from tf_dgc.transports.local import LocalTransport


class Killed(Exception):
    """Ends a training, as a signal would."""


class Slow(keras.callbacks.ModelCheckpoint):
    """As a user derives it; and as on a slow disk, for a large model."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.model.distribute_strategy.is_chief:
            time.sleep(0.5)
        super().on_epoch_end(epoch, logs)


def model_of(transport: Any) -> keras.Model:
    strategy = tf_dgc.DenseStrategy(transport=transport)
    with strategy.scope():
        model = features.mlp(keras.layers.BatchNormalization())
        rate = keras.optimizers.schedules.CosineDecay(0.05, 40)
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", run_eagerly=True)
    random = np.random.default_rng(3)  # seeds of Keras are those of all threads
    for variable in model.trainable_variables:
        variable.assign(random.normal(size=variable.shape, scale=0.3))
    return model


def fit(model: keras.Model, *callbacks: Any, epochs: int = 2) -> Any:
    data = features.batches(32, 16)
    listed = list(callbacks)
    return model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=listed)


@pytest.mark.long
class CallbackTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def own(self, rank: int) -> pathlib.Path:
        """Return a folder of a worker, as on a disk of its own."""
        found = self.folder / str(rank)
        found.mkdir(exist_ok=True)
        return found

    def written(self, rank: int) -> set[str]:
        own = self.own(rank)
        return {str(p.relative_to(own)) for p in own.rglob("*") if p.is_file()}

    @pytest.mark.extended
    def test_those_that_write_do_so_on_the_chief_alone(self) -> None:
        def work(transport: Loopback) -> Any:
            own = self.own(transport.rank)
            best = keras.callbacks.ModelCheckpoint(
                own / "new" / "best.keras", monitor="loss", save_best_only=True
            )
            history = fit(
                model_of(transport),
                best,
                keras.callbacks.CSVLogger(own / "log.csv"),
                keras.callbacks.BackupAndRestore(
                    own / "backup", delete_checkpoint=False
                ),
                keras.callbacks.ModelCheckpoint(
                    own / "{batch}.weights.h5", save_weights_only=True, save_freq=2
                ),
            )
            return history.history, best.best

        (history, best), elsewhere = run_workers(2, work)
        self.assertEqual(elsewhere, (history, best))
        self.assertEqual(best, min(history["loss"]))
        names = {"new/best.keras", "log.csv", "backup/latest.weights.h5"}
        self.assertContainsSubset({*names, "2.weights.h5"}, self.written(0))
        self.assertEqual(self.written(1), set())
        with (self.own(0) / "log.csv").open() as file:
            self.assertLen(list(csv.DictReader(file)), 2)

    def test_a_board_is_written_on_the_chief_alone(self) -> None:
        class Noting(keras.callbacks.TensorBoard):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                super().on_epoch_end(epoch, logs)
                with self._train_writer.as_default():
                    tf.summary.write("mine", 1.0, step=epoch)

        for rank in (0, 1):
            transport = LocalTransport()
            transport.rank = rank
            model = model_of(transport)
            board = Noting(self.own(rank) / "board", histogram_freq=rank)
            board.set_model(model)
            board.on_train_begin()
            board.on_epoch_end(0, {"loss": 1.0} if rank else {})
            board.on_train_end()
            written = any("tfevents" in name for name in self.written(rank))
            self.assertEqual(written, rank == 0)
            self.assertTrue(board.write_graph)

    @parameterized.named_parameters(
        ("on_all", lambda slow, chief: [slow]),
        ("limited", lambda slow, chief: [chief_only(slow)]),
        ("given_to_the_chief", lambda slow, chief: [slow] if chief else []),
    )
    def test_nobody_goes_on_before_it_is_written(
        self, callbacks: Callable[[Any, bool], list[Any]]
    ) -> None:
        path = self.folder / "best.keras"

        def work(transport: Loopback) -> Any:
            model = model_of(transport)
            seen = []
            look = keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: seen.append(path.exists())
            )
            slow = Slow(path, monitor="loss")
            fit(model, look, *callbacks(slow, model.distribute_strategy.is_chief))
            loaded = keras.models.load_model(path, compile=False)
            self.assertAllEqual(loaded.get_weights()[0], model.get_weights()[0])
            return seen

        self.assertEqual(run_workers(2, work), [[False, True]] * 2)

    @pytest.mark.extended
    def test_a_later_callback_finds_what_one_before_it_has_written(self) -> None:
        def work(transport: Loopback) -> list[bool]:
            seen = []

            def look(epoch: int, logs: Any) -> None:
                seen.append((self.folder / f"{epoch + 1}.keras").exists())

            fit(
                model_of(transport),
                Slow(self.folder / "{epoch}.keras"),
                keras.callbacks.LambdaCallback(on_epoch_end=look),
            )
            return seen

        self.assertEqual(run_workers(2, work), [[True, True]] * 2)

    @parameterized.named_parameters(
        ("of_their_own", lambda backup, chief: [backup]),
        ("limited", lambda backup, chief: [chief_only(backup)]),
        ("given_to_the_chief", lambda backup, chief: [backup] if chief else []),
    )
    @pytest.mark.few(0, 1)
    def test_all_go_on_from_what_the_chief_has_backed_up(
        self, callbacks: Callable[[Any, bool], list[Any]]
    ) -> None:
        def job(transport: Loopback, folder: str, killed_at: int | None) -> Any:
            model = model_of(transport)
            strategy = model.distribute_strategy
            epochs: list[int] = []

            def begin(epoch: int, logs: Any) -> None:
                if epoch == killed_at:
                    raise Killed
                epochs.append(epoch)

            watch = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
            place = self.own(transport.rank) / folder  # no disk is shared
            backup = keras.callbacks.BackupAndRestore(place)
            listed = callbacks(backup, strategy.is_chief)
            try:
                fit(model, watch, *listed, epochs=4)
            except Killed:
                pass
            optimizer = [np.array(v) for v in model.optimizer.variables]
            return epochs, [*model.get_weights()[:2], *optimizer]

        expected = run_workers(2, lambda transport: job(transport, "a", None))
        run_workers(2, lambda transport: job(transport, "b", 2))
        found = run_workers(2, lambda transport: job(transport, "b", None))
        for (_, one), (epochs, two) in zip(expected, found, strict=True):
            self.assertEqual(epochs, [2, 3])
            for array, other in zip(one, two, strict=True):
                self.assertAllEqual(array, other)
        self.assertEqual(self.written(1), set())


@pytest.mark.long
class ModelTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    @parameterized.parameters(
        ("a.keras", "method"),
        ("a.keras", "function"),
        ("a.keras", "of models"),
        ("a.weights.h5", "weights"),
    )
    @pytest.mark.few(1)
    def test_all_workers_may_save_to_one_path_and_read_it_at_once(
        self, name: str, how: str
    ) -> None:
        path = self.folder / name

        def work(transport: Loopback) -> None:
            model = model_of(transport)
            for _ in range(8):
                if name.endswith("keras"):
                    if how == "method":
                        model.save(path)
                    elif how == "function":
                        keras.saving.save_model(model=model, filepath=path)
                    else:
                        keras.models.save_model(model, path, overwrite=True)
                    keras.models.load_model(path, compile=False)
                else:
                    model.save_weights(path)
                    model.load_weights(path)

        run_workers(3, work)
        self.assertEqual([each.name for each in self.folder.iterdir()], [name])

    def test_a_chief_that_saves_alone_waits_for_nobody(self) -> None:
        def work(transport: Loopback) -> int:
            model = model_of(transport)
            before = len(transport.sent)
            if model.distribute_strategy.is_chief:
                model.save(self.folder / "a.keras")
            return len(transport.sent) - before

        self.assertEqual(run_workers(2, work), [0, 0])
        self.assertTrue((self.folder / "a.keras").exists())

    def test_a_file_is_replaced_whole_or_not_at_all(self) -> None:
        path, link = self.folder / "a.keras", self.folder / "link.keras"
        path.write_text("old")
        path.chmod(0o640)
        link.symlink_to(path)
        with self.assertRaises(Killed), files._replaced(path, True) as temporary:
            temporary.write_text("half")
            raise Killed
        self.assertEqual(path.read_text(), "old")
        run_workers(2, lambda transport: model_of(transport).save(link))
        self.assertTrue(link.is_symlink())
        keras.models.load_model(path, compile=False)
        self.assertEqual(path.stat().st_mode & 0o777, 0o640)
        self.assertLen(list(self.folder.iterdir()), 2)

    def test_a_disk_that_is_full_is_told_with_the_file(self) -> None:
        path = self.folder / "a.keras"
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (
            self.assertRaisesRegex(OSError, f"No space left on device: '{path}'"),
            files._replaced(path, True),
        ):
            raise full

    @parameterized.parameters((True, "own"), (False, "of another"))
    @pytest.mark.few(1)
    def test_what_the_chief_writes_stays(self, chief: bool, expected: str) -> None:
        path = self.folder / "a.keras"
        with files._replaced(path, chief) as temporary:
            temporary.write_text("own")
            path.write_text("of another")
        self.assertEqual(path.read_text(), expected)

    def test_what_is_no_single_file_of_this_disk_is_left_to_keras(self) -> None:
        for filepath in ("gs://bucket/a.keras", self.folder, 3, "a.weights.json"):
            self.assertIsNone(files._plain_file(filepath, overwrite=True))
        path = self.folder / "a.keras"
        self.assertEqual(files._plain_file(path, overwrite=False), path)
        path.touch()
        self.assertIsNone(files._plain_file(path, overwrite=False))

    def test_a_barrier_is_passed_when_all_have_come(self) -> None:
        come = threading.Event()

        def work(transport: Loopback) -> bool:
            strategy = tf_dgc.DenseStrategy(transport=transport)
            if strategy.is_chief:
                time.sleep(0.3)
                come.set()
            strategy.barrier()
            return come.is_set()

        self.assertEqual(run_workers(3, work), [True] * 3)


if __name__ == "__main__":
    tf.test.main()
