"""Workers of a site take steps together, and sites average: as in NumPy, bit for bit.

Several workers are threads.
"""

import pathlib
import tempfile
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from averagers import MOMENTUM, RATE, SHAPES, Worker, gradient_of, start
from loopback import Loopback, run_workers

from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.averaged import settle
from tf_dgc.transports.mesh import Sites

EVEN, UNEVEN = ("a", "a", "b", "b"), ("a", "b", "a", "a")
ALONE = ("a", "a", "b")
DGC = DGCConfig(sparsity=0.9, min_elements=64)


def worker(transport: Loopback, names: Any, **settings: Any) -> Worker:
    return Worker(Sites(transport, names), **({"within": "dense"} | settings))


class Twin:
    """All sites in NumPy, in double precision."""

    def __init__(self, names: Any, outer: tuple[float, float] = (1.0, 0.0)) -> None:
        sites = dict.fromkeys(names)
        self.members = [[r for r, n in enumerate(names) if n == s] for s in sites]
        self.shares = [len(ranks) / len(names) for ranks in self.members]
        self.own = [[w.astype("float64") for w in start()] for _ in sites]
        self.velocity = [[np.zeros(s) for s in SHAPES] for _ in sites]
        self.outer, self.momenta = outer, [np.zeros(s) for s in SHAPES]
        self.anchor = list(self.own[0])
        self.departed: list[list[np.ndarray]] = []

    def train(self, steps: int, period: int, overlap: int) -> list[list[np.ndarray]]:
        for step in range(steps):
            for ranks, own, velocity in zip(
                self.members, self.own, self.velocity, strict=True
            ):
                at = [w.astype("float32") for w in own]
                gradients = [gradient_of(at, rank, step) for rank in ranks]
                for i, each in enumerate(zip(*gradients, strict=True)):
                    velocity[i] = MOMENTUM * velocity[i] + np.mean(each, axis=0)
                    own[i] = own[i] - RATE * velocity[i]
            if self.departed and (step + 1) % period == overlap % period:
                self.land()
            if (step + 1) % period == 0:
                self.departed = [list(own) for own in self.own]
                if not overlap:
                    self.land()
        return [
            own
            for rank in range(sum(map(len, self.members)))
            for ranks, own in zip(self.members, self.own, strict=True)
            if rank in ranks
        ]

    def land(self) -> None:
        for i in range(len(SHAPES)):
            changes = [self.anchor[i] - own[i] for own in self.departed]
            change = np.average(changes, axis=0, weights=self.shares)
            self.momenta[i] = self.outer[1] * self.momenta[i] + change
            self.anchor[i] = self.anchor[i] - self.outer[0] * self.momenta[i]
            for own, departed in zip(self.own, self.departed, strict=True):
                own[i] = self.anchor[i] + (own[i] - departed[i])
        self.departed = []


@pytest.mark.long
class SitesTest(parameterized.TestCase, tf.test.TestCase):
    def assert_same_bits(self, found: Any) -> None:
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, two)

    @parameterized.product(
        names=(EVEN, UNEVEN, ALONE),
        settings=({}, {"outer": (0.7, 0.5)}, {"overlap": 1}, {"overlap": 3}),
    )
    @pytest.mark.few(3, 12)
    def test_they_are_what_the_formulas_say(self, names: Any, settings: Any) -> None:
        found = run_workers(
            len(names), lambda t: worker(t, names, period=3, **settings).train(8)
        )
        twin = Twin(names, settings.get("outer", (1.0, 0.0)))
        expected = twin.train(8, 3, settings.get("overlap", 0))
        for one, two in zip(found, expected, strict=True):
            for own, wanted in zip(one, two, strict=True):
                self.assertAllClose(own, wanted, 1e-4, 1e-4)

    @parameterized.parameters((EVEN,), (UNEVEN,))
    def test_rounds_of_one_step_are_dense_training(self, names: Any) -> None:
        size = len(names)
        dense = run_workers(size, lambda t: worker(t, "a" * size, period=9).train(6))
        self.assert_same_bits(dense)
        found = run_workers(size, lambda t: worker(t, names, period=1).train(6))
        for own, wanted in zip(found[0], dense[0], strict=True):
            self.assertAllClose(own, wanted, 1e-6, 1e-6)

    @parameterized.product(
        within=("dense", DGC),
        settings=({}, {"overlap": 2}, {"compression": DGC}, {"outer": (0.7, 0.5)}),
    )
    @pytest.mark.few(1, 4)
    def test_bits_are_the_same_at_a_site_always_and_everywhere_after_rounds(
        self, within: Any, settings: Any
    ) -> None:
        def work(transport: Loopback) -> Any:
            own = worker(
                transport, EVEN, period=4, within=within, averaged=1, **settings
            )
            steps = [own.train(1) for _ in range(10)]
            settle(own.synchronizer)
            return steps, [*own.values, *[v.numpy() for v in own.statistics]]

        found = run_workers(4, work)
        for steps in zip(*(steps for steps, _ in found), strict=True):
            self.assert_same_bits(steps[:2])
            self.assert_same_bits(steps[2:])
        if "overlap" not in settings:
            self.assert_same_bits([steps[7] for steps, _ in found])
        self.assertNotAllClose(found[0][0][5][0], found[2][0][5][0])
        self.assert_same_bits([last for _, last in found])
        self.assertAllClose(found[0][1][-1], 1.5)  # of ranks, the statistics

    @parameterized.product(
        within=("dense", DGC), settings=({}, {"overlap": 3, "compression": DGC})
    )
    @pytest.mark.few(0, 2)
    def test_what_was_saved_in_a_period_goes_on_bit_for_bit(
        self, within: Any, settings: Any
    ) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        settings = {"period": 4, "within": within, **settings}

        def work(transport: Loopback) -> Any:
            own = worker(transport, EVEN, **settings)
            own.train(6)
            own.synchronizer.save(folder)
            return own.train(7)

        expected = run_workers(4, work)

        def again(transport: Loopback) -> Any:
            own = worker(transport, EVEN, **settings)
            own.train(1)
            own.synchronizer.restore(folder)
            own.taken = 6
            return own.train(7)

        for one, two in zip(expected, run_workers(4, again), strict=True):
            self.assert_same_bits([one, two])

    def test_rounds_alone_go_between_sites(self) -> None:
        def work(transport: Loopback) -> Any:
            own = worker(transport, EVEN, period=4)
            own.train(4)
            return own.synchronizer.stats(total=True), transport.sent

        for stats, sent in run_workers(4, work):
            size = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
            self.assertLess(int(stats.sent_bytes), size + 300)
            self.assertGreaterEqual(int(stats.sent_bytes), size)
            self.assertNotIn("optimizer0.average", {each.name for each in sent})
