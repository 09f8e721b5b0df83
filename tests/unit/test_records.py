"""State over restarts, with several workers as threads: law 7, and what is owed."""

import pathlib
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import compressing, exchange, flushed, only
from loopback import Loopback, Owner, outcomes, run_workers

from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import Dense, Ledger, state_files
from tf_dgc.transports.local import LocalTransport

SHAPES = ((16, 8), (5,), (40, 3))
MOMENTUM = Momentum(0.9, False)


def gradients_of(rank: int, step: int) -> list[tf.Tensor]:
    random = np.random.default_rng([rank, step])
    return [tf.constant(random.normal(size=s), tf.float32) for s in SHAPES]


class Worker:
    """A synchronizer with one optimizer, as a process has it."""

    def __init__(self, transport: Any, **settings: Any) -> None:
        defaults = {"sparsity": 0.95, "min_elements": 0, "warmup_steps": 3}
        config = DGCConfig(**(defaults | settings))
        self.rank = transport.rank
        self.synchronizer = compressing(transport, config)
        self.owner = Owner()
        self.variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    def step(self, number: int, momentum: Momentum | None = MOMENTUM) -> list[Any]:
        own = gradients_of(self.rank, number)
        args = self.owner, own, self.variables, momentum
        found = exchange(self.synchronizer, *args)
        return [gradient.numpy() for gradient in found.gradients]

    @property
    def state(self) -> list[np.ndarray]:
        """Residual, velocity, learning rate of each tensor, and step."""
        arena = only(self.synchronizer)
        return [v.numpy() for v in (*arena.state.values(), arena.residual.step)]


@pytest.mark.long
class RestoreTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = (
            pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "state"
        )

    def save_after(self, steps: int, workers: int, **settings: Any) -> list[Any]:
        """Train and save; return each worker's state."""

        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, **settings)
            for step in range(steps):
                worker.step(step)
            worker.synchronizer.save(self.folder)
            return worker.state

        return run_workers(workers, work)

    @parameterized.product(workers=[1, 3], saved_at=[1, 5], early=[True, False])
    @pytest.mark.slow
    def test_goes_on_as_if_it_had_never_stopped(
        self, workers: int, saved_at: int, early: bool
    ) -> None:
        def uninterrupted(transport: Loopback) -> list[Any]:
            worker = Worker(transport)
            return [worker.step(step) for step in range(8)][saved_at:] + worker.state

        def restored(transport: Loopback) -> list[Any]:
            worker = Worker(transport)
            if not early:  # the optimizer has been seen before
                worker.step(99)
            worker.synchronizer.restore(self.folder)
            return [worker.step(step) for step in range(saved_at, 8)] + worker.state

        self.save_after(saved_at, workers)
        expected = run_workers(workers, uninterrupted)
        for one, two in zip(expected, run_workers(workers, restored), strict=True):
            self.assertAllEqual(
                [a.tobytes() for a in tf.nest.flatten(one)],
                [a.tobytes() for a in tf.nest.flatten(two)],
            )

    @parameterized.parameters((1, 2), (2, 1), (2, 4), (3, 3), (3, 2), (4, 1))
    @pytest.mark.slow
    def test_on_another_number_of_workers_the_sum_stays(
        self, before: int, after: int
    ) -> None:
        saved = self.save_after(5, before)

        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport)
            worker.step(0)
            worker.synchronizer.restore(self.folder)
            return worker.state

        found = run_workers(after, work)
        for part in range(2):
            total = sum(state[part].astype(np.float64) for state in saved)
            self.assertAllClose(sum(state[part] for state in found), total, 1e-6, 1e-6)
            if before != after:
                for state in found:
                    self.assertAllEqual(state[part], found[0][part])
        self.assertEqual({int(state[-1]) for state in found}, {5})
        # Of the rate each has what all had.
        self.assertEqual(
            {float(rate) for state in (*saved, *found) for rate in state[2]},
            {MOMENTUM.learning_rate},
        )

    def test_may_be_saved_again_before_the_first_step(self) -> None:
        self.save_after(4, 1)
        first = Worker(LocalTransport())
        first.synchronizer.restore(self.folder)
        second_folder = self.folder.with_name("again")
        first.synchronizer.save(second_folder)
        second = Worker(LocalTransport())
        second.synchronizer.restore(second_folder)
        self.assertAllEqual(first.step(4)[0], second.step(4)[0])

    def test_state_of_one_owner_goes_to_no_other(self) -> None:
        first, second = Worker(LocalTransport()), Worker(LocalTransport())
        second.synchronizer = first.synchronizer
        first.step(0), second.step(1)
        first.synchronizer.save(self.folder, [second.owner])
        early, later = Worker(LocalTransport()), Worker(LocalTransport())
        later.synchronizer = early.synchronizer
        early.synchronizer.restore(self.folder, [later.owner])
        expected = second.step(2)[0]
        self.assertNotAllEqual(early.step(2)[0], expected)
        self.assertAllEqual(later.step(2)[0], expected)

    def test_what_waits_for_an_owner_is_saved_with_it_and_not_with_others(
        self,
    ) -> None:
        first, second = Worker(LocalTransport()), Worker(LocalTransport())
        first.step(0), second.step(1)
        for worker, name in ((first, "a"), (second, "b")):
            worker.synchronizer.save(self.folder / name)
        early, later = Worker(LocalTransport()), Worker(LocalTransport())
        synchronizer = later.synchronizer = early.synchronizer
        synchronizer.restore(self.folder / "a", [early.owner])
        synchronizer.restore(self.folder / "b", [], later.variables)
        for chosen in ([early.owner],), ([], later.variables), (None,):
            synchronizer.save(self.folder / "again", *chosen)
            manifest = state_files.read_manifest(self.folder / "again")
            self.assertLen(manifest["accounts"], 2 if chosen == (None,) else 1)
        self.assertAllEqual(later.step(2)[0], second.step(2)[0])
        self.assertAllEqual(early.step(2)[0], first.step(2)[0])

    def test_each_optimizer_gets_its_own(self) -> None:
        def two(transport: Any) -> tuple[Worker, Worker]:
            one, other = Worker(transport), Worker(transport)
            other.synchronizer = one.synchronizer
            return one, other

        one, other = two(LocalTransport())
        one.step(0), other.step(1), one.step(2)
        one.synchronizer.save(self.folder)
        again, another = two(LocalTransport())
        again.synchronizer.restore(self.folder)
        for worker, restored in ((one, again), (other, another)):
            self.assertAllEqual(worker.step(3)[0], restored.step(3)[0])

    def test_dense_training_has_nothing_to_save(self) -> None:
        variables = [tf.Variable(tf.zeros([3]))]
        for _ in range(2):
            synchronizer, owner = Ledger(LocalTransport(), Dense), Owner()
            exchange(synchronizer, owner, [tf.ones([3])], variables)
            synchronizer.save(self.folder)
            synchronizer.restore(self.folder)

    @parameterized.parameters(
        ({"min_elements": 125}, MOMENTUM, "field 'arrays' must be"),
        ({"momentum_correction": False}, MOMENTUM, "field 'arrays' must be"),
        ({}, None, "field 'arrays' must be"),
    )
    @pytest.mark.few(0, 1)
    def test_state_of_other_settings_is_refused(
        self, settings: dict[str, Any], momentum: Momentum | None, message: str
    ) -> None:
        self.save_after(4, 1)
        for early in (True, False):
            worker = Worker(LocalTransport(), **settings)
            told = f"optimizer0: {message}.* and strategy, .* it was saved with"
            with self.assertRaisesRegex(ValueError, told):
                if not early:
                    worker.step(0, momentum)
                worker.synchronizer.restore(self.folder)
                worker.step(0, momentum)

    def test_state_of_other_variables_is_refused(self) -> None:
        self.save_after(4, 1)
        worker = Worker(LocalTransport())
        worker.variables[1] = tf.Variable(tf.zeros([5], tf.float64))
        worker.synchronizer.restore(self.folder)
        with self.assertRaisesRegex(ValueError, "field 'variables' must be .*float64"):
            worker.step(0)

    @pytest.mark.slow
    def test_state_of_fewer_optimizers_is_refused_and_changes_nothing(self) -> None:
        self.save_after(4, 1)
        worker = Worker(LocalTransport())
        worker.step(0)
        other = Worker(LocalTransport())
        other.synchronizer = worker.synchronizer
        other.step(1)
        (first, second) = worker.synchronizer.exchanges()
        before = [first.residual.v.numpy(), second.residual.v.numpy()]
        with self.assertRaisesRegex(ValueError, "field 'accounts' has 1"):
            worker.synchronizer.restore(self.folder)
        self.assertAllEqual(first.residual.v, before[0])
        self.assertAllEqual(second.residual.v, before[1])

    @pytest.mark.slow
    def test_a_file_that_one_worker_cannot_read_stops_all(self) -> None:
        self.save_after(4, 3)
        (file,) = self.folder.glob("rank-00001.*.npz")
        file.write_bytes(b"PK")

        def work(transport: Loopback) -> None:
            Worker(transport).synchronizer.restore(self.folder)

        zero, one, two = outcomes(3, work)
        self.assertIsInstance(one, ValueError)
        self.assertRegex(str(one), "rank-00001.*npz: not a file of state")
        for other in (zero, two):
            self.assertIsInstance(other, ValueError)
            self.assertRegex(str(other), "rank-00001.*npz: .* on ranks .1.")

    @pytest.mark.extended
    def test_a_disk_that_one_worker_cannot_write_to_stops_all(self) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport)
            worker.step(0)
            folder = self.folder / str(transport.rank)
            if transport.rank == 1:
                folder.parent.mkdir(exist_ok=True)
                folder.write_text("a file, no folder")
            worker.synchronizer.save(folder)

        zero, one = outcomes(2, work)
        self.assertIsInstance(one, OSError)
        self.assertRegex(str(zero), "outcome of save_state.*on ranks .1.")
        self.assertFalse((self.folder / "0" / "manifest.json").exists())

    @pytest.mark.extended
    def test_cut_short_anywhere_the_state_is_that_of_before_or_this(self) -> None:
        def killed_in(act: str, late: int) -> list[Any]:
            real = getattr(state_files, act)

            def dies(folder: Any, rank: int, *rest: Any) -> None:
                if rank == late:
                    raise OSError("killed")
                real(folder, rank, *rest)

            def work(transport: Loopback) -> None:
                worker = Worker(transport)
                worker.step(0)
                worker.step(1)
                worker.synchronizer.save(self.folder)

            with mock.patch.object(state_files, act, dies):
                return outcomes(2, work)

        def restored(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport)
            worker.synchronizer.restore(self.folder)
            worker.step(7)
            return worker.state

        old = self.save_after(1, 2)
        for act in ("prepare", "commit", "clean"):
            for late in (0, 1):
                for outcome in killed_in(act, late):
                    self.assertIsInstance(outcome, Exception)
                states = run_workers(2, restored)
                steps = {int(state[-1]) for state in states}
                self.assertIn(steps, ({2}, {3}))
        self.assertLen(old, 2)

    def test_workers_that_see_different_states_stop(self) -> None:
        for name, steps in (("0", 2), ("1", 3)):
            self.folder = self.folder.with_name(name)
            self.save_after(steps, 2)

        def work(transport: Loopback) -> None:
            worker = Worker(transport)
            worker.synchronizer.restore(self.folder.with_name(str(transport.rank)))

        for outcome in outcomes(2, work):
            self.assertIsInstance(outcome, ValueError)


@pytest.mark.long
class FlushTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(workers=[1, 3], value_dtype=["float32", "log4"])
    @pytest.mark.slow
    def test_all_that_was_accumulated_has_been_sent_then(
        self, workers: int, value_dtype: str
    ) -> None:
        steps = 6

        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, value_dtype=value_dtype)
            sent = [worker.step(step, None) for step in range(steps)]
            (found,) = flushed(worker.synchronizer, worker.variables)
            owner, exchanged, variables = found
            self.assertIs(owner, worker.owner)
            self.assertEqual(exchanged.finished, [False, False])
            self.assertIs(variables[1], worker.variables[2])
            self.assertEqual(float(worker.synchronizer.residual_norm()), 0.0)
            total = [sum(each[i] for each in sent) for i in (0, 2)]
            return [t + g for t, g in zip(total, exchanged.gradients, strict=True)]

        wanted = [
            sum(gradients_of(r, s)[i] for r in range(workers) for s in range(steps))
            for i in (0, 2)
        ]
        for found in run_workers(workers, work):
            self.assertAllClose(found, wanted, 1e-4, 1e-4)

    def test_only_that_of_the_given_variables_goes(self) -> None:
        worker, other = Worker(LocalTransport()), tf.Variable(tf.zeros([16, 8]))
        worker.step(0)
        first, _, second = worker.variables
        before = worker.state[0].copy()
        self.assertEqual(flushed(worker.synchronizer, [other]), [])
        self.assertAllEqual(worker.state[0], before)
        for variable in (second, first):  # the second is behind a whole block
            (found,) = flushed(worker.synchronizer, [other, variable])
            _, exchanged, variables = found
            (gradient,) = exchanged.gradients
            self.assertIs(variables[0], variable)
            offset = 128 if variable is second else 0
            wanted = before[offset : offset + gradient.shape.num_elements()]
            self.assertAllEqual(tf.reshape(gradient, [-1]), wanted)
            before[offset : offset + wanted.size] = 0
            self.assertAllEqual(worker.state[0], before)

    def test_an_error_in_using_it_loses_nothing(self) -> None:
        worker = Worker(LocalTransport())
        worker.step(0)
        before = worker.state

        def fail(*_: Any) -> None:
            raise OSError("no space left")

        with self.assertRaisesRegex(OSError, "no space"):
            worker.synchronizer.flush(worker.variables, fail)
        for one, two in zip(before, worker.state, strict=True):
            self.assertAllEqual(one, two)

    def test_what_was_restored_is_not_flushed_unseen(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            worker, later = Worker(LocalTransport()), Worker(LocalTransport())
            worker.step(0)
            worker.synchronizer.save(folder)
            later.synchronizer.restore(folder)
        with self.assertRaisesRegex(ValueError, "flush after that"):
            flushed(later.synchronizer, later.variables)

    def test_the_velocity_stays(self) -> None:
        worker = Worker(LocalTransport())
        worker.step(0)
        arena = only(worker.synchronizer)
        before = arena.residual.u.numpy()
        flushed(worker.synchronizer, worker.variables)
        self.assertAllEqual(arena.residual.u, before)


if __name__ == "__main__":
    tf.test.main()
