"""Elastic training: what is kept back outlives the worker that kept it."""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, ClassVar
from unittest import mock

import launch
import pytest
import tensorflow as tf
from absl.testing import parameterized
from ledgers import compressing, exchange
from loopback import Loopback, run_workers

import tf_dgc
from tf_dgc.exchanges import Ledger
from tf_dgc.exchanges import records as saving

SCRIPT = str(launch.ROOT / "tests" / "jobs" / "elastic.py")


def run_elastic(how: str, hosts: str, workers: int) -> list[dict[str, Any]]:
    """Run the script until it ends; return what its workers told."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "hosts").write_text(hosts)
        discover = folder / "hosts.sh"
        discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        discover.chmod(0o700)
        completed = launch.run(
            SCRIPT,
            name,
            how,
            workers=workers,
            launcher="horovod",
            options=(
                *("--min-np", "1", "--max-np", "3", "--network-interface", "lo"),
                *("--host-discovery-script", str(discover)),
            ),
            timeout=250,
        )
        if completed.returncode:
            raise AssertionError(completed.stdout[-5000:] + completed.stderr[-5000:])
        return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


class _Elastic(parameterized.TestCase, tf.test.TestCase):
    how: ClassVar[str]
    hosts: ClassVar[str]
    sizes: ClassVar[tuple[int, ...]]
    told: ClassVar[list[dict[str, Any]] | Exception]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        launch.skip_without_horovod()
        try:
            cls.told = run_elastic(cls.how, cls.hosts, cls.sizes[0])
        except (AssertionError, subprocess.TimeoutExpired) as error:
            cls.told = error

    def events(self, event: str) -> list[dict[str, Any]]:
        if isinstance(self.told, Exception):
            raise self.told
        return [record for record in self.told if record["event"] == event]

    def test_workers_come_and_go(self) -> None:
        begun = [record["size"] for record in self.events("begin")]
        self.assertEqual(begun, [size for size in self.sizes for _ in range(size)])
        self.assertLen(self.events("end"), self.sizes[-1])

    def test_weights_are_the_same_bits_on_all_workers_in_the_end(self) -> None:
        ends = self.events("end")
        for one in ends[1:]:
            self.assertEqual(one["weights"], ends[0]["weights"])


class _Committed(_Elastic):
    def test_what_all_keep_back_is_conserved(self) -> None:
        begun = self.events("begin")[self.sizes[0] :]
        for size, before in zip(self.sizes[1:], self._kept_by_phase(), strict=True):
            self.assertGreater(min(before["sums"]), 0.0)
            for _ in range(size):
                after = begun.pop(0)
                self.assertAllClose(after["sums"], before["sums"], 1e-6, 0.0)
                # The warm-up is over, and stays so.
                self.assertGreater(min(after["steps"]), 3)

    def _kept_by_phase(self) -> list[dict[str, Any]]:
        """Return what was told last by those that then began anew."""
        last, found = None, []
        for record in self.events("kept") and self.told:
            if record["event"] == "kept":
                last = record
            elif record["event"] == "begin" and last is not None:
                found.append(last)
                last = None
        return found

    def test_no_epoch_is_lost_or_repeated(self) -> None:
        epochs = self.events("epoch")
        everywhere = sorted({record["epochs"] for record in epochs})
        self.assertEqual(everywhere, list(range(len(everywhere))))
        for pid in {record["pid"] for record in epochs}:
            own = [record["epochs"] for record in epochs if record["pid"] == pid]
            self.assertEqual(own, list(range(own[0], own[0] + len(own))))

    def test_loss_goes_on_falling(self) -> None:
        losses = {r["epochs"]: r["loss"] for r in self.events("epoch")}
        for begun in self.events("begin")[self.sizes[0] :]:
            self.assertLess(losses[begun["epochs"]], 0.5 * losses[0])
        self.assertLess(losses[max(losses)], 0.2 * losses[0])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
class AddRemoveTest(_Committed):
    """A host of one worker comes, and goes; `fit` with an optimizer."""

    how, hosts, sizes = "add_remove", "localhost:2", (2, 3, 2)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
class DieTest(_Committed):
    """A worker is killed after a commit; a loop with a tape."""

    how, hosts, sizes = "die", "localhost:2\n127.0.0.1:1", (3, 2)

    def test_what_was_traced_for_other_workers_is_refused(self) -> None:
        for record in self.events("stale"):
            self.assertIn("have changed since this tf.function", record["error"])
        self.assertLen(self.events("stale"), 2)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
class DieEarlyTest(_Elastic):
    """A worker is killed before anybody has committed; `fit` with an optimizer."""

    how, hosts, sizes = "die_early", "localhost:2\n127.0.0.1:1", (3, 2)

    def test_training_begins_anew(self) -> None:
        begun = self.events("begin")
        self.assertEqual([record["epochs"] for record in begun], [0] * 5)
        self.assertEqual([record["sums"] for record in begun], [[]] * 5)


del _Committed, _Elastic


@pytest.mark.long
class SharesTest(parameterized.TestCase, tf.test.TestCase):
    """The mathematics of it, between threads."""

    CONFIG = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)

    @parameterized.parameters((3, 2), (2, 5), (1, 4), (4, 1))
    @pytest.mark.few(1, 4)
    def test_sums_stay_whatever_the_number_of_workers(self, old: int, new: int) -> None:
        variable = tf.Variable(tf.zeros([50]))

        def step(synchronizer: Ledger, owner: Any) -> None:
            rank = synchronizer.transport.rank
            gradient = tf.random.stateless_normal([50], [rank, 1])
            exchange(synchronizer, owner, [gradient], [variable])

        def before(transport: Loopback) -> list[saving.Record]:
            synchronizer = compressing(transport, self.CONFIG)
            owner = mock.Mock()
            for _ in range(3):
                step(synchronizer, owner)
            return saving.summed(transport, synchronizer.records())

        kept = run_workers(old, before)[0]

        def after(transport: Loopback) -> tuple[Any, Any]:
            synchronizer = compressing(transport, self.CONFIG)
            step(synchronizer, mock.Mock())
            synchronizer.begin_anew(saving.shares(kept, old, new))
            shared = saving.summed(transport, synchronizer.records())
            owner = mock.Mock()
            step(synchronizer, owner)
            return shared, synchronizer.records()

        for shared, taken in run_workers(new, after):
            self.assertEqual([r.step for r in shared], [3])
            for one, two in zip(kept, shared, strict=True):
                self.assertAllClose(one.arrays, two.arrays, 1e-6, 1e-6)
            self.assertEqual([record.step for record in taken], [4])


@pytest.mark.slow
@pytest.mark.processes
class WithoutHorovodTest(tf.test.TestCase):
    def test_the_import_says_what_is_missing(self) -> None:
        code = """
import sys
sys.modules["horovod"] = None
import tf_dgc.horovod.elastic
"""
        python = [sys.executable, "-c", code]
        done = subprocess.run(
            python, cwd=launch.ROOT, capture_output=True, text=True, timeout=120
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("Elastic training needs Horovod", done.stderr)


@pytest.mark.processes
class ArgumentsTest(parameterized.TestCase, tf.test.TestCase):
    """What is refused, by one worker that horovodrun has not started."""

    def setUp(self) -> None:
        super().setUp()
        launch.skip_without_horovod()

    @pytest.mark.slow
    def test_bad_arguments_are_refused_and_a_commit_is_restored(self) -> None:
        completed = launch.run(SCRIPT, ".", "arguments", workers=1, timeout=100)
        self.assertEqual(completed.returncode, 0, completed.stderr)
        expected = (
            "`optimizer` must be one of Keras",
            "`optimizer` must be one of Keras",
            "`model` must be built first",
            "Object of type object is not JSON serializable",
            "4 True",
            "taken over",
            "Elastic training cannot be hierarchical",
        )
        lines = completed.stdout.splitlines()
        for line, part in zip(lines, expected, strict=True):
            self.assertIn(part, line)


if __name__ == "__main__":
    tf.test.main()
