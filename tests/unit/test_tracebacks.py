"""Tests of errors as users read them: a paragraph, behind their own lines."""

import os
import traceback
import unittest
from unittest import mock

import tensorflow as tf

from tf_dgc import values
from tf_dgc._host import tracebacks
from tf_dgc.launcher import transcript


@tf.function
def refused(number: tf.Tensor) -> tf.Tensor:
    text = "Numbers must be `small`, which isn't so. Received, by rank:"
    ok = values.require(tf.reduce_all(number < 2), lambda: [text, number], -1)
    with tf.control_dependencies([ok]):
        return number + 1


@tf.function
def of_user(number: tf.Tensor) -> tf.Tensor:
    return inner(number)


def inner(number: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.debugging.assert_less(number, 2.0, "too much")]):
        return number + 1


def caught(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


class BriefTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ))
        os.environ.pop(tracebacks.VARIABLE, None)

    def lines(self, error: Exception) -> list[str]:
        short = tracebacks.brief(error)
        text = "".join(traceback.format_exception(short))
        return [line for line in text.splitlines() if line.strip(" ~^")]

    def test_a_refusal_in_a_graph_is_its_text(self) -> None:
        error = caught(refused, tf.constant([1.0, 3.0]))
        self.assertGreater(str(error).count("\n"), 5)
        *before, last = self.lines(error)
        told = (
            "InvalidArgumentError: Numbers must be `small`, which isn't so. Received, "
            "by rank: [1 3]"
        )
        self.assertTrue(last.endswith(told), last)
        self.assertEqual(before[0], "Traceback (most recent call last):")
        frames = [line for line in before if line.startswith("  File")]
        self.assertTrue(frames)
        self.assertTrue(all(__file__ in line for line in frames), frames)

    def test_the_line_of_a_user_in_the_graph_is_named(self) -> None:
        *_, text, place = self.lines(caught(of_user, tf.constant([3.0])))
        self.assertIn("InvalidArgumentError: assertion failed: [too much]", text)
        self.assertIn("made by inner, in ", place)

    def test_everything_is_told_where_that_is_asked_for(self) -> None:
        os.environ[tracebacks.VARIABLE] = "all"
        error = caught(refused, tf.constant([3.0]))
        self.assertIs(tracebacks.brief(error), error)

    def test_errors_of_python_keep_the_place_where_they_are_raised(self) -> None:
        error = caught(values.first_nonfinite, [None])
        self.assertIs(tracebacks.brief(error).__traceback__, error.__traceback__)
        frames = self.lines(caught(int, "x"))
        self.assertIn(__file__, frames[1])

    def test_names_that_others_know(self) -> None:
        self.assertEqual(tracebacks.REFUSAL, values.REFUSAL)
        self.assertEqual(tracebacks.ENDS_TOO, transcript.ENDS_TOO)

    def test_what_is_passed_on_often_is_told_once(self) -> None:
        end = "\nThe error could be from a previous operation. Restart your program to "
        text = (
            "Collective ops is aborted by: Collective ops is aborted by: Worker 1 "
            f"failed: ValueError: bad{end}reset.\nAdditional GRPC error information "
            "from remote target /job:worker/replica:0/task:1 while calling /x:\n..."
        )
        told = "Worker 1 failed: ValueError: bad"
        self.assertEqual(tracebacks.paragraph(text), told)


if __name__ == "__main__":
    unittest.main()
