"""Tensors on the servers that are changed at positions; what changed since a time.

A server counts the pushes that begin there, `head`, and knows for each element its
stamp, the number of the last push that changed it.

    push of worker k:   busy[k] <- head;  head <- head + 1;  s <- head
                        stamp[S] <- max(stamp[S], s);  w[S] <- w[S] - step
                        busy[k] <- nowhere
    pull:               h <- min(head, min busy)
                        I <- {i: stamp[i] > since};  x[I] <- w[I];  since <- h

What a pull may have missed is of a push under way, whose number is above h, so that it
comes with the next one. Values are those of the servers: to have one twice does no
harm, and what all have, once nobody pushes, is w to the bit. Nothing is locked. A push
of a worker that died in its midst has stamped what it did not change, or stamped what
it did; its mark in `busy` counts no more after `liveness`.

Where the whole of a server's part changes it is `whole` that is stamped.

Axes: W workers, M servers, T tensors, which are cut into pieces; P elements of the
arena of the worker, P' of that of a server, B = P' / BLOCK blocks, K positions.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tf_dgc import _host
from tf_dgc._host.shared import SharedVariable
from tf_dgc.compression import halves
from tf_dgc.compression.arena import BLOCK, Layout
from tf_dgc.servers.shared import Servers

ALL = -1  # the time before all pushes
_NOWHERE = np.iinfo(np.int64).max
_VALUE_BYTES = 4


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


class ServerPart(NamedTuple):
    """Part of the tensors, and of their stamps, that a server has.

    Attributes:
        device: of the server.
        places: in the order of both arenas.
        size: P', a multiple of BLOCK.
        head: shape [], int64.
        busy: shape [W], int64.
        began: shape [W], float64: when the last push of each worker began.
        whole: shape [1], int64.
        stamps: shape [B, BLOCK], int32.
        newest: shape [B], int32: the largest stamp of each block.
    """

    device: str
    places: tuple[StampPlace, ...]
    size: int
    head: SharedVariable
    busy: SharedVariable
    began: SharedVariable
    whole: SharedVariable
    stamps: SharedVariable
    newest: SharedVariable

    @property
    def elements(self) -> int:
        """Number of elements, without padding."""
        return sum(place.size for place in self.places)


class Stamped:
    """The tensors of an arena, as a worker pushes and pulls them.

    Attributes:
        twins: T variables on the servers.
        parts: of the servers that have any of them.
        rivals: others that change some of the twins, and stamp that on their own.
        always: shape [], bool: whether all is to be pulled each time.
    """

    def __init__(
        self,
        name: str,
        servers: Servers,
        workers: Pushers,
        layout: Layout,
        twins: Sequence[SharedVariable],
        rivals: Sequence["Stamped"] = (),
    ) -> None:
        """Make handles of the variables on the servers.

        Args:
            name: prefix of theirs.
            servers: of the job.
            workers: of the job.
            layout: of the worker's arena, T segments.
            twins: T variables of float32.
            rivals: made before. If they are still used, what they push is pulled with
                all the rest, and they themselves pull all from now on.
        """
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            self.always = tf.Variable(False, trainable=False, synchronization=own)
        self.rivals = list(rivals)
        for each in self.rivals:
            each.always.assign(True)
        self.twins, self._workers, self._size = list(twins), workers, layout.size
        placed: list[list[StampPlace]] = [[] for _ in servers.devices]
        sizes = [0] * len(placed)
        self._starts, self._owners, self._shifts = [], [], []
        for tensor, (segment, twin) in enumerate(
            zip(layout.segments, twins, strict=True)
        ):
            inner = segment.size // segment.shape[0]
            for at, piece in enumerate(twin.pieces):
                server = servers.devices.index(piece.device)
                shape = (piece.stop - piece.start, *segment.shape[1:])
                begin = segment.offset + piece.start * inner
                place = StampPlace(tensor, at, begin, sizes[server], shape, piece.start)
                placed[server].append(place)
                self._starts.append(begin)
                self._owners.append(server)
                self._shifts.append(place.offset - begin)
                sizes[server] += -(-place.size // BLOCK) * BLOCK
        self._numbers = [j for j, places in enumerate(placed) if places]
        self.parts = [
            self._part(f"{name}.stamps.{j}", servers, j, placed[j], sizes[j])
            for j in self._numbers
        ]

    def _part(
        self,
        name: str,
        servers: Servers,
        j: int,
        places: Sequence[StampPlace],
        size: int,
    ) -> ServerPart:
        def make(kind: str, dtype: tf.DType, *shape: int) -> SharedVariable:
            return servers.variable(f"{name}.{kind}", dtype, shape, j)

        workers, blocks = self._workers.workers, size // BLOCK
        return ServerPart(
            servers.devices[j],
            tuple(places),
            size,
            make("head", tf.int64),
            make("busy", tf.int64, workers),
            make("began", tf.float64, workers),
            make("whole", tf.int64, 1),
            make("of", tf.int32, blocks, BLOCK),
            make("newest", tf.int32, blocks),
        )

    def begin(self) -> None:
        """Give first values: no push has begun."""
        for part in self.parts:
            with tf.device(part.device):
                for variable in part[3:]:
                    value = tf.zeros(variable.shape, variable.dtype)
                    variable.assign(value)
                part.busy.assign(tf.fill(part.busy.shape, _NOWHERE))

    # Up.

    def push(self, positions: tf.Tensor, values: tf.Tensor, scale: tf.Tensor) -> None:
        """Subtract `scale * values` at positions of the arena.

        Args:
            positions: shape [K], int64, ascending.
            values: shape [K], of floating point.
            scale: shape [], float32.
        """
        starts = tf.constant(self._starts, tf.int64)
        owner = tf.searchsorted(starts, positions, side="right") - 1
        local = positions + tf.gather(tf.constant(self._shifts, tf.int64), owner)
        server = tf.gather(tf.constant(self._owners), owner)
        for j, part in zip(self._numbers, self.parts, strict=True):
            mine = tf.where(server == j)[:, 0]
            low, counts = halves.split(tf.gather(local, mine), part.size)
            self._push(part, low, counts, tf.gather(values, mine), scale)

    def _push(
        self,
        part: ServerPart,
        low: tf.Tensor,
        counts: tf.Tensor,
        values: tf.Tensor,
        scale: tf.Tensor,
    ) -> None:
        with tf.device(part.device):
            where = halves.joined(tf.identity(low), tf.identity(counts))
            steps = tf.cast(tf.identity(values), tf.float32) * tf.identity(scale)
            # All is here before it begins.
            with tf.control_dependencies([where, steps]):
                number = self.enter(part)
            stamped = self.stamp(part, where, number)
            with _after(stamped):
                changed = self.subtract(part, where, steps)
            with _after(changed):
                self.leave(part)

    def push_all(self, values: tf.Tensor, scale: tf.Tensor) -> None:
        """Subtract `scale * values` from all of the arena: shape [P], float32."""
        for part in self.parts:
            own = [values[place.begin :][: place.size] for place in part.places]
            joined = tf.concat(own, 0)
            with tf.device(part.device):
                steps = tf.identity(joined) * tf.identity(scale)
                with tf.control_dependencies([steps]):
                    number = self.enter(part)
                changed = [self._stamp_whole(part, number)]
                with _after(changed):
                    cut = zip(part.places, self._cut(part, steps), strict=True)
                    changed += [
                        tf.raw_ops.AssignSubVariableOp(
                            resource=self._handle(place),
                            value=tf.reshape(own, place.shape),
                        )
                        for place, own in cut
                    ]
                with _after(changed):
                    self.leave(part)

    def mark(self) -> None:
        """Stamp everything, as it was assigned past these functions."""
        for part in self.parts:
            with tf.device(part.device):
                # Reading waits for what was written before.
                read = [self._first(place) for place in part.places]
                with tf.control_dependencies(read):
                    number = self.enter(part)
                with _after([self._stamp_whole(part, number)]):
                    self.leave(part)

    def wait(self) -> None:
        """Wait, eagerly, until servers have done what was begun eagerly.

        A tf.function would overtake it.
        """
        for part in self.parts:
            part.head.read_value().numpy()

    def _first(self, place: StampPlace) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(
            resource=self._handle(place), indices=[0], dtype=tf.float32
        )

    # The stages of a push, on the server.

    def enter(self, part: ServerPart) -> tf.Tensor:
        """Begin a push; return its number, shape [], int64."""
        own = tf.constant([[self._workers.index]])
        with tf.device(part.device):
            now = tf.raw_ops.ResourceScatterNdUpdate(
                ref=part.began.handle, indices=own, updates=[tf.timestamp()]
            )
            with _after([now]):
                marked = tf.raw_ops.ResourceScatterNdUpdate(
                    ref=part.busy.handle,
                    indices=own,
                    updates=[part.head.read_value()],
                )
            with _after([marked]):
                return tf.identity(part.head.assign_add(1, read_value=True))

    def stamp(self, part: ServerPart, where: tf.Tensor, number: tf.Tensor) -> list[Any]:
        """Stamp positions of a server, shape [K], int64; return operations."""
        numbers = tf.fill(tf.shape(where), tf.cast(number, tf.int32))
        block = where // BLOCK
        return [
            tf.raw_ops.ResourceScatterNdMax(
                ref=part.stamps.handle,
                indices=tf.stack([block, where % BLOCK], 1),
                updates=numbers,
            ),
            tf.raw_ops.ResourceScatterNdMax(
                ref=part.newest.handle, indices=block[:, tf.newaxis], updates=numbers
            ),
        ]

    def _stamp_whole(self, part: ServerPart, number: tf.Tensor) -> Any:
        return tf.raw_ops.ResourceScatterNdMax(
            ref=part.whole.handle, indices=[[0]], updates=tf.reshape(number, [1])
        )

    def subtract(
        self, part: ServerPart, where: tf.Tensor, steps: tf.Tensor
    ) -> list[Any]:
        """Subtract at positions of a server, shape [K]; return operations."""
        return [
            tf.raw_ops.ResourceScatterNdSub(
                ref=self._handle(place),
                indices=_indices(where[own] - place.offset, place.shape),
                updates=steps[own],
            )
            for place, own in self._slices(part, where)
        ]

    def leave(self, part: ServerPart) -> None:
        """End a push."""
        tf.raw_ops.ResourceScatterNdUpdate(
            ref=part.busy.handle,
            indices=[[self._workers.index]],
            updates=tf.constant([_NOWHERE], tf.int64),
        )

    def _handle(self, place: StampPlace) -> Any:
        return self.twins[place.tensor].handle_of(place.at)

    @staticmethod
    def _slices(part: ServerPart, where: tf.Tensor) -> list[tuple[StampPlace, slice]]:
        """Return where the positions of each piece are among those of a server."""
        offsets = [place.offset for place in part.places] + [part.size]
        bounds = tf.searchsorted(where, tf.constant(offsets, tf.int64))
        return [
            (place, slice(bounds[i], bounds[i + 1]))
            for i, place in enumerate(part.places)
        ]

    @staticmethod
    def _cut(part: ServerPart, values: tf.Tensor) -> list[tf.Tensor]:
        """Cut what there is of all pieces, without padding."""
        return tf.split(values, [place.size for place in part.places])

    # Down.

    def pull(
        self, mirrors: Sequence[Any], since: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Let mirrors have what has changed since a time.

        Args:
            mirrors: T variables of this worker.
            since: what it returned then, or ALL: shape [parts, 2], int64.

        Returns:
            Of each part the time of now, and that of its rivals: shape [parts, 2],
            int64; and bytes that came, shape [], int64.
        """
        times, size = [], tf.zeros([], tf.int64)
        since = tf.where(self.always.read_value(), tf.constant(ALL, tf.int64), since)
        for i, part in enumerate(self.parts):
            found = self._changes(part, since[i])
            self._take(part, mirrors, found)
            times.append(found.time)
            size += tf.size(found.values, tf.int64) * _VALUE_BYTES
            size += halves.cost(tf.size(found.low), part.size)
        return tf.stack(times), size

    def _changes(self, part: ServerPart, since: tf.Tensor) -> "_Changes":
        with tf.device(part.device):
            since = tf.identity(since)
            own = self.time_of(part, since)
            rivals = [
                self.time_of(other, since)
                for each in self.rivals
                for other in each.parts
                if other.device == part.device
            ]
            time = tf.stack([own, sum(rivals, tf.zeros([], tf.int64))])
            with tf.control_dependencies([time]):
                least = tf.cast(since[0], tf.int32)
                blocks = tf.where(part.newest.read_value() > least)[:, 0]
                whole = part.whole.read_value()[0] > since[0]
                whole |= time[1] != since[1]
            stamps = tf.raw_ops.ResourceGather(
                resource=part.stamps.handle, indices=blocks, dtype=tf.int32
            )
            index = tf.where(stamps > least)
            where = tf.gather(blocks, index[:, 0]) * BLOCK + index[:, 1]
            count = tf.size(where, tf.int64)
            cost = count * _VALUE_BYTES + halves.cost(count, part.size)
            everything = whole | (cost >= part.elements * _VALUE_BYTES)
            with tf.control_dependencies([where, everything]):
                low, counts, values = tf.cond(
                    everything,
                    lambda: self._all_of(part),
                    lambda: self._some_of(part, where),
                )
        return _Changes(time, everything, low, counts, values)

    def time_of(self, part: ServerPart, after: tf.Tensor) -> tf.Tensor:
        """Return up to which push all is done: shape [], int64, on the server.

        Args:
            part: of the server.
            after: a tensor that must be there before.
        """
        with tf.control_dependencies([after]):
            head = tf.identity(part.head.read_value())
        with tf.control_dependencies([head]):
            late = tf.timestamp() - self._workers.liveness
            counts = part.began.read_value() > late
            busy = tf.where(counts, part.busy.read_value(), _NOWHERE)
            return tf.minimum(head, tf.reduce_min(busy))

    def _all_of(self, part: ServerPart) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.device(part.device):
            read = [
                tf.raw_ops.ReadVariableOp(resource=self._handle(p), dtype=tf.float32)
                for p in part.places
            ]
            values = tf.concat([tf.reshape(value, [-1]) for value in read], 0)
            counts = tf.zeros([halves.rooms(part.size)], tf.int32)
            return tf.zeros([0], tf.uint16), counts, values

    def _some_of(
        self, part: ServerPart, where: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.device(part.device):
            read = [
                tf.raw_ops.ResourceGatherNd(
                    resource=self._handle(place),
                    indices=_indices(where[own] - place.offset, place.shape),
                    dtype=tf.float32,
                )
                for place, own in self._slices(part, where)
            ]
            return *halves.split(where, part.size), tf.concat(read, 0)

    def _take(
        self, part: ServerPart, mirrors: Sequence[Any], found: "_Changes"
    ) -> None:
        low, counts, values = (tf.identity(each) for each in found[2:])

        def everything() -> None:
            for place, own in zip(part.places, self._cut(part, values), strict=True):
                _replace_rows(mirrors[place.tensor], place, own)

        def some() -> None:
            where = halves.joined(low, counts)
            for place, own in self._slices(part, where):
                mirror = mirrors[place.tensor]
                before = place.start * (place.size // place.shape[0])
                flat = where[own] - place.offset + before
                index = _indices(flat, mirror.shape.as_list())
                tf.raw_ops.ResourceScatterNdUpdate(
                    ref=mirror.handle, indices=index, updates=values[own]
                )

        with tf.device("CPU:0"):  # which chooses what is done
            chosen = tf.identity(found.everything)
        tf.cond(chosen, everything, some)


class _Changes(NamedTuple):
    """Changes that a server tells."""

    time: tf.Tensor  # shape [2], int64
    everything: tf.Tensor  # shape [], bool: values of all, without positions
    low: tf.Tensor  # as in halves.py
    counts: tf.Tensor
    values: tf.Tensor  # shape [K], or of all elements


def _after(operations: Sequence[Any]) -> Any:
    """Wait for operations; those that ran eagerly are None, and done."""
    return tf.control_dependencies([each for each in operations if each is not None])


def _indices(flat: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Return the indices of elements, shape [K], of a tensor: [K, rank], int64.

    `tf.unravel_index` refuses to have none.
    """
    found = []
    for size in reversed(shape):
        found.append(flat % size)
        flat = flat // size
    return tf.stack(found[::-1], 1)


def _replace_rows(mirror: Any, place: StampPlace, values: tf.Tensor) -> None:
    rows = tf.reshape(values, place.shape)
    if place.shape[0] == mirror.shape[0]:
        _host.shared.bypassed(mirror, "assign")(rows)
        return
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=mirror.handle,
        begin=[place.start],
        end=[place.start + place.shape[0]],
        strides=[1],
        value=rows,
    )
