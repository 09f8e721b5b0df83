"""Tests of scripts/bench_network.py: its sums, its table, and one small run."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import bench_network
import launch
import pytest
from test_netlab import needs_lab

SCRIPT = launch.ROOT / "scripts" / "bench_network.py"


def result(method: str, **changed: object) -> dict:
    known = {"task": "exchange", "hosts": 4, "rate": "1gbit", "method": method}
    known |= {"transport": "horovod", "elements": 100, "batch_size": 0, "run": 1}
    known |= {"stats_sent": 400, "uncompressed": 0}
    return known | {"seconds": [3.0, 1.0, 2.0], "sent": [660.0] * 3} | changed


class SumsTest(unittest.TestCase):
    def test_expected_bytes(self) -> None:
        for method, changed, expected in (
            ("dense", {}, 600),  # 2 * 3 / 4 * 400
            ("dense", {"hosts": 2}, 400),
            ("averaging", {"stats_sent": 40}, 60),
            ("dgc", {"stats_sent": 10}, 30),  # 3 * 10
            ("dgc", {"stats_sent": 10, "uncompressed": 4}, 24),  # 6 + 3 * 6
            ("owners", {"stats_sent": 10, "stats_received": 12}, 12),
            ("auto", {"choice": "dgc", "stats_sent": 10}, 30),
            ("auto", {"choice": "dense"}, 600),
            ("alone", {}, 0),
            ("split", {"stats_sent": 40, "activations": 7}, 67),
        ):
            with self.subTest(method, **changed):
                found = bench_network.expected_bytes(result(method, **changed))
                self.assertEqual(found, expected)

    def test_split_layers_send_activations_once_and_their_gradients(self) -> None:
        # Of 9-4-4-1000 by rows, columns, rows: half of 9 inputs, 4 units, there and
        # back; 4 inputs, there and back, half of the bias; 1000 units, there and back;
        # two numbers of rows, a weight.
        expected = 4 * (4.5 + 8 + 8 + 2 + 2000 + 5)
        self.assertEqual(bench_network.activations(2, 1, 4), expected)

    def test_join_takes_the_mean_of_bytes_and_the_slowest_of_an_exchange(self) -> None:
        none = {"sent_again": [0, 0]}
        workers = [
            {"seconds": [1.0, 5.0], "sent": [10, 20], "received": [0, 2]} | none,
            {"seconds": [2.0, 4.0], "sent": [30, 40], "received": [4, 2]} | none,
        ]
        joined = bench_network.join(workers, "exchange")
        expected = {"seconds": [2.0, 5.0], "sent": [20, 30], "received": [2, 2]}
        self.assertEqual(joined, expected | none)
        self.assertEqual(bench_network.join(workers, "fit")["seconds"], [1.5, 4.5])


class RingTest(unittest.TestCase):
    def test_hosts_meet_and_measure_until_one_is_gone(self) -> None:
        hosts, met = ["127.0.0.1", "127.0.0.2"], []

        def work(index: int) -> float:
            with bench_network.Ring(hosts, index) as ring:
                for _ in range(3):
                    met.append(index)
                    ring.meet()
                    # Nobody is a round ahead of the other.
                    self.assertLessEqual(abs(2 * met.count(0) - len(met)), 1)
                found = ring.bandwidth()
                if index:
                    with self.assertRaisesRegex(ConnectionError, "gone|reset|pipe"):
                        ring.meet()
                return found

        with concurrent.futures.ThreadPoolExecutor() as pool:
            for found in pool.map(work, range(2)):
                self.assertGreater(found, 0.0)


class TableTest(unittest.TestCase):
    def test_runs_are_pooled_and_compared(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            rows = [result("dense"), result("dense", run=2, seconds=[9.0, 9.0])]
            rows += [result("dgc", stats_sent=10, sent=[33.0], seconds=[0.5])]
            for i, row in enumerate(rows):
                (folder / f"{i}.json").write_text(json.dumps(row))
            bench_network.report(folder)
            table = (folder / "table.md").read_text()
            self.assertTrue((folder / "plot.png").exists())
        cells = [line.split(" | ") for line in table.splitlines()]
        self.assertEqual(
            cells[2][3:7], ["dense/horovod", "3", "1 to 9", "5"], msg=table
        )
        self.assertEqual(cells[3][7:], ["", "6.0", "33", "30", "1.100 |"])

    def test_no_results_no_table(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            bench_network.report(pathlib.Path(name))
            self.assertEqual(os.listdir(name), [])

    def test_jobs_that_are_there_are_not_repeated(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            args = argparse.Namespace(
                task="exchange",
                rows=["dense/horovod", "dgc/horovod", "dgc/collective"],
                runs=[1],
                rates=["1gbit"],
                hosts=[2],
                results=pathlib.Path(name),
                elements=1000,
                width=64,
                batch_size=8,
                sleep=0.0,
            )
            first = (1, "1gbit", 2)
            expected = [
                (*first, "horovod", ["dense", "dgc"]),
                (*first, "collective", ["dgc"]),
            ]
            self.assertEqual(list(bench_network.jobs(args)), expected)
            bench_network.file_of(args, *first, "collective", "dgc").write_text("{}")
            self.assertEqual(list(bench_network.jobs(args)), expected[:1])
            args.elements = 2000
            self.assertEqual(list(bench_network.jobs(args)), expected)
            args.task = "fit"  # where methods do not share processes
            self.assertEqual(len(list(bench_network.jobs(args))), 3)


class ArgumentsTest(unittest.TestCase):
    def test_bad_arguments(self) -> None:
        for arguments, message in (
            (["exchange", "--rows", "averaging/hybrid"], "Received: averaging/hybrid"),
            (["fit", "--rows", "dense"], "Received: dense"),
            (["fit", "--steps", "0"], "`--steps` must be at least 1"),
            (["sum"], "invalid choice: 'sum'"),
            (["exchange", "--predict"], "`--predict` is for `fit`"),
            (["fit", "--predict", "--hosts", "1", "2"], "on 2 or more hosts"),
        ):
            with self.subTest(arguments=arguments):
                completed = self._run(*arguments, timeout=60)
                self.assertEqual(completed.returncode, 2)
                self.assertIn(message, completed.stderr)

    def _run(self, *arguments: str, timeout: int) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, SCRIPT, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    @pytest.mark.processes
    @needs_lab
    def test_a_rate_that_is_none(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            wrong = ["exchange", "--rates", "fast", "--results", name]
            completed = self._run(*wrong, timeout=60)
        self.assertEqual(completed.returncode, 125)
        self.assertIn("bench_network: `rate` must be", completed.stderr)


@pytest.mark.processes
class RunTest(unittest.TestCase):
    @needs_lab
    @pytest.mark.slow
    def test_bytes_on_the_wire_are_those_of_the_formulae(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            rows = ["dense/collective", "dgc/collective"]
            small = ["--elements", "1000000", "--steps", "2", "--timeout", "200"]
            small += ["--hosts", "2", "--rates", "1gbit", "--results", name]
            completed = subprocess.run(
                [sys.executable, SCRIPT, "exchange", "--rows", *rows, *small],
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
            )
            folder = pathlib.Path(name)
            log = "".join(file.read_text() for file in folder.glob("*.log"))
            self.assertEqual(completed.returncode, 0, completed.stdout + log)
            found = [json.loads(f.read_text()) for f in sorted(folder.glob("*.json"))]
        dense, compressed = found
        self.assertEqual(dense["stats_sent"], 4_000_000)
        self.assertLess(compressed["stats_sent"], 4_000_000 / 500)
        for run in found:
            expected = bench_network.expected_bytes(run)
            for name in ("sent", "received"):
                for octets, again in zip(run[name], run["sent_again"], strict=True):
                    self.assertGreater(octets, expected)
                    # Headers, acknowledgements, gRPC, the barriers around the step.
                    self.assertLess(octets, 1.1 * (expected + again) + 10_000)


if __name__ == "__main__":
    unittest.main()
