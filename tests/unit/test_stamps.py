"""Tests of pushes at positions and of pulls of what has changed: in this process."""

import dataclasses
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_dgc.compression import arena, halves
from tf_dgc.servers.shards import Shard
from tf_dgc.servers.shared import Servers
from tf_dgc.servers.stamps import ALL, Stamped

SHAPES = ([40, 7], [3, 5, 2], [150])
_numbers = itertools.count()


@dataclasses.dataclass
class Worker:
    index: int
    workers: int
    liveness: float = 30.0


class Job:
    """Workers and servers in this process, whose variables are the same by name."""

    def __init__(self, workers: int, servers: int, liveness: float = 30.0) -> None:
        self.shards = [
            [
                Shard(j, 40 * j // servers, 40 * (j + 1) // servers)
                for j in range(servers)
            ],
            [Shard(servers - 1, 0, 3)],
            [Shard(0, 0, 150)],
        ]
        name = f"job{next(_numbers)}"
        self.layout = arena.build([(str(i), each) for i, each in enumerate(SHAPES)])
        self.stamped = []
        for index in range(workers):
            own = Servers(["a:1"] * servers)
            own.devices = ["/job:localhost/replica:0/task:0/device:CPU:0"] * servers
            stamped = self._of(own, name, Worker(index, workers, liveness))
            self.stamped.append(stamped)
        self.twins = self.stamped[0].twins
        for twin in self.twins:
            twin.assign(tf.zeros(twin.whole))
        self.stamped[0].begin()
        shapes = [twin.whole for twin in self.twins]
        self.mirrors = [
            [tf.Variable(tf.zeros(s)) for s in shapes] for _ in range(workers)
        ]
        parts = len(self.stamped[0].parts)
        self.since = [tf.fill([parts, 2], tf.constant(ALL, tf.int64))] * workers

    def _of(self, servers: Servers, name: str, worker: Worker) -> Stamped:
        twins = [
            servers.sharded(f"{name}.{i}", tf.float32, shape, shards)
            for i, (shape, shards) in enumerate(zip(SHAPES, self.shards, strict=True))
        ]
        self.args = servers, worker, self.layout, twins
        return Stamped(name, servers, worker, self.layout, twins)

    def pull(self, k: int) -> int:
        self.since[k], size = self.stamped[k].pull(self.mirrors[k], self.since[k])
        return int(size)

    def values(self) -> np.ndarray:
        return arena.flatten(self.layout, [t.read_value() for t in self.twins]).numpy()

    def seen(self, k: int) -> np.ndarray:
        return arena.flatten(self.layout, self.mirrors[k]).numpy()

    def drawn(self, random: np.random.Generator, most: int = 30) -> tuple[Any, Any]:
        own = np.concatenate(
            [np.arange(s.offset, s.offset + s.size) for s in self.layout.segments]
        )
        count = random.integers(0, most)
        positions = np.sort(random.choice(own, count, replace=False))
        return positions, random.integers(-9, 9, count).astype("float32")


def parts_of(job: Job, k: int, positions: Any, values: Any) -> list[Any]:
    """Return what a worker pushes to each server: part, positions there, values."""
    stamped, found = job.stamped[k], []
    for part in stamped.parts:
        local, own = [], []
        for place in part.places:
            mine = (positions >= place.begin) & (positions < place.begin + place.size)
            local += (positions[mine] - place.begin + place.offset).tolist()
            own += values[mine].tolist()
        where = tf.constant(local, tf.int64)
        found.append((stamped, part, where, tf.constant(own, tf.float32)))
    return found


def stages(stamped: Stamped, part: Any, where: Any, steps: Any) -> Any:
    """Do a push to a server stage by stage, so that others may come between."""
    number = part.clock.enter()
    yield
    part.stamps.mark(where, number)
    yield
    part.subtract(where, steps)
    yield
    part.clock.leave()


class HalvesTest(tf.test.TestCase):
    @settings(deadline=None, derandomize=True)
    @given(st.sets(st.integers(0, 200_000)))
    def test_positions_come_back(self, drawn: set[int]) -> None:
        positions = tf.constant(sorted(drawn), tf.int64)
        low, counts = halves.split(positions, 200_001)
        self.assertEqual(low.dtype, tf.uint16)
        self.assertAllEqual(halves.joined(low, counts), positions)
        size = 2 * len(low) + 4 * len(counts)
        self.assertEqual(int(halves.cost(tf.size(low), 200_001)), size)


@pytest.mark.long
class StampsTest(tf.test.TestCase):
    @settings(deadline=None, derandomize=True, max_examples=15)
    @given(st.integers(0, 2**31), st.integers(1, 3))
    @pytest.mark.slow
    def test_sums_are_exact_and_mirrors_equal_servers_after_any_interleaving(
        self, seed: int, servers: int
    ) -> None:
        random = np.random.default_rng(seed)
        job = Job(3, servers)
        twin = np.zeros(job.layout.size, np.float32)
        under_way: dict[int, list[Any]] = {}
        for _ in range(40):
            k = int(random.integers(3))
            if random.random() < 0.3:
                job.pull(k)
            elif under_way.get(k):
                chosen = under_way[k][int(random.integers(len(under_way[k])))]
                if next(chosen, None) is None and not _goes_on(chosen):
                    under_way[k].remove(chosen)
            else:
                positions, values = job.drawn(random)
                twin[positions] -= values
                pushes = parts_of(job, k, positions, values)
                under_way[k] = [stages(*each) for each in pushes]
        for pushes in under_way.values():
            for push in pushes:
                list(push)
        self.assertAllEqual(job.values(), twin)
        for k in range(3):
            job.pull(k)
            self.assertAllEqual(job.seen(k), twin)

    @pytest.mark.extended
    def test_whole_pushes_and_those_at_positions_add_up_in_graphs_of_threads(
        self,
    ) -> None:
        job = Job(3, 2)
        random = np.random.default_rng(3)
        twin = np.zeros(job.layout.size, np.float32)
        size = job.layout.size
        padding = np.ones(size, bool)
        for segment in job.layout.segments:
            padding[segment.offset : segment.offset + segment.size] = False
        plans: list[list[Any]] = [[], [], []]
        for plan in plans:
            for _ in range(40):
                positions, values = job.drawn(random)
                whole = random.integers(-5, 5, size) * (random.random() < 0.1)
                whole[padding] = 0
                twin[positions] -= 2 * values
                twin -= whole
                plan.append((positions, values, whole.astype("float32")))

        def work(k: int) -> None:
            stamped = job.stamped[k]
            specs = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float32)

            @tf.function(input_signature=[*specs, tf.TensorSpec([size], tf.float32)])
            def push(positions: Any, values: Any, whole: Any) -> None:
                stamped.push(positions, values, tf.constant(2.0))
                tf.cond(
                    tf.reduce_any(whole != 0),
                    lambda: stamped.push_all(whole, tf.constant(1.0)),
                    lambda: None,
                )

            pull = tf.function(lambda since: stamped.pull(job.mirrors[k], since))
            for positions, values, whole in plans[k]:
                push(positions, values, whole)
                job.since[k], _ = pull(job.since[k])

        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertAllEqual(job.values(), twin)
        for k in range(3):
            job.pull(k)
            self.assertAllEqual(job.seen(k), twin)

    def test_only_what_has_changed_comes(self) -> None:
        job = Job(2, 2)
        everything = 4 * job.layout.elements
        self.assertGreaterEqual(job.pull(0), everything)
        self.assertLess(job.pull(0), 40)
        job.stamped[1].push(
            tf.constant([3, 250], tf.int64), tf.constant([1.0, 2.0]), tf.ones([])
        )
        nothing, found = job.pull(1) - everything, job.pull(0)
        self.assertGreaterEqual(nothing, 0)
        self.assertEqual(found - job.pull(0), 2 * 6)
        for twin in job.twins:
            twin.assign(tf.ones(twin.whole))
        job.stamped[1].mark()
        self.assertGreaterEqual(job.pull(0), everything)
        self.assertAllEqual(job.seen(0), job.values())

    def test_a_slow_push_is_not_hidden_by_one_that_began_before_it(self) -> None:
        job = Job(3, 1)
        where, step = np.array([5]), np.ones(1, np.float32)
        (first,), (second,) = (parts_of(job, k, where, step) for k in (1, 2))
        first, second = stages(*first), stages(*second)
        for push in (first, second, second):
            next(push)  # both have begun; the second has stamped
        list(first)
        job.pull(0)
        list(second)
        job.pull(0)
        self.assertAllEqual(job.seen(0), job.values())

    def test_what_another_optimizer_pushes_comes_as_well(self) -> None:
        job, one = Job(1, 2), tf.ones([1])
        second = Stamped(f"second{next(_numbers)}", *job.args, rivals=job.stamped)
        second.begin()
        since, _ = second.pull(
            job.mirrors[0], tf.fill([2, 2], tf.constant(ALL, tf.int64))
        )
        for at, stamped in enumerate((second, job.stamped[0], second)):
            stamped.push(tf.constant([at], tf.int64), one, one[0])
            since, size = second.pull(job.mirrors[0], since)
            self.assertAllEqual(job.seen(0), job.values())
            self.assertEqual(int(size) > 40, stamped is not second)
        job.pull(0)
        job.pull(0)
        self.assertAllEqual(job.seen(0), job.values())

    def test_a_push_that_never_ends_holds_pulls_back_for_as_long_as_it_may_live(
        self,
    ) -> None:
        for liveness, held in ((1000.0, True), (0.0, False)):
            job = Job(2, 1, liveness)
            job.pull(0)
            (part,) = job.stamped[1].parts
            part.clock.enter()
            job.stamped[0].push(
                tf.constant([5], tf.int64), tf.constant([1.0]), tf.ones([])
            )
            job.pull(0)
            before = job.since[0].numpy()[0, 0]
            self.assertEqual(before, 0 if held else 2)
            self.assertAllEqual(job.seen(0), job.values())


def _goes_on(generator: Any) -> bool:
    return generator.gi_frame is not None
