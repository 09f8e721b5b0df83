"""Workers that have unequal shares of the data take the same number of steps."""

import pathlib
import tempfile

import inputs
import pool
import pytest
from absl.testing import parameterized

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


class UnequalTest(parameterized.TestCase):
    @parameterized.parameters("known files", "worker")
    def test_all_rows_are_seen_once_and_who_ends_first_takes_part(
        self, make: str
    ) -> None:
        self.check("collective", make, 1)

    @pytest.mark.extended
    def test_so_they_are_where_nobody_knows_how_many_there_are(self) -> None:
        self.check("collective", "file", 1)

    @parameterized.parameters(("horovod", "file", 3), ("collective", "function", 3))
    @pytest.mark.slow
    def test_so_they_are_in_executions_of_several_steps(
        self, transport: str, make: str, steps_per_execution: int
    ) -> None:
        self.check(transport, make, steps_per_execution)

    def check(self, transport: str, make: str, steps_per_execution: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            inputs.write(pathlib.Path(folder))
            found = pool.run(
                transport,
                2,
                "inputs",
                "trained",
                transport=transport,
                make=make,
                folder=folder,
                steps_per_execution=steps_per_execution,
            )
        self.assertLen({each["crc"] for each in found}, 1)
        for key, epochs in (("seen", 2), ("looped", 1)):
            steps = [each[key] for each in found]
            self.assertLen({len(own) for own in steps}, 1)
            rows = [x for own in steps for step in own for x in step]
            self.assertCountEqual(rows, inputs.numbers() * epochs)
        self.assertEqual({each["predicted"] for each in found}, {len(rows)})


class UnseededTest(parameterized.TestCase):
    @pytest.mark.extended
    def test_what_is_drawn_without_a_seed_is_alike_or_refused(self) -> None:
        self.check("collective", "dense")

    @parameterized.parameters(("collective", "dgc"), ("horovod", "averaging"))
    @pytest.mark.slow
    def test_under_other_strategies_too(self, transport: str, kind: str) -> None:
        self.check(transport, kind)

    def check(self, transport: str, kind: str) -> None:
        """Train without seeds on two workers."""
        found = pool.run(
            transport,
            2,
            "inputs",
            "drawn_without_seeds",
            transport=transport,
            kind=kind,
        )
        self.assertLen({each["crc"] for each in found}, 1)
        steps = list(zip(*(each["seen"] for each in found), strict=True))
        epochs = [
            sorted(x for step in steps[i : i + 3] for own in step for x in own)
            for i in range(0, 21, 3)
        ]
        self.assertEqual(epochs[:5], [list(range(12))] * 5)
        self.assertEqual(epochs[5], epochs[6])
        self.assertLen(set(epochs[5]), 12)
        for each in found:
            self.assertIn("The workers read different data", each["stopped"])
