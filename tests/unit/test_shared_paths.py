"""Paths of several workers: caches, folders of models, and the chief's files."""

import os
import pathlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_dgc
from tf_dgc.strategies import shared_paths
from tf_dgc.transports import base


class SharedPathTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        tf_dgc.DenseStrategy(transport="local")  # installs what is tried here

    def as_worker(self, rank: int, workers: int = 2) -> Any:
        fields = {"rank": rank, "workers": workers, "beside": {}, "since": 0.0}
        return self.enterContext(mock.patch.multiple(shared_paths._Process, **fields))

    def rows(self, path: Any) -> Iterator[int]:
        return iter(tf.data.Dataset.range(3).cache(path).as_numpy_iterator())

    def test_a_file_that_is_fetched_is_there_whole_or_not_at_all(self) -> None:
        source, path = self.folder / "source", self.folder / "fetched"
        source.write_bytes(b"x" * 100_000)
        sizes = []

        def look(*_: int) -> None:
            sizes.append(path.stat().st_size if path.exists() else 0)

        retrieve = keras.src.utils.file_utils.urlretrieve
        self.assertEqual(retrieve(source.as_uri(), path, look)[0], path)
        self.assertGreater(len(sizes), 2)
        self.assertEqual(set(sizes), {0})
        self.assertEqual(path.stat().st_size, 100_000)
        with self.assertRaises(OSError):
            retrieve((self.folder / "nowhere").as_uri(), path)
        self.assertCountEqual(os.listdir(self.folder), ["source", "fetched"])

    def test_workers_may_cache_in_one_file(self) -> None:
        path = str(self.folder / "a")
        read = []
        for rank in (0, 1):
            self.as_worker(rank)
            read.append(self.rows(path))
        for _ in range(3):
            self.assertEqual(next(read[0]), next(read[1]))
        for each in read:
            self.assertEqual(list(each), [])
        names = sorted(name.partition(".index")[0] for name in os.listdir(self.folder))
        for rank in (0, 1):
            self.assertIn(f"a.worker-0000{rank}-of-00002", names)
        self.as_worker(0, workers=1)
        self.assertEqual(list(self.rows(path)), [0, 1, 2])
        self.assertIn("a.index", os.listdir(self.folder))

    def test_a_cache_in_memory_is_one_still(self) -> None:
        self.as_worker(1)
        self.assertEqual(list(self.rows("")), [0, 1, 2])
        self.assertEqual(list(tf.data.Dataset.range(2).cache()), [0, 1])
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_job_started_again_takes_no_notice_of_locks_of_the_dead(self) -> None:
        self.as_worker(0)
        path = str(self.folder / "a")
        reader = self.rows(path)
        next(reader)  # is not read to its end
        (lock,) = self.folder.glob("*.lockfile")
        del reader
        lock.touch()
        with self.assertRaises(tf.errors.AlreadyExistsError):
            list(self.rows(path))
        with mock.patch.dict(os.environ, {"TF_DGC_ATTEMPT": "1"}):
            self.assertEqual(list(self.rows(path)), [0, 1, 2])

    @parameterized.parameters("method", "function")
    @pytest.mark.long
    def test_a_folder_of_a_model_is_whole_at_any_time(self, how: str) -> None:
        self.as_worker(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        path = self.folder / "served"

        def save() -> None:
            if how == "method":
                model.export(path, verbose=False)
            else:
                tf.saved_model.save(model, str(path))

        save()
        over = threading.Event()
        failed: list[Exception] = []

        def look() -> None:
            needed = {"saved_model.pb", "variables", "fingerprint.pb"}
            while not over.is_set():
                try:
                    assert needed <= set(os.listdir(path)), os.listdir(path)
                except Exception as error:
                    failed.append(error)
                    return

        reader = threading.Thread(target=look)
        reader.start()
        save()
        over.set()
        reader.join()
        self.assertEqual(failed, [])
        self.assertEqual(os.listdir(self.folder), ["served"])
        tf.saved_model.load(str(path))

    @parameterized.parameters((0, "own"), (1, "of another"))
    def test_what_the_chief_writes_stays(self, rank: int, expected: str) -> None:
        path = self.folder / "a"
        with shared_paths.replaced_folder(path, rank == 0) as temporary:
            temporary.mkdir()
            (temporary / "text").write_text("own")
            path.mkdir()
            (path / "text").write_text("of another")
        self.assertEqual((path / "text").read_text(), expected)
        self.assertEqual(os.listdir(self.folder), ["a"])

    def test_where_the_disk_cannot_exchange_folders_two_are_renamed(self) -> None:
        path = self.folder / "a"
        path.mkdir()
        (path / "old").touch()
        with mock.patch("ctypes.CDLL", return_value=object()):
            with shared_paths.replaced_folder(path, True) as temporary:
                temporary.mkdir()
        self.assertEqual(list(self.folder.rglob("*")), [path])

    def test_a_folder_that_holds_more_is_left_to_tensorflow(self) -> None:
        (self.folder / "saved_model.pb").touch()
        self.assertIsNotNone(shared_paths._plain_folder(self.folder))
        (self.folder / "notes").touch()
        self.assertIsNone(shared_paths._plain_folder(self.folder))
        for path in (self.folder / "notes", "gs://bucket/a", 3):
            self.assertIsNone(shared_paths._plain_folder(path))

    @parameterized.parameters(False, True)
    def test_who_loads_what_the_chief_saves_waits_for_it(self, stale: bool) -> None:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        path, own = self.folder / "a.keras", self.folder / "workertemp_1" / "a.keras"
        own.parent.mkdir()
        model.save(own)
        if stale:
            model.save(path)
            os.utime(path, (1, 1))
        self.as_worker(1)
        shared_paths.begin()
        model.layers[0].kernel.assign(np.ones([2, 1]))
        self.assertGreater(shared_paths._Process.since, 1)
        shared_paths.note_saving(own)

        def save(seconds: float) -> None:  # the chief, while this worker waits
            model.save(self.folder / "b.keras")
            (self.folder / "b.keras").replace(path)

        with mock.patch("time.sleep", side_effect=save) as slept:
            found = keras.models.load_model(path)
            self.assertEqual(slept.call_count, 1)
            self.assertAllEqual(found.get_weights()[0], np.ones([2, 1]))
            shared_paths.note_saving(own)  # the chief was faster
            keras.models.load_model(path)
            self.assertEqual(slept.call_count, 1)
        path.unlink()
        shared_paths.note_saving(own)
        with (
            mock.patch.object(base, "default_timeout", return_value=0.0),
            self.assertRaisesRegex(TimeoutError, "Worker 0 must save .*a.keras"),
        ):
            keras.models.load_model(path)


if __name__ == "__main__":
    tf.test.main()
