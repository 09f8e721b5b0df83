"""Meetings at which workers wait for each other, and until when.

Each wait has an end: who has died, has ended, or hangs is not waited for; who lives,
and takes no step for a time, waits for something else, and that is an error.

Axis: W workers.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_dgc._host.shared import SharedVariable
from tf_dgc.servers.progress import Progress

_logger = logging.getLogger("tf_dgc")

_POLL_SECONDS = 0.1
_TELL_SECONDS = 10.0
_NAP_SECONDS = 0.003  # in a wait within a step
_LOOK_SECONDS = 1.0


class MeetingWorkers(Protocol):
    """Members of a job, who meet.

    Attributes:
        index: of this worker.
        workers: W.
        liveness: seconds until a worker that is not heard of does not count.
    """

    index: int
    workers: int
    liveness: float

    def living(self) -> tf.Tensor:
        """Tell which workers count: shape [W], bool."""

    def absent(self) -> np.ndarray:
        """Tell which workers have never begun: shape [W], bool."""

    def put(self, variable: SharedVariable, value: Any) -> None:
        """Set this worker's element of a variable of shape [W]."""


class Whereabouts:
    """Numbers by which workers tell how far they are, each of shape [W], int64.

    Attributes:
        moved: steps, of any kind.
        arrived: at so many barriers.
        waits: 1 in a barrier.
        fits: number of the `fit` that a worker is in, or was last.
    """

    def __init__(
        self, make: Callable[..., SharedVariable], workers: MeetingWorkers
    ) -> None:
        """Make the variables; arguments as of `Meetings`."""
        self._workers, shape = workers, [workers.workers]
        names = "moved", "arrived", "waits", "fits"
        self.all = [make(name, tf.int64, shape) for name in names]
        self.moved, self.arrived, self.waits, self.fits = self.all

    def begin(self) -> None:
        """Give first values: nobody has come anywhere."""
        for variable in self.all:
            variable.assign(tf.zeros(variable.shape, tf.int64))

    def join(self) -> None:
        """Begin: what a former process said is void."""
        for variable in self.all:
            self.tell(variable, 0)

    def tell(self, variable: SharedVariable, value: int) -> None:
        """Tell a number of this worker."""
        self._workers.put(variable, value)

    def ahead(self) -> np.ndarray:
        """Tell who is in a later `fit`, and comes to this one no more: shape [W]."""
        fits: np.ndarray = self.fits.read_value().numpy()
        return fits > fits[self._workers.index]


class Meetings:
    """The waits of a worker for others.

    Attributes:
        timeout: seconds to wait for those that have not begun.
        told: where each is.
        moves: what the main thread of this worker does.
        naps: in waits within a step.
    """

    def __init__(
        self,
        make: Callable[..., SharedVariable],
        workers: MeetingWorkers,
        timeout: float,
    ) -> None:
        """Make the variables.

        Args:
            make: takes name, type and shape of a variable on server 0.
            workers: of the job.
            timeout: see above.
        """
        self._workers, self.timeout = workers, timeout
        self.told = Whereabouts(make, workers)
        self._barriers = 0
        self._given_up: list[int] = []  # workers that have never begun
        self.moves, self.naps = Progress(), Naps(self)

    def tell(self) -> None:
        """Let the others know how many steps this worker has taken."""
        self.told.tell(self.told.moved, int(self.moves.steps))

    @property
    def longest(self) -> float:
        """Seconds after which who lives, and takes no step, is waited for no more."""
        return self.timeout + 2 * self._workers.liveness

    def others(self) -> np.ndarray:
        """Tell which other workers count: shape [W], bool."""
        living: np.ndarray = self._workers.living().numpy()
        return living & (np.arange(self._workers.workers) != self._workers.index)

    def barrier(self) -> None:
        """Wait until all workers have come here.

        But for those that have ended, are not heard of any more, or have not begun
        within the timeout. Who has taken another's place, and has come to fewer
        barriers, meets the others where they wait.

        Raises:
            TimeoutError: see `wait_for_others`.
        """
        waiting = self.told.waits.read_value().numpy().astype(bool) & self.others()
        counts = self.told.arrived.read_value().numpy()[waiting].tolist()
        self._barriers = max(self._barriers + 1, min(counts, default=0))
        self.told.tell(self.told.arrived, self._barriers)
        self.told.tell(self.told.waits, 1)
        self.wait_for_others(self.told.arrived, self._barriers, "A barrier")
        self.told.tell(self.told.waits, 0)

    def wait_for_others(
        self,
        counts: SharedVariable,
        own: int,
        subject: str,
        enough: int | None = None,
        limit: float | None = None,
    ) -> None:
        """Wait until no worker has counted less than this one.

        But for those that have ended, are not heard of any more, wait in a barrier for
        this one, are in a later `fit`, or have not begun within the timeout.

        Args:
            counts: shape [W], int64.
            own: this worker's.
            subject: of what is told.
            enough: how many workers that have, this one included, need not wait for
                the others; None waits for all.
            limit: seconds after which the others are not waited for.

        Raises:
            TimeoutError: those that are waited for live, and take no steps: they wait
                for something else.
        """
        began = time.monotonic()
        patience, told = Patience(self, subject), False
        while True:
            late = counts.read_value().numpy() < own
            come = 1 + np.count_nonzero(~late & self.others())
            if enough is not None and come >= enough:
                return
            if limit is not None and time.monotonic() - began >= limit:
                return
            absent = late & self._workers.absent()
            absent[self._given_up] = False
            here = late & self.others()
            if counts is not self.told.arrived:
                here &= ~(self._waiting_for_this() | self.told.ahead())
            waited = time.monotonic() - began
            if not here.any():
                if absent.any() and waited > self.timeout:
                    self._give_up(np.flatnonzero(absent).tolist(), subject)
                elif not absent.any():
                    return
            if not told and waited > _TELL_SECONDS:
                told = True
                missing = np.flatnonzero(absent | here).tolist()
                _logger.info("%s waits for workers %s", subject, missing)
            patience.look(here)
            self.moves.wait()
            time.sleep(_POLL_SECONDS)

    def _waiting_for_this(self) -> np.ndarray:
        """Tell who waits in a barrier that this worker has not come to: shape [W].

        Those come nowhere else. Who has met this worker there is about to leave.
        """
        waits: np.ndarray = self.told.waits.read_value().numpy() == 1
        return waits & (self.told.arrived.read_value().numpy() > self._barriers)

    def _give_up(self, absent: list[int], subject: str) -> None:
        _logger.warning(
            "%s does not wait for workers that have not begun within %g s: %s",
            subject,
            self.timeout,
            absent,
        )
        self._given_up += absent


class Patience:
    """Limit of the time that a worker waits for others that live, and take no step."""

    def __init__(self, meetings: Meetings, subject: str, began: float = 0.0) -> None:
        """Begin to wait.

        Args:
            meetings: of this worker.
            subject: of an error.
            began: by which the caller knows this wait.
        """
        self._meetings, self._subject, self.began = meetings, subject, began
        self._last: Any = None
        self._since = self._looked = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Tell whether the last look was some time ago."""
        return time.monotonic() - self._looked > _LOOK_SECONDS

    def look(self, late: np.ndarray) -> None:
        """Look at those that are waited for: shape [W], bool.

        Raises:
            TimeoutError: they have taken no step for too long.
        """
        now, limits = time.monotonic(), self._meetings
        self._looked = now
        moved = limits.told.moved.read_value()
        seen = late.tolist(), np.where(late, moved, 0).tolist()
        if seen != self._last:
            self._last, self._since = seen, now
        if late.any() and now - self._since > limits.longest:
            raise TimeoutError(
                f"{self._subject} has waited for more than {now - self._since:.0f} s "
                f"for workers {np.flatnonzero(late).tolist()}, which live and take no "
                "step: they wait for something else. All workers must come to the same "
                f"fits and barriers, in one order. TF_DGC_TIMEOUT ({limits.timeout:g} "
                "s), and twice `liveness` beyond it, set the time."
            )


class Naps:
    """Naps of a worker that waits within a step."""

    def __init__(self, meetings: Meetings) -> None:
        """Begin outside of a wait."""
        self._meetings = meetings
        self._patience: Patience | None = None

    def nap(
        self, began: float, late: Callable[[], np.ndarray], subject: str
    ) -> np.bool_:
        """Sleep for a moment, in a wait within a step.

        Args:
            began: of the wait: it tells one from another.
            late: tells whom it is for: shape [W], bool.
            subject: of an error.

        Raises:
            TimeoutError: see `wait_for_others`.
        """
        time.sleep(_NAP_SECONDS)
        self._meetings.moves.wait()
        if self._patience is None or self._patience.began != began:
            self._patience = Patience(self._meetings, subject, began)
        if self._patience.is_due:
            self._patience.look(late())
        return np.bool_(True)
