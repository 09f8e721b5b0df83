"""Tests of steps that workers take together on servers: in this process, by threads."""

import functools
import itertools
import random
import threading
import time
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_dgc.exchanges.together import Pieces, Together
from tf_dgc.servers.attendance import INSIDE
from tf_dgc.servers.meetings import Meetings
from tf_dgc.servers.quorum import Rule
from tf_dgc.servers.shards import Shard
from tf_dgc.servers.shared import Servers
from tf_dgc.servers.turns import NOW, STUCK, Turns

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
TIMEOUT = 30.0
_numbers = itertools.count()


class Place:
    """Number of a process, and those of them that have the places."""

    def __init__(self, own: int, ids: list[int]) -> None:
        self.own, self._ids, self.ids = own, ids, self

    def read_value(self) -> tf.Tensor:
        return tf.constant(self._ids, tf.int64)


class Worker:
    """One of `members`, of whom tests say who lives."""

    def __init__(
        self, index: int, dead: set[int], ids: list[int], name: str, liveness: float
    ) -> None:
        self.index, self.workers, self.dead = index, len(ids), dead
        self.place, self.ids = Place(next(_numbers) + 1, ids), ids
        self.liveness = liveness
        self.signs = types.SimpleNamespace(show=lambda put: None)

        def make(kind: str, dtype: Any, shape: Any) -> Any:
            return servers_of().variable(f"{name}.{kind}", dtype, shape)

        self.meetings = Meetings(make, self, TIMEOUT)

    def living(self) -> tf.Tensor:
        return tf.constant([k not in self.dead for k in range(self.workers)])

    def absent(self) -> np.ndarray:
        return np.zeros([self.workers], bool)

    def expel(self, workers: Any) -> np.bool_:
        self.expelled = list(workers)
        return np.bool_(True)

    def claim(self) -> None:
        self.ids[self.index] = self.place.own
        self.dead.discard(self.index)

    def put(self, variable: Any, value: Any) -> None:
        values = tf.reshape(tf.cast(value, variable.dtype), [1])
        variable.scatter_update(tf.IndexedSlices(values, tf.constant([self.index])))


def servers_of() -> Servers:
    servers = Servers(["a:1", "b:1"])
    servers.devices = [DEVICE, DEVICE]
    return servers


class Died(Exception):
    """A worker dies while it applies a step."""


class Job:
    """W workers, and two servers with a matrix in two pieces, and a scalar."""

    def __init__(
        self,
        workers: int,
        backup_workers: int = 0,
        rule: Rule | None = None,
        liveness: float = TIMEOUT,  # less where somebody dies
    ) -> None:
        self.liveness = liveness
        self.name, self.dead = f"turns{next(_numbers)}", set[int]()
        self.workers, self.backup_workers, self.rule = workers, backup_workers, rule
        self.ids = [0] * workers
        self.together = [self._of(k, backup_workers) for k in range(workers)]
        self.together[0].begin()
        self.meetings(0).told.begin()
        for each in self.together:
            each._members.claim()
            each.turns.join()
        for twin in self.together[0]._given.twins:
            twin.assign(tf.zeros(twin.whole))
        self.applied: list[tuple[int, list[np.ndarray]]] = []
        self.ends: dict[int, int] = {}  # who dies, and after how many changes
        # Of which step, with what weight.
        self.given: list[tuple[int, float, list[np.ndarray]]] = []

    def _of(self, index: int, backup_workers: int) -> Together:
        servers = servers_of()
        twins = [
            servers.sharded(f"{self.name}.{i}", tf.float32, shape, shards)
            for i, (shape, shards) in enumerate(
                [([5, 2], [Shard(0, 0, 3), Shard(1, 3, 5)]), ([], [Shard(1, 0, 0)])]
            )
        ]
        worker: Any = Worker(index, self.dead, self.ids, self.name, self.liveness)
        args = f"{self.name}.t", servers, worker, twins, backup_workers, self.rule
        found = Together(*args)
        if self.rule is not None:
            found.keep(self.name, servers, twins)
        return found

    def step(
        self, k: int, gradients: list[np.ndarray], weight: float | None = None
    ) -> tuple[bool, bool]:
        """Take a step as worker k; tell whether it came in time, and was the last."""
        together, weight = self.together[k], k + 1.0 if weight is None else weight

        def apply(means: list[Pieces]) -> None:
            found = [mean.joined() for mean in means]
            for i, (twin, mean) in enumerate(
                zip(together._given.twins, found, strict=True)
            ):
                if self.ends.get(k) == i:
                    del self.ends[k]
                    raise Died
                twin.assign_sub(mean)
            self.applied.append((k, [mean.numpy() for mean in found]))

        self.meetings(k).moves.step()
        self.meetings(k).tell()
        local = [tf.constant(g) for g in gradients]
        in_time, over = together.push(local, apply, tf.constant(weight))
        if in_time:
            self.given.append((int(together.turns.own), weight, gradients))
        together.turns.follow()
        return bool(in_time), bool(over)

    def run(
        self, steps: int, gradients: Any, stops: dict[int, int] | None = None
    ) -> list[list[tuple[bool, bool]]]:
        """Let each worker take steps in a thread of its own; some stop all earlier."""
        stops = stops or {}
        found: list[list[tuple[bool, bool]]] = [[] for _ in range(self.workers)]
        errors: list[BaseException] = []

        def train(k: int) -> None:
            try:
                for t in range(stops.get(k, steps)):
                    found[k].append(self.step(k, gradients(k, t)))
                    if found[k][-1][1]:
                        break
            except BaseException as error:
                errors.append(error)
            self.turns(k).attendance.leave(k in stops)

        threads = [
            threading.Thread(target=train, args=[k]) for k in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def turns(self, k: int) -> Turns:
        return self.together[k].turns

    def meetings(self, k: int) -> Meetings:
        return self.together[k]._members.meetings

    def replace(self, k: int, starts: float = 0.0) -> None:
        """Let another process take the place of a worker that has died.

        Args:
            k: the worker.
            starts: seconds until it looks at what the other has told.
        """
        self.together[k] = self._of(k, self.backup_workers)
        self.together[k]._members.claim()
        time.sleep(starts)
        self.meetings(k).told.join()
        self.turns(k).join()

    def value(self) -> list[np.ndarray]:
        return [twin.read_value().numpy() for twin in self.together[0]._given.twins]


def drawn(k: int, t: int) -> list[np.ndarray]:
    random = np.random.default_rng([k, t])
    shapes: list[tuple[int, ...]] = [(5, 2), ()]
    return [random.integers(-9, 9, shape).astype("float32") for shape in shapes]


class TurnsTest(tf.test.TestCase):
    @pytest.mark.long
    def test_each_step_is_taken_once_by_the_mean_weighted_by_rows(self) -> None:
        job, steps = Job(3), 12
        found = job.run(steps, drawn)
        self.assertEqual(found, [[(True, False)] * steps] * 3)
        self.assertLen(job.applied, steps)
        for t, (_, means) in enumerate(job.applied):
            for i, mean in enumerate(means):
                expected = sum((k + 1) * drawn(k, t)[i] for k in range(3)) / 6
                self.assertAllClose(mean, expected, rtol=1e-6, atol=1e-6)
        for i, value in enumerate(job.value()):
            self.assertAllClose(value, -sum(m[i] for _, m in job.applied), atol=1e-4)

    @pytest.mark.long
    def test_a_step_does_not_wait_for_backup_workers(self) -> None:
        job, steps = Job(3, backup_workers=1), 15
        found = job.run(steps, lambda k, t: [np.ones((5, 2), "f"), np.float32(1)])
        in_time = sum(each[0] for of in found for each in of)
        self.assertBetween(len(job.applied), steps, 3 * steps)
        self.assertGreaterEqual(in_time, 2 * len(job.applied))
        for _, means in job.applied:  # of some whole gradients, whoever came
            for mean in means:
                self.assertAllClose(mean, np.ones_like(mean), rtol=1e-6)
        for value in job.value():
            self.assertAllClose(value, np.full_like(value, -len(job.applied)))

    @pytest.mark.long
    def test_what_comes_too_late_is_dropped(self) -> None:
        job = Job(2, backup_workers=1)
        job.run(1, drawn)  # both are there once
        for turns in map(job.turns, range(2)):
            turns.own.assign(turns._step.read_value())
        job.applied.clear()
        before = job.value()
        entering = [job.turns(k).attendance.enter for k in range(2)]
        threads = [threading.Thread(target=enter) for enter in entering]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(job.step(0, drawn(0, 1)), (True, False))
        self.assertEqual(job.step(1, drawn(1, 1)), (False, False))
        self.assertEqual(job.step(1, drawn(1, 2)), (True, False))
        self.assertEqual([k for k, _ in job.applied], [0, 1])
        for i, value in enumerate(job.value()):
            self.assertAllEqual(value, before[i] - drawn(0, 1)[i] - drawn(1, 2)[i])

    @pytest.mark.long
    def test_who_stops_ends_the_others_after_the_same_step(self) -> None:
        job = Job(3)
        for drawn_of in (drawn, lambda k, t: drawn(k, t + 9)):
            job.applied.clear()
            found = job.run(8, drawn_of, stops={1: 3})
            self.assertEqual(found[1], [(True, False)] * 3)
            for k in (0, 2):  # the last is dropped
                self.assertEqual(found[k], [(True, False)] * 3 + [(True, True)])
            self.assertLen(job.applied, 3)
            for t, (_, means) in enumerate(job.applied):
                for i, mean in enumerate(means):
                    expected = sum((k + 1) * drawn_of(k, t)[i] for k in range(3)) / 6
                    self.assertAllClose(mean, expected, rtol=1e-6, atol=1e-6)

    def test_the_dead_hold_nobody_back(self) -> None:
        job = Job(3)
        job.dead.add(2)
        for k in range(2):
            job.turns(k).attendance._is_inside.assign(True)
            job.together[k]._members.put(job.turns(k).attendance.places, INSIDE)
        first = threading.Thread(target=job.step, args=[0, drawn(0, 0)])
        first.start()
        self.assertEqual(job.step(1, drawn(1, 0)), (True, False))
        first.join()
        self.assertLen(job.applied, 1)

    def one_that_applies(self, job: Job) -> Turns:
        """Let worker 0 be about to apply the first step."""
        turns = job.turns(0)
        turns.attendance._is_inside.assign(True)
        job.together[0]._members.put(turns.attendance.places, INSIDE)
        turns.arrivals.arrive(tf.ones([]))
        applies, over = turns.wait()
        self.assertTrue(applies)
        self.assertFalse(over)
        return turns

    def test_a_worker_that_dies_while_it_applies_a_step_ends_the_others(self) -> None:
        job = Job(2, backup_workers=1, liveness=0.3)
        self.one_that_applies(job)
        job.dead.add(0)
        job.turns(1).attendance._is_inside.assign(True)
        job.together[1]._members.put(job.turns(1).attendance.places, INSIDE)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "has died while it applied a step"
        ):
            job.step(1, drawn(1, 0))

    @pytest.mark.long
    def test_one_late_look_is_no_sign_that_somebody_has_died(self) -> None:
        job, looks = Job(2, liveness=1.0), list[int]()
        for k in range(2):  # both train, and nobody has come yet
            job.together[k]._members.put(job.turns(k).attendance.places, INSIDE)
        turns = job.turns(0)
        members, look = turns._members, turns.look

        def looks_late() -> tf.Tensor:
            looks.append(len(looks))
            found = look().numpy()
            if looks[-1] == 1:  # in the instant in which a step ends
                time.sleep(2 * members.liveness)
                found[STUCK] = 1
            elif looks[-1] == 2:
                found[NOW] += 1
            return tf.constant(found)

        with mock.patch.object(turns, "look", looks_late):
            applies, over = turns.wait()
        self.assertFalse(applies or over)
        self.assertLen(looks, 3)

    def test_a_lot_that_comes_too_late_is_given_back(self) -> None:
        job = Job(2, backup_workers=1)
        first, late = self.one_that_applies(job), job.turns(1)
        late.attendance._is_inside.assign(True)
        first.count()
        # Of the first step, but that is taken.
        self.assertFalse(late._lots.draw(late.own.read_value()))
        first.follow()
        self.assertEqual(job.step(0, drawn(0, 1)), (True, False))
        self.assertLen(job.applied, 1)


class RuleTest(tf.test.TestCase):
    """Steps that wait for a quorum, or for a time; nothing is dropped."""

    def enter(self, job: Job, workers: Any) -> None:
        for k in workers:
            job.turns(k).attendance._is_inside.assign(True)
            job.together[k]._members.put(job.turns(k).attendance.places, INSIDE)

    def check_by_twin(self, job: Job) -> None:
        """Compare what was applied with means of what workers know to be in a step.

        Each is the part of a mean that those in the step are of all who took part then.
        """
        expected = [np.zeros([5, 2], "f"), np.zeros([], "f")]
        for step, (_, means) in enumerate(job.applied):
            own = [(w, g) for of, w, g in job.given if of == step]
            total = sum(w for w, _ in own)
            twins = [sum(w * g[i] for w, g in own) / total for i in range(len(means))]
            shares = [len(own) / n for n in range(len(own), job.workers + 1)]
            found = np.vdot(means[0], twins[0]) / np.vdot(twins[0], twins[0])
            share = min(shares, key=lambda each: abs(each - found))
            for i, mean in enumerate(means):
                twin = share * twins[i]
                self.assertAllClose(mean, twin, rtol=1e-5, atol=1e-5)
                expected[i] = expected[i] - twin
        self.assertLen({of for of, _, _ in job.given}, len(job.applied))
        for value, twin in zip(job.value(), expected, strict=True):
            self.assertAllClose(value, twin, rtol=1e-4, atol=1e-4)

    def train(self, job: Job, k: int, steps: int, errors: list[Any]) -> None:
        """Let a worker take steps of which each is in some round, like local steps."""
        drawer = np.random.default_rng(k)
        try:
            for t in range(steps):
                time.sleep(drawer.uniform(0, 0.02))
                weight = float(drawer.integers(1, 5))
                while not job.step(k, drawn(k, t), weight)[0]:
                    weight += 1.0  # it has gone on meanwhile
        except BaseException as error:
            errors.append(error)
        job.turns(k).attendance.leave()

    def run_all(self, job: Job, steps: int) -> None:
        errors: list[Any] = []
        threads = [
            threading.Thread(target=self.train, args=[job, k, steps, errors])
            for k in range(job.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    @pytest.mark.long
    def test_all_steps_are_of_all_without_a_quorum(self) -> None:
        job, steps = Job(3, rule=Rule()), 6
        self.run_all(job, steps)
        self.assertLen(job.applied, steps)
        self.assertLen(job.given, 3 * steps)
        self.check_by_twin(job)

    @pytest.mark.long
    def test_every_change_is_in_one_step_whoever_comes_late(self) -> None:
        for rule in (Rule(2), Rule(1), Rule(3, 0.01), Rule(None, 0.0)):
            job, steps = Job(3, rule=rule), 6
            self.run_all(job, steps)
            self.assertLen(job.given, 3 * steps)
            self.assertGreaterEqual(len(job.applied), steps)
            self.check_by_twin(job)

    def test_what_comes_after_a_quorum_counts_in_the_next_step(self) -> None:
        job = Job(3, rule=Rule(2))
        self.enter(job, range(3))
        first = threading.Thread(target=job.step, args=[0, drawn(0, 0)])
        first.start()
        self.assertEqual(job.step(1, drawn(1, 0)), (True, False))
        first.join()
        late = threading.Thread(target=job.step, args=[2, drawn(2, 0), 7.0])
        late.start()
        self.assertEqual(job.step(0, drawn(0, 1)), (True, False))
        late.join()
        self.assertEqual(sorted(w for of, w, _ in job.given if of == 1), [1.0, 7.0])
        self.check_by_twin(job)

    def test_a_step_does_not_wait_longer_than_its_grace(self) -> None:
        job = Job(3, rule=Rule(None, 0.05))
        self.enter(job, range(3))
        self.assertEqual(job.step(0, drawn(0, 0)), (True, False))
        self.assertLen(job.applied, 1)
        self.check_by_twin(job)

    def test_steps_of_halves_are_together_that_of_all(self) -> None:
        job = Job(4, rule=Rule(2))
        self.enter(job, range(4))
        for k in (0, 2):
            other = threading.Thread(target=job.step, args=[k, drawn(k, 0), 1.0])
            other.start()
            self.assertEqual(job.step(k + 1, drawn(k + 1, 0), 1.0), (True, False))
            other.join()
        self.assertLen(job.applied, 2)
        for i, value in enumerate(job.value()):
            mean = sum(drawn(k, 0)[i] for k in range(4)) / 4
            self.assertAllClose(value, -mean, rtol=1e-5, atol=1e-5)

    def test_who_is_dead_or_has_left_takes_no_part_of_a_step(self) -> None:
        job = Job(4, rule=Rule(1))
        self.enter(job, range(3))
        job.dead.add(1)
        job.turns(2).attendance.leave()
        self.assertEqual(job.step(0, drawn(0, 0)), (True, False))
        for value, one in zip(job.value(), drawn(0, 0), strict=True):
            self.assertAllClose(value, -one, rtol=1e-5, atol=1e-5)

    @pytest.mark.long
    def test_who_dies_while_it_applies_a_step_is_followed_by_who_waits(self) -> None:
        for changed in (0, 1, 2):  # variables that it has changed by then
            job = Job(2, rule=Rule(1), liveness=0.3)
            self.enter(job, range(2))
            before = job.value()
            dies = job.together[0]
            dies._give([tf.constant(part) for part in drawn(0, 0)])
            dies.turns.arrivals.arrive(tf.ones([]))
            self.assertTrue(dies.turns.wait()[0])
            dies._copies.keep(dies.turns.own)
            for twin in dies._given.twins[:changed]:
                twin.assign_add(tf.ones(twin.whole))
            job.dead.add(0)
            self.assertEqual(job.step(1, drawn(1, 0)), (True, False))
            self.assertLen(job.applied, 1)
            self.assertEqual(job.together[1]._members.expelled, [0])
            for i, value in enumerate(job.value()):
                mean = (drawn(0, 0)[i] + 2 * drawn(1, 0)[i]) / 3
                self.assertAllClose(value, before[i] - mean, rtol=1e-5, atol=1e-5)
            self.assertEqual(int(job.turns(1)._step.read_value()), 1)

    def test_whose_place_another_process_has_by_then_is_not_waited_for(self) -> None:
        for applies in (True, False):
            job = Job(3, rule=Rule(None if applies else 3), liveness=0.3)
            self.enter(job, range(3))
            dies = job.together[0]
            dies._give([tf.constant(part) for part in drawn(0, 0)])
            dies.turns.arrivals.arrive(tf.ones([]))
            job.turns(2).attendance.leave()
            if applies:
                job.together[1]._give([tf.constant(part) for part in drawn(1, 0)])
                job.turns(1).arrivals.arrive(tf.ones([]))
                self.assertTrue(dies.turns.wait()[0])
            job.together[0] = job._of(0, 0)
            job.together[0]._members.claim()  # and is still starting
            self.assertEqual(job.step(1, drawn(1, 0)), (True, False))
            self.assertLen(job.applied, 1)

    def replaced(self, job: Job, seat: Any, name: str) -> Any:
        """Let worker 0 be stopped before a call of its step, and replaced; it wakes.

        Returns:
            What the servers hold by then.
        """
        self.enter(job, range(2))
        asleep, wakes, raised = threading.Event(), threading.Event(), list[Any]()
        call = getattr(seat, name)

        def late(*args: Any) -> Any:
            asleep.set()
            wakes.wait(TIMEOUT)
            return call(*args)

        def step() -> None:
            with mock.patch.object(seat, name, late):
                try:
                    job.step(0, drawn(0, 0))
                except tf.errors.InvalidArgumentError as error:
                    raised.append(error)

        sleeper = threading.Thread(target=step)
        sleeper.start()
        asleep.wait(TIMEOUT)
        job.dead.add(0)
        self.assertEqual(job.step(1, drawn(1, 0)), (True, False))
        held = job.value()
        wakes.set()
        sleeper.join()
        self.assertRegex(str(*raised), "another one has taken it: this worker ends")
        return held

    @pytest.mark.long
    def test_who_was_replaced_before_it_wrote_does_not_write(
        self,
    ) -> None:
        job = Job(2, rule=Rule(1), liveness=0.3)
        held = self.replaced(job, job.turns(0).arrivals, "now")
        for value, expected in zip(job.value(), held, strict=True):
            self.assertAllEqual(value, expected)
        self.assertEqual(int(job.turns(1)._step.read_value()), 1)
        self.assertEqual(job.step(1, drawn(1, 1)), (True, False))
        self.assertLen(job.applied, 2)

    def test_who_was_replaced_and_has_written_stops_all(self) -> None:
        job = Job(2, rule=Rule(1), liveness=0.3)
        self.replaced(job, job.together[0]._given.twins[1], "assign_sub")
        self.assertEqual(int(job.turns(1)._step.read_value()), 1)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "while it applied a step for all"
        ):
            job.step(1, drawn(1, 1))


class FaultsTest(parameterized.TestCase):
    """Workers die at moments that are drawn, also while they apply a step."""

    def live(self, job: Job, k: int, steps: int, seed: int, errors: list[Any]) -> None:
        """Take steps as worker k, and as those that take its place."""
        drawn = random.Random(f"{seed} {k}")
        taken, weight = 0, 1.0
        try:
            while taken < steps:
                fault = drawn.choice(["", "", "", "before", "within", "stops"])
                if fault == "within":
                    job.ends[k] = drawn.randrange(2)
                if fault == "stops":
                    job.dead.add(k)
                    time.sleep(0.05)
                    job.dead.discard(k)
                ones = [np.ones((5, 2), "f"), np.float32(1)]
                try:
                    if fault == "before":
                        raise Died
                    landed, _ = job.step(k, ones, weight)
                except Died:
                    job.dead.add(k)
                    time.sleep(drawn.uniform(0, 0.5))
                    job.replace(k, drawn.choice([0.0, drawn.uniform(0, 3)]))
                    landed, weight = False, 0.0
                taken, weight = taken + landed, 1.0 if landed else weight + 1.0
        except BaseException as error:
            errors.append(error)
        job.dead.add(k)

    @parameterized.parameters(range(3))
    @pytest.mark.few(1, 3)
    @pytest.mark.long
    def test_drawn(self, seed: int) -> None:
        self.check(seed)

    @parameterized.parameters(range(3, 30))
    @pytest.mark.slow
    def test_more_are_drawn(self, seed: int) -> None:
        self.check(seed)

    def check(self, seed: int) -> None:
        """All end, and each step is applied once as a whole."""
        drawn = random.Random(seed)
        workers = drawn.randint(1, 4)
        quorum = drawn.choice([None, *range(1, workers + 1)])
        rule = Rule(quorum, drawn.choice([None, 0.1, 0.4]))
        job = Job(workers, rule=rule, liveness=1.0)
        errors: list[Any] = []
        threads = [
            threading.Thread(
                target=self.live, args=[job, k, 6, seed, errors], daemon=True
            )
            for k in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=200)
            self.assertFalse(thread.is_alive(), "it hangs")
        self.assertEqual(errors, [])
        count = int(job.turns(0)._step.read_value())
        self.assertGreaterEqual(count, 6)
        self.assertLen(job.applied, count)
        for i, value in enumerate(job.value()):
            total = sum(means[i] for _, means in job.applied)
            np.testing.assert_allclose(value, -total, rtol=1e-5)
            for _, means in job.applied:  # of ones
                self.assertTrue(np.all((means[i] > 0.2) & (means[i] < 1.001)))


class Script:
    """What a worker does in the drawn tests: fits of some steps, faults between them.

    A worker that dies is replaced by one that does its script from the beginning.
    """

    def __init__(self, job: Job, k: int, fits: list[int], faults: dict[int, str]):
        self.job, self.k, self.fits, self.faults = job, k, fits, faults
        self.taken, self.late, self.error = 0, 0, None

    def run(self) -> None:
        try:
            while not self._fits():
                self.job.dead.add(self.k)
                time.sleep(0.02)
                self.job.replace(self.k)
        except BaseException as error:
            self.error = error
        self.job.dead.add(self.k)  # has ended

    def _fits(self) -> bool:
        for steps in self.fits:
            for _ in range(steps):
                fault = self.faults.pop(self.taken, None)
                if fault == "dies":
                    return False
                if fault == "stops":
                    self.job.dead.add(self.k)
                    time.sleep(0.1)
                    self.job.dead.discard(self.k)
                self.taken += 1
                ones = [np.ones((5, 2), "f"), np.float32(1)]
                in_time, over = self.job.step(self.k, ones)
                self.late += not in_time
                if over:
                    break
            self.job.turns(self.k).attendance.leave()
        return True


class RoundsTest(parameterized.TestCase):
    def run_scripts(self, scripts: list[Script]) -> None:
        threads = [threading.Thread(target=each.run, daemon=True) for each in scripts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
            self.assertFalse(thread.is_alive(), "it hangs")
        for each in scripts:
            if each.error is not None:
                raise each.error

    @pytest.mark.long
    def test_each_step_of_each_fit_is_of_all_workers(self) -> None:
        job, fits = Job(3), [3, 1, 2]
        self.run_scripts([Script(job, k, fits, {}) for k in range(3)])
        self.assertLen(job.applied, sum(fits))

    @pytest.mark.slow
    def test_so_it_is_where_what_a_worker_says_arrives_piece_by_piece(self) -> None:
        job, fits = Job(2), [1] * 4
        members: Any = job.turns(1)._members
        members.put = functools.partial(self.put_slowly, members.put)
        scripts = [Script(job, k, fits, {}) for k in range(2)]
        self.run_scripts(scripts)
        self.assertLen(job.applied, sum(fits))
        self.assertEqual([each.late for each in scripts], [0, 0])

    def put_slowly(self, put: Any, variable: Any, value: Any) -> None:
        put(variable, value)
        time.sleep(0.2)

    @pytest.mark.long
    def test_who_ends_a_fit_early_waits_for_the_others_with_the_next(self) -> None:
        job = Job(2)
        self.run_scripts([Script(job, 0, [1, 4], {}), Script(job, 1, [3, 4], {})])
        self.assertLen(job.applied, 3 + 4)

    @pytest.mark.long
    def test_who_is_replaced_is_in_the_fit_of_the_others(self) -> None:
        job = Job(2)
        fits = [2] * 5
        self.run_scripts(
            [Script(job, 0, fits, {}), Script(job, 1, [2, 2], {3: "dies"})]
        )
        # All of those that live: 10 of the first, and the rest of the other.
        self.assertBetween(len(job.applied), 10, 14)

    @parameterized.parameters(range(3))
    def test_drawn(self, seed: int) -> None:
        self.check_drawn(seed)

    @parameterized.parameters(range(3, 40))
    @pytest.mark.slow
    def test_more_are_drawn(self, seed: int) -> None:
        self.check_drawn(seed)

    def check_drawn(self, seed: int) -> None:
        """Whoever dies, or is not heard of for a time, all end, and nothing is lost."""
        drawn = random.Random(seed)
        workers = drawn.randint(1, 3)
        job = Job(workers, backup_workers=drawn.choice([0, 0, min(1, workers - 1)]))
        fits = [drawn.randint(1, 4) for _ in range(drawn.randint(1, 4))]
        scripts = []
        for k in range(workers):
            own = [max(1, steps - drawn.choice([0, 0, 1])) for steps in fits]
            faults = {
                drawn.randrange(sum(own)): drawn.choice(["dies", "stops"])
                for _ in range(drawn.randint(0, 2))
            }
            scripts.append(Script(job, k, own, faults))
        self.run_scripts(scripts)
        # A mean of ones is one: each step is taken once, of whole gradients.
        for value in job.value():
            np.testing.assert_allclose(value, np.full_like(value, -len(job.applied)))
        self.assertEqual(int(job.turns(0)._step.read_value()), len(job.applied))
        self.assertGreaterEqual(len(job.applied), max(fits) - 1)

    @pytest.mark.long
    def test_who_lives_and_takes_no_step_is_named_in_time(self) -> None:
        job = Job(2, liveness=1.0)
        job.meetings(0).timeout = 1.0
        with self.assertRaisesRegex(
            TimeoutError,
            r"A barrier has waited for more than \d+ s for workers \[1\], which live"
            r".* TF_DGC_TIMEOUT \(1 s\), and twice `liveness` beyond it",
        ):
            job.meetings(0).barrier()

    def test_a_step_does_not_wait_for_who_waits_in_a_barrier_for_its_worker(
        self,
    ) -> None:
        job = Job(2)
        thread = threading.Thread(target=job.meetings(1).barrier)
        thread.start()
        while not int(job.meetings(1).told.waits.read_value()[1]):
            time.sleep(0.001)
        job.turns(0).attendance.enter()
        self.assertTrue(job.turns(0).attendance.takes_part)
        job.meetings(0).barrier()
        thread.join()

    def test_a_step_waits_for_who_leaves_the_barrier_in_which_all_have_met(
        self,
    ) -> None:
        job = Job(2)
        threads = [threading.Thread(target=job.meetings(i).barrier) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        job.meetings(1)._workers.put(job.meetings(1).told.waits, 1)  # not out of it yet
        self.assertFalse(job.meetings(0)._waiting_for_this().any())
        job.meetings(1)._workers.put(job.meetings(1).told.arrived, 2)
        self.assertEqual(job.meetings(0)._waiting_for_this().tolist(), [False, True])


if __name__ == "__main__":
    tf.test.main()
