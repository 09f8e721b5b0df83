"""All workers end training after the same batch, whichever of them asks for it."""

import unittest
from typing import Any

import pool
import pytest
import stops
from absl.testing import parameterized

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

ALL = {"batches": [5, 5]}
SOME = {"batches": [None, 4]}
# Steps of these exchange nothing, and tell nothing; they count rows.
ALL_IN_SILENCE = ALL | {"compile": {"least": 1e9}}
SOME_IN_SILENCE = SOME | {"compile": {"least": 1e9}}
CASES: list[dict[str, Any]] = [
    ALL,
    SOME,
    {"batches": [7, 4]},
    {"batches": [12, 12]},  # the last of the epoch
    {"batches": [None, -1]},  # at its end
    {"batches": [4, None], "validates": True},
    {"batches": [4, 4], "compile": {"steps_per_execution": 3}},
    {"batches": [None, 4], "compile": {"steps_per_execution": 3}},
    {"batches": [5, 5], "compile": {"accumulate": 4}},
    {"batches": [None, 5], "compile": {"accumulate": 4}},
    {"batches": [None, 3], "compile": {"run_eagerly": True}},
    ALL_IN_SILENCE,
    SOME_IN_SILENCE,
]


class EndsTogetherTest(parameterized.TestCase):
    def check(self, kind: str, cases: list[dict[str, Any]]) -> None:
        job = "collective", 2, "stops", "ended"
        ranks = pool.run(*job, timeout=300, kind=kind, cases=cases)
        for case, *found in zip(cases, *ranks, strict=True):
            with self.subTest(kind=kind, **case):
                self.check_one(kind, case, found)

    def check_one(self, kind: str, case: Any, found: list[Any]) -> None:
        one, two = found
        self.assertLen(one["loss"], 1)
        self.assertEqual(one["loss"], two["loss"])
        self.assertEqual(one["trained"], two["trained"])
        self.assertEqual(one["counted"], two["counted"])
        for own in found:
            if (expected := own.pop("expected", None)) is not None:
                self.assertEqual(own, expected)
        asked = [b for b in case["batches"] if b is not None]
        if kind != "averaging":
            self.assertEqual(one["iterations"], two["iterations"])
            if len(asked) == 1 and asked[0] > 0 and not case.get("compile"):
                self.assertEqual(one["iterations"], asked[0] + 1)

    @pytest.mark.extended
    def test_whoever_asks(self) -> None:
        self.check("dense", [ALL, SOME, ALL_IN_SILENCE, SOME_IN_SILENCE])

    @pytest.mark.slow
    def test_averaging(self) -> None:
        self.check("averaging", [ALL, SOME])

    @parameterized.parameters(*stops.STRATEGIES)
    @pytest.mark.slow
    def test_in_all_settings(self, kind: str) -> None:
        self.check(kind, CASES)

    @pytest.mark.slow
    def test_who_has_less_data_is_named(self) -> None:
        with self.assertRaises(pool.WorkerError) as caught:
            pool.run("collective", 2, "stops", "ends_early", rank_of_less=1)
        text = " ".join(e["message"] for e in caught.exception.errors.values())
        self.assertIn("worker 1 at the end of its data, after 5 batches", text)
        self.assertIn("worker 0 in a step", text)
        self.assertNotIn("metric", text)


if __name__ == "__main__":
    unittest.main()
