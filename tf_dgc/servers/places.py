"""Places of workers: which are taken, by whom, and by a process that lives.

Axis: W workers. Times are by the clock of server 0.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc._host.shared import SharedVariable
from tf_dgc.servers.shared import Servers

_logger = logging.getLogger("tf_dgc")

NEVER, HERE, LEFT, FAILED = range(4)  # what became of a worker
_POLL_SECONDS = 0.2


class WorkerSigns:
    """Signs of life of all workers, and what became of each.

    Attributes:
        states: shape [W], int64.
        seen: shape [W], float64: when each was heard of last.
    """

    def __init__(self, servers: Servers, workers: int, liveness: float) -> None:
        """Make the variables.

        Args:
            servers: of the job.
            workers: W.
            liveness: seconds until a worker that is not heard of does not count.
        """
        self._device, self._liveness = servers.devices[0], liveness
        self._addresses = servers.addresses
        self.states = servers.variable("states", tf.int64, [workers])
        self.seen = servers.variable("seen", tf.float64, [workers])
        self._late = np.zeros([workers], bool)  # who was, at the last look
        self._beaten: float | None = None  # when this worker was heard of last

    def begin(self) -> None:
        """Give first values: nobody has come."""
        for variable in (self.states, self.seen):
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def beat(self, put: Callable[[SharedVariable, Any], None]) -> None:
        """Let the others know that this worker lives; `put` sets its element."""
        with tf.device(self._device):
            now = tf.timestamp()
            put(self.seen, now)
        last, self._beaten = self._beaten, float(now)
        if last is not None and self._beaten - last > self._liveness:
            _logger.warning(
                "This worker was not heard of for %.0f s, longer than `liveness` (%g "
                "s): others may have gone on without it",
                self._beaten - last,
                self._liveness,
            )

    def show(self, put: Callable[[SharedVariable, Any], None]) -> None:
        """Let the others see that it lives, in a step: its own thread may come late."""
        with tf.device(self._device):
            put(self.seen, tf.timestamp())

    def look(self, index: int) -> None:
        """Tell people which other workers are not heard of any more, or are again.

        Args:
            index: of this worker.
        """
        here = self.states.read_value().numpy() == HERE
        with tf.device(self._device):
            now = float(tf.timestamp())
        late = here & (self.seen.read_value().numpy() < now - self._liveness)
        late[index] = False
        for k in np.flatnonzero(late & ~self._late):
            _logger.warning(
                "Worker %d was not heard of for %g s (`liveness`): this worker goes on "
                "without it",
                k,
                self._liveness,
            )
        for k in np.flatnonzero(here & ~late & self._late):
            _logger.warning("Worker %d is heard of again, or another in its place", k)
        self._late = late

    def living(self) -> tf.Tensor:
        """Tell which workers count: shape [W], bool, on server 0."""
        with tf.device(self._device):
            recent = self.seen.read_value() > tf.timestamp() - self._liveness
            return recent & (self.states.read_value() == HERE)

    def absent(self) -> np.ndarray:
        """Tell which workers have never begun: shape [W], bool."""
        found: np.ndarray = self.states.read_value().numpy() == NEVER
        return found

    def refuse_ended(self) -> None:
        """Raise ValueError where the servers are those of a job that has ended."""
        if os.environ.get("TF_DGC_ATTEMPT", "0") != "0":
            return  # the launcher starts this worker again: the job has not ended
        states = self.states.read_value().numpy()
        if (states == LEFT).any() and not np.isin(states, [HERE, FAILED]).any():
            raise ValueError(
                "The servers must be new: they hold what a job left that has ended. "
                f"Received: servers {self._addresses}. Start them anew with the job."
            )

    def wait_for_end(self, index: int) -> bool:
        """Wait until nobody is heard of at a place; tell whether somebody lives there.

        Args:
            index: of the place.
        """
        since = None
        while self.states.read_value().numpy()[index] == HERE:
            seen = self.seen.read_value().numpy()[index]
            since = seen if since is None else since
            if seen != since:
                return True
            with tf.device(self._device):
                now = float(tf.timestamp())
            if now - seen > self._liveness:
                break
            time.sleep(_POLL_SECONDS)
        return False


class PlaceClaim:
    """Claim of one process to a worker's place, which another one may claim later.

    Attributes:
        own: number of this process; never 0.
        ids: shape [W], int64; of the processes that have the places, 0 where none has.
    """

    def __init__(
        self, make: Callable[..., SharedVariable], index: int, workers: int
    ) -> None:
        """Make the variables.

        Args:
            make: takes name, type and shape of a variable on server 0.
            index: of the place.
            workers: W.
        """
        self._index, self.own = index, secrets.randbelow(2**62) + 1
        self.ids = make("ids", tf.int64, [workers])
        self._names = [make(f"name.{k}", tf.string) for k in range(workers)]

    def begin(self) -> None:
        """Give first values: all places are free."""
        self.ids.assign(tf.zeros(self.ids.shape, tf.int64))
        for name in self._names:
            name.assign("nobody")

    def make(self, put: Callable[[SharedVariable, Any], None]) -> None:
        """Claim the place; `put` sets this worker's element of a variable."""
        put(self.ids, self.own)

    def tell_name(self) -> None:
        """Tell people who it is."""
        name = f"{socket.gethostname()}, process {os.getpid()}"
        self._names[self._index].assign(name)

    def holds(self) -> bool:
        """Tell whether the place is still that of this process."""
        return int(self.ids.read_value().numpy()[self._index]) == self.own

    def expel(self, workers: Any) -> np.bool_:
        """Let workers end should they come back: numbers, shape [K], int64."""
        self.ids.scatter_update(tf.IndexedSlices(0 * workers, tf.constant(workers)))
        return np.bool_(True)

    @property
    def holder(self) -> str:
        """Name of who has the place, for people."""
        name = self._names[self._index].read_value().numpy()
        return str(name.decode(errors="replace"))


def refused(index: int, holder: str) -> ValueError:
    """Return what is raised where a worker lives at the place of another."""
    return ValueError(
        "Each worker needs an index of its own, and each job servers of its own. "
        f"Received: index={index}, at which a worker lives already: "
        f"{ascii(holder)[1:-1]}"
    )
