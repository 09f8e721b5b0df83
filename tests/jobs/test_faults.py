"""What happens to one worker ends all: each pair of settings of scripts/faults.py."""

import itertools
import signal
import subprocess
import sys
import textwrap
import unittest
from collections.abc import Iterable
from typing import ClassVar

import faults
import launch
import pytest
from absl.testing import parameterized
from test_netlab import obstacle

CHOSEN = faults.covering(faults.product())
# Of these by default: each kind, each way, each strategy and each moment.
FEW = faults.covering(CHOSEN, set)
# Of the workers; longer than they come one after the other where much else runs.
TIMEOUT = 12.0
SIDE_BY_SIDE = 4


def outcome(**changed: object) -> faults.Outcome:
    known = {
        "case": faults.Case("kill", "horovod", "dgc", "sparse"),
        "seconds": 1.5,
        "codes": [1],
        "said": "Process 1 | exit",
        "problems": [],
    }
    return faults.Outcome(**(known | changed))


class CasesTest(parameterized.TestCase):
    def test_each_pair_is_met_once_at_least(self) -> None:
        wanted = {pair for case in faults.product() for pair in case.pairs}
        met = {pair for case in CHOSEN for pair in case.pairs}
        self.assertEqual(wanted, met)
        self.assertLess(len(CHOSEN), 45)
        self.assertEqual(CHOSEN, faults.covering(faults.product()))

    def test_by_default_each_setting_is_met(self) -> None:
        self.assertContainsSubset(FEW, CHOSEN)
        for part in ("kind", "way", "strategy", "moment"):
            self.assertEqual(
                {getattr(case, part) for case in FEW},
                {getattr(case, part) for case in faults.product()},
            )

    def test_what_makes_no_sense_is_left_out(self) -> None:
        for case, expected in (
            (("kill", "hybrid", "averaging", "round"), True),
            (("kill", "hybrid", "dgc", "round"), False),
            (("kill", "hybrid", "dense", "warmup"), False),
            (("network", "run_local", "dgc", "start"), False),
            (("interrupt", "run_local", "averaging", "round"), False),
        ):
            with self.subTest(case):
                self.assertEqual(faults.Case(*case).makes_sense, expected)
                self.assertEqual(faults.Case(*case) in faults.product(), expected)

    def test_who_tells(self) -> None:
        own = "[1]<stderr>:ArithmeticError: what one rank met\n"
        other = "[0]<stderr>:UnknownError: Worker 1 failed: ArithmeticError\n"
        by_chance = "Terminating remaining workers after failure of Process 0.\n"
        rightly = "Process 1 exit with status code 1.\n" + by_chance.replace("0", "1")
        for kind, text, expected in (
            ("raise", own + other + rightly, "UnknownError: Worker 1 failed"),
            ("raise", own + rightly, "Process 1 exit"),
            ("raise", own + by_chance, "ArithmeticError"),
            ("raise", own, ""),  # nobody else has said anything
            ("kill", own + by_chance, ""),
            ("raise", by_chance, ""),
        ):
            case = faults.Case(kind, "hybrid", "split", "activations")
            with self.subTest(text, kind=kind):
                said = faults.said_in(text, case, 1)
                self.assertEqual(said[: len(expected) or None], expected)

    def test_table(self) -> None:
        problem = outcome(seconds=None, problems=["the others went on"], codes=[0])
        lines = faults.table([outcome(), problem]).splitlines()
        self.assertEqual(
            lines[2], r"| kill | horovod | dgc | sparse | 1.5 | 1 | Process 1 \| exit |"
        )
        self.assertIn("| - | 0 | PROBLEM: the others went on |", lines[3])
        self.assertEqual({line.replace(r"\|", "").count("|") for line in lines}, {8})


class Faults(parameterized.TestCase):
    __test__ = False
    cases: ClassVar[list[faults.Case]]

    def check_way(self, way: str) -> None:
        if way in ("horovod", "hybrid"):
            launch.skip_without_horovod()
        self._check(each for each in self._of(way) if each.kind != "network")

    def check_network(self) -> None:
        if why := obstacle():
            self.skipTest(f"no laboratory here: {why}")
        ways = ["TF_CONFIG"] if launch.horovod_missing() else faults.WAYS
        found = itertools.chain(*map(self._of, ways))
        self._check(each for each in found if each.kind == "network")

    def _of(self, way: str) -> list[faults.Case]:
        return [case for case in self.cases if case.way == way]

    def _check(self, cases: Iterable[faults.Case], rank: int = 1) -> None:
        cases = list(cases)
        outcomes = faults.run_all(cases, TIMEOUT, SIDE_BY_SIDE, rank)
        problems = [each for each in outcomes if each.problems]
        self.assertEmpty(problems, faults.table(problems))
        self.assertLen(outcomes, len(cases))


@pytest.mark.slow
@pytest.mark.processes
class OtherPairsTest(Faults):
    __test__ = True
    cases: ClassVar = [case for case in CHOSEN if case not in FEW]

    @parameterized.parameters(*faults.WAYS)
    @pytest.mark.timeout(600)
    def test_when_something_happens_to_one_all_end(self, way: str) -> None:
        self.check_way(way)

    @pytest.mark.timeout(600)
    def test_when_one_loses_its_network_all_end(self) -> None:
        self.check_network()


@pytest.mark.processes
class FaultsTest(Faults):
    __test__ = True
    cases: ClassVar = FEW

    @pytest.mark.timeout(600)
    def test_when_something_happens_to_one_all_end(self) -> None:
        self.check_way("TF_CONFIG")

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_so_they_do_over_horovod(self) -> None:
        self.check_way("horovod")

    @parameterized.parameters("run_local", "hybrid")
    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_so_they_do_in_other_ways(self, way: str) -> None:
        self.check_way(way)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_when_one_loses_its_network_all_end(self) -> None:
        self.check_network()

    # It has the service by which TensorFlow's workers know each other.
    @pytest.mark.slow
    def test_when_rank_0_is_killed_all_end(self) -> None:
        self._check([faults.Case("kill", "TF_CONFIG", "dgc", "sparse")], rank=0)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_when_something_else_happens_to_rank_0_all_end(self) -> None:
        kinds = ("stop", "raise")
        cases = [faults.Case(kind, "TF_CONFIG", "dgc", "sparse") for kind in kinds]
        self._check(cases, rank=0)

    @pytest.mark.extended
    def test_what_hangs_at_the_exit_of_a_worker_that_failed_is_ended(self) -> None:
        code = """
    import atexit, sys, threading
    import tensorflow as tf
    from tf_dgc.transports import watchdog
    atexit.register(threading.Event().wait)  # as Horovod waits for who is gone
    watchdog._EXIT_SECONDS = 1
    watchdog.Watchdog(tf.Variable(0), 100.0, lambda: None)
    raise ArithmeticError("this worker's own")
    """
        process = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            cwd=launch.ROOT,
            text=True,
            timeout=120,
            check=False,
        )
        self.assertEqual(process.returncode, -signal.SIGALRM)
        self.assertIn("this worker's own", process.stderr)


if __name__ == "__main__":
    unittest.main()
