"""Bytes that the chief has, given to all workers, eagerly."""

import json
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.transports.base import Transport

_CHUNK_BYTES = 1 << 24


def given(transport: Transport, data: bytes) -> bytes:
    """Return the chief's bytes on all workers; all call this.

    Args:
        transport: between the workers.
        data: of the chief; that of the others is not looked at.
    """
    if transport.size == 1:
        return data
    own = tf.constant([len(data)], tf.int64)
    (length,) = transport.broadcast([own], "search.length")
    chunks = []
    for start in range(0, int(length[0]), _CHUNK_BYTES):
        count = min(int(length[0]) - start, _CHUNK_BYTES)
        chunk = np.zeros(count, np.uint8)
        if transport.rank == 0:
            chunk[:] = np.frombuffer(data, np.uint8, count, start)
        (chunk,) = transport.broadcast([tf.constant(chunk)], "search.bytes")
        chunks.append(chunk.numpy().tobytes())
    return b"".join(chunks)


def told(transport: Transport, record: Any) -> Any:
    """Return the chief's record, of what JSON can hold, on all workers."""
    return json.loads(given(transport, dumped(record)))


def dumped(record: Any) -> bytes:
    """Return a record as JSON; scalars of NumPy are numbers."""
    return json.dumps(record, default=lambda value: value.item()).encode()
