"""Ledger of exchanges: compared, counted, saved and restored here.

Collective: all workers make the same calls in the same order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.exchanges import nodes, records
from tf_dgc.exchanges.base import Exchange, TakenOver, Update
from tf_dgc.exchanges.figures import (
    StepStats,
    TensorStats,
    counted,
    last_step,
    step_stats,
)
from tf_dgc.exchanges.opened import OpenExchanges, Subset, check
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.records import Record
from tf_dgc.values import shaped


class Ledger(OpenExchanges):
    """Exchanges of owners, and what all of them have to do in steps and in files."""

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
        exchange.counters.record(_figures(update, variables))
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
        self.of(owner, variables).parameters()

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
        records.save(self.transport.everybody, path, self.records(owners, variables))

    def records(
        self, owners: Sequence[Any] | None = None, variables: Sequence[Any] = ()
    ) -> list[Record]:
        """Return this worker's state, eagerly; arguments as in `save`."""
        choice = None if owners is None else Subset(owners, variables)
        found = [_record_of(exchange) for exchange in self.left(choice)]
        found += self._waiting.of(choice)
        return nodes.own_records(self.transport, found)

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
        _check(exchanges, found, path)
        found = nodes.joined(self.transport, found)
        for exchange, record in zip(exchanges, found, strict=False):
            exchange.load(record.arrays, record.step)
        self._waiting.put(found[len(exchanges) :], choice)

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
        self._waiting.require_none()
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
        counters = [exchange.counters for exchange in self.exchanges()]
        found = self._clock.total.read_value() if total else last_step(counters)
        return step_stats(found, self.residual_norm())


def _figures(update: Update, variables: Sequence[Any]) -> tf.Tensor:
    """Return what is counted of a step, see `figures.counted`."""
    elements = sum(v.shape.num_elements() for v in variables)
    size = sum(v.shape.num_elements() * v.dtype.size for v in variables)
    return counted(update.traffic, size, elements)


def _check(exchanges: Sequence[Exchange], found: Sequence[Record], path: Any) -> None:
    """Raise ValueError where records of a folder are not of exchanges, in order."""
    if len(found) < len(exchanges):
        raise ValueError(
            f"The state in {path} must be of {len(exchanges)} optimizers. "
            f"Received: field 'accounts' has {len(found)}"
        )
    for exchange, record in zip(exchanges, found, strict=False):
        check(exchange, record)


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
