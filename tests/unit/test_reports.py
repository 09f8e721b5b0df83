"""Tests of what is printed of training and of waiting: lines, and by whom."""

import contextlib
import io
import time
import unittest
from unittest import mock

import keras
import loopback
import numpy as np
import pytest

from tf_dgc import DGCConfig, DGCStrategy
from tf_dgc.strategies import reports
from tf_dgc.transports import waiting


class LineTest(unittest.TestCase):
    def test_bytes_of_a_step(self) -> None:
        for sent, dense, expected in (
            (42_100, 8_300_000, "42.1 KB a step and worker instead of 8.3 MB dense "),
            (8.3e6, 8.3e6, "8.3 MB a step and worker"),
            (500, 4_000, "500 bytes a step and worker instead of 4.0 KB dense (1/8.0)"),
        ):
            told = reports.line(sent, dense)
            self.assertTrue(told.startswith(f"tf_dgc: {expected}"), told)
        self.assertTrue(reports.line(42_100, 8_300_000).endswith("(1/197)"))

    def test_who_is_waited_for(self) -> None:
        names = ["a:1", "b:2222", ""]
        told = waiting.missing_workers([1], names)
        self.assertEqual(told, "waiting for worker 1 (b:2222)")
        told = waiting.missing_workers([1, 2], names)
        self.assertEqual(told, "waiting for workers 1 (b:2222), 2")


class WaitingTest(unittest.TestCase):
    def said(self, rank: int, missing: list[int]) -> str:
        """Return what a worker has said after ten seconds."""
        with (
            contextlib.redirect_stderr(io.StringIO()) as err,
            mock.patch.object(waiting.time, "monotonic", side_effect=[0.0, 2.0, 10.0]),
        ):
            line = waiting.WaitReport(rank, ["a:1", "b:1", "c:1"])
            line.still(missing)
            line.still(missing)
            line.over()
        return err.getvalue()

    def test_the_first_of_those_that_wait_says_it(self) -> None:
        told = "waiting for worker 2 (c:1), 10 s\n"
        self.assertEqual(self.said(0, [2]), told)
        self.assertEqual(self.said(1, [2]), "")
        told = "waiting for workers 0 (a:1), 2 (c:1), 10 s\n"
        self.assertEqual(self.said(1, [0, 2]), told)

    def test_what_takes_long_is_said_until_it_is_over(self) -> None:
        with (
            mock.patch.multiple(waiting, _FIRST_SECONDS=0.0, _LIVE_SECONDS=0.01),
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            with waiting.telling("writing"):
                until = time.monotonic() + 20
                while not err.getvalue() and time.monotonic() < until:
                    time.sleep(0.01)
            self.assertRegex(err.getvalue(), r"^writing, \d+ s\n")


class PrintedTest(unittest.TestCase):
    @pytest.mark.long
    def test_the_chief_alone_prints_what_keras_prints(self) -> None:
        x = np.random.default_rng(1).normal(size=(32, 4)).astype("float32")

        def train(transport: loopback.Loopback) -> None:
            with DGCStrategy(DGCConfig(), transport=transport).scope():
                model = keras.Sequential([keras.layers.Dense(1)])
                model.compile("sgd", "mse")
                stop = keras.callbacks.EarlyStopping("loss", patience=0, verbose=1)
                fit = {"batch_size": 16, "shuffle": False, "epochs": 2, "verbose": 2}
                model.fit(x, x[:, :1], callbacks=[stop], **fit)
                model.evaluate(x, x[:, :1], batch_size=16, verbose=2)
                model.predict(x, batch_size=16, verbose=2)

        with contextlib.redirect_stdout(io.StringIO()) as out:
            loopback.run_workers(2, train)
        lines = out.getvalue().splitlines()
        self.assertEqual(lines[0], "Epoch 1/2")
        self.assertEqual(sum(line.startswith("tf_dgc: ") for line in lines), 1)
        steps = [line for line in lines if line.startswith("2/2 - ")]
        self.assertEqual(len(steps), 4, lines)  # two epochs, evaluate and predict


if __name__ == "__main__":
    unittest.main()
