"""Every transport keeps one contract, that of `contract.py`."""

from typing import Any, ClassVar

import contract
import launch
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import run_workers

from tf_dgc.transports.local import LocalTransport

EAGER = [name for name in contract.CHECKS if name not in contract.NEEDS_GRAPHS]


class InThisProcess(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*contract.CHECKS)
    def test_local(self, name: str) -> None:
        contract.CHECKS[name](LocalTransport())

    @parameterized.product(name=EAGER, workers=[1, 2, 5])
    def test_loopback(self, name: str, workers: int) -> None:
        run_workers(workers, contract.CHECKS[name])


@pytest.mark.processes
class Contract(parameterized.TestCase, tf.test.TestCase):
    """Runs the contract once on real workers; subclasses say where."""

    __test__: ClassVar[bool] = False
    transport: ClassVar[str]
    workers: ClassVar[int] = 2
    found: ClassVar[list[dict[str, Any]] | Exception]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__test__ = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if cls.transport != "collective":
            launch.skip_without_horovod()
        cls.found = launch.results_of(
            str(launch.ROOT / "tests" / "contract.py"),
            *("--transport", cls.transport),
            workers=cls.workers,
            launcher=cls.transport,
            timeout=280,
        )

    @parameterized.parameters(*contract.CHECKS)
    def test_contract(self, name: str) -> None:
        found = launch.checked(self.found)
        self.assertEqual([r["rank"] for r in found], list(range(self.workers)))
        self.assertEqual({r["transport"] for r in found}, {self.transport})
        for rank, result in enumerate(found):
            self.assertEqual(result[name], "", f"rank {rank}")


class Collective(Contract):
    transport = "collective"


class CollectiveOfThree(Contract):
    transport, workers = "collective", 3


class Horovod(Contract):
    transport = "horovod"


class HorovodOfThree(Contract):
    transport, workers = "horovod", 3


class Hybrid(Contract):
    transport = "hybrid"


if __name__ == "__main__":
    tf.test.main()
