"""Tests of tf_dgc.launch: functions on several workers, from a process of its own."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import pytest
from launch import ROOT, finish

from tf_dgc.launcher import function

PRELUDE = """
import json, os, sys, time
import tf_dgc

def rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]
"""
TRAIN = """
import keras, numpy as np, tensorflow as tf
tf.constant(1.0) + 1  # TensorFlow has started here

def train(rows):
    x = np.random.normal(size=[rows, 8]).astype("float32")
    model = keras.Sequential([keras.layers.Dense(400), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(x, x[:, 0], batch_size=8)
    return history.history["loss"][0], model.get_weights()[0]

(one, weights), (other, same) = tf_dgc.launch(train, n=2, args=(64,))
assert one == other
assert (weights == same).all()
print("after")
"""


class LaunchTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def start(self, code: str) -> "subprocess.Popen[str]":
        path = self.folder / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(code))
        process = subprocess.Popen(
            [sys.executable, str(path)],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.addCleanup(process.kill)
        return process

    def run_to_end(self, code: str, seconds: float = 60) -> tuple[int, str, str]:
        return finish(self.start(code), seconds)

    def test_what_each_worker_returned(self) -> None:
        status, out, err = self.run_to_end("""
            factor = 3
            def work(a, b):
                print("seen", rank(), end="", flush=True)
                return factor * a + rank(), b
            print(tf_dgc.launch(work, n=3, args=(5, "x"), strategy=None))
            """)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(out, "seen 0[(15, 'x'), (16, 'x'), (17, 'x')]\n")

    def test_the_error_of_a_worker_is_raised_with_its_traceback(self) -> None:
        status, out, err = self.run_to_end("""
            class Own(ValueError):
                pass
            def inner():
                if rank() == 1:
                    raise Own("on one only")
                time.sleep(60)
            try:
                tf_dgc.launch(inner, n=2, strategy=None)
            except Own as error:
                print("caught", error)
                raise
            """)
        self.assertEqual((status, out), (1, "caught on one only\n"))
        self.assertIn("On worker 1:\nTraceback (most recent call last):", err)
        self.assertIn('raise Own("on one only")', err)
        self.assertTrue(err.endswith("Own: on one only\n"), err)

    def test_a_worker_that_is_killed_is_an_error(self) -> None:
        status, _, err = self.run_to_end("""
            def die():
                os.kill(os.getpid(), 9)
            tf_dgc.launch(die, n=2, strategy=None)
            """)
        self.assertEqual(status, 1)
        self.assertIn("RuntimeError: A worker ended with status 137", err)

    def test_what_cannot_be_carried_is_named(self) -> None:
        status, _, err = self.run_to_end("""
            def give():
                return (each for each in [1])
            tf_dgc.launch(give, n=1, strategy=None)
            """)
        self.assertEqual(status, 1)
        self.assertIn("TypeError: What a function returns to tf_dgc.launch must", err)

    def test_arguments_that_cannot_be_carried_are_named(self) -> None:
        status, _, err = self.run_to_end("""
            import threading
            tf_dgc.launch(print, n=1, args=(threading.Lock(),), strategy=None)
            """)
        self.assertEqual(status, 1)
        self.assertIn("TypeError: What tf_dgc.launch gives to workers", err)

    def test_an_error_that_cannot_be_read_again_is_told_by_its_traceback(self) -> None:
        status, _, err = self.run_to_end("""
            class Two(Exception):
                def __init__(self, one, two):
                    super().__init__(one + two)
            def fail():
                raise Two("one ", "and two")
            tf_dgc.launch(fail, n=1, strategy=None)
            """)
        self.assertEqual(status, 1)
        self.assertIn("Two: one and two", err)

    def test_an_interrupt_ends_all(self) -> None:
        process = self.start("""
            def wait():
                print(json.dumps(os.getpid()), flush=True)
                time.sleep(120)
            try:
                tf_dgc.launch(wait, n=2, strategy=None)
            except KeyboardInterrupt:
                print("interrupted")
            """)
        pid = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        status, out, _ = finish(process)
        told = "tf_dgc.launch: received signal 2; ending all workers\ninterrupted\n"
        self.assertEqual((status, out), (0, told))
        deadline = time.monotonic() + 20
        while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertFalse(pathlib.Path(f"/proc/{pid}").exists())

    def test_another_signal_ends_the_workers_and_goes_to_who_had_it(self) -> None:
        for handler, expected in (
            ("signal.SIG_DFL", (-signal.SIGTERM, "")),
            ("lambda *_: print('mine')", (0, "mine\nwas told\n")),
        ):
            process = self.start(f"""
                import signal
                signal.signal(signal.SIGTERM, {handler})
                def wait():
                    print(json.dumps(os.getpid()), flush=True)
                    time.sleep(120)
                try:
                    tf_dgc.launch(wait, n=2, strategy=None)
                except RuntimeError as error:
                    print("was told")
                """)
            pid = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            status, out, _ = finish(process)
            told = "tf_dgc.launch: received signal 15; ending all workers\n"
            self.assertEqual((status, out.replace(told, "")), expected)
            self.assertFalse(pathlib.Path(f"/proc/{pid}").exists())

    def test_an_exit_of_a_worker_is_an_error_of_the_caller(self) -> None:
        process = self.start("""
            def leave():
                if rank():
                    sys.exit(3)
            try:
                tf_dgc.launch(leave, n=2, strategy=None)
            except RuntimeError as error:
                print(error)
            """)
        self.assertEqual(finish(process)[:2], (0, "A worker ended by sys.exit(3)\n"))

    def test_arguments_that_make_no_sense(self) -> None:
        for arguments, message in (
            ({}, "`n` must be a number of workers. Received: n=None"),
            ({"n": 3, "hosts": "a:2"}, "be as many as these have. Received: n=3"),
            ({"n": 2, "strategy": "x"}, "`strategy` must be None or one of"),
            ({"n": 2, "strategy": "downpour"}, "use tf-dgc-run --ps"),
            ({"n": 2, "strategy": None, "config": {}}, "`config` needs a `strategy`"),
            ({"n": 2, "config": {"sparsity": 2.0}}, "`sparsity` must be in"),
        ):
            with self.assertRaises(ValueError) as raised:
                function.launch(print, **arguments)
            self.assertIn(message, str(raised.exception))
        for name in ("args", "config"):
            with self.assertRaisesRegex(TypeError, f"`{name}` must be .*{name}=3"):
                function.launch(print, 2, **{name: 3})

    @pytest.mark.processes
    @pytest.mark.slow
    def test_workers_train_together(self) -> None:
        status, out, err = self.run_to_end(TRAIN, 200)
        self.assertEqual(status, 0, err)
        self.assertTrue(out.endswith("after\n"), out)
        lines = out.split("\n")  # of which a bar is one
        self.assertEqual(sum("8/8" in line for line in lines), 1, out)


if __name__ == "__main__":
    unittest.main()
