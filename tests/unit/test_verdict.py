"""Tests of the comparison of one worker with N, on runs made up here."""

import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl.testing import parameterized

from tf_dgc.verify import records, verdict
from tf_dgc.verify.records import RecordedRun, RecordedSample, RecordedStep, sample_of

ROWS = ["r0", "r1", "r2", "r3"]
KERNEL = np.arange(1.0, 7.0).reshape(2, 3)


def step(rows: Sequence[str], **more: Any) -> RecordedStep:
    plain = {
        "rows": {"x": list(rows)},
        "shown": {"x": [1.0]},
        "gradients": {"kernel": sample_of(KERNEL)},
        "weights": {"kernel": sample_of(-KERNEL), "counter": sample_of(2)},
        "logs": {"loss": 4.0},
    }
    return RecordedStep(**(plain | more))


def run(*steps: RecordedStep, **notes: Any) -> RecordedRun:
    notes = {"trainable": ["kernel"], "clips": [], "draws": []} | notes
    return RecordedRun(notes, {"kernel": sample_of(KERNEL)}, steps)


def halves(
    change: Callable[[RecordedStep], RecordedStep] = lambda s: s,
) -> list[RecordedRun]:
    return [run(change(step(rows))) for rows in (ROWS[:2], ROWS[2:])]


def scaled(factor: float) -> Callable[[RecordedStep], RecordedStep]:
    gradients = {"kernel": sample_of(factor * KERNEL)}
    return lambda step: step._replace(gradients=gradients)


class VerdictTest(parameterized.TestCase):
    def found(self, workers: list[RecordedRun], **notes: Any) -> verdict.Difference:
        found = verdict.compare(run(step(ROWS), **notes), workers)
        assert found is not None
        return found

    def test_shares_of_the_same_rows_are_equal(self) -> None:
        self.assertIsNone(verdict.compare(run(step(ROWS)), halves()))

    def test_rounding_is_no_difference(self) -> None:
        self.assertIsNone(verdict.compare(run(step(ROWS)), halves(scaled(1 + 1e-6))))

    def test_rows_in_another_place_are_told_from_other_rows(self) -> None:
        twice = [run(step(ROWS[:2])), run(step(ROWS[1:3]))]
        self.assertIn("different orders", self.found(twice).cause)
        strange = [run(step(["a", "b"])), run(step(["c", "d"]))]
        self.assertIn("values of all rows differ", self.found(strange).cause)
        fewer = [run(step(ROWS[:2])), run(step(ROWS[2:3]))]
        self.assertIn("other numbers of rows", self.found(fewer).cause)

    def test_the_order_of_rows_within_a_batch_does_not_count(self) -> None:
        swapped = [run(step(ROWS[2:])), run(step(ROWS[1::-1]))]
        self.assertIsNone(verdict.compare(run(step(ROWS)), swapped))

    def test_what_all_workers_take_whole_is_equal(self) -> None:
        whole = [run(step(ROWS)), run(step(ROWS))]
        self.assertIsNone(verdict.compare(run(step(ROWS)), whole))

    @parameterized.parameters((2.0, "counts 2 times"), (0.5, "counts 1/2"))
    def test_a_factor_of_n_is_a_sum_or_a_mean(self, factor: float, text: str) -> None:
        found = self.found(halves(scaled(factor)))
        self.assertEqual(("gradients", 1, "kernel"), found[:3])
        self.assertIn(text, found.cause)

    def test_an_epoch_that_ends_before_the_steps_is_told(self) -> None:
        alone = run(step(ROWS), asked=3)
        text = verdict.text(alone, halves(), None)
        self.assertIn("ended after 1 of the 3 steps", text)
        self.assertNotIn(
            "ended", verdict.text(run(step(ROWS), asked=1), halves(), None)
        )

    def test_a_line_that_clips_is_named(self) -> None:
        found = self.found(halves(scaled(0.7)), clips=["train.py:9"])
        self.assertIn("train.py:9", found.cause)

    def test_numbers_drawn_in_the_step_are_named(self) -> None:
        found = self.found(halves(scaled(0.7)), draws=["RandomUniform"])
        self.assertIn("RandomUniform", found.cause)

    def test_variables_and_logs_are_looked_at_last(self) -> None:
        def counted(step: RecordedStep) -> RecordedStep:
            weights = {**step.weights, "counter": sample_of(1)}
            return step._replace(weights=weights, logs={"loss": 2.0})

        self.assertEqual("variables", self.found(halves(counted)).what)
        found = self.found(halves(lambda step: step._replace(logs={"loss": 2.0})))
        self.assertIn("logged is 1/2 as large", found.cause)
        found = self.found(halves(lambda step: step._replace(logs={"loss": 5.0})))
        self.assertIn("no mean or sum", found.cause)

    def test_weights_before_the_first_step_are_looked_at_first(self) -> None:
        others = [
            w._replace(initial={"kernel": sample_of(KERNEL + 1)}) for w in halves()
        ]
        self.assertEqual("initial", self.found(others).what)

    def test_fewer_steps_are_a_difference(self) -> None:
        workers = halves()
        found = verdict.compare(run(step(ROWS), step(ROWS)), workers)
        assert found is not None
        self.assertEqual(("rows", 2), found[:2])

    def test_variables_under_other_names_are_compared_in_their_order(self) -> None:
        def renamed(step: RecordedStep) -> RecordedStep:
            return step._replace(gradients={"kernel_1": sample_of(3 * KERNEL)})

        self.assertEqual("gradients", self.found(halves(renamed)).what)

    def test_nan_is_equal_to_nan_only(self) -> None:
        nan = {"kernel": sample_of(np.full([2], np.nan))}
        alone = run(step(ROWS, gradients=nan))
        same = [run(step(rows, gradients=nan)) for rows in (ROWS[:2], ROWS[2:])]
        self.assertIsNone(verdict.compare(alone, same))
        self.assertIsNotNone(verdict.compare(alone, halves()))

    def test_the_text_names_both_values_and_says_a_verdict(self) -> None:
        alone, workers = run(step(ROWS), batch_norms=1), halves(scaled(2.0))
        text = verdict.text(alone, workers, verdict.compare(alone, workers))
        for words in ("DIFFERENT", "kernel", "not looked at", "do NOT", "synchronized"):
            self.assertIn(words, text)
        text = verdict.text(alone, halves(), None)
        self.assertIn("2 workers compute what one does", text)

    def test_records_are_read_as_they_were_written(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = pathlib.Path(folder, "record")
        written = run(step(ROWS), step(ROWS))
        records.save(path, written)
        read = records.load(path)
        self.assertEqual(written.notes, read.notes)
        self.assertEqual([s.rows for s in written.steps], [s.rows for s in read.steps])
        self.assertIsNone(verdict.compare(written, [read]))

    def test_of_large_tensors_some_elements_are_kept(self) -> None:
        sample = sample_of(np.ones([records.MOST_ELEMENTS + 1]))
        self.assertLen(sample.elements, records.MOST_ELEMENTS)
        self.assertEqual(RecordedSample, type(sample))
        self.assertAlmostEqual((records.MOST_ELEMENTS + 1) ** 0.5, sample.norm)
