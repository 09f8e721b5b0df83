"""Sums by owners, over whatever shapes, numbers of workers and settings there are.

Several workers are threads. The law is that of the exchange, with what owners have not
passed on: applied + sum of v + sum of z is what was accumulated.
"""

import pathlib
import tempfile
from typing import Any, NamedTuple

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st
from ledgers import compressing, exchange, flushed, only
from loopback import OWNER, Loopback, Tampering, outcomes, run_workers
from numpy_twin import Owners

import tf_dgc
from tf_dgc import simulate
from tf_dgc.compression import arena, regions
from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import VALUE_DTYPES, DGCConfig
from tf_dgc.exchanges import Ledger, formats
from tf_dgc.exchanges.owner_sum import OwnerSum
from tf_dgc.exchanges.residual import OWNED
from tf_dgc.transports.base import Transport
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.sums import DenseSum, GatherSum

STEPS = 4
SHAPES = ((40, 37), (5,), (31, 60))
steady = hypothesis.settings(deadline=None, derandomize=True, max_examples=8)
quick = hypothesis.settings(deadline=None, derandomize=True, max_examples=60)


def config_of(**settings: Any) -> DGCConfig:
    usual = {"sparsity": 0.9, "min_elements": 0, "exchange": "owners", "growth": 1.5}
    return DGCConfig(**(usual | settings))


class Outcome(NamedTuple):
    """What a worker has after some steps."""

    applied: list[list[np.ndarray]]  # in each step
    v: np.ndarray
    z: np.ndarray  # as an arena
    ledger: Ledger


class Case(NamedTuple):
    """What is exchanged, by whom, and how."""

    shapes: Any = SHAPES
    workers: int = 3
    momentum: Momentum | None = None
    whole: bool = False  # gradients of small integers
    steps: int = STEPS
    rates: tuple[float, ...] = (1.0,) * STEPS

    def gradients(self, rank: int, step: int) -> list[tf.Tensor]:
        random = np.random.default_rng([rank, step])
        return [
            tf.constant(
                random.integers(-8, 9, shape)
                if self.whole
                else random.normal(size=shape),
                tf.float32,
            )
            for shape in self.shapes
        ]

    def run(self, config: DGCConfig) -> list[Outcome]:
        return run_workers(self.workers, lambda over: self.work(over, config))

    def work(self, transport: Transport, config: DGCConfig) -> Outcome:
        ledger, variables = compressing(transport, config), self.variables()
        found = []
        for step in range(self.steps):
            own = self.gradients(transport.rank, step)
            found.append(self.step(ledger, own, variables, step))
        return self.outcome(ledger, found)

    def simulated(self, config: DGCConfig) -> Outcome:
        make = simulate.each_simulated_step(config)
        ledger = Ledger(simulate.Stacked(self.workers), make)
        variables, found = self.variables(), []

        @tf.function(autograph=False)
        def take(stacked: list[tf.Tensor], rate: tf.Tensor) -> list[tf.Tensor]:
            momentum = self.momentum
            if momentum is not None:
                momentum = momentum._replace(learning_rate=rate)
            return exchange(ledger, OWNER, stacked, variables, momentum).gradients

        for step in range(self.steps):
            every = [self.gradients(rank, step) for rank in range(self.workers)]
            stacked = [tf.stack(parts) for parts in zip(*every, strict=True)]
            taken = take(stacked, tf.constant(self.rates[step]))
            found.append([gradient.numpy() for gradient in taken])
        return self.outcome(ledger, found)

    def variables(self) -> list[tf.Variable]:
        return [tf.Variable(tf.zeros(shape)) for shape in self.shapes]

    def step(
        self, ledger: Ledger, own: Any, variables: Any, step: int
    ) -> list[np.ndarray]:
        momentum = self.momentum
        if momentum is not None:
            momentum = momentum._replace(learning_rate=self.rates[step])
        found = exchange(ledger, OWNER, own, variables, momentum)
        return [gradient.numpy() for gradient in found.gradients]

    def outcome(self, ledger: Ledger, applied: list[list[np.ndarray]]) -> Outcome:
        each = only(ledger)
        v = each.residual.v.numpy()
        z = np.asarray(each.owed.get(OWNED, np.zeros_like(v)))
        return Outcome(applied, v, z, ledger)

    def large(self) -> list[int]:
        return [i for i, shape in enumerate(self.shapes) if len(shape) > 1]

    def in_arena(self, tensors: list[np.ndarray]) -> np.ndarray:
        layout = arena.build([("t", self.shapes[i]) for i in self.large()])
        return arena.flatten(layout, [tensors[i] for i in self.large()]).numpy()


def shapes() -> st.SearchStrategy[Any]:
    sides = st.integers(1, 40)
    wide = st.sampled_from([(1, 1), (300, 2), (128, 3), (7, 129)])
    return st.lists(st.tuples(sides, sides) | wide, min_size=1, max_size=3)


class RegionsTest(tf.test.TestCase):
    @quick
    @hypothesis.given(st.integers(0, 40), st.integers(1, 9))
    @pytest.mark.long
    def test_every_element_has_one_owner_and_goes_back(
        self, blocks: int, workers: int
    ) -> None:
        elements = 128 * blocks
        size = regions.size_of(elements, workers)
        whole = np.arange(elements, dtype=np.int64)
        owners = regions.owners_of(tf.constant(whole), workers)
        local = regions.to_region(tf.constant(whole), workers)
        self.assertAllEqual(regions.to_arena(local, owners, workers, elements), whole)
        total = np.zeros(elements, np.float32)
        for owner in range(workers):
            mine = whole[owners.numpy() == owner]
            self.assertLessEqual(len(mine), size)
            self.assertAllEqual(local[owners.numpy() == owner], np.arange(len(mine)))
            part = regions.part(tf.cast(whole + 1, tf.float32), owner, workers)
            self.assertAllEqual(part[: len(mine)], mine + 1)
            self.assertAllEqual(part[len(mine) :], np.zeros(size - len(mine)))
            total += regions.spread(part, owner, workers, elements)
            beyond = tf.range(len(mine), size + 1, dtype=tf.int64)
            places = regions.to_arena(beyond, owner, workers, elements).numpy()
            self.assertAllEqual(places[:-1], np.full(size - len(mine), elements + 1))
            self.assertEqual(places[-1], elements)
        self.assertAllEqual(total, whole + 1)

    @quick
    @hypothesis.given(st.data())
    @pytest.mark.long
    def test_of_each_owners_part_the_largest_go(self, data: Any) -> None:
        workers = data.draw(st.integers(1, 9))
        elements = 128 * data.draw(st.integers(1, 20))
        positions = sorted(data.draw(st.sets(st.integers(0, elements - 1))))
        slots = data.draw(st.integers(1, 9))
        random = np.random.default_rng(len(positions))
        magnitudes = random.uniform(size=len(positions)).astype(np.float32)
        where = np.array(positions, np.int64)
        args = tf.constant(where), tf.constant(magnitudes), workers, slots
        picked = regions.split_by_owner(*args)
        went = set()
        for owner, row in enumerate(picked.numpy()):
            (own,) = np.nonzero(where // 128 % workers == owner)
            best = np.sort(own[np.argsort(-magnitudes[own])[:slots]])
            self.assertAllEqual(row[: len(best)], best)
            self.assertAllEqual(row[len(best) :], [len(where)] * (slots - len(best)))
            went |= set(best.tolist())
        chosen = regions.chosen_by(picked, tf.constant(len(where), tf.int64))
        self.assertAllEqual(chosen, np.array(sorted(went), np.int64))

    @quick
    @hypothesis.given(st.data())
    @pytest.mark.long
    def test_what_owners_pass_on_is_brought_in_order(self, data: Any) -> None:
        workers, slots = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
        elements = 128 * data.draw(st.integers(1, 20))
        size = regions.size_of(elements, workers)
        random = np.random.default_rng(slots)
        positions = np.full([workers, slots], size)
        expected = {}
        for owner in range(workers):
            (own,) = np.nonzero(np.arange(elements) // 128 % workers == owner)
            count = int(random.integers(min(slots, len(own)) + 1))
            where = np.sort(random.permutation(len(own))[:count])
            positions[owner, :count] = where
            expected |= {int(own[q]): float(100 * owner + q) for q in where}
        values = 100.0 * np.arange(workers)[:, np.newaxis] + positions
        args = tf.constant(positions), tf.constant(values, tf.float32)
        where, what = regions.merged(*args, workers, elements)
        order = sorted(expected)
        unused = workers * slots - len(order)
        self.assertAllEqual(where[0], order + [elements] * unused)
        self.assertAllEqual(what[0], [expected[p] for p in order] + [0.0] * unused)


@pytest.mark.long
class OwnersTest(parameterized.TestCase, tf.test.TestCase):
    def assert_conserved(self, case: Case, found: list[Outcome], **close: Any) -> None:
        applied = sum(case.in_arena(step) for step in found[0].applied)
        kept = sum(each.v + each.z for each in found)
        every = [
            case.in_arena([g.numpy() for g in case.gradients(rank, step)])
            for rank in range(case.workers)
            for step in range(case.steps)
        ]
        if close:
            self.assertAllClose(applied + kept, sum(every), **close)
        else:
            self.assertAllEqual(applied + kept, sum(every))

    @steady
    @hypothesis.given(
        shapes(),
        st.integers(1, 5),
        st.sampled_from([0.5, 0.9, 0.999]),
        st.sampled_from([1e-9, 0.5, 1, 1.7, 9.0]),
        st.integers(0, 3),
    )
    @pytest.mark.extended
    def test_nothing_is_lost_of_integers(
        self, shapes: Any, workers: int, sparsity: float, growth: float, warmup: int
    ) -> None:
        case = Case([*shapes, (3,)], workers, whole=True, steps=3)
        config = config_of(sparsity=sparsity, growth=growth, warmup_steps=warmup)
        self.assert_conserved(case, case.run(config))

    @parameterized.parameters(*VALUE_DTYPES)
    @pytest.mark.few(0, 1)
    def test_nothing_is_lost_of_any_value_type(self, value_dtype: str) -> None:
        case = Case()
        found = case.run(config_of(value_dtype=value_dtype))
        self.assert_conserved(case, found, rtol=1e-4, atol=1e-4)
        self.assertTrue(all(np.any(each.z) for each in found))

    @parameterized.product(value_dtype=VALUE_DTYPES, warmup_steps=[0, 3])
    @pytest.mark.few(0, 1)
    def test_workers_and_the_simulator_have_the_same_bits(
        self, value_dtype: str, warmup_steps: int
    ) -> None:
        case = Case(momentum=Momentum(0.9, False, 1.0))
        config = config_of(value_dtype=value_dtype, warmup_steps=warmup_steps)
        found = case.run(config)
        for other in (*found[1:], simulated := case.simulated(config)):
            for one, two in zip(found[0].applied, other.applied, strict=True):
                for a, b in zip(one, two, strict=True):
                    self.assertEqual(a.tobytes(), b.tobytes())
        self.assertAllEqual(simulated.v, [each.v for each in found])
        self.assertAllEqual(simulated.z, [each.z for each in found])
        self.assertEqual(
            [int(x) for x in simulated.ledger.stats(True)[:4]],
            [int(x) for x in found[0].ledger.stats(True)[:4]],
        )

    @parameterized.product(
        workers=[2, 3], momentum=[None, Momentum(0.9, False), Momentum(0.5, True)]
    )
    @pytest.mark.few(0, 1)
    def test_are_as_numpy_computes_them(
        self, workers: int, momentum: Momentum | None
    ) -> None:
        rates = (1.0, 1.0, 0.25, 0.25)
        case = Case(workers=workers, momentum=momentum, rates=rates)
        config = config_of(growth=1.25, sample_fraction=1.0)
        m = momentum or Momentum(None, False)  # type: ignore[arg-type]
        twin = Owners(list(SHAPES), workers, config, m.factor, m.nesterov)
        found = case.run(config)
        for step in range(STEPS):
            every = [
                [g.numpy() for g in case.gradients(rank, step)]
                for rank in range(workers)
            ]
            expected = twin.step(every, rates[step])
            for i in case.large():
                self.assertAllClose(found[0].applied[step][i], expected[i], 1e-5, 1e-5)
        self.assertAllClose(sum(each.z for each in found), twin.waiting, 1e-5, 1e-5)

    @pytest.mark.extended
    def test_all_that_comes_is_passed_on_as_by_an_all_gather(self) -> None:
        # So many selected elements that no owner has too little room.
        for growth in (3, 3.5, float("inf")):
            case = Case(((128, 60), (5,), (64, 130)))
            settings = {"sparsity": 0.8, "growth": growth}
            found = case.run(config_of(**settings))
            expected = case.run(config_of(exchange="allgather", **settings))
            for one, two in zip(found, expected, strict=True):
                self.assertAllEqual(one.v, two.v)
                self.assertFalse(np.any(one.z))
                for a, b in zip(one.applied, two.applied, strict=True):
                    for x, y in zip(a, b, strict=True):
                        self.assertAllEqual(x, y)

    @parameterized.product(by=["owners", "allgather"], sparsity=[0.0, 0.9])
    @pytest.mark.few(1)
    def test_what_comes_from_others_is_counted(self, by: str, sparsity: float) -> None:
        case = Case(steps=2)
        config = config_of(exchange=by, sparsity=sparsity, growth=1)
        layout = arena.build([("t", SHAPES[i]) for i in case.large()])
        cost = formats.cost(layout, sparsity, config, case.workers)
        # A dense one is of the arena with padding, after headers.
        large = cost.received if sparsity else 2 * 4 * layout.size * 2 // 3 + 2 * 20
        small = 2 * (4 * 5 + 4 * case.workers) * 2 // 3
        for found in case.run(config):
            stats = found.ledger.stats(True)
            self.assertEqual(int(stats.received_bytes), 2 * (large + small))
            self.assertEqual(int(found.ledger.stats().received_bytes), large + small)

    @pytest.mark.extended
    def test_other_ranks_change_no_sum(self) -> None:
        class Turned(Case):
            def gradients(self, rank: int, step: int) -> list[tf.Tensor]:
                return super().gradients((rank + 1) % self.workers, step)

        one, two = (
            each(whole=True, shapes=((128, 60), (64, 130)), steps=1).run(
                config_of(growth=9)
            )
            for each in (Case, Turned)
        )
        for a, b in zip(one[0].applied, two[0].applied, strict=True):
            for x, y in zip(a, b, strict=True):
                self.assertAllEqual(x, y)

    def test_an_owner_with_too_little_room_leaves_the_rest_with_its_worker(
        self,
    ) -> None:
        # All that is large is in block 0.
        large = np.zeros([8, 128], np.float32)
        large[0] = np.arange(1, 129)

        def work(transport: Loopback) -> Any:
            ledger = compressing(transport, config_of(sparsity=1 - 128 / 1024))
            variables = [tf.Variable(tf.zeros([8, 128]))]
            found = exchange(ledger, OWNER, [tf.constant(large)], variables)
            return found.gradients[0].numpy(), only(ledger).residual.v.numpy()

        room = 5 * 128 // (4 * 2)
        for applied, v in run_workers(2, work):
            sent = np.where(large > 128 - room, large, 0)
            self.assertAllEqual(applied, 2 * sent)
            self.assertAllEqual(v, np.ravel(large - sent))


@pytest.mark.long
class StateTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(
        to=[(2, "owners"), (4, "owners"), (3, "owners"), (3, "allgather")],
    )
    @pytest.mark.slow
    def test_the_sum_stays_on_any_number_of_workers(self, to: tuple[int, str]) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        case = Case(whole=True)

        def save(transport: Loopback) -> Outcome:
            found = case.work(transport, config_of())
            found.ledger.save(folder)
            return found

        workers, exchange_kind = to

        def load(transport: Loopback) -> Any:
            ledger = compressing(transport, config_of(exchange=exchange_kind))
            variables = case.variables()
            nothing = [tf.zeros(shape) for shape in case.shapes]
            exchange(ledger, OWNER, nothing, variables)
            ledger.restore(folder)
            kept = case.outcome(ledger, [])
            norm = float(ledger.residual_norm())
            (left,) = flushed(ledger, variables)
            after = float(ledger.residual_norm())
            return kept, norm, left[1].gradients, after

        before = sum(each.v + each.z for each in run_workers(3, save))
        found = run_workers(workers, load)
        self.assertAllClose(sum(kept.v + kept.z for kept, *_ in found), before, 1e-6)
        for kept, norm, left, after in found:
            own = np.sqrt(np.sum(kept.v**2) + np.sum(kept.z**2))
            self.assertAllClose(norm, own, 1e-5)
            flat = [None, None, None]
            flat[0], flat[2] = (gradient.numpy() for gradient in left)
            self.assertAllClose(case.in_arena(flat), before, 1e-5)  # type: ignore[arg-type]
            self.assertEqual(after, 0.0)

    @pytest.mark.extended
    def test_what_waits_at_owners_falls_with_the_learning_rate(self) -> None:
        case = Case(momentum=Momentum(0.0, False), rates=(1.0, 1.0, 1.0, 0.125))

        class Still(Case):
            def gradients(self, rank: int, step: int) -> list[tf.Tensor]:
                found = super().gradients(rank, step)
                return found if step < 3 else [tf.zeros_like(g) for g in found]

        still = Still(**case._asdict())
        before = Still(**(case._asdict() | {"steps": 3})).run(config_of())
        after = still.run(config_of())
        owed = sum(each.v + each.z for each in before)
        left = sum(each.v + each.z for each in after)
        applied = still.in_arena(after[0].applied[-1])
        self.assertAllClose(left + applied, 0.125 * owed, 1e-5, 1e-5)

    @pytest.mark.slow
    def test_averaging_keeps_it_with_its_state(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        compression = config_of(min_elements=1, growth=0.5)
        config = tf_dgc.AveragingConfig(period=1, compression=compression)

        def work(transport: Loopback) -> Any:
            strategy = tf_dgc.ParameterAveragingStrategy(config, transport=transport)
            with strategy.scope():
                model = keras.Sequential(
                    [
                        keras.Input((8,)),
                        keras.layers.Dense(
                            64, kernel_initializer=keras.initializers.Ones()
                        ),
                    ]
                )
                model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
            random = np.random.default_rng(1)
            x, y = random.normal(size=(12, 8)), random.normal(size=(12, 64))
            model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
            norm = float(strategy.stats().residual_norm)
            strategy.save_state(folder)
            model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
            strategy.restore_state(folder)
            (found,) = strategy._ledger.exchanges()
            owed = np.asarray(found.owed[OWNED])
            return norm, float(strategy.stats().residual_norm), np.any(owed)

        for norm, again, owed in run_workers(2, work):
            self.assertGreater(norm, 0.0)
            self.assertEqual(again, norm)
            self.assertTrue(owed)


@pytest.mark.long
class DamageTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (".parts", 0, 7, "its header", "rank 1 to rank 0 is damaged: "),
        (".parts", 2, 7, "its header", "rank 1 to rank 0 is damaged: "),
        (".parts", 4, 12, "the number of its", "rank 1 to rank 0 is damaged: "),
        (".parts", 5, 0x7FC00000, "values that are", "rank 1 to rank 0 is damaged: "),
        (".message", 0, 7, "its header", "rank 1 is damaged: "),
        (".message", -1, -1, "its header", "rank 1 is damaged: "),
        (".message", -1, 10**6, "its header", "rank 1 is damaged: "),
        (".message", 5, 0x7FC00000, "values that are", "rank 1 is damaged: "),
    )
    @pytest.mark.few(2)
    def test_nothing_is_changed_by_a_message_that_is_damaged(
        self, ending: str, place: int, word: int, what: str, whose: str
    ) -> None:
        def damage(message: np.ndarray) -> None:
            message[0, place] = word

        def work(transport: Loopback) -> Any:
            over = Tampering(transport, ending, damage)
            ledger = compressing(over, config_of())
            variables = [tf.Variable(tf.zeros([16, 24]))]
            random = np.random.default_rng(transport.rank)
            gradient = tf.constant(random.normal(size=[16, 24]), tf.float32)
            with self.assertRaisesRegex(
                tf.errors.InvalidArgumentError, f"The message of {whose}{what}"
            ):
                exchange(ledger, OWNER, [gradient], variables)
            each = only(ledger)
            return each.residual.v, gradient, each.owed[OWNED], int(each.residual.step)

        for v, gradient, z, step in run_workers(2, work):
            self.assertAllEqual(v, tf.reshape(gradient, [-1]))
            self.assertFalse(np.any(z))
            self.assertEqual(step, 0)

    @pytest.mark.extended
    def test_any_damage_is_named_or_read_within_the_arena(self) -> None:
        random = np.random.default_rng(0)
        refused = 0
        for ending in (".parts", ".message"):
            for _ in range(40):
                place, word = random.random(), int(random.integers(-(2**31), 2**31))

                def damage(
                    message: np.ndarray, place: float = place, word: int = word
                ) -> None:
                    message[0, int(place * message.shape[1])] ^= word

                def work(
                    transport: Loopback, ending: str = ending, damage: Any = damage
                ) -> np.ndarray:
                    ledger = compressing(
                        Tampering(transport, ending, damage), config_of()
                    )
                    variables = [tf.Variable(tf.zeros([16, 24]))]
                    own = tf.constant(np.random.default_rng(1).normal(size=[16, 24]))
                    own = tf.cast(own, tf.float32)
                    return exchange(ledger, OWNER, [own], variables).gradients[0]

                for found in outcomes(2, work):
                    if isinstance(found, Exception):
                        self.assertRegex(str(found), "rank 1.* is damaged|same step")
                        refused += 1
                    else:
                        self.assertTrue(np.all(np.isfinite(found)))
        self.assertGreater(refused, 40)

    def test_workers_in_other_steps_are_named(self) -> None:
        def work(transport: Loopback) -> None:
            ledger = compressing(transport, config_of())
            variables = [tf.Variable(tf.zeros([16, 24]))]
            exchange(ledger, OWNER, [tf.ones([16, 24])], variables)
            only(ledger).residual.step.assign_add(transport.rank)
            only(ledger).residual.count.seen.assign_add(transport.rank)
            exchange(ledger, OWNER, [tf.ones([16, 24])], variables)

        for found in outcomes(2, work):
            self.assertRegex(str(found), "not in the same step")


class ChoiceTest(parameterized.TestCase, tf.test.TestCase):
    LAYOUT = arena.build([("t", (5000, 5000))])

    @parameterized.parameters(
        (4, "allgather"), (32, "allgather"), (64, "owners"), (1024, "owners")
    )
    def test_by_itself_it_takes_owners_on_many_workers(
        self, workers: int, expected: str
    ) -> None:
        config = DGCConfig(sparsity=0.999)
        self.assertEqual(config.exchange, "auto")
        found = formats.decided(config, self.LAYOUT, workers)
        self.assertEqual(found.exchange, expected)
        small = arena.build([("t", (100, 100))])  # where latency is all there is
        found = formats.decided(config, small, workers)
        self.assertEqual(found.exchange, "allgather")

    def test_a_stage_is_dense_where_that_is_less(self) -> None:
        for workers in (2, 64):
            for sparsity, kind in ((0.0, DenseSum), (0.999, OwnerSum)):
                args = self.LAYOUT, sparsity, config_of(), workers
                self.assertIs(formats.kind_at(*args), kind)
        args = self.LAYOUT, 0.75
        self.assertIs(formats.kind_at(*args, config_of(), 64), OwnerSum)
        gathered = config_of(exchange="allgather")
        self.assertIs(formats.kind_at(*args, gathered, 64), DenseSum)
        self.assertIs(formats.kind_at(*args, config_of(), 1), GatherSum)

    def test_what_a_worker_receives_does_not_grow(self) -> None:
        args = self.LAYOUT, 0.999, config_of(growth=4)
        few, many = (formats.cost(*args, workers).received for workers in (16, 1024))
        self.assertLess(many, 1.2 * few)

    def test_needs_an_all_to_all(self) -> None:
        class Without(LocalTransport):
            name = "mine"
            all_to_all = Transport.all_to_all

        with self.assertRaisesRegex(
            ValueError, "no all-to-all. Received: exchange='owners', transport 'mine'"
        ):
            Case().work(Without(), config_of())
        found = Case(steps=1).work(Without(), config_of(exchange="auto"))
        self.assertEqual(only(found.ledger).config.exchange, "allgather")


@pytest.mark.long
class ManyTest(tf.test.TestCase):
    def check(self, workers: int) -> None:
        case = Case(((200, 150), (5,)), workers, whole=True, steps=2)
        found = case.simulated(config_of(sparsity=0.99, growth=4))
        applied = sum(case.in_arena(step) for step in found.applied)
        every = [
            case.in_arena([g.numpy() for g in case.gradients(rank, step)])
            for rank in range(workers)
            for step in range(2)
        ]
        kept = np.sum(found.v, axis=0) + np.sum(found.z, axis=0)
        self.assertAllEqual(applied + kept, sum(every))
        self.assertTrue(np.any(found.z))

    @pytest.mark.slow
    def test_nothing_is_lost_of_256(self) -> None:
        self.check(256)

    @pytest.mark.slow
    def test_nothing_is_lost_of_1024(self) -> None:
        self.check(1024)

    @pytest.mark.slow
    def test_a_model_trains(self) -> None:
        config = config_of(sparsity=0.9, growth=4, min_elements=1)
        strategy = simulate.SimulatedStrategy(64, config)
        with strategy.scope():
            layers = [keras.layers.Dense(100, "tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((8,)), *layers])
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        random = np.random.default_rng(0)
        x = random.normal(size=(256, 8)).astype("float32")
        y = x @ random.normal(size=(8, 1)).astype("float32")
        losses = model.fit(x, y, batch_size=64, epochs=4, verbose=0).history["loss"]
        self.assertLess(losses[-1], losses[0])


if __name__ == "__main__":
    tf.test.main()
