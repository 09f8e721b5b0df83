"""Two sites of two workers each, which are processes of one machine."""

import tempfile
import unittest
from typing import Any

import numpy as np
import pool
import pytest


@pytest.mark.processes
class SiteJobsTest(unittest.TestCase):
    def found(self, kind: str, transport: str, sites: str) -> list[Any]:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        arguments = {"transport": transport, "kind": kind, "sites": sites}
        workers = sites.count(",") + 1
        place = transport, workers, "site_jobs", "trained"
        return pool.run(*place, folder=folder, **arguments)

    def check(self, kind: str, transport: str) -> dict[str, Any]:
        found = self.found(kind, transport, "a,a,b,b")
        self.assertEqual([each.pop("rank") for each in found], list(range(4)))
        steps = [each.pop("steps") for each in found]
        self.assertEqual(steps[0], steps[1])
        self.assertEqual(steps[2], steps[3])
        if kind != "dense":
            self.assertNotEqual(steps[0], steps[2])
        norms = [(each.pop("norm"), each.pop("restored")) for each in found]
        for norm, restored in norms:
            self.assertEqual(norm, restored)
        self.assertEqual(found, [found[0]] * 4)
        one = found[0]
        self.assertEqual((one["sites"], one["together"]), (2, 2))
        self.assertEqual(one["left"], 0.0)
        self.assertEqual(len(one["files"]), 5)
        self.assertLess(one["history"]["loss"][-1], one["history"]["loss"][0])
        return one

    @pytest.mark.slow
    def test_rounds_of_one_step_are_dense_training(self) -> None:
        found = self.check("dense", "collective")
        (alone,) = self.found("dense", "local", "a")
        self.assertGreaterEqual(found["rounds"], 12)
        for name, values in alone["history"].items():
            np.testing.assert_allclose(found["history"][name], values, 1e-5)

    @pytest.mark.extended
    def test_sites_average_in_flight_over_horovod(self) -> None:
        self.check("in flight", "horovod")

    @pytest.mark.slow
    def test_sites_compress_within_over_collectives(self) -> None:
        self.check("dgc", "collective")

    @pytest.mark.slow
    def test_sites_average_in_flight_over_collectives(self) -> None:
        self.check("in flight", "collective")

    @pytest.mark.slow
    def test_sites_compress_within_over_both(self) -> None:
        self.check("dgc", "hybrid")


if __name__ == "__main__":
    unittest.main()
