"""Tests that run each example, small, on several workers."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from typing import Any

import launch
import numpy as np
import pytest


def run_example(name: str, *arguments: str, workers: int = 2, **how: Any) -> list[str]:
    """Runs an example; returns what worker 0 printed."""
    done = launch.run(
        f"examples/{name}.py",
        *arguments,
        workers=workers,
        timeout=280,
        **how,
    )
    if done.returncode:
        raise AssertionError(
            f"{name}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    lines = done.stdout.splitlines()
    if workers == 1:
        return lines
    return [line[found.end() :] for line in lines if (found := _RANK_0.match(line))]


_RANK_0 = re.compile(r"\[0\](<stdout>:| )")


def number_behind(label: str, lines: list[str]) -> float:
    """Returns the first number on the line that begins with `label`."""
    (line,) = (line for line in lines if line.startswith(label))
    found = re.search(r"[\d,]+(\.\d+)?", line.removeprefix(label))
    assert found, line
    return float(found.group().replace(",", ""))


@pytest.mark.processes
class ExamplesTest(unittest.TestCase):
    def assert_compressed(self, lines: list[str], at_least: float) -> None:
        sent = number_behind("sent per worker", lines)
        dense = number_behind("dense would send", lines)
        self.assertGreater(sent, 0)
        self.assertGreater(dense, at_least * sent)

    def test_digits(self) -> None:
        lines = run_example("digits", "--epochs", "4", "--json")
        self.assertIn("workers            2, transport collective", lines)
        self.assertIn("weights            bit-identical on all workers", lines)
        self.assert_compressed(lines, at_least=5)  # two of the four epochs warm up
        figures = json.loads(lines[-1])
        self.assertEqual(figures["steps"], 4 * (1152 // 64))
        self.assertGreater(figures["accuracy"], 0.6)
        self.assertTrue(figures["identical"])

    @pytest.mark.slow
    def test_digits_under_horovodrun(self) -> None:
        launch.skip_without_horovod()
        lines = run_example("digits", "--epochs", "1", launcher="horovod")
        self.assertIn("workers            2, transport hybrid", lines)
        self.assertIn("weights            bit-identical on all workers", lines)

    @pytest.mark.slow
    def test_digits_dense(self) -> None:
        lines = run_example("digits", "--epochs", "2", "--strategy", "dense", "--json")
        figures = json.loads(lines[-1])
        # Each worker's learning rate, rows and whether it may go on, beside gradients.
        beside = figures["sent_bytes"] - figures["dense_bytes"]
        self.assertEqual(beside, figures["steps"] * 2 * 3 * 4)
        self.assertGreater(figures["accuracy"], 0.6)
        self.assertTrue(figures["identical"])

    @pytest.mark.slow
    def test_digits_single(self) -> None:
        arguments = ("--epochs", "1", "--strategy", "single")
        lines = run_example("digits", *arguments, workers=1)
        self.assertIn("workers            1, transport local", lines)

    @pytest.mark.slow
    def test_custom_loop(self) -> None:
        lines = run_example("custom_loop", "--epochs", "4")
        self.assertIn("weights            bit-identical on all workers", lines)
        self.assertGreater(number_behind("test accuracy", lines), 60)
        self.assertLess(number_behind("epoch 4: loss", lines), 1.5)
        self.assert_compressed(lines, at_least=5)

    @pytest.mark.slow
    def test_text(self) -> None:
        lines = run_example("text", "--epochs", "1", "--ratio", "20")
        self.assertIn("weights            bit-identical on all workers", lines)
        self.assertLess(number_behind("loss", lines), 2)  # log(28) is 3.3
        self.assert_compressed(lines, at_least=19)

    @pytest.mark.slow
    def test_local_sgd(self) -> None:
        lines = run_example("local_sgd", "--epochs", "4", "--period", "8")
        # 18 steps an epoch: two rounds and one at its end.
        self.assertIn("rounds             12 in 72 steps", lines)
        self.assertIn("weights            bit-identical on all workers", lines)
        self.assertGreater(number_behind("test accuracy", lines), 60)
        self.assert_compressed(lines, at_least=5)

    @pytest.mark.slow
    def test_local_sgd_by_all_means(self) -> None:
        options = "--outer", "--sparsity", "0.9", "--synchronous-steps", "18"
        lines = run_example("local_sgd", "--period", "adaptive", *options)
        self.assertIn("weights            bit-identical on all workers", lines)
        self.assertGreater(number_behind("test accuracy", lines), 60)
        self.assert_compressed(lines, at_least=5)

    @pytest.mark.slow
    def test_horovod_fit(self) -> None:
        launch.skip_without_horovod()
        lines = run_example("horovod_fit", "--epochs", "5", launcher="horovod")
        self.assertIn("weights            bit-identical on all workers", lines)
        self.assertGreater(number_behind("test accuracy", lines), 60)
        self.assert_compressed(lines, at_least=5)

    @pytest.mark.slow
    def test_horovod_tape(self) -> None:
        launch.skip_without_horovod()
        lines = run_example("horovod_tape", "--epochs", "5", launcher="horovod")
        self.assertGreater(number_behind("test accuracy", lines), 60)

    @pytest.mark.slow
    def test_horovod_elastic(self) -> None:
        launch.skip_without_horovod()
        options = (
            *("--min-np", "1", "--network-interface", "lo"),
            *("--host-discovery-script", "echo localhost:2"),
        )
        how = {"launcher": "horovod", "options": options}
        lines = run_example("horovod_elastic", "--epochs", "5", **how)
        self.assertIn("weights            bit-identical on all workers", lines)
        self.assertGreater(number_behind("test accuracy", lines), 60)
        self.assert_compressed(lines, at_least=5)

    @pytest.mark.slow
    def test_split_layers_between_others(self) -> None:
        small = "--width", "256", "--steps", "2", "--batch-size", "4"
        lines = run_example("split_layers", *small)
        self.assertGreater(number_behind("gradients sent", lines), 0)

    @pytest.mark.extended
    def test_split_layers(self) -> None:
        lines = run_example("split_layers", "--features", "16", "--classes", "41")
        self.assertIn(f"parameters here    {16 * 21 + 41}", lines)
        self.assertLess(number_behind("loss", lines), 5)

    @pytest.mark.slow
    def test_cifar10(self) -> None:
        random = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/images.npz"
            np.savez(
                file,
                x_train=random.integers(0, 256, (96, 32, 32, 3), dtype=np.uint8),
                y_train=random.integers(0, 10, (96, 1)),
                x_test=random.integers(0, 256, (48, 32, 32, 3), dtype=np.uint8),
                y_test=random.integers(0, 10, (48, 1)),
            )
            arguments = ["--epochs", "2", "--batch-size", "8", "--sparsity", "0.99"]
            lines = run_example("cifar10", "--npz", file, "--limit", "32", *arguments)
        self.assertRegex("\n".join(lines), r"test accuracy +\d+\.\d\d% of 32 images")
        self.assertGreater(number_behind("sent per worker", lines), 0)

    @pytest.mark.slow
    def test_search(self) -> None:
        reason = "the extra `search` brings it"
        pytest.importorskip("keras_tuner", reason=reason)
        pytest.importorskip("tensorboard", reason=reason)
        command = [sys.executable, "-m", "tf_dgc.run", "-n", "2", "--strategy", "dgc"]
        small = "--trials", "2", "--epochs", "2"
        done = subprocess.run(
            [*command, "--output", "all", "examples/search.py", *small],
            cwd=launch.ROOT,
            env=os.environ | {"PYTHONPATH": str(launch.ROOT)},  # with scikit-learn
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = sorted(done.stdout.splitlines())
        found = [line.split("] ", 1) for line in lines]
        ours = [text for rank, text in found if rank == "[0"]
        self.assertEqual(ours, [text for rank, text in found if rank == "[1"])
        self.assertEqual(number_behind("trials", ours), 2)
        self.assertGreater(number_behind("accuracy   ", ours), 20)

    @pytest.mark.extended
    def test_map_reduce_regression(self) -> None:
        lines = run_example("map_reduce_regression", workers=4)
        four, one = (
            np.array(line.partition("[")[2].rstrip("]").split(), float)
            for line in lines
            if line.startswith("gradient, ")
        )
        self.assertTrue(
            any(line.startswith("gradient, 4 workers of 100") for line in lines)
        )
        np.testing.assert_allclose(four, one, rtol=1e-5)
        (line,) = (line for line in lines if line.startswith("largest difference"))
        self.assertLess(float(line.rpartition(" ")[2]), 1e-5)

    def test_map_reduce_regression_with_an_uneven_share(self) -> None:
        with self.assertRaisesRegex(AssertionError, "3 workers cannot share 400"):
            run_example("map_reduce_regression", workers=3)

    @pytest.mark.slow
    def test_recommender(self) -> None:
        small = "--items", "2000", "--ratings", "40000", "--epochs", "4"
        lines = run_example("recommender", *small, servers=1)
        (line,) = (line for line in lines if line.startswith("variance"))
        variance, error = map(float, re.findall(r"[0-9.]+", line))
        self.assertLess(error, 0.6 * variance)


if __name__ == "__main__":
    unittest.main()
