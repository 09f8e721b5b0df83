"""Membership: which workers there are, and how far each has come.

Axis: W workers of the cluster, some of which may not be there yet, or no more. What all
must know stands on server 0, in variables; times are by the clock of that server.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc._host.shared import SharedVariable
from tf_dgc.servers import places
from tf_dgc.servers.chief_records import ChiefRecords, compare
from tf_dgc.servers.meetings import Meetings
from tf_dgc.servers.places import FAILED, HERE, LEFT, PlaceClaim, WorkerSigns
from tf_dgc.servers.pulse import Pulse
from tf_dgc.servers.shared import Servers
from tf_dgc.servers.succession import Succession
from tf_dgc.transports import ending

_logger = logging.getLogger("tf_dgc")

_CLAIM_SECONDS = 0.2  # until two that claim a place in one instant see it
_LEAVE_SECONDS = 10.0


class Members:
    """The workers of a job; a place among them for this one.

    Attributes:
        told: what the chief has told of the job, beside what all must have alike.
        liveness: seconds until a worker that is not heard of holds nobody back.
        timeout: seconds to wait for the chief, or for a server.
        is_first: whether no worker had this place before, on these servers.
        records: of the chief.
        signs: of life.
        place: of this worker among them.
        meetings: where it waits for others.
        succession: whether what this worker assigns goes to the servers.
    """

    def __init__(
        self,
        servers: Servers,
        index: int,
        workers: int,
        liveness: float,
        timeout: float,
        record: Mapping[str, Any],
        told: Mapping[str, Any],
    ) -> None:
        """Take a place, as the first, or among others.

        Args:
            servers: of the job; this process is connected to them.
            index: of this worker; 0 is the chief.
            workers: W.
            liveness: seconds until a worker that is not heard of holds nobody back.
            timeout: seconds to wait for the chief, or for a server.
            record: what all workers must have alike.
            told: what the chief tells the others.

        Raises:
            ValueError: a job has ended here, this worker's record is another one, or
                another process has its place.
            TimeoutError: the chief did not come.
        """
        self._servers, self.index, self.workers = servers, index, workers
        self.liveness, self.timeout = liveness, timeout
        make = servers.variable
        self.records = ChiefRecords(make, self.is_chief, timeout)
        self._record = make("record", tf.string)
        self.signs = WorkerSigns(servers, workers, liveness)
        self.place = PlaceClaim(make, index, workers)
        self.meetings = Meetings(make, self, timeout)
        self._hangs = False
        self.succession = Succession(servers, self.is_chief)
        text = {"record": dict(record), "told": dict(told)}
        found = self.records.share("record", self._record, text, self._begin)
        self.signs.refuse_ended()
        self.told = found["told"]
        compare("versions and settings", found["record"], dict(record), index)
        self._claim()
        self.succession.join()
        self.pulse = Pulse(
            servers, self.beat, min(liveness / 4, timeout / 4, 5.0), timeout
        )
        ending.watch()
        atexit.register(self.leave)

    # What the chief says.

    @property
    def is_chief(self) -> bool:
        """Tell whether this worker says what others take over."""
        return self.index == 0

    def _begin(self) -> None:
        self.place.begin()
        self.signs.begin()
        self.meetings.told.begin()
        self.records.begin()
        self.succession.begin()

    # Places.

    def living(self) -> tf.Tensor:
        """Tell which workers count: shape [W], bool, on server 0."""
        return self.signs.living()

    def absent(self) -> np.ndarray:
        """Tell which workers have never begun: shape [W], bool."""
        return self.signs.absent()

    def _claim(self) -> None:
        """Take this worker's place, unless somebody lives there.

        Raises:
            ValueError: somebody does.
        """
        self.is_first = bool(self.absent()[self.index])
        if self.signs.wait_for_end(self.index):
            raise places.refused(self.index, self.place.holder)
        self.place.make(self.put)
        self.meetings.told.join()
        self.place.tell_name()
        self.put(self.signs.states, HERE)
        self.beat_once()
        time.sleep(_CLAIM_SECONDS)
        if not self.beat():
            raise places.refused(self.index, self.place.holder)

    # The servers' variables.

    def put(self, variable: SharedVariable, value: Any) -> None:
        """Set this worker's element of a variable of shape [W]."""
        slices = tf.IndexedSlices(
            tf.reshape(tf.cast(value, variable.dtype), [1]), tf.constant([self.index])
        )
        variable.scatter_update(slices)

    def beat_once(self) -> None:
        """Let the others know that this worker lives."""
        self.meetings.tell()
        self.signs.beat(self.put)

    def beat(self) -> bool:
        """Do so, if its main thread moves; tell whether the place is still its own."""
        hangs = self.meetings.moves.idle() > self.timeout
        if hangs and not self._hangs:
            _logger.warning(
                "This worker has taken no step for %g s (TF_DGC_TIMEOUT): until it "
                "takes one it counts as gone, and others do not wait for it",
                self.timeout,
            )
        self._hangs = hangs
        if not hangs:
            self.beat_once()
            self.signs.look(self.index)
        return self.place.holds()

    def expel(self, workers: Any) -> np.bool_:
        """Let workers end should they come back: numbers, shape [K], int64."""
        return self.place.expel(workers)

    def leave(self) -> None:
        """Give the place back, at the end of the process."""
        atexit.unregister(self.leave)
        failed = ending.failure() is not None
        answers = self.pulse.end()

        def tell() -> None:
            self.put(self.signs.states, FAILED if failed else LEFT)
            self.signs.states.read_value().numpy()

        _end_with(tell if answers else None)


def _end_with(tell: Callable[[], None] | None) -> None:
    """Tell the servers something at the end, or end without them if they are silent."""
    if tell is not None:
        thread = threading.Thread(target=_ignoring(tell), daemon=True)
        thread.start()
        thread.join(_LEAVE_SECONDS)
    if tell is None or thread.is_alive():
        _logger.warning("The servers do not answer; this process ends without them")
        sys.stderr.flush()
        os._exit(1)


def _ignoring(function: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            function()
        except tf.errors.OpError as error:
            _logger.debug("At the end: %s", error)

    return run
