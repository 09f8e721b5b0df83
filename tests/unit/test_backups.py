"""Backups: a crash at every operation on files, owners of folders, calls of `fit`."""

import contextlib
import errno
import functools
import io
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import launch
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, outcomes, run_workers

import tf_dgc
from tf_dgc.exchanges import state_files
from tf_dgc.strategies import calls, owners
from tf_dgc.strategies.calls import Fit
from tf_dgc.transports.local import LocalTransport

EPOCHS, STEPS = 2, 2


class Crash(BaseException):
    """The end of a process: no handler of errors runs in it."""


class Disk:
    """Counts operations on files, and lets one fail, and those after it.

    A file that was to be brought to the disk by that operation is cut short.
    """

    names = (
        (os, "mkdir unlink rmdir replace rename ftruncate pwrite fsync open"),
        (io, "open"),
    )

    def __init__(self, fails_at: int, error: Callable[[], BaseException]) -> None:
        self.count, self.failed = 0, False
        self._fails_at, self._error = fails_at, error

    def _call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        reads = name == "open" and not _writes(args, kwargs)
        removes = name in ("unlink", "rmdir")
        error = self._error()
        if not reads and not (removes and isinstance(error, OSError)):
            self.count += 1
            if self.count >= self._fails_at:
                if name == "fsync" and not self.failed:
                    with contextlib.suppress(OSError):  # opened for reading only
                        os.truncate(args[0], os.fstat(args[0]).st_size // 2)
                self.failed = True
                raise error
        # Nothing here outlives the machine.
        return None if name == "fsync" else original(*args, **kwargs)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, names in self.names:
                for name in names.split():
                    original = getattr(module, name)

                    def call(*args: Any, original: Any = original, **kw: Any) -> Any:
                        return self._call(original, *args, **kw)

                    stack.enter_context(mock.patch.object(module, name, call))
            yield


def _writes(args: Any, kwargs: Any) -> bool:
    mode = args[1] if len(args) > 1 else kwargs.get("mode", kwargs.get("flags", "r"))
    if isinstance(mode, int):
        return bool(mode & (os.O_WRONLY | os.O_RDWR))
    return not set("wax+").isdisjoint(mode)


def end_process(well: bool) -> None:
    """Do to the folders of backups what the end of this process does."""
    for owner in owners._owners.values():
        if well:
            owner.end()
        owner.release()
    owners._owners.clear()


class Job:
    """A training without computation: after a step the weights tell which it was."""

    def __init__(self, folder: pathlib.Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        strategy = tf_dgc.DenseStrategy(transport="local")
        with strategy.scope():
            self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            self.model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
            self.model.optimizer.build(self.model.trainable_variables)
        self.ended = self.began = False
        self.last = (0, 0)  # of all starts
        self.kept = (0, 0)  # epochs and steps of the last backup that was made
        self.begun = (0, 0)

    def _set(self, epoch: int, step: int) -> None:
        for variable in (*self.model.weights, self.model.optimizer.variables[-1]):
            variable.assign(np.full(variable.shape, epoch * 100 + step))

    def value(self) -> float:
        return float(self.model.weights[0].numpy().max())

    def run(self, until: int = EPOCHS) -> None:
        """Go on from the last backup, and end as a process that ends well.

        Args:
            until: an epoch; where it is not the last, the process is killed after it.
        """
        self.begun, self.began, self.ended = (0, 0), False, False
        self._set(0, 0)
        backup = tf_dgc.callbacks.BackupState(self._folder, **self._settings)
        backup.set_params({"epochs": EPOCHS, "steps": STEPS})
        backup.set_model(self.model)
        self.model.stop_training = False
        backup.on_train_begin()
        position = backup._resumed or (0, 0)
        self.begun, self.began = tuple(position), True
        assert self.value() == self.begun[0] * 100 + self.begun[1], self.value()
        for epoch in range(self.begun[0], until):
            backup.on_epoch_begin(epoch)
            if backup._within:
                backup._within.iterator = iter(tf.data.Dataset.range(3))
            first = self.begun[1] if epoch == self.begun[0] else 0
            for step in range(first, STEPS):
                self._set(epoch, step + 1)
                backup.on_train_batch_end(step)
                if backup._within:
                    backup._within.writer.wait()
                    if step + 1 < STEPS:  # after the last, that of the end comes
                        self.kept = epoch, step + 1
            self._set(epoch + 1, 0)
            backup.on_epoch_end(epoch)
            self.kept = epoch + 1, 0
        if until < EPOCHS:
            end_process(False)
            return
        backup.on_train_end()
        self.ended = True
        end_process(True)


@pytest.mark.long
class CrashTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch("gc.collect"))  # takes most of the time
        self.addCleanup(end_process, False)

    def died(self, job: Job, fails_at: int, error: type, *args: Any) -> bool:
        """Run a job until an operation fails; tell whether one did."""
        disk = Disk(fails_at, lambda: error(*args))
        try:
            with disk.watched():
                job.run()
        except error as found:
            if isinstance(found, OSError):
                self.assertEqual(found.errno, errno.ENOSPC)
        end_process(False)
        return disk.failed

    def check_again(self, job: Job, run: Callable[[], object]) -> None:
        """Run a job again; nothing of what it has backed up is lost."""
        job.last = (0, 0) if job.ended else max(job.last, job.kept)
        job.kept = (0, 0)
        run()
        if job.began:
            self.assertGreaterEqual(job.begun, job.last)
        if job.began:
            job.last = job.begun

    @parameterized.parameters(
        ({"save_freq": 1}, [Crash]),
        ({}, [OSError, errno.ENOSPC, "No space left on device"]),
    )
    @pytest.mark.slow
    def test_wherever_it_dies_it_goes_on_from_its_last_backup(
        self, settings: dict[str, Any], error: list[Any]
    ) -> None:
        draw = random.Random(7)
        job = Job(self.folder, **settings)
        for fails_at in itertools.count(1):
            folder = self.folder / str(fails_at)
            job._folder, job.kept, job.last = folder, (0, 0), (0, 0)
            if not self.died(job, fails_at, *error):
                break
            with self.subTest(fails_at=fails_at):
                again = draw.randrange(30)
                self.check_again(job, functools.partial(self.died, job, again, *error))
                self.check_again(job, job.run)
                self.assertEqual(job.value(), EPOCHS * 100)
                self.assertFalse(folder.exists())
        self.assertGreater(fails_at, 20)
        self.assertFalse(folder.exists())

    @parameterized.product(
        damage=("removed", "cut short", "emptied"),
        name=("manifest.json", "*.weights.h5", "*.rest.npz", "rank-00000.????????.npz"),
    )
    def test_a_damaged_backup_names_the_file_and_what_to_do(
        self, damage: str, name: str
    ) -> None:
        job = Job(self.folder)
        job.run(until=1)
        (path,) = (self.folder / "epoch-00001").glob(name)
        if damage == "removed":
            path.unlink()
        else:
            size = path.stat().st_size
            os.truncate(path, size // 2 if damage == "cut short" else 0)
        if (damage, name) == ("removed", "manifest.json"):
            job.run()  # is none, as of what was being written or removed
            self.assertEqual(job.begun, (0, 0))
            return
        with self.assertRaisesRegex(
            ValueError, rf"{path.name}.*remove {self.folder}/epoch-00001 on all workers"
        ):
            job.run()
        end_process(False)
        owners.remove(self.folder / "epoch-00001")
        job.run()
        self.assertEqual((job.begun, job.value()), ((0, 0), EPOCHS * 100))


@pytest.mark.long
class OwnerTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(owners, "PATIENCE", 0.0))
        self.addCleanup(end_process, False)

    def claim(self) -> owners.FileOwner:
        owner = owners.of(self.folder, 0)
        owners.claim(owner, LocalTransport(), 1, True)
        return owner

    def test_a_folder_that_another_process_uses_is_refused_until_that_dies(
        self,
    ) -> None:
        ready, wake = os.pipe(), os.pipe()
        other = os.fork()
        if not other:  # does nothing with TensorFlow
            try:
                owner = owners.FileOwner(self.folder, 0)
                assert not owner.take()
                owner.begin("", 1)
                os.write(ready[1], b"1")
                os.read(wake[0], 1)
            finally:
                os._exit(0)
        os.read(ready[0], 1)
        with self.assertRaisesRegex(
            ValueError, rf"no other job uses.*process {other} on host"
        ):
            self.claim()
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        for end in (*ready, *wake):
            os.close(end)
        self.assertTrue(self.claim().holds)

    def test_where_there_are_no_locks_the_process_is_looked_for(self) -> None:
        none = OSError(errno.ENOLCK, "No locks available")
        self.claim().release()
        path = self.folder / "rank-00000.owner"
        record = json.loads(path.read_text())
        with mock.patch("fcntl.lockf", side_effect=none):
            path.write_text(json.dumps(record | {"process": os.getppid()}))
            with self.assertRaisesRegex(ValueError, "no other job uses"):
                owners.claim(
                    owners.FileOwner(self.folder, 0), LocalTransport(), 1, True
                )
            for other in ({"process": 2**22 + 1}, {"place": "elsewhere"}):
                path.write_text(json.dumps(record | other))
                owner = owners.FileOwner(self.folder, 0)
                owners.claim(owner, LocalTransport(), 1, True)
                owner.release()

    def test_a_folder_that_one_worker_cannot_write_is_told_on_all(self) -> None:
        file = self.folder / "file"
        file.touch()

        def work(transport: Loopback) -> None:
            folder = self.folder / "a" if transport.rank else file / "b"
            owner = owners.FileOwner(folder, transport.rank)
            owners.claim(owner, transport, transport.size, True)

        first, second = outcomes(2, work)
        self.assertRegex(str(first), "must be a folder that all workers can write")
        self.assertRegex(str(second), "must be a folder that all workers can write")

    @parameterized.parameters(True, False)
    @pytest.mark.extended
    def test_backups_go_when_all_have_ended_well(self, shared: bool) -> None:
        def job(transport: Loopback, ends: tuple[int, ...]) -> list[str]:
            place = self.folder if shared else self.folder / str(transport.rank)
            owner = owners.FileOwner(place, transport.rank)
            owners.claim(owner, transport, transport.size, True)
            found = sorted(path.name for path in place.glob("epoch-*"))
            transport.barrier()
            (place / "epoch-00001").mkdir(exist_ok=True)
            (place / "epoch-00001" / f"rank-{transport.rank}").touch()
            transport.barrier()
            if transport.rank in ends:
                owner.end()
            owner.release()
            return found

        def run(*ends: int) -> list[list[str]]:
            return run_workers(2, lambda transport: job(transport, ends))

        self.assertEqual(run(0), [[], []])
        self.assertEqual(run(1), [["epoch-00001"]] * 2)
        self.assertEqual(run(0, 1), [["epoch-00001"]] * 2)
        if shared:
            self.assertFalse(self.folder.exists())
        self.assertEqual(run(), [[], []])
        self.assertEqual(run(), [["epoch-00001"]] * 2)
        # One was there more than are now; it did not end well.
        run_workers(3, lambda transport: job(transport, (0, 1)))
        run(0, 1)
        self.assertEqual(run(), [[], []])

    def test_what_a_launcher_starts_again_had_not_ended_well(self) -> None:
        for name, expected in (("", False), ("a", True), ("b", False)):
            with mock.patch.dict(os.environ, {"TF_DGC_LAUNCH": "a"}):
                owner = self.claim()
            owner.deletes = False
            (self.folder / "epoch-00001").mkdir(exist_ok=True)
            end_process(True)
            with mock.patch.dict(os.environ, {"TF_DGC_LAUNCH": name}):
                self.claim()
            self.assertEqual((self.folder / "epoch-00001").exists(), expected)
            end_process(False)
            owners.clear(self.folder)

    @pytest.mark.processes
    @pytest.mark.extended
    def test_how_a_process_ends_is_noted(self) -> None:
        cases = {
            "": False,
            "raise ValueError('x')": True,
            "sys.exit(3)": True,
            "sys.exit(0)": False,
            "exit(3)": True,
            "os._exit(0)": True,
            "owner.complete = False": True,
        }
        folders = [str(self.folder / str(i)) for i in range(len(cases))]
        program = (
            "import os, sys, pathlib\n"
            "from tf_dgc.strategies import owners\n"
            "from tf_dgc.transports.local import LocalTransport\n"
            f"for folder, line in zip({folders}, {list(cases)}):\n"
            "    if child := os.fork():\n"
            "        os.waitpid(child, 0)\n"
            "        continue\n"
            "    owner = owners.of(pathlib.Path(folder), 0)\n"
            "    owners.claim(owner, LocalTransport(), 1, True)\n"
            "    (owner.folder / 'epoch-00001').mkdir()\n"
            "    exec(line)\n"
            "    break\n"
        )
        subprocess.run(
            [sys.executable, "-c", program],
            env=launch.worker_environment(),
            capture_output=True,
            timeout=120,
        )
        found = [os.path.exists(folder) for folder in folders]
        self.assertEqual(found, list(cases.values()))


class FitTest(parameterized.TestCase):
    @parameterized.parameters(
        ("the first", Fit(1, 9), {}, set(), 1),
        ("the second", Fit(2, 9), {1: Fit(1, 9)}, {1}, 2),
        ("again, seeded", Fit(1, 9), {1: Fit(1, 9), 2: Fit(2, 9)}, set(), 1),
        ("again, not seeded", Fit(7, 9), {1: Fit(1, 9), 2: Fit(2, 9)}, set(), 1),
        ("the first left out", Fit(2, 9), {1: Fit(1, 9), 2: Fit(2, 9)}, set(), 2),
        ("by its form", Fit(7, 8), {1: Fit(1, 9), 2: Fit(2, 8)}, set(), 2),
        ("of the same start", Fit(1, 9), {1: Fit(1, 9), 2: Fit(1, 9)}, {1}, 2),
        ("another model", Fit(7, 7), {1: Fit(1, 9)}, set(), 1),
        ("a file cut short", Fit(1, 9), {1: Fit(-1, -1)}, set(), 1),
        ("one more", Fit(1, 9), {1: Fit(1, 9), 2: Fit(1, 9)}, {1, 2}, 3),
    )
    def test_each_call_finds_its_own_backups(
        self, name: str, own: Fit, found: Any, done: set[int], expected: int
    ) -> None:
        self.assertEqual(calls.chosen(own, found, done), expected, name)


class RemoteTest(parameterized.TestCase):
    @parameterized.parameters(
        "gs://bucket/a", "s3://b/a", "hdfs://c/a", "ram://a", "file:///a"
    )
    def test_a_remote_folder_is_refused(self, path: str) -> None:
        for given in (path, pathlib.Path(path)):
            with self.assertRaisesRegex(ValueError, "`backup_dir` must be a folder of"):
                tf_dgc.callbacks.BackupState(given)
            strategy = tf_dgc.DenseStrategy(transport="local")
            for call in (strategy.save_state, strategy.restore_state):
                with self.assertRaisesRegex(ValueError, "`path` must be a folder of a"):
                    call(given)

    def test_one_of_this_disk_is_not(self) -> None:
        for path in ("a", "/a:b/c", "a:b", b"a", pathlib.Path("a")):
            found = state_files.local_folder("path", path)
            self.assertEqual(found, pathlib.Path(os.fsdecode(path)))


if __name__ == "__main__":
    tf.test.main()
