"""Tests of scripts/soak.py: its verdicts on series made up, and one short run."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import launch
import pytest
import soak

SCRIPT = launch.ROOT / "scripts" / "soak.py"


def windows(count: int = 40, **changed: list) -> list[soak.Window]:
    """Return a run in which nothing grows, with some series changed."""
    rows = []
    for i in range(count):
        known = soak.Window(100 * (i + 1), 500.0, 3.0 + i % 2, 5.0, 8.0, i, 9.0)
        own = {name: values[i] for name, values in changed.items()}
        rows.append(known._replace(**own))
    return rows


def answers(*workers: list[soak.Window], **options: float) -> list[bool]:
    return [verdict.well for verdict in soak.verdicts(workers, **options)]


class VerdictsTest(unittest.TestCase):
    def test_where_nothing_grows_all_is_well(self) -> None:
        self.assertEqual(answers(windows(), windows()), [True] * 4)

    def test_memory(self) -> None:
        leak = [500.0 + i for i in range(40)]
        self.assertAlmostEqual(soak.memory_growth(leak), 32.0)
        grown = windows(), windows(memory_mb=leak)
        self.assertEqual(answers(*grown), [False, True, True, True])
        self.assertEqual(answers(*grown, memory_mb=40.0), [True] * 4)

    def test_memory_of_the_first_tenth_does_not_count(self) -> None:
        start = [100.0] * 4 + [500.0] * 36
        self.assertEqual(soak.memory_growth(start), 0.0)

    def test_residual(self) -> None:
        for norms in (
            [1.1**i for i in range(40)],
            [3.0] * 39 + [float("nan")],
            [3.0] * 20 + [6.1] * 20,
        ):
            found = answers(windows(), windows(residual_norm=norms))
            self.assertEqual(found, [True, False, True, True])

    def test_drift(self) -> None:
        sums = [*range(20), 7, *range(21, 40)]
        found = soak.verdicts([windows(), windows(checksum=sums)])
        self.assertEqual([each.well for each in found], [True, True, False, True])
        self.assertIn("they part at step 2100", found[2].figure)

    def test_time(self) -> None:
        # The first window, which traces, does not count.
        for times, expected in (
            ([99.0] + [5.0] * 39, True),
            ([5.0] * 39 + [8.0], False),
        ):
            found = answers(windows(), windows(step_ms=times))
            self.assertEqual(found, [True, True, True, expected])
        late = windows(step_ms=[5.0] * 39 + [8.0])
        self.assertEqual(answers(late, late, time_ratio=2.0), [True] * 4)

    def test_asynchronous(self) -> None:
        # Weights may differ, but not at the end.
        ahead = windows(checksum=[*range(1, 40), 39])
        own = {"asynchronous": True}
        self.assertEqual(answers(windows(), ahead, **own), [True] * 5)
        ahead[-1] = ahead[-1]._replace(checksum=7)
        found = soak.verdicts([windows(), ahead], compressed=False, **own)
        self.assertEqual([each.well for each in found], [True, True, False, True])
        self.assertIn("they part at step 4000", found[2].figure)

    def test_weights_that_are_not_finite(self) -> None:
        lost = windows(weight_norm=[9.0] * 30 + [float("nan"), float("inf")] * 5)
        found = soak.verdicts([windows(), lost], asynchronous=True, compressed=False)
        self.assertEqual([each.well for each in found], [True, False, True, True])
        self.assertIn("not at step 3100", found[1].figure)

    def test_memory_of_servers(self) -> None:
        leak = windows(servers_mb=[(300.0, 300.0 + i) for i in range(40)])
        found = soak.verdicts([leak, leak], asynchronous=True)
        self.assertFalse(found[0].well)
        self.assertIn("grew by 0.0 MB, servers by 32.0 MB", found[0].figure)
        self.assertEqual(answers(leak, leak, memory_mb=40.0), [True] * 4)

    def test_too_few_windows(self) -> None:
        for workers in ([windows(2), windows(2)], [windows(4), windows(5)], []):
            with self.assertRaisesRegex(ValueError, "`workers` must have as many"):
                soak.verdicts(workers)


class ScriptTest(unittest.TestCase):
    def _soak(self, *more: str) -> tuple[str, list[list[dict]]]:
        """Return what a short run prints, and what its workers recorded."""
        with tempfile.TemporaryDirectory() as name:
            file, plot = pathlib.Path(name) / "soak.json", pathlib.Path(name) / "p.png"
            # Memory and times say nothing in so few steps.
            options = ["--memory-mb", "1e6", "--time-ratio", "1e6", "--window", "20"]
            options += ["--steps", "200", "--json", str(file), "--plot", str(plot)]
            result = subprocess.run(
                [sys.executable, str(SCRIPT), *options, *more],
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertGreater(plot.stat().st_size, 0)
            workers = json.loads(file.read_text())
        for rows in workers:
            self.assertEqual([row["step"] for row in rows], list(range(20, 201, 20)))
            for row in rows:
                self.assertGreater(min([row["memory_mb"], *row["servers_mb"]]), 50.0)
                self.assertGreater(row["step_ms"], 0.0)
                self.assertGreater(row["weight_norm"], 0.0)
        return result.stdout, workers

    @pytest.mark.processes
    @pytest.mark.timeout(200)
    @pytest.mark.slow
    def test_a_short_run(self) -> None:
        printed, workers = self._soak()
        self.assertEqual(printed.count("yes "), 4)
        self.assertGreater(workers[0][-1]["residual_norm"], 0.0)
        self.assertEqual(
            *[[row["checksum"] for row in rows] for rows in workers],
            "weights part",
        )

    @pytest.mark.processes
    @pytest.mark.timeout(200)
    @pytest.mark.slow
    def test_a_short_run_with_servers(self) -> None:
        printed, workers = self._soak("--servers", "1", "--compress")
        self.assertEqual(printed.count("yes "), 5)
        self.assertGreater(workers[1][-1]["residual_norm"], 0.0)
        self.assertEqual(*[rows[-1]["checksum"] for rows in workers])
        self.assertEqual(
            {len(row["servers_mb"]) for rows in workers for row in rows}, {1}
        )

    def test_bad_arguments(self) -> None:
        for options, message in (
            (["--steps", "5", "--window", "2"], "there must be three windows at least"),
            (
                ["--servers", "1", "--launch", "horovodrun"],
                "`--servers` needs run_local",
            ),
        ):
            result = subprocess.run(
                [sys.executable, str(SCRIPT), *options],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"{message}. Received", result.stderr)


if __name__ == "__main__":
    unittest.main()
