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

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc._host.shared import SharedVariable
from tf_dgc.compression import halves
from tf_dgc.compression.arena import BLOCK, Layout
from tf_dgc.servers.shared import Servers
from tf_dgc.servers.stamped_part import Pushers, ServerPart, StampPlace, indices_of

ALL = -1  # the time before all pushes
_VALUE_BYTES = 4


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
        self.twins = list(twins)
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
            ServerPart(
                f"{name}.stamps.{j}",
                servers,
                j,
                workers,
                self.twins,
                tuple(placed[j]),
                sizes[j],
            )
            for j in self._numbers
        ]

    def begin(self) -> None:
        """Give first values: no push has begun."""
        for part in self.parts:
            part.begin()

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
            part.push(low, counts, tf.gather(values, mine), scale)

    def push_all(self, values: tf.Tensor, scale: tf.Tensor) -> None:
        """Subtract `scale * values` from all of the arena: shape [P], float32."""
        for part in self.parts:
            own = [values[place.begin :][: place.size] for place in part.places]
            part.push_all(tf.concat(own, 0), scale)

    def mark(self) -> None:
        """Stamp everything, as it was assigned past these functions."""
        for part in self.parts:
            part.mark()

    def wait(self) -> None:
        """Wait, eagerly, until servers have done what was begun eagerly.

        A tf.function would overtake it.
        """
        for part in self.parts:
            part.clock.head.read_value().numpy()

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
            found = _changes(part, self.rivals, since[i])
            _take(part, mirrors, found)
            times.append(found.time)
            size += tf.size(found.values, tf.int64) * _VALUE_BYTES
            size += halves.cost(tf.size(found.low), part.size)
        return tf.stack(times), size


class _Changes(NamedTuple):
    """Changes that a server tells."""

    time: tf.Tensor  # shape [2], int64
    everything: tf.Tensor  # shape [], bool: values of all, without positions
    low: tf.Tensor  # as in halves.py
    counts: tf.Tensor
    values: tf.Tensor  # shape [K], or of all elements


def _changes(part: ServerPart, rivals: Sequence[Stamped], since: tf.Tensor) -> _Changes:
    with tf.device(part.device):
        since = tf.identity(since)
        own = part.clock.time(since)
        others = [
            other.clock.time(since)
            for each in rivals
            for other in each.parts
            if other.device == part.device
        ]
        time = tf.stack([own, sum(others, tf.zeros([], tf.int64))])
        with tf.control_dependencies([time]):
            whole, where = part.stamps.after(since[0])
            whole |= time[1] != since[1]
        count = tf.size(where, tf.int64)
        cost = count * _VALUE_BYTES + halves.cost(count, part.size)
        everything = whole | (cost >= part.elements * _VALUE_BYTES)
        with tf.control_dependencies([where, everything]):
            low, counts, values = tf.cond(
                everything,
                lambda: _all_of(part),
                lambda: _some_of(part, where),
            )
    return _Changes(time, everything, low, counts, values)


def _all_of(part: ServerPart) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    with tf.device(part.device):
        read = [
            tf.raw_ops.ReadVariableOp(resource=part.handle(p), dtype=tf.float32)
            for p in part.places
        ]
        values = tf.concat([tf.reshape(value, [-1]) for value in read], 0)
        counts = tf.zeros([halves.rooms(part.size)], tf.int32)
        return tf.zeros([0], tf.uint16), counts, values


def _some_of(
    part: ServerPart, where: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    with tf.device(part.device):
        read = [
            tf.raw_ops.ResourceGatherNd(
                resource=part.handle(place),
                indices=indices_of(where[own] - place.offset, place.shape),
                dtype=tf.float32,
            )
            for place, own in part.slices(where)
        ]
        return *halves.split(where, part.size), tf.concat(read, 0)


def _take(part: ServerPart, mirrors: Sequence[Any], found: _Changes) -> None:
    low, counts, values = (tf.identity(each) for each in found[2:])

    def everything() -> None:
        for place, own in zip(part.places, part.cut(values), strict=True):
            _replace_rows(mirrors[place.tensor], place, own)

    def some() -> None:
        where = halves.joined(low, counts)
        for place, own in part.slices(where):
            mirror = mirrors[place.tensor]
            before = place.start * (place.size // place.shape[0])
            flat = where[own] - place.offset + before
            index = indices_of(flat, mirror.shape.as_list())
            tf.raw_ops.ResourceScatterNdUpdate(
                ref=mirror.handle, indices=index, updates=values[own]
            )

    with tf.device("CPU:0"):  # which chooses what is done
        chosen = tf.identity(found.everything)
    tf.cond(chosen, everything, some)


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
