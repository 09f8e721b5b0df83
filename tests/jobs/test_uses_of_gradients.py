"""What a step does with its gradients gives on two workers what it gives on one."""

from typing import Any

import pool
import pytest
import tensorflow as tf
import uses_of_gradients
from absl.testing import parameterized

HERE = "uses_of_gradients", "trained"


def trained(launcher: str, workers: int, **arguments: Any) -> list[Any]:
    found: list[Any] = pool.run(launcher, workers, *HERE, **arguments)
    return found


@pytest.mark.processes
class UsesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*sorted(uses_of_gradients.STEPS))
    @pytest.mark.few(3, 8)
    def test_weights_and_logs_are_those_of_one_process(self, name: str) -> None:
        self.check(name, eager=False)

    @parameterized.parameters(*sorted(uses_of_gradients.STEPS))
    @pytest.mark.slow
    def test_so_they_are_eagerly(self, name: str) -> None:
        self.check(name, eager=True)

    @pytest.mark.extended
    def test_python_decides_as_one_process_does(self) -> None:
        self.check("guarded_in_python", eager=True)

    def test_what_python_decides_by_each_workers_rows_is_refused(self) -> None:
        with self.assertRaisesRegex(
            pool.WorkerError, r"uses_of_gradients.py:\d+ as often as each worker"
        ):
            trained("collective", 2, name="by_a_number", eager=True)

    def check(self, name: str, eager: bool) -> None:
        (alone,) = trained("local", 1, name=name, eager=eager, strategy="")
        for weights, logs in trained("collective", 2, name=name, eager=eager):
            self.assertAllClose(weights[0], alone[0][0], rtol=1e-4)
            self.assertAllClose(weights[1], alone[0][1], rtol=1e-4, atol=1e-5)
            self.assertAllClose(logs, alone[1], rtol=1e-4)

    @parameterized.parameters(*sorted(uses_of_gradients.TOLD))
    @pytest.mark.extended
    def test_what_cannot_be_exchanged_before_leaves_workers_alike(
        self, name: str
    ) -> None:
        (first, _), (second, _) = trained("collective", 2, name=name)
        self.assertEqual(first, second)

    def test_compressed_steps_without_an_optimizer_are_refused(self) -> None:
        with self.assertRaisesRegex(pool.WorkerError, "without an optimizer"):
            trained("collective", 2, name="without_an_optimizer", strategy="dgc")

    def test_a_condition_that_each_worker_decides_is_refused(self) -> None:
        with self.assertRaisesRegex(pool.WorkerError, "decides it by its own rows"):
            trained("collective", 2, name="by_an_order")


if __name__ == "__main__":
    tf.test.main()
