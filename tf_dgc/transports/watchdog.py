"""Ends a collective in which this worker has waited too long.

The `timeout_seconds` of TensorFlow's collectives leaves two sleeping threads behind for
every call until it has run out: at 20 steps a second and 300 s a process dies of its
tens of thousands of threads. Horovod's stall check does not end operations that it has
in its response cache, which after the first step is all of them. Here one thread looks
at a counter now and then.

An operation that Horovod accepts in the instant in which its own thread ends is never
heard of again, not even by shutting Horovod down: nothing but the end of the process
ends that.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_dgc.transports import ending
from tf_dgc.transports.turnstile import END, FLIGHT, GROUP, STEP

_logger = logging.getLogger("tf_dgc")

GRACE = 60.0  # seconds; those after which Gloo, below Horovod, gives up are 30
# From the error of a worker to its end, whatever waits for others at its exit.
_EXIT_SECONDS = 20


class Watchdog:
    """Calls `abort` once a collective is not left within the timeout."""

    def __init__(
        self,
        calls: tf.Variable,
        timeout: float,
        abort: Callable[[], None],
        in_vain: Callable[[int], bool] = lambda calls: False,
        waiting: threading.Thread | None = None,
    ) -> None:
        """Start the watching thread.

        Args:
            calls: of a `Turnstile`.
            timeout: seconds.
            abort: makes the waiting collective fail; called once, in the thread.
            in_vain: tells, of the number of `calls`, whether to wait is of no use.
            waiting: the thread that makes the collectives; by default the main one.
        """
        self._calls, self._timeout, self._abort = calls, timeout, abort
        self._in_vain = in_vain
        self._waiting = waiting or threading.main_thread()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        atexit.unregister(_hurry)
        atexit.register(_hurry)
        ending.watch()
        atexit.register(self.end)

    def _watch(self) -> None:
        calls, since = 0, time.monotonic()
        while not self._ended.wait(min(self._timeout / 4, 5.0)):
            now = int(self._calls.numpy())
            if now != calls or now % 2 == 0:
                calls, since = now, time.monotonic()
            elif time.monotonic() - since > self._timeout or self._in_vain(now):
                waiting = self._place()
                threading.Thread(target=self._abort, daemon=True).start()
                self._exit_unless_moved(waiting)
                return

    def _exit_unless_moved(self, waiting: tuple[Any, int]) -> None:
        """End the process where the thread that waits is still in the same call."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            if self._ended.wait(0.2) or self._place() != waiting:
                return
        _logger.critical("The collective cannot be ended; this process ends.")
        os._exit(1)

    def _place(self) -> tuple[Any, int]:
        """Return the frame that the thread that waits is in, and the place in it."""
        frame = sys._current_frames().get(self._waiting.ident or 0)
        return frame, -1 if frame is None else frame.f_lasti

    def end(self) -> None:
        """Watch no more."""
        atexit.unregister(self.end)
        self._ended.set()
        self._thread.join(timeout=1.0)


DONE = "no more, as its script has ended"
LEFT = "left"  # in the place of names of collectives, before an exception
_PLACES = {
    "applied": "the end of a training step, which compares its decisions",
    "agree.digest": "the comparing of what must be equal, as data or variables",
    "barrier": "a barrier, or behind a callback that writes",
    "metric": "the reading of a metric",
    "variable": "the making of a variable",
    STEP: STEP,
    FLIGHT: FLIGHT,
    GROUP: GROUP,
    DONE: DONE,
}


def complaint(rank: int, timeout: float, places: Mapping[int, str]) -> str:
    """Say what happened, for the error that `abort` causes.

    Args:
        rank: of this worker.
        timeout: seconds.
        places: names of the collectives in which workers wait, as far as known.
    """
    waiting = "; ".join(
        f"worker {each} {_place(name)}" for each, name in sorted(places.items())
    )
    vain = len(set(places.values())) > 1
    begin = (
        f"Worker {rank} waits in vain"
        if vain
        else f"Worker {rank} has waited for more than {timeout:g} s"
    )
    metric = "metric" in places.values()
    ended = any(name.startswith(END) for name in places.values())
    left = any(name.startswith(f"{LEFT} ") for name in places.values())
    return (
        f"{begin} in a collective that not all workers entered. Waiting: {waiting}. "
        + "All workers must read metrics together: call `result()` on all, and print "
        "on the chief. "
        * metric
        + "Where data end earlier on one worker, they are not the same: a filter that "
        "draws numbers needs a seed, a generator must give as much on all. "
        * ended
        + "A Python condition in an eager step may decide by each worker's own rows "
        "whether an optimizer is applied: decide by a tensor, as `if loss < limit:`, "
        "not by `float(loss)` or `loss.numpy()`. "
        * ("applied" in places.values())
        + "The script catches that exception on one worker: let all workers go on "
        "alike, or let the exception end the script. "
        * left
        + "Do all workers run the same script on the same number of batches? "
        "TF_DGC_TIMEOUT sets the time."
    )


def _place(name: str) -> str:
    kind, _, more = name.partition(" ")
    if kind == END:
        return f"at the end of its data, after {more} batches of the epoch"
    if kind == LEFT:
        return f"no more, as it has left its `fit` by {more!r}"
    return f"in {_PLACES.get(name, repr(name))}"


def _hurry() -> None:
    """Let a process that failed end by SIGALRM, if it does not end by itself.

    Horovod's own shutdown waits for workers that are gone, for as long as a collective
    does, where it was not this one that it waited in.
    """
    if ending.failure() is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_EXIT_SECONDS)
