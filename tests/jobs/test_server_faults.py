"""Drawn faults of workers of parameter servers: real servers, real workers.

Something happens to a worker at some moment; another takes its place, or it goes on.
All others end, and what the servers hold has each push once: none twice, and of those
that were complete none too few, but for what a worker that died had kept back.
"""

import contextlib
import dataclasses
import pathlib
import random
import signal
import tempfile
import time
import unittest
from typing import Any

import numpy as np
import pytest
import serving
from absl.testing import parameterized

SCRIPT = pathlib.Path(__file__).parent / "server_fault.py"
LIVENESS = 4.0
STEPS = 6  # of an epoch; a fit has two


@dataclasses.dataclass(frozen=True)
class Case:
    """What is drawn from a seed."""

    workers: int
    servers: int
    fits: int
    kind: str  # kill, stop or exit
    whom: int
    at: int  # step
    delay: float  # seconds after it
    settings: dict[str, Any]

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        """Draw a case."""
        draw = random.Random(f"faults {seed}")
        workers, synchronous = draw.randint(1, 3), draw.random() < 0.4
        settings = {
            "synchronous": synchronous,
            "compressed": not synchronous and draw.random() < 0.4,
            "table": not synchronous and draw.random() < 0.5,
            "backup": draw.random() < 0.6,
            "liveness": LIVENESS,
            "steps": STEPS,
        }
        if not synchronous and draw.random() < 0.3:
            settings["max_staleness"] = draw.randint(0, 3)
        kind = draw.choice(["kill", "stop", "exit"])
        # Within a common step it may be the one that takes it, and ends the others.
        delay = 0.0 if synchronous or kind == "exit" else draw.random() * 0.1
        fits = draw.randint(1, 2)
        at = draw.randint(1, 2 * STEPS)
        place = draw.randrange(workers)
        return cls(
            workers,
            draw.randint(1, 2),
            fits,
            kind,
            place,
            at,
            delay,
            settings | {"fits": fits},
        )


@pytest.mark.processes
@pytest.mark.timeout(400)
class ServerFaultsTest(parameterized.TestCase):
    @parameterized.parameters(range(1))
    @pytest.mark.extended
    def test_all_end_and_each_push_counts_once(self, seed: int) -> None:
        self.check(Case.drawn(seed))

    @parameterized.parameters(range(1, 25))
    @pytest.mark.slow
    def test_so_it_is_with_more_faults(self, seed: int) -> None:
        self.check(Case.drawn(seed))

    def check(self, case: Case) -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            job = serving.Job(case.workers, case.servers, SCRIPT, TF_DGC_TIMEOUT="60")
            stack.enter_context(job)
            given = {"folder": folder, **case.settings}
            fault = [case.kind, case.at, case.delay]
            tasks = [
                job.worker(k, "train", fault=fault if k == case.whom else None, **given)
                for k in range(case.workers)
            ]
            struck = tasks[case.whom]
            struck.wait_for("the fault comes", 200)
            if case.kind == "stop":
                time.sleep(1.5 * LIVENESS)  # nobody waits for it any more
                struck.send(signal.SIGCONT)
            else:
                self.assertNotEqual(struck.end(), 0)
                job.environment["TF_DGC_ATTEMPT"] = "1"
                tasks[case.whom] = job.worker(case.whom, "train", **given)
            found = [job.result_of(task) for task in tasks]
            steps = [
                pathlib.Path(folder, f"steps-{k}").stat().st_size
                for k in range(case.workers)
            ]
        self.check_counts(case, found, sum(steps))

    def check_counts(self, case: Case, found: list[dict[str, Any]], steps: int) -> None:
        most = steps + (case.kind != "stop")  # a push may not have been noted
        values = found[0]["values"]
        for name in values:
            value = np.max([each["values"][name] for each in found], 0)
            self.assertTrue(np.isfinite(value).all())
            kept = sum(np.array(each["kept"]) for each in found)
            counted = value - kept if name == "kernel" else value
            self.assertLessEqual(counted.max(), most, f"{name}, {case}")
            least = steps
            if case.settings["synchronous"]:
                least = max(each["pushes"] for each in found)
                self.assertEqual(counted.min(), counted.max(), f"{name}, {case}")
            elif case.settings["compressed"] and name == "kernel":
                # What a process had kept back is lost with it.
                least = sum(each["pushes"] for each in found)
            self.assertGreaterEqual(counted.min(), least, f"{name}, {case}")


if __name__ == "__main__":
    unittest.main()
