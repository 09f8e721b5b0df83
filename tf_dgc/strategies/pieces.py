"""Changes of what is on servers, piece by piece, where the pieces are."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc._host.shared import Table
from tf_dgc.exchanges.together import Pieces


def change(
    twin: Any, fn: Callable[..., Any], args: Any = (), kwargs: Any = None
) -> None:
    """Let a function change a twin, and what goes with it, where they are."""
    args = _host.distribute.local_component(args)
    optimizer = _host.keras.calling_optimizer()
    by_rows = isinstance(twin, Table) and optimizers.is_rowwise(optimizer)
    for at in twin.cursor.over(len(twin.pieces)):
        piece = twin.pieces[at]
        own = [_rows(part, twin, at) for part in args]
        with tf.device(piece.device), _host.distribute.update_context():
            if by_rows and own and isinstance(own[0], tf.IndexedSlices):
                with twin.cursor.only(tf.identity(own[0].indices)):
                    fn(twin, tf.identity(own[0].values), *own[1:])
            else:
                fn(twin, *own, **(kwargs or {}))


def _rows(part: Any, twin: Any, at: int) -> Any:
    """Return what belongs to a piece of a twin: rows of a gradient; else all."""
    if isinstance(part, Pieces):
        return part.parts[at]
    if len(twin.pieces) == 1:
        return part
    _, start, stop = twin.pieces[at]
    if isinstance(part, tf.IndexedSlices):
        mine = (part.indices >= start) & (part.indices < stop)
        return tf.IndexedSlices(
            tf.boolean_mask(part.values, mine),
            tf.boolean_mask(part.indices, mine) - start,
            tf.constant([stop - start, *twin.whole[1:]], part.indices.dtype),
        )
    if tf.is_tensor(part) and part.shape == twin.whole:
        return part[start:stop]
    return part
