"""Presence of workers: who waits in which call, who has left, and who is done.

They tell it by keys of TensorFlow's coordination service, beside their collectives:

    tf_dgc/waits/CALLS/RANK     waits in that call, and where
    tf_dgc/leaves/CALLS/RANK    leaves a run after so many calls
    tf_dgc/left/TRAINING/RANK   has left a training by an exception
    tf_dgc/apart/.../RANK       waits in a collective beside the program's
    tf_dgc/done/RANK            has nothing more to do; see `leaving.py`
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports.peers import TOLD_CHARACTERS, Peers
from tf_dgc.transports.turnstile import END, STEP, Turnstile
from tf_dgc.transports.watchdog import DONE, LEFT, complaint

# A result is there before all others have fetched theirs from this worker.
_LEAVE_SECONDS = 10.0
_ASK_SECONDS = 0.5  # between questions whether all leave


class Presence:
    """Presence of all workers, as one of them sees it.

    Attributes:
        peers: where they are.
        timeout: seconds after which a collective that not all entered fails.
    """

    def __init__(self, peers: Peers, timeout: float, turnstile: Turnstile) -> None:
        """Begin with workers that are all there.

        Args:
            peers: where they are.
            timeout: seconds after which a collective that not all entered fails.
            turnstile: through which the calls of this worker go.
        """
        self.peers, self.timeout, self._turnstile = peers, timeout, turnstile
        self._places: dict[int, str] = {}  # where workers wait, and in which call
        self._waits = -1
        self._is_answered = True  # by the service, which worker 0 has
        self._done_since: dict[int, float] = {}
        self._trainings = 0  # begun
        self._left: dict[int, tuple[str, float]] = {}  # why, and since when

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Tell others where this worker leaves the context by an exception."""
        self._trainings += 1
        self._left = {}
        key = f"tf_dgc/left/{self._trainings}/{self.peers.rank}"
        try:
            yield
        except Exception as error:
            with contextlib.suppress(tf.errors.OpError):
                told = _host.tracebacks.told(error)[:TOLD_CHARACTERS]
                _host.tensorflow.publish(key, told)
            raise

    def all_leave(self) -> bool:
        """Tell whether all workers leave where this one does.

        Who goes on waits in the next call, and says so when it has waited a while, see
        `in_vain`; who leaves, too, has made as many calls.
        """
        calls = int(self._turnstile.calls.numpy())
        peers = set(self.peers.others)
        deadline = time.monotonic() + self.timeout
        with contextlib.suppress(tf.errors.OpError):  # an outer run asks once more
            _host.tensorflow.publish(f"tf_dgc/leaves/{calls}/{self.peers.rank}")
        while peers and time.monotonic() < deadline:
            for peer in sorted(peers):
                if _is_published(f"tf_dgc/waits/{calls + 1}/{peer}"):
                    return False
                if _is_published(f"tf_dgc/leaves/{calls}/{peer}"):
                    peers.discard(peer)
            if peers & set(self.peers.unreachable()):
                return False
            time.sleep(_ASK_SECONDS)
        return not peers

    def abort(self) -> None:
        """Abort collectives, which others have not entered; name those."""
        self._places.setdefault(self.peers.rank, self._turnstile.where)
        text = complaint(self.peers.rank, self.timeout, self._places)
        others = set(self.peers.others) - self._places.keys()
        text += self.peers.absent(others if self._is_answered else [0])
        _host.tensorflow.abort_collectives(text + self.peers.missing())

    def in_vain(self, calls: int) -> bool:
        """Tell the others where this worker waits, and whether one waits elsewhere.

        What all do is the same, so that those who wait have made as many calls. Where
        one is in a graph its names are not known here, and all wait out the time.
        """
        key = f"tf_dgc/waits/{calls}"
        own = self._turnstile.where
        if int(self._turnstile.calls.numpy()) != calls:
            return False  # it went on meanwhile
        if own != self._places.get(self.peers.rank) or self._waits != calls:
            self._places, self._waits = {self.peers.rank: own}, calls
            self._is_answered = False
            with contextlib.suppress(tf.errors.OpError):
                _host.tensorflow.publish(f"{key}/{self.peers.rank}", own)
                self._is_answered = True
        for peer in {*self.peers.others, self.peers.rank} - self._places.keys():
            with contextlib.suppress(tf.errors.OpError):
                self._places[peer] = _host.tensorflow.wait_for_key(
                    f"{key}/{peer}", 0.001
                )
        self._places |= dict.fromkeys(_done(self.peers.others, self._done_since), DONE)
        self._places |= self._gone_from_training()
        places = {*self._places.values()}
        elsewhere = DONE in places or len(places - {STEP}) > 1
        elsewhere |= any(each.startswith(LEFT) for each in places)
        # Whose data have ended waits eagerly for all, none of whom is in a step then.
        elsewhere |= STEP in places and any(e.startswith(END) for e in places)
        return elsewhere and int(self._turnstile.calls.numpy()) == calls

    def _gone_from_training(self) -> dict[int, str]:
        """Return why workers left this training by an exception a while ago."""
        for peer in set(self.peers.others) - self._left.keys():
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
        self._others = [rank for rank in ranks if rank != presence.peers.rank]
        self._done_since: dict[int, float] = {}

    def _key(self, rank: int) -> str:
        """Return the key that a worker sets where it waits in this collective."""
        return f"tf_dgc/apart/{self._group}/{self._waits}/{rank}"

    def abort(self) -> None:
        """Abort the collective, which others have not entered; name those."""
        absent = [peer for peer in self._others if not _is_published(self._key(peer))]
        peers, timeout = self._presence.peers, self._presence.timeout
        text = complaint(peers.rank, timeout, {peers.rank: self._turnstile.where})
        text += peers.absent(absent) + peers.missing(among=self._ranks)
        _host.tensorflow.abort_collectives(text)

    def in_vain(self, calls: int) -> bool:
        """Tell the others that this worker waits there, and whether one is done."""
        self._waits = calls
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.publish(self._key(self._presence.peers.rank))
        return bool(_done(self._others, self._done_since))


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
