"""Part of a server of the tensors of an arena, and the stages of a push there.

Axes: W workers, T tensors; P' elements of the arena of a server, B = P' / BLOCK blocks,
K positions. See `stamps.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tf_dgc._host.shared import SharedVariable
from tf_dgc.compression import halves
from tf_dgc.compression.arena import BLOCK
from tf_dgc.servers.shared import Servers

_NOWHERE = np.iinfo(np.int64).max


class Pushers(Protocol):
    """Members of a job, who push.

    Attributes:
        index: of this worker.
        workers: W.
        liveness: seconds until a worker that is not heard of does not count.
    """

    index: int
    workers: int
    liveness: float


class StampPlace(NamedTuple):
    """A piece of a tensor in the arenas of a worker and of its server."""

    tensor: int
    at: int  # number of the piece
    begin: int  # in the worker's arena
    offset: int  # in the server's
    shape: tuple[int, ...]  # of the piece
    start: int  # its first row

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


class PushClock:
    """Numbers of the pushes that begin at a server, and who is in the midst of one.

    Attributes:
        head: shape [], int64.
        busy: shape [W], int64.
        began: shape [W], float64: when the last push of each worker began.
    """

    def __init__(
        self, make: Callable[..., SharedVariable], workers: Pushers, device: str
    ) -> None:
        """Make handles of the variables.

        Args:
            make: takes kind, type and shape of a variable there.
            workers: of the job.
            device: of the server.
        """
        self._workers, self._device = workers, device
        self.head = make("head", tf.int64)
        self.busy = make("busy", tf.int64, workers.workers)
        self.began = make("began", tf.float64, workers.workers)

    def begin(self) -> None:
        """Give first values: no push has begun."""
        for variable in (self.head, self.began):
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        self.busy.assign(tf.fill(self.busy.shape, _NOWHERE))

    def enter(self) -> tf.Tensor:
        """Begin a push; return its number, shape [], int64."""
        own = tf.constant([[self._workers.index]])
        with tf.device(self._device):
            now = tf.raw_ops.ResourceScatterNdUpdate(
                ref=self.began.handle, indices=own, updates=[tf.timestamp()]
            )
            with _after([now]):
                marked = tf.raw_ops.ResourceScatterNdUpdate(
                    ref=self.busy.handle,
                    indices=own,
                    updates=[self.head.read_value()],
                )
            with _after([marked]):
                return tf.identity(self.head.assign_add(1, read_value=True))

    def leave(self) -> None:
        """End a push."""
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=self.busy.handle,
            indices=[[self._workers.index]],
            updates=tf.constant([_NOWHERE], tf.int64),
        )

    def time(self, after: tf.Tensor) -> tf.Tensor:
        """Return up to which push all is done: shape [], int64, on the server.

        Args:
            after: a tensor that must be there before.
        """
        with tf.control_dependencies([after]):
            head = tf.identity(self.head.read_value())
        with tf.control_dependencies([head]):
            late = tf.timestamp() - self._workers.liveness
            counts = self.began.read_value() > late
            busy = tf.where(counts, self.busy.read_value(), _NOWHERE)
            return tf.minimum(head, tf.reduce_min(busy))


class Stamps:
    """Stamps of the elements of a server's part: which push has changed each last."""

    def __init__(self, make: Callable[..., SharedVariable], blocks: int) -> None:
        """Make handles of the variables.

        Args:
            make: takes kind, type and shape of a variable there.
            blocks: B.
        """
        self._whole = make("whole", tf.int64, 1)
        self._stamps = make("of", tf.int32, blocks, BLOCK)
        self._newest = make("newest", tf.int32, blocks)  # stamp of each block

    def begin(self) -> None:
        """Give first values: no push has begun."""
        for variable in (self._whole, self._stamps, self._newest):
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def mark(self, where: tf.Tensor, number: tf.Tensor) -> list[Any]:
        """Stamp positions, shape [K], int64; return operations."""
        numbers = tf.fill(tf.shape(where), tf.cast(number, tf.int32))
        block = where // BLOCK
        return [
            tf.raw_ops.ResourceScatterNdMax(
                ref=self._stamps.handle,
                indices=tf.stack([block, where % BLOCK], 1),
                updates=numbers,
            ),
            tf.raw_ops.ResourceScatterNdMax(
                ref=self._newest.handle, indices=block[:, tf.newaxis], updates=numbers
            ),
        ]

    def mark_whole(self, number: tf.Tensor) -> Any:
        """Stamp all elements; return an operation."""
        return tf.raw_ops.ResourceScatterNdMax(
            ref=self._whole.handle, indices=[[0]], updates=tf.reshape(number, [1])
        )

    def after(self, since: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what was stamped after a push: whether all, and the positions.

        Args:
            since: number of the push, shape [], int64.

        Returns:
            Shape [], bool; and shape [K], int64, ascending.
        """
        least = tf.cast(since, tf.int32)
        blocks = tf.where(self._newest.read_value() > least)[:, 0]
        whole = self._whole.read_value()[0] > since
        stamps = tf.raw_ops.ResourceGather(
            resource=self._stamps.handle, indices=blocks, dtype=tf.int32
        )
        index = tf.where(stamps > least)
        where = tf.gather(blocks, index[:, 0]) * BLOCK + index[:, 1]
        return whole, where


class ServerPart:
    """Part of the tensors, and of their stamps, that a server has.

    Attributes:
        device: of the server.
        places: in the order of both arenas.
        size: P', a multiple of BLOCK.
        clock: of pushes.
        stamps: of the elements.
    """

    def __init__(
        self,
        name: str,
        servers: Servers,
        number: int,
        workers: Pushers,
        twins: Sequence[SharedVariable],
        places: Sequence[StampPlace],
        size: int,
    ) -> None:
        """Make handles of the variables.

        Args:
            name: prefix of theirs.
            servers: of the job.
            number: of this one.
            workers: of the job.
            twins: T variables on the servers.
            places: of their pieces, in the order of both arenas.
            size: P'.
        """
        self.device, self.places, self.size = servers.devices[number], places, size
        self._twins = twins

        def make(kind: str, dtype: tf.DType, *shape: int) -> SharedVariable:
            return servers.variable(f"{name}.{kind}", dtype, shape, number)

        self.clock = PushClock(make, workers, self.device)
        self.stamps = Stamps(make, size // BLOCK)

    @property
    def elements(self) -> int:
        """Number of elements, without padding."""
        return sum(place.size for place in self.places)

    def begin(self) -> None:
        """Give first values: no push has begun."""
        with tf.device(self.device):
            self.clock.begin()
            self.stamps.begin()

    # Pushes.

    def push(
        self, low: tf.Tensor, counts: tf.Tensor, values: tf.Tensor, scale: tf.Tensor
    ) -> None:
        """Subtract `scale * values` at positions; see `halves.split`."""
        with tf.device(self.device):
            where = halves.joined(tf.identity(low), tf.identity(counts))
            steps = tf.cast(tf.identity(values), tf.float32) * tf.identity(scale)
            # All is here before it begins.
            with tf.control_dependencies([where, steps]):
                number = self.clock.enter()
            with _after(self.stamps.mark(where, number)):
                changed = self.subtract(where, steps)
            with _after(changed):
                self.clock.leave()

    def push_all(self, values: tf.Tensor, scale: tf.Tensor) -> None:
        """Subtract `scale * values` from all elements, without padding."""
        with tf.device(self.device):
            steps = tf.identity(values) * tf.identity(scale)
            with tf.control_dependencies([steps]):
                number = self.clock.enter()
            changed = [self.stamps.mark_whole(number)]
            with _after(changed):
                cut = zip(self.places, self.cut(steps), strict=True)
                changed += [
                    tf.raw_ops.AssignSubVariableOp(
                        resource=self.handle(place),
                        value=tf.reshape(own, place.shape),
                    )
                    for place, own in cut
                ]
            with _after(changed):
                self.clock.leave()

    def mark(self) -> None:
        """Stamp everything, as it was assigned past these functions."""
        with tf.device(self.device):
            # Reading waits for what was written before.
            read = [_first(self.handle(place)) for place in self.places]
            with tf.control_dependencies(read):
                number = self.clock.enter()
            with _after([self.stamps.mark_whole(number)]):
                self.clock.leave()

    def subtract(self, where: tf.Tensor, steps: tf.Tensor) -> list[Any]:
        """Subtract at positions, shape [K]; return operations."""
        return [
            tf.raw_ops.ResourceScatterNdSub(
                ref=self.handle(place),
                indices=indices_of(where[own] - place.offset, place.shape),
                updates=steps[own],
            )
            for place, own in self.slices(where)
        ]

    # Pieces.

    def handle(self, place: StampPlace) -> Any:
        """Return the resource of a piece."""
        return self._twins[place.tensor].handle_of(place.at)

    def slices(self, where: tf.Tensor) -> list[tuple[StampPlace, slice]]:
        """Return where the positions of each piece are among those of the server."""
        offsets = [place.offset for place in self.places] + [self.size]
        bounds = tf.searchsorted(where, tf.constant(offsets, tf.int64))
        return [
            (place, slice(bounds[i], bounds[i + 1]))
            for i, place in enumerate(self.places)
        ]

    def cut(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Cut what there is of all pieces, without padding."""
        return tf.split(values, [place.size for place in self.places])


def _first(resource: Any) -> tf.Tensor:
    """Return the first row of a piece."""
    return tf.raw_ops.ResourceGather(resource=resource, indices=[0], dtype=tf.float32)


def _after(operations: Sequence[Any]) -> Any:
    """Wait for operations; those that ran eagerly are None, and done."""
    return tf.control_dependencies([each for each in operations if each is not None])


def indices_of(flat: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Return the indices of elements, shape [K], of a tensor: [K, rank], int64.

    `tf.unravel_index` refuses to have none.
    """
    found = []
    for size in reversed(shape):
        found.append(flat % size)
        flat = flat // size
    return tf.stack(found[::-1], 1)
