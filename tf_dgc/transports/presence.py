"""Presence of workers: who waits in which call, who has left, and who is done.

They tell it by keys of TensorFlow's coordination service, beside their collectives:

    tf_dgc/waits/CALLS/RANK     waits in that call, and where
    tf_dgc/leaves/CALLS/RANK    leaves a run after so many calls
    tf_dgc/left/TRAINING/RANK   has left a training by an exception
    tf_dgc/apart/.../RANK       waits in a collective beside the program's
    tf_dgc/done/RANK            has nothing more to do
    tf_dgc/seen/RANK            has seen that all are done
"""

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import ending, rendezvous
from tf_dgc.transports.turnstile import END, STEP, Turnstile
from tf_dgc.transports.watchdog import DONE, LEFT, complaint

_logger = logging.getLogger("tf_dgc")

# A result is there before all others have fetched theirs from this worker.
_LEAVE_SECONDS = 10.0
# How often a worker that waits for others to be done looks whether they are there.
_LOOK_SECONDS = 2.0
# What ends all workers alike, each shall tell in its own words before it hears others.
_TELL_SECONDS = 1.0
_TOLD_CHARACTERS = 1_000
_LOST = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError)
# How the service on worker 0 names workers that are stopped or cut off.
_SILENT = re.compile(r"stopped sending heartbeats\):((?:\s*/job:\S+)+)")


class Presence:
    """Presence of all workers, as one of them sees it.

    Attributes:
        rank: of this worker.
        timeout: seconds after which a collective that not all entered fails.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        timeout: float,
        turnstile: Turnstile,
    ) -> None:
        """Begin with workers that are all there.

        Args:
            addresses: "host:port" of each worker.
            rank: of this one.
            timeout: seconds after which a collective that not all entered fails.
            turnstile: through which the calls of this worker go.
        """
        self._addresses, self.rank, self.timeout = list(addresses), rank, timeout
        self._turnstile, self._everybody = turnstile, set(range(len(addresses)))
        self._places: dict[int, str] = {}  # where workers wait, and in which call
        self._waits = -1
        self._done_since: dict[int, float] = {}
        self._trainings = 0  # begun
        self._left: dict[int, tuple[str, float]] = {}  # why, and since when

    @property
    def _others(self) -> set[int]:
        return self._everybody - {self.rank}

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Tell others where this worker leaves the context by an exception."""
        self._trainings += 1
        self._left = {}
        key = f"tf_dgc/left/{self._trainings}/{self.rank}"
        try:
            yield
        except Exception as error:
            with contextlib.suppress(tf.errors.OpError):
                told = _host.tracebacks.told(error)[:_TOLD_CHARACTERS]
                _host.tensorflow.publish(key, told)
            raise

    def all_leave(self) -> bool:
        """Tell whether all workers leave where this one does.

        Who goes on waits in the next call, and says so when it has waited a while, see
        `in_vain`; who leaves, too, has made as many calls.
        """
        calls = int(self._turnstile.calls.numpy())
        peers = self._others
        deadline = time.monotonic() + self.timeout
        with contextlib.suppress(tf.errors.OpError):  # an outer run asks once more
            _host.tensorflow.publish(f"tf_dgc/leaves/{calls}/{self.rank}")
        while peers and time.monotonic() < deadline:
            for peer in sorted(peers):
                if _is_published(f"tf_dgc/waits/{calls + 1}/{peer}"):
                    return False
                if _is_published(f"tf_dgc/leaves/{calls}/{peer}"):
                    peers.discard(peer)
            if peers & set(rendezvous.unreachable(self._addresses, self.rank)):
                return False
            time.sleep(_LOOK_SECONDS / 4)
        return not peers

    def leave(self) -> None:
        """Stay for those who still fetch something or do not end; if this failed, tell.

        TensorFlow takes workers that leave before others for crashed, and says so.
        """
        if (error := ending.failure()) is not None:
            self._tell(error)
            return
        deadline = time.monotonic() + self.timeout
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.publish(f"tf_dgc/done/{self.rank}")
            # Rank 0 has the service, and leaves after those who look into it.
            what, first = ("done", 0) if self.rank else ("seen", 1)
            for peer in range(first, len(self._addresses)):
                self._wait_for(f"tf_dgc/{what}/{peer}", peer, deadline)
            _host.tensorflow.publish(f"tf_dgc/seen/{self.rank}")

    def _wait_for(self, key: str, peer: int, deadline: float) -> None:
        """Wait until another worker has published a key, while that is there."""
        while (seconds := deadline - time.monotonic()) > 0:
            try:
                _host.tensorflow.wait_for_key(key, min(seconds, _LOOK_SECONDS))
                return
            except tf.errors.DeadlineExceededError:
                if peer in rendezvous.unreachable(self._addresses, self.rank):
                    return

    def _tell(self, error: BaseException) -> None:
        """Tell the user who is missing, and the others what this worker died of."""
        if isinstance(error, _LOST) and (missing := self.missing(str(error))):
            _logger.error("Worker %d ends.%s", self.rank, missing)
        time.sleep(_TELL_SECONDS)
        text = _host.tracebacks.told(error)[:_TOLD_CHARACTERS]
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.report_failure(f"Worker {self.rank} failed: {text}")

    def missing(self, error: str = "", among: Sequence[int] | None = None) -> str:
        """Say which other workers do not answer now, or did not by an error's text.

        Args:
            error: the text.
            among: the workers to look for; None for all.
        """
        ranks = range(len(self._addresses)) if among is None else among
        addresses = [self._addresses[rank] for rank in ranks]
        found = rendezvous.unreachable(addresses, ranks.index(self.rank))
        gone = {ranks[i] for i in found}
        for tasks in _SILENT.findall(error):
            gone |= {int(task) for task in re.findall(r"/task:(\d+)", tasks)}
        if self.rank and "CoordinationService/" in error:
            gone.add(0)  # which has that service; TensorFlow does not say so
        each = self.named(sorted(gone))
        return f" No longer reachable: worker {each}." if gone else ""

    def named(self, ranks: Iterable[int]) -> str:
        """Return workers with their addresses."""
        return ", ".join(f"{rank} ({self._addresses[rank]})" for rank in ranks)

    def abort(self) -> None:
        """Abort collectives, which others have not entered; name those."""
        self._places.setdefault(self.rank, self._turnstile.where)
        text = complaint(self.rank, self.timeout, self._places)
        _host.tensorflow.abort_collectives(text + self.missing())

    def in_vain(self, calls: int) -> bool:
        """Tell the others where this worker waits, and whether one waits elsewhere.

        What all do is the same, so that those who wait have made as many calls. Where
        one is in a graph its names are not known here, and all wait out the time.
        """
        key = f"tf_dgc/waits/{calls}"
        own = self._turnstile.where
        if int(self._turnstile.calls.numpy()) != calls:
            return False  # it went on meanwhile
        if own != self._places.get(self.rank) or self._waits != calls:
            self._places, self._waits = {self.rank: own}, calls
            with contextlib.suppress(tf.errors.OpError):
                _host.tensorflow.publish(f"{key}/{self.rank}", own)
        for peer in self._everybody - self._places.keys():
            with contextlib.suppress(tf.errors.OpError):
                self._places[peer] = _host.tensorflow.wait_for_key(
                    f"{key}/{peer}", 0.001
                )
        self._places |= dict.fromkeys(_done(self._others, self._done_since), DONE)
        self._places |= self._gone_from_training()
        places = {*self._places.values()}
        elsewhere = DONE in places or len(places - {STEP}) > 1
        elsewhere |= any(each.startswith(LEFT) for each in places)
        # Whose data have ended waits eagerly for all, none of whom is in a step then.
        elsewhere |= STEP in places and any(e.startswith(END) for e in places)
        return elsewhere and int(self._turnstile.calls.numpy()) == calls

    def _gone_from_training(self) -> dict[int, str]:
        """Return why workers left this training by an exception a while ago."""
        for peer in self._others - self._left.keys():
            key = f"tf_dgc/left/{self._trainings}/{peer}"
            with contextlib.suppress(tf.errors.OpError):
                told = _host.tensorflow.wait_for_key(key, 0.001)
                self._left[peer] = told, time.monotonic()
        late = time.monotonic() - _LEAVE_SECONDS
        left = [(p, told) for p, (told, since) in self._left.items() if since < late]
        return {peer: f"{LEFT} {told}" for peer, told in left}


class PresenceApart:
    """Presence of workers in collectives that they count beside the program's."""

    def __init__(
        self,
        presence: Presence,
        ranks: Sequence[int],
        group: int,
        turnstile: Turnstile,
    ) -> None:
        """Take who is in them.

        Args:
            presence: of all workers.
            ranks: of those that are in them, among all workers.
            group: key of theirs.
            turnstile: through which these collectives of this worker go.
        """
        self._presence, self._ranks, self._group = presence, ranks, group
        self._turnstile, self._waits = turnstile, -1
        self._peers = [rank for rank in ranks if rank != presence.rank]
        self._done_since: dict[int, float] = {}

    def _key(self, rank: int) -> str:
        """Return the key that a worker sets where it waits in this collective."""
        return f"tf_dgc/apart/{self._group}/{self._waits}/{rank}"

    def abort(self) -> None:
        """Abort the collective, which others have not entered; name those."""
        absent = [peer for peer in self._peers if not _is_published(self._key(peer))]
        presence, own = self._presence, self._presence.rank
        text = complaint(own, presence.timeout, {own: self._turnstile.where})
        if absent:
            text += f" Not in it: worker {presence.named(absent)}."
        text += presence.missing(among=self._ranks)
        _host.tensorflow.abort_collectives(text)

    def in_vain(self, calls: int) -> bool:
        """Tell the others that this worker waits there, and whether one is done."""
        self._waits = calls
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.publish(self._key(self._presence.rank))
        return bool(_done(self._peers, self._done_since))


def _done(peers: Iterable[int], since: dict[int, float]) -> list[int]:
    """Return the workers that have been done for longer than a message takes.

    Args:
        peers: to look for.
        since: when each was first seen to be done; gets more.
    """
    for peer in peers:
        if peer not in since and _is_published(f"tf_dgc/done/{peer}"):
            since[peer] = time.monotonic()
    late = time.monotonic() - _LEAVE_SECONDS
    return [peer for peer, seen in since.items() if seen < late]


def _is_published(key: str) -> bool:
    try:
        _host.tensorflow.wait_for_key(key, 0.001)
    except tf.errors.OpError:
        return False
    return True
