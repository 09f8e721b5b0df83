"""A thread that holds rounds while training goes on, one after the other.

The program hands rounds over in the order of its steps, which all workers share. So the
thread makes its collectives in the same order everywhere, over a transport of its own.
"""

import atexit
import collections
import functools
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_dgc.exchanges.inplace import unseen
from tf_dgc.transports import ending
from tf_dgc.transports.base import Transport

_KEPT = 1000  # jobs whose times are known
_LOOK_SECONDS = 0.5  # so often a signal comes through where the main thread waits


class Flight:
    """A round that was handed over, and how it ended."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Take what is to be done."""
        self._work, self._over = work, threading.Event()
        self.error: BaseException | None = None
        self.begun = time.time()

    def do(self) -> None:
        """Do it; what it raises is kept."""
        try:
            self._work()
        except BaseException as error:  # whatever it is, who waits for it must hear
            self.error = error
        self._over.set()

    def wait(self) -> None:
        """Wait until it was done; raise what it raised."""
        self.end()
        if self.error is not None:
            raise self.error.with_traceback(self.error.__traceback__)

    def end(self) -> None:
        """Wait until it was done, well or not."""
        while not self._over.wait(_LOOK_SECONDS):
            pass


class Channel:
    """The thread, and its transport.

    Attributes:
        transport: of the thread; the program makes no collective over it while a job
            is not done.
        times: when jobs were handed over, and were done, in seconds; the last ones.
    """

    def __init__(self, transport: Transport) -> None:
        """Start the thread; all workers call this alike.

        Args:
            transport: of the program.

        Raises:
            ValueError: it carries tensors in one order only.
        """
        self._jobs: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._last: Flight | None = None
        self.times: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=_KEPT
        )
        serve = functools.partial(_serve, self._jobs, self.times)
        self._thread = threading.Thread(target=serve, daemon=True)
        # In a thread that has no strategy, as there may be variables.
        self.transport = unseen(lambda: transport.aside(self._thread))
        self._thread.start()
        atexit.register(self._leave)

    def hand_over(self, work: Callable[[], None]) -> Flight:
        """Let the thread do something after all before it."""
        self._last = Flight(work)
        self._jobs.put(self._last)
        return self._last

    def wait(self) -> None:
        """Wait until the thread has nothing to do; raise what it met last."""
        if self._last is not None:
            self._last.wait()

    def end(self) -> None:
        """Let the thread end when it has done what it has."""
        self._jobs.put(None)
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Take part in what others wait for, before this process ends well."""
        if self._last is not None and ending.failure() is None:
            self._last.end()
        self.end()


def _serve(
    jobs: "queue.SimpleQueue[Flight | None]",
    times: "collections.deque[tuple[float, float]]",
) -> None:
    while (job := jobs.get()) is not None:
        job.do()
        times.append((job.begun, time.time()))


class Arrival:
    """Lets a graph wait for a job without taking a thread of TensorFlow's from it."""

    def __init__(self) -> None:
        """Create the queue, outside of any graph."""
        self.job: Flight | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(1, [tf.bool], [[]])

    def expect(self, channel: Channel, work: Callable[[], None]) -> None:
        """Hand work over, eagerly; who waits for it goes on when it was done."""

        def do() -> None:
            came = False
            try:
                work()
                came = True
            finally:
                self._queue.enqueue(came)

        self.job = channel.hand_over(do)

    def put(self) -> None:
        """Let who waits go on: it came in another life."""
        self.job = None
        self._queue.enqueue(True)

    def wait(self) -> None:
        """Wait, eagerly, until it was done; raise what it met."""
        if self.job is not None:
            self.job.wait()

    def forget(self) -> None:
        """Wait, eagerly, and take no notice of what comes."""
        self.wait()
        if int(self._queue.size()):
            self._queue.dequeue()

    def take(self) -> tf.Operation | None:
        """Wait in a graph or eagerly; return what is to be waited for in a graph.

        Raises:
            Exception: what the job met; in a graph tf.errors.UnknownError of it.
        """
        if tf.executing_eagerly():
            self.forget()
            return None
        with tf.device("CPU:0"):
            came = self._queue.dequeue()

            def fail() -> tf.Tensor:
                return tf.numpy_function(self._fail, [], tf.bool)

            return tf.cond(came, lambda: tf.constant(True), fail).op

    def _fail(self) -> np.bool_:
        self._queue.enqueue(False)  # for who looks again
        self.wait()
        return np.bool_(False)
