"""Selection <-> message: one buffer of a fixed number of bytes. Pure functions.

A message of K slots for an arena of P elements is, in this order,

    header     HEADER_WORDS x int32: FORMAT, exponent, checksum of the layout, step,
               number of elements
    values     K x float32 | float16 | bfloat16, each times 2**exponent
    low bits   K x uint8 | uint16     position modulo 2**L, L = 8 or 16
    high bits  K + P / 2**L bits      for the i-th element, bit i + position // 2**L

padded to a multiple of 4 bytes. Positions ascend. Their encoding is that of Elias and
Fano: 1.6 bytes a position at 0.1% (two bytes of the paper's fixed format) and 1.1
bytes at 25%. Unused slots are zero.

References:
    Elias: Efficient storage and retrieval by content and address of static files,
    J. ACM 21 (1974), https://doi.org/10.1145/321812.321820
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

FORMAT = 0x44474303  # "DGC", version 3
HEADER_WORDS = 5
MAX_EXPONENT = 126
# The bits of an octet, as the octets of an int64.
_OCTETS = np.arange(256, dtype=np.uint8)[:, np.newaxis]
_SPREAD = np.unpackbits(_OCTETS, axis=1, bitorder="little").view("<i8")[:, 0]
# What may be wrong with a message; at 0 nothing is.
FAULTS = (
    "nothing",
    "its header",
    "the number of its elements",
    "their positions",
    "values that are not finite, as where what was accumulated has overflowed",
)


class Header(NamedTuple):
    """The first words of a message, each of shape [], int32."""

    format: tf.Tensor
    exponent: tf.Tensor
    checksum: tf.Tensor
    step: tf.Tensor
    count: tf.Tensor


class Format(NamedTuple):
    """The static form of a message."""

    slots: int  # K
    size: int  # P
    value_dtype: tf.DType
    low_bits: int  # 8 or 16

    @property
    def high_bytes(self) -> int:
        """Bytes of the high bits; none where the message has no slots."""
        return -(-(self.slots + (self.size >> self.low_bits)) // 8) if self.slots else 0

    @property
    def body_bytes(self) -> tuple[int, int, int]:
        """Bytes of the values, of the low bits, and of the high bits with padding."""
        values = self.slots * self.value_dtype.size
        low = self.slots * self.low_bits // 8
        return values, low, self.high_bytes + -(values + low + self.high_bytes) % 4

    @property
    def words(self) -> int:
        """Length of the whole message in int32 words."""
        return HEADER_WORDS + sum(self.body_bytes) // 4

    @property
    def bytes(self) -> int:
        """Length of the whole message in bytes."""
        return 4 * self.words


def make_format(slots: int, size: int, value_dtype: tf.DType | str) -> Format:
    """Choose the shorter encoding for K slots out of P elements."""
    value_dtype = tf.as_dtype(value_dtype)
    formats = [Format(slots, size, value_dtype, bits) for bits in (8, 16)]
    return min(formats, key=lambda form: form.words)


def pack(
    form: Format,
    positions: tf.Tensor,
    values: tf.Tensor,
    exponent: tf.Tensor,
    *,
    checksum: int,
    step: tf.Tensor,
) -> tf.Tensor:
    """Write a selection into a message.

    Args:
        form: what `make_format` returned.
        positions: shape [C], int64, C <= K, ascending, below P.
        values: shape [C], `form.value_dtype`.
        exponent: shape [], int32.
        checksum: of the layout.
        step: shape [], any integer type.

    Returns:
        shape [form.words], int32.
    """
    count = tf.size(positions)
    header = tf.stack(
        [FORMAT, exponent, checksum, tf.cast(step % 2**31, tf.int32), count]
    )
    if not form.slots:
        return header
    unused = [[0, form.slots - count]]
    low = tf.cast(
        tf.bitwise.bitwise_and(positions, 2**form.low_bits - 1),
        tf.uint8 if form.low_bits == 8 else tf.uint16,
    )
    body = tf.concat(
        [
            _to_bytes(tf.pad(values, unused)),
            _to_bytes(tf.pad(low, unused)),
            _high_bits(form, positions),
        ],
        axis=0,
    )
    words = tf.bitcast(tf.reshape(body, [form.words - HEADER_WORDS, 4]), tf.int32)
    return tf.concat([header, words], axis=0)


def power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Return 2**exponent exactly, float32; outside of [-126, 126], as at its ends."""
    bounded = tf.clip_by_value(exponent, -MAX_EXPONENT, MAX_EXPONENT)
    return tf.bitcast(tf.bitwise.left_shift(bounded + 127, 23), tf.float32)


def decoded(values: tf.Tensor, exponent: tf.Tensor) -> tf.Tensor:
    """Return what values of a message stand for, float32."""
    if values.dtype == tf.float16:
        return tf.cast(values, tf.float32) * power_of_two(-exponent)
    return tf.cast(values, tf.float32)


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _high_bits(form: Format, positions: tf.Tensor) -> tf.Tensor:
    rank = tf.range(tf.size(positions, tf.int64), dtype=tf.int64)
    index = rank + tf.bitwise.right_shift(positions, form.low_bits)
    # Sums of different powers of two: exact.
    bit = tf.gather(
        tf.constant([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]),
        tf.bitwise.bitwise_and(index, 7),
    )
    octet = tf.bitwise.right_shift(index, 3)
    octets = tf.math.unsorted_segment_sum(bit, octet, form.body_bytes[2])
    return tf.cast(octets, tf.uint8)


def unpack(form: Format, message: tf.Tensor) -> tuple[Header, tf.Tensor, tf.Tensor]:
    """Read a message, whatever its words are; `faults` tells whether it is whole.

    Args:
        form: the form that the sender used.
        message: shape [form.words], int32.

    Returns:
        The header, the positions [C] int64 and the values [C] `form.value_dtype`,
        C <= K.
    """
    header = Header(*tf.unstack(message[:HEADER_WORDS], HEADER_WORDS))
    if not form.slots:
        return header, tf.zeros([0], tf.int64), tf.zeros([0], form.value_dtype)
    body = _to_bytes(message[HEADER_WORDS:])
    value_bytes, low_bytes, high_bytes = tf.split(body, form.body_bytes)
    values = tf.bitcast(
        tf.reshape(value_bytes, [form.slots, form.value_dtype.size]), form.value_dtype
    )
    low_dtype, width = (tf.uint8, 1) if form.low_bits == 8 else (tf.uint16, 2)
    low = low_bytes
    if width > 1:
        low = tf.bitcast(tf.reshape(low_bytes, [form.slots, width]), low_dtype)
    bits = tf.bitcast(tf.gather(_SPREAD, tf.cast(high_bytes, tf.int32)), tf.uint8)
    index = tf.where(tf.reshape(bits, [-1]))[: form.slots, 0]
    count = tf.size(index)
    high = index - tf.range(tf.size(index, tf.int64), dtype=tf.int64)
    positions = high * 2**form.low_bits + tf.cast(low[:count], tf.int64)
    return header, positions, values[:count]


def faults(
    form: Format,
    messages: tf.Tensor,
    positions: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Find what is wrong with messages: what `pack` never writes.

    Args:
        form: the form that the senders used.
        messages: shape [N, form.words], int32.
        positions: of each message, as `unpack` returns them.
        values: of each message, as `decoded` returns them.

    Returns:
        Indices into FAULTS, shape [N], int64.
    """
    header = Header(*tf.unstack(messages[:, :HEADER_WORDS], HEADER_WORDS, axis=1))
    most = MAX_EXPONENT if form.value_dtype == tf.float16 else 0
    octets = tf.bitcast(messages[:, HEADER_WORDS:], tf.uint8)
    octets = tf.reshape(octets, [len(positions), sum(form.body_bytes)])
    high = octets[:, sum(form.body_bytes[:2]) :]
    bits = tf.cast(tf.raw_ops.PopulationCount(x=high), tf.int32)
    count = tf.reduce_sum(bits, axis=1)
    ascend = [
        _all(own[:-1] < own[1:]) & _all(own[-1:] < form.size) for own in positions
    ]
    finite = [_all(tf.math.is_finite(own)) for own in values]
    wrong = [
        tf.zeros_like(count, tf.bool),
        (header.format != FORMAT)
        | (header.exponent < -most)
        | (header.exponent > most),
        (header.count != count) | (count > form.slots),
        ~tf.stack(ascend),
        ~tf.stack(finite),
    ]
    return tf.argmax(tf.cast(wrong, tf.int32), axis=0)


def _all(mask: tf.Tensor) -> tf.Tensor:
    """Do what `tf.reduce_all` does, in half the time."""
    return tf.reduce_min(tf.cast(mask, tf.int32)) != 0
