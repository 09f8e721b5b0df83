"""Tests of the predictions, of what they are made of, and of the command line."""

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import tempfile
import types
from typing import Any
from unittest import mock

import bench_network
import keras
import pytest
import tensorflow as tf
from ledgers import compressing
from loopback import OWNER, Loopback, run_workers

from tf_dgc.compression import dgc
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.exchanges import Dense, Ledger, Part, formats
from tf_dgc.exchanges.owner_sum import OwnerSum
from tf_dgc.lab import advise, measure, rates
from tf_dgc.lab.splitting import Chain, Split, split_of
from tf_dgc.layers import ways
from tf_dgc.prediction import costs
from tf_dgc.prediction.costs import (
    AllGather,
    AllReduce,
    AllToAll,
    Measured,
    Network,
    Prediction,
)
from tf_dgc.strategies import witness
from tf_dgc.strategies.averaging import ParameterAveragingStrategy
from tf_dgc.transports.sums import GatherSum

SHAPES = [(100, 64), (64,), (64, 50), (3, 5)]
MEASURED = Measured(
    dense=1.0,
    compressed=1.5,
    uncompressed=1.25,
    message=0.1,
    round=0.5,
)


def variables() -> list[tf.Variable]:
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def small() -> keras.Model:
    """A model that is not compiled, with moving statistics."""
    layers = [keras.layers.Dense(64), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((100,)), *layers, keras.layers.Dense(50)])


def compiled() -> keras.Model:
    """A model of several inputs and outputs, with its own losses."""
    a, b = keras.Input((8,), name="a"), keras.Input((2,), name="b", dtype="int32")
    words = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(b))
    y, z = keras.layers.Dense(3, name="y"), keras.layers.Dense(1, name="z")
    outputs = {"y": y(a), "z": z(words)}
    model = keras.Model({"a": a, "b": b}, outputs)
    losses = {"y": keras.losses.SparseCategoricalCrossentropy(True), "z": "mse"}
    faster = {"jit_compile": True, "steps_per_execution": 8}
    model.compile("adam", losses, metrics={"y": ["accuracy"]}, **faster)
    return model


def unbuilt() -> keras.Model:
    """A model that knows no shapes."""
    return keras.Sequential([keras.layers.Dense(3)])


def unknown() -> keras.Model:
    """A model of inputs of any length."""
    inputs = keras.Input((None, 3))
    return keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(inputs))


def nothing() -> None:
    """No model."""


def faulty() -> None:
    """A function with a fault of its own."""
    raise ValueError("a fault")


class RatesTest(tf.test.TestCase):
    def test_rates(self) -> None:
        for rate, bits in (("1gbit", 1e9), ("2.5mbit", 2.5e6), ("800kbit", 8e5)):
            self.assertEqual(rates.bits_per_second(rate), bits)

    def test_what_is_no_rate(self) -> None:
        for rate in ("", "0mbit", "1", "1 gbit", "-1gbit", "1Gbps"):
            with self.assertRaisesRegex(ValueError, f"`link` must.*link='{rate}'"):
                rates.bits_per_second(rate, "link")


class FormulaTest(tf.test.TestCase):
    def test_ring_all_reduce(self) -> None:
        calls = [AllReduce(8e6)]
        for workers, received in ((1, 0), (2, 8e6), (4, 12e6)):
            self.assertEqual(costs.received(calls, workers), received)
        network = Network(bandwidth=96e6, latency=0.01)
        self.assertEqual(costs.seconds(calls, 1, network), 0)
        self.assertAllClose(costs.seconds(calls, 4, network), 1.0 + 6 * 0.01)

    def test_ring_all_gather(self) -> None:
        calls = [AllGather(1e6)]
        self.assertEqual(costs.received(calls, 1), 0)
        self.assertEqual(costs.received(calls, 4), 3e6)
        network = Network(bandwidth=24e6, latency=0.01)
        self.assertAllClose(costs.seconds(calls, 4, network), 1.0 + 3 * 0.01)

    def test_a_grid_waits_less_and_passes_what_its_groups_receive(self) -> None:
        # 12 workers: 3 rows of 4.
        network = Network(8e6, 0.01, grid=True)
        for call, passed, hops in (
            (AllReduce(4e4), 2 * 3 / 4 * 4e4 + 2 * 4e4, 2 * 3 + 2),
            (AllReduce(4e5), 2 * 11 / 12 * 4e5, 22),  # too large for a grid
            (AllGather(1e4), 3 * 1e4 + 2 * 4e4, 3 + 2),
            (AllToAll(1e4), 3 * 3e4 + 2 * 4e4, 3 + 2),
        ):
            found = costs.seconds([call], 12, network)
            self.assertAllClose(found, passed / 1e6 + hops * 0.01, msg=call)
            ring = network._replace(grid=False)
            of_ring = call.received(12) / 1e6, call.passed(12, ring)[1] * 0.01
            self.assertAllClose(costs.seconds([call], 12, ring), sum(of_ring))

    def test_exchanges_cost_what_their_sums_say(self) -> None:
        sizes = [tf.Variable(tf.zeros(s)) for s in ((300, 1000), (70, 33), (512, 64))]
        for dtype in ("float32", "sign"):
            config = DGCConfig(sparsity=0.99, value_dtype=dtype)
            tensors = costs.tensors_of(sizes, config)
            for workers in (2, 3, 9, 33, 256, 1024):
                found = costs.exchanges(tensors, config, 16, workers)
                for name, kind in (("DGC", GatherSum), ("owners", OwnerSum)):
                    args = tensors.layout, config.sparsity
                    exchange = "owners" if name == "owners" else "allgather"
                    settled = dataclasses.replace(config, exchange=exchange)
                    if formats.kind_at(*args, settled, workers) is not kind:
                        continue
                    form = kind.form(*args, settled, workers)
                    cost = kind.cost(form, tensors.layout, workers)
                    _, *calls = found[name]
                    self.assertEqual(costs.received(calls, workers), cost.received)
                    network = Network(8e6, 0.1)
                    seconds = costs.seconds(calls, workers, network)
                    self.assertAllClose(seconds, cost.seconds(1e6, 0.1))

    def test_prediction(self) -> None:
        # 38,400 bytes of tensors that are compressed, and 316 that are not.
        config = DGCConfig(sparsity=0.99, min_elements=100)
        tensors = costs.tensors_of(variables(), config, [tf.zeros([100])])
        self.assertEqual(tensors.gradient_bytes, 4 * (6400 + 64 + 3200 + 15))
        self.assertEqual(tensors.rest_bytes, 4 * (64 + 15))
        size = formats.message_format(tensors.layout, 0.99, config, 4).bytes
        self.assertGreater(size, 96 * 5)
        network = Network(1e6, 0.01)
        found = costs.predict(MEASURED, tensors, config, 4, 4, network)
        received = {
            "dense": 1.5 * (38_716 + 28 * 4),
            "DGC": 1.5 * (316 + 28 * 4) + 3 * size,
            "averaging": (1.5 * (38_716 + 400) + 3 * 112) / 4,
        }
        computed = {"dense": 1.0, "DGC": 1.5 + 3 * 0.1, "averaging": 1.0 + 0.5 / 4}
        hops = {"dense": 6, "DGC": 9, "averaging": 9 / 4}
        owners = OwnerSum.form(tensors.layout, 0.99, config, 4)
        passed = 3 * (owners.parts.bytes + owners.sums.bytes + 4)
        received["owners"], hops["owners"] = 1.5 * (316 + 28 * 4) + passed, 12
        computed["owners"] = 1.5 + (1.25 + 4 - 1) * 0.1
        self.assertEqual(found.keys(), received.keys())
        for name, prediction in found.items():
            seconds = computed[name] + 8e-6 * received[name] + 0.01 * hops[name]
            self.assertAllClose([*prediction], [seconds, received[name]], msg=name)

    def test_what_owners_send_does_not_grow_with_the_workers(self) -> None:
        config = DGCConfig.paper()
        tensors = costs.tensors_of([tf.Variable(tf.zeros([1000, 1000]))], config)
        network = Network(1e9, 0.0)
        few, many = (
            costs.predict(MEASURED, tensors, config, 4, workers, network)
            for workers in (16, 64)
        )
        self.assertLess(
            many["owners"].received_bytes, 1.5 * few["owners"].received_bytes
        )
        self.assertGreater(many["DGC"].received_bytes, 3 * few["DGC"].received_bytes)
        self.assertLess(many["owners"].seconds, many["DGC"].seconds)

    def test_split_layers(self) -> None:
        inner = keras.Sequential(
            [keras.Input((3, 2**11)), keras.layers.Dense(2**9, name="large")]
        )
        layers = [inner, keras.layers.Dense(2**9), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((3, 2**11)), *layers])
        found = split_of(model, rows=4)
        m, inputs, units = 4 * 3, 2**11, 2**9
        form = ways.WayForm(inputs, units, ["columns", "rows"])
        expected = Split(4 * inputs * units, 5, (Chain(m, (form,)),))
        self.assertEqual(found, expected)
        self.assertEqual(split_of(small(), 4), Split())

        config = DGCConfig.paper(min_elements=1)
        tensors = costs.tensors_of(model.trainable_variables, config)
        args = MEASURED, tensors._replace(split=found), config, 16, 4, Network(1e9)
        split = costs.predict(*args)["split"]
        rest = tensors.gradient_bytes - 4 * inputs * units
        sent = 1.5 * (rest + 28 * 4) + 3 * 8 * m * (inputs / 4 + units)  # by rows
        self.assertAlmostEqual(split.received_bytes, sent)
        self.assertAlmostEqual(split.seconds, 1.0 + 8 * sent / 1e9)
        args = MEASURED, tensors, config, 16, 4, Network(1e9)
        self.assertNotIn("split", costs.predict(*args))

    def test_a_table_has_split_layers_where_there_are_any(self) -> None:
        found = {name: Prediction(2.0, 10) for name in (*advise.STRATEGIES, "split")}
        found["split"] = Prediction(1.0, 5)
        tensors = costs.tensors_of(variables(), DGCConfig.paper())
        note = advise.choose(found, tensors, DGCConfig.paper(), 4)
        self.assertEqual(note[0], "split")
        head, line = advise.table({"4": found}, {"4": note}).splitlines()
        self.assertRegex(head, r"averaging s +bytes +split s +bytes +fastest")
        self.assertRegex(line, r" 10 +1 +5  split")

    def test_messages_that_would_cost_more_than_dense(self) -> None:
        config = DGCConfig(sparsity=0.75, min_elements=100)
        tensors = costs.tensors_of(variables(), config)
        sends = [costs.sends_messages(tensors, config, n) for n in (2, 64)]
        self.assertEqual(sends, [True, False])
        found = costs.predict(MEASURED, tensors, config, 1, 64, Network(1e18))
        self.assertAllClose(found["DGC"].seconds, 1.25)
        arena = 4 * tensors.layout.size
        sent = 2 * 63 / 64 * (316 + 28 * 64 + arena) + 63 * 20  # 20: a header
        self.assertAllClose(found["DGC"].received_bytes, sent)

    def test_choice(self) -> None:
        def choice(*seconds: float, workers: int = 2, sparsity: float = 0.99) -> Any:
            named = zip(advise.STRATEGIES, seconds, strict=True)
            found = {name: Prediction(s, 0.0) for name, s in named}
            config = DGCConfig(sparsity=sparsity, min_elements=100)
            tensors = costs.tensors_of(variables(), config)
            return advise.choose(found, tensors, config, workers)

        self.assertEqual(choice(3, 2, 4), ("DGC", ""))
        self.assertEqual(choice(3, 2, 1), ("averaging", ""))
        slow = "DGC: its work takes longer than it saves"
        self.assertEqual(choice(1, 2, 3), ("dense", slow))
        self.assertEqual(choice(2, 2, 2), ("dense", slow))
        dear = "DGC: messages would cost more than dense tensors"
        self.assertEqual(
            choice(3, 4, 2, workers=64, sparsity=0.75), ("averaging", dear)
        )
        alone = "one worker has nobody to send to"
        self.assertEqual(choice(3, 2, 1, workers=1), ("dense", alone))

    def test_nothing_to_compress(self) -> None:
        tensors = costs.tensors_of(variables(), DGCConfig.paper(min_elements=10**6))
        found = costs.predict(MEASURED, tensors, DGCConfig.paper(), 16, 2, Network(1e9))
        _, reason = advise.choose(found, tensors, DGCConfig.paper(), 2)
        self.assertEqual(reason, "DGC: no tensor is large enough to compress")


@pytest.mark.long
class TrafficTest(tf.test.TestCase):
    """The bytes of the predictions are those that `stats` counts."""

    def _counted(self, workers: int, config: DGCConfig | None) -> int:
        part = Part(
            tf.constant(0.1),
            tf.constant(1.0),
            1,
            tf.zeros([witness.COUNT]),
            tf.constant([""] * witness.COUNT),
        )

        def work(transport: Loopback) -> int:
            ledger: Ledger = Ledger(transport, Dense)
            if config:
                ledger = compressing(transport, config)
            own = variables()
            gradients = [tf.random.normal(shape) for shape in SHAPES]
            taken_over = dgc.Momentum(0.9, False)
            ledger.gradients(OWNER, gradients, own, taken_over, part)
            return int(ledger.stats().received_bytes)

        counted = set(run_workers(workers, work))
        self.assertLen(counted, 1)
        return counted.pop()

    @pytest.mark.slow
    def test_gradients(self) -> None:
        for workers, sparsity in ((3, 0.99), (2, 0.75), (8, 0.75)):
            with self.subTest(workers=workers, sparsity=sparsity):
                config = DGCConfig(sparsity=sparsity, min_elements=100)
                tensors = costs.tensors_of(variables(), config)
                found = costs.exchanges(tensors, config, 16, workers)
                owners = dataclasses.replace(config, exchange="owners")
                for name, settings in (
                    ("dense", None),
                    ("DGC", config),
                    ("owners", owners),
                ):
                    predicted = costs.received(found[name], workers)
                    counted = self._counted(workers, settings)
                    # Each all-reduce is counted in whole bytes.
                    self.assertBetween(predicted - counted, 0, 2, msg=name)

    @pytest.mark.slow
    def test_models(self) -> None:
        for make, gradients, moving in (
            (small, 4 * (6400 + 3 * 64 + 3200 + 50), 2 * 4 * 64),
            (compiled, 4 * (8 * 3 + 3 + 9 * 4 + 8 + 1), 0),
        ):
            with self.subTest(make.__name__):
                measured, tensors = measure.measure(make, DGCConfig.paper(), 4, 2)
                self.assertEqual(tensors.gradient_bytes, gradients)
                self.assertEqual(tensors.statistic_bytes, moving)
                for each in (measured.dense, measured.compressed):
                    self.assertGreater(each, 0)

    def test_rounds_of_averaging(self) -> None:
        config = AveragingConfig(period=2)
        strategy = ParameterAveragingStrategy(config, transport="local")
        with strategy.scope():
            model = small()
            model.compile("sgd", "mse")
        sent = []

        def count(batch: int, logs: Any) -> None:
            sent.append(int(strategy.stats().sent_bytes))

        counter = keras.callbacks.LambdaCallback(on_train_batch_end=count)
        x, y = tf.zeros([4, 100]), tf.zeros([4, 50])
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[counter])
        moving = model.non_trainable_variables
        found = costs.tensors_of(
            model.trainable_variables, DGCConfig.paper(), moving[:2]
        )
        calls = costs.exchanges(found, DGCConfig.paper(), 2, 1)["averaging"]
        total = sum(call.share * call.bytes for call in calls)
        self.assertEqual(sent[:2], [0, 2 * total])


class BatchTest(tf.test.TestCase):
    def test_inputs_and_targets(self) -> None:
        inputs, targets = measure.synthetic_batch(compiled(), 5)
        shapes = tf.nest.map_structure(lambda t: (t.dtype.name, t.shape), inputs)
        self.assertEqual(shapes, {"a": ("float32", (5, 8)), "b": ("int32", (5, 2))})
        shapes = tf.nest.map_structure(lambda t: (t.dtype.name, t.shape), targets)
        self.assertEqual(shapes, {"y": ("int32", (5,)), "z": ("float32", (5, 1))})
        self.assertAllInRange(targets["y"], 0, 2)


class CommandTest(tf.test.TestCase):
    def _run(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = advise.main(arguments)
            except SystemExit as error:
                status = int(error.code or 0)
        return status, out.getvalue(), err.getvalue()

    def test_bad_arguments(self) -> None:
        here = "test_advise"
        rule = "`--model` must be module:function"
        for arguments, message in (
            (["--model", "here"], f"{rule}.*'here'"),
            (["--model", ":small"], rule),
            (["--model", "no.such.module:f"], f"{rule}.*No module named 'no'"),
            (["--model", f"{here}.x:f"], f"{rule}.*not a package"),
            (["--model", f"{here}:f"], f"{rule}.*no function 'f' there"),
            (["--model", f"{here}:SHAPES"], "no function 'SHAPES' there"),
            (["--model", f"{here}:nothing"], "must return a keras.Model.*None"),
            (["--model", f"{here}:unbuilt"], "must be built.*built=False"),
            (["--model", f"{here}:unknown"], r"known shapes.*\(None, None, 3\)"),
            (["--bandwidth", "fast"], "`--bandwidth` must be.*bandwidth='fast'"),
            (["--workers", "4", "0"], "`--workers` must be 1 or more. Received: 0"),
            (["--workers", "two"], "invalid int value: 'two'"),
            (["--batch-size", "0"], "`--batch-size` must be 1 or more"),
            (["--period", "-1"], "`--period` must be 1 or more"),
            (["--latency", "-1"], "`--latency` must be 0 or more. Received: -1.0"),
            (["--sparsity", "1"], "`sparsity` must be in"),
        ):
            with self.subTest(arguments=arguments):
                status, _, err = self._run("--model", f"{here}:small", *arguments)
                self.assertEqual(status, 2)
                self.assertRegex(err, message)

    def test_help_gives_the_formulas(self) -> None:
        status, out, _ = self._run("--help")
        self.assertEqual(status, 0)
        self.assertIn("all-reduce   2 (N - 1) / N  S / B + 2 (N - 1) L", out)

    def test_faults_of_the_module_show_where_they_are(self) -> None:
        with self.assertRaisesRegex(ValueError, "a fault"):
            self._run("--model", "test_advise:faulty")
        module = types.ModuleType("importing")
        error = ModuleNotFoundError("No module named 'gone'", name="gone")
        with (
            mock.patch("importlib.import_module", return_value=module) as load,
            self.assertRaisesRegex(ModuleNotFoundError, "gone"),
        ):
            load.side_effect = error
            self._run("--model", "importing:f")

    def test_table(self) -> None:
        tensors = costs.tensors_of(variables(), DGCConfig.paper())
        with mock.patch.object(advise, "measure", return_value=(MEASURED, tensors)):
            status, out, _ = self._run(
                *("--model", "test_advise:small", "--bandwidth", "100kbit"),
                *("--workers", "1", "4", "4", "2"),
            )
        self.assertEqual(status, 0)
        self.assertIn("38,716 bytes of gradients", out)
        self.assertRegex(out, r"training step +1\n")
        self.assertRegex(out, r"each further message, read and added +0\.1\n")
        lines = out.partition("workers ")[2].splitlines()[1:]
        rows = [line.split() for line in lines if line[:7].strip().isdigit()]
        self.assertEqual([row[0] for row in rows], ["1", "2", "4"])
        alone = ["1", "0", "1.5", "0", "1.031", "0", "1.5", "0", "dense"]
        self.assertEqual(rows[0][1:10], alone, out)
        self.assertTrue(lines[0].endswith("one worker has nobody to send to"))
        # 1 + 1.5 * (38,716 + 28 * 4) * 8 / 100,000 seconds
        self.assertEqual(rows[2][1:3], ["5.659", "58,242"])
        self.assertEqual(rows[2][9], "averaging")

    def test_a_line_of_a_grid_where_there_is_latency(self) -> None:
        tensors = costs.tensors_of(variables(), DGCConfig.paper())
        with mock.patch.object(advise, "measure", return_value=(MEASURED, tensors)):
            status, out, _ = self._run(
                *("--model", "test_advise:small", "--latency", "0.01"),
                *("--workers", "4", "9", "1024"),
            )
        self.assertEqual(status, 0)
        lines = out.partition("workers ")[2].splitlines()[1:6]
        first = [line[:9].strip() for line in lines]
        self.assertEqual(first, ["4", "9", "9 grid", "1024", "1024 grid"])
        ring, grid = (line[9:].split() for line in lines[3:])
        self.assertLess(float(grid[2]), float(ring[2]))
        self.assertEqual(grid[1::2][:4], ring[1::2][:4])  # bytes

    @pytest.mark.slow
    def test_all_numbers_of_workers(self) -> None:
        status, out, _ = self._run("--model", "test_advise:small", "--steps", "1")
        self.assertEqual(status, 0)
        rows = [line.split()[0] for line in out.splitlines() if "," in line]
        for workers in (2, 1024):
            self.assertIn(str(workers), rows)


class LaboratoryTest(tf.test.TestCase):
    def test_predictions_beside_results(self) -> None:
        hosts = [
            {"measured": MEASURED, "bandwidth": [2e18, 3e18, 4e18], "latency": [0.5]},
            {
                "measured": MEASURED._replace(dense=2.0),
                "bandwidth": [4e18, 1e18, 4e18],
                "latency": [0.25],
            },
        ]
        with (
            tempfile.TemporaryDirectory() as name,
            mock.patch.object(bench_network, "run_job", return_value=hosts),
        ):
            args = argparse.Namespace(
                task="fit",
                rows=["dense/horovod", "dgc/horovod", "averaging/hybrid"],
                runs=[1, 2],
                rates=["1gbit"],
                hosts=[2],
                results=pathlib.Path(name),
                width=64,
                batch_size=8,
                sleep=0.0,
            )
            for number, run, row, seconds, others in (
                (2, 1, ("horovod", "dense"), [1.0, 6.0], {}),
                (2, 2, ("horovod", "dense"), [7.0], {}),
                (2, 3, ("horovod", "dense"), [0.1], {}),
                (2, 1, ("horovod", "dense"), [0.1], {"batch_size": 4}),
                (2, 1, ("hybrid", "averaging"), [0.1], {"width": 32}),
                (2, 1, ("horovod", "dgc"), [6.2], {}),
                (4, 1, ("horovod", "dgc"), [1.0], {}),
            ):
                theirs = argparse.Namespace(**vars(args) | others)
                file = bench_network.file_of(theirs, run, "1gbit", number, *row)
                file.write_text(json.dumps({"seconds": seconds}))
            lines, failed = bench_network.compare(args)
            with mock.patch.object(bench_network, "run_job", return_value=[]):
                self.assertEqual(bench_network.compare(args), (lines[:2], 1))
        self.assertEqual(failed, 0)
        # By the slowest host: 2 seconds and two latencies of 0.5; 1.5 seconds, 0.1 for
        # a message, and three latencies. No bytes count at such rates.
        self.assertEqual(
            lines[2:],
            [
                "| 2 | 1gbit | dense/horovod | 3 | 6 | 0.50 |",
                "| 2 | 1gbit | dgc/horovod | 3.1 | 6.2 | 0.50 |",
            ],
        )


if __name__ == "__main__":
    tf.test.main()
