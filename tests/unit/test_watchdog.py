"""What ends a collective that does not end; over real transports, see test_misuse."""

import subprocess
import sys
import unittest

import launch
import pytest
import tensorflow as tf

from tf_dgc.transports.turnstile import Turnstile
from tf_dgc.transports.watchdog import LEFT, STEP, complaint

PROGRAM = """
import threading
import tensorflow as tf
from tf_dgc.transports import watchdog

watchdog.GRACE = 2.0
calls = tf.Variable(1, dtype=tf.int64)  # inside of a collective
collective = threading.Event()
dog = watchdog.Watchdog(calls, {timeout}, {abort})
collective.wait()
print("was ended", flush=True)
{then}
"""


def run(
    abort: str, then: str = "", timeout: float = 0.5
) -> subprocess.CompletedProcess[str]:
    python = [
        sys.executable,
        "-c",
        PROGRAM.format(abort=abort, then=then, timeout=timeout),
    ]
    return subprocess.run(
        python, cwd=launch.ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.long
class WatchdogTest(unittest.TestCase):
    @pytest.mark.slow
    def test_a_collective_that_can_be_ended_is(self) -> None:
        done = run("collective.set")
        self.assertIn("was ended", done.stdout)
        self.assertEqual(done.returncode, 0, done.stderr)

    @pytest.mark.slow
    def test_who_catches_the_error_goes_on(self) -> None:
        # The counter stays odd: nobody has left that collective.
        done = run("collective.set", "threading.Event().wait(4.0); print('goes on')")
        self.assertIn("goes on", done.stdout)
        self.assertEqual(done.returncode, 0, done.stderr)

    @pytest.mark.extended
    def test_the_process_ends_where_nothing_else_ends_the_collective(self) -> None:
        done = run("lambda: None")
        self.assertNotIn("was ended", done.stdout)
        self.assertIn("cannot be ended; this process ends", done.stderr)
        self.assertEqual(done.returncode, 1)

    @pytest.mark.slow
    def test_the_process_ends_where_the_abort_itself_does_not(self) -> None:
        done = run("threading.Event().wait")
        self.assertIn("cannot be ended; this process ends", done.stderr)
        self.assertEqual(done.returncode, 1)

    @pytest.mark.slow
    def test_nobody_waits_where_the_others_are_known_to_be_elsewhere(self) -> None:
        # Longer than this test may last.
        done = run("collective.set, lambda calls: calls == 1", timeout=1000.0)
        self.assertIn("was ended", done.stdout)

    def test_places_are_told_by_worker(self) -> None:
        text = complaint(1, 15.0, {1: "agree.digest", 0: "metric"})
        self.assertRegex(text, "^Worker 1 waits in vain .* Waiting: worker 0 in the re")
        self.assertIn("worker 1 in the comparing of what must be equal", text)
        self.assertIn("call `result()` on all, and print on the chief", text)
        text = complaint(1, 15.0, {1: STEP})
        self.assertRegex(text, "^Worker 1 has waited for more than 15 s .* in a step. ")
        self.assertNotIn("metrics", text)

    def test_who_has_left_a_training_is_told_with_the_reason(self) -> None:
        text = complaint(1, 15.0, {1: STEP, 0: f"{LEFT} ValueError: no room"})
        told = "worker 0 no more, as it has left its `fit` by 'ValueError: no room'"
        self.assertIn(told, text)
        self.assertIn("let all workers go on alike", text)

    def test_a_turnstile_knows_where_it_is(self) -> None:
        turnstile = Turnstile()
        with turnstile.entered(tf.zeros([]), "metric") as leave:
            self.assertEqual((turnstile.place, int(turnstile.calls)), ("metric", 1))
            leave(tf.zeros([]))
        self.assertEqual((turnstile.place, int(turnstile.calls)), (None, 2))

        @tf.function
        def traced() -> None:
            with turnstile.entered(tf.zeros([]), "metric") as leave:
                self.assertIsNone(turnstile.place)
                leave(tf.zeros([]))

        traced()
        self.assertEqual(int(turnstile.calls), 4)


if __name__ == "__main__":
    unittest.main()
