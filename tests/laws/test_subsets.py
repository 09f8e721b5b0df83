"""The law of state: u and v belong to variables, whatever sets of them take a step.

An optimizer may train now these variables, now others: layers are frozen and thawed,
losses alternate over a common trunk. Drawn sequences of sets are compared with momentum
SGD of each variable by itself, in float64.
"""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import keras
import local_servers
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from ledgers import compressing, flushed
from loopback import Loopback, Owner, run_workers

import tf_dgc
from tf_dgc.compression import arena
from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.exchanges import Averaging, Companions, EachStep, Expected, Ledger
from tf_dgc.exchanges.averaged import settle
from tf_dgc.exchanges.pushed import Pushed
from tf_dgc.exchanges.residual import Residual
from tf_dgc.simulate import Stacked, each_simulated_step
from tf_dgc.transports.local import LocalTransport

SHAPES = ((9, 4), (3,), (20, 8), (2, 5), (7, 6, 2))
SETS = ([0, 1, 2, 3, 4], [2, 0, 1], [4, 2], [3, 4, 0])
steady = hypothesis.settings(deadline=None, derandomize=True, max_examples=12)
RATES = (0.5, 0.5, 0.4, 0.3)  # none falls to half or less of the one before


class Case(NamedTuple):
    """A training in which each step is of some variables, in some order."""

    sets: list[list[int]]
    workers: int
    momentum: Momentum | None
    settings: dict[str, Any]
    seed: int

    def gradient(self, rank: int, step: int, i: int) -> np.ndarray:
        random = np.random.default_rng([self.seed, rank, step, i])
        return random.normal(size=SHAPES[i]).astype("float32")

    def taken_over(self, step: int) -> Momentum | None:
        if self.momentum is None:
            return None
        rate = tf.constant(RATES[step * len(RATES) // len(self.sets)])
        return self.momentum._replace(learning_rate=rate)


@st.composite
def cases(draw: Any, **fixed: Any) -> Case:
    """Draw steps that take turns with a few sets, which overlap or do not."""
    settings = {"min_elements": 0, "momentum_masking": False, "sparsity": 0.75}
    settings["warmup_steps"] = draw(st.sampled_from([0, 4]))
    settings["warmup_stages"] = (0.0,)
    settings["value_dtype"] = draw(st.sampled_from(["float32", "float16"]))
    factors, fixed_args = st.sampled_from([0.5, 0.9]), (st.just(1.0), st.just(()))
    momenta = st.builds(Momentum, factors, st.booleans(), *fixed_args)
    return Case(
        draw(st.lists(st.sampled_from(SETS), min_size=4, max_size=8)),
        draw(st.integers(1, 2)),
        draw(st.none() | momenta),
        settings | fixed,
        draw(st.integers(0, 2**32)),
    )


def reference(case: Case) -> list[np.ndarray]:
    """Return the sum of all steps of SGD, where momentum is left to the exchange."""
    total, velocity = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step, chosen in enumerate(case.sets):
        taken = case.taken_over(step)
        for i in chosen:
            gradients = [case.gradient(k, step, i) for k in range(case.workers)]
            gradient = np.sum(gradients, axis=0, dtype=np.float64)
            if taken is None or len(SHAPES[i]) < 2:
                total[i] += gradient
                continue
            gradient *= float(taken.learning_rate)
            velocity[i] = taken.factor * velocity[i] + gradient
            total[i] += velocity[i]
            if taken.nesterov:
                total[i] += (taken.factor - 1) * velocity[i] + gradient
    return total


class Worker:
    """A worker's end of a case: sums up what is applied."""

    def __init__(self, case: Case, ledger: Ledger, stacked: bool = False) -> None:
        self.case, self.ledger, self.owner = case, ledger, Owner()
        self.variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        self.stacked, self.graphs = stacked, {}

    def step(self, number: int) -> None:
        chosen = self.case.sets[number]
        ranks = range(self.case.workers) if self.stacked else [self.rank]
        gradients = [
            tf.stack([self.case.gradient(k, number, i) for k in ranks]) for i in chosen
        ]
        if not self.stacked:
            gradients = [gradient[0] for gradient in gradients]
        if isinstance(self.ledger.transport, Loopback):
            self.apply(chosen, gradients, self.case.taken_over(number))
            return
        graph = self.graphs.setdefault(
            tuple(chosen),
            tf.function(
                lambda g, rate: self.apply(
                    chosen,
                    g,
                    self.case.momentum
                    and self.case.momentum._replace(learning_rate=rate),
                ),
                autograph=False,
            ),
        )
        taken = self.case.taken_over(number)
        graph(gradients, tf.constant(0.0) if taken is None else taken.learning_rate)

    @property
    def rank(self) -> int:
        return self.ledger.transport.rank

    def apply(self, chosen: list[int], gradients: Any, taken: Any) -> None:
        variables = [self.variables[i] for i in chosen]
        update = self.ledger.gradients(self.owner, gradients, variables, taken)
        for variable, gradient in zip(variables, update.gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(gradient)

    def train(self, first: int = 0) -> "Worker":
        for number in range(first, len(self.case.sets)):
            self.step(number)
        return self

    def flush(self) -> "Worker":
        for _, update, variables in flushed(self.ledger, self.variables):
            for variable, gradient in zip(variables, update.gradients, strict=True):
                variable.assign_sub(gradient)
        return self

    @property
    def applied(self) -> list[np.ndarray]:
        return [-variable.numpy() for variable in self.variables]


def close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, 1e-4, 1e-4)


def everything(**others: Any) -> Any:
    settings = {"sparsity": 0.0, "warmup_steps": 0, "value_dtype": "float32"}
    return cases(**settings, **others)


@pytest.mark.long
class SubsetsTest(tf.test.TestCase):
    @steady
    @hypothesis.given(everything(momentum_masking=True))
    @pytest.mark.extended
    def test_at_sparsity_0_each_variable_has_its_own_momentum(self, case: Case) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            ledger = compressing(transport, DGCConfig(**case.settings))
            return Worker(case, ledger).train().applied

        for found in run_workers(case.workers, work):
            close(found, reference(case))

    @steady
    @hypothesis.given(cases())
    @pytest.mark.slow
    def test_sent_and_kept_are_what_was_accumulated(self, case: Case) -> None:
        def work(transport: Loopback) -> list[np.ndarray]:
            ledger = compressing(transport, DGCConfig(**case.settings))
            worker = Worker(case, ledger).train().flush()
            self.assertEqual(float(ledger.residual_norm()), 0.0)
            return worker.applied

        one, *others = run_workers(case.workers, work)
        close(one, reference(case))
        for other in others:
            for a, b in zip(one, other, strict=True):
                self.assertEqual(a.tobytes(), b.tobytes())

    @pytest.mark.slow
    @hypothesis.settings(steady, max_examples=4)
    @hypothesis.given(cases())
    def test_so_it_is_in_graphs_and_of_simulated_workers(self, case: Case) -> None:
        """Graphs that know of no sets that come later, and state of shape [W, P]."""
        config = DGCConfig(**case.settings)
        ledger = Ledger(Stacked(case.workers), each_simulated_step(config))
        worker = Worker(case, ledger, stacked=True).train()
        close(worker.flush().applied, reference(case))

    @hypothesis.settings(steady, max_examples=6)
    @hypothesis.given(cases(), st.integers(1, 3))
    @pytest.mark.slow
    def test_a_restored_state_goes_on(self, case: Case, saved_at: int) -> None:
        """Sets that had a step before the save have one before it is restored."""
        with tempfile.TemporaryDirectory() as name:
            folder, config = pathlib.Path(name), DGCConfig(**case.settings)
            first = Worker(case, Ledger(LocalTransport(), EachStep(config)))
            for number in range(saved_at):
                first.step(number)
            first.ledger.save(folder)
            again = Worker(case, Ledger(LocalTransport(), EachStep(config)))
            for number in range(saved_at):
                again.step(number)
            again.ledger.restore(folder)
            again.train(saved_at)
        # Bits may differ: sets that share a step may sample by the number before.
        close(again.flush().applied, reference(case._replace(workers=1)))

    @pytest.mark.slow
    @steady
    @hypothesis.given(cases())
    def test_so_it_is_with_what_servers_are_given(self, case: Case) -> None:
        case = case._replace(workers=1, momentum=case.momentum or Momentum(0.5, False))
        variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        total = [np.zeros(shape) for shape in SHAPES]
        opened: dict[tuple[int, ...], Pushed] = {}
        settings = case.settings | {"value_dtype": "float32"}
        for number, chosen in enumerate(case.sets):
            taken = case.taken_over(number)
            own = [variables[i] for i in chosen]
            if tuple(chosen) not in opened:
                args = own, taken, DGCConfig(**settings), "CPU:0", False
                opened[tuple(chosen)] = Pushed(*args, list(opened.values()))
            pushed = opened[tuple(chosen)]
            local = [tf.constant(case.gradient(0, number, i)) for i in chosen]
            steps, sent = pushed.select(local, taken)
            values = np.zeros(pushed.layout.size, np.float32)
            if sent.everything:
                values = (sent.whole * sent.scale).numpy()
            else:
                values[sent.positions.numpy()] = (sent.values * sent.scale).numpy()
            parts = iter(arena.unflatten(pushed.layout, tf.constant(values)))
            for i, step in zip(chosen, steps, strict=True):
                total[i] += (step if len(SHAPES[i]) < 2 else next(parts)).numpy()
        for pushed in opened.values():
            kept = arena.unflatten(pushed.layout, pushed.residual.v)
            for j, part in zip(pushed._large, kept, strict=True):
                i = next(i for i, v in enumerate(variables) if v is pushed.variables[j])
                total[i] += part.numpy()
        expected = reference(case)
        whole = [i for i, shape in enumerate(SHAPES) if len(shape) < 2]
        for i in whole:  # whose momentum is here as well
            expected[i] = dense_momentum(case, i)
        close(total, expected)

    @pytest.mark.slow
    @hypothesis.settings(steady, max_examples=8)
    @hypothesis.given(cases(), st.integers(1, 3))
    def test_so_it_is_with_averaged_parameters(self, case: Case, period: int) -> None:
        settings = case.settings | {"warmup_steps": 0}
        case = case._replace(momentum=None)

        def work(transport: Loopback) -> list[np.ndarray]:
            make = Averaging(
                AveragingConfig(period=period, compression=DGCConfig(**settings))
            )
            worker = Worker(case, Ledger(transport, make))
            make.expect(worker.owner, Expected(Companions([], [], [])))
            for number, chosen in enumerate(case.sets):
                worker.step(number)
                own = [worker.variables[i] for i in chosen]
                worker.ledger.parameters(worker.owner, own)
            settle(worker.ledger)
            worker.flush()
            return worker.applied

        # A local step is along a gradient that is divided by N no more.
        one, *others = run_workers(case.workers, work)
        close(one, reference(case))
        for other in others:
            close(other, one)


def dense_momentum(case: Case, i: int) -> np.ndarray:
    """Return the sum of SGD's steps of a variable that is not compressed."""
    total, velocity = np.zeros(SHAPES[i]), np.zeros(SHAPES[i])
    for number, chosen in enumerate(case.sets):
        taken = case.taken_over(number)
        if i in chosen and taken is not None:
            gradient = float(taken.learning_rate) * case.gradient(0, number, i)
            velocity = taken.factor * velocity + gradient
            total += velocity
            if taken.nesterov:
                total += (taken.factor - 1) * velocity + gradient
    return total


class Tasks(keras.Model):
    """Two tasks in turn, a trunk in common, a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = keras.layers.Dense(8, activation="tanh")
        self.heads = [keras.layers.Dense(4), keras.layers.Dense(4)]

    def call(self, x: Any) -> Any:
        first, second = [head(self.trunk(x)) for head in self.heads]
        return first + second

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for head, sign in zip(self.heads, (1.0, -1.0), strict=True):
            variables = self.trunk.trainable_variables + head.trainable_variables
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, sign * y, head(self.trunk(x)))
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"last": loss}


def alternating() -> list[np.ndarray]:
    """Train the tasks by one optimizer; return the weights."""
    keras.utils.set_random_seed(1)
    x, y = (np.random.default_rng(0).normal(size=(32, n)) for n in (6, 4))
    model = Tasks()
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model(x[:1])
    model.compile(sgd, "mse")
    sgd.build(model.trainable_variables)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def frozen_between() -> list[np.ndarray]:
    """Freeze a layer between two fits, and thaw it again; return the weights."""
    keras.utils.set_random_seed(1)
    x, y = (np.random.default_rng(0).normal(size=(32, n)) for n in (6, 4))
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    sgd = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    for trainable in (True, False, True):
        model.layers[0].trainable = trainable
        model.compile(sgd, "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.long
class FitTest(tf.test.TestCase):
    def check(self, train: Callable[[], list[np.ndarray]]) -> None:
        config = DGCConfig(sparsity=0.0, min_elements=1)
        with tf_dgc.DGCStrategy(config, transport=LocalTransport()).scope():
            found = train()
        close(found, train())

    @pytest.mark.extended
    def test_a_layer_is_frozen_between_fits(self) -> None:
        self.check(frozen_between)

    @pytest.mark.extended
    def test_losses_alternate_over_a_trunk(self) -> None:
        self.check(alternating)

    @pytest.mark.slow
    def test_so_it_is_with_servers(self) -> None:
        config = DGCConfig(sparsity=0.0, min_elements=1)
        with local_servers.Job(workers=1) as job:
            strategy = job.worker(0, compression=config, staleness_rate=False)
            for train in (alternating, frozen_between):
                with strategy.scope():
                    found = train()
                close(found, train())


@pytest.mark.long
class ResidualTest(tf.test.TestCase):
    def residuals(self) -> tuple[Residual, Residual]:
        one, two = (tf.Variable(tf.zeros([4, 4])) for _ in range(2))
        config = DGCConfig(sparsity=0.9, min_elements=0)
        found: list[Residual] = []
        for tensors in ([one, two], [two]):
            layout = arena.build([("t", [4, 4])] * len(tensors))
            args = layout, tensors, config, "CPU:0"
            more: dict[str, Any] = {"unit": "steps", "earlier": list(found)}
            found.append(Residual(*args, momentum=Momentum(0.9, False), **more))
        return found[0], found[1]

    def test_v_falls_once_with_the_rate_of_its_own_steps(self) -> None:
        every, second = self.residuals()
        every.fall(tf.constant(1.0))
        every.add(tf.ones([every.layout.size]), None)
        with second.arenas.borrowed():
            second.fall(tf.constant(0.25))
            self.assertAllEqual(second.v[:16], [0.25] * 16)
        every.fall(tf.constant(0.25))
        self.assertAllEqual(every.v[:16], [0.25] * 16)
        self.assertAllEqual(every.v[128:144], [0.25] * 16)
        self.assertAllEqual(second.v, tf.zeros([128]))

    def test_a_set_that_comes_later_goes_on_in_the_warm_up(self) -> None:
        every, second = self.residuals()
        steps = []
        for residual in (every, every, every, second, second, every, second):
            steps.append(int(residual.count.present()))
            residual.count.add()
        self.assertEqual(steps, [0, 1, 2, 2, 3, 3, 4])

    def test_a_state_of_one_rate_for_all_tensors_is_taken_over(self) -> None:
        """As it was written before each tensor had its own."""
        variables = [tf.Variable(tf.zeros([4, 4])) for _ in range(2)]
        config = DGCConfig(sparsity=0.9, min_elements=0)
        ledger = compressing(LocalTransport(), config)
        step = Momentum(0.9, False, 0.5)
        owner = Owner()
        ledger.gradients(owner, [tf.ones([4, 4])] * 2, variables, step)
        (record,) = ledger.records()
        arrays = record.arrays | {"learning rate": np.float32(0.25)}
        ledger.begin_anew([record._replace(arrays=arrays)])
        (exchange,) = [ledger.of(owner, variables, step)]
        self.assertAllEqual(exchange.state["learning rate"], [0.25, 0.25])

    def test_sets_without_a_variable_in_common_count_by_themselves(self) -> None:
        every, _ = self.residuals()
        every.count.add()
        layout = arena.build([("t", [4, 4])])
        other = [tf.Variable(tf.zeros([4, 4]))]
        config = DGCConfig(sparsity=0.9, min_elements=0)
        found = Residual(layout, other, config, "CPU:0", unit="steps", earlier=[every])
        self.assertEqual(int(found.count.present()), 0)
        self.assertEqual(int(found.step), 0)


if __name__ == "__main__":
    tf.test.main()
