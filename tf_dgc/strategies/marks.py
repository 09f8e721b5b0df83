"""Times of a worker's steps: computing, exchange, update, noted where tensors pass.

Nothing of this is in a step unless a callback asks for it: then the collectives of the
strategy's transport, and the exchanges of its ledger, are wrapped on these two objects,
and the step is traced anew. A mark is a reading of the clock between two operations.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import keras
import tensorflow as tf

from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport
from tf_dgc.transports.mesh import Sites

_COLLECTIVES: Final = ("all_reduce", "all_gather", "all_to_all")
_EXCHANGES: Final = ("gradients", "parameters")
# Names of what is not a collective.
EXCHANGE: Final = "exchange"
APPLY: Final = "apply"
FLIGHT: Final = "round in flight"
_BARRIERS = 5


class Span(NamedTuple):
    """A piece of a worker's time.

    Attributes:
        name: EXCHANGE, APPLY, FLIGHT, or that of a collective.
        begin: seconds since the epoch, by the worker's own clock.
        end: the same.
    """

    name: str
    begin: float
    end: float


class Reader:
    """A callback's access to the times of a strategy's steps."""

    def __init__(self, strategy: BaseStrategy, model: keras.Model) -> None:
        """Have a model's step traced anew, with marks in it."""
        if strategy not in _MARKS:
            _MARKS[strategy] = StepMarks(strategy)
        self._strategy, self._model, self._spans = strategy, model, list[Span]()
        _MARKS[strategy].readers.add(self)
        model.make_train_function(force=True)

    def take(self) -> list[Span]:
        """Return what was noted since the last time, in the order of beginnings."""
        marks = _MARKS[self._strategy]
        found = marks.take()
        for reader in marks.readers:
            reader._spans += found
        own, self._spans = self._spans, []
        return own

    def end(self) -> None:
        """Have the step traced anew without marks, if nobody else wants them."""
        marks = _MARKS[self._strategy]
        marks.readers.discard(self)
        if not marks.readers:
            _MARKS.pop(self._strategy).detach()
            self._model.make_train_function(force=True)


class StepMarks:
    """The marks of one worker, from the first reader to the last.

    Attributes:
        readers: those who want them.
    """

    def __init__(self, strategy: BaseStrategy) -> None:
        """Note from now on what passes."""
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._mesh, self._ledger = strategy.mesh, strategy._ledger
        make = strategy.inner.core.make
        self._flights: Callable[[], list[Any]] = getattr(make, "flights", list)
        self._names: list[str] = []
        with tf.init_scope(), tf.device("CPU:0"):
            # Without a limit, and filled from several threads.
            self._noted = tf.queue.FIFOQueue(-1, (tf.int64, tf.float64), ((), ()))
        self._attach()

    def _attach(self) -> None:
        for transport, site in {id(t[0]): t for t in self._transports()}.values():
            for method in _COLLECTIVES:
                noted = self._around(getattr(transport, method), site)
                setattr(transport, method, noted)
        gradients, parameters = (getattr(self._ledger, name) for name in _EXCHANGES)

        def exchanged(owner: object, local: Sequence[Any], *args: Any) -> Any:
            event = self._event(EXCHANGE)
            update = gradients(owner, self._mark(event, list(local)), *args)
            own = [g for g in update.gradients if g is not None]
            told = [x for x in (update.traffic, update.applies) if x is not None]
            _, passed = self._mark(event + 1, (told, own))
            rest = iter(passed)
            found = [None if g is None else next(rest) for g in update.gradients]
            return update._replace(gradients=found)

        def applied(owner: object, variables: Sequence[Any]) -> None:
            event = self._event(APPLY)
            # From the end of the exchange on; nothing else comes before the update.
            parameters(owner, variables)
            self._mark(event + 1, [v.read_value() for v in variables])

        self._ledger.gradients = exchanged  # type: ignore[assignment,method-assign]
        self._ledger.parameters = applied  # type: ignore[method-assign]

    def detach(self) -> None:
        """Leave the strategy as it was."""
        for part in (*(each for each, _ in self._transports()), self._ledger):
            for method in (*_COLLECTIVES, *_EXCHANGES):
                vars(part).pop(method, None)

    def _transports(self) -> list[tuple[Transport, str]]:
        """Return transports, and the site whose collectives these are, if one's."""
        found = [(self._mesh.everybody, ""), (self._ledger.transport, "")]
        sites = self._mesh.voices
        if isinstance(sites, Sites):
            found.append((sites.within, f"{sites.hosts[sites.rank]}: "))
        return found

    def _event(self, name: str) -> int:
        """Return the number of the beginning of something; its end has the next."""
        self._names += [name, name]
        return len(self._names) - 2

    def _around(self, collective: Callable[..., Any], site: str) -> Callable[..., Any]:
        def noted(tensors: Any, name: str, *args: Any) -> Any:
            event = self._event(site + name)
            found = collective(self._mark(event, tensors), name, *args)
            return self._mark(event + 1, found)

        return noted

    def _mark(self, event: int, tensors: Any) -> Any:
        """Note the time when tensors are there; return them, a moment later."""
        flat = tf.nest.flatten(tensors, expand_composites=True)
        with tf.device("CPU:0"):
            with tf.control_dependencies(flat):
                now = tf.timestamp()
            self._noted.enqueue((tf.constant(event, tf.int64), now))
        with tf.control_dependencies([now]):
            flat = [tf.identity(tensor) for tensor in flat]
        return tf.nest.pack_sequence_as(tensors, flat, expand_composites=True)

    def take(self) -> list[Span]:
        """Return what was noted since the last time."""
        count = int(self._noted.size())
        events, times = self._noted.dequeue_many(count) if count else ((), ())
        begun: dict[int, list[float]] = {}
        found = [Span(FLIGHT, *times) for times in self._flights()]
        last = 0.0  # end of an exchange
        for event, now in sorted(
            ((int(e), float(t)) for e, t in zip(events, times, strict=True)),
            key=lambda noted: (noted[1], noted[0]),
        ):
            name, first = self._names[event], event & ~1
            if event == first:
                begun.setdefault(first, []).append(now)
            elif name == APPLY:
                found.append(Span(APPLY, last or now, now))
            elif begun.get(first):
                found.append(Span(name, begun[first].pop(0), now))
                last = now if name == EXCHANGE else last
        return sorted(found, key=lambda span: span.begin)


_MARKS: weakref.WeakKeyDictionary[BaseStrategy, StepMarks] = weakref.WeakKeyDictionary()


def clock_difference(transport: Transport) -> float:
    """Return by how many seconds this worker's clock is ahead of the chief's.

    All workers call it alike. What is left is some of the network's latency.
    """
    times = []
    for _ in range(_BARRIERS):
        transport.barrier()
        times.append(time.time())
    told = handshake.tell(transport, "clocks", {"times": times})
    chief = told[0]["times"]
    differences = sorted(own - his for own, his in zip(times, chief, strict=True))
    return differences[_BARRIERS // 2]


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return times from begin to end as such that do not meet, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def without(
    whole: tuple[float, float], taken: Iterable[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the parts of a time that others, in order and apart, leave over."""
    left, begin = [], whole[0]
    for start, end in taken:
        if end <= begin or start >= whole[1]:
            continue
        if start > begin:
            left.append((begin, start))
        begin = max(begin, end)
    if begin < whole[1]:
        left.append((begin, whole[1]))
    return left


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Return seconds of times that do not meet."""
    return sum(end - begin for begin, end in spans)
