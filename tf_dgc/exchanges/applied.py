"""Weights that are changed by what N workers sent, without a sum in between if may be.

Axes: N workers, P arena elements, K message slots, T tensors of the arena.
"""

import abc
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.compression import arena, selection
from tf_dgc.compression.arena import Layout
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports.sums import Sparse
from tf_dgc.values import widened

# Of smaller arenas copies take less time than a loop over workers in TensorFlow.
_COPIED = 2**18  # elements


class Target(abc.ABC):
    """Target of the outcome of a sum."""

    @abc.abstractmethod
    def take_sparse(
        self, total: Sparse, slots: Sequence[int], number: tf.Tensor | None
    ) -> None:
        """Take what was sent; arguments as of `subtract`."""

    @abc.abstractmethod
    def fused(self, device: str) -> list[tf.Variable] | None:
        """Return the variables that `taken` changes; None where not all are there.

        Args:
            device: where a step is compiled as a whole.
        """

    @staticmethod
    @abc.abstractmethod
    def taken(
        layout: Layout, values: Sequence[tf.Tensor], total: Sparse
    ) -> list[tf.Tensor]:
        """Return other values of `fused`, with the bits of `take_sparse`; pure.

        Args:
            layout: of the arena.
            values: of these variables.
            total: what was sent, [N, K]; none of it at P or more counts, under XLA.
        """

    @abc.abstractmethod
    def take_dense(self, total: tf.Tensor) -> None:
        """Take a sum, shape [P]."""

    @abc.abstractmethod
    def parts(self) -> list[Any]:
        """Return the sum of each tensor; None where that has been subtracted."""


class Weights(Target):
    """The weights themselves, T tensors of float32, from which it is subtracted."""

    def __init__(self, layout: Layout, weights: Sequence[tf.Variable]) -> None:
        """Take the weights."""
        self._layout, self._weights = layout, list(weights)

    def take_sparse(
        self, total: Sparse, slots: Sequence[int], number: tf.Tensor | None
    ) -> None:
        """Subtract one message after the other."""
        subtract(self._weights, self._layout, total, slots, number)

    def fused(self, device: str) -> list[tf.Variable] | None:
        """Return the weights."""
        return self._weights if set(by_device(self._weights)) == {device} else None

    @staticmethod
    def taken(
        layout: Layout, values: Sequence[tf.Tensor], total: Sparse
    ) -> list[tf.Tensor]:
        """Subtract one message after the other, all tensors in one arena."""
        whole = arena.flatten(layout, values)
        whole = selection.added(whole, total.positions, -total.values)
        return arena.unflatten(layout, whole)

    def take_dense(self, total: tf.Tensor) -> None:
        """Subtract a sum, shape [P]."""
        for device, numbers in by_device(self._weights).items():
            offsets = [self._layout.segments[i].offset for i in numbers]
            tensors = [self._weights[i] for i in numbers]
            inplace.update(device, arena.subtract, tensors, total, offsets)

    def parts(self) -> list[Any]:
        """Return None of each."""
        return [None] * len(self._weights)


class Total(Target):
    """An arena, for the optimizer to take a step along.

    Attributes:
        variable: the last sum, shape [P].
    """

    def __init__(self, layout: Layout, device: str, by_senders: bool = False) -> None:
        """Create the arena, zero, outside of any graph.

        Args:
            layout: of the arena.
            device: where it is.
            by_senders: whether an element is to be N times the mean over the workers
                that sent it, in the place of their sum.
        """
        self._layout, self._device, self._by_senders = layout, device, by_senders
        with tf.init_scope(), tf.device(device):
            self.variable = own_variable(tf.zeros([layout.size]), "dgc_total")

    def take_sparse(
        self, total: Sparse, slots: Sequence[int], number: tf.Tensor | None
    ) -> None:
        """Add up what was sent."""
        sum_up = selection.average if self._by_senders else selection.densify
        inplace.update(self._device, sum_up, self.variable, *total)

    def fused(self, device: str) -> list[tf.Variable] | None:
        """Return the arena."""
        is_there = self.variable.device == device and not self._by_senders
        return [self.variable] if is_there else None

    @staticmethod
    def taken(
        layout: Layout, values: Sequence[tf.Tensor], total: Sparse
    ) -> list[tf.Tensor]:
        """Add up what was sent."""
        return [selection.densify(values[0], total.positions, total.values)]

    def take_dense(self, total: tf.Tensor) -> None:
        """Take a sum, shape [P]."""
        self.variable.assign(total)

    def parts(self) -> list[Any]:
        """Return the sum of each tensor, float32."""
        return arena.unflatten(self._layout, self.variable.read_value())


def subtract(
    weights: Sequence[tf.Variable],
    layout: Layout,
    total: Sparse,
    slots: Sequence[int],
    number: tf.Tensor | None = None,
) -> None:
    """Subtract what N workers sent from the tensors of an arena themselves.

    The stage that stays has a compiled function of its own. The others, whose messages
    are of very many sizes, share that of a middle one, and look a few times more.

    Args:
        weights: T tensors.
        layout: of the arena.
        total: what was sent, [N, K].
        slots: K in each of some stages.
        number: of the present one, shape [], int32; None where there is one.
    """
    if not weights:
        return
    devices = by_device(weights)
    if len(devices) == 1 and layout.size <= _COPIED:
        (device,) = devices
        form = {"layout": layout, "room": slots[-1]}
        sent = selection.in_rooms(total.positions, total.values, slots)
        args = inplace.bound(_subtracted, **form), list(weights), *sent
        inplace.update(device, *args)
        return
    *passing, last = slots
    if not passing:
        _subtract(weights, layout, total, last)
        return
    middle = round(math.sqrt(max(passing) * min(passing)))
    tf.cond(
        number == len(passing),
        lambda: _subtract(weights, layout, total, last),
        lambda: _subtract(weights, layout, total, middle),
    )


def _subtracted(
    weights: Sequence[tf.Tensor],
    positions: tf.Tensor,
    values: tf.Tensor,
    counts: tf.Tensor,
    *,
    layout: Layout,
    room: int,
) -> list[tf.Tensor]:
    """Subtract what N workers sent from copies in one arena, `room` slots in one turn.

    Args:
        weights: T tensors.
        positions: see `selection.in_rooms`.
        values: likewise.
        counts: likewise.
        layout: of the arena.
        room: a divisor of the number of slots.
    """
    workers = positions.shape[0]

    def look(rank: tf.Tensor, turn: tf.Tensor, whole: tf.Tensor) -> Any:
        begin, size = [rank, turn * room], [1, room]
        where = tf.slice(positions, begin, size)[0, :, tf.newaxis]
        whole = tf.tensor_scatter_nd_sub(whole, where, tf.slice(values, begin, size)[0])
        more = (turn + 1) * room < counts[rank]
        return tf.where(more, rank, rank + 1), tf.where(more, turn + 1, 0), whole

    # One worker after the other, so that the weights have the same bits everywhere.
    none = tf.zeros([], tf.int32)
    start = none, none, arena.flatten(layout, weights)
    *_, whole = tf.while_loop(lambda rank, *_: rank < workers, look, start)
    return arena.unflatten(layout, whole)


def _subtract(
    weights: Sequence[tf.Variable], layout: Layout, total: Sparse, slots: int
) -> None:
    """Subtract, about so many slots of a message in one turn."""
    workers = total.positions.shape[0]
    # So many places of a message are looked at for each tensor, again and again until
    # all of its own were.
    share = [segment.size / layout.elements for segment in layout.segments]
    rooms = [min(slots, int(2 * slots * part) + 64) for part in share]
    by = [
        (device, own, selection.windows([rooms[i] for i in own]))
        for device, own in by_device(weights).items()
    ]

    bounds = arena.bounds(layout, total.positions)
    turns = tf.reduce_max((bounds[:, 1:] - bounds[:, :-1] - 1) // rooms, axis=1) + 1
    with tf.device("CPU:0"):
        turns = tf.cast(turns, tf.int32)

    def look(rank: tf.Tensor, turn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        sent = Sparse(total.positions[rank], total.values[rank])
        begins = bounds[rank, :-1] + tf.cast(turn, tf.int64) * rooms
        for device, own, windows in by:
            offsets = [layout.segments[i].offset for i in own]
            first = tf.gather(begins, own)
            found = selection.looked_into(windows, *sent, first, offsets)
            parts = [weights[i] for i in own]
            inplace.update(device, selection.subtract, parts, *found, windows.rooms)
        with tf.device("CPU:0"):
            more = turn + 1 < turns[rank]
            return tf.where(more, rank, rank + 1), tf.where(more, turn + 1, 0)

    # One worker after the other, so that the weights have the same bits everywhere.
    # Of integers that TensorFlow keeps on the host, which knows when it is done.
    start = tf.zeros([], tf.int32), tf.zeros([], tf.int32)
    tf.while_loop(lambda rank, _: rank < workers, look, start, parallel_iterations=1)


def subtract_all(variables: Sequence[tf.Variable], parts: Sequence[Any]) -> None:
    """Subtract tensors of the same shapes, in at least float32."""
    for variable, part in zip(variables, parts, strict=True):
        value = widened(variable.read_value())
        stepped = value - tf.cast(part, value.dtype)
        variable.assign(tf.cast(stepped, variable.dtype))


def by_device(variables: Sequence[tf.Variable]) -> dict[str, list[int]]:
    """Return the indices of the variables that are on each device."""
    found: dict[str, list[int]] = {}
    for i, variable in enumerate(variables):
        found.setdefault(variable.device, []).append(i)
    return found
