"""First values of a part: those columns, or rows, of what one worker would draw.

Axes: I rows, U columns of the whole, W columns or rows of a part.

The random numbers of a large matrix are drawn in blocks of rows, of which each worker
keeps its part, so that no worker ever has the whole of it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import bands
from tf_dgc.bands import Band
from tf_dgc.transports.base import Transport

_BLOCK = 2**22  # elements drawn at a time
_GROUP = 4  # float32 numbers of one count of Philox, of those that are never drawn anew
_RESERVED = 256  # counts for a group of those that may be: random_distributions.h

_VARIANCE = tuple(
    getattr(keras.initializers, name)
    for name in (
        "GlorotNormal",
        "GlorotUniform",
        "HeNormal",
        "HeUniform",
        "LecunNormal",
        "LecunUniform",
        "VarianceScaling",
    )
)
_CONSTANT = (
    keras.initializers.Constant,
    keras.initializers.Ones,
    keras.initializers.Zeros,
)
_SEEDS = 2**31 - 2  # as Keras: backend/tensorflow/random.py
_NORMAL_CUT = 0.87962566103423978  # deviation of a normal one truncated at 2


class _Stream(NamedTuple):
    """Stream of float32 numbers that an initializer makes of a seed, by element."""

    draw: Callable[..., tf.Tensor]
    counts: int  # of Philox, for a group
    scale: float
    shift: float


def variable(
    initializer: Any,
    shape: tuple[int, int],
    own: Band,
    dtype: str,
    transport: Transport,
) -> keras.Variable:
    """Make a variable of Keras of this worker's part; see `own_part`."""

    def draw(_: Any, dtype: Any = None) -> tf.Tensor:
        bands.note(own)
        return own_part(initializer, shape, own, dtype, transport)

    part = [own.width if axis == own.axis else n for axis, n in enumerate(shape)]
    return keras.Variable(draw, part, dtype, name="kernel", synchronization="none")


def own_part(
    initializer: Any,
    shape: tuple[int, int],
    own: Band,
    dtype: Any,
    transport: Transport,
) -> tf.Tensor:
    """Return this worker's part of what rank 0 draws; all workers call this.

    Args:
        initializer: of Keras, or a function of a shape and a type.
        shape: I and U, of the whole.
        own: which part.
        dtype: of the result.
        transport: to the other workers.

    Returns:
        shape [I, W] or [W, U]. What is beyond the whole is zero.
    """
    missing = [[0, 0], [0, 0]]
    missing[own.axis][1] = own.width - own.used
    if type(initializer) in _CONSTANT:
        used = [size.stop - size.start for size in own.place(shape)]
        part = tf.convert_to_tensor(initializer(tuple(used), dtype=dtype))
        return tf.pad(part, missing)
    stream = _stream_of(initializer, *shape)
    seed = getattr(initializer, "seed", None)
    if stream is not None and type(seed) is int and tf.as_dtype(dtype) == tf.float32:
        (shared,) = transport.broadcast([tf.constant([seed], tf.int64)], "split.seed")
        seed = int(shared[0]) % _SEEDS
        return tf.pad(tf.constant(_in_blocks(stream, seed, shape, own)), missing)
    whole = tf.convert_to_tensor(initializer(shape, dtype=dtype))
    (whole,) = transport.broadcast([whole], "split.whole")
    return tf.pad(whole[own.place(shape)], missing)


def _stream_of(initializer: Any, rows: int, units: int) -> _Stream | None:
    """Return how an initializer of Keras draws a matrix [I, U]; None of others."""
    kind, ops = type(initializer), tf.raw_ops
    if kind is keras.initializers.RandomUniform:
        low, high = initializer.minval, initializer.maxval
        return _Stream(ops.StatelessRandomUniformV2, 1, high - low, low)
    if kind is keras.initializers.RandomNormal:
        own = initializer.stddev, initializer.mean
        return _Stream(ops.StatelessRandomNormalV2, 1, *own)
    if kind is keras.initializers.TruncatedNormal:
        own = initializer.stddev, initializer.mean
        return _Stream(ops.StatelessTruncatedNormalV2, _RESERVED, *own)
    axes = (
        getattr(initializer, "input_axes", None),
        getattr(initializer, "output_axes", None),
    )
    if kind not in _VARIANCE or axes != (None, None):
        return None
    fans = {"fan_in": rows, "fan_out": units, "fan_avg": (rows + units) / 2.0}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "truncated_normal":
        deviation = math.sqrt(variance) / _NORMAL_CUT
        return _Stream(ops.StatelessTruncatedNormalV2, _RESERVED, deviation, 0.0)
    if initializer.distribution == "untruncated_normal":
        return _Stream(ops.StatelessRandomNormalV2, 1, math.sqrt(variance), 0.0)
    limit = math.sqrt(3.0 * variance)
    return _Stream(ops.StatelessRandomUniformV2, 1, 2 * limit, -limit)


def _in_blocks(
    stream: _Stream, seed: int, shape: tuple[int, int], own: Band
) -> np.ndarray:
    """Draw a matrix [I, U] in blocks of rows; return what is own of it."""
    rows, columns = own.place(shape)
    units = shape[1]
    # So many rows that blocks begin with a group.
    step = max(_GROUP, _BLOCK // units // _GROUP * _GROUP)
    found = np.zeros((rows.stop - rows.start, columns.stop - columns.start), np.float32)
    with tf.device("CPU:0"):
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(
            seed=tf.constant([seed, 0], tf.int32)
        )
        low, high = (int(word) for word in counter.numpy())
        for first in range(rows.start // step * step, rows.stop, step):
            count = min(step, shape[0] - first)
            skipped = first * units // _GROUP * stream.counts
            place = (low + (high << 64) + skipped) % 2**128
            drawn = stream.draw(
                shape=[count, units],
                key=key,
                counter=tf.constant([place % 2**64, place >> 64], tf.uint64),
                alg=1,  # Philox
                dtype=tf.float32,
            )
            begin, end = max(first, rows.start), min(first + count, rows.stop)
            block = drawn[begin - first : end - first, columns]
            block = block * np.float32(stream.scale) + np.float32(stream.shift)
            found[begin - rows.start : end - rows.start] = block
    return found
