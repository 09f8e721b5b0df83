"""Ends a collective in which this worker has waited too long.

The `timeout_seconds` of TensorFlow's collectives leaves two sleeping threads behind for
every call until it has run out: at 20 steps a second and 300 s a process dies of its
tens of thousands of threads. Horovod's stall check does not end operations that it has
in its response cache, which after the first step is all of them. Here one thread looks
at a counter now and then.
"""

import atexit
import threading
import time
from collections.abc import Callable

import tensorflow as tf


class Watchdog:
    """Calls `abort` once a collective is not left within the timeout."""

    def __init__(
        self, calls: tf.Variable, timeout: float, abort: Callable[[], None]
    ) -> None:
        """Start the watching thread.

        Args:
            calls: of a `Turnstile`.
            timeout: seconds.
            abort: makes the waiting collective fail; called once, in the thread.
        """
        self._calls, self._timeout, self._abort = calls, timeout, abort
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def _watch(self) -> None:
        calls, since = 0, time.monotonic()
        while not self._ended.wait(min(self._timeout / 4, 5.0)):
            now = int(self._calls.numpy())
            if now != calls or now % 2 == 0:
                calls, since = now, time.monotonic()
            elif time.monotonic() - since > self._timeout:
                self._abort()
                return

    def end(self) -> None:
        """Watch no more."""
        atexit.unregister(self.end)
        self._ended.set()
        self._thread.join(timeout=1.0)


def complaint(rank: int, timeout: float) -> str:
    """Say what happened, for the error that `abort` causes."""
    return (
        f"Worker {rank} has waited for more than {timeout:g} s in a collective that "
        "not all workers entered. Do all workers run the same script on the same "
        "number of batches? TF_DGC_TIMEOUT sets the time."
    )
