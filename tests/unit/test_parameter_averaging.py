"""Tests of parameter averaging, with several workers as threads: law 6 and others."""

import contextlib
import logging
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from averagers import MOMENTUM, RATE, SHAPES, Worker, gradient_of, start
from ledgers import exchange, flushed, only
from loopback import OWNER, Loopback, Owner, outcomes, run_workers

from tf_dgc import ParameterAveragingStrategy
from tf_dgc.compression import arena
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.exchanges import (
    Averaging,
    Companions,
    Dense,
    Expected,
    Ledger,
    formats,
)
from tf_dgc.exchanges.averaged import settle
from tf_dgc.exchanges.modes import SUM, Combining
from tf_dgc.transports.local import LocalTransport


def trained(workers: int, steps: int, **settings: Any) -> list[list[np.ndarray]]:
    """Return each worker's parameters after so many steps."""
    return run_workers(workers, lambda t: Worker(t, **settings).train(steps))


def twin(
    workers: int,
    steps: int,
    period: int,
    outer: tuple[float, float] = (1.0, 0.0),
    synchronous: int = 0,
) -> list[list[np.ndarray]]:
    """The same in NumPy, in double precision, with the formulas of the papers."""
    own = [[w.astype("float64") for w in start()] for _ in range(workers)]
    velocity = [[np.zeros(s) for s in SHAPES] for _ in range(workers)]
    anchor, momenta = own[0], [np.zeros(s) for s in SHAPES]
    for step in range(steps):
        gradients = [gradient_of(own[r], r, step) for r in range(workers)]
        if step < synchronous:
            mean = [np.mean(parts, axis=0) for parts in zip(*gradients, strict=True)]
            gradients = [mean] * workers
        for r in range(workers):
            velocity[r] = [
                MOMENTUM * u + g for u, g in zip(velocity[r], gradients[r], strict=True)
            ]
            own[r] = [w - RATE * u for w, u in zip(own[r], velocity[r], strict=True)]
        if step + 1 == synchronous:
            anchor = own[0]
        if step >= synchronous and (step + 1 - synchronous) % period == 0:
            means = [np.mean(parts, axis=0) for parts in zip(*own, strict=True)]
            rate, momentum = outer
            momenta = [
                momentum * m + (a - w)
                for m, a, w in zip(momenta, anchor, means, strict=True)
            ]
            anchor = [a - rate * m for a, m in zip(anchor, momenta, strict=True)]
            own = [list(anchor) for _ in range(workers)]
    return own


class AnyName:
    """A transport that matches calls by their order alone, as TensorFlow's does."""

    def __init__(self, transport: Loopback) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._transport.all_gather(tensor, "any")

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        return self._transport.all_reduce(tensors, "any")


@pytest.mark.long
class TrainingTest(parameterized.TestCase, tf.test.TestCase):
    def assert_same_bits(self, found: list[list[np.ndarray]]) -> None:
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, two)

    def assert_close(self, found: Any, expected: Any, tolerance: float = 1e-5) -> None:
        for rank, (one, two) in enumerate(zip(found, expected, strict=True)):
            for own, wanted in zip(one, two, strict=True):
                self.assertAllClose(own, wanted, tolerance, tolerance, msg=f"{rank}")

    @parameterized.product(
        workers=(1, 2, 4), outer=(None, (0.7, 0.9)), synchronous=(0, 4)
    )
    @pytest.mark.few(2)
    def test_it_is_what_the_papers_say(
        self, workers: int, outer: Any, synchronous: int
    ) -> None:
        settings = {"period": 3, "outer": outer, "synchronous_steps": synchronous}
        found = trained(workers, 11, **settings)
        expected = twin(workers, 11, 3, outer or (1.0, 0.0), synchronous)
        self.assert_close(found, expected)

    @parameterized.parameters(2, 3, 4)
    @pytest.mark.few(1)
    def test_after_a_round_all_have_the_same_bits(self, workers: int) -> None:
        compression = DGCConfig(sparsity=0.9, min_elements=0)
        for settings in ({}, {"outer": (0.7, 0.9)}, {"compression": compression}):
            self.assert_same_bits(trained(workers, 4, period=2, **settings))
            between = trained(workers, 3, period=2, **settings)
            self.assertNotAllClose(between[0][0], between[1][0])

    @pytest.mark.extended
    def test_a_period_of_one_is_dense_training_over_50_steps(self) -> None:
        def dense(transport: Loopback) -> list[np.ndarray]:
            variables = [tf.Variable(value) for value in start()]
            velocities = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
            owner, synchronizer = Owner(), Ledger(transport, Dense)
            for step in range(50):
                own = gradient_of([v.numpy() for v in variables], transport.rank, step)
                local = [tf.constant(g / np.float32(transport.size)) for g in own]
                found = exchange(synchronizer, owner, local, variables)
                steps = zip(found.gradients, variables, velocities, strict=True)
                for gradient, variable, velocity in steps:
                    velocity.assign(MOMENTUM * velocity + gradient)
                    variable.assign_sub(RATE * velocity)
            return [variable.numpy() for variable in variables]

        for workers in (2, 3, 4):
            found, expected = (
                trained(workers, 50, period=1),
                run_workers(workers, dense),
            )
            self.assert_close(found, expected, 1e-6)

    def test_synchronous_steps_are_dense_training(self) -> None:
        early = trained(3, 6, period=2, synchronous_steps=6)
        self.assert_same_bits(early)
        self.assert_close(early, trained(3, 6, period=1), 1e-6)

    def test_an_outer_step_of_rate_1_is_the_plain_average(self) -> None:
        plain = trained(3, 12, period=4)
        self.assert_close(trained(3, 12, period=4, outer=(1.0, 0.0)), plain, 1e-6)

    def test_compression_that_leaves_nothing_out_is_the_plain_average(self) -> None:
        nothing_left = DGCConfig(sparsity=0.0)
        found = trained(3, 12, period=4, compression=nothing_left)
        self.assert_close(found, trained(3, 12, period=4), 1e-6)

    @parameterized.parameters(1, 2, 4)
    @pytest.mark.few(1)
    def test_averaging_equal_parameters_changes_nothing(self, workers: int) -> None:
        # On three, the third of a sum may be off by the last bit, on all alike.
        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=1)
            zeros = [tf.zeros(shape) for shape in SHAPES]
            for _ in range(3):
                exchange(worker.synchronizer, worker.owner, zeros, worker.variables)
                worker.synchronizer.parameters(worker.owner, worker.variables)
            return worker.values

        for found in run_workers(workers, work):
            for one, two in zip(found, start(), strict=True):
                np.testing.assert_array_equal(one, two)

    @parameterized.product(
        dtype=["float16", "bfloat16"],
        settings=[{}, {"compression": DGCConfig(sparsity=0.0, min_elements=0)}],
    )
    @pytest.mark.few(1)
    def test_the_mean_of_equal_parameters_of_16_bits_has_their_bits(
        self, dtype: str, settings: dict[str, Any]
    ) -> None:
        # Between 1 and 2, every value there is of the type.
        equal = tf.constant(np.arange(1, 2, 2.0**-10).reshape(32, 32), dtype)
        # Workers that moved by a place each, and as far back.
        places = 2.0 ** (-10 if dtype == "float16" else -7)

        def work(transport: Loopback) -> list[np.ndarray]:
            config = AveragingConfig(period=1, **settings)
            companions = Companions([tf.Variable(equal)], [], [])
            averaging = Averaging(config)
            averaging.expect(OWNER, Expected(companions))
            ledger = Ledger(transport, averaging)
            variables, zeros = [tf.Variable(equal)], [tf.zeros_like(equal)]
            exchange(ledger, OWNER, zeros, variables)
            moved = tf.cast((transport.rank - 1) * places, dtype)
            variables[0].assign_add(moved * tf.ones_like(equal))
            ledger.parameters(OWNER, variables)
            return [
                tf.cast(v, tf.float32).numpy() for v in (*variables, *companions[0])
            ]

        for found in run_workers(3, work):
            for values in found:
                self.assertAllEqual(values, tf.cast(equal, tf.float32))

    @parameterized.parameters("float32", "float16", "sign")
    @pytest.mark.few(1)
    def test_compression_loses_nothing(self, value_dtype: str) -> None:
        # Gradients that do not depend on where a worker is: what is not sent yet is
        # all that is missing.
        def work(transport: Loopback) -> Any:
            worker = Worker(transport, period=2, compression=compression)
            random = np.random.default_rng(transport.rank)
            moved = [np.zeros(shape) for shape in SHAPES]
            for _ in range(9):
                gradients = [random.normal(size=s).astype("float32") for s in SHAPES]
                worker.apply(gradients)
                own = zip(moved, worker.velocities, strict=True)
                moved = [m - RATE * u.numpy() for m, u in own]
            settle(worker.synchronizer)
            kept = float(worker.synchronizer.residual_norm())
            flushed(worker.synchronizer, worker.variables)
            left = float(worker.synchronizer.residual_norm())
            return worker.values, moved, kept, left

        compression = DGCConfig(sparsity=0.9, min_elements=0, value_dtype=value_dtype)
        found = run_workers(3, work)
        moved = [
            np.mean(parts, axis=0) for parts in zip(*[f[1] for f in found], strict=True)
        ]
        expected = [w + m for w, m in zip(start(), moved, strict=True)]
        for values, _, kept, left in found:
            self.assertGreater(kept, 0.1)
            self.assertEqual(left, 0.0)
            self.assert_close([values], [expected], 1e-5)
        self.assert_same_bits([f[0] for f in found])

    @pytest.mark.extended
    def test_in_eager_and_graph_the_same(self) -> None:
        def work(graph: bool) -> list[np.ndarray]:
            worker = Worker(LocalTransport(), period=3, synchronous_steps=2)
            gradients = [tf.constant(w) for w in start()]

            def step() -> None:
                worker.apply(gradients)

            run = tf.function(step) if graph else step
            for _ in range(8):
                run()
            self.assertEqual(int(worker.period.progress.rounds), 2)
            return worker.values

        self.assert_close([work(True)], [work(False)], 1e-6)

    def test_sparse_gradients_are_brought_to_full_strength(self) -> None:
        def work(transport: Loopback) -> np.ndarray:
            averaging = Averaging(AveragingConfig())
            averaging.expect(OWNER, Expected(Companions([], [], [])))
            synchronizer = Ledger(transport, averaging)
            table = tf.Variable(tf.zeros([4, 2]))
            rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), [4, 2])
            found = exchange(synchronizer, OWNER, [rows], [table]).gradients[0]
            self.assertIsInstance(found, tf.IndexedSlices)
            return tf.convert_to_tensor(found).numpy()

        for found in run_workers(3, work):
            np.testing.assert_array_equal(found, [[0, 0], [6, 6], [0, 0], [0, 0]])


@pytest.mark.long
class CombiningTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters((3, False, 1 / 3), (3, True, 1.0), (6, True, 4 / 6))
    @pytest.mark.slow
    def test_what_one_worker_alone_sends_is_applied_whole_among_few_senders(
        self, workers: int, senders: bool, share: float
    ) -> None:
        def work(transport: Loopback) -> Any:
            config = DGCConfig(sparsity=0.9, min_elements=0)
            worker = Worker(
                transport, period=1, compression=config, combining=Combining(senders)
            )
            gradients = [np.zeros(shape, "float32") for shape in SHAPES]
            gradients[0][transport.rank] = 1.0  # a row of its own
            worker.apply(gradients)
            return worker.values

        found = run_workers(workers, work)
        for values in found:
            moved = (start()[0] - values[0])[:workers]
            sent = moved[moved != 0]
            self.assertAllClose(sent, np.full(sent.shape, share * RATE), rtol=1e-3)
            self.assertGreater(sent.size, 8)
            self.assertAllEqual(start()[0][workers:], values[0][workers:])
        self.assertAllEqual(found[0][0], found[1][0])

    @parameterized.parameters(1.0, 0.5)
    def test_what_is_not_sent_decays_from_round_to_round(self, decay: float) -> None:
        def work(transport: Loopback) -> Any:
            compression = DGCConfig(sparsity=0.9, min_elements=0)
            settings = {"combining": Combining(True, decay), "compression": compression}
            worker = Worker(transport, period=1, **settings)
            kept = [np.zeros(shape) for shape in SHAPES]
            random = np.random.default_rng(0)
            for _ in range(4):
                before, speed = worker.values, [u.numpy() for u in worker.velocities]
                gradients = [random.normal(size=s).astype("float32") for s in SHAPES]
                worker.apply(gradients)
                steps = [
                    RATE * (MOMENTUM * u + g)
                    for u, g in zip(speed, gradients, strict=True)
                ]
                applied = [b - a for b, a in zip(before, worker.values, strict=True)]
                kept = [
                    decay * k + step - a
                    for k, step, a in zip(kept, steps, applied, strict=True)
                ]
            return kept, float(worker.synchronizer.residual_norm())

        ((kept, norm),) = run_workers(1, work)
        expected = np.sqrt(sum(np.sum(np.square(k)) for k in kept))
        self.assertAllClose(norm, expected, rtol=1e-4)

    @parameterized.named_parameters(
        ("Adam", "Adam", {}, Combining(True, 0.95)),
        ("SGD", "SGD", {}, SUM),
        ("Adam, told", "Adam", {"combine": "mean"}, SUM),
        ("SGD, told", "SGD", {"combine": "senders"}, Combining(True, 0.95)),
        ("a decay", "SGD", {"error_decay": 0.9}, Combining(False, 0.9)),
        ("an outer optimizer", "Adam", {"outer_optimizer": keras.optimizers.SGD}, SUM),
    )
    @pytest.mark.few(1)
    def test_changes_are_combined_by_what_made_them(
        self, name: str, settings: Any, expected: Combining
    ) -> None:
        settings = {"compression": DGCConfig(min_elements=1), "period": 1} | settings
        config = AveragingConfig(**settings)
        strategy = ParameterAveragingStrategy(config, transport="local")
        with (
            strategy.scope(),
            mock.patch.object(Averaging, "expect", autospec=True) as expect,
        ):
            optimizer = getattr(keras.optimizers, name)(0.1)
            variable = keras.Variable(tf.zeros([4]))
            optimizer.build([variable])
            expect.side_effect = InterruptedError
            with contextlib.suppress(InterruptedError):
                strategy.run(lambda: optimizer.apply([tf.ones([4])], [variable]))
        self.assertEqual(expect.call_args.args[-1].combining, expected)

    def test_rounds_send_signs_of_5_percent_where_nothing_is_said(self) -> None:
        found: Any = AveragingConfig(compression=DGCConfig()).compression
        self.assertEqual((found.sparsity, found.value_dtype), (0.95, "sign"))
        again = AveragingConfig.from_config(
            AveragingConfig(compression=DGCConfig()).get_config()
        )
        self.assertEqual(again.compression, found)
        for given in (DGCConfig(sparsity=0.99), DGCConfig(ratio=50)):
            config = AveragingConfig(compression=given, combine="mean")
            self.assertEqual(config.compression, given)

    @parameterized.parameters(
        ("auto", "owners", "mean", "owners"),
        ("mean", "auto", "mean", "auto"),
        ("auto", "auto", "auto", "allgather"),
        ("senders", "auto", "senders", "allgather"),
    )
    @pytest.mark.few(1)
    def test_means_over_senders_need_to_know_who_sent(
        self, combine: str, exchange: str, found: str, kind: str
    ) -> None:
        compression = DGCConfig(exchange=exchange)
        config: Any = AveragingConfig(combine=combine, compression=compression)
        self.assertEqual((config.combine, config.compression.exchange), (found, kind))

    @parameterized.parameters(("auto", 64, 1), ("mean", 64, 0), ("auto", 4, 0))
    def test_that_owners_are_not_chosen_is_said(
        self, combine: str, workers: int, lines: int
    ) -> None:
        over: Any = mock.Mock(rank=0, size=workers)
        layout = arena.build([("t", [2**14, 2**12])])
        config = DGCConfig(sparsity=0.999, exchange="allgather")
        with self.assertLogs("tf_dgc", "INFO") as logs:
            logging.getLogger("tf_dgc").info("so that there is a line")
            formats.tell_gathered(config, layout, over, combine)
        self.assertLen(logs.output, 1 + lines)

    @parameterized.parameters(
        (
            {"combine": "senders", "compression": DGCConfig(exchange="owners")},
            "`combine` must be 'mean' or 'auto' with exchange='owners'",
        ),
        ({"combine": "sum"}, "`combine` must be one of"),
        ({"error_decay": 0.0}, "`error_decay` must be None or in"),
        ({"error_decay": 1.5}, "`error_decay` must be None or in"),
        ({"error_decay": float("nan")}, "`error_decay` must be None or in"),
    )
    def test_other_settings_are_refused(self, settings: Any, text: str) -> None:
        with self.assertRaisesRegex(ValueError, text):
            AveragingConfig(**settings)


class RoundTest(parameterized.TestCase, tf.test.TestCase):
    @pytest.mark.long
    def test_statistics_are_averaged_with_the_parameters(self) -> None:
        def work(transport: Loopback) -> list[float]:
            worker = Worker(transport, period=2, averaged=2)
            worker.step()
            self.assertEqual(float(worker.statistics[0]), transport.rank)
            worker.step()
            return [float(v) for v in worker.statistics]

        self.assertEqual(run_workers(3, work), [[1.0, 1.0]] * 3)

    @pytest.mark.long
    def test_statistics_are_settled_after_synchronous_steps(self) -> None:
        def work(transport: Loopback) -> Any:
            worker = Worker(
                transport, averaged=1, synchronous_steps=5, outer=(0.7, 0.9)
            )
            worker.train(3)
            before = worker.values
            settle(worker.synchronizer)
            rounds = int(worker.period.progress.stats().rounds)
            same = all(map(np.array_equal, before, worker.values))
            return float(worker.statistics[0]), same, rounds

        self.assertEqual(run_workers(3, work), [(1.0, True, 0)] * 3)

    @parameterized.parameters({}, {"outer": (0.7, 0.5)}, {"compressed": True})
    @pytest.mark.slow
    def test_a_worker_whose_data_end_early_does_not_hang_the_others(
        self, compressed: bool = False, **settings: Any
    ) -> None:
        if compressed:
            settings["compression"] = DGCConfig(sparsity=0.9, min_elements=0)

        def work(transport: Loopback) -> Any:
            worker = Worker(transport, period=2, averaged=1, **settings)
            for _ in range(2):  # epochs
                worker.train([7, 1, 4][transport.rank])
                settle(worker.synchronizer)
            return worker.values, float(worker.statistics[0])

        found = run_workers(3, work)
        for values, statistic in found:
            self.assertEqual(statistic, found[0][1])
            for one, two in zip(values, found[0][0], strict=True):
                np.testing.assert_array_equal(one, two)
        self.assertNotAllClose(found[0][0][0], start()[0])

    @parameterized.parameters({}, {"outer": (0.7, 0.9)})
    @pytest.mark.long
    def test_a_worker_without_data_gets_what_the_others_learn(
        self, **settings: Any
    ) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=3, **settings)
            worker.train(4)
            settle(worker.synchronizer)
            if transport.rank:
                worker.train(5)  # an epoch in which the first has nothing
            settle(worker.synchronizer)
            return worker.values

        found = run_workers(3, work)
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, two)

    @parameterized.parameters({"outer": (0.7, 0.9)}, {"compressed": True})
    @pytest.mark.extended
    def test_what_happens_beside_steps_does_not_part_the_workers(
        self, compressed: bool = False, **settings: Any
    ) -> None:
        # As weight decay does, which Keras applies before the exchange.
        if compressed:
            settings["compression"] = DGCConfig(sparsity=0.9, min_elements=0)

        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=2, **settings)
            for _ in range(2):
                for _ in range([7, 1, 4][transport.rank]):
                    for variable in worker.variables:
                        variable.assign(0.9 * variable)
                    worker.step()
                settle(worker.synchronizer)
            return worker.values

        found = run_workers(3, work)
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, two)

    @pytest.mark.long
    def test_weights_loaded_between_trainings_are_where_the_next_begins(self) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=2, outer=(0.5, 0.0))
            worker.train(4)
            settle(worker.synchronizer)
            for variable in worker.variables:
                variable.assign(tf.fill(variable.shape, 100.0))
            settle(worker.synchronizer)  # as the data are shared out
            return worker.train(2)

        for found in run_workers(2, work):
            self.assertAllGreater(found[0], 50.0)

    @pytest.mark.long
    def test_statistics_that_changed_without_a_step_are_settled(self) -> None:
        def work(transport: Loopback) -> tuple[float, float]:
            worker = Worker(transport, period=1, averaged=1)
            worker.step()
            settle(worker.synchronizer)
            worker.statistics[0].assign(3.0 * transport.rank)  # a forward pass
            before = worker.values[0][0, 0]
            settle(worker.synchronizer)
            return float(worker.statistics[0]), worker.values[0][0, 0] - before

        self.assertEqual(run_workers(3, work), [(3.0, 0.0)] * 3)

    @pytest.mark.long
    def test_workers_meet_though_an_owner_is_gone_on_some(self) -> None:
        def work(transport: Loopback) -> list[Any]:
            worker = Worker(transport, period=2)
            worker.step()
            settle(worker.synchronizer)
            if transport.rank == 1:
                worker.owner = None  # garbage is found at different times
            settle(worker.synchronizer)
            return settle(worker.synchronizer)

        self.assertEqual(run_workers(3, work), [[]] * 3)

    @pytest.mark.long
    def test_two_optimizers_need_as_many_steps_on_every_worker(self) -> None:
        def work(transport: Loopback) -> None:
            one = Worker(transport, period=2)
            other, variables = Owner(), [tf.Variable(v) for v in start()]
            one.averaging.expect(other, Expected(Companions([], [], [])))

            def step() -> None:
                one.step()
                zeros = [tf.zeros(shape) for shape in SHAPES]
                exchange(one.synchronizer, other, zeros, variables)
                one.synchronizer.parameters(other, variables)

            for _ in range([6, 2][transport.rank]):
                step()
            settle(one.synchronizer)

        hub = outcomes(2, lambda transport: work(AnyName(transport)))
        for outcome in hub:
            self.assertIsInstance(outcome, tf.errors.InvalidArgumentError)
            self.assertIn("round of the same optimizer", str(outcome))

    @pytest.mark.long
    def test_an_optimizer_of_the_past_is_left_alone(self) -> None:
        def work(transport: Loopback) -> int:
            worker = Worker(transport, period=2)
            worker.train(3)
            settle(worker.synchronizer)
            first, worker.owner = worker.owner, Owner()
            worker.averaging.expect(worker.owner, Expected(Companions([], [], [])))
            worker.train([7, 2][transport.rank])  # the data end early, too
            settle(worker.synchronizer)
            past, _ = worker.synchronizer.exchanges()
            self.assertIs(past.owner(), first)
            return int(past.progress.rounds)

        self.assertEqual(run_workers(2, work), [2, 2])

    @pytest.mark.long
    def test_settling_twice_changes_and_sends_nothing(self) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=4, outer=(0.7, 0.9))
            worker.train(6)
            settle(worker.synchronizer)
            before, calls = worker.values, len(transport.sent)
            settle(worker.synchronizer)
            for one, two in zip(before, worker.values, strict=True):
                np.testing.assert_array_equal(one, two)
            # A worker that has not trained since cannot know that nobody has.
            sent = transport.sent[calls:]
            self.assertEqual([call.call for call in sent], ["all_gather"])
            self.assertEqual(int(worker.period.progress.rounds), 2)

        run_workers(2, work)

    @pytest.mark.long
    def test_the_period_adapts_alike_everywhere(self) -> None:
        def work(transport: Loopback) -> list[int]:
            settings = {"period": "adaptive", "min_period": 2, "max_period": 4}
            worker = Worker(transport, **settings)
            found = []
            for step in range(14):
                # Means over the workers: 2.0 in the first period, 0.5 after it.
                mean = 2.0 if step < 4 else 0.5
                worker.step(mean + (0.25 if transport.rank else -0.25))
                found.append(int(worker.period.progress.stats().rounds))
            self.assertEqual(int(worker.period.progress.stats().period), 2)
            return found

        expected = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5]
        self.assertEqual(run_workers(2, work), [expected] * 2)

    @parameterized.parameters(np.nan, np.inf)
    @pytest.mark.long
    def test_what_is_not_finite_stops_all_workers(self, value: float) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=3)
            worker.train(2)
            if transport.rank == 1:
                worker.variables[2][3, 1].assign(value)
            worker.step()

        for outcome in outcomes(3, work):
            self.assertIsInstance(outcome, tf.errors.InvalidArgumentError)
            self.assertRegex(str(outcome), r"Rank, step and variable:(.|\n)*1(.|\n)*3")

    @pytest.mark.long
    def test_workers_in_different_rounds_stop(self) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=2)
            worker.train(2)
            worker.period.progress.rounds.assign_add(transport.rank)
            worker.train(2)

        for outcome in outcomes(2, work):
            self.assertIsInstance(outcome, tf.errors.InvalidArgumentError)
            self.assertIn("not in the same round of the same", str(outcome))

    @pytest.mark.long
    def test_workers_with_different_statistics_stop_at_the_first_step(self) -> None:
        def work(transport: Loopback) -> None:
            Worker(transport, averaged=1 + transport.rank).step()

        for outcome in outcomes(2, work):
            self.assertIsInstance(outcome, ValueError)
            self.assertIn("averaged variables", str(outcome))


class FiguresTest(parameterized.TestCase, tf.test.TestCase):
    @pytest.mark.long
    def test_bytes_are_those_handed_to_the_transport(self) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=2, averaged=1)
            synchronizer, size = worker.synchronizer, 4 * sum(map(np.size, start()))
            worker.step()
            before = len(transport.sent)
            self.assertEqual(int(synchronizer.stats().sent_bytes), 0)
            self.assertEqual(int(synchronizer.stats().dense_bytes), size)
            worker.step()
            sent = sum(call.bytes for call in transport.sent[before:])
            self.assertEqual(sent, size + 4 + 112)
            self.assertEqual(int(synchronizer.stats().sent_bytes), sent)
            self.assertEqual(int(synchronizer.stats(total=True).sent_bytes), sent)
            self.assertEqual(int(synchronizer.stats(total=True).dense_bytes), 2 * size)

        run_workers(2, work)

    @pytest.mark.long
    def test_one_reduction_carries_a_round(self) -> None:
        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=1, averaged=3)
            worker.step()
            before = len(transport.sent)
            worker.step()
            calls = [call.call for call in transport.sent[before:]]
            self.assertEqual(calls, ["all_gather", "all_reduce"])

        run_workers(2, work)

    @pytest.mark.extended
    def test_compressed_rounds_send_what_messages_hold(self) -> None:
        compression = DGCConfig(sparsity=0.99, min_elements=64)

        def work(transport: Loopback) -> None:
            worker = Worker(transport, period=2, compression=compression)
            worker.train(3)
            before = len(transport.sent)
            worker.step()
            sent = sum(call.bytes for call in transport.sent[before:])
            self.assertEqual(int(worker.synchronizer.stats().sent_bytes), sent)
            self.assertLess(sent, 2 * sum(map(np.size, start())))
            (first, second) = worker.synchronizer.tensor_stats()
            self.assertEqual((first.elements, second.elements), (128, 120))

        run_workers(2, work)

    @pytest.mark.long
    def test_the_distance_is_that_to_the_average(self) -> None:
        def work(transport: Loopback) -> tuple[float, list[np.ndarray]]:
            worker = Worker(transport, period=3)
            worker.train(2)
            exchange(worker.synchronizer, worker.owner, nothing, worker.variables)
            before = worker.values
            worker.synchronizer.parameters(worker.owner, worker.variables)
            return float(worker.period.progress.stats().distance), before

        nothing = [tf.zeros(shape) for shape in SHAPES]
        found = run_workers(2, work)
        means = [(a + b) / 2 for a, b in zip(found[0][1], found[1][1], strict=True)]
        for distance, own in found:
            parts = [a - b for a, b in zip(own, means, strict=True)]
            expected = np.sqrt(sum((part**2).sum() for part in parts))
            self.assertAllClose(distance, expected, 1e-4, 1e-4)

    def test_before_the_first_step_there_are_no_rounds(self) -> None:
        worker = Worker(LocalTransport())
        self.assertEqual(worker.synchronizer.exchanges(), [])
        self.assertEqual(settle(worker.synchronizer), [])


@pytest.mark.long
class RestoreTest(parameterized.TestCase, tf.test.TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.folder = pathlib.Path(folder) / "state"

    @parameterized.parameters(
        {},
        {"outer": (0.7, 0.9)},
        {"compression": DGCConfig(sparsity=0.9, min_elements=0)},
        {"period": "adaptive", "min_period": 2, "max_period": 5},
    )
    @pytest.mark.few(1)
    def test_in_the_midst_of_a_period_it_continues_bit_for_bit(
        self, **settings: Any
    ) -> None:
        settings = {"period": 4, "averaged": 1, "synchronous_steps": 1} | settings

        def whole(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, **settings)
            worker.train(7)
            worker.synchronizer.save(self.folder)
            return [*worker.train(6), *[v.numpy() for v in worker.statistics]]

        def resumed(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, **settings)
            worker.train(3)  # of another life
            worker.synchronizer.restore(self.folder)
            worker.taken = 7
            # Data are shared out, as at the start of `fit`: the period goes on.
            settle(worker.synchronizer)
            return [*worker.train(6), *[v.numpy() for v in worker.statistics]]

        expected, found = run_workers(3, whole), run_workers(3, resumed)
        for one, two in zip(expected, found, strict=True):
            for own, other in zip(one, two, strict=True):
                np.testing.assert_array_equal(own, other)

    def test_the_period_is_that_of_the_present_settings(self) -> None:
        def save(transport: Loopback) -> None:
            worker = Worker(transport, period=16)
            worker.train(3)
            worker.synchronizer.save(self.folder)

        def resume(transport: Loopback, **settings: Any) -> int:
            worker = Worker(transport, **settings)
            worker.train(1)
            worker.synchronizer.restore(self.folder)
            return int(worker.period.progress.stats().period)

        run_workers(2, save)
        self.assertEqual(run_workers(2, lambda t: resume(t, period=2)), [2, 2])
        adaptive = {"period": "adaptive", "max_period": 9}
        self.assertEqual(run_workers(2, lambda t: resume(t, **adaptive)), [9, 9])

    def test_what_was_restored_waits_until_it_is_trained_or_flushed(self) -> None:
        def work(transport: Loopback) -> tuple[int, int, int]:
            worker = Worker(transport, period=16)
            worker.train(3)
            worker.synchronizer.save(self.folder)
            worker.synchronizer.restore(self.folder)
            settle(worker.synchronizer)
            before = int(worker.period.progress.position)
            worker.step()
            after = int(worker.period.progress.position)
            worker.synchronizer.restore(self.folder)
            settle(worker.synchronizer, resumed=True)
            return before, after, int(worker.period.progress.position)

        self.assertEqual(run_workers(2, work), [(3, 4, 0)] * 2)

    def test_at_the_end_of_a_period_weights_are_the_models_own(self) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=2)
            worker.train(2)
            worker.synchronizer.save(self.folder)
            for variable in worker.variables:
                variable.assign(tf.ones_like(variable))
            worker.synchronizer.restore(self.folder)
            return worker.values

        for found in run_workers(2, work):
            self.assertAllEqual(found[0], np.ones(SHAPES[0]))

    def test_an_eager_first_step_comes_too_late_for_parameters(self) -> None:
        def save(transport: Loopback) -> None:
            worker = Worker(transport, period=4)
            worker.train(2)
            worker.synchronizer.save(self.folder)

        def resume(transport: Loopback) -> None:
            worker = Worker(transport, period=4)
            worker.synchronizer.restore(self.folder)
            worker.step()

        run_workers(2, save)
        for outcome in outcomes(2, resume):
            self.assertIsInstance(outcome, ValueError)
            self.assertIn("run_eagerly", str(outcome))

    def test_at_the_end_of_a_period_an_eager_first_step_is_in_time(self) -> None:
        def save(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=2, outer=(0.7, 0.9))
            worker.train(4)
            worker.synchronizer.save(self.folder)
            weights = worker.values
            return [*weights, *worker.train(3)]

        def resume(transport: Loopback) -> list[np.ndarray]:
            worker = Worker(transport, period=2, outer=(0.7, 0.9))
            worker.synchronizer.restore(self.folder)
            worker.taken = 4
            for variable, value in zip(worker.variables, weights, strict=True):
                variable.assign(value)  # the model's own file
            return worker.train(3)

        expected = run_workers(2, save)
        weights = expected[0][: len(SHAPES)]
        for one, two in zip(expected, run_workers(2, resume), strict=True):
            for own, other in zip(one[len(SHAPES) :], two, strict=True):
                np.testing.assert_array_equal(own, other)

    @parameterized.parameters((2, 3), (4, 2), (3, 1))
    @pytest.mark.few(1)
    def test_on_another_number_of_workers_all_begin_with_the_mean(
        self, before: int, after: int
    ) -> None:
        compression = DGCConfig(sparsity=0.9, min_elements=0)

        def save(transport: Loopback) -> Any:
            worker = Worker(transport, period=4, compression=compression)
            worker.train(6)
            worker.synchronizer.save(self.folder)
            return worker.values, self.owed(worker)

        def resume(transport: Loopback) -> Any:
            worker = Worker(transport, period=4, compression=compression)
            worker.train(1)
            worker.synchronizer.restore(self.folder)
            self.assertEqual(int(worker.period.progress.position), 2)
            return worker.values, self.owed(worker)

        saved, found = run_workers(before, save), run_workers(after, resume)
        means = [
            np.mean(parts, axis=0) for parts in zip(*[s[0] for s in saved], strict=True)
        ]
        for values, _ in found:
            for one, two in zip(values, means, strict=True):
                self.assertAllClose(one, two, 1e-6, 1e-6)
        total = sum(owed for _, owed in saved)
        self.assertAllClose(sum(owed for _, owed in found), total, 1e-5, 1e-6)

    def owed(self, worker: Worker) -> np.ndarray:
        exchange = only(worker.synchronizer)
        return exchange.state["residual of gradients"].numpy()


if __name__ == "__main__":
    tf.test.main()
