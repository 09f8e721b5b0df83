"""Workers that run one case after another: none hears of what was before it."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import unittest
from typing import Any
from unittest import mock

import launch
import numpy as np
import pool
import pytest
from absl.testing import parameterized


def own_rank() -> int:
    """Return the rank of the worker that runs this."""
    import tf_dgc

    return int(tf_dgc.DenseStrategy().rank)


def pid() -> int:
    return os.getpid()


def told(given: dict[str, Any]) -> dict[str, Any]:
    array = np.float32(1.5) * np.ones([2])
    return {"rank": own_rank(), "given": given, "array": array, "number": array[0]}


def leaves_everything_different() -> None:
    import keras
    import tensorflow as tf

    os.environ["TF_DGC_CHECK_STEPS"] = "3"
    keras.mixed_precision.set_global_policy("mixed_float16")
    keras.config.set_floatx("float16")
    tf.config.run_functions_eagerly(True)
    keras.utils.set_random_seed(5)
    keras.layers.Dense(1)


def state() -> list[Any]:
    import keras
    import tensorflow as tf

    return [
        os.environ.get("TF_DGC_CHECK_STEPS"),
        keras.config.dtype_policy().name,
        keras.config.floatx(),
        tf.config.functions_run_eagerly(),
        float(tf.random.uniform([])),
        float(keras.random.uniform([])),
        float(np.random.uniform()),
        keras.layers.Dense(1).name,
    ]


def fails_on_one() -> int:
    if own_rank() == 1:
        print("what was printed before")
        raise ArithmeticError("only here")
    return 0


def others_wait_for_one() -> None:
    import tensorflow as tf

    from tf_dgc import transports

    transport = transports.resolve("collective")
    if transport.rank == 1:
        raise ArithmeticError("before the collective")
    transport.all_reduce([tf.ones([1])], "never")


def sleeps() -> None:
    time.sleep(1000)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(function: str, **arguments: Any) -> list[Any]:
    return pool.run("collective", 2, "test_pool", function, **arguments)


def run_alone(function: str, **arguments: Any) -> Any:
    return pool.run("local", 1, "test_pool", function, **arguments)[0]


@pytest.mark.processes
class PoolTest(parameterized.TestCase, unittest.TestCase):
    @parameterized.parameters(("local", 1), ("collective", 2))
    def test_every_worker_answers_in_the_order_of_rank(
        self, launcher: str, workers: int
    ) -> None:
        self.check_answers(launcher, workers)

    @parameterized.parameters("horovod", "hybrid")
    @pytest.mark.slow
    def test_so_does_every_one_of_horovod(self, launcher: str) -> None:
        self.check_answers(launcher, 2)

    def check_answers(self, launcher: str, workers: int) -> None:
        found = pool.run(launcher, workers, "test_pool", "told", given={"a": [1, None]})
        for rank, each in enumerate(found):
            self.assertEqual(each["rank"], rank)
            self.assertEqual(each["given"], {"a": [1, None]})
            self.assertEqual((each["array"], each["number"]), ([1.5, 1.5], 1.5))

    def test_nothing_is_left_of_the_case_before(self) -> None:
        expected = run("state")
        run("leaves_everything_different")
        self.assertEqual(run("state"), expected)

    def test_an_error_is_told_and_the_workers_go_on(self) -> None:
        workers = run("pid")
        with self.assertRaises(pool.WorkerError) as caught:
            run("fails_on_one")
        error = caught.exception
        self.assertEqual((error.rank, error.type), (1, "ArithmeticError"))
        self.assertEqual((error.message, list(error.errors)), ("only here", [1]))
        self.assertIn("in fails_on_one", error.traceback)
        self.assertRegex(str(error), r"test_pool\.fails_on_one\(\) on 2 .*collective")
        self.assertIn("what was printed before", str(error))
        self.assertEqual(run("pid"), workers)

    @parameterized.parameters(
        ("sleeps", "TimeoutError", "no answer within 2 s", r"line \d+ in sleeps"),
        ("dies", "Ended", "the worker has ended", r"test_pool\.dies"),
    )
    def test_a_job_that_hangs_or_ends_is_told_where_and_replaced(
        self, function: str, error: str, message: str, where: str
    ) -> None:
        worker = run_alone("pid")
        with self.assertRaisesRegex(
            pool.WorkerError, f"test_pool.{function}"
        ) as caught:
            run_alone(function, timeout=2)
        self.assertEqual(caught.exception.type, error)
        self.assertIn(message, caught.exception.message)
        self.assertRegex(str(caught.exception), where)
        self.assertFalse(pathlib.Path(f"/proc/{worker}").exists())
        self.assertNotEqual(worker, run_alone("pid"))

    def test_what_failed_first_is_told_of_those_who_wait_for_each_other(self) -> None:
        workers = run("pid")
        with mock.patch.object(pool, "_OTHERS_SECONDS", 1.0):
            with self.assertRaises(pool.WorkerError) as caught:
                run("others_wait_for_one")
        self.assertEqual(caught.exception.type, "ArithmeticError")
        self.assertEqual(caught.exception.errors[0]["type"], "TimeoutError")
        self.assertNotIn(workers[0], run("pid"))

    @pytest.mark.slow
    def test_no_worker_outlives_its_tests(self) -> None:
        code = """
        import pool, os, signal
        print(*pool.run("collective", 2, "test_pool", "pid"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=launch.worker_environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        self.assertEqual(done.returncode, -signal.SIGKILL)
        workers = done.stdout.split()
        self.assertEqual(len(workers), 2)
        deadline = time.monotonic() + 20
        while alive := [w for w in workers if pathlib.Path(f"/proc/{w}").exists()]:
            self.assertLess(time.monotonic(), deadline, alive)
            time.sleep(0.1)


class ManyJobsTest(unittest.TestCase):
    def test_those_that_waited_longest_make_room_for_others(self) -> None:
        ended = []

        class Job:
            def __init__(self, launcher: str, workers: int) -> None:
                self.key = launcher, workers

            def obstacle(self) -> str:
                return ""

            def end(self) -> None:
                ended.append(self.key)

        first, second, third, fourth = (("a", 3), ("b", 3), ("c", 3), ("d", 1))
        self.enterContext(mock.patch.object(pool, "_Job", Job))
        self.enterContext(mock.patch.object(pool, "_MOST_WORKERS", 9))
        jobs = self.enterContext(mock.patch.object(pool, "_jobs", {}))
        for key in (first, second, third, first, fourth):
            self.assertEqual(pool._job(*key).key, key)
        self.assertEqual(ended, [second])
        self.assertEqual(list(jobs), [third, first, fourth])


if __name__ == "__main__":
    unittest.main()
