"""Lets the servers know that this worker lives, and notices when one of them does not.

An operation that waits for a server that was stopped, or cannot be reached, waits until
it comes back: it cannot be cancelled. So this process then ends.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import tensorflow as tf

from tf_dgc.servers.shared import Servers

_logger = logging.getLogger("tf_dgc")


class Pulse:
    """Two threads: one speaks to the servers, one watches whether they answer it."""

    def __init__(
        self,
        servers: Servers,
        beat: Callable[[], bool],
        interval: float,
        timeout: float,
    ) -> None:
        """Start the threads.

        Args:
            servers: M of them.
            beat: speaks to server 0, and tells whether this worker's place is its own.
            interval: seconds between two beats.
            timeout: seconds after which a server that does not answer is given up.
        """
        self._servers, self._beat = servers, beat
        self._interval, self._timeout = interval, timeout
        self._waiting: tuple[int, float] | None = None  # for a server, since when
        self._lost = False
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=each, daemon=True)
            for each in (self._speak, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def _speak(self) -> None:
        while not self._ended.wait(self._interval):
            for server, device in enumerate(self._servers.devices):
                self._waiting = server, time.monotonic()
                try:
                    own = self._ping(server, device)
                except tf.errors.OpError as error:
                    self._lost = True
                    _logger.error("%s: %s", self.name_of(server), error.message)
                    return
                finally:
                    self._waiting = None
                if not own and not self._ended.is_set():
                    _logger.critical(
                        "Another process has taken this worker's index, as this one "
                        "was not heard of for a time; this process ends."
                    )
                    sys.stderr.flush()
                    os._exit(1)

    def _ping(self, server: int, device: str) -> bool:
        if server == 0:
            return self._beat()
        with tf.device(device):
            tf.timestamp().numpy()
        return True

    def name_of(self, server: int) -> str:
        """Name a server, for people."""
        return f"Parameter server {server} ({self._servers.addresses[server]})"

    def _watch(self) -> None:
        while not self._ended.wait(min(self._timeout / 4, 1.0)):
            waiting = self._waiting
            if waiting and time.monotonic() - waiting[1] > self._timeout:
                _logger.critical(
                    "%s has not answered for %g s (TF_DGC_TIMEOUT sets the time). What "
                    "waits for it cannot be ended; this process ends. Start the job "
                    "again, from its backup.",
                    self.name_of(waiting[0]),
                    self._timeout,
                )
                sys.stderr.flush()
                os._exit(1)

    def end(self) -> bool:
        """Stop; tell whether all servers answer, as far as is known."""
        self._ended.set()
        self._threads[0].join(timeout=5.0)
        return not self._lost and not self._threads[0].is_alive()
