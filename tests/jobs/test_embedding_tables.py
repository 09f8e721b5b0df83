"""Tests of embedding tables that live on the servers only: real processes."""

import pathlib
import tempfile
import unittest

import numpy as np
import pytest
from serving import Job

SCRIPT = pathlib.Path(__file__).parent / "embedding_tables.py"
REFUSED = (
    "must not be read as a whole",
    "Indices of an Embedding must be in",
    "its layer takes dense indices. Received: inputs=",
    "TypeError: `variable` must be a table that lives on the servers only",
    "needs it as a whole. Received: embeddings_regularizer=",
    "needs it as a whole. Received: embeddings_constraint=",
    "`embeddings_initializer` of a table that lives on the servers only must",
    "needs it as a whole. Received: lora_rank=2",
    "gradients of single rows. Received: weight_decay",
    "gradients of single rows. Received: use_ema",
    "gradients of single rows. Received: gradient_accumulation_steps",
    "BackupState must be without `save_freq` and `save_seconds`",
    "gradients of single rows. Received: an optimizer that looks at whole tensors",
    "gradients of single rows. Received: an optimizer that looks at whole tensors",
)


@pytest.mark.processes
class TablesTest(unittest.TestCase):
    def job(self, workers: int, servers: int) -> Job:
        return self.enterContext(Job(workers, servers, SCRIPT))

    @pytest.mark.slow
    def test_one_worker(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        (found,) = self.job(1, 2).run("alone", folder=folder)
        with self.subTest("training is that of the model that holds its table"):
            for name, (*apart, moved) in found["equal"].items():
                self.assertLess(max(apart), 1e-6, name)
                self.assertGreater(moved, 1e-3, name)
        with self.subTest("it is saved and loaded"):
            for name, apart in found["saved"].items():
                self.assertLess(abs(apart), 1e-7, name)
        for text, expected in zip(found["refused"], REFUSED, strict=True):
            with self.subTest(expected):
                self.assertIn(expected, text)

    @pytest.mark.extended
    def test_workers_train_one_table(self) -> None:
        job = self.job(2, 2)
        tasks = [job.worker(rank, "together", rank=rank) for rank in range(2)]
        first, second = [task.result() for task in tasks]
        self.assertEqual(first["rows"], second["rows"])
        for each in (first, second):
            self.assertLess(each["losses"][-1], each["losses"][0])
            self.assertGreater(each["moved"], 1e-3)
            # 10 epochs of 20 batches; of each 24 rows of 8 floats, and 25 floats.
            self.assertGreater(each["received"], 200 * 4 * (24 * 8 + 25))
            self.assertLess(each["received"], 250 * 4 * (24 * 8 + 25))

    @pytest.mark.slow
    def test_new_servers_continue_from_a_backup(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        (whole,) = self.job(1, 2).run("backed_up", folder=f"{folder}/a", epochs=3)
        self.job(1, 2).run("backed_up", folder=f"{folder}/b", epochs=2)
        (again,) = self.job(1, 3).run("backed_up", folder=f"{folder}/b", epochs=3)
        # Pieces of other sizes: other instructions of the processor, other rounding.
        np.testing.assert_allclose(whole["rows"], again["rows"], rtol=1e-6, atol=1e-7)


if __name__ == "__main__":
    unittest.main()
