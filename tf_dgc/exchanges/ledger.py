"""Ledger of exchanges: opened, compared, counted, saved and restored here.

Collective: all workers make the same calls in the same order.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tf_dgc.exchanges import nodes, records, replicas
from tf_dgc.exchanges.base import Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.figures import (
    COUNTED,
    Clock,
    StepStats,
    TensorStats,
    counted,
)
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.records import Record
from tf_dgc.exchanges.residual import OWNED, RATES
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport
from tf_dgc.values import shaped


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


class Waiting(NamedTuple):
    """States that were restored for exchanges to come, in their order."""

    records: list[Record]
    choice: Subset | None  # None is all


class Ledger:
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
        self._waiting: list[Waiting] = []
        self._clock = Clock()
        self._interval = replicas.default_interval()

    def decide(self, make: Make) -> None:
        """Let exchanges be made by another maker, before there is any."""
        self._make, self.lockstep = make, make.lockstep

    @property
    def untouched(self) -> bool:
        """Tell whether no exchange was opened yet, and none restored."""
        return not (self.opened or self._waiting)

    # Steps.

    def gradients(
        self,
        owner: object,
        local: Sequence[Any],
        variables: Sequence[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Exchange this worker's gradients, before the owner's step.

        Args:
            owner: the optimizer, or what else these gradients belong to.
            local: tensors or IndexedSlices of static shape, none of them None.
            variables: what they belong to, of the same length: objects with a name,
                a shape and a dtype, the same objects at every step.
            taken_over: what the caller leaves to the exchange.
            part: what the gradients of this worker count; None on all workers, or on
                none. By default those of all count alike.

        Raises:
            ValueError: the workers' variables differ.
            tf.errors.InvalidArgumentError: their weights have drifted apart, see
                `replicas`, or their learning rates differ.
        """
        exchange = self.of(owner, variables, taken_over)
        if exchange.lockstep:
            exchange.replicas.compare(variables, 1)
        known = [shaped(g, v.shape) for g, v in zip(local, variables, strict=True)]
        known, part = nodes.gradients(self.transport, known, exchange.name, part)
        update = exchange.gradients(known, taken_over, part)
        elements = sum(v.shape.num_elements() for v in variables)
        size = sum(v.shape.num_elements() * v.dtype.size for v in variables)
        with tf.device("CPU:0"):
            figures = counted(update.traffic, size, elements)
        exchange.counters.record(figures)
        return update

    def compare(self, owners: Sequence[Any]) -> None:
        """Compare, eagerly, what some train in steps in which all workers meet.

        Args:
            owners: which live on all workers, as the optimizers of a model.

        Raises:
            tf.errors.InvalidArgumentError: weights have drifted apart, see `replicas`.
        """
        for exchange in self.exchanges(Subset(owners, ())):
            if exchange.lockstep:
                exchange.replicas.compare(exchange.variables, 0, now=True)

    def parameters(self, owner: object, variables: Sequence[Any]) -> None:
        """Exchange parameters, where it is they that are exchanged: after the step.

        Args:
            owner: as in `gradients`.
            variables: as in `gradients`.
        """
        self._exchanges[owner][_key(variables)].parameters()

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
        for restored, choice in self._waiting:
            if restored and (choice is None or choice.has(owner, exchange.variables)):
                _check(exchange, restored[0])
                record = restored.pop(0)
                exchange.load(record.arrays, record.step)
                break
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

    # What is kept back.

    def save(
        self,
        path: Any,
        owners: Sequence[Any] | None = None,
        variables: Sequence[Any] = (),
    ) -> None:
        """Write this state, of all workers, to a folder. All workers call this.

        Args:
            path: of the folder.
            owners: only what is theirs; by default all there is.
            variables: with `owners`, also what trains only some of these.
        """
        everybody = self.transport.everybody
        records.save(everybody, path, self.records(owners, variables))

    def records(
        self, owners: Sequence[Any] | None = None, variables: Sequence[Any] = ()
    ) -> list[Record]:
        """Return this worker's state, eagerly; arguments as in `save`."""
        choice = None if owners is None else Subset(owners, variables)
        found = [_record_of(exchange) for exchange in self.left(choice)]
        waiting = [each for each in self._waiting if _meet(each.choice, choice)]
        found += [record for each in waiting for record in each.records]
        return nodes.own_records(self.transport, found)

    def begin_anew(self, kept: Sequence[Record]) -> None:
        """Forget all owners; those to come take over these records, in their order."""
        self._exchanges.clear()
        self.opened, self.newest = 0, None
        self._waiting = [Waiting(list(kept), None)]

    def restore(
        self,
        path: Any,
        owners: Sequence[Any] | None = None,
        variables: Sequence[Any] = (),
    ) -> None:
        """Take over a state that was saved. All workers call this.

        Owners that have not exchanged yet get theirs when they do, in the order of
        their first exchanges.

        Args:
            path: of the folder.
            owners: only for these; by default for all.
            variables: as in `save`.

        Raises:
            ValueError: the state is not of these variables; nothing was changed.
        """
        found = records.load(self.transport.everybody, path)
        choice = None if owners is None else Subset(owners, variables)
        exchanges = self.left(choice)
        if len(found) < len(exchanges):
            raise ValueError(
                f"The state in {path} must be of {len(exchanges)} optimizers. "
                f"Received: field 'accounts' has {len(found)}"
            )
        for exchange, record in zip(exchanges, found, strict=False):
            _check(exchange, record)
        found = nodes.joined(self.transport, found)
        for exchange, record in zip(exchanges, found, strict=False):
            exchange.load(record.arrays, record.step)
        others = [each for each in self._waiting if not _meet(each.choice, choice)]
        self._waiting = [*others, Waiting(found[len(exchanges) :], choice)]

    def flush(
        self,
        variables: Sequence[Any],
        apply: Callable[[Any, Update, Sequence[Any]], None],
    ) -> None:
        """Apply what all workers keep back of these variables, and clear it.

        Args:
            variables: of which.
            apply: takes an owner, an update, and the variables this is of. It is not
                called where parameters are exchanged, which step by themselves.

        Raises:
            ValueError: a restored state waits for its owner's first step.
        """
        if any(each.records for each in self._waiting):
            raise ValueError(
                "What was restored is taken over in the first step of its optimizer; "
                "flush after that"
            )
        for exchange in self.left():
            exchange.flush(variables, functools.partial(apply, exchange.owner()))

    # Figures.

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        kept = [part for each in self.exchanges() for part in each.kept()]
        return tf.linalg.global_norm(kept) if kept else tf.zeros([])

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        return [s for each in self.exchanges() for s in each.tensor_stats(reset)]

    def stats(self, total: bool = False) -> StepStats:
        """Return this worker's figures of the last step, or summed over all steps."""
        if total:
            found = self._clock.total.read_value()
        else:
            last = [exchange.counters.last for exchange in self.exchanges()]
            found = sum(last, tf.zeros([COUNTED], tf.int64))
        figures = tf.unstack(found, COUNTED)
        return StepStats._make([*figures[:4], self.residual_norm(), figures[4]])


def _key(variables: Sequence[Any]) -> tuple[int, ...]:
    """Return what tells sets of variables apart: names repeat themselves in Keras 3."""
    return tuple(id(variable) for variable in variables)


def _meet(one: Subset | None, other: Subset | None) -> bool:
    return one is None or other is None or one.meets(other)


def _has(owners: Sequence[Any], owner: Any) -> bool:
    return any(owner is each for each in owners)


def _check(exchange: Exchange, record: Record) -> None:
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
                f"must be {own}. Received: {found}"
            )


def _record_of(exchange: Exchange) -> Record:
    """Return the state of an exchange; its steps last: the state waits for rounds."""
    arrays = {
        name: _array_of(value)
        for part in (exchange.state, exchange.owed)
        for name, value in part.items()
    }
    return Record(exchange.forms, exchange.steps, arrays)


def _array_of(value: Any) -> np.ndarray:
    """Return what a variable or tensor holds in a type that NumPy has by itself."""
    value = tf.convert_to_tensor(value)
    return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()
