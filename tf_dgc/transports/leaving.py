"""Last words of a worker: it stays for others, or tells them what it died of.

Beside the keys of `presence.py`:

    tf_dgc/done/RANK    has nothing more to do
    tf_dgc/seen/RANK    has seen that all are done
"""

import contextlib
import logging
import time

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import ending
from tf_dgc.transports.peers import TOLD_CHARACTERS, Peers

_logger = logging.getLogger("tf_dgc")

# How often a worker that waits for others to be done looks whether they are there.
_LOOK_SECONDS = 2.0
# What ends all workers alike, each shall tell in its own words before it hears others.
_TELL_SECONDS = 1.0
_LOST = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError)


class Leaving:
    """End of a worker's process, while others may still need it."""

    def __init__(self, peers: Peers, timeout: float) -> None:
        """Take for whom it stays.

        Args:
            peers: the workers.
            timeout: seconds that it stays at most.
        """
        self._peers, self._timeout = peers, timeout

    def leave(self) -> None:
        """Stay for those who still fetch something or do not end; if this failed, tell.

        TensorFlow takes workers that leave before others for crashed, and says so.
        """
        if (error := ending.failure()) is not None:
            self._tell(error)
            return
        deadline = time.monotonic() + self._timeout
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.publish(f"tf_dgc/done/{self._peers.rank}")
            # Rank 0 has the service, and leaves after those who look into it.
            what = "done" if self._peers.rank else "seen"
            for peer in self._peers.others:
                self._wait_for(f"tf_dgc/{what}/{peer}", peer, deadline)
            _host.tensorflow.publish(f"tf_dgc/seen/{self._peers.rank}")

    def _wait_for(self, key: str, peer: int, deadline: float) -> None:
        """Wait until another worker has published a key, while that is there."""
        while (seconds := deadline - time.monotonic()) > 0:
            try:
                _host.tensorflow.wait_for_key(key, min(seconds, _LOOK_SECONDS))
                return
            except tf.errors.DeadlineExceededError:
                if peer in self._peers.unreachable():
                    return

    def _tell(self, error: BaseException) -> None:
        """Tell the user who is missing, and the others what this worker died of."""
        if isinstance(error, _LOST) and (missing := self._peers.missing(str(error))):
            _logger.error("Worker %d ends.%s", self._peers.rank, missing)
        time.sleep(_TELL_SECONDS)
        text = _host.tracebacks.told(error)[:TOLD_CHARACTERS]
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.report_failure(f"Worker {self._peers.rank} failed: {text}")
