"""Ends a collective of TensorFlow in which this worker has waited too long.

The operations' own `timeout_seconds` leaves two sleeping threads behind for every call
until it has run out: at 20 steps a second and 300 s a process dies of its tens of
thousands of threads. Here one thread looks at a counter now and then.
"""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import rendezvous


class Watchdog:
    """Counts collectives as they are entered and left, and aborts one that hangs."""

    def __init__(self, addresses: list[str], rank: int, timeout: float) -> None:
        """Start the watching thread.

        Args:
            addresses: "host:port" of each worker, to name those that are gone.
            rank: of this worker.
            timeout: seconds.
        """
        self._addresses, self._rank, self._timeout = addresses, rank, timeout
        with tf.init_scope(), tf.device("CPU:0"):
            # Odd while this worker is inside a collective.
            self._calls = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, name="tf_dgc_calls"
            )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    @contextlib.contextmanager
    def entered(self, tensor: tf.Tensor) -> Iterator[Callable[[tf.Tensor], tf.Tensor]]:
        """Count the operations made inside as one collective.

        Args:
            tensor: what the collective waits for before it starts.

        Yields:
            A function that takes the collective's result and returns it, counted.
        """
        with tf.control_dependencies([tensor]):
            enter = self._calls.assign_add(1, read_value=False)

        def leave(result: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([result]):
                left = self._calls.assign_add(1, read_value=False)
            with tf.control_dependencies([left] if left is not None else []):
                return tf.identity(result)

        with tf.control_dependencies([enter] if enter is not None else []):
            yield leave

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
