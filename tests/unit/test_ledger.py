"""Tests of the exchange, with several workers as threads."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import compressing, exchange, only
from loopback import OWNER, Loopback, Owner, outcomes, run_workers

from tf_dgc import values as values_lib
from tf_dgc.compression import arena as layout_lib
from tf_dgc.compression import message as packing
from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import VALUE_DTYPES, DGCConfig
from tf_dgc.exchanges import Dense, Ledger
from tf_dgc.exchanges.formats import message_format
from tf_dgc.transports.base import Transport
from tf_dgc.transports.local import LocalTransport

MOMENTUM = Momentum(0.9, False)


def variables_of(
    *shapes: Sequence[int], dtype: tf.DType = tf.float32
) -> list[tf.Variable]:
    return [
        tf.Variable(tf.zeros(shape, dtype), name=f"w{i}")
        for i, shape in enumerate(shapes)
    ]


def normal(shape: Sequence[int], *seed: int) -> tf.Tensor:
    random = np.random.default_rng(seed)
    return tf.constant(random.normal(size=shape), tf.float32)


def settings_of(**others: Any) -> DGCConfig:
    return DGCConfig(**({"sparsity": 0.9, "min_elements": 0} | others))


def state_of(synchronizer: Ledger) -> tuple[np.ndarray, ...]:
    """Return velocity, residual and step of the only owner."""
    arena = only(synchronizer)
    state = arena.residual
    parts = (state.u, state.v, state.step)
    return tuple(part.numpy() for part in parts if part is not None)


def values_of(gradients: Sequence[Any]) -> list[np.ndarray]:
    return [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


class DenseTest(parameterized.TestCase, tf.test.TestCase):
    def test_sums_in_the_type_that_came_in(self) -> None:
        variables = variables_of((2, 3), (4,), ())

        def work(transport: Loopback) -> list[tf.Tensor]:
            gradients = [
                tf.cast(normal(v.shape, transport.rank, i), dtype)
                for i, (v, dtype) in enumerate(
                    zip(variables, (tf.float32, tf.float64, tf.float16), strict=True)
                )
            ]
            exchanged = exchange(Ledger(transport, Dense), OWNER, gradients, variables)
            self.assertIsNone(exchanged.applies)
            self.assertEqual(exchanged.finished, [False] * 3)
            return exchanged.gradients

        for found in run_workers(3, work):
            dtypes = [gradient.dtype for gradient in found]
            self.assertEqual(dtypes, [tf.float32, tf.float64, tf.float16])
            for i, gradient in enumerate(found):
                expected = sum(normal(gradient.shape, rank, i) for rank in range(3))
                tolerance = 1e-2 if gradient.dtype == tf.float16 else 1e-6
                self.assertAllClose(
                    tf.cast(gradient, tf.float32), expected, tolerance, tolerance
                )

    def test_reduces_all_dense_tensors_in_one_call(self) -> None:
        def work(transport: Loopback) -> list[tuple[str, str]]:
            variables = variables_of((2, 3), (4,), (5,))
            gradients = [tf.ones(v.shape) for v in variables]
            exchange(Ledger(transport, Dense), OWNER, gradients, variables)
            return [(sent.call, sent.name) for sent in transport.sent]

        for calls in run_workers(2, work):
            self.assertEqual(calls.count(("all_reduce", "optimizer0.dense")), 1)
            self.assertLen([name for call, name in calls if call == "all_reduce"], 1)

    def test_slices_of_unequal_lengths_are_summed_row_by_row(self) -> None:
        indices = [[7, 1, 7], [], [1, 2, 3, 7, 0]]
        variables = variables_of((9, 2), (3,))

        def slices(rank: int) -> tf.IndexedSlices:
            return tf.IndexedSlices(
                normal((len(indices[rank]), 2), rank),
                tf.constant(indices[rank], tf.int64),
                tf.constant([9, 2], tf.int64),
            )

        def work(transport: Loopback) -> list[Any]:
            gradients = [slices(transport.rank), tf.ones([3])]
            return exchange(
                Ledger(transport, Dense), OWNER, gradients, variables
            ).gradients

        expected = sum(tf.convert_to_tensor(slices(rank)) for rank in range(3))
        for found, dense in run_workers(3, work):
            self.assertIsInstance(found, tf.IndexedSlices)
            # A step adds up what repeats, when it has clipped it.
            self.assertAllEqual(found.indices, np.concatenate(indices))
            self.assertEqual(found.indices.dtype, tf.int64)
            self.assertAllEqual(found.dense_shape, [9, 2])
            self.assertAllClose(tf.convert_to_tensor(found), expected)
            self.assertAllEqual(dense, [3.0, 3.0, 3.0])

    @parameterized.named_parameters(
        ("few rows", (3, 0, 2), False, None, False),
        ("as many rows as the variable", (9, 9, 9), False, None, True),
        ("many rows on one worker", (0, 40, 0), False, None, True),
        ("many rows in a graph", (0, 40), True, None, True),
        ("many rows that are clipped", (0, 40, 0), False, 1.0, False),
    )
    @pytest.mark.slow
    def test_slices_go_by_what_costs_less(
        self, counts: Sequence[int], graph: bool, clipnorm: float | None, whole: bool
    ) -> None:
        owner = Owner()
        owner.clipnorm, owner.global_clipnorm, owner.clipvalue = clipnorm, None, None
        places = np.random.default_rng(0).integers(9, size=(3, 40))

        def slices(rank: int) -> tf.IndexedSlices:
            return tf.IndexedSlices(
                normal((counts[rank], 2), rank),
                tf.constant(places[rank, : counts[rank]], tf.int64),
                tf.constant([9, 2], tf.int64),
            )

        def work(transport: Loopback) -> Any:
            ledger, variables = Ledger(transport, Dense), variables_of((9, 2))

            def step() -> Any:
                return exchange(ledger, owner, [slices(transport.rank)], variables)

            ledger.of(owner, variables)
            (found,) = (tf.function(step) if graph else step)().gradients
            return found, int(ledger.stats().sent_bytes)

        expected = sum(tf.convert_to_tensor(slices(r)) for r in range(len(counts)))
        for rank, (found, sent) in enumerate(run_workers(len(counts), work)):
            self.assertIsInstance(found, tf.IndexedSlices)
            self.assertAllClose(tf.convert_to_tensor(found), expected)
            self.assertLen(found.indices, 9 if whole else sum(counts))
            self.assertEqual(sent, 9 * 2 * 4 if whole else counts[rank] * (2 * 4 + 8))

    def test_slices_without_rows_on_any_worker_stay_without(self) -> None:
        empty = tf.IndexedSlices(
            tf.zeros([0, 2]), tf.zeros([0], tf.int32), tf.constant([9, 2])
        )

        def work(transport: Loopback) -> Any:
            variables = variables_of((9, 2))
            return exchange(
                Ledger(transport, Dense), OWNER, [empty], variables
            ).gradients[0]

        for found in run_workers(2, work):
            self.assertEqual(found.values.shape, [0, 2])
            self.assertEqual(found.indices.shape, [0])

    def test_keeps_nothing_back(self) -> None:
        synchronizer = Ledger(LocalTransport(), Dense)
        exchange(synchronizer, OWNER, [tf.ones([2])], variables_of((2,)))
        self.assertEqual(float(synchronizer.stats().residual_norm), 0.0)


@pytest.mark.long
class CompressionTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.product(
        value_dtype=["float32", "float16", "bfloat16", "log4"], workers=[1, 2]
    )
    @pytest.mark.few(2)
    def test_sent_plus_kept_is_what_was_accumulated(
        self, value_dtype: str, workers: int
    ) -> None:
        shape = (8, 16)
        config = settings_of(value_dtype=value_dtype)

        def work(transport: Loopback) -> None:
            synchronizer = compressing(transport, config)
            variables = variables_of(shape)
            before = np.zeros(shape, np.float32)
            for step in range(5):
                gradient = normal(shape, transport.rank, step)
                transport.sent.clear()
                exchange(synchronizer, OWNER, [gradient], variables)
                sent = self.sent_by(transport, shape, config)
                (residual, _) = state_of(synchronizer)
                kept = residual.reshape(shape)
                where = f"{step=} rank={transport.rank}"
                np.testing.assert_array_equal(sent + kept, before + gradient, where)
                self.assertEqual(np.count_nonzero(sent), 13, where)
                before = kept

        run_workers(workers, work)

    @staticmethod
    def sent_by(
        transport: Loopback, shape: tuple[int, ...], config: DGCConfig
    ) -> np.ndarray:
        """Return what the last message said, as a tensor."""
        layout = layout_lib.build([("w0", shape)])
        form = message_format(layout, config.sparsity, config, transport.size)
        (message,) = [s.arrays[0] for s in transport.sent if ".message" in s.name]
        found = packing.unpack(form, tf.constant([message]))
        sent = np.zeros(layout.size, np.float32)
        positions = found.positions[0]
        values = packing.numbers(form, found)[0]
        sent[positions[positions < form.size].numpy()] = values[positions < form.size]
        return sent.reshape(shape)

    @parameterized.parameters(*VALUE_DTYPES)
    @pytest.mark.few(1)
    def test_nothing_is_lost_over_many_steps(self, value_dtype: str) -> None:
        shape = (8, 16)

        def work(transport: Loopback) -> tuple[np.ndarray, np.ndarray]:
            synchronizer = compressing(transport, settings_of(value_dtype=value_dtype))
            variables = variables_of(shape)
            total = np.zeros(shape, np.float32)
            for step in range(10):
                gradient = normal(shape, transport.rank, step)
                (summed,) = exchange(
                    synchronizer, OWNER, [gradient], variables
                ).gradients
                total += summed.numpy()
            return total, state_of(synchronizer)[0].reshape(shape)

        found = run_workers(2, work)
        given = sum(normal(shape, rank, step) for rank in (0, 1) for step in range(10))
        self.assertAllClose(found[0][0] + found[0][1] + found[1][1], given, 1e-5, 1e-5)

    def test_small_and_flat_tensors_go_dense(self) -> None:
        def work(transport: Loopback) -> tuple[Any, list[np.ndarray]]:
            synchronizer = compressing(
                transport, settings_of(min_elements=20, sparsity=0.99)
            )
            variables = variables_of((30, 30), (4, 4), (100,))
            gradients = [normal(v.shape, transport.rank, 0) for v in variables]
            exchanged = exchange(synchronizer, OWNER, gradients, variables, MOMENTUM)
            return exchanged, gradients

        (first, a), (_, b) = run_workers(2, work)
        self.assertEqual(first.finished, [True, False, False])
        self.assertLess(np.count_nonzero(first.gradients[0]), 30)
        for i in (1, 2):
            self.assertAllEqual(first.gradients[i], a[i] + b[i])

    def test_momentum_is_taken_over_only_where_it_is_corrected(self) -> None:
        variables = variables_of((8, 16), (4,))
        gradients = [tf.ones(v.shape) for v in variables]
        for momentum, correction, expected in (
            (MOMENTUM, True, [True, False]),
            (MOMENTUM, False, [False, False]),
            (None, True, [False, False]),
        ):
            synchronizer = compressing(
                LocalTransport(), settings_of(momentum_correction=correction)
            )
            exchanged = exchange(synchronizer, OWNER, gradients, variables, momentum)
            self.assertEqual(exchanged.finished, expected)
            self.assertLen(state_of(synchronizer), 3 if expected[0] else 2)

    def test_only_flat_tensors_are_an_empty_arena(self) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            synchronizer = compressing(transport, settings_of())
            variables = variables_of((5,), ())
            gradients = [tf.fill(v.shape, 1.0 + transport.rank) for v in variables]
            return values_of(
                exchange(synchronizer, OWNER, gradients, variables).gradients
            )

        for flat, scalar in run_workers(2, work):
            self.assertAllEqual(flat, [3.0] * 5)
            self.assertAllEqual(scalar, 3.0)

    def test_without_gradients_there_is_nothing_to_do(self) -> None:
        for synchronizer in (
            Ledger(LocalTransport(), Dense),
            compressing(LocalTransport(), settings_of()),
        ):
            self.assertEqual(exchange(synchronizer, OWNER, [], []).gradients, [])

    def test_half_float_gradients_come_back_as_they_came(self) -> None:
        for dtype in (tf.float16, tf.bfloat16):
            synchronizer = compressing(LocalTransport(), settings_of())
            variables = variables_of((8, 16), dtype=dtype)
            gradient = tf.cast(normal((8, 16), 1), dtype)
            (found,) = exchange(synchronizer, OWNER, [gradient], variables).gradients
            self.assertEqual(found.dtype, dtype)
            self.assertEqual(found.shape, [8, 16])

    def test_slices_of_a_compressed_tensor_are_compressed(self) -> None:
        synchronizer = compressing(LocalTransport(), settings_of())
        variables = variables_of((40, 8))
        slices = tf.IndexedSlices(
            tf.ones([3, 8]), tf.constant([5, 9, 5]), tf.constant([40, 8])
        )
        (found,) = exchange(synchronizer, OWNER, [slices], variables).gradients
        sent = tf.convert_to_tensor(found).numpy()
        expected = np.zeros((40, 8))
        expected[5], expected[9] = 2.0, 1.0
        kept = state_of(synchronizer)[0][:320].reshape(40, 8)
        self.assertAllEqual(sent + kept, expected)

    def test_slices_of_a_dense_tensor_are_gathered(self) -> None:
        def work(transport: Loopback) -> Any:
            synchronizer = compressing(transport, settings_of(min_elements=1000))
            slices = tf.IndexedSlices(
                tf.ones([transport.rank + 1, 8]),
                tf.range(transport.rank + 1),
                tf.constant([40, 8]),
            )
            return exchange(
                synchronizer, OWNER, [slices], variables_of((40, 8))
            ).gradients[0]

        for found in run_workers(2, work):
            summed = tf.convert_to_tensor(found)
            self.assertAllEqual(summed[:3, 0], [2.0, 1.0, 0.0])

    def test_two_owners_have_separate_state(self) -> None:
        variables = variables_of((8, 16))

        def trained(owners: str) -> dict[str, list[np.ndarray]]:
            synchronizer = compressing(LocalTransport(), settings_of())
            found: dict[str, list[np.ndarray]] = {name: [] for name in owners}
            named = {name: Owner() for name in owners}
            for step in range(6):
                for name, owner in named.items():
                    gradient = normal((8, 16), ord(name), step)
                    exchanged = exchange(
                        synchronizer, owner, [gradient], variables, MOMENTUM
                    )
                    found[name].append(exchanged.gradients[0].numpy())
            return found

        together = trained("ab")
        self.assertAllEqual(together["a"], trained("a")["a"])
        self.assertAllEqual(together["b"], trained("b")["b"])

    def test_state_goes_with_its_owner(self) -> None:
        # A new optimizer may get the address of one that is gone.
        variables = variables_of((8, 16))
        synchronizer = compressing(LocalTransport(), settings_of())
        found = []
        for _ in range(3):
            owner = Owner()
            gradient = normal((8, 16), 1)
            exchanged = exchange(synchronizer, owner, [gradient], variables, MOMENTUM)
            found.append(exchanged.gradients[0].numpy())
            self.assertLen(synchronizer.exchanges(), 1)
            del owner
            self.assertEmpty(synchronizer.exchanges())
        self.assertAllEqual(found[1], found[0])
        self.assertAllEqual(found[2], found[0])

    def test_variables_of_the_same_names_have_separate_state(self) -> None:
        # Keras 3 calls the kernels of all layers "kernel".
        synchronizer = compressing(LocalTransport(), settings_of())
        first, second = variables_of((8, 16)), variables_of((8, 16))
        for step in range(3):
            gradient = normal((8, 16), step)
            exchange(synchronizer, OWNER, [gradient], first, MOMENTUM)
            (still,) = exchange(
                synchronizer, OWNER, [tf.zeros([8, 16])], second, MOMENTUM
            ).gradients
            self.assertAllEqual(still, tf.zeros([8, 16]))

    def test_a_message_of_another_step_stops_all(self) -> None:
        variables = variables_of((8, 16))

        def work(transport: Loopback) -> None:
            synchronizer = compressing(transport, settings_of())
            gradient = normal((8, 16), transport.rank)
            exchange(synchronizer, OWNER, [gradient], variables)
            arena = only(synchronizer)
            arena.residual.step.assign_add(5 * transport.rank)
            exchange(synchronizer, OWNER, [gradient], variables)

        for error in outcomes(2, work):
            self.assertIsInstance(error, tf.errors.InvalidArgumentError)
            self.assertIn("not in the same step of the same training", str(error))

    def test_no_two_collectives_of_a_step_have_the_same_name(self) -> None:
        variables = variables_of((8, 16), (9, 2), (9, 2), (4,))

        def work(transport: Loopback) -> list[list[str]]:
            synchronizer = compressing(
                transport, settings_of(min_elements=20, sparsity=0.5)
            )
            slices = tf.IndexedSlices(
                tf.ones([1, 2]), tf.constant([0]), tf.constant([9, 2])
            )
            gradients = [tf.ones([8, 16]), slices, slices, tf.ones([4])]
            steps, owners = [], [Owner(), Owner()]
            for _ in range(3):
                transport.sent.clear()
                for owner in owners:
                    exchange(synchronizer, owner, gradients, variables)
                names = [sent.name for sent in transport.sent]
                steps.append([n for n in names if not n.startswith("agree")])
            return steps

        for first, *others in run_workers(2, work):
            self.assertLen(set(first), len(first))
            for names in others:
                self.assertEqual(names, first)

    @pytest.mark.slow
    def test_state_survives_retracing(self) -> None:
        variables = variables_of((8, 16), (4,))
        config = settings_of(warmup_steps=4, warmup_stages=(0.5,), clip_norm=5.0)
        traces = []

        def trained(graph: bool) -> list[np.ndarray]:
            synchronizer = compressing(LocalTransport(), config)

            def step(batch: tf.Tensor) -> list[tf.Tensor]:
                traces.append(batch.shape)
                gradients = [
                    tf.reduce_mean(batch, axis=0),
                    tf.reduce_mean(batch, axis=[0, 1])[:4],
                ]
                return exchange(
                    synchronizer, OWNER, gradients, variables, MOMENTUM
                ).gradients

            call = tf.function(step) if graph else step
            found = []
            for number in range(9):
                rows = 3 if number % 3 == 2 else 5
                found.extend(values_of(call(normal((rows, 8, 16), number))))
            return [*found, *state_of(synchronizer)]

        in_graph = trained(graph=True)
        self.assertLen(set(map(tuple, traces)), 2)  # one for each number of rows
        for found, expected in zip(in_graph, trained(graph=False), strict=True):
            self.assertAllClose(found, expected, 1e-5, 1e-6)

    def test_warm_up_follows_the_steps(self) -> None:
        config = settings_of(
            sparsity=0.96875, warmup_steps=4, warmup_stages=(0.5, 0.75)
        )
        synchronizer = compressing(LocalTransport(), config)
        variables = variables_of((16, 32))
        counts = []
        for step in range(6):
            gradient = normal((16, 32), step)
            exchange(synchronizer, OWNER, [gradient], variables)
            counts.append(int(synchronizer.stats().sent_elements))
        self.assertEqual(counts, [256, 256, 128, 128, 16, 16])

    def test_steps_that_are_skipped_do_not_count_for_the_warm_up(self) -> None:
        config = settings_of(
            warmup_steps=2, warmup_stages=(0.5,), nonfinite="skip", sparsity=0.75
        )
        synchronizer = compressing(LocalTransport(), config)
        variables = variables_of((16, 32))
        counts = []
        for step in range(5):
            gradient = normal((16, 32), step) * (np.nan if step == 1 else 1)
            exchange(synchronizer, OWNER, [gradient], variables)
            counts.append(int(synchronizer.stats().sent_elements))
        self.assertEqual(counts[0], 256)
        self.assertEqual(counts[2:], [256, 128, 128])

    @pytest.mark.slow
    def test_a_message_has_the_same_size_at_every_step_of_a_stage(self) -> None:
        config = settings_of(warmup_steps=6, warmup_stages=(0.75,))
        scales = [1.0, 0.0, 1e-9, 1e9, 1.0, 0.0, 1.0, 0.0, 1.0, 1e-3, 1.0, 1.0]

        def work(transport: Loopback) -> list[tuple[str, int]]:
            synchronizer = compressing(transport, config)
            variables = variables_of((16, 32), (8, 8))
            for step, scale in enumerate(scales):
                gradients = [
                    normal(v.shape, step, transport.rank) * scale for v in variables
                ]
                exchange(synchronizer, OWNER, gradients, variables)
            return [
                (sent.name, sent.bytes)
                for sent in transport.sent
                if ".message" in sent.name
            ]

        for found in run_workers(2, work):
            self.assertEqual(
                [name for name, _ in found],
                ["optimizer0.1.message"] * 12,
            )
            sizes = [size for _, size in found]
            self.assertEqual(sizes, [sizes[0]] * 6 + [sizes[-1]] * 6)
            self.assertGreater(sizes[0], sizes[-1])

    @parameterized.parameters("raise", "skip")
    def test_a_learning_rate_that_is_not_finite_enters_nothing(self, way: str) -> None:
        synchronizer = compressing(LocalTransport(), settings_of(nonfinite=way))
        variables = variables_of((4, 4), (3,))
        gradients = [tf.ones([4, 4]), tf.ones([3])]
        for rate in (0.1, float("nan"), float("inf"), 0.1):
            momentum = MOMENTUM._replace(learning_rate=rate)
            before = synchronizer.exchanges() and state_of(synchronizer)
            if np.isfinite(rate):
                exchange(synchronizer, OWNER, gradients, variables, momentum)
                continue
            if way == "raise":
                with self.assertRaisesRegex(
                    tf.errors.InvalidArgumentError, "the learning rate"
                ):
                    exchange(synchronizer, OWNER, gradients, variables, momentum)
            else:
                found = exchange(synchronizer, OWNER, gradients, variables, momentum)
                self.assertFalse(bool(found.applies))
            for one, two in zip(before, state_of(synchronizer), strict=True):
                self.assertAllEqual(one, two)

    def test_momentum_does_not_come_later(self) -> None:
        synchronizer = compressing(LocalTransport(), settings_of())
        variables = variables_of((4, 4))
        step = synchronizer.gradients
        step(OWNER, [tf.ones([4, 4])], variables, Momentum(0.0, False))
        with self.assertRaisesRegex(ValueError, "must not be 0 .* momentum=0.9"):
            step(OWNER, [tf.ones([4, 4])], variables, MOMENTUM)

    def test_stages_that_go_densely_are_told_once(self) -> None:
        config = settings_of(
            sparsity=0.99, warmup_steps=9, warmup_stages=(0.4, 0.5, 0.9)
        )

        def work(transport: Loopback) -> None:
            synchronizer = compressing(transport, config)
            variables = variables_of((40, 40))
            for step in range(3):
                exchange(synchronizer, OWNER, [normal((40, 40), step)], variables)

        with self.assertLogs("tf_dgc", "WARNING") as logs:
            run_workers(4, work)
        (message,) = logs.output
        self.assertRegex(message, "densely, .* on 4 workers: .* 40.00%, 50.00%$")
        with self.assertNoLogs("tf_dgc", "WARNING"):
            run_workers(1, work)

    def test_figures_of_each_tensor_are_those_of_its_elements(self) -> None:
        shapes = (16, 20), (5,), (7, 9)
        variables = variables_of(*shapes)

        def work(transport: Loopback) -> tuple[Any, Any]:
            config = settings_of(warmup_steps=2, warmup_stages=(0.75,))
            synchronizer = compressing(transport, config)
            sent = [np.zeros((0, 16, 20), bool), np.zeros((0, 7, 9), bool)]
            for step in range(6):
                if step == 3:
                    sent = [part[:0] for part in sent]
                    synchronizer.tensor_stats(reset=True)
                own = [normal(v.shape, step, transport.rank) for v in variables]
                exchange(synchronizer, OWNER, own, variables)
                arena = only(synchronizer)
                layout, after = arena.layout, arena.residual.v
                zero = [part == 0 for part in layout_lib.unflatten(layout, after)]
                sent = [
                    np.concatenate([part, [now]])
                    for part, now in zip(sent, zero, strict=True)
                ]
            return synchronizer.tensor_stats(), sent

        for found, sent in run_workers(2, work):
            for tensor, part in zip(found, sent, strict=True):
                self.assertEqual(tensor.elements, part[0].size)
                self.assertAlmostEqual(tensor.density, part.mean())
                self.assertAlmostEqual(tensor.stale, 1 - part.any(axis=0).mean())


class MessageFormatTest(tf.test.TestCase):
    def test_is_dense_where_a_message_would_cost_more(self) -> None:
        seen = set()
        for shapes in ([(8, 16)], [(100, 100), (30, 5)], [(3, 3)]):
            layout = layout_lib.build([("t", shape) for shape in shapes])
            for value_dtype in VALUE_DTYPES:
                config = settings_of(value_dtype=value_dtype)
                for sparsity in (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999):
                    for workers in (1, 2, 4, 8, 64, 1000):
                        form = message_format(layout, sparsity, config, workers)
                        slots = sum(
                            max(1, round(s.size * (1 - sparsity)))
                            for s in layout.segments
                        )
                        sparse = packing.make_format(slots, layout.size, value_dtype)
                        costs_more = workers * sparse.bytes >= 8 * layout.elements
                        dense = sparsity == 0 or costs_more
                        seen.add(dense)
                        self.assertEqual(form.slots, 0 if dense else slots)
        self.assertEqual(seen, {True, False})

    @pytest.mark.long
    def test_dense_stages_reduce_the_arena(self) -> None:
        def work(transport: Loopback) -> tuple:
            synchronizer = compressing(
                transport, settings_of(sparsity=0.25, momentum_masking=False)
            )
            gradient = normal((8, 16), transport.rank)
            found, variables = [], variables_of((8, 16))
            for _ in range(2):
                exchanged = exchange(
                    synchronizer, OWNER, [gradient], variables, MOMENTUM
                )
                found.append(exchanged.gradients[0].numpy())
            names = [(s.name, s.bytes) for s in transport.sent][-2:]
            return found, names, state_of(synchronizer)

        expected = sum(normal((8, 16), rank) for rank in range(2)).numpy()
        for (first, second), names, (velocity, residual, _) in run_workers(2, work):
            self.assertEqual(
                names,
                [
                    ("optimizer0.0.message", 4 * packing.HEADER_WORDS),
                    ("optimizer0.0.arena", 512),
                ],
            )
            self.assertAllEqual(first, expected)
            self.assertAllClose(second, 1.9 * expected)
            self.assertAllEqual(residual, np.zeros(128))
            self.assertNotAllEqual(velocity, np.zeros(128))


class NonfiniteTest(parameterized.TestCase, tf.test.TestCase):
    SHAPES = ((8, 16), (5, 7), (4,))

    def gradients(self, transport: Transport, step: int) -> list[tf.Tensor]:
        return [
            normal(shape, transport.rank, step, i)
            for i, shape in enumerate(self.SHAPES)
        ]

    @parameterized.parameters((np.nan, 0), (np.inf, 1), (-np.inf, 2))
    @pytest.mark.long
    def test_skip_leaves_the_step_out_on_all_workers(
        self, bad: float, variable: int
    ) -> None:
        config = settings_of(nonfinite="skip", sparsity=0.75)

        def work(transport: Loopback) -> None:
            synchronizer = compressing(transport, config)
            variables = variables_of(*self.SHAPES)
            states, applied = [], []
            for step in range(3):
                gradients = self.gradients(transport, step)
                if step == 1 and transport.rank == 2:
                    mask = tf.one_hot(1, gradients[variable].shape[-1]) > 0
                    gradients[variable] = tf.where(mask, bad, gradients[variable])
                exchanged = exchange(
                    synchronizer, OWNER, gradients, variables, MOMENTUM
                )
                applied.append(bool(exchanged.applies))
                states.append(state_of(synchronizer))
            self.assertEqual(applied, [True, False, True])
            for before, after in zip(states[0], states[1], strict=True):
                self.assertAllEqual(before, after)
            for part in states[2]:
                self.assertTrue(np.isfinite(part).all())
            self.assertEqual(states[2][2], 2)

        run_workers(3, work)

    def test_a_step_that_is_left_out_sends_no_message(self) -> None:
        def work(transport: Loopback) -> list[str]:
            config = settings_of(nonfinite="skip")
            synchronizer = compressing(transport, config)
            bad = tf.fill([8, 16], np.nan if transport.rank else 1.0)
            exchange(synchronizer, OWNER, [bad], variables_of((8, 16)), MOMENTUM)
            return [s.name for s in transport.sent if "agree" not in s.name]

        self.assertEqual(run_workers(2, work), [["optimizer0.dense"]] * 2)

    @pytest.mark.slow
    def test_raise_names_rank_step_and_variable_on_all_workers(self) -> None:
        states: list[Any] = [None] * 3

        def work(transport: Loopback) -> None:
            synchronizer = compressing(transport, settings_of())
            variables = variables_of(*self.SHAPES)
            for step in range(3):
                gradients = self.gradients(transport, step)
                if step == 2 and transport.rank == 1:
                    gradients[1] *= np.inf
                before = state_of(synchronizer) if step else None
                try:
                    exchange(synchronizer, OWNER, gradients, variables, MOMENTUM)
                except tf.errors.InvalidArgumentError:
                    states[transport.rank] = (before, state_of(synchronizer))
                    raise

        for error in outcomes(3, work):
            self.assertIsInstance(error, tf.errors.InvalidArgumentError)
            self.assertRegex(
                str(error),
                r"(?s)A gradient holds NaN or infinity; all workers stop.*"
                r"nonfinite='skip'.*Rank, step and variable:.*\b1\b.*\b2\b.*w1",
            )
        for before, after in states:
            for a, b in zip(before, after, strict=True):
                self.assertAllEqual(a, b)

    @pytest.mark.slow
    def test_raise_in_a_graph_leaves_the_state_alone(self) -> None:
        synchronizer = compressing(LocalTransport(), settings_of())
        variables = variables_of((8, 16))

        @tf.function
        def step(gradient: tf.Tensor) -> tf.Tensor:
            return exchange(
                synchronizer, OWNER, [gradient], variables, MOMENTUM
            ).gradients[0]

        step(tf.ones([8, 16]))
        before = state_of(synchronizer)
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "A gradient holds NaN"
        ):
            step(tf.fill([8, 16], np.nan))
        for a, b in zip(before, state_of(synchronizer), strict=True):
            self.assertAllEqual(a, b)

    def test_slices_are_looked_into(self) -> None:
        values = tf.constant([[1.0, np.nan]])
        slices = tf.IndexedSlices(values, tf.constant([0]), tf.constant([4, 2]))
        found = values_lib.first_nonfinite([tf.ones([2]), slices, tf.constant(np.nan)])
        self.assertEqual(int(found), 2)
        self.assertEqual(int(values_lib.first_nonfinite([tf.ones([2])])), 0)

    def test_no_nan_reaches_the_state_through_clipping(self) -> None:
        # Finite, but the square of its norm is not.
        gradient = tf.fill([8, 16], 1e20)
        synchronizer = compressing(
            LocalTransport(), settings_of(clip_norm=1.0, nonfinite="skip")
        )
        exchanged = exchange(
            synchronizer, OWNER, [gradient], variables_of((8, 16)), MOMENTUM
        )
        for part in state_of(synchronizer):
            self.assertTrue(np.isfinite(part).all())
        if exchanged.applies:
            self.assertAllClose(tf.norm(exchanged.gradients[0]), (13 / 128) ** 0.5)


class StatsTest(tf.test.TestCase):
    SHAPES = ((30, 40), (8, 9), (11,))

    @pytest.mark.long
    def test_counts_the_bytes_of_messages_and_dense_tensors(self) -> None:
        def work(transport: Loopback) -> None:
            synchronizer = compressing(
                transport, settings_of(min_elements=100, sparsity=0.95)
            )
            variables = variables_of(*self.SHAPES)
            sizes = [v.shape.num_elements() for v in variables]
            sums = np.zeros(4, np.int64)
            for step in range(3):
                transport.sent.clear()
                gradients = [normal(v.shape, step, transport.rank) for v in variables]
                exchange(synchronizer, OWNER, gradients, variables, MOMENTUM)
                handed = sum(
                    s.bytes for s in transport.sent if not s.name.startswith("agree")
                )
                last, total = synchronizer.stats(), synchronizer.stats(total=True)
                expected = [handed, 4 * sum(sizes), 60 + 72 + 11, sum(sizes)]
                sums += expected
                self.assertAllEqual(last[:4], expected)
                self.assertAllEqual(total[:4], sums)
                for figure in (*last[:4], *total[:4]):
                    self.assertEqual(figure.dtype, tf.int64)
                    self.assertEqual(figure.shape, [])
                norm = np.linalg.norm(state_of(synchronizer)[1])
                self.assertAllClose(last.residual_norm, norm, 1e-5)
                self.assertAllClose(total.residual_norm, norm, 1e-5)

        run_workers(2, work)

    def test_counts_a_dense_stage_with_its_header(self) -> None:
        synchronizer = compressing(LocalTransport(), settings_of(sparsity=0.0))
        exchange(synchronizer, OWNER, [tf.ones([5, 3])], variables_of((5, 3)))
        stats = synchronizer.stats()
        self.assertEqual(int(stats.sent_bytes), 20 + 4 + 4 * 128)  # header, flag, arena
        self.assertEqual(int(stats.dense_bytes), 60)
        self.assertEqual(int(stats.sent_elements), 15)

    def test_counts_values_and_indices_of_slices(self) -> None:
        def work(transport: Loopback) -> list[int]:
            rows = 3 + transport.rank
            slices = tf.IndexedSlices(
                tf.ones([rows, 4]), tf.range(rows, dtype=tf.int64), tf.constant([9, 4])
            )
            synchronizer = Ledger(transport, Dense)
            exchange(
                synchronizer, OWNER, [slices, tf.ones([5])], variables_of((9, 4), (5,))
            )
            return [int(figure) for figure in synchronizer.stats()[:4]]

        for rank, found in enumerate(run_workers(2, work)):
            rows = 3 + rank
            self.assertEqual(
                found, [rows * 4 * 4 + rows * 8 + 20, 164, rows * 4 + 5, 41]
            )

    def test_adds_up_over_owners(self) -> None:
        synchronizer = Ledger(LocalTransport(), Dense)
        self.assertAllEqual(synchronizer.stats(), [0, 0, 0, 0, 0, 0])
        owners = {size: (Owner(), variables_of((size,))) for size in (3, 5)}

        def train(size: int) -> None:
            owner, variables = owners[size]
            exchange(synchronizer, owner, [tf.ones([size])], variables)

        for _ in range(3):
            train(3)
            train(5)
            self.assertAllEqual(synchronizer.stats()[:4], [32, 32, 8, 8])
        for _ in range(2):
            train(5)  # the first is not trained any more
            self.assertAllEqual(synchronizer.stats()[:4], [20, 20, 5, 5])
        self.assertAllEqual(synchronizer.stats(total=True)[:4], [136, 136, 34, 34])

    @pytest.mark.long
    def test_nothing_is_counted_twice_by_retracing(self) -> None:
        synchronizer = Ledger(LocalTransport(), Dense)
        variables = variables_of((4,))

        @tf.function
        def step(batch: tf.Tensor) -> tf.Tensor:
            gradients = [tf.reduce_sum(batch, axis=0)]
            return exchange(synchronizer, OWNER, gradients, variables).gradients[0]

        for rows in (2, 3, 2, 3):
            step(tf.ones([rows, 4]))
        self.assertEqual(int(synchronizer.stats(total=True).sent_bytes), 4 * 16)


class AgreementTest(tf.test.TestCase):
    def test_different_variables_raise_on_all_workers(self) -> None:
        common = [tf.Variable(tf.zeros([8, 16]), name="kernel")]
        different = {
            "shape": [tf.Variable(tf.zeros([16, 8]), name="kernel")],
            "dtype": [tf.Variable(tf.zeros([8, 16], tf.float16), name="kernel")],
            "number": [*common, tf.Variable(tf.zeros([2, 2]), name="more")],
        }
        for name, others in different.items():

            def work(transport: Loopback, others: list = others) -> None:
                variables = others if transport.rank == 1 else common
                gradients = [tf.ones(v.shape, v.dtype) for v in variables]
                compressing(transport, settings_of()).gradients(
                    OWNER, gradients, variables
                )

            with self.subTest(name):
                for error in outcomes(3, work):
                    self.assertIsInstance(error, ValueError)
                    self.assertRegex(
                        str(error),
                        r"All workers must have the same .*trained variables\. .*"
                        r"`variable \d` differs: .* on ranks \[0, 2\]; "
                        r".* on ranks \[1\]",
                    )

    def test_names_may_differ(self) -> None:
        # Keras counts layers over the whole process, so names tell of the past.
        def work(transport: Loopback) -> np.ndarray:
            name = f"kernel_{transport.rank}"
            variables = [tf.Variable(tf.zeros([8, 16]), name=name)]
            exchanged = exchange(
                Ledger(transport, Dense), OWNER, [tf.ones([8, 16])], variables
            )
            return exchanged.gradients[0].numpy()

        for found in run_workers(2, work):
            self.assertAllEqual(found, np.full((8, 16), 2.0))

    def test_variables_are_compared_once(self) -> None:
        def work(transport: Loopback) -> int:
            synchronizer = Ledger(transport, Dense)
            variables = variables_of((4,))
            for _ in range(3):
                exchange(synchronizer, OWNER, [tf.ones([4])], variables)
            return sum(s.name.startswith("agree") for s in transport.sent)

        self.assertEqual(run_workers(2, work), [1, 1])


def linear_gradients(
    weights: list[tf.Variable], x: np.ndarray, y: np.ndarray, workers: int
) -> list[tf.Tensor]:
    """Return the gradients of the mean squared error, divided by N as Keras does."""
    with tf.GradientTape() as tape:
        errors = tf.tensordot(x, weights[0], 1) + weights[1] - y
        loss = tf.reduce_mean(tf.square(errors)) / workers
    return tape.gradient(loss, weights)


@pytest.mark.long
class LawTest(parameterized.TestCase, tf.test.TestCase):
    FEATURES, TARGETS = 12, 8

    def data(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(41)
        x = random.normal(size=(rows, self.FEATURES)).astype(np.float32)
        truth = random.normal(size=(self.FEATURES, self.TARGETS))
        return x, (x @ truth + 1).astype(np.float32)

    def train(
        self,
        workers: int,
        synchronizer_of: Callable[[Transport], Ledger],
        steps: int = 10,
        momentum: Momentum | None = None,
    ) -> list[list[np.ndarray]]:
        """Train linear regression on shards; return each worker's weights."""
        x, y = self.data(48)

        def work(transport: Loopback) -> list[np.ndarray]:
            synchronizer = synchronizer_of(transport)
            weights = variables_of((self.FEATURES, self.TARGETS), (self.TARGETS,))
            own = slice(
                48 * transport.rank // workers, 48 * (transport.rank + 1) // workers
            )
            for _ in range(steps):
                gradients = linear_gradients(weights, x[own], y[own], workers)
                exchanged = exchange(synchronizer, OWNER, gradients, weights, momentum)
                for weight, gradient in zip(weights, exchanged.gradients, strict=True):
                    weight.assign_sub(0.1 * gradient)
            return [weight.numpy() for weight in weights]

        return run_workers(workers, work)

    @parameterized.product(workers=[2, 3, 4], momentum=[None, MOMENTUM])
    @pytest.mark.few(1)
    def test_workers_on_shards_equal_one_worker_on_the_whole_batch(
        self, workers: int, momentum: Momentum | None
    ) -> None:
        for name, synchronizer_of in (
            ("Dense", lambda transport: Ledger(transport, Dense)),
            (
                "DGC",
                lambda transport: compressing(
                    transport, settings_of(sparsity=0.0, momentum_masking=False)
                ),
            ),
        ):
            (expected,) = self.train(1, synchronizer_of, momentum=momentum)
            for found in self.train(workers, synchronizer_of, momentum=momentum):
                for weight, single in zip(found, expected, strict=True):
                    self.assertAllClose(weight, single, 1e-5, 1e-5, name)

    @parameterized.product(workers=[2, 4], value_dtype=["bfloat16", "sign", "log4"])
    @pytest.mark.few(1)
    def test_all_workers_hold_the_same_bits(
        self, workers: int, value_dtype: str
    ) -> None:
        config = settings_of(
            value_dtype=value_dtype,
            warmup_steps=6,
            warmup_stages=(0.25, 0.75),
            clip_norm=1.0,
        )
        first, *others = self.train(
            workers, lambda t: compressing(t, config), momentum=MOMENTUM
        )
        for other in others:
            for a, b in zip(first, other, strict=True):
                self.assertEqual(a.tobytes(), b.tobytes())

    def test_the_gradient_of_400_examples_is_the_mean_of_four_of_100(self) -> None:
        x, y = self.data(400)
        shapes = (self.FEATURES, self.TARGETS), (self.TARGETS,)
        weights = [tf.Variable(normal(s, i)) for i, s in enumerate(shapes)]
        whole = linear_gradients(weights, x, y, 1)
        parts = [
            linear_gradients(weights, x[i : i + 100], y[i : i + 100], 1)
            for i in range(0, 400, 100)
        ]
        means = [np.mean(part, axis=0) for part in zip(*parts, strict=True)]

        def work(transport: Loopback) -> list[np.ndarray]:
            own = slice(100 * transport.rank, 100 * transport.rank + 100)
            gradients = linear_gradients(weights, x[own], y[own], 4)
            return values_of(
                exchange(Ledger(transport, Dense), OWNER, gradients, weights).gradients
            )

        for found in (means, *run_workers(4, work)):
            for gradient, expected in zip(found, whole, strict=True):
                self.assertAllClose(gradient, expected, 1e-5, 1e-6)


if __name__ == "__main__":
    tf.test.main()
