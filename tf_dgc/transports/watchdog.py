"""Ends a collective of TensorFlow in which this worker has waited too long.

The operations' own `timeout_seconds` leaves two sleeping threads behind for every call
until it has run out: at 20 steps a second and 300 s a process dies of its tens of
thousands of threads. Here one thread looks at a counter now and then.
"""

import atexit
import threading
import time

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import rendezvous


class Watchdog:
    """Aborts a collective that is not left within the timeout."""

    def __init__(
        self, calls: tf.Variable, addresses: list[str], rank: int, timeout: float
    ) -> None:
        """Start the watching thread.

        Args:
            calls: of a `Turnstile`.
            addresses: "host:port" of each worker, to name those that are gone.
            rank: of this worker.
            timeout: seconds.
        """
        self._calls, self._addresses = calls, addresses
        self._rank, self._timeout = rank, timeout
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _watch(self) -> None:
        calls, since = 0, time.monotonic()
        while not self._ended.wait(min(self._timeout / 4, 5.0)):
            now = int(self._calls.numpy())
            if now != calls or now % 2 == 0:
                calls, since = now, time.monotonic()
            elif time.monotonic() - since > self._timeout:
                _host.abort_collectives(self._complaint())
                return

    def _complaint(self) -> str:
        gone = rendezvous.unreachable(self._addresses, self._rank)
        named = ", ".join(f"{i} ({self._addresses[i]})" for i in gone)
        return (
            f"Worker {self._rank} has waited for more than {self._timeout:g} s in a "
            "collective that not all workers entered. "
            + (f"No longer reachable: worker {named}. " if gone else "")
            + "Do all workers run the same script on the same number of batches? "
            "TF_DGC_TIMEOUT sets the time."
        )

    def _end(self) -> None:
        self._ended.set()
        self._thread.join()
