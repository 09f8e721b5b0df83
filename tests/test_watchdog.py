"""What ends a collective that does not end; over real transports, see test_misuse."""

import subprocess
import sys
import unittest

import launch

PROGRAM = """
import threading
import tensorflow as tf
from tf_dgc.transports import watchdog

watchdog.GRACE = 2.0
calls = tf.Variable(1, dtype=tf.int64)  # inside of a collective
collective = threading.Event()
dog = watchdog.Watchdog(calls, 0.5, {abort})
collective.wait()
print("was ended", flush=True)
{then}
"""


def run(abort: str, then: str = "") -> subprocess.CompletedProcess[str]:
    python = [sys.executable, "-c", PROGRAM.format(abort=abort, then=then)]
    return subprocess.run(
        python, cwd=launch.ROOT, capture_output=True, text=True, timeout=120
    )


class WatchdogTest(unittest.TestCase):
    def test_a_collective_that_can_be_ended_is(self) -> None:
        done = run("collective.set")
        self.assertIn("was ended", done.stdout)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_who_catches_the_error_goes_on(self) -> None:
        # The counter stays odd: nobody has left that collective.
        done = run("collective.set", "threading.Event().wait(4.0); print('goes on')")
        self.assertIn("goes on", done.stdout)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_process_ends_where_nothing_else_ends_the_collective(self) -> None:
        done = run("lambda: None")
        self.assertNotIn("was ended", done.stdout)
        self.assertIn("cannot be ended; this process ends", done.stderr)
        self.assertEqual(done.returncode, 1)

    def test_the_process_ends_where_the_abort_itself_does_not(self) -> None:
        done = run("threading.Event().wait")
        self.assertIn("cannot be ended; this process ends", done.stderr)
        self.assertEqual(done.returncode, 1)


if __name__ == "__main__":
    unittest.main()
