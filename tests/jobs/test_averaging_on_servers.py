"""Averaging on servers: real servers and workers, which die, join and are slow."""

import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Any

import pytest
import serving
from absl.testing import parameterized
from launch import by_rank, worker_environment

from tf_dgc.launcher.workers import free_ports

STEPS, LOCAL_STEPS = 60, 4
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "local_steps": LOCAL_STEPS,
    "liveness": 3.0,
    "grace": 3.0,
}


@pytest.mark.processes
class FaultsTest(parameterized.TestCase):
    def check(self, found: dict[str, Any]) -> None:
        self.assertTrue(found["finite"])
        self.assertLess(found["loss"], 1.0)
        self.assertEqual(found["dropped"], 0)

    @parameterized.parameters(range(1))
    @pytest.mark.slow
    def test_whoever_dies_at_a_drawn_moment_the_others_end(self, seed: int) -> None:
        self.check_drawn(seed)

    @parameterized.parameters(range(1, 12))
    @pytest.mark.slow
    def test_more_are_drawn(self, seed: int) -> None:
        self.check_drawn(seed)

    def check_drawn(self, seed: int) -> None:
        """Kill workers while they train; others take their places."""
        drawn = random.Random(f"rounds {seed}")
        settings = {**SETTINGS, "quorum": drawn.choice([None, 1, 2])}
        if drawn.random() < 0.5:
            settings["compression"] = {"min_elements": 1}
        with serving.Job(3, drawn.randint(1, 2)) as job:
            tasks = [job.worker(k, "train", **settings) for k in range(3)]
            for _ in range(drawn.randint(1, 3)):
                victim = drawn.randrange(3)
                tasks[victim].wait_for(f"step {drawn.randrange(0, 30, 10)}", 120)
                time.sleep(0.2 * drawn.random())
                tasks[victim].send(signal.SIGKILL)
                tasks[victim] = job.worker(victim, "train", **settings)
            found = [job.result_of(task) for task in tasks]
        for each in found:
            self.check(each)
        # Who met the others at the end has what they have.
        self.assertLessEqual(len({each["digest"] for each in found}), 3)

    @pytest.mark.slow
    def test_a_slow_worker_is_in_later_rounds(self) -> None:
        settings = {**SETTINGS, "quorum": 1, "slow": 1}
        with serving.Job(2, 1) as job:
            found = job.run("train", **settings)
        for each in found:
            self.check(each)
        self.assertEqual(len({each["digest"] for each in found}), 1)
        self.assertGreaterEqual(found[1]["pushes"], 1)


SCRIPT = """
import json, os, pathlib, sys
import keras
import numpy as np
import tf_dgc

folder = pathlib.Path(sys.argv[1])
config = tf_dgc.DownpourConfig(local_steps=4, quorum=1, grace=5.0, liveness=5.0)
strategy = tf_dgc.DownpourStrategy(config)
x = np.random.default_rng(1).normal(size=(400, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
first = []

class Until(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        first.append(int(self.model.optimizer.iterations))

    def on_epoch_end(self, epoch, logs=None):
        if strategy.is_chief:
            (folder / "begun").touch()
            self.model.stop_training = (folder / "joined").exists()
        elif epoch == 1:
            (folder / "joined").touch()

epochs = 100_000 if strategy.is_chief else 2
model.fit(x, x[:, :1], batch_size=40, epochs=epochs, verbose=0, callbacks=[Until()])
print(json.dumps({"first": first[0], "rank": strategy.rank}), flush=True)
"""


@pytest.mark.processes
class JoiningTest(unittest.TestCase):
    @pytest.mark.extended
    def test_a_worker_joins_a_running_job_and_goes_on_where_it_is(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        script = folder / "train.py"
        script.write_text(SCRIPT)
        (port,) = free_ports(1)
        door = f"127.0.0.1:{port}"
        seats = ["-n", "1", "--ps", "1", "--seats", "3", "--door", door]
        host = self.start([*seats, str(script), str(folder)])
        until = time.monotonic() + 120
        while not (folder / "begun").exists() and time.monotonic() < until:
            time.sleep(0.1)
        guest = self.start(["--join", door, str(script), str(folder)])
        told, errors = guest.communicate(timeout=200)
        self.assertEqual(guest.returncode, 0, errors)
        found = by_rank(told)[1]
        self.assertEqual(found["rank"], 1)
        self.assertGreater(found["first"], 1)  # not its own first step
        told, errors = host.communicate(timeout=200)
        self.assertEqual(host.returncode, 0, errors)

    def start(self, words: list[str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "tf_dgc.run", *words],
            env=worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.kill)
        return process


if __name__ == "__main__":
    unittest.main()
