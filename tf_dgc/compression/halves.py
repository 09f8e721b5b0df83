"""Positions in two bytes each, of any number. Pure functions.

Messages between workers have a fixed length, see message.py; what goes to a server and
comes from there is as long as it needs to be. Of positions that ascend,

    low       K x uint16             position modulo 2**16
    counts    H x int32              how many are in each 2**16 of the P elements

Axes: P elements, H = P / 2**16 rounded up, K positions.
"""

import tensorflow as tf

_BITS = 16
_WIDTH = 2**_BITS


def rooms(size: int) -> int:
    """Return H for P elements."""
    return -(-size // _WIDTH)


def split(positions: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Split positions into two bytes, and how often the rest of them comes.

    Args:
        positions: shape [K], int64, ascending, in [0, P).
        size: P.

    Returns:
        Shape [K], uint16; and shape [H], int32.
    """
    low = tf.cast(tf.bitwise.bitwise_and(positions, _WIDTH - 1), tf.uint16)
    edges = tf.range(rooms(size) + 1, dtype=tf.int64) * _WIDTH
    bounds = tf.searchsorted(positions, edges)
    return low, bounds[1:] - bounds[:-1]


def joined(low: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Invert `split`: shape [K], int64."""
    place = tf.range(tf.size(low))
    high = tf.searchsorted(tf.cumsum(counts), place, side="right", out_type=tf.int64)
    return high * _WIDTH + tf.cast(low, tf.int64)


def cost(count: tf.Tensor, size: int) -> tf.Tensor:
    """Return the bytes of so many positions, shape [], int64, of P elements."""
    return 2 * tf.cast(count, tf.int64) + 4 * rooms(size)
