"""Tests of `tf-dgc-run --verify`: it names what changes numbers, and nothing else."""

import pathlib
import subprocess
import sys
import tempfile
import textwrap

import launch
import pytest
from absl.testing import parameterized

PRELUDE = """
import json, os, keras, numpy as np, tensorflow as tf
rank = json.loads(os.environ.get("TF_CONFIG", "{}"))["task"]["index"]
x = np.random.RandomState(0).randn(33, 4).astype("float32")
y = 3 * x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
rate = 0.1
class Keeps(keras.layers.Layer):
    def build(self, shape):
        self.row = self.add_weight(shape=(4,), initializer="zeros", trainable=False)
    def call(self, inputs):
        self.row.assign(inputs[0])
        return inputs
def contrastive(y, p):
    return tf.reduce_mean(tf.square(p - tf.transpose(p)) * y)
def hardest(y, p):
    each = tf.reduce_mean(tf.square(y - p), -1)
    return tf.reduce_mean(tf.math.top_k(each, 1 + tf.shape(each)[0] // 4)[0])
class Largest(keras.metrics.Metric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.largest = self.add_variable((), "zeros", name="value")
    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y)))
    def result(self):
        return self.largest
more = {}
"""
END = """
model.compile(keras.optimizers.SGD(rate, momentum=0.9), **({"loss": "mse"} | more))
model.fit(x, y, batch_size=16, epochs=2)
open("ended", "w").close()
"""
NOISY = """
x, y = x[:32], y[:32]
model = keras.Sequential([
    keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(),
    keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0), keras.layers.Dense(1),
])
more = {"metrics": ["mae"]}
"""
OWN_STRATEGY = """
import tf_dgc
with tf_dgc.DGCStrategy(tf_dgc.DGCConfig()).scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
"""
# What a script adds, and the words that name what it changes.
CAUSES = {
    "rows": (
        "x = np.random.default_rng().normal(size=x.shape)",
        "the values of all rows differ",
    ),
    "order": ("x, y = (x[::-1], y[::-1]) if rank else (x, y)", "different orders"),
    "contrastive": ("more = {'loss': contrastive}", "compares a row with the others"),
    "hardest": ("more = {'loss': hardest}", "a top-k, as of hard examples"),
    "queue": (
        "model = keras.Sequential([Keeps(), keras.layers.Dense(1)])",
        "a queue, a counter",
    ),
    "largest": ("more = {'metrics': [Largest()]}", "losses and metrics in the logs"),
}
DEFAULT = ("contrastive",)


@pytest.mark.processes
@pytest.mark.timeout(400)
class VerifyTest(parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def verify(self, code: str, end: str = END) -> "subprocess.CompletedProcess[str]":
        script = self.folder / "train.py"
        script.write_text(PRELUDE + textwrap.dedent(code) + end)
        return subprocess.run(
            [
                *(sys.executable, "-m", "tf_dgc.run", "-n", "2"),
                *("--timeout", "300", "--verify", str(script)),
            ],
            cwd=self.folder,
            env=launch.worker_environment(),
            capture_output=True,
            text=True,
            timeout=350,
        )

    @pytest.mark.extended
    def test_a_script_that_computes_the_same_is_said_to(self) -> None:
        done = self.verify(NOISY)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn("Verdict: 2 workers compute what one does", done.stdout)
        self.assertIn("1 layer(s) of batch normalization", done.stdout)
        self.assertFalse((self.folder / "ended").exists())

    def assert_named(self, code: str, words: str) -> None:
        done = self.verify(code)
        self.assertEqual(1, done.returncode, done.stdout + done.stderr)
        self.assertIn("do NOT compute what one does", done.stdout)
        self.assertIn(words, done.stdout)

    @parameterized.parameters(DEFAULT)
    @pytest.mark.slow
    def test_what_changes_numbers_is_named(self, name: str) -> None:
        self.assert_named(*CAUSES[name])

    @parameterized.parameters(*sorted({*CAUSES} - {*DEFAULT}))
    @pytest.mark.slow
    def test_all_that_changes_numbers_is_named(self, name: str) -> None:
        self.assert_named(*CAUSES[name])

    @pytest.mark.slow
    def test_a_strategy_of_the_scripts_own_is_compared_densely(self) -> None:
        done = self.verify(OWN_STRATEGY, "model.fit(x, y, batch_size=16)")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)

    @pytest.mark.slow
    def test_a_script_that_fits_nothing_and_one_that_fails_are_no_verdict(self) -> None:
        done = self.verify("", end="")
        self.assertEqual(3, done.returncode)
        self.assertIn("has called no `fit`", done.stderr)
        done = self.verify("", end="raise ValueError('mine')")
        self.assertEqual(1, done.returncode)
        self.assertIn("ValueError: mine", done.stderr)
        self.assertNotIn("Verdict", done.stdout)
