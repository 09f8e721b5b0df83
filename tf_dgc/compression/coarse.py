"""Values of a few bits: a code each, and a scale for each tensor of a message. Pure.

    sign   1 bit     sign(v) * s                  s = mean |v|
    log4   4 bits    sign(v) * s * 2**(-j/2)      s = min(max |v|, 8 * mean |v|)
                     j = 0 .. 7, whichever is nearest to |v|

over those elements of a tensor that are sent. The mean is what comes nearest to their
magnitudes; more than 8 times it would raise all others to the least level, for the sake
of a few. What rounding takes off a value, or adds to it, is kept and sent later.

Scales and levels have 8 significant bits, so that their product is exact: the same on
every worker, whatever it is compiled with. An infinity makes its tensor's scale one.

Axes: N workers, T tensors, K message slots, C elements.

References:
    Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD, ICML 2018,
    https://arxiv.org/abs/1802.04434
    Karimireddy, Rebjock, Stich, Jaggi: Error feedback fixes SignSGD, ICML 2019,
    https://arxiv.org/abs/1901.09847 (the mean magnitude as scale)
"""

from typing import Any

import numpy as np
import tensorflow as tf

BITS = {"sign": 1, "log4": 4}
SCALE = tf.bfloat16
_MAGNITUDES = np.round(256 * 2 ** (-np.arange(8) / 2)) / 256  # of log4, falling
_MOST = 8.0  # means
_SHIFTS = {bits: np.arange(0, 8, bits) for bits in BITS.values()}


def levels(bits: int) -> tf.Tensor:
    """Return what each code stands for, of a scale of one: shape [2**bits], float32.

    The highest bit of a code is the sign.
    """
    magnitudes = _MAGNITUDES[: 2 ** (bits - 1)]
    return tf.constant(np.concatenate([magnitudes, -magnitudes]), tf.float32)


def tensors_of(begins: tuple[int, ...], positions: tf.Tensor) -> tf.Tensor:
    """Return which tensor positions are in, in [0, T), whatever they are.

    Args:
        begins: of the tensors, ascending, T.
        positions: any shape, int64.

    Returns:
        The same shape, int64.
    """
    later = tf.constant(begins[1:], tf.int64)
    flat = tf.reshape(positions, [-1])
    found = tf.searchsorted(later, flat, side="right", out_type=tf.int64)
    return tf.reshape(found, tf.shape(positions))


def encode(
    bits: int,
    values: tf.Tensor,
    tensors: tf.Tensor,
    count: int,
    used: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Round values to codes.

    Args:
        bits: of a code.
        values: shape [C], float32.
        tensors: which each is of, shape [C], int64, ascending.
        count: T.
        used: which of C places hold a value, for arrays of a fixed size under XLA;
            None is all.

    Returns:
        Codes, shape [C], uint8; scales, shape [T], bfloat16, 0 where there is nothing.
    """
    magnitudes = tf.abs(values)
    # In float64, where the order of the sum hardly counts, nor do sums overflow.
    wide = tf.cast(magnitudes, tf.float64)
    negative = tf.cast(values < 0, tf.uint8)
    if used is None:
        scales = tf.math.segment_mean(wide, tensors)
    else:
        ones = tf.cast(used, tf.float64)
        sums, counts = (
            tf.math.unsorted_segment_sum(each, tensors, count)
            for each in (tf.where(used, wide, 0.0), ones)
        )
        scales = sums / tf.maximum(counts, 1.0)
    if bits > 1:
        if used is None:
            most = tf.math.segment_max(magnitudes, tensors)
        else:
            found = tf.where(used, magnitudes, 0.0)
            most = tf.math.unsorted_segment_max(found, tensors, count)
            most = tf.maximum(most, 0.0)  # of nothing
        scales = tf.minimum(tf.cast(most, tf.float64), _MOST * scales)
    scales = rounded(tf.cast(scales, tf.float32), SCALE)
    if used is None:
        scales = tf.pad(scales, [[0, count - tf.size(scales)]])
    scales = tf.ensure_shape(scales, [count])
    if bits == 1:
        return negative, scales
    own = tf.gather(tf.cast(scales, tf.float32), tensors)
    halfway = (_MAGNITUDES[:-1] + _MAGNITUDES[1:])[::-1] / 2
    bounds, ratios = tf.constant(halfway, tf.float32), magnitudes / own
    above = tf.searchsorted(bounds, ratios, out_type=tf.int64)
    step = len(halfway) - above
    return tf.cast(step, tf.uint8) + len(_MAGNITUDES) * negative, scales


def rounded(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Round float32 to a shorter type, but to infinity only what is infinite."""
    limit = float(dtype.max)
    bounded = tf.clip_by_value(values, -limit, limit)
    return tf.cast(tf.where(tf.math.is_inf(values), values, bounded), dtype)


def decode(
    bits: int, codes: tf.Tensor, tensors: tf.Tensor, scales: tf.Tensor
) -> tf.Tensor:
    """Return what the codes of N messages stand for.

    Args:
        bits: of a code.
        codes: shape [N, K], uint8.
        tensors: which each is of, shape [N, K], int64.
        scales: shape [N, T], bfloat16.

    Returns:
        shape [N, K], float32.
    """
    workers, count = scales.shape
    table = tf.cast(scales, tf.float32)[..., tf.newaxis] * levels(bits)
    row = tf.range(workers, dtype=tf.int64)[:, tf.newaxis] * count
    index = (row + tensors) * 2**bits + tf.cast(codes, tf.int64)
    return tf.gather(tf.reshape(table, [-1]), index)


def to_octets(bits: int, codes: tf.Tensor) -> tf.Tensor:
    """Write rows of codes, [N, K], into as few octets as hold them; the rest is 0."""
    rows, slots = codes.shape
    if slots is None:
        slots = tf.shape(codes)[1]
    codes = tf.cast(tf.pad(codes, [[0, 0], [0, -slots % (8 // bits)]]), tf.float32)
    # Sums of different powers of two: exact.
    parts = tf.reshape(codes, [rows, -1, 8 // bits]) * tf.constant(
        2.0 ** _SHIFTS[bits], tf.float32
    )
    return tf.cast(tf.reduce_sum(parts, axis=-1), tf.uint8)


def from_octets(bits: int, octets: tf.Tensor, slots: Any) -> tf.Tensor:
    """Read K codes from each row of octets, shape [N, bytes]: [N, K], uint8."""
    shifted = tf.bitwise.right_shift(
        octets[..., tf.newaxis], tf.constant(_SHIFTS[bits], tf.uint8)
    )
    codes = tf.bitwise.bitwise_and(shifted, 2**bits - 1)
    codes = tf.reshape(codes, [octets.shape[0], -1])
    if isinstance(slots, int):
        return codes[:, :slots]
    with tf.device("CPU:0"):  # where shapes are
        size = tf.stack([octets.shape[0], slots])
        begin = tf.zeros_like(size)
    return tf.slice(codes, begin, size)
