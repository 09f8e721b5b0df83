"""The laws of the exchange, over whatever shapes, types and settings there are.

Several workers are threads. The laws are numbered as in the design: 1 sent + kept is
what was accumulated, 2 at sparsity 0 it is momentum SGD, masking or not, 3 N workers
are one worker, 4 all hold the same bits, 5 what is packed is unpacked
(test_message.py), 7 a restored state goes on as if it had never stopped.
"""

import pathlib
import tempfile
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st
from ledgers import compressing, exchange, flushed, only
from loopback import Loopback, Owner, run_workers

from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import VALUE_DTYPES, DGCConfig
from tf_dgc.exchanges import fused

STEPS = 4
steady = hypothesis.settings(deadline=None, derandomize=True, max_examples=12)


class Case(NamedTuple):
    """What is exchanged, by whom, and how."""

    tensors: list[tuple[tuple[int, ...], str]]  # shapes and types
    workers: int
    momentum: Momentum | None
    settings: dict[str, Any]
    seed: int

    def gradients(self, rank: int, step: int) -> list[tf.Tensor]:
        random = np.random.default_rng([self.seed, rank, step])
        return [
            tf.cast(tf.constant(random.normal(size=shape), tf.float32), dtype)
            for shape, dtype in self.tensors
        ]

    def config(self, **others: Any) -> DGCConfig:
        return DGCConfig(**({"min_elements": 0} | self.settings | others))


class Worker:
    """A worker's end of a case."""

    def __init__(self, case: Case, transport: Any, **settings: Any) -> None:
        self.case, self.rank, self.owner = case, transport.rank, Owner()
        config = case.config(**settings)
        self.synchronizer = compressing(transport, config)
        self.variables = [tf.Variable(tf.zeros(*tensor)) for tensor in case.tensors]

    def step(self, number: int) -> list[np.ndarray]:
        gradients = self.case.gradients(self.rank, number)
        args = self.owner, gradients, self.variables, self.case.momentum
        found = exchange(self.synchronizer, *args)
        return [tf.cast(gradient, tf.float32).numpy() for gradient in found.gradients]

    @property
    def state(self) -> dict[str, np.ndarray]:
        arena = only(self.synchronizer)
        return {name.split()[0]: v.numpy() for name, v in arena.state.items()}


@st.composite
def cases(draw: Any, **fixed: Any) -> Case:
    """Draw tensors, empty and one-element ones among them, and settings."""
    sides = st.integers(0, 9)
    shapes = st.one_of(
        st.tuples(sides, sides),
        st.tuples(sides, sides, sides),
        st.tuples(sides),
        st.sampled_from([(), (1, 1), (0, 5), (300, 2)]),
    )
    dtypes = st.sampled_from(["float32", "float16", "bfloat16", "float64"])
    factors, rates = st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([1.0, 0.25])
    momenta = st.builds(Momentum, factors, st.booleans(), rates, st.just(()))
    settings = {
        "sparsity": st.sampled_from([0.0, 0.3, 0.75, 0.9, 0.999]),
        "momentum_masking": st.booleans(),
        "value_dtype": st.sampled_from(VALUE_DTYPES),
        "warmup_steps": st.integers(0, STEPS),
    }
    return Case(
        draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4)),
        draw(st.integers(1, 3)),
        draw(st.none() | momenta),
        {
            name: fixed[name] if name in fixed else draw(values)
            for name, values in settings.items()
        },
        draw(st.integers(0, 2**32)),
    )


def compressed(case: Case) -> list[int]:
    kept_dense = ("float64",)
    return [
        i
        for i, (shape, dtype) in enumerate(case.tensors)
        if len(shape) > 1 and np.prod(shape) > 0 and dtype not in kept_dense
    ]


def momentum_sgd(case: Case) -> list[list[np.ndarray]]:
    """Return the steps of SGD on the sum of all workers' gradients, in float64."""
    velocities = [np.zeros(shape) for shape, _ in case.tensors]
    found = []
    for number in range(STEPS):
        updates = []
        for i, velocity in enumerate(velocities):
            parts = [
                tf.cast(case.gradients(rank, number)[i], tf.float64).numpy()
                for rank in range(case.workers)
            ]
            gradient = sum(parts)
            update = gradient
            if case.momentum is not None and i in compressed(case):
                m, nesterov, rate, _ = case.momentum
                gradient = rate * gradient
                velocity = m * velocity + gradient
                update = m * velocity + gradient if nesterov else velocity
                velocities[i] = velocity
            updates.append(update)
        found.append(updates)
    return found


def close(found: list[Any], expected: list[Any], case: Case) -> None:
    """Compare to the precision of each tensor's type."""
    precision = {"float16": 1e-2, "bfloat16": 1e-1}
    for one, two, (_, dtype) in zip(found, expected, case.tensors, strict=True):
        tolerance = precision.get(dtype, 1e-5)
        np.testing.assert_allclose(one, two, tolerance, tolerance)


@pytest.mark.long
class LawsTest(tf.test.TestCase):
    @steady
    @hypothesis.given(cases())
    def test_1_sent_and_kept_are_what_was_accumulated(self, case: Case) -> None:
        """Without momentum, so that what is accumulated is the sum of gradients."""
        case = case._replace(momentum=None)

        def work(transport: Loopback) -> Any:
            worker = Worker(case, transport)
            sums = [worker.step(number) for number in range(STEPS)]
            return sums, flushed(worker.synchronizer, worker.variables)

        for sums, left in run_workers(case.workers, work):
            kept = [np.zeros(shape, np.float32) for shape, _ in case.tensors]
            for _, exchanged, _ in left:
                chosen = compressed(case)
                for i, gradient in zip(chosen, exchanged.gradients, strict=True):
                    kept[i] = gradient.numpy()
            total = [sum(parts) for parts in zip(*sums, strict=True)]
            found = [t + k for t, k in zip(total, kept, strict=True)]
            every = momentum_sgd(case)
            expected = [sum(parts) for parts in zip(*every, strict=True)]
            close(found, expected, case)

    @steady
    @hypothesis.given(cases(sparsity=0.0, warmup_steps=0))
    def test_2_and_3_at_sparsity_0_it_is_sgd_of_one_worker(self, case: Case) -> None:
        def work(transport: Loopback) -> list[list[np.ndarray]]:
            worker = Worker(case, transport)
            return [worker.step(number) for number in range(STEPS)]

        expected = momentum_sgd(case)
        for found in run_workers(case.workers, work):
            for sums, update in zip(found, expected, strict=True):
                close(sums, update, case)

    @steady
    @hypothesis.given(cases())
    def test_4_all_workers_get_the_same_bits(self, case: Case) -> None:
        def work(transport: Loopback) -> list[bytes]:
            worker = Worker(case, transport)
            return [
                gradient.tobytes()
                for number in range(STEPS)
                for gradient in worker.step(number)
            ]

        first, *others = run_workers(case.workers, work)
        for other in others:
            self.assertEqual(other, first)

    @steady
    @hypothesis.given(cases(), st.integers(1, STEPS - 1))
    @pytest.mark.slow
    def test_7_a_restored_state_goes_on(self, case: Case, saved_at: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)

            def work(transport: Loopback) -> None:
                worker, later = Worker(case, transport), Worker(case, transport)
                for number in range(saved_at):
                    worker.step(number)
                worker.synchronizer.save(folder)
                later.synchronizer.restore(folder)
                for number in range(saved_at, STEPS):
                    for one, two in zip(
                        worker.step(number), later.step(number), strict=True
                    ):
                        self.assertEqual(one.tobytes(), two.tobytes())
                for name, array in worker.state.items():
                    self.assertEqual(array.tobytes(), later.state[name].tobytes())

            run_workers(case.workers, work)


CASES = (
    Case(
        [((9, 40), "float32"), ((30,), "float16"), ((70, 9), "bfloat16")],
        3,
        Momentum(0.9, True, 0.25),
        {"sparsity": 0.9, "value_dtype": "float16", "momentum_masking": True},
        1,
    ),
    Case(
        [((300, 2), "float32"), ((), "float32"), ((5, 5, 5), "float32")],
        2,
        Momentum(0.5, False, 1.0),
        {"sparsity": 0.999, "value_dtype": "log4", "warmup_steps": 2},
        2,
    ),
)


@pytest.mark.slow
class WholeLawsTest(parameterized.TestCase, tf.test.TestCase):
    """The same where XLA compiles a step as a whole."""

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(fused.forced(True))

    @parameterized.product(
        case=CASES,
        law=(
            LawsTest.test_1_sent_and_kept_are_what_was_accumulated,
            LawsTest.test_4_all_workers_get_the_same_bits,
            LawsTest.test_7_a_restored_state_goes_on,
        ),
    )
    def test_hold(self, case: Case, law: Any) -> None:
        others = [2] if law is LawsTest.test_7_a_restored_state_goes_on else []
        law.hypothesis.inner_test(self, case, *others)


if __name__ == "__main__":
    tf.test.main()
