"""Tests of scripts/parity.py: settings of its rows, and one short run."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import launch
import parity
import pytest

SCRIPT = launch.ROOT / "scripts" / "parity.py"


class SettingsTest(unittest.TestCase):
    args = argparse.Namespace(task="digits", warmup_epochs=2)

    def test_settings_are_of_the_kind_of_a_row(self) -> None:
        for row, kind in (
            ("dgc", {}),
            ("outer_16", parity.AVERAGING),
            ("downpour", parity.SERVED),
            ("own:servers=2,fetch_period=4", parity.SERVED),
        ):
            found = parity.settings_of(self.args, row)
            known = {*parity.DEFAULTS, *parity.TASKS["digits"], "warmup_epochs", *kind}
            self.assertEqual(set(found), known)
        self.assertEqual((found["servers"], found["fetch_period"]), (2, 4))
        self.assertEqual(found["sparsity"], 0.99)

    def test_unknown_settings(self) -> None:
        for row in ("dgc:fetch_period=4", "downpour:period_=4", "nobody"):
            with self.assertRaises(ValueError):
                parity.settings_of(self.args, row)


class ScriptTest(unittest.TestCase):
    @pytest.mark.processes
    @pytest.mark.timeout(280)
    @pytest.mark.slow
    def test_a_short_run(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            options = ["--epochs", "2", "--limit", "512", "--warmup-epochs", "0"]
            options += ["--workers", "2", "--seeds", "1", "--results", name]
            options += ["--rows", "dense", "downpour_dgc"]
            result = subprocess.run(
                [sys.executable, str(SCRIPT), "digits", *options],
                capture_output=True,
                text=True,
                timeout=270,
                check=False,
            )
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            files = sorted(pathlib.Path(name).glob("*.json"))
            dense, served = (json.loads(file.read_text()) for file in files)
            table = (pathlib.Path(name) / "table.md").read_text()
        self.assertIn("| digits | 2 | 2 | downpour_dgc | 1 |", table)
        self.assertEqual((dense["steps"], served["steps"]), (16, 16))
        self.assertAlmostEqual(dense["sent_bytes"] / dense["dense_bytes"], 1, places=3)
        self.assertEqual(served["dense_bytes"], dense["dense_bytes"])
        self.assertLess(served["sent_bytes"], dense["dense_bytes"] / 10)
        self.assertGreater(served["received_bytes"], 0)
        self.assertGreaterEqual(served["staleness"], 0.0)


if __name__ == "__main__":
    unittest.main()
