"""Optimizers other than SGD: what accumulates is their own step, of own gradients.

Several workers are threads. Gradients do not depend on weights here, so that an
optimizer that a worker has by itself takes the same steps.
"""

import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import built, compressing, flushed, local_step_of, only
from loopback import run_workers

from tf_dgc import simulate
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import Ledger
from tf_dgc.transports.base import Transport

SHAPES = ((16, 8), (5,), (6, 12), ())
LARGE = (0, 2)
RATE = 0.05


class Slotless(keras.optimizers.SGD):
    """One of the user's own, which keeps nothing."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(2.0 * gradient, variable, learning_rate)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: keras.optimizers.Adam(RATE),
    "Lion": lambda: keras.optimizers.Lion(RATE),
    "RMSprop": lambda: keras.optimizers.RMSprop(RATE, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(RATE),
    "Slotless": lambda: Slotless(RATE),
}


def config_of(**settings: Any) -> DGCConfig:
    return DGCConfig(**({"sparsity": 0.9, "min_elements": 0} | settings))


def gradient_of(rank: int, step: int, size: int) -> list[np.ndarray]:
    """Return a worker's gradients, divided by the number of workers as by Keras."""
    random = np.random.default_rng([rank, step])
    return [np.float32(random.normal(size=shape)) / size for shape in SHAPES]


class Worker:
    """A worker that trains some variables; where `simulated`, all of some."""

    def __init__(
        self,
        transport: Transport,
        make: Callable[[], Any],
        config: DGCConfig,
        dtype: str = "float32",
    ) -> None:
        self.transport, self.optimizer = transport, make()
        self.variables = built(self.optimizer, SHAPES, dtype)
        self.simulated = isinstance(transport, simulate.Stacked)
        if self.simulated:
            self.ledger = Ledger(transport, simulate.each_simulated_step(config))
        else:
            self.ledger = compressing(transport, config)

    def gradients(self, step: int) -> list[Any]:
        size = self.transport.size
        if not self.simulated:
            return gradient_of(self.transport.rank, step, size)
        each = [gradient_of(rank, step, size) for rank in range(size)]
        return [np.stack(parts) for parts in zip(*each, strict=True)]

    def train(self, *steps: int) -> "Worker":
        for step in steps:
            own = local_step_of(self.optimizer, self.variables, RATE)
            plain = [v.value for v in self.variables]
            local = [tf.cast(g, plain[0].dtype) for g in self.gradients(step)]
            update = self.ledger.gradients(self.optimizer, local, plain, own)
            assert update.gradients == [None] * len(plain)
            self.optimizer.iterations.assign_add(1)
        return self

    @property
    def values(self) -> list[np.ndarray]:
        return [v.numpy() for v in self.variables]

    @property
    def slots(self) -> list[np.ndarray]:
        return [v.numpy() for v in self.optimizer.variables[2:]]


def alone(
    make: Callable[[], Any], steps: int, gradients: Callable[[int], list[Any]]
) -> list[np.ndarray]:
    """Return where an optimizer leads by itself."""
    optimizer = make()
    variables = built(optimizer, SHAPES)
    for step in range(steps):
        for gradient, variable in zip(gradients(step), variables, strict=True):
            optimizer.update_step(tf.constant(gradient), variable, tf.constant(RATE))
        optimizer.iterations.assign_add(1)
    return [v.numpy() for v in variables]


def mean_gradient(step: int, size: int) -> list[np.ndarray]:
    each = [gradient_of(rank, step, size) for rank in range(size)]
    return [sum(parts) for parts in zip(*each, strict=True)]


@pytest.mark.long
class LocalStepsTest(parameterized.TestCase, tf.test.TestCase):
    def on_workers(
        self, size: int, name: str, work: Callable[[Worker], Any], **settings: Any
    ) -> list[Any]:
        make, config = OPTIMIZERS[name], config_of(**settings)
        return run_workers(size, lambda found: work(Worker(found, make, config)))

    def test_a_step_far_smaller_than_a_weight_is_not_rounded_away(self) -> None:
        def work(worker: Worker) -> float:
            for variable in worker.variables:
                variable.assign(tf.ones(variable.shape, variable.dtype))
            worker.train(*range(3))
            layout, kept = only(worker.ledger).layout, only(worker.ledger).residual.v
            return float(np.abs(kept.numpy()).sum()) / layout.elements

        self.enter_context(mock.patch.object(sys.modules[__name__], "RATE", 1e-10))
        (kept,) = self.on_workers(1, "Lion", work, sparsity=0.99)
        self.assertBetween(kept, 0.5e-10, 3e-10)

    @parameterized.parameters(0.0, 0.5)
    @pytest.mark.few(0, 1)
    def test_workers_stay_alike_where_a_step_of_all_follows_own_ones(
        self, first: float
    ) -> None:
        settings = {"warmup_steps": 2, "warmup_stages": (first,)}

        def work(worker: Worker) -> list[np.ndarray]:
            worker.train(*range(5))
            own = worker.variables[:1]  # as where another layer is frozen
            worker.optimizer.iterations.assign_add(1)
            for step in range(2):
                worker.ledger.gradients(
                    worker.optimizer,
                    [tf.constant(worker.gradients(step)[0])],
                    [own[0].value],
                    local_step_of(worker.optimizer, own, RATE),
                )
            return worker.values

        one, two, three = self.on_workers(3, "Adam", work, **settings)
        for other in (two, three):
            for mine, theirs in zip(one, other, strict=True):
                self.assertEqual(mine.tobytes(), theirs.tobytes())

    @parameterized.product(
        name=list(OPTIMIZERS),
        settings=[
            {},
            {"value_dtype": "sign"},
            {"warmup_steps": 6, "warmup_stages": (0.75, 0.8)},
        ],
    )
    @pytest.mark.few(0, 2)
    def test_sent_and_kept_is_the_mean_of_what_all_would_step(
        self, name: str, settings: dict[str, Any]
    ) -> None:
        steps, size = 9, 3
        own = [
            alone(
                OPTIMIZERS[name],
                steps,
                lambda step, rank=rank: [
                    size * g for g in gradient_of(rank, step, size)
                ],
            )
            for rank in range(size)
        ]

        def work(worker: Worker) -> tuple[list[np.ndarray], list[Any]]:
            worker.train(*range(steps))
            exchange = only(worker.ledger)
            layout, residual = exchange.layout, exchange.residual.v.numpy()
            kept = [
                residual[s.offset : s.offset + s.size].reshape(s.shape)
                for s in layout.segments
            ]
            return worker.values, kept

        found = self.on_workers(size, name, work, **settings)
        for place, i in enumerate(LARGE):
            expected = sum(each[i] for each in own) / size
            kept = sum(parts[place] for _, parts in found)
            self.assertAllClose(found[0][0][i] - kept, expected, 1e-5, 1e-5)
        dense = alone(OPTIMIZERS[name], steps, lambda step: mean_gradient(step, size))
        self.assertAllClose(found[0][0][1], dense[1], 1e-5, 1e-6)
        for values, _ in found:
            for one, two in zip(values, found[0][0], strict=True):
                self.assertEqual(one.tobytes(), two.tobytes())

    @parameterized.parameters(*OPTIMIZERS)
    @pytest.mark.few(0, 1)
    def test_where_all_is_sent_it_is_the_optimizer_on_one_worker(
        self, name: str
    ) -> None:
        expected = alone(OPTIMIZERS[name], 6, lambda step: mean_gradient(step, 3))
        found = self.on_workers(
            3, name, lambda worker: worker.train(*range(6)).values, sparsity=0.0
        )
        for values in found:
            self.assertAllClose(values, expected, 1e-5, 1e-6)

    @parameterized.product(
        name=list(OPTIMIZERS),
        settings=[
            {"clip_norm": 1.0},
            {"sparsity": 0.0},
            {"value_dtype": "sign", "warmup_steps": 3, "warmup_stages": (0.0, 0.5)},
        ],
    )
    @pytest.mark.few(0, 1)
    def test_simulated_workers_have_the_same_bits(
        self, name: str, settings: dict[str, Any]
    ) -> None:
        steps, size = 6, 3

        def work(worker: Worker) -> tuple[Any, ...]:
            worker.train(*range(steps))
            return worker.values, worker.slots, only(worker.ledger).residual.v.numpy()

        real = self.on_workers(size, name, work, **settings)
        stacked = simulate.Stacked(size)
        stacked.device = "/device:CPU:0"  # where the others are
        with tf.device(stacked.device):
            worker = Worker(stacked, OPTIMIZERS[name], config_of(**settings))
            values, slots, residual = work(worker)
        for one, two in zip([*values, *slots], [*real[0][0], *real[0][1]], strict=True):
            self.assertAllEqual(one, two)
        self.assertAllEqual(residual, np.stack([each[2] for each in real]))

    @parameterized.parameters("float16", "bfloat16")
    @pytest.mark.extended
    def test_weights_of_16_bits_keep_their_type_and_the_same_bits(
        self, dtype: str
    ) -> None:
        def work(found: Transport) -> list[Any]:
            worker = Worker(found, OPTIMIZERS["Lion"], config_of(), dtype)
            worker.train(*range(4))
            return [(v.value.dtype.name, v.numpy().tobytes()) for v in worker.variables]

        one, two = run_workers(2, work)
        self.assertEqual(one, two)
        self.assertEqual({name for name, _ in one}, {dtype})
        self.assertTrue(all(any(octets) for _, octets in one[:3]))

    @pytest.mark.slow
    def test_a_restored_worker_has_its_own_slots_again(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

        def saved_by_keras(worker: Worker) -> list[Any]:
            return [*worker.variables, *worker.optimizer.variables]

        def save(worker: Worker) -> list[np.ndarray]:
            worker.train(0, 1, 2).ledger.save(folder)
            return [v.numpy() for v in saved_by_keras(worker)]

        def go_on(worker: Worker) -> list[np.ndarray]:
            for variable, value in zip(saved_by_keras(worker), kept, strict=True):
                variable.assign(value)  # of rank 0
            worker.ledger.restore(folder)
            return worker.train(3, 4).values

        kept = self.on_workers(2, "Adam", save)[0]
        found = self.on_workers(2, "Adam", go_on)
        whole = self.on_workers(2, "Adam", lambda w: w.train(0, 1, 2, 3, 4).values)
        for one, two in zip(found, whole, strict=True):
            for a, b in zip(one, two, strict=True):
                self.assertEqual(a.tobytes(), b.tobytes())

    @pytest.mark.extended
    def test_a_stage_that_is_dense_again_begins_with_the_mean_of_slots(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.on_workers(2, "Adam", lambda w: w.train(0, 1, 2).ledger.save(folder))

        def go_on(worker: Worker) -> list[np.ndarray]:
            worker.ledger.restore(folder)
            return worker.train(3, 4).values

        one, two = self.on_workers(2, "Adam", go_on, sparsity=0.0)
        for a, b in zip(one, two, strict=True):
            self.assertEqual(a.tobytes(), b.tobytes())

    def test_flush_applies_what_is_kept(self) -> None:
        def work(worker: Worker) -> tuple[list[np.ndarray], list[np.ndarray], float]:
            worker.train(0, 1, 2)
            exchange = only(worker.ledger)
            size, before = exchange.layout.segments[0].size, worker.values[0]
            own = exchange.residual.v.numpy()[:size].reshape(before.shape)
            flushed(worker.ledger, [v.value for v in worker.variables])
            norm = float(worker.ledger.residual_norm())
            return before - worker.values[0], own, norm

        found = self.on_workers(2, "Adam", work)
        expected = sum(own for _, own, _ in found)
        for moved, _, norm in found:
            self.assertAllClose(moved, expected, 1e-5, 1e-6)
            self.assertEqual(norm, 0.0)


if __name__ == "__main__":
    tf.test.main()
