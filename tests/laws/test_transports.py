"""Every transport keeps one contract, that of `contract.py`."""

import os
from typing import ClassVar
from unittest import mock

import contract
import pool
import pytest
import tensorflow as tf
from absl.testing import parameterized
from loopback import Loopback, run_workers

from tf_dgc.transports import Transport, grid
from tf_dgc.transports.base import fuse
from tf_dgc.transports.local import LocalTransport

TRANSPORTS = ("collective", "horovod", "hybrid")
EAGER = [name for name in contract.CHECKS if name not in contract.NEEDS_GRAPHS]


class InThisProcess(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*contract.CHECKS)
    @pytest.mark.long
    def test_local(self, name: str) -> None:
        contract.CHECKS[name](LocalTransport())

    @parameterized.product(name=EAGER, workers=[1, 2, 5])
    @pytest.mark.few(24)
    @pytest.mark.long
    def test_loopback(self, name: str, workers: int) -> None:
        run_workers(workers, contract.CHECKS[name])

    @parameterized.product(name=EAGER, workers=[9, 12])
    @pytest.mark.few(5, 14)
    @pytest.mark.long
    def test_a_grid_over_loopback(self, name: str, workers: int) -> None:
        def work(transport: Transport) -> None:
            contract.CHECKS[name](grid.Grid(transport))

        run_workers(workers, work)

    def test_large_tensors_are_summed_at_once(self) -> None:
        def work(transport: Loopback) -> list[str]:
            own = grid.Grid(transport)
            for elements in (1, grid.MOST_BYTES // 4, grid.MOST_BYTES // 4 + 1):
                own.all_reduce([tf.ones([elements])], f"of {elements}")
            return [sent.name for sent in transport.sent]

        self.assertEqual(run_workers(9, work)[0], [f"of {grid.MOST_BYTES // 4 + 1}"])

    def test_the_sides_of_a_grid_are_as_equal_as_can_be(self) -> None:
        found = {n: grid.sides(n) for n in (1, 7, 9, 12, 16, 24, 1024)}
        expected = {
            1: (1, 1),
            7: (1, 7),
            9: (3, 3),
            12: (3, 4),
            16: (4, 4),
            24: (4, 6),
            1024: (32, 32),
        }
        self.assertEqual(found, expected)

    @parameterized.parameters(
        ("off", 9, False), ("on", 9, True), ("on", 8, False), ("auto", 8, False)
    )
    def test_a_grid_is_taken_as_told(self, told: str, workers: int, yes: bool) -> None:
        with mock.patch.dict(os.environ, TF_DGC_GRID=told):
            for found in run_workers(workers, grid.chosen):
                self.assertEqual(isinstance(found, grid.Grid), yes)

    def test_a_grid_that_cannot_be_is_told_once(self) -> None:
        grid._tell_none.cache_clear()
        with (
            mock.patch.dict(os.environ, TF_DGC_GRID="on"),
            self.assertLogs("tf_dgc", "WARNING") as logs,
        ):
            for _ in range(2):
                run_workers(10, grid.chosen)
        self.assertLen(logs.output, 1)
        self.assertIn("TF_DGC_GRID=on changes nothing: 10 workers", logs.output[0])

    @parameterized.parameters(
        (1e-4, 1e-5, False), (5e-2, 1e-2, True), (5e-2, 4e-2, False)
    )
    def test_a_grid_is_taken_where_it_is_measured_to_be_faster(
        self, ring: float, over_grid: float, yes: bool
    ) -> None:
        def seconds(transport: Transport) -> float:
            # Rank 0 decides: what others measure is noise.
            if transport.rank:
                return 1.0
            return over_grid if isinstance(transport, grid.Grid) else ring

        with mock.patch.object(grid, "_seconds", seconds):
            for found in run_workers(9, grid.chosen):
                self.assertEqual(isinstance(found, grid.Grid), yes)

    def test_another_word_is_refused(self) -> None:
        with (
            mock.patch.dict(os.environ, TF_DGC_GRID="yes"),
            self.assertRaisesRegex(ValueError, "TF_DGC_GRID must be one of auto, on"),
        ):
            grid.chosen(LocalTransport())

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
    @pytest.mark.few(10, 20)
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


@pytest.mark.slow
@pytest.mark.processes
class OverAGridTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(name=[*contract.CHECKS], transport=TRANSPORTS)
    def test_contract(self, name: str, transport: str) -> None:
        settings = {"name": name, "transport": transport, "over_grid": True}
        found = pool.run(transport, 9, "contract", "keeps", **settings)
        self.assertEqual(found, [[i, transport] for i in range(9)])


if __name__ == "__main__":
    tf.test.main()
