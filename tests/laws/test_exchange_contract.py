"""What every exchange keeps to, whatever it exchanges."""

import atexit
import itertools
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import flushed
from loopback import Owner, run_workers

from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import AveragingConfig, DGCConfig, DownpourConfig
from tf_dgc.exchanges import Averaging, Companions, EachStep, Expected, Ledger
from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.exchanges.moved import Trained
from tf_dgc.servers import shared
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers
from tf_dgc.transports.base import Transport
from tf_dgc.transports.local import LocalTransport

SHAPES = ((16, 8), (5,), (6, 12))
DTYPES = (tf.float32, tf.float32, tf.float16)
MOMENTUM = Momentum(0.9, False, 0.1)
COMPRESSION = DGCConfig(sparsity=0.9, min_elements=0)
DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
_numbers = itertools.count()
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
    @pytest.mark.few(0, 1)
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
    @pytest.mark.few(0, 1)
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
    @pytest.mark.few(0, 1)
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
    @pytest.mark.slow
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
    @pytest.mark.few(0, 1)
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


WHOLE_STEPS = Momentum(0.0, False, 1.0)
SERVED = {
    "ServedWhole": DownpourConfig(staleness_rate=False),
    "ServedLargest": DownpourConfig(staleness_rate=False, compression=COMPRESSION),
    "ServedTogether": DownpourConfig(synchronous=True),
}


class ServedWorker(Worker):
    """A worker whose variables are on servers, which are in this process."""

    make: Downpouring

    def __init__(self, transport: Transport, config: DownpourConfig) -> None:
        servers = Servers(["a:1", "b:1"])
        servers.devices = [DEVICE, DEVICE]
        args = servers, transport.rank, transport.size, 30.0, 30.0
        self.members = Members(*args, {}, {})
        super().__init__(transport, Downpouring(config, servers, self.members))

    def gradients(self, step: int) -> list[tf.Tensor]:
        """Return integers, whose sums are the same in any order."""
        random = np.random.default_rng([self.transport.rank, step])
        return [
            tf.cast(random.integers(-8, 9, size=shape), dtype)
            for shape, dtype in zip(SHAPES, DTYPES, strict=True)
        ]

    def exchange(self, owner: Any = None, variables: Any = None) -> Any:
        owner, variables = owner or self.owner, variables or self.variables
        if not self.ledger.knows(owner, variables):
            steps = tf.Variable(tf.zeros([], tf.int64))
            whole = [False] * len(variables)
            args: Any = [], whole, [], steps, 1, False, lambda: True, None, {}
            self.make.expect(Trained(*args))
        return self.ledger.of(owner, variables, WHOLE_STEPS)

    def apply(
        self, gradients: list[Any], owner: Any = None, variables: Any = None
    ) -> None:
        """Take a step: push gradients, by which the servers take it, and fetch."""
        owner, variables = owner or self.owner, variables or self.variables
        exchange = self.exchange(owner, variables)
        self.members.meetings.moves.step()
        self.members.meetings.tell()
        update = self.ledger.gradients(owner, gradients, variables, WHOLE_STEPS)

        def step(factor: tf.Tensor, means: Any = None) -> None:
            found = update.gradients
            if means is not None:
                found = [mean.joined() for mean in means]
            for gradient, variable in zip(found, variables, strict=True):
                if gradient is not None:
                    change = tf.cast(factor, gradient.dtype) * gradient
                    self.make.twins.of(variable).assign_sub(change)

        exchange.push(step)
        self.ledger.parameters(owner, variables)

    def leave(self) -> None:
        """Leave the job, as at the end of a process."""
        for exchange in self.ledger.exchanges():
            if exchange.turns is not None:
                exchange.turns.attendance.leave()
        self.members.pulse.end()
        atexit.unregister(self.members.leave)


class ServedContractTest(parameterized.TestCase, tf.test.TestCase):
    """What exchanges with servers keep to, whatever they push."""

    def setUp(self) -> None:
        super().setUp()
        container = f"contract-{next(_numbers)}"
        self.enterContext(mock.patch.object(shared, "CONTAINER", container))

    def on_workers(self, kind: str, work: Callable[[ServedWorker], Any]) -> list[Any]:
        """Return what each of two workers has found, once both have trained."""
        ended = threading.Barrier(2)

        def run(transport: Transport) -> Any:
            worker = ServedWorker(transport, SERVED[kind])
            try:
                found = work(worker)
                for exchange in worker.ledger.exchanges():
                    if exchange.turns is not None:
                        exchange.turns.attendance.leave()
                ended.wait(60.0)
                for exchange in worker.ledger.exchanges():
                    exchange.settle(always=True)
                return found() if callable(found) else found
            finally:
                worker.leave()

        return run_workers(2, run)

    @parameterized.parameters(*SERVED)
    @pytest.mark.extended
    def test_workers_have_the_same_bits_once_all_have_fetched(self, kind: str) -> None:
        def work(worker: ServedWorker) -> Any:
            worker.train(0, 1, 2)
            return lambda: worker.values

        one, two = self.on_workers(kind, work)
        for a, b in zip(one, two, strict=True):
            self.assertEqual(a.tobytes(), b.tobytes())
        self.assertTrue(any(np.any(value) for value in one))

    @parameterized.parameters(*SERVED)
    @pytest.mark.long
    def test_what_was_pushed_and_what_is_kept_back_is_all(self, kind: str) -> None:
        def work(worker: ServedWorker) -> Any:
            steps = [worker.gradients(step) for step in range(3)]
            worker.train(0, 1, 2)
            given = [np.sum(parts, axis=0) for parts in zip(*steps, strict=True)]

            def found() -> Any:
                kept = sum(float(tf.reduce_sum(k)) for k in worker.exchange().kept())
                sent = sum(float(np.sum(part, dtype="float64")) for part in given)
                moved = sum(float(np.sum(v, dtype="float64")) for v in worker.values)
                return sent, kept, moved

            return found

        told = self.on_workers(kind, work)
        sent, kept = (sum(each[i] for each in told) for i in range(2))
        if kind == "ServedTogether":  # by the mean of two
            sent /= 2
        for _, _, moved in told:
            self.assertAllClose(-moved, sent - kept, 1e-4, 1e-4)

    @parameterized.parameters(*SERVED)
    @pytest.mark.extended
    def test_gradients_keep_shapes_and_types(self, kind: str) -> None:
        def work(worker: ServedWorker) -> list[Any]:
            worker.exchange()
            args = worker.owner, worker.gradients(0), worker.variables
            update = worker.ledger.gradients(*args, WHOLE_STEPS)
            return [g if g is None else (g.shape, g.dtype) for g in update.gradients]

        for found in self.on_workers(kind, work):
            for one, form in zip(found, zip(SHAPES, DTYPES, strict=True), strict=True):
                self.assertIn(one, (None, form))

    @parameterized.parameters(*SERVED)
    @pytest.mark.few(1, 3)
    @pytest.mark.long
    def test_owners_are_apart(self, kind: str) -> None:
        def work(worker: ServedWorker) -> Any:
            owner, variables = worker.another()
            for step in range(3):
                worker.train(step)
                worker.apply(worker.gradients(step), owner, variables)
            # The owner lives until all have fetched.
            return lambda: (worker.values, [v.numpy() for v in variables], owner)

        for first, second, _ in self.on_workers(kind, work):
            for a, b in zip(first, second, strict=True):
                self.assertEqual(a.tobytes(), b.tobytes())

    @parameterized.parameters(*SERVED)
    @pytest.mark.extended
    def test_flush_leaves_nothing_behind(self, kind: str) -> None:
        def work(worker: ServedWorker) -> Any:
            worker.train(0, 1)
            flushed(worker.ledger, worker.variables)
            return [float(tf.reduce_sum(abs(k))) for k in worker.exchange().kept()]

        for kept in self.on_workers(kind, work):
            self.assertEqual(sum(kept), 0.0)

    @parameterized.parameters(*SERVED)
    @pytest.mark.extended
    def test_what_is_told_goes_with_the_owner(self, kind: str) -> None:
        def work(worker: ServedWorker) -> tuple[int, int]:
            worker.train(0, 1)
            before = len(worker.ledger.exchanges())
            worker.owner = None
            return before, len(worker.ledger.left())

        for before, after in self.on_workers(kind, work):
            self.assertEqual((before, after), (1, 0))


if __name__ == "__main__":
    tf.test.main()
