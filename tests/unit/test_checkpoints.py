"""`tf.train.Checkpoint` and its manager on several workers, in one folder or in two."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_dgc
from tf_dgc.strategies import checkpoints, shared_paths
from tf_dgc.transports import base

KEPT = 2


class CheckpointsTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        tf_dgc.DenseStrategy(transport="local")  # installs what is tried here
        fields = {"rank": 0, "workers": 2, "begun": 0.0}
        self.enterContext(mock.patch.multiple(shared_paths._Process, **fields))

    @contextlib.contextmanager
    def as_worker(self, rank: int) -> Iterator[None]:
        """Be a worker of a job, with what it knows of files."""
        known = self.known.setdefault(rank, ({}, {}))
        with (
            mock.patch.object(shared_paths._Process, "rank", rank),
            mock.patch.object(checkpoints, "_own", known[0]),
            mock.patch.object(checkpoints, "_awaited", known[1]),
        ):
            yield

    @property
    def known(self) -> dict[int, Any]:
        return self.__dict__.setdefault("_known", {})

    def manager(self, folder: pathlib.Path) -> tf.train.CheckpointManager:
        own = tf.train.Checkpoint(weight=tf.Variable(1.0))
        return tf.train.CheckpointManager(own, str(folder), max_to_keep=KEPT)

    def names(self, folder: pathlib.Path) -> set[str]:
        return set(os.listdir(folder))

    def saved(self, *numbers: int) -> set[str]:
        ends = (".index", ".data-00000-of-00001")
        return {"checkpoint"} | {f"ckpt-{n}{end}" for n in numbers for end in ends}

    def stamps(self) -> dict[str, Any]:
        return {n: shared_paths.stamp(self.folder / n) for n in self.names(self.folder)}

    @parameterized.parameters((0, 1), (1, 0))
    def test_workers_with_one_folder_leave_what_one_process_does(
        self, first: int, second: int
    ) -> None:
        managers = [self.manager(self.folder) for _ in range(2)]
        with self.assertNoLogs("tensorflow", "WARNING"):
            for number in range(1, 5):
                for rank in (first, second):
                    with self.as_worker(rank):
                        managers[rank].checkpoint.weight.assign(number)
                        managers[rank].save()
                        last = managers[rank].checkpoints[-1]
                        self.assertTrue(last.endswith(f"ckpt-{number}"))
        self.assertEqual(self.names(self.folder), self.saved(3, 4))
        for rank in range(2):
            with self.as_worker(rank):
                latest = tf.train.latest_checkpoint(str(self.folder))
                self.assertEqual(latest, managers[rank].latest_checkpoint)
                again = self.manager(self.folder)
                self.assertEqual(again.restore_or_initialize(), latest)
                self.assertEqual(float(again.checkpoint.weight), 4.0)

    def test_files_of_the_chief_stay_as_they_are(self) -> None:
        managers = [self.manager(self.folder) for _ in range(2)]
        for _ in range(3):
            managers[0].save()
            before = self.stamps()
            with self.as_worker(1):
                managers[1].save()
            self.assertEqual(self.stamps(), before)

    def test_a_folder_of_one_worker_alone_is_its_own(self) -> None:
        with self.as_worker(1):
            manager = self.manager(self.folder)
            for _ in range(4):
                manager.save()
            latest = tf.train.latest_checkpoint(str(self.folder))
            self.assertEqual(latest, manager.latest_checkpoint)
            manager.checkpoint.write(str(self.folder / "ckpt-4"))
        self.assertEqual(self.names(self.folder), self.saved(3, 4))

    def test_what_is_older_than_the_job_is_replaced(self) -> None:
        path = str(self.folder / "a")
        tf.train.Checkpoint(weight=tf.Variable(1.0)).write(path)
        found = tf.train.Checkpoint(weight=tf.Variable(0.0))
        for begun, expected in ((0.0, 1.0), (2.0**40, 2.0)):
            with (
                self.as_worker(1),
                mock.patch.object(shared_paths._Process, "begun", begun),
            ):
                tf.train.Checkpoint(weight=tf.Variable(2.0)).write(path)
            found.read(path)
            self.assertEqual(float(found.weight), expected)

    def test_who_asks_for_the_latest_waits_for_the_chief(self) -> None:
        managers = [self.manager(self.folder) for _ in range(2)]

        def chief_saves(seconds: float) -> None:
            with self.as_worker(0):
                managers[0].save()

        managers[0].save()
        with self.as_worker(1):
            for _ in range(2):
                managers[1].save()
            with mock.patch.object(checkpoints.time, "sleep", chief_saves):
                latest = tf.train.latest_checkpoint(str(self.folder))
            self.assertEqual(latest, managers[1].latest_checkpoint)
            managers[1].save()
            with mock.patch.object(base, "default_timeout", return_value=0.0):
                with self.assertRaisesRegex(TimeoutError, "Worker 0 must save"):
                    tf.train.get_checkpoint_state(str(self.folder))


if __name__ == "__main__":
    pytest.main([__file__])
