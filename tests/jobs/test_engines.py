"""Workers that Ray Train or Spark start: `examples/clusters/`, on this machine."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(name: str, **environment: str) -> str:
    """Return what an example prints."""
    root = str(EXAMPLES.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "clusters" / name), "2"],
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout[-8000:]}")
    return done.stdout


@pytest.mark.slow
@pytest.mark.processes
class EnginesTest(unittest.TestCase):
    def assert_alike(self, text: str) -> None:
        found = re.findall(r"worker (\d): loss ([\d.]+), weights (\d+)", text)
        # Ray shows a line once or twice.
        self.assertEqual({rank for rank, _, _ in found}, {"0", "1"}, text)
        self.assertEqual(len({weights for _, _, weights in found}), 1, found)
        self.assertLess(float(found[0][1]), 32)  # of targets of that variance

    def test_two_workers_of_ray_train_hold_the_same_weights(self) -> None:
        pytest.importorskip("ray.train", reason="the extra `ray` brings it")
        self.assert_alike(run("ray_train.py", RAY_USAGE_STATS_ENABLED="0"))

    def test_two_tasks_of_spark_hold_the_same_weights(self) -> None:
        pytest.importorskip("pyspark", reason="it needs Java, and is in no extra")
        pytest.importorskip("spark_tensorflow_distributor", reason="as above")
        own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        self.assert_alike(run("spark.py", **own))


if __name__ == "__main__":
    unittest.main()
