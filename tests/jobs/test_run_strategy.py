"""Unchanged scripts under `tf-dgc-run --strategy`."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import pytest
from launch import results, worker_environment

SCRIPT = """
import json, random
import numpy as np
import tensorflow as tf
import keras

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.set_visible_devices([], "GPU")
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_visible_devices(cpus, "CPU")
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
parts = [tf.config.LogicalDeviceConfiguration()]
tf.config.set_logical_device_configuration(cpus[0], parts)
keras.mixed_precision.set_global_policy("float32")
x = np.random.randn(64, 4).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(data, verbose=0)
print(json.dumps({
    "workers": model.distribute_strategy.num_replicas_in_sync,
    "drawn": [random.random(), float(x.sum())],
    "weights": model.get_weights()[0].tolist(),
}), flush=True)
"""


@pytest.mark.processes
class StrategyTest(unittest.TestCase):
    def test_a_script_configures_tensorflow_and_draws_without_a_seed(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "tf_dgc.run", "-n", "2", "--strategy", "dense"]
        done = subprocess.run(
            [*command, str(script)],
            env=worker_environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        one, two = results(done)
        self.assertEqual(one["workers"], 2, json.dumps(one))
        self.assertEqual(one, two)


if __name__ == "__main__":
    unittest.main()
