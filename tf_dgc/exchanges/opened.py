"""Exchanges that are open, and states that wait for those to come.

Collective: all workers make the same calls in the same order.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tf_dgc.exchanges import replicas
from tf_dgc.exchanges.base import Exchange, Place, TakenOver
from tf_dgc.exchanges.figures import Clock
from tf_dgc.exchanges.records import Record
from tf_dgc.exchanges.residual import OWNED, RATES
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport


class Make(Protocol):
    """Makes the exchange of a place, given what it may take over.

    Attributes:
        lockstep: whether all workers meet in each step, the first ones included.
    """

    lockstep: bool

    def __call__(self, place: Place, taken_over: TakenOver | None) -> Exchange:
        """Return a new exchange, its state all zero."""


class Subset(NamedTuple):
    """Exchanges of these owners, or of variables that are all among these."""

    owners: Sequence[Any]
    variables: Sequence[Any]

    def has(self, owner: Any, variables: Sequence[Any]) -> bool:
        """Tell whether an exchange is meant."""
        known = {id(variable) for variable in self.variables}
        return _has(self.owners, owner) or known.issuperset(map(id, variables))

    def meets(self, other: "Subset") -> bool:
        """Tell whether an exchange may be of both."""
        own, others = (
            {id(each) for part in choice for each in part} for choice in (self, other)
        )
        return not own.isdisjoint(others)


class WaitingStates:
    """States that were restored for exchanges to come, in their order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._parts: list[tuple[list[Record], Subset | None]] = []

    def __bool__(self) -> bool:
        """Tell whether any were restored."""
        return bool(self._parts)

    @property
    def are_left(self) -> bool:
        """Tell whether any of them still wait."""
        return any(records for records, _ in self._parts)

    def require_none(self) -> None:
        """Raise ValueError where any of them still wait."""
        if self.are_left:
            raise ValueError(
                "What was restored is taken over in the first step of its optimizer; "
                "flush after that"
            )

    def of(self, choice: Subset | None) -> list[Record]:
        """Return those of exchanges that may be of a choice; None is all."""
        parts = [records for records, own in self._parts if _meet(own, choice)]
        return [record for records in parts for record in records]

    def put(self, records: Sequence[Record], choice: Subset | None = None) -> None:
        """Let states wait, in the place of those of the same exchanges."""
        others = [part for part in self._parts if not _meet(part[1], choice)]
        self._parts = [*others, (list(records), choice)]

    def take(self, exchange: Exchange) -> Record | None:
        """Return the state of an exchange that was opened, if one waits.

        Raises:
            ValueError: it is not of this exchange.
        """
        for records, choice in self._parts:
            known = choice is None or choice.has(exchange.owner(), exchange.variables)
            if records and known:
                check(exchange, records[0])
                return records.pop(0)
        return None


class OpenExchanges:
    """The exchanges of any number of owners, such as optimizers, over one transport.

    The first gradients of an owner open its exchange: its variables are compared over
    all workers and its state is created, outside of the graph that is being traced. It
    lives as long as the owner.

    Attributes:
        transport: to the other workers.
        lockstep: whether all workers meet in each step.
        opened: how many exchanges were opened so far.
        part_of: returns the part that an owner's variables are, in bytes, of what is
            trained in one step of a model.
        newest: the last of them, where not all workers meet in each step; whether
            its owner is gone or not, which workers learn at different times.
    """

    def __init__(self, transport: Transport, make: Make) -> None:
        """Wait for owners.

        Args:
            transport: to the other workers.
            make: makes the exchange of a place, given what it may take over.
        """
        self.transport = transport
        self._make, self.lockstep = make, make.lockstep
        self._exchanges: weakref.WeakKeyDictionary[
            Any, dict[tuple[int, ...], Exchange]
        ] = weakref.WeakKeyDictionary()
        self.opened = 0
        self.part_of: Callable[[object, Sequence[Any]], float] = lambda *_: 1.0
        self.newest: Exchange | None = None
        self._waiting = WaitingStates()
        self._clock = Clock()
        self._interval = replicas.default_interval()

    def decide(self, transport: Transport, make: Make) -> None:
        """Let exchanges be over these workers, by this maker, before there is any."""
        self.transport = transport
        self._make, self.lockstep = make, make.lockstep

    @property
    def untouched(self) -> bool:
        """Tell whether no exchange was opened yet, and none restored."""
        return not (self.opened or self._waiting)

    def begin_anew(self, kept: Sequence[Record]) -> None:
        """Forget all owners; those to come take over these records, in their order."""
        self._exchanges.clear()
        self.opened, self.newest = 0, None
        self._waiting.put(kept)

    def begins_with(self, owner: object) -> bool:
        """Tell whether an owner has no exchange yet, and no state waits for it."""
        return owner not in self._exchanges and not self._waiting.are_left

    def knows(self, owner: object, variables: Sequence[Any]) -> bool:
        """Tell whether an owner's variables have an exchange."""
        return _key(variables) in self._exchanges.get(owner, {})

    def of(
        self,
        owner: object,
        variables: Sequence[Any],
        taken_over: TakenOver | None = None,
    ) -> Exchange:
        """Return the exchange of an owner's variables; open it the first time."""
        own = self._exchanges.setdefault(owner, {})
        key = _key(variables)
        if key not in own:
            with tf.init_scope():
                own[key] = self._open(owner, variables, taken_over)
        return own[key]

    def _open(
        self, owner: object, variables: Sequence[Any], taken_over: TakenOver | None
    ) -> Exchange:
        place = Place(
            self.transport,
            self.opened,
            list(variables),
            weakref.ref(owner),
            self._clock,
            self._interval,
            list(self._exchanges[owner].values()),
            self.part_of(owner, variables),
        )
        listed = {f"variable {i}": form for i, form in enumerate(place.forms)}
        listed["TF_DGC_CHECK_STEPS"] = str(self._interval)
        handshake.agree(self.transport.everybody, "trained variables", listed)
        self.opened += 1
        exchange = self._make(place, taken_over)
        self.newest = None if exchange.lockstep else exchange
        if (record := self._waiting.take(exchange)) is not None:
            exchange.load(record.arrays, record.step)
        return exchange

    def exchanges(self, choice: Subset | None = None) -> list[Exchange]:
        """Return those of living owners, or of a choice, in the order of opening."""
        found = [each for own in self._exchanges.values() for each in own.values()]
        if choice is not None:
            found = [e for e in found if choice.has(e.owner(), e.variables)]
        return sorted(found, key=lambda exchange: exchange.number)

    def left(self, choice: Subset | None = None) -> list[Exchange]:
        """Return `exchanges`, less those whose owners are garbage, on all alike."""
        gc.collect()
        return self.exchanges(choice)


def _key(variables: Sequence[Any]) -> tuple[int, ...]:
    """Return what tells sets of variables apart: names repeat themselves in Keras 3."""
    return tuple(id(variable) for variable in variables)


def _meet(one: Subset | None, other: Subset | None) -> bool:
    """Tell whether an exchange may be of both; None is all."""
    return one is None or other is None or one.meets(other)


def _has(owners: Sequence[Any], owner: Any) -> bool:
    return any(owner is each for each in owners)


def check(exchange: Exchange, record: Record) -> None:
    """Raise ValueError where a record is not of an exchange."""
    shapes = {name: v.shape.as_list() for name, v in exchange.state.items()}
    saved = {name: list(array.shape) for name, array in record.arrays.items()}
    if saved.get(OWNED) in shapes.values():  # which every compressed exchange takes
        del saved[OWNED]
    if saved.get(RATES) == []:  # written where one stood for all tensors
        saved[RATES] = shapes.get(RATES, [])
    for field, own, found in (
        ("variables", exchange.forms, record.variables),
        ("arrays", shapes, saved),
    ):
        if own != found:
            raise ValueError(
                f"The restored state does not fit {exchange.name}: field {field!r} "
                f"must be {own}. Received: {found}. Go on with the model, optimizer "
                "and strategy, and their settings, that it was saved with; or begin "
                "anew, in another folder"
            )
