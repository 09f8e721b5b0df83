"""Tables that live on the servers only: their first values, rows, and gradients.

Axes: R rows of D elements, cut by rows into pieces; U different rows of a batch.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._host.shared import Cursor, Piece, Table
from tf_dgc.servers.chief_records import compare
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import CONTAINER, Servers

# So many elements are drawn at once, from a seed of their own, so that first values do
# not depend on the number of servers.
_CHUNK = 2**22
_COPIED = 2**20  # elements that are written or loaded at once
# Of which each element is drawn, or set, by itself.
_BY_ELEMENT = (
    keras.initializers.RandomUniform,
    keras.initializers.RandomNormal,
    keras.initializers.TruncatedNormal,
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


class Tables:
    """The tables of a worker, in the order of their making."""

    def __init__(self, servers: Servers, members: Members, strategy: Any) -> None:
        """Begin without any."""
        self._servers, self._members, self._strategy = servers, members, strategy
        self._count = 0

    def make(
        self,
        shape: Sequence[int],
        dtype: Any,
        initializer: Any,
        beside: Table | None = None,
    ) -> Table:
        """Make a table, with first values that the chief lets the servers draw.

        Args:
            shape: [R, D].
            dtype: of the elements.
            initializer: of Keras.
            beside: a table of the same shape, to which it belongs.

        Raises:
            ValueError: the initializer needs the whole table; or the chief has made
                another table.
            TimeoutError: the chief has made none.
        """
        check_initializer(initializer)
        name = f"table.{self._count}"
        self._count += 1
        devices = self._servers.devices
        edges = [shape[0] * j // len(devices) for j in range(len(devices) + 1)]
        pieces = [
            Piece(device, *edge)
            for device, edge in zip(devices, itertools.pairwise(edges), strict=True)
        ]
        if beside is not None:
            pieces = beside.pieces
        table = Table(
            name,
            CONTAINER,
            dtype,
            shape,
            pieces,
            Cursor() if beside is None else beside.cursor,
            watched=beside is None,
            strategy=self._strategy,
            writes=lambda: self._members.succession.counts,
        )
        config = initializer.get_config()
        if self._members.is_chief and "seed" in config:
            config["seed"] = _seed_of(initializer)
        record = {
            "shape": list(shape),
            "dtype": table.dtype.name,
            "initializer": type(initializer).__name__,
            "servers": len(devices),
        }
        told = self._servers.variable(f"{name}.record", tf.string)
        with tf.init_scope():
            there = self._members.records.share(
                "embedding tables",
                told,
                record,
                lambda: fill(table, type(initializer), config),
            )
        compare("embedding tables", there, record, self._members.index)
        return table


def check_initializer(initializer: Any) -> None:
    """Refuse what draws an element by what the whole table is.

    Raises:
        ValueError: it does.
    """
    constant = isinstance(initializer, keras.initializers.Constant)
    if type(initializer) not in _BY_ELEMENT or (
        constant and np.ndim(initializer.value) > 0
    ):
        names = ", ".join(each.__name__ for each in _BY_ELEMENT)
        raise ValueError(
            "`embeddings_initializer` of a table that lives on the servers only must "
            f"give each element by itself: {names}. Received: {initializer!r}. Take "
            "one of these, or set a larger `DownpourConfig(table_bytes=...)`"
        )


def _seed_of(initializer: Any) -> int:
    seed = initializer.seed
    if isinstance(seed, keras.random.SeedGenerator):
        seed = int(keras.ops.convert_to_numpy(seed.next())[0])
    return int(seed)


def fill(table: Table, kind: Any, config: dict[str, Any]) -> None:
    """Let the servers draw the values of a table, chunk by chunk.

    Args:
        table: to be filled.
        kind: class of the initializer.
        config: of the initializer.
    """
    rows, width = table.whole
    chunk = max(1, _CHUNK // max(width, 1))
    for at in table.cursor.over(len(table.pieces)):
        device, start, stop = table.pieces[at]
        with tf.device(device):
            zeros = tf.zeros([stop - start, width], table.dtype)
            tf.raw_ops.AssignVariableOp(resource=table.handle, value=zeros)
            del zeros  # what follows is to be done in place
            for first in range(start - start % chunk, stop, chunk):
                own = _drawn(kind, config, first // chunk)
                last = min(first + chunk, rows)
                values = own([last - first, width], table.dtype.name)
                begin, end = max(first, start), min(last, stop)
                own_rows = values[begin - first : end - first]
                _replace(table, begin - start, end - start, own_rows)


def _drawn(kind: Any, config: dict[str, Any], chunk: int) -> Any:
    if "seed" not in config:
        return kind.from_config(config)
    state = np.random.SeedSequence([config["seed"] % 2**63, chunk]).generate_state(1)
    return kind.from_config({**config, "seed": int(state[0] >> 1)})


def look_up(
    table: Table, ids: tf.Tensor, count: Callable[[tf.Tensor], object] | None = None
) -> tf.Tensor:
    """Return rows of a table; their gradient is of these rows alone.

    Args:
        table: shape [R, D].
        ids: any shape, integer, in [-R, R).
        count: takes the bytes that were fetched, shape [], int64.

    Returns:
        Shape [*ids.shape, D].
    """
    rows, width = table.whole
    flat = tf.cast(tf.reshape(ids, [-1]), tf.int64)
    flat = tf.where(flat < 0, flat + rows, flat)
    sound = tf.debugging.Assert(
        tf.reduce_all((flat >= 0) & (flat < rows)),
        [f"Indices of an Embedding must be in [0, {rows}). Received:", flat],
    )
    with tf.control_dependencies([sound] if sound is not None else []):
        wanted = tf.unique(tf.sort(flat)).y
    found = _read(table, wanted)
    if count is not None:
        count(tf.size(found, tf.int64) * table.dtype.size)

    @tf.custom_gradient
    def as_of(handle: tf.Tensor, found: tf.Tensor) -> Any:
        def gradient(upstream: Any) -> Any:
            values = tf.convert_to_tensor(upstream)
            form = tf.constant([rows, width], tf.int64)
            return tf.IndexedSlices(values, wanted, form), None

        return tf.identity(found), gradient

    table.accessed()
    found = as_of(table.handle, tf.stop_gradient(found))
    result = tf.gather(found, tf.searchsorted(wanted, flat, out_type=tf.int64))
    result = tf.reshape(result, tf.concat([tf.shape(ids), [width]], 0))
    return tf.ensure_shape(result, [*ids.shape, width])


def _read(table: Table, wanted: tf.Tensor) -> tf.Tensor:
    """Return rows: `wanted` is shape [U], int64, ascending."""
    edges = [piece.start for piece in table.pieces] + [table.pieces[-1].stop]
    bounds = tf.searchsorted(wanted, tf.constant(edges, tf.int64))
    parts = []
    for at in table.cursor.over(len(table.pieces)):
        device, start, _ = table.pieces[at]
        own = wanted[bounds[at] : bounds[at + 1]] - start
        with tf.device(device):
            parts.append(table.sparse_read(tf.identity(own)))
    return tf.concat(parts, 0)


def read_rows(table: Table, start: int, stop: int) -> tf.Tensor:
    """Return rows [start, stop) of a table: shape [stop - start, D]."""
    return _read(table, tf.range(start, stop, dtype=tf.int64))


def write(table: Table, target: Any) -> None:
    """Copy a table to what takes rows by slices, such as a dataset of HDF5."""
    for first, last in _chunks(table):
        target[first:last] = read_rows(table, first, last).numpy()


def load(table: Table, source: Any) -> None:
    """Let the servers have rows that come by slices; the chief's count.

    Args:
        table: shape [R, D].
        source: of the same shape.

    Raises:
        ValueError: it has another shape.
    """
    if tuple(source.shape) != tuple(table.whole):
        raise ValueError(
            f"The table {table.name!r} must be loaded from one of its shape, "
            f"{tuple(table.whole)}. Received: shape={tuple(source.shape)}"
        )
    if not table.writes():
        return
    for first, last in _chunks(table):
        values = tf.convert_to_tensor(source[first:last], table.dtype)
        for at in table.cursor.over(len(table.pieces)):
            device, start, stop = table.pieces[at]
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                with tf.device(device):
                    own = tf.identity(values[begin - first : end - first])
                    _replace(table, begin - start, end - start, own)
        # Operations on servers are not waited for: what they are to have would pile up.
        read_rows(table, last - 1, last).numpy()


def _replace(table: Table, begin: int, end: int, values: tf.Tensor) -> None:
    """Replace rows of the piece that is meant, in place."""
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=table.handle, begin=[begin], end=[end], strides=[1], value=values
    )


def _chunks(table: Table) -> list[tuple[int, int]]:
    rows, width = table.whole
    edges = [*range(0, rows, max(1, _COPIED // max(width, 1))), rows]
    return list(itertools.pairwise(edges))
