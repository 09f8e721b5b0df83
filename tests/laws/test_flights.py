"""Rounds in flight are what the formulas say, in NumPy, and lose nothing on the way.

Several workers are threads.
"""

import pathlib
import tempfile
import threading
from typing import Any

import numpy as np
import numpy_twin
import pytest
import tensorflow as tf
from absl.testing import parameterized
from averagers import MOMENTUM, RATE, SHAPES, Worker, gradient_of, start
from ledgers import flushed
from loopback import Loopback, outcomes, run_workers

from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.exchanges.averaged import settle
from tf_dgc.exchanges.modes import Combining
from tf_dgc.transports.local import LocalTransport

SPARSITY = 0.9
COMPRESSION = DGCConfig(sparsity=SPARSITY, min_elements=64)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"outer": (0.7, 0.5)},
    {"compression": COMPRESSION},
    {"compression": COMPRESSION, "combining": Combining(True, 0.95)},
)


class Twin:
    """All workers in NumPy, in double precision."""

    def __init__(
        self,
        workers: int,
        outer: tuple[float, float] = (1.0, 0.0),
        compression: DGCConfig | None = None,
        combining: Combining | None = None,
    ) -> None:
        self.outer, self.compressed = outer, compression is not None
        self.combining = combining or Combining()
        self.own = [[w.astype("float64") for w in start()] for _ in range(workers)]
        self.velocity = [[np.zeros(s) for s in SHAPES] for _ in range(workers)]
        self.residual = [[np.zeros(s) for s in SHAPES] for _ in range(workers)]
        self.anchor, self.momenta = list(self.own[0]), [np.zeros(s) for s in SHAPES]
        self.departed: list[list[np.ndarray]] | None = None

    def train(self, steps: int, period: int, overlap: int) -> "Twin":
        for step in range(steps):
            for rank, own in enumerate(self.own):
                gradients = gradient_of([w.astype("float32") for w in own], rank, step)
                for i, g in enumerate(gradients):
                    u = self.velocity[rank][i] = MOMENTUM * self.velocity[rank][i] + g
                    own[i] = own[i] - RATE * u
            if self.departed is not None and (step + 1) % period == overlap % period:
                self.land()
            if (step + 1) % period == 0:
                self.depart()
        return self

    def depart(self) -> None:
        self.departed = [list(own) for own in self.own]

    def land(self) -> None:
        assert self.departed is not None
        for i in range(len(SHAPES)):
            changes = [self.anchor[i] - own[i] for own in self.departed]
            change = self.exchanged(i, changes)
            rate, momentum = self.outer
            self.momenta[i] = momentum * self.momenta[i] + change
            self.anchor[i] = self.anchor[i] - rate * self.momenta[i]
            for own, departed in zip(self.own, self.departed, strict=True):
                own[i] = self.anchor[i] + (own[i] - departed[i])
        self.departed = None

    def exchanged(self, i: int, changes: list[np.ndarray]) -> np.ndarray:
        if not self.compressed or changes[0].ndim < 2 or changes[0].size < 64:
            return np.mean(changes, axis=0)
        sent = []
        for rank, change in enumerate(changes):
            share = change / len(changes)
            kept = self.combining.decay * self.residual[rank][i] + share
            chosen = numpy_twin.select(kept, numpy_twin.threshold(kept, SPARSITY))
            sent.append(numpy_twin.send(kept, chosen))
            self.residual[rank][i] = numpy_twin.keep(kept, sent[-1])
        total = np.sum(sent, axis=0)
        if self.combining.senders:
            senders = np.sum([part != 0 for part in sent], axis=0)
            total = total * np.minimum(len(changes) / np.maximum(senders, 1), 4)
        return total


def values_of(worker: Worker) -> list[np.ndarray]:
    return [*worker.values, *[v.numpy() for v in worker.statistics]]


@pytest.mark.long
class FlightsTest(parameterized.TestCase, tf.test.TestCase):
    def assert_same_bits(self, found: list[list[np.ndarray]]) -> None:
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, two)

    @parameterized.product(settings=SETTINGS, overlap=(1, 2, 4))
    @pytest.mark.few(1, 2)
    def test_they_are_what_the_formulas_say(self, settings: Any, overlap: int) -> None:
        found = run_workers(
            2, lambda t: Worker(t, period=4, overlap=overlap, **settings).train(14)
        )
        expected = Twin(2, **settings).train(14, 4, overlap).own
        for one, two in zip(found, expected, strict=True):
            for own, wanted in zip(one, two, strict=True):
                self.assertAllClose(own, wanted, 1e-4, 1e-4)

    @parameterized.parameters(*SETTINGS)
    @pytest.mark.few(0, 1)
    def test_what_landed_has_the_same_bits_everywhere(self, **settings: Any) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=3, overlap=2, **settings)
            worker.train(5)  # it has just landed
            agreed = [v.numpy() for v in worker.period.anchor.values]
            worker.train(3)
            return [*agreed, *[v.numpy() for v in worker.period.anchor.values]]

        self.assert_same_bits(run_workers(3, work))

    @parameterized.parameters(*SETTINGS)
    @pytest.mark.few(0, 1)
    def test_where_workers_meet_all_have_the_same_bits(self, **settings: Any) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=3, overlap=3, averaged=1, **settings)
            worker.train(4)  # one is in flight
            settle(worker.synchronizer)
            found = values_of(worker)
            worker.train([5, 3, 1][transport.rank])  # data end early
            settle(worker.synchronizer)
            return [*found, *values_of(worker)]

        found = run_workers(3, work)
        self.assert_same_bits(found)
        self.assertNotAllClose(found[0][0], start()[0])

    def test_landing_at_once_is_the_outer_step_of_rounds_at_once(self) -> None:
        def work(transport: Loopback, **settings: Any) -> list[np.ndarray]:
            worker = Worker(transport, period=4, outer=(0.7, 0.9), **settings)
            for _ in range(3):
                worker.train(4)
                settle(worker.synchronizer)  # before a step follows
            return worker.values

        at_once = run_workers(2, work)
        self.assert_same_bits([*at_once, *run_workers(2, lambda t: work(t, overlap=2))])

    @parameterized.product(settings=SETTINGS, steps=(5, 6, 7))
    @pytest.mark.few(0, 1)
    def test_a_restored_flight_lands_as_if_it_had_never_been_saved(
        self, settings: Any, steps: int
    ) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        settings = {"period": 4, "overlap": 3, "averaged": 1} | settings

        def whole(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, **settings)
            worker.train(steps)
            worker.synchronizer.save(folder)
            worker.train(9)
            return values_of(worker)

        def resumed(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, **settings)
            worker.train(5)  # of another life, with a round in flight
            worker.synchronizer.restore(folder)
            worker.taken = steps
            settle(worker.synchronizer)  # as at the start of `fit`: the flight goes on
            worker.train(9)
            return values_of(worker)

        expected, found = run_workers(2, whole), run_workers(2, resumed)
        for one, two in zip(expected, found, strict=True):
            self.assert_same_bits([one, two])

    @pytest.mark.extended
    def test_a_state_is_restored_on_another_number_of_workers(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

        def save(transport: Loopback) -> None:
            worker = Worker(transport, period=4, overlap=3)
            worker.train(5)
            worker.synchronizer.save(folder)

        def go_on(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=4, overlap=3)
            worker.train(1)
            worker.synchronizer.restore(folder)
            worker.train(2)
            settle(worker.synchronizer)
            return worker.values

        run_workers(3, save)
        self.assert_same_bits(run_workers(2, go_on))

    def test_compression_loses_nothing(self) -> None:
        def work(transport: Loopback) -> Any:
            worker = Worker(transport, period=2, overlap=1, compression=COMPRESSION)
            random = np.random.default_rng(transport.rank)
            moved = [np.zeros(shape) for shape in SHAPES]
            for _ in range(9):
                worker.apply([random.normal(size=s).astype("float32") for s in SHAPES])
                own = zip(moved, worker.velocities, strict=True)
                moved = [m - RATE * u.numpy() for m, u in own]
            settle(worker.synchronizer)
            flushed(worker.synchronizer, worker.variables)
            return worker.values, moved

        found = run_workers(3, work)
        moved = [np.mean(p, axis=0) for p in zip(*[f[1] for f in found], strict=True)]
        for values, _ in found:
            for own, w, m in zip(values, start(), moved, strict=True):
                self.assertAllClose(own, w + m, 1e-5, 1e-5)

    @pytest.mark.extended
    def test_in_a_graph_they_are_the_same(self) -> None:
        def work(graph: bool) -> list[np.ndarray]:
            settings = {"period": 3, "overlap": 2, "synchronous_steps": 2}
            worker = Worker(LocalTransport(), **settings)
            gradients = [tf.constant(w) for w in start()]

            @tf.function(autograph=False)
            def steps() -> None:
                def step(number: tf.Tensor) -> list[tf.Tensor]:
                    worker.apply(gradients)
                    return [number + 1]

                tf.while_loop(lambda number: number < 9, step, [tf.constant(0)])

            if graph:
                worker.apply(gradients)
                steps()
            else:
                for _ in range(10):
                    worker.apply(gradients)
            self.assertEqual(int(worker.period.progress.rounds), 2)
            return worker.values

        for one, two in zip(work(True), work(False), strict=True):
            self.assertAllClose(one, two, 1e-6, 1e-6)

    @parameterized.parameters(np.nan, np.inf)
    @pytest.mark.few(1)
    def test_what_is_not_finite_stops_all_workers_where_it_lands(
        self, value: float
    ) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=3, overlap=2)
            worker.train(2)
            if transport.rank == 1:
                worker.variables[2][3, 1].assign(value)
            worker.train(2)
            self.assertEqual(int(worker.period.progress.taken), 4)
            worker.train(1)

        for outcome in outcomes(3, work):
            self.assertIsInstance(outcome, tf.errors.InvalidArgumentError)
            self.assertIn("A variable holds NaN or infinity", str(outcome))

    def test_workers_in_different_rounds_stop(self) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=2, overlap=1)
            worker.train(3)
            worker.period.progress.rounds.assign_add(transport.rank)
            worker.train(2)

        for outcome in outcomes(2, work):
            self.assertIsInstance(outcome, tf.errors.InvalidArgumentError)
            self.assertIn("not in the same round of the same", str(outcome))

    @pytest.mark.extended
    def test_weights_that_have_drifted_apart_stop_all_workers(self) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=60, overlap=1)
            worker.train(1)
            worker.period.anchor.values[0].assign_add(
                tf.fill(SHAPES[0], float(transport.rank))
            )
            worker.train(121)

        for outcome in outcomes(2, work):
            self.assertIsInstance(outcome, tf.errors.InvalidArgumentError)
            self.assertIn("drifted apart", str(outcome))

    def test_a_worker_that_is_lost_is_an_error_where_the_round_lands(self) -> None:
        def work(transport: Loopback) -> int:
            worker = Worker(transport, period=2, overlap=2)
            worker.train(3 if transport.rank else 1)
            if not transport.rank:
                raise InterruptedError
            try:
                worker.train(9)
            except ConnectionError:
                return worker.taken
            return -1

        gone, *others = outcomes(3, work)
        self.assertIsInstance(gone, InterruptedError)
        self.assertEqual(others, [3, 3])

    def test_training_goes_on_while_a_round_is_in_flight(self) -> None:
        def work(transport: Loopback) -> int:
            worker = Worker(transport, period=4, overlap=4)
            if transport.rank:
                worker.train(3)
                arrived.wait(60)
                worker.train(5)
                return worker.taken
            worker.train(7)  # three of them before the other has sent anything
            arrived.set()
            worker.train(1)
            return worker.taken

        arrived = threading.Event()
        self.assertEqual(run_workers(2, work), [8, 8])

    def test_bytes_are_those_handed_to_the_transport(self) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=2, overlap=1)
            worker.train(1)
            before = len(transport.sent)
            worker.train(2)
            sent = sum(call.bytes for call in transport.sent[before:])
            self.assertEqual(sent, 4 * sum(map(np.size, start())) + 112)
            self.assertEqual(int(worker.synchronizer.stats().sent_bytes), sent)

        run_workers(2, work)


class SettingsTest(parameterized.TestCase, tf.test.TestCase):
    def test_none_is_zero(self) -> None:
        self.assertIsNone(AveragingConfig(overlap=0).overlap)
        self.assertIsNone(AveragingConfig().overlap)

    @parameterized.parameters(
        ({"overlap": 17}, "`overlap` must be at most a period, 16"),
        ({"overlap": 5, "period": "adaptive"}, "`overlap` must be at most a period, 4"),
        ({"overlap": -1}, "`overlap` must be"),
        ({"overlap": "late"}, "`overlap` must be None, a number of steps, or 'auto'"),
        ({"overlap": 2, "average_slots": True}, "`average_slots` must be False with"),
    )
    def test_what_makes_no_sense_is_refused(self, settings: Any, text: str) -> None:
        with self.assertRaisesRegex(ValueError, text):
            AveragingConfig(**settings)


if __name__ == "__main__":
    tf.test.main()
