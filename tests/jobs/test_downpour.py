"""Asynchronous training on parameter servers: real servers, real workers."""

import pathlib
import signal
import tempfile
import time
from typing import Any

import downpour
import forks
import numpy as np
import pytest
import serving
import tensorflow as tf


def expected(workers: int, steps: int) -> list[np.ndarray]:
    """Return where integers lead, as NumPy adds them."""
    shapes = (downpour.ROWS, downpour.WIDTH), (downpour.WIDTH, 3), (3,)
    table, matrix, vector = (np.zeros(shape, np.float32) for shape in shapes)
    for rank in range(workers):
        for step in range(steps):
            drawn = downpour.gradients(rank, step)
            np.subtract.at(table, drawn["indices"], drawn["values"])
            matrix -= drawn["matrix"]
            vector -= drawn["vector"]
    return [table, matrix, vector]


@pytest.mark.processes
@pytest.mark.timeout(400)
class LawsTest(tf.test.TestCase):
    def check_alone(self, *names: str) -> None:
        with serving.Job(1, 2) as job:
            (found,) = job.run("alone", names=names)
        self.assertEqual({k: v for k, v in found["differ"].items() if v}, {})
        self.assertGreater(found["pieces"], 1)  # a tensor was cut
        self.assertEqual(found["staleness"], 0)

    @pytest.mark.slow
    def test_one_worker_is_plain_keras_bit_for_bit(self) -> None:
        self.check_alone("sgd", "adam", "averages")

    @pytest.mark.slow
    def test_so_it_is_with_other_optimizers(self) -> None:
        self.check_alone("accumulated", "whole", "scaled")

    def check_sums(self, workers: int, steps: int, **settings: Any) -> Any:
        with serving.Job(workers, 2) as job:
            found = job.run("integers", steps=steps, **settings)
        pushes = steps // settings.get("push_period", 1)
        # What workers keep back is still to be subtracted.
        wanted = expected(workers, steps)
        for each in found:
            wanted = [w + k for w, k in zip(wanted, each["kept"], strict=True)]
        for each in found:
            for own, sums in zip(each["found"], wanted, strict=True):
                self.assertAllEqual(own, sums)
            self.assertTrue(all(each["alike"]))
            self.assertEqual(max(each["pieces"]), 2)
            self.assertEqual(each["own"], pushes)
            self.assertEqual(each["all"], workers * pushes)
            if (bound := settings.get("max_staleness")) is not None:
                self.assertLessEqual(each["apart"], bound + 1)
        return found

    def test_the_sum_of_pushes_is_the_change_of_the_parameters(self) -> None:
        self.check_sums(4, 30)

    @pytest.mark.slow
    def test_periods_lose_nothing_and_clocks_stay_within_the_bound(self) -> None:
        self.check_sums(2, 30, push_period=3, fetch_period=2, max_staleness=1)

    @pytest.mark.slow
    def test_so_it_is_with_what_is_kept_back_where_the_largest_are_pushed(self) -> None:
        compression = {"sparsity": 0.9, "min_elements": 1, "sample_fraction": 1.0}
        found = self.check_sums(2, 30, compression=compression)
        kept = [np.abs(each["kept"][0]).sum() for each in found]
        self.assertAllGreater(kept, 0)

    @pytest.mark.slow
    def test_compression_of_nothing_is_sgd_and_what_is_kept_back_is_flushed(
        self,
    ) -> None:
        with serving.Job(1, 2) as job:
            (found,) = job.run("compressed")
        self.assertAllLess(found["differ"], 1e-6)
        self.assertGreater(found["kept"], 1e-4)
        self.assertEqual(found["left"], 0)
        self.assertLess(found["flushed"], 1e-6)
        adam, infinite = found["told"]
        self.assertIn("DownpourConfig(compression=...) needs keras.optimizers.S", adam)
        self.assertIn("A gradient holds NaN or infinity; this worker stops", infinite)

    @pytest.mark.slow
    def test_so_it_is_with_periods_a_bound_and_many_steps(self) -> None:
        compression = {"sparsity": 0.9, "min_elements": 1, "warmup_steps": 8}
        settings = {"push_period": 3, "fetch_period": 2, "max_staleness": 1}
        self.check_sums(2, 30, compression=compression, **settings)
        self.check_sums(4, 100, compression=compression)

    @pytest.mark.slow
    def test_lockstep_and_many_steps(self) -> None:
        self.check_sums(3, 100, max_staleness=0)
        self.check_sums(4, 400)


@pytest.mark.processes
@pytest.mark.timeout(400)
class FitTest(tf.test.TestCase):
    def check_goes_on(self, **settings: Any) -> tuple[list[Any], list[Any]]:
        with tempfile.TemporaryDirectory() as folder:
            backup = str(pathlib.Path(folder) / "backup")
            first, then = [], []
            for epochs, found in ((1, first), (3, then)):
                with serving.Job(2, 1) as job:
                    found += job.run("fit", epochs=epochs, backup=backup, **settings)
        for each in first + then:
            self.assertTrue(each["alike"])
            self.assertEqual(each["predicted"], [203, 3])
        for found, epochs in ((first, 1), (then, 2)):
            # The chief's history has the epochs before its backup, too.
            whole = 1 if found is first else 3
            self.assertEqual([e["epochs"] for e in found], [whole, epochs])
            # 203 rows in batches of 40: the last has rows for both workers.
            self.assertEqual([each["pushes"] for each in found], [6 * epochs] * 2)
            self.assertEqual(found[0]["digest"], found[1]["digest"])
            self.assertEqual(found[0]["evaluated"], found[1]["evaluated"])
            logs = found[1]["history"]
            self.assertEqual(logs["pushes"], [6] * epochs)
            self.assertAllGreaterEqual(logs["pulls"], 6)
            self.assertAllGreaterEqual(logs["staleness"], 0)
            self.assertAllGreater(logs["received_bytes"], 0)
        # Counted from the backup on: the chief's first epoch, and all that came later.
        counted = then[0]["iterations"]
        self.assertBetween(counted, 6 + 24, 12 + 24)
        self.assertLess(then[0]["evaluated"][0], first[0]["evaluated"][0])
        return first, then

    @pytest.mark.slow
    def test_a_job_goes_on_from_its_backup_on_new_servers(self) -> None:
        self.check_goes_on()

    @pytest.mark.slow
    def test_so_does_one_of_workers_that_keep_something_back(self) -> None:
        compression = {"sparsity": 0.95, "min_elements": 1}
        first, then = self.check_goes_on(compression=compression)
        # What each worker kept back was there again, with its count of pushes.
        self.assertEqual([each["selected"] for each in first], [6, 6])
        self.assertEqual([each["selected"] for each in then], [18, 18])
        weights = 4 * (12 * 20 + 20 * 20 + 20 * 3)
        for each in then:
            self.assertLess(each["history"]["sent_bytes"][-1], 6 * weights / 2)


@pytest.mark.processes
@pytest.mark.timeout(400)
class TogetherTest(tf.test.TestCase):
    def check_alike(self, workers: int, most: float, **arguments: Any) -> None:
        with serving.Job(workers, 2) as job:
            found = job.run("together", **arguments)
        steps = 5 if arguments.get("eagerly") else 10
        more = sum(arguments.get(name, False) for name in ("both", "nadam"))
        for each in found:
            self.assertAllLessEqual(each["differ"], most)
            self.assertAllLessEqual(each["differ by losses"], 1e-5)
            self.assertEqual(each["figures"], [steps * (1 + more), 0, steps])
            self.assertEqual(each["digest"], found[0]["digest"])
            self.assertEqual(each["pieces"], 2)
            self.assertAlmostEqual(each["loop"], -2 * (workers + 1), places=5)

    @pytest.mark.slow
    def test_steps_of_all_workers_are_those_of_one_process(self) -> None:
        self.check_alike(3, 3e-6)

    @pytest.mark.slow
    def test_so_they_are_with_adam_and_averages(self) -> None:
        self.check_alike(3, 3e-6, both=True)

    @pytest.mark.slow
    def test_so_they_are_with_nadam_which_changes_something_before_each(self) -> None:
        self.check_alike(2, 1e-5, nadam=True)

    @pytest.mark.slow
    def test_those_of_one_worker_are_up_to_the_rounding_of_a_norm(self) -> None:
        self.check_alike(1, 1e-7, both=True)

    @pytest.mark.slow
    def test_so_they_are_eagerly(self) -> None:
        self.check_alike(2, 3e-6, eagerly=True)

    @pytest.mark.slow
    def test_steps_do_not_wait_for_a_backup_worker_nor_does_the_end(self) -> None:
        settings = {"synchronous": True, "backup_workers": 1, "pause": 0.04}
        with serving.Job(3, 2) as job:
            found = job.run("train", steps=60, slow=2, **settings)
        self.assertEqual(len({each["digest"] for each in found}), 1)
        self.assertGreater(found[2]["dropped"], 0)
        self.assertLess(found[2]["pushes"] + found[2]["dropped"], 60)
        for each in found:
            self.assertLess(each["loss"], 1.1)
            self.assertBetween(each["all"], 55, 65)


@pytest.mark.processes
@pytest.mark.timeout(400)
class RefusedTest(tf.test.TestCase):
    def fails(self, task: serving.Task, *texts: str) -> None:
        self.assertNotEqual(task.end(), 0)
        for text in texts:
            self.assertIn(text, task.text)

    @pytest.mark.slow
    def test_who_does_not_fit_is_refused_by_name(self) -> None:
        with serving.Job(2, 1, TF_DGC_TIMEOUT="20") as job:
            first = job.worker(0, "train", steps=8000)
            first.wait_for("step 0")
            again = job.worker(0, "train")
            settings = job.worker(1, "train", fetch_period=2)
            self.fails(again, "Each worker needs an index of its own", "index=0")
            self.fails(
                settings,
                "All workers must have the same versions and settings",
                "`fetch_period` differs: 1 on rank 0; 2 on rank 1",
            )
            model = job.worker(1, "train", width=9)
            self.fails(
                model,
                "All workers must have the same trained variables",
                "`variable 0` differs: 'float32 (12, 8)' on rank 0; ",
            )
            self.assertIsNone(first.process.poll())  # they have done it no harm

    @pytest.mark.extended
    def test_the_servers_of_a_job_that_has_ended_are_refused(self) -> None:
        with serving.Job(2, 1, TF_DGC_TIMEOUT="3") as job:
            self.fails(
                job.worker(1, "absent"),
                "Worker 0, the chief, has not begun within 3 s",
            )
            found = job.worker(0, "outside").result()
            outside, compiled, past = found["told"]
            self.assertIn("was made outside the scope of the strategy", outside)
            self.assertIn("`jit_compile` must not be True", compiled)
            self.assertIn("An optimizer applies this worker's own gradient", past)
            ended = job.worker(0, "absent")
            self.fails(ended, "The servers must be new: they hold what a job left")


@pytest.mark.processes
@pytest.mark.timeout(400)
class FaultsTest(tf.test.TestCase):
    def check_replaced(
        self, steps: int, dies: int | None = None, **settings: Any
    ) -> list[int]:
        """Let a worker die, another take its place; return what was dropped.

        Args:
            steps: of the worker that lives.
            dies: the step after which the other dies; None at any moment of one.
            settings: of both.
        """
        with serving.Job(2, 1) as job:
            settings |= {"liveness": 2.0, "steps": steps}
            tasks = [
                job.worker(0, "train", **settings),
                job.worker(1, "train", dies=dies, **settings),
            ]
            if dies is None:
                tasks[1].wait_for("step 30")
                tasks[1].send(signal.SIGKILL)
            self.assertEqual(tasks[1].end(), -signal.SIGKILL)
            settings |= {"steps": 60}
            joined = job.worker(1, "train", **settings)
            found = [task.result() for task in (tasks[0], joined)]
        given = [each["pushes"] + each["dropped"] for each in found]
        self.assertEqual(given, [steps, 60])
        for each in found:
            self.assertTrue(each["finite"])
            self.assertLess(each["loss"], 1.1)
        return [each["dropped"] for each in found]

    @pytest.mark.slow
    def test_workers_are_killed_and_replaced_and_the_others_go_on(self) -> None:
        dropped = self.check_replaced(250, max_staleness=4)
        self.assertEqual(dropped, [0, 0])

    @pytest.mark.slow
    def test_steps_of_all_go_on_without_a_worker_that_is_killed(self) -> None:
        # Within a step it may be the one that applies it for all, and ends them.
        dropped = self.check_replaced(150, dies=30, synchronous=True)
        # Who joins may find the step of its first gradient taken.
        self.assertAllLessEqual(dropped, 2)

    def check_named(self, number: signal.Signals) -> None:
        # A fork does not stop where the process in front of it is stopped.
        alone = {forks.VARIABLE: "", "TF_DGC_TIMEOUT": "6"}
        with serving.Job(2, 2, **alone) as job:
            tasks = [job.worker(k, "train", steps=4000) for k in range(2)]
            for task in tasks:
                task.wait_for("step 10")
            job.servers[1].send(number)
            for task in tasks:
                self.assertNotEqual(task.end(30), 0)
                self.assertIn("Parameter server 1 (127.0.0.1:", task.text)

    @pytest.mark.slow
    def test_a_server_that_is_killed_is_named_on_all_workers(self) -> None:
        self.check_named(signal.SIGKILL)

    @pytest.mark.slow
    def test_a_server_that_hangs_is_named_on_all_workers(self) -> None:
        self.check_named(signal.SIGSTOP)

    @pytest.mark.slow
    def test_a_worker_may_be_killed_at_any_moment(self) -> None:
        for moment in range(8):
            with self.subTest(moment=moment), serving.Job(2, 1) as job:
                settings = {"max_staleness": 2, "liveness": 2.0, "pause": 0.0}
                tasks = [job.worker(k, "train", steps=90, **settings) for k in (0, 1)]
                tasks[1].wait_for("step 0")
                time.sleep(0.05 * moment)
                tasks[1].send(signal.SIGKILL)
                found = tasks[0].result()
                self.assertTrue(found["finite"])
                self.assertEqual(found["pushes"], 90)


if __name__ == "__main__":
    tf.test.main()
