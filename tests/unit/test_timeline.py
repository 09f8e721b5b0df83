"""Times of steps: what becomes of them, and that nothing of it stays."""

import itertools
import json
import pathlib
import tempfile
import time
from typing import Any

import features
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from loopback import Loopback, run_workers

import tf_dgc
from tf_dgc import callbacks
from tf_dgc.strategies import marks
from tf_dgc.strategies.marks import Span
from tf_dgc.strategies.timeline import _last_begins, _Worker

TIMES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(
        lambda pair: (min(pair), max(pair))
    ),
    max_size=8,
)
KINDS = {
    "dgc": lambda transport: tf_dgc.DGCStrategy(
        tf_dgc.DGCConfig(sparsity=0.9, min_elements=1), transport=transport
    ),
    "dense": lambda transport: tf_dgc.DenseStrategy(transport=transport),
    "averaging": lambda transport: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(period=2), transport=transport
    ),
    "flights": lambda transport: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(period=2, overlap=1), transport=transport
    ),
}


def covered(spans: Any) -> set[int]:
    """Return the seconds of spans, which have integers as ends."""
    return {second for begin, end in spans for second in range(begin, end)}


class TimesTest(parameterized.TestCase):
    @given(TIMES, TIMES)
    def test_union_and_rest_part_every_second(self, some: Any, others: Any) -> None:
        united = marks.union(some)
        self.assertEqual(covered(united), covered(some))
        ends = [time for span in united for time in span]
        self.assertEqual(ends, sorted(ends))
        for whole in others:
            left = marks.without(whole, united)
            self.assertEqual(covered(left), covered([whole]) - covered(some))
            self.assertEqual(marks.length(left), len(covered(left)))

    @given(st.lists(TIMES, min_size=2, max_size=3), st.data())
    def test_phases_do_not_meet_and_fill_the_batches(
        self, collectives: Any, data: Any
    ) -> None:
        workers = []
        for own in collectives:
            exchanges, applied = data.draw(TIMES), data.draw(TIMES)
            told = [("a", *times) for times in own]
            told += [(marks.EXCHANGE, *times) for times in exchanges]
            told += [(marks.APPLY, *times) for times in applied]
            workers.append(_Worker({"batches": [(0, 51)], "spans": told}))
        last = _last_begins([worker.collectives for worker in workers])
        for worker in workers:
            phases = worker.phases(last)
            self.assertTrue(all(phase.begin <= phase.end for phase in phases))
            for before, after in itertools.pairwise(phases):
                self.assertLessEqual(before.end, after.begin)
            self.assertEqual(sum(p.end - p.begin for p in phases), 51)

    def test_who_is_early_waits_for_who_is_late(self) -> None:
        early = _Worker({"batches": [(0, 9)], "spans": [("a", 1, 8)]})
        late = _Worker({"batches": [(0, 9)], "spans": [("a", 6, 8)]})
        last = _last_begins([early.collectives, late.collectives])
        found = [phase for phase in early.phases(last) if phase.name != "computing"]
        self.assertEqual(found, [Span("waiting", 1, 6), Span("exchanging", 6, 8)])
        found = [phase for phase in late.phases(last) if phase.name != "computing"]
        self.assertEqual(found, [Span("exchanging", 6, 8)])


def train(transport: Any, kind: str, own: list[Any], eager: bool = False) -> Any:
    """Return strategy, model and history of a short training."""
    keras.utils.set_random_seed(3)
    strategy = KINDS[kind](transport)
    with strategy.scope():
        model = features.mlp()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "mse", run_eagerly=eager)
    x, y = np.random.default_rng(1).normal(size=(2, 32, model.input_shape[1]))
    history = model.fit(
        x.astype("float32"),
        y[:, : model.output_shape[1]].astype("float32"),
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=own,
    )
    return strategy, model, history.history


class FitTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(kind=sorted(KINDS), eager=[False, True])
    @pytest.mark.few(0, 1)
    def test_steps_are_those_without_it_and_nothing_stays(
        self, kind: str, eager: bool
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            own = callbacks.Timeline(folder, skip=1, steps=4)
            strategy, model, _ = train("local", kind, [own], eager)
            events = json.loads(pathlib.Path(own.file).read_text())["traceEvents"]
        _, plain, _ = train("local", kind, [], eager)
        for marked, weights in zip(model.weights, plain.weights, strict=True):
            self.assertAllEqual(marked, weights)
        self.assertFalse({"all_reduce", "all_gather"} & vars(strategy.transport).keys())
        self.assertEqual(len(own.summary), 1)
        self.assertEqual(set(own.summary[0]) - {e["name"] for e in events}, {"waiting"})
        self.assertGreater(own.summary[0]["computing"], 0)
        flies = any(e["name"] == marks.FLIGHT for e in events)
        self.assertEqual(flies, kind == "flights")

    @pytest.mark.long
    def test_shares_of_an_epoch_are_logged(self) -> None:
        own = callbacks.CompressionStats(times=True)
        _, _, history = train("local", "dgc", [own])
        for share in history["exchange_share"]:
            self.assertBetween(share, 0, 1)
        self.assertEqual(history["slowest_rank"], [0, 0])

    @pytest.mark.extended
    def test_two_workers_tell_who_is_waited_for(self) -> None:
        class Late(keras.callbacks.Callback):
            """Begins a batch when the other worker waits in a collective."""

            def __init__(self, hub: Any) -> None:
                super().__init__()
                self.hub = hub

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                for _ in range(6000):
                    if self.hub._rounds[0] > self.hub._rounds[1]:
                        return
                    time.sleep(0.01)

        def work(transport: Loopback) -> Any:
            with tempfile.TemporaryDirectory() as folder:
                own = callbacks.Timeline(folder, skip=1, steps=6)
                late = [Late(transport.hub)] if transport.rank else []
                stats = callbacks.CompressionStats(times=True)
                _, _, logs = train(transport, "dense", [own, stats, *late], eager=True)
            return own.summary, logs["slowest_rank"]

        (found, slowest), (same, too) = run_workers(2, work)
        self.assertEqual(found, same)
        self.assertEqual(slowest, too)
        self.assertEqual(slowest, [1, 1])
        self.assertGreater(found[0]["waiting"], 0)

    def test_arguments(self) -> None:
        for own in ({"skip": -1}, {"steps": 0}, {"steps": 1.5}):
            with self.assertRaisesRegex(ValueError, next(iter(own))):
                callbacks.Timeline("", **own)


if __name__ == "__main__":
    tf.test.main()
