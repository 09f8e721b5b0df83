"""Tests of the step: its laws, and beside a slow twin in NumPy."""

import itertools
import tempfile
from typing import Any
from unittest import mock

import keras
import numpy as np
import numpy_twin
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledgers import compressing, exchange, only
from loopback import OWNER, Loopback, run_workers

from tf_dgc import values as values_lib
from tf_dgc.compression import arena as layout_lib
from tf_dgc.compression import dgc
from tf_dgc.compression import message as packing
from tf_dgc.compression import selection as sparsify
from tf_dgc.compression.arena import Layout
from tf_dgc.compression.dgc import ArenaState, Momentum, Selection
from tf_dgc.config import VALUE_DTYPES, DGCConfig
from tf_dgc.exchanges import Compressed, Place, applied, inplace
from tf_dgc.exchanges.figures import Clock
from tf_dgc.exchanges.residual import Residual
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.sums import Sparse

steady = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
STEP = tf.constant(0, tf.int64)
MOMENTA = {
    "heavy-ball": Momentum(0.9, False),
    "Nesterov": Momentum(0.9, True),
    "none": None,
}

tables = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=3
)


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    return layout_lib.build([(f"t{i}", shape) for i, shape in enumerate(shapes)])


def random_arena(layout: Layout, random: np.random.Generator) -> tf.Tensor:
    tensors = [
        random.normal(size=s.shape) * 10.0 ** random.integers(-6, 4, size=s.shape)
        for s in layout.segments
    ]
    return layout_lib.flatten(layout, [tf.constant(t, tf.float32) for t in tensors])


def random_state(layout: Layout, seed: int) -> ArenaState:
    random = np.random.default_rng(seed)
    return ArenaState(random_arena(layout, random), random_arena(layout, random))


def clip(gradients: list, clip_norm: float, workers: int) -> list:
    scale = dgc.clip_scale(gradients, clip_norm, workers)
    return [values_lib.scaled(gradient, scale) for gradient in gradients]


def select(
    state: ArenaState,
    layout: Layout,
    sparsity: float,
    config: DGCConfig,
    step: tf.Tensor,
) -> Selection:
    peaks = sparsify.peaks(state.residual)
    plan = sparsify.plan(layout, sparsity, config.sample_fraction)
    return dgc.select(state.residual, peaks, layout, plan, config, step)


def stored(layout: Layout, state: ArenaState, masking: bool = True) -> Residual:
    """Put a state into the variables of an exchange."""
    forms = [tf.Variable(tf.zeros(s.shape), name=s.name) for s in layout.segments]
    place = Place(LocalTransport(), 0, forms, lambda: None, Clock(), 0)
    config = DGCConfig.paper(min_elements=0, momentum_masking=masking)
    momentum = None if state.velocity is None else MOMENTA["heavy-ball"]
    found = Compressed(place, momentum, config).residual
    for variable, value in zip((found.u, found.v), state, strict=True):
        if variable is not None:
            variable.assign(value)
    return found


def read(state: Residual) -> ArenaState:
    velocity = None if state.u is None else tf.identity(state.u)
    return ArenaState(velocity, tf.identity(state.v))


def numbers(layout: Layout, selection: Selection, value_dtype: str) -> tf.Tensor:
    """Return what the values of a selection stand for, as whoever receives it does."""
    count, begins = len(selection.positions), [s.offset for s in layout.segments]
    form = packing.make_format(max(1, count), layout.size, value_dtype, begins)
    message = packing.pack(form, *selection, checksum=0, step=STEP)
    found = packing.unpack(form, message[tf.newaxis])
    return packing.numbers(form, found)[0, :count]


def keep(
    layout: Layout,
    state: ArenaState,
    selection: Selection,
    masking: bool,
    value_dtype: str = "float32",
) -> ArenaState:
    variables = stored(layout, state, masking)
    sent = numbers(layout, selection, value_dtype)
    variables.keep(Sparse(selection.positions[tf.newaxis], sent[tf.newaxis]))
    return read(variables)


def keep_nothing(layout: Layout, state: ArenaState) -> ArenaState:
    variables = stored(layout, state)
    variables.clear()
    return read(variables)


class ClipTest(tf.test.TestCase):
    def test_rows_that_repeat_themselves_count_as_their_sum(self) -> None:
        rows = tf.constant([[3.0], [4.0], [0.0]])
        slices = tf.IndexedSlices(rows, tf.constant([1, 1, 0]), tf.constant([2, 1]))
        for gradient in (slices, tf.convert_to_tensor(slices)):
            (clipped,) = clip([gradient], 1.0, 1)
            norm = tf.norm(tf.convert_to_tensor(clipped))
            self.assertAllClose(norm, 1.0)

    def test_local_norm_is_at_most_clip_norm_over_the_root_of_workers(self) -> None:
        gradients = [tf.constant([[3.0, 0.0]]), tf.constant([4.0])]  # norm 5
        for workers in (1, 4, 16):
            clipped = clip(gradients, 2.0, workers)
            allowed = 2.0 / workers**0.5
            self.assertAllClose(tf.linalg.global_norm(clipped), allowed)
            for before, after in zip(gradients, clipped, strict=True):
                self.assertAllClose(after, before * allowed / 5)

    def test_smaller_gradients_stay_as_they_are(self) -> None:
        gradients = [tf.constant([[0.3, 0.0]]), tf.constant([0.4])]
        for before, after in zip(gradients, clip(gradients, 1.0, 3), strict=True):
            self.assertAllEqual(after, before)

    def test_slices_count_and_stay_slices(self) -> None:
        slices = tf.IndexedSlices(
            tf.constant([[3.0], [0.0]]), tf.constant([7, 1]), tf.constant([9, 1])
        )
        clipped, dense = clip([slices, tf.constant([4.0])], 1.0, 1)
        self.assertIsInstance(clipped, tf.IndexedSlices)
        self.assertAllClose(clipped.values, [[0.6], [0.0]])
        self.assertAllEqual(clipped.indices, [7, 1])
        self.assertAllClose(dense, [0.8])

    def test_the_norm_of_the_sum_is_at_most_clip_norm_for_orthogonal_workers(
        self,
    ) -> None:
        workers = 4
        summed = sum(
            clip([tf.one_hot([i], 8) * 100], 1.0, workers)[0] for i in range(workers)
        )
        self.assertAllClose(tf.norm(summed), 1.0)


class AccumulateTest(tf.test.TestCase):
    """The recurrences at the top of the module, line by line."""

    @settings(steady, max_examples=20)
    @given(st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]))
    def test_follows_the_recurrence(self, seed: int, factor: float) -> None:
        layout = layout_of((3, 5))
        state = random_state(layout, seed)
        g = random_arena(layout, np.random.default_rng(seed + 1))
        u, v, g_ = (t.numpy() for t in (state.velocity, state.residual, g))
        m = np.float32(factor)
        for momentum, expected_u, expected_v in (
            (Momentum(factor, False), m * u + g_, v + (m * u + g_)),
            (Momentum(factor, True), m * (u + g_), v + m * (u + g_) + g_),
            (None, u, v + g_),
        ):
            after = dgc.accumulate(state, g, momentum)
            self.assertAllEqual(after.velocity, expected_u)
            self.assertAllEqual(after.residual, expected_v)

    def test_without_a_velocity_gradients_add_up(self) -> None:
        state = ArenaState(None, tf.constant([1.0, 2.0]))
        for momentum in MOMENTA.values():
            after = dgc.accumulate(state, tf.constant([0.5, 0.5]), momentum)
            self.assertIsNone(after.velocity)
            self.assertAllEqual(after.residual, [1.5, 2.5])


@pytest.mark.long
class InPlaceTest(tf.test.TestCase):
    def test_accumulates_and_clips_as_the_recurrence(self) -> None:
        layout = layout_of((30, 50), (7, 3))
        for seed, momentum in enumerate(MOMENTA.values()):
            state = random_state(layout, seed)
            g = random_arena(layout, np.random.default_rng(seed + 1))
            for before in (state, ArenaState(None, state.residual)):
                expected = dgc.accumulate(before, 0.25 * g, momentum)
                variables = stored(layout, before)
                own = ArenaState(variables.u, variables.v)
                args = g, momentum, tf.constant(0.25)
                inplace.update("", dgc.accumulate, own, *args)
                peaks = inplace.call("", sparsify.peaks, variables.v)
                found = read(variables)
                self.assertAllClose(found.residual, expected.residual, 1e-5, 1e-6)
                if before.velocity is not None:
                    self.assertAllClose(found.velocity, expected.velocity, 1e-5, 1e-6)
                self.assertAllEqual(peaks, sparsify.peaks(found.residual))

    @settings(steady, max_examples=20)
    @given(tables, st.integers(1, 4), st.integers(1, 400), st.integers(0, 2**31))
    def test_sums_and_subtracts_worker_after_worker(
        self, table: list, workers: int, slots: int, seed: int
    ) -> None:
        layout = layout_of(*table)
        random = np.random.default_rng(seed)
        positions = np.full([workers, slots], layout.size)
        values = np.zeros([workers, slots], np.float32)
        summed = np.zeros(layout.size, np.float32)
        changed = np.ones(layout.size, np.float32)
        for rank in range(workers):
            # Maybe all in one tensor, in more places than are looked at at once.
            low, high = sorted(random.integers(layout.size + 1, size=2))
            where = np.sort(random.permutation(np.arange(low, high))[:slots])
            what = random.normal(size=len(where)) * 10.0 ** random.integers(-4, 5)
            positions[rank, : len(where)] = where
            values[rank, : len(where)] = what
            summed[where] += what.astype(np.float32)
            changed[where] -= what.astype(np.float32)
        sent = Sparse(tf.constant(positions, tf.int64), tf.constant(values))
        total = tf.Variable(tf.ones([layout.size]))
        for _ in range(2):  # nothing is left of the step before
            inplace.update("", sparsify.densify, total, *sent)
        self.assertEqual(total.numpy().tobytes(), summed.tobytes())
        tensors = layout_lib.unflatten(layout, tf.constant(summed))
        weights = [tf.Variable(tf.ones(tensor.shape)) for tensor in tensors]
        # In place or in copies; at the stage that stays, or at one before it.
        stages, number = ([slots], None) if seed % 3 else ([slots, 7], tf.constant(0))
        with mock.patch.object(applied, "_COPIED", 2**18 * (seed % 2)):
            applied.subtract(weights, layout, sent, stages, number)
        expected = layout_lib.unflatten(layout, tf.constant(changed))
        for found, tensor in zip(weights, expected, strict=True):
            self.assertAllEqual(found, tensor)

    def test_unused_slots_change_nothing_even_where_functions_run_eagerly(self) -> None:
        layout = layout_of((30, 50))
        state = stored(layout, random_state(layout, 1))
        before = state.v.numpy()
        tf.config.run_functions_eagerly(True)
        try:
            unused = tf.fill([1, 3], tf.constant(layout.size, tf.int64))
            state.keep(Sparse(unused, tf.ones([1, 3])))
        finally:
            tf.config.run_functions_eagerly(False)
        self.assertAllEqual(state.v, before)


@pytest.mark.long
class KeepTest(tf.test.TestCase):
    @settings(steady, max_examples=20)
    @given(
        tables,
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(VALUE_DTYPES),
        st.integers(0, 2**31),
    )
    def test_sent_plus_kept_is_what_was_accumulated(
        self, table: list, sparsity: float, value_dtype: str, seed: int
    ) -> None:
        layout = layout_of(*table)
        state = random_state(layout, seed)
        config = DGCConfig.paper(value_dtype=value_dtype)
        selection = select(state, layout, sparsity, config, STEP)
        before, sent = state.residual.numpy(), np.zeros(layout.size, np.float32)
        sent[selection.positions.numpy()] = numbers(layout, selection, value_dtype)
        where = [True] * len(selection.positions)
        for masking in (True, False):
            kept = keep(layout, state, selection, masking, value_dtype).residual.numpy()
            # To the bit what receivers add is what is taken out.
            self.assertAllEqual(kept, before - sent)
            # More than twice of what was there takes a bit more than there is.
            exact = np.abs(sent) <= 2 * np.abs(before)
            self.assertAllEqual((sent.astype("f8") + kept)[exact], before[exact])
            self.assertLessEqual(
                np.abs(sent.astype("f8") + kept - before).max(),
                2.0**-24 * np.abs(sent).max(),
            )
            if value_dtype == "float32":
                self.assertAllEqual(kept[selection.positions.numpy()] == 0, where)
            if value_dtype in ("float32", "float16", "bfloat16"):
                self.assertTrue(exact.all())

    @settings(steady, max_examples=10)
    @given(tables, st.floats(0, 1, exclude_max=True), st.integers(0, 2**31))
    def test_masking_clears_the_velocity_of_what_was_sent_and_nothing_else(
        self, table: list, sparsity: float, seed: int
    ) -> None:
        layout = layout_of(*table)
        state = random_state(layout, seed)
        selection = select(state, layout, sparsity, DGCConfig.paper(), STEP)
        expected = state.velocity.numpy()
        self.assertAllEqual(keep(layout, state, selection, False).velocity, expected)
        expected[selection.positions.numpy()] = 0
        self.assertAllEqual(keep(layout, state, selection, True).velocity, expected)

    def test_an_empty_selection_keeps_all(self) -> None:
        layout = layout_of((3, 4))
        state = random_state(layout, 0)
        nothing = Selection(tf.zeros([0], tf.int64), tf.zeros([0]), tf.constant(0))
        for masking in (True, False):
            after = keep(layout, state, nothing, masking)
            self.assertAllEqual(after.velocity, state.velocity)
            self.assertAllEqual(after.residual, state.residual)

    def test_a_dense_step_keeps_the_velocity_and_no_residual(self) -> None:
        layout = layout_of((3, 4))
        state = random_state(layout, 0)
        zeros = tf.zeros_like(state.residual)
        after = keep_nothing(layout, state)
        self.assertAllEqual(after.velocity, state.velocity)
        self.assertAllEqual(after.residual, zeros)

    def test_works_without_a_velocity(self) -> None:
        layout = layout_of((3, 4))
        state = ArenaState(None, random_state(layout, 1).residual)
        selection = select(state, layout, 0.5, DGCConfig.paper(), STEP)
        self.assertIsNone(keep(layout, state, selection, True).velocity)
        self.assertIsNone(keep_nothing(layout, state).velocity)


class SelectTest(tf.test.TestCase):
    def test_values_are_never_rounded_to_infinity(self) -> None:
        layout = layout_of((1, 4))
        residual = tf.pad(tf.constant([1e6, -7e4, 65519.0, 3.4e38]), [[0, 124]])
        for value_dtype in ("float16", "bfloat16"):
            config = DGCConfig.paper(value_dtype=value_dtype)
            found = select(ArenaState(None, residual), layout, 0.0, config, STEP)
            self.assertLen(found.values, 4)
            self.assertAllEqual(
                np.isfinite(tf.cast(found.values, tf.float32)), [True] * 4
            )

    def test_what_has_overflowed_is_sent_as_such_and_refused(self) -> None:
        layout = layout_of((1, 4))
        residual = tf.pad(tf.constant([1.0, -np.inf, 2.0, 3.0]), [[0, 124]])
        for value_dtype in VALUE_DTYPES:
            config = DGCConfig(value_dtype=value_dtype, sparsity=0.5)
            form = packing.make_format(2, layout.size, value_dtype)
            message = dgc.send(
                residual,
                sparsify.peaks(residual),
                form=form,
                layout=layout,
                sparsities=[0.5],
                config=config,
                step=STEP,
            )
            found = packing.unpack(form, message[tf.newaxis])
            found = found._replace(values=packing.numbers(form, found))
            faults = packing.faults(form, message[tf.newaxis], found)
            self.assertEqual(packing.FAULTS[faults[0]][:19], "values that are not")

    def test_sparsity_zero_selects_everything(self) -> None:
        for shape in ((8, 16), (128, 100)):
            layout = layout_of(shape)
            state = ArenaState(None, tf.random.stateless_normal([layout.size], [1, 2]))
            for step in (0, 1, 25):
                found = select(
                    state, layout, 0.0, DGCConfig.paper(), tf.constant(step, tf.int64)
                )
                self.assertLen(found.positions, layout.size, (shape, step))


@pytest.mark.long
class SparsityZeroTest(parameterized.TestCase, tf.test.TestCase):
    """With everything sent, the paper's step is a well-known optimizer."""

    STEPS = 12

    def gradients(self) -> list[np.ndarray]:
        random = np.random.default_rng(21)
        return list(random.normal(size=(self.STEPS, 8, 16)).astype(np.float32))

    def by_pure_functions(self, momentum: Momentum | None, masking: bool) -> list:
        layout = layout_of((8, 16))
        zeros = tf.zeros([layout.size])
        state, found = ArenaState(zeros, zeros), []
        for step, gradient in enumerate(self.gradients()):
            arena = layout_lib.flatten(layout, [gradient])
            state = dgc.accumulate(state, arena, momentum)
            selection = select(
                state, layout, 0.0, DGCConfig.paper(), tf.constant(step, tf.int64)
            )
            state = keep(layout, state, selection, masking)
            sent = tf.scatter_nd(
                selection.positions[:, tf.newaxis], selection.values, [layout.size]
            )
            found.extend(layout_lib.unflatten(layout, sent))
        return found

    def by_synchronizer(self, momentum: Momentum | None, masking: bool) -> list:
        config = DGCConfig(sparsity=0.0, min_elements=0, momentum_masking=masking)
        synchronizer = compressing(LocalTransport(), config)
        variable = tf.Variable(tf.zeros([8, 16]))
        return [
            exchange(
                synchronizer, OWNER, [tf.constant(gradient)], [variable], momentum
            ).gradients[0]
            for gradient in self.gradients()
        ]

    @parameterized.product(
        way=["by_pure_functions", "by_synchronizer"],
        momentum=["heavy-ball", "Nesterov"],
    )
    def test_is_momentum_sgd(self, way: str, momentum: str) -> None:
        taken = MOMENTA[momentum]
        sgd = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=taken.nesterov)
        expected = keras.Variable(np.zeros((8, 16), np.float32))
        weights = np.zeros((8, 16), np.float32)
        sent = getattr(self, way)(taken, masking=way == "by_synchronizer")
        for step, (gradient, update) in enumerate(
            zip(self.gradients(), sent, strict=True)
        ):
            sgd.apply([tf.constant(gradient)], [expected])
            weights -= 0.1 * update.numpy()
            self.assertAllClose(weights, expected, 1e-5, 1e-6, f"step {step}")

    def test_masked_selections_of_everything_are_plain_sgd(self) -> None:
        sent = self.by_pure_functions(MOMENTA["heavy-ball"], masking=True)
        for gradient, update in zip(self.gradients(), sent, strict=True):
            self.assertAllEqual(update, gradient)

    @parameterized.parameters("by_pure_functions", "by_synchronizer")
    def test_without_momentum_is_plain_sgd(self, way: str) -> None:
        for masking in (True, False):
            sent = getattr(self, way)(None, masking=masking)
            for gradient, update in zip(self.gradients(), sent, strict=True):
                self.assertAllEqual(update, gradient)


class FallTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (0.1, 0.0, 1.0),  # the first
        (0.1, 0.1, 1.0),
        (0.06, 0.1, 1.0),
        (0.05, 0.1, 0.5),
        (0.01, 0.1, 0.1),
        (0.2, 0.1, 1.0),
        (0.0, 0.1, 1.0),
    )
    def test_is_the_ratio_where_the_rate_has_halved_at_least(
        self, rate: float, last: float, expected: float
    ) -> None:
        found = dgc.fall(tf.constant(rate), tf.constant(last))
        self.assertAllClose(found, expected, 1e-6)

    def residuals(self, rates: list[float], settings: dict[str, Any]) -> np.ndarray:
        """Return v after each step, with a constant gradient and no momentum."""
        config = DGCConfig.paper(min_elements=0, momentum_masking=False, **settings)
        ledger, found = compressing(LocalTransport(), config), []
        variables = [tf.Variable(tf.zeros([16, 16]))]
        for rate in rates:
            gradient = np.ones([16, 16], np.float32)
            gradient[0, 0] = np.nan if rate < 0 else 100.0  # goes, at each step
            momentum = Momentum(0.0, False, abs(rate))
            exchange(ledger, OWNER, [tf.constant(gradient)], variables, momentum)
            found.append(float(only(ledger).residual.v[-1]))
        return np.array(found)

    @pytest.mark.long
    def test_what_waits_counts_at_the_new_rate(self) -> None:
        rates = [1.0, 1.0, 0.25, 0.25, 1.0, 0.5, 0.0, 0.0, 0.125, 0.1]
        expected = [1, 2, 0.75, 1, 2, 1.5, 1.5, 1.5, 0.5, 0.6]
        self.assertAllClose(self.residuals(rates, {"sparsity": 0.996}), expected)
        expected = np.cumsum(rates)
        settings = {"sparsity": 0.996, "rate_correction": False}
        self.assertAllClose(self.residuals(rates, settings), expected)

    @pytest.mark.long
    def test_a_step_that_is_left_out_does_not_count(self) -> None:
        rates = [1.0, 1.0, -0.25, 0.25, -1.0, 0.25]  # with NaN where negative
        settings = {"sparsity": 0.996, "nonfinite": "skip"}
        found = self.residuals(rates, settings)
        self.assertAllClose(found, [1, 2, 2, 0.75, 0.75, 1.0])

    @pytest.mark.long
    def test_a_restored_worker_knows_the_last_rate(self) -> None:
        config = DGCConfig(min_elements=0, sparsity=0.99)
        variables, gradient = [tf.Variable(tf.zeros([16, 16]))], tf.ones([16, 16])
        first, second = (compressing(LocalTransport(), config) for _ in range(2))
        folder = self.enterContext(tempfile.TemporaryDirectory())
        exchange(first, OWNER, [gradient], variables, Momentum(0.9, False, 1.0))
        first.save(folder)
        second.restore(folder)
        for ledger in (first, second):
            own = Momentum(0.9, False, 0.1)
            exchange(ledger, OWNER, [gradient], variables, own)
        self.assertAllEqual(only(first).residual.v, only(second).residual.v)
        self.assertAllClose(only(first).residual.v[-1], 0.1 + 0.9 + 0.1)


@pytest.mark.long
class FairnessTest(tf.test.TestCase):
    def test_selection_never_prefers_a_position(self) -> None:
        # Equal magnitudes: every element passes its tensor's threshold, by as much.
        layout = layout_of((20, 100), (20, 100), (20, 100))
        state = ArenaState(None, tf.zeros([layout.size]))
        sent = np.zeros(layout.size)
        gradient = layout_lib.flatten(layout, [tf.ones([20, 100])] * 3)
        for step in range(30):
            state = dgc.accumulate(state, gradient, None)
            selection = select(
                state, layout, 0.99, DGCConfig.paper(), tf.constant(step, tf.int64)
            )
            state = keep(layout, state, selection, False)
            sent[selection.positions.numpy()] += 1
        counts = [part.sum() for part in np.split(sent, 3)]
        self.assertAllGreater(counts, 0)


SHAPES = [(8, 16), (5, 7, 3), (4,)]
SCALES = [1.0, 1e-3, 10.0]
STEPS = 100
RATES = [0.5 ** (step // 8 % 3) for step in range(STEPS)]
CELLS = [
    dict(zip(("momentum", "masking", "clipping", "warm_up", "workers"), c, strict=True))
    for c in itertools.product(
        MOMENTA, (True, False), (True, False), (True, False), (1, 2, 4)
    )
]


def is_quick(cell: dict[str, Any]) -> bool:
    """Tell whether a cell is in the smaller part, in which any two settings meet."""
    switches = cell["masking"] + cell["clipping"] + cell["warm_up"]
    if cell["workers"] == 4:
        return switches == (0 if cell["momentum"] == "Nesterov" else 3)
    code = list(MOMENTA).index(cell["momentum"]) + switches
    return code % 2 == 0 if cell["workers"] == 1 else code % 4 == 2


def named(cell: dict[str, Any]) -> dict[str, Any]:
    """Give a cell a name for the test report."""
    switches = [name for name in ("masking", "clipping", "warm_up") if cell[name]]
    words = [cell["momentum"], *switches, str(cell["workers"])]
    return cell | {"testcase_name": "_" + "_".join(words).replace("-", "_")}


class TwinCase(parameterized.TestCase, tf.test.TestCase):
    """Drives the implementation and its NumPy twin side by side."""

    steps = STEPS

    def compare(
        self,
        momentum: str,
        masking: bool,
        clipping: bool,
        warm_up: bool,
        workers: int,
        value_dtype: str = "float32",
        rate_correction: bool = True,
    ) -> None:
        config = DGCConfig(
            sparsity=0.9,
            # At 0.4 a message costs more than a dense reduction, from 2 workers on.
            warmup_stages=(0.4, 0.75),
            warmup_steps=20 if warm_up else 0,
            clip_norm=3.0 if clipping else None,
            momentum_masking=masking,
            min_elements=0,
            value_dtype=value_dtype,
            rate_correction=rate_correction,
        )
        random = np.random.default_rng(31)
        gradients = [
            [
                [
                    (random.normal(size=shape) * scale).astype(np.float32)
                    for shape, scale in zip(SHAPES, SCALES, strict=True)
                ]
                for _ in range(workers)
            ]
            for _ in range(self.steps)
        ]
        taken = MOMENTA[momentum]
        found = run_workers(
            workers, lambda transport: self.train(transport, config, taken, gradients)
        )
        twin = numpy_twin.Cluster(
            SHAPES,
            workers,
            config,
            None if taken is None else taken.factor,
            taken is not None and taken.nesterov,
        )
        for step in range(self.steps):
            sums = twin.step(gradients[step], RATES[step])
            for rank in range(workers):
                own, worker = found[rank][step], twin.workers[rank]
                where = f"{step=} {rank=}"
                if value_dtype == "float32":
                    self.assert_equal_step(own, worker, sums, where)
                else:
                    self.assert_equal_step(own, worker, sums, where, 2.0**-7, False)
                    # What rounds up here and down there is not to add up.
                    worker.u, worker.v = (
                        self.taken_apart(own[1]),
                        self.taken_apart(own[2]),
                    )

    @staticmethod
    def train(
        transport: Loopback,
        config: DGCConfig,
        momentum: Momentum | None,
        gradients: list[list[list[np.ndarray]]],
    ) -> list[tuple[list[np.ndarray], np.ndarray | None, np.ndarray]]:
        """Return sums, velocity and residual after each step."""
        synchronizer = compressing(transport, config)
        variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        found = []
        for step, local in enumerate(gradients):
            if momentum is not None:
                momentum = momentum._replace(learning_rate=RATES[step])
            exchanged = exchange(
                synchronizer,
                OWNER,
                [tf.constant(g) for g in local[transport.rank]],
                variables,
                momentum,
            )
            arena = only(synchronizer)
            state = read(arena.residual)
            found.append(
                (
                    [g.numpy() for g in exchanged.gradients],
                    None if state.velocity is None else state.velocity.numpy(),
                    state.residual.numpy(),
                )
            )
        return found

    @staticmethod
    def taken_apart(arena: np.ndarray | None) -> list[np.ndarray]:
        """Return the tensors of an arena; zeros where there is none."""
        layout = layout_of(*SHAPES[:2])
        whole = np.zeros(layout.size, np.float32) if arena is None else arena
        return [tensor.numpy() for tensor in layout_lib.unflatten(layout, whole)]

    def assert_equal_step(
        self,
        found: tuple[list[np.ndarray], np.ndarray | None, np.ndarray],
        worker: numpy_twin.Worker,
        sums: list[np.ndarray],
        where: str,
        tolerance: float = 1e-5,
        sent_is_zero: bool = True,
    ) -> None:
        summed, velocity, residual = found

        def assert_close(a: np.ndarray, b: np.ndarray, i: int, what: str) -> None:
            atol, text = tolerance * SCALES[i], f"{what}, {where} tensor={i}"
            np.testing.assert_allclose(a, b, tolerance, atol, err_msg=text)

        for i, (v, u) in enumerate(zip(worker.v, worker.u, strict=True)):
            # What was sent is zero now, and nothing else is; but for what cancels, to
            # the rounding of a multiplication that is fused with an addition.
            least = 1e-6 * SCALES[i]
            kept = self.taken_apart(residual)[i]
            if sent_is_zero:
                np.testing.assert_array_equal(
                    np.abs(kept) <= least,
                    np.abs(v) <= least,
                    f"selection, {where} tensor={i}",
                )
            assert_close(kept, v, i, "residual v")
            if velocity is not None:
                assert_close(self.taken_apart(velocity)[i], u, i, "velocity u")
        for i, (a, b) in enumerate(zip(summed, sums, strict=True)):
            assert_close(a, b, i, "sum")


@pytest.mark.long
class NumpyTwinTest(TwinCase):
    steps = 28

    @parameterized.named_parameters(*[named(c) for c in CELLS if is_quick(c)])
    @pytest.mark.few(2, 4)
    def test_every_step_equals_the_twin(self, **cell: Any) -> None:
        self.compare(**cell)

    def test_any_two_settings_meet(self) -> None:
        quick = [cell for cell in CELLS if is_quick(cell)]
        for a, b in itertools.combinations(CELLS[0], 2):
            self.assertEqual(
                {(cell[a], cell[b]) for cell in quick},
                {(cell[a], cell[b]) for cell in CELLS},
            )


@pytest.mark.long
class NumpyTwinOfCoarseValuesTest(TwinCase):
    @parameterized.parameters(
        ("none", False, False, True, 1, "log4"),
        ("heavy-ball", True, False, True, 2, "sign"),
        ("heavy-ball", False, True, False, 1, "sign", False),
        ("Nesterov", True, True, False, 2, "log4"),
    )
    @pytest.mark.few(1)
    def test_every_step_equals_the_twin(self, *cell: Any) -> None:
        self.compare(*cell)


@pytest.mark.slow
class NumpyTwinOfAllSettingsTest(TwinCase):
    @parameterized.named_parameters(*[named(c) for c in CELLS])
    @pytest.mark.few(1)
    def test_every_step_equals_the_twin(self, **cell: Any) -> None:
        self.compare(**cell)


if __name__ == "__main__":
    tf.test.main()
