"""Nodes of several workers: one exchange of what each node's workers sum densely.

Several workers are threads. The law is that of the exchange, over nodes in the place of
workers: what a node sums is its gradient, and all its workers keep the same.
"""

import pathlib
import tempfile
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import compressing, exchange, flushed
from loopback import OWNER, Loopback, outcomes, run_workers
from numpy_twin import Cluster, Owners
from test_owners import SHAPES, STEPS, Case, Outcome, config_of

import tf_dgc
from tf_dgc import simulate
from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import Ledger, Part, nodes
from tf_dgc.exchanges.parts import Ballot
from tf_dgc.transports import grid
from tf_dgc.transports.mesh import HierarchicalTransport, hosts_of

EVEN, APART, UNEVEN = ("a", "a", "b", "b"), ("a", "b", "b", "a"), ("a", "b", "b", "c")
MOMENTUM = Momentum(0.9, False, 1.0)


def gathering(**settings: Any) -> DGCConfig:
    return config_of(exchange="allgather", **settings)


class Nodes(Case):
    """Workers on hosts; `flat` has one for each, whose gradient is their sum."""

    hosts: tuple[str, ...] = EVEN

    def on(self, hosts: tuple[str, ...]) -> "Nodes":
        found = self._replace(workers=len(hosts))
        found.hosts = hosts
        return found

    def work(self, transport: Any, config: DGCConfig) -> Outcome:
        over = HierarchicalTransport(transport, self.hosts)
        ledger, variables = compressing(over, config), self.variables()
        found = []
        for step in range(self.steps):
            own = self.gradients(transport.rank, step)
            found.append(self.step(ledger, own, variables, step))
        return self.outcome(ledger, found)

    def sums(self, step: int) -> list[list[np.ndarray]]:
        """Return the sum of gradients of each node."""
        every = [
            [g.numpy() for g in self.gradients(rank, step)]
            for rank in range(self.workers)
        ]
        return [
            [
                sum(every[rank][i] for rank, name in enumerate(self.hosts) if name == n)
                for i in range(len(self.shapes))
            ]
            for n in dict.fromkeys(self.hosts)
        ]

    def flat(self, config: DGCConfig) -> list[Outcome]:
        sums = [self.sums(step) for step in range(self.steps)]
        case = Flat(self.shapes, len(sums[0]), *self[2:])
        case.sums = sums
        return case.run(config)


class Flat(Case):
    """Workers with these gradients."""

    sums: Any = ()

    def gradients(self, rank: int, step: int) -> list[tf.Tensor]:
        return [tf.constant(g) for g in self.sums[step][rank]]


def bits(found: Outcome) -> list[bytes]:
    return [a.tobytes() for step in found.applied for a in step]


@pytest.mark.long
class NodesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(
        (EVEN, gathering(warmup_steps=3)),
        (EVEN, gathering(sparsity=0.0)),
        (APART, gathering(value_dtype="sign", clip_norm=0.5)),
        (APART, config_of()),
    )
    @pytest.mark.few(1)
    def test_are_workers_whose_gradients_are_the_sums_in_nodes(
        self, hosts: Any, config: DGCConfig
    ) -> None:
        case = Nodes(momentum=MOMENTUM).on(hosts)
        found, expected = case.run(config), case.flat(config)
        for rank, own in enumerate(found):
            node = list(dict.fromkeys(hosts)).index(hosts[rank])
            self.assertEqual(bits(own), bits(expected[node]))
            self.assertAllEqual(own.v, expected[node].v)
            self.assertAllEqual(own.z, expected[node].z)
            one, two = (e.ledger.stats() for e in (own, expected[node]))
            # Each of 4 workers tells 3 numbers then, in the place of one of each of 2.
            told = 4 * (4 * 3 - 2)
            self.assertEqual(int(one.sent_bytes), int(two.sent_bytes) + told)
            self.assertEqual(int(one.received_bytes), int(two.received_bytes) + told)
            self.assertEqual(int(one.sent_elements), int(two.sent_elements))

    @parameterized.parameters(
        (EVEN, MOMENTUM, "allgather"),
        (UNEVEN, None, "allgather"),
        (UNEVEN, MOMENTUM, "owners"),
    )
    @pytest.mark.slow
    def test_are_as_numpy_computes_them(
        self, hosts: Any, momentum: Momentum | None, by: str
    ) -> None:
        rates = (1.0, 1.0, 0.25, 0.25)
        case = Nodes(momentum=momentum, rates=rates).on(hosts)
        config = config_of(exchange=by, growth=1.25, sample_fraction=1.0)
        m = momentum or Momentum(None, False)  # type: ignore[arg-type]
        kind = Owners if by == "owners" else Cluster
        twin = kind(list(SHAPES), len(set(hosts)), config, m.factor, m.nesterov)
        found = case.run(config)
        for step in range(STEPS):
            expected = twin.step(case.sums(step), rates[step])
            for i in case.large():
                self.assertAllClose(found[0].applied[step][i], expected[i], 1e-5, 1e-5)

    @parameterized.parameters((EVEN, "owners"), (UNEVEN, "allgather"))
    @pytest.mark.few(0, 1)
    def test_nothing_is_lost(self, hosts: Any, by: str) -> None:
        case = Nodes(whole=True).on(hosts)
        found = case.run(config_of(exchange=by))
        self.assertLen({tuple(bits(own)) for own in found}, 1)
        firsts = [hosts.index(name) for name in dict.fromkeys(hosts)]
        kept = sum(found[rank].v + found[rank].z for rank in firsts)
        applied = sum(case.in_arena(step) for step in found[0].applied)
        every = [
            case.in_arena([g.numpy() for g in case.gradients(rank, step)])
            for rank in range(len(hosts))
            for step in range(case.steps)
        ]
        self.assertAllClose(applied + kept, sum(every), 1e-6, 1e-5)

    @pytest.mark.extended
    def test_only_first_workers_send_and_no_more_than_one_worker_a_node(self) -> None:
        case, config = Nodes().on(EVEN), gathering()

        def work(transport: Loopback) -> Any:
            outcome = case.work(transport, config)
            between = outcome.ledger.transport._between
            sent = getattr(between, "sent", [])
            return outcome, sum(call.bytes for call in sent if "optim" in call.name)

        found = run_workers(4, work)
        self.assertEqual([bool(sent) for _, sent in found], [True, False] * 2)
        for outcome, sent in found[::2]:
            self.assertEqual(int(outcome.ledger.stats(True).sent_bytes), sent)

    def test_hosts_are_known_by_addresses(self) -> None:
        def work(transport: Loopback) -> Any:
            transport.addresses = ["a:1", "b:1", "a:2"]
            over = HierarchicalTransport(transport)
            return hosts_of(transport), over.hosts, over.members, over.rank

        for rank, found in enumerate(run_workers(3, work)):
            own = ["a", "b", "a"], ["a", "b"], [[0, 2], [1]], [0, 1, 0][rank]
            self.assertEqual(found, own)


def weighed(rank: int, **changes: Any) -> Part:
    """Return what rows count of worker k: k of them, of a mean over rows."""
    given = {"rate": tf.constant(0.5), "weight": tf.constant(float(rank)), "whole": 1}
    return Part(**(given | changes))


@pytest.mark.long
class ToldTest(parameterized.TestCase, tf.test.TestCase):
    """What workers of a node tell reaches all workers."""

    def run_parts(self, hosts: Any, local: Any, part: Any, config: Any = None) -> Any:
        def work(transport: Loopback) -> Any:
            over = HierarchicalTransport(transport, hosts)
            config_ = config or gathering(sparsity=0.0, nonfinite="raise")
            ledger = compressing(over, config_)
            variables = [tf.Variable(tf.zeros([20, 30])), tf.Variable(tf.zeros([4]))]
            gradients = [
                tf.fill(v.shape, float(local(transport.rank))) for v in variables
            ]
            own = part(transport.rank)
            with np.errstate(over="ignore"):  # of NumPy, between threads
                found = ledger.gradients(OWNER, gradients, variables, None, own)
            return [g.numpy() for g in found.gradients], own

        return outcomes(len(hosts), work)

    @parameterized.parameters(EVEN, APART, UNEVEN)
    @pytest.mark.few(1, 3)
    def test_means_are_those_of_all_rows(self, *hosts: str) -> None:
        ranks = range(len(hosts))
        mean = sum(k * 10.0**k for k in ranks) / sum(ranks)
        for gradients, _ in self.run_parts(hosts, lambda k: 10.0**k, weighed):
            for gradient in gradients:
                self.assertAllClose(gradient, np.full_like(gradient, mean), 1e-6)
        whole = {"weight": tf.ones([]), "whole": len(hosts)}
        for gradients, _ in self.run_parts(
            hosts, lambda k: 10.0**k, lambda k: weighed(k, **whole)
        ):
            for gradient in gradients:
                self.assertAllClose(gradient, np.full_like(gradient, 1111.0), 1e-6)

    def test_nodes_without_rows_count_nothing(self) -> None:
        def part(rank: int) -> Part:
            return weighed(rank if rank < 2 else 0)

        for gradients, _ in self.run_parts(EVEN, lambda k: k + 1.0, part):
            self.assertAllClose(gradients[0], np.full([20, 30], 2.0))

    @parameterized.parameters(0, 1, 3)
    def test_who_has_no_number_is_named(self, bad: int) -> None:
        for error in self.run_parts(
            APART, lambda k: np.nan if k == bad else 1.0, weighed
        ):
            self.assertIsInstance(error, tf.errors.InvalidArgumentError)
            self.assertRegex(str(error), rf"Rank, step and variable:.*\n?.*\b{bad}\b")

    def test_what_only_the_sum_of_a_node_has_not_finite_is_told(self) -> None:
        huge = [1.0, 1.0, 3e38, 3e38]
        for error in self.run_parts(
            EVEN, lambda k: huge[k], lambda k: weighed(1, whole=4)
        ):
            self.assertIsInstance(error, tf.errors.InvalidArgumentError)
            self.assertIn("holds NaN or infinity", str(error))

    @parameterized.parameters(1, 3)
    def test_rates_and_data_are_compared_within_nodes(self, other: int) -> None:
        for field, text in (("rate", "learning rate"), ("witness", "different data")):

            def part(rank: int, field: str = field) -> Part:
                value = 2.0 if rank == other else 1.0
                usual = {"witness": tf.ones([1]), "components": tf.constant(["x"])}
                own = tf.fill([1] if field == "witness" else [], value)
                return weighed(1, **(usual | {field: own}))

            for error in self.run_parts(EVEN, lambda k: 1.0, part):
                self.assertIsInstance(error, tf.errors.InvalidArgumentError)
                self.assertIn(text, str(error))

    def test_votes_on_the_end_of_training_reach_all(self) -> None:
        def part(rank: int) -> Part:
            own, last = tf.Variable(float(rank == 3)), tf.Variable(tf.zeros([4]))
            return weighed(1, ballot=Ballot(own, last))

        for _, own in self.run_parts(EVEN, lambda k: 1.0, part):
            self.assertAllEqual(own.ballot.last, [0, 0, 0, 1])

    def test_variables_and_weights_are_compared_within_nodes(self) -> None:
        def shapes(transport: Loopback) -> None:
            over = HierarchicalTransport(transport, EVEN)
            variable = tf.Variable(tf.zeros([20, 30 + (transport.rank == 1)]))
            ledger = compressing(over, gathering())
            ledger.gradients(OWNER, [tf.ones_like(variable)], [variable])

        def weights(transport: Loopback) -> None:
            over = HierarchicalTransport(transport, EVEN)
            variable = tf.Variable(tf.fill([20, 30], float(transport.rank == 3)))
            ledger = compressing(over, gathering())
            ledger._interval = 1
            ledger.gradients(OWNER, [tf.ones_like(variable)], [variable])

        for error in outcomes(4, shapes):
            self.assertIn("`variable 0` differs", str(error))
        for error in outcomes(4, weights):
            self.assertIn("have drifted apart", str(error))


class ChosenTest(parameterized.TestCase, tf.test.TestCase):
    def choose(self, hosts: Any, wanted: Any, config: Any = None) -> list[Any]:
        def work(transport: Loopback) -> Any:
            transport.addresses = [f"{host}:1" for host in hosts]
            return nodes.chosen(transport, wanted, config or DGCConfig())

        return run_workers(len(hosts), work)

    @parameterized.parameters(
        (EVEN, False, False),
        (EVEN, True, True),
        (("a", "b", "c"), True, False),
        (("a", "b", "c"), "auto", False),
        (("a", "a", "a"), True, True),
        (("a", "a", "a"), "auto", False),
    )
    def test_hosts_send_where_that_makes_a_difference(
        self, hosts: Any, wanted: Any, yes: bool
    ) -> None:
        for found in self.choose(hosts, wanted):
            self.assertEqual(isinstance(found, HierarchicalTransport), yes)

    @parameterized.parameters((1e-2, 8e-3, True), (1e-2, 1e-2, False))
    @pytest.mark.long
    def test_it_is_chosen_where_it_is_measured_to_be_faster(
        self, flat: float, by_hosts: float, yes: bool
    ) -> None:
        # Each worker measures both, in this order; rank 0 decides.
        times: dict[str, list[float]] = {}

        def seconds(act: Any) -> float:
            act()
            own = times.setdefault(threading.current_thread().name, [flat, by_hosts])
            return own.pop(0)

        with mock.patch.object(grid, "seconds", seconds):
            for config in (DGCConfig(), DGCConfig(ratio=100), DGCConfig(sparsity=0.0)):
                for found in self.choose(EVEN, "auto", config):
                    self.assertEqual(isinstance(found, HierarchicalTransport), yes)

    def test_what_is_chosen_is_said_once(self) -> None:
        with self.assertLogs("tf_dgc", "INFO") as logs:
            self.choose(APART, True)
        said = "4 workers on 2 hosts \\(2 on a, 2 on b\\): gradients are summed densely"
        self.assertLen(logs.output, 2)
        self.assertRegex(logs.output[0], said)
        self.assertIn("ranks [0, 3] on a. Name each host once", logs.output[1])
        with self.assertLogs("tf_dgc", "WARNING") as logs:
            self.choose(("a", "a"), True)
        self.assertLen(logs.output, 1)
        self.assertIn("on several hosts only", logs.output[0])

    @pytest.mark.long
    def test_settings_that_differ_are_told_before_workers_meet(self) -> None:
        def work(transport: Loopback) -> None:
            config = DGCConfig(hierarchical=transport.rank == 1)
            tf_dgc.DGCStrategy(config, transport=transport)

        for error in outcomes(3, work):
            self.assertIn("`hierarchical` differs: False on ranks [0, 2]", str(error))

    def test_simulated_workers_share_no_hosts(self) -> None:
        for wanted in (True, "auto"):
            with self.assertRaisesRegex(ValueError, "as many workers as there are hos"):
                simulate.SimulatedStrategy(2, DGCConfig(hierarchical=wanted))


@pytest.mark.long
class SavedTest(parameterized.TestCase, tf.test.TestCase):
    """What nodes keep back is saved by workers, and adds up."""

    def train(self, ledger: Ledger, rank: int, variables: Any, begin: int) -> Any:
        case = Case()
        return [
            [
                g.numpy()
                for g in exchange(
                    ledger, OWNER, case.gradients(rank, step), variables, MOMENTUM
                ).gradients
            ]
            for step in range(begin, begin + 2)
        ]

    def kept(self, ledger: Ledger, variables: Any) -> Any:
        """Return the sum of all that is kept back, which is applied."""
        ((_, update, _),) = flushed(ledger, variables)
        return [g.numpy() for g in update.gradients]

    def start(self, transport: Any, hosts: Any, by: str) -> tuple[Ledger, Any]:
        over = HierarchicalTransport(transport, hosts) if hosts else transport
        ledger = compressing(over, config_of(exchange=by))
        return ledger, Case().variables()

    @parameterized.parameters((EVEN, "allgather"), (UNEVEN, "owners"))
    @pytest.mark.few(0, 1)
    def test_as_many_workers_go_on_bit_for_bit(self, hosts: Any, by: str) -> None:
        with tempfile.TemporaryDirectory() as folder:

            def work(transport: Loopback) -> Any:
                ledger, variables = self.start(transport, hosts, by)
                self.train(ledger, transport.rank, variables, 0)
                ledger.save(pathlib.Path(folder))
                expected = self.train(ledger, transport.rank, variables, 2)
                ledger, variables = self.start(transport, hosts, by)
                ledger.restore(pathlib.Path(folder))
                return expected, self.train(ledger, transport.rank, variables, 2)

            for expected, found in run_workers(4, work):
                for one, two in zip(expected, found, strict=True):
                    for a, b in zip(one, two, strict=True):
                        self.assertEqual(a.tobytes(), b.tobytes())

    @parameterized.parameters(
        (EVEN, ("a", "a", "a", "b", "b", "c"), "owners"),
        (UNEVEN, (None,) * 4, "owners"),
        (EVEN, (None,) * 2, "allgather"),
        (None, UNEVEN, "allgather"),
    )
    @pytest.mark.few(0, 1)
    def test_the_sum_stays_on_other_nodes_or_workers(
        self, before: Any, after: Any, by: str
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:

            def save(transport: Loopback) -> Any:
                ledger, variables = self.start(transport, before, by)
                self.train(ledger, transport.rank, variables, 0)
                ledger.save(pathlib.Path(folder))
                return self.kept(ledger, variables)

            def load(transport: Loopback) -> Any:
                hosts = after if after[0] else None
                ledger, variables = self.start(transport, hosts, by)
                ledger.restore(pathlib.Path(folder))
                ledger.of(OWNER, variables, MOMENTUM)
                return self.kept(ledger, variables)

            expected = run_workers(4, save)[0]
            self.assertTrue(np.any(expected[0]))
            for found in run_workers(len(after), load):
                for one, two in zip(expected, found, strict=True):
                    self.assertAllClose(one, two, 1e-5, 1e-5)
