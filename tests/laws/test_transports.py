"""Every transport keeps one contract, that of `contract.py`."""

from typing import ClassVar

import contract
import pool
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import run_workers

from tf_dgc.transports import Transport
from tf_dgc.transports.base import fuse
from tf_dgc.transports.local import LocalTransport

EAGER = [name for name in contract.CHECKS if name not in contract.NEEDS_GRAPHS]


class InThisProcess(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*contract.CHECKS)
    def test_local(self, name: str) -> None:
        contract.CHECKS[name](LocalTransport())

    @parameterized.product(name=EAGER, workers=[1, 2, 5])
    def test_loopback(self, name: str, workers: int) -> None:
        run_workers(workers, contract.CHECKS[name])

    def test_a_transport_that_only_gathers_sends_rows(self) -> None:
        def work(transport: Transport) -> list[int]:
            tensor = 10 * tf.range(3) + transport.rank
            return Transport.all_to_all(transport, tensor, "rows").numpy().tolist()

        found = run_workers(3, work)
        self.assertEqual(found, [[0, 1, 2], [10, 11, 12], [20, 21, 22]])

    def test_no_sum_is_of_int32_which_gpus_refuse(self) -> None:
        seen: list[tf.DType] = []

        def reduce(vector: tf.Tensor) -> tf.Tensor:
            seen.append(vector.dtype)
            return 2 * vector

        own = [tf.constant([3, -(2**31)], dtype) for dtype in (tf.int32, tf.int64)]
        found = fuse([*own, tf.constant(True)], reduce)
        self.assertEqual(seen, [tf.int64])
        self.assertAllEqual(found[0], own[0] + own[0])  # which wraps
        self.assertAllEqual(found[1], 2 * own[1])
        self.assertEqual(found[0].dtype, tf.int32)


@pytest.mark.processes
class Contract(parameterized.TestCase, tf.test.TestCase):
    """Real workers keep it; subclasses say where."""

    __test__: ClassVar[bool] = False
    transport: ClassVar[str]
    workers: ClassVar[int] = 2

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__test__ = True

    @parameterized.parameters(*contract.CHECKS)
    def test_contract(self, name: str) -> None:
        arguments = {"name": name, "transport": self.transport}
        found = pool.run(self.transport, self.workers, "contract", "keeps", **arguments)
        self.assertEqual(found, [[i, self.transport] for i in range(self.workers)])


class Collective(Contract):
    transport = "collective"


class CollectiveOfThree(Contract):
    transport, workers = "collective", 3


class Horovod(Contract):
    transport = "horovod"


@pytest.mark.slow
class HorovodOfThree(Contract):
    transport, workers = "horovod", 3


class Hybrid(Contract):
    transport = "hybrid"


if __name__ == "__main__":
    tf.test.main()
