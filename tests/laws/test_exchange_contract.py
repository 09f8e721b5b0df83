"""What every exchange keeps to, whatever it exchanges."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import flushed
from loopback import Owner, run_workers

from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.exchanges import Averaging, Companions, EachStep, Expected, Ledger
from tf_dgc.transports.base import Transport
from tf_dgc.transports.local import LocalTransport

SHAPES = ((16, 8), (5,), (6, 12))
DTYPES = (tf.float32, tf.float32, tf.float16)
MOMENTUM = Momentum(0.9, False, 0.1)
COMPRESSION = DGCConfig(sparsity=0.9, min_elements=0)
BY_OWNERS = DGCConfig(sparsity=0.6, min_elements=0, exchange="owners", growth=1.0)


def every_exchange() -> dict[str, Callable[[], Any]]:
    """Return what makes each kind, by name."""
    return {
        "Dense": lambda: EachStep(None),
        "Compressed": lambda: EachStep(COMPRESSION),
        "Owners": lambda: EachStep(BY_OWNERS),
        "Averaged": lambda: Averaging(AveragingConfig(period=2)),
        "AveragedCompressed": lambda: Averaging(
            AveragingConfig(period=2, compression=COMPRESSION)
        ),
        "AveragedOwners": lambda: Averaging(
            AveragingConfig(period=2, compression=BY_OWNERS)
        ),
    }


class Worker:
    """A worker that trains some variables along fixed gradients."""

    def __init__(self, transport: Transport, make: Any) -> None:
        self.transport, self.make = transport, make
        self.ledger = Ledger(transport, make)
        self.owner, self.variables = self.another()

    def another(self) -> tuple[Owner, list[tf.Variable]]:
        owner = Owner()
        if isinstance(self.make, Averaging):
            self.make.expect(owner, Expected(Companions([], [], []), overlap=1))
        variables = [
            tf.Variable(tf.zeros(shape, dtype))
            for shape, dtype in zip(SHAPES, DTYPES, strict=True)
        ]
        return owner, variables

    def gradients(self, step: int) -> list[tf.Tensor]:
        random = np.random.default_rng([self.transport.rank, step])
        return [
            tf.cast(random.normal(size=shape), dtype)
            for shape, dtype in zip(SHAPES, DTYPES, strict=True)
        ]

    def apply(
        self, gradients: list[Any], owner: Any = None, variables: Any = None
    ) -> None:
        """Take a step as an optimizer does: SGD, its momentum left to the exchange."""
        owner, variables = owner or self.owner, variables or self.variables
        update = self.ledger.gradients(owner, gradients, variables, MOMENTUM)
        rates = [1.0 if finished else 0.1 for finished in update.finished]
        for gradient, variable, rate in zip(
            update.gradients, variables, rates, strict=True
        ):
            if gradient is not None:
                step = tf.cast(rate, gradient.dtype) * gradient
                variable.assign_sub(tf.cast(step, variable.dtype))
        self.ledger.parameters(owner, variables)

    def train(self, *steps: int) -> "Worker":
        for step in steps:
            self.apply(self.gradients(step))
        return self

    @property
    def values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.variables]


@pytest.mark.long
class ExchangeContractTest(parameterized.TestCase, tf.test.TestCase):
    def on_workers(self, kind: str, work: Callable[[Worker], Any]) -> list[Any]:
        make = every_exchange()[kind]
        return run_workers(2, lambda transport: work(Worker(transport, make())))

    def assert_same_bits(self, one: list[np.ndarray], two: list[np.ndarray]) -> None:
        for a, b in zip(one, two, strict=True):
            self.assertEqual(a.tobytes(), b.tobytes())

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_workers_have_the_same_bits_after_each_period(self, kind: str) -> None:
        one, two = self.on_workers(kind, lambda worker: worker.train(0, 1, 2, 3).values)
        self.assert_same_bits(one, two)
        self.assertTrue(any(np.any(value) for value in one))

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_gradients_keep_shapes_and_types(self, kind: str) -> None:
        def work(worker: Worker) -> list[tuple[Any, Any]]:
            update = worker.ledger.gradients(
                worker.owner, worker.gradients(0), worker.variables
            )
            return [(g.shape, g.dtype) for g in update.gradients]

        for found in self.on_workers(kind, work):
            self.assertEqual(found, list(zip(SHAPES, DTYPES, strict=True)))

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_no_gradients_are_an_update_without_any(self, kind: str) -> None:
        def work(worker: Worker) -> list[Any]:
            return worker.ledger.gradients(worker.owner, [], []).gradients

        for found in self.on_workers(kind, work):
            self.assertEqual(found, [])

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_owners_are_apart(self, kind: str) -> None:
        def work(worker: Worker) -> tuple[list[np.ndarray], list[np.ndarray]]:
            owner, variables = worker.another()
            for step in range(4):
                worker.train(step)
                worker.apply(worker.gradients(step), owner, variables)
            return worker.values, [variable.numpy() for variable in variables]

        (alone, _) = self.on_workers(kind, lambda each: each.train(0, 1, 2, 3).values)
        for first, second in self.on_workers(kind, work):
            self.assert_same_bits(first, alone)
            self.assert_same_bits(second, alone)

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_collectives_of_a_step_have_different_names(self, kind: str) -> None:
        def work(worker: Worker) -> list[tuple[str, str]]:
            transport: Any = worker.transport
            owner, variables = worker.another()
            worker.train(0, 1)
            worker.apply(worker.gradients(0), owner, variables)
            worker.apply(worker.gradients(1), owner, variables)
            transport.sent.clear()
            worker.train(2)
            worker.apply(worker.gradients(2), owner, variables)
            return [each.name for each in transport.sent]

        for names in self.on_workers(kind, work):
            self.assertLen(set(names), len(names))

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_later_steps_are_not_traced_again(self, kind: str) -> None:
        worker = Worker(LocalTransport(), every_exchange()[kind]())
        traced = []

        @tf.function
        def step(gradients: list[tf.Tensor]) -> None:
            traced.append(1)
            worker.apply(gradients)

        step(worker.gradients(0))  # which may be traced again, for its variables
        count = len(traced)
        for number in range(1, 5):
            step(worker.gradients(number))
        self.assertLen(traced, count)

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_a_restored_state_goes_on_as_if_it_had_never_stopped(
        self, kind: str
    ) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

        def save(worker: Worker) -> list[np.ndarray]:
            worker.train(0, 1, 2).ledger.save(folder)
            return worker.values

        def go_on(worker: Worker, weights: list[list[np.ndarray]]) -> list[np.ndarray]:
            worker.train(7)  # which opens the exchange, and is forgotten
            own = weights[worker.transport.rank]
            for variable, value in zip(worker.variables, own, strict=True):
                variable.assign(value)
            worker.ledger.restore(folder)
            return worker.train(3, 4, 5).values

        weights = self.on_workers(kind, save)
        found = self.on_workers(kind, lambda worker: go_on(worker, weights))
        whole = self.on_workers(kind, lambda w: w.train(0, 1, 2, 3, 4, 5).values)
        for one, two in zip(found, whole, strict=True):
            self.assert_same_bits(one, two)

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_flush_leaves_nothing_behind(self, kind: str) -> None:
        def work(worker: Worker) -> tuple[float, int]:
            worker.train(0, 1, 2, 3)
            flushed(worker.ledger, worker.variables)
            return float(worker.ledger.residual_norm()), len(
                flushed(worker.ledger, worker.variables)
            )

        for norm, _ in self.on_workers(kind, work):
            self.assertEqual(norm, 0.0)

    @parameterized.parameters(*every_exchange())
    @pytest.mark.few(1)
    def test_what_is_told_goes_with_the_owner(self, kind: str) -> None:
        def work(worker: Worker) -> tuple[int, int]:
            worker.train(0, 1)
            before = len(worker.ledger.exchanges())
            worker.owner = None
            return before, len(worker.ledger.left())

        for before, after in self.on_workers(kind, work):
            self.assertEqual((before, after), (1, 0))


if __name__ == "__main__":
    tf.test.main()
