"""Selection <-> message: one buffer of a fixed number of bytes. Pure functions.

A message of K slots for an arena of P elements is, in this order,

    header     HEADER_WORDS x int32: FORMAT, exponent, checksum of the layout, step,
               number of elements
    scales     T x bfloat16 where values are codes, else none
    values     K x float32 | float16 | bfloat16, each times 2**exponent; or K codes of
               1 or 4 bits, see coarse.py
    low bits   K x uint8 | uint16     position modulo 2**L, L = 8 or 16
    high bits  K + P / 2**L bits      for the i-th element, bit i + position // 2**L

padded to a multiple of 4 bytes. Positions ascend. Their encoding is that of Elias and
Fano: 1.6 bytes a position at 0.1% (two bytes of the paper's fixed format) and 1.1
bytes at 25%. Unused slots are zero.

References:
    Elias: Efficient storage and retrieval by content and address of static files,
    J. ACM 21 (1974), https://doi.org/10.1145/321812.321820
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc.compression import coarse
from tf_dgc.values import filled_up, first_true

FORMAT = 0x44474303  # "DGC", version 3
HEADER_WORDS = 5
_HEADER_BYTES = 4 * HEADER_WORDS
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
    "the scales of its values",
)
Ones = Callable[[tf.Tensor, int], tuple[tf.Tensor, tf.Tensor]]  # as of `listed`


class Header(NamedTuple):
    """The first words of a message, each of shape [], int32."""

    format: tf.Tensor
    exponent: tf.Tensor
    checksum: tf.Tensor
    step: tf.Tensor
    count: tf.Tensor


class Sizes(NamedTuple):
    """Sizes of a message that are known in a step, int64 of shape [] on the host."""

    slots: tf.Tensor
    scales: tf.Tensor  # where they begin, in octets; and so on
    values: tf.Tensor
    low: tf.Tensor
    high: tf.Tensor
    end: tf.Tensor


class Format(NamedTuple):
    """The form of a message, static but for its sizes, where these are in tensors."""

    slots: int  # K; the most where `sizes` tells how many
    size: int  # P
    value_dtype: tf.DType  # of values, or of codes
    low_bits: int  # 8 or 16
    code_bits: int = 0  # 0 where values are no codes
    begins: tuple[int, ...] = ()  # of the T tensors, which have scales where there are
    sizes: Sizes | None = None  # of one of several formats, see `one_of`

    @property
    def high_bytes(self) -> int:
        """Bytes of the high bits; none where the message has no slots."""
        return -(-(self.slots + (self.size >> self.low_bits)) // 8) if self.slots else 0

    @property
    def body_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of scales, values, low bits, and of the high bits with padding."""
        scales = len(self.begins) * coarse.SCALE.size
        values = -(-self.slots * (self.code_bits or 8 * self.value_dtype.size) // 8)
        low = self.slots * self.low_bits // 8
        body = scales + values + low + self.high_bytes
        return scales, values, low, self.high_bytes + -body % 4

    @property
    def words(self) -> int:
        """Length of the whole message in int32 words."""
        return HEADER_WORDS + sum(self.body_bytes) // 4

    @property
    def bytes(self) -> int:
        """Length of the whole message in bytes."""
        return 4 * self.words

    @property
    def slots_now(self) -> Any:
        """K, as it is known in a step."""
        return self.slots if self.sizes is None else self.sizes.slots

    @property
    def bytes_now(self) -> Any:
        """Length of the whole message in bytes, as it is known in a step."""
        return self.bytes if self.sizes is None else self.sizes.end

    def in_shapes(self, size: int) -> int:
        """Return a size of this format; -1 where it is known in a step only."""
        return size if self.sizes is None else -1


def make_format(
    slots: int, size: int, value_dtype: tf.DType | str, begins: Sequence[int] = (0,)
) -> Format:
    """Choose the shorter encoding for K slots out of P elements.

    Args:
        slots: K.
        size: P.
        value_dtype: as in `DGCConfig`.
        begins: of the T tensors, ascending.
    """
    code_bits = coarse.BITS.get(value_dtype, 0)
    dtype = tf.uint8 if code_bits else tf.as_dtype(value_dtype)
    scaled = tuple(begins) if code_bits and slots else ()
    formats = [Format(slots, size, dtype, bits, code_bits, scaled) for bits in (8, 16)]
    return min(formats, key=lambda form: form.words)


def one_of(forms: Sequence[Format], number: tf.Tensor | None = None) -> Format:
    """Return the format of a number, shape []; it need not be known beforehand.

    Args:
        forms: with slots, and alike in all but these.
        number: None of one.
    """
    if len(forms) == 1:
        return forms[0]
    rows = [[form.slots, *_ends(form)] for form in forms]
    with tf.device("CPU:0"):  # where shapes are
        sizes = Sizes(*tf.unstack(tf.constant(rows, tf.int64)[number]))
    largest = max(forms, key=lambda form: form.slots)
    return largest._replace(sizes=sizes)


def _ends(form: Format) -> list[int]:
    """Return where the header ends and the parts of the body do, in octets."""
    return list(itertools.accumulate([_HEADER_BYTES, *form.body_bytes]))


def pack(
    form: Format,
    positions: tf.Tensor,
    values: tf.Tensor,
    exponent: tf.Tensor,
    scales: tf.Tensor | None = None,
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
        scales: shape [T], bfloat16, where values are codes.
        checksum: of the layout.
        step: shape [], any integer type.

    Returns:
        shape [form.words], int32.
    """
    count = tf.size(positions)[tf.newaxis]
    where, what = (filled_up(part, form.slots_now) for part in (positions, values))
    rows = where[tf.newaxis], what[tf.newaxis], count
    octets = _octets_of(form, *rows, exponent, scales, checksum, step)
    return tf.bitcast(octets[0], tf.int32)


def pack_rows(
    form: Format,
    positions: tf.Tensor,
    values: tf.Tensor,
    counts: tf.Tensor,
    exponent: tf.Tensor,
    scales: tf.Tensor | None,
    checksum: int,
    step: tf.Tensor,
) -> tf.Tensor:
    """Write M parts of a selection, each into a message of its own.

    Args:
        form: of each message.
        positions: shape [M, K], int64, ascending in each row; the first of each count.
        values: shape [M, K], `form.value_dtype`.
        counts: shape [M], int32.
        exponent: of all, shape [], int32.
        scales: of all, shape [T], bfloat16, where values are codes.
        checksum: of the layout.
        step: shape [], any integer type.

    Returns:
        shape [M, form.words], int32.
    """
    args = positions, values, counts, exponent, scales, checksum, step
    return tf.bitcast(_octets_of(form, *args), tf.int32)


def _octets_of(
    form: Format,
    positions: tf.Tensor,
    values: tf.Tensor,
    counts: tf.Tensor,
    exponent: tf.Tensor,
    scales: tf.Tensor | None,
    checksum: int,
    step: tf.Tensor,
) -> tf.Tensor:
    """Return messages as octets, shape [M, form.words, 4]; arguments as above.

    For which GPUs have kernels: TensorFlow joins and slices int32 on the host.
    """
    messages = counts.shape[0]
    alike = [FORMAT, exponent, checksum, tf.cast(step % 2**31, tf.int32)]
    fields = [tf.broadcast_to(field, [messages]) for field in alike]
    header = tf.stack([*fields, counts], axis=1)
    if not form.slots:
        return tf.bitcast(header, tf.uint8)
    slot = tf.range(form.slots_now, dtype=tf.int64)
    used = slot < tf.cast(counts, tf.int64)[:, tf.newaxis]
    low = tf.cast(
        tf.bitwise.bitwise_and(positions, 2**form.low_bits - 1),
        tf.uint8 if form.low_bits == 8 else tf.uint16,
    )
    octets = [
        _to_bytes(header),
        *_value_bytes(form, tf.where(used, values, tf.zeros_like(values)), scales),
        _to_bytes(tf.where(used, low, tf.zeros_like(low))),
        _high_bits(form, positions, used),
    ]
    shape = [messages, form.in_shapes(form.words), 4]
    return tf.reshape(tf.concat(octets, axis=1), shape)


def power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """Return 2**exponent exactly, float32; outside of [-126, 126], as at its ends."""
    bounded = tf.clip_by_value(exponent, -MAX_EXPONENT, MAX_EXPONENT)
    return tf.bitcast(tf.bitwise.left_shift(bounded + 127, 23), tf.float32)


def decoded(values: tf.Tensor, exponent: tf.Tensor) -> tf.Tensor:
    """Return what values of a message stand for, float32."""
    if values.dtype == tf.float16:
        return tf.cast(values, tf.float32) * power_of_two(-exponent)
    return tf.cast(values, tf.float32)


def _to_bytes(rows: tf.Tensor) -> tf.Tensor:
    """Return rows, shape [M, n], as octets: [M, n * size], uint8."""
    return tf.reshape(tf.bitcast(rows, tf.uint8), [rows.shape[0], -1])


def _value_bytes(
    form: Format, values: tf.Tensor, scales: tf.Tensor | None
) -> list[tf.Tensor]:
    """Return the octets of scales, where there are, and of the values of K slots."""
    if scales is None:
        return [_to_bytes(values)]
    scales = tf.broadcast_to(scales, [values.shape[0], len(form.begins)])
    return [_to_bytes(scales), coarse.to_octets(form.code_bits, values)]


def _high_bits(form: Format, positions: tf.Tensor, used: tf.Tensor) -> tf.Tensor:
    messages = positions.shape[0]
    with tf.device("CPU:0"):
        size = form.body_bytes[3]
        if form.sizes is not None:
            size = form.sizes.end - form.sizes.high
        whole = messages * size
    rank = tf.range(form.slots_now, dtype=tf.int64)
    index = rank + tf.bitwise.right_shift(positions, form.low_bits)
    # Sums of different powers of two: exact.
    bit = tf.gather(
        tf.constant([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]),
        tf.bitwise.bitwise_and(index, 7),
    )
    row = size * tf.range(messages, dtype=tf.int64)[:, tf.newaxis]
    octet = tf.where(used, row + tf.bitwise.right_shift(index, 3), 0)
    bit = tf.where(used, bit, 0.0)
    octets = tf.math.unsorted_segment_sum(bit, octet, whole)
    return tf.cast(tf.reshape(octets, [messages, form.in_shapes(size)]), tf.uint8)


class Contents(NamedTuple):
    """Contents of N messages."""

    header: Header  # each field of shape [N], int32
    positions: tf.Tensor  # shape [N, K], int64; P in unused slots
    values: tf.Tensor  # shape [N, K], as sent, times 2**exponent; 0 in unused slots
    scales: tf.Tensor  # shape [N, T], bfloat16; T is 0 where values are no codes


def listed(high: tf.Tensor, slots: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Find the first K ones of high bits, in a list of all there are.

    Args:
        high: of N messages, shape [N, bytes].
        slots: K, an integer, or int64 of shape [].

    Returns:
        At which bit of its message each is, int64; and whether there are as many: shape
        [N, K].
    """
    workers = high.shape[0]
    bits = tf.bitcast(tf.gather(_SPREAD, tf.cast(high, tf.int32)), tf.uint8)
    bits = tf.reshape(bits, [workers, -1])
    # All ones of all messages in a row, where those of each begin, and of its slots.
    ones = tf.where(tf.reshape(bits, [-1]))[:, 0]
    counts = _ones_in(high)
    begins = tf.cumsum(counts, exclusive=True)
    slot = tf.range(slots, dtype=tf.int64)
    used = slot < counts[:, tf.newaxis]
    place = tf.where(used, begins[:, tf.newaxis] + slot, 0)
    # One more, as there may be none.
    index = tf.gather(tf.concat([ones, tf.zeros([1], tf.int64)], axis=0), place)
    width = bits.shape[1]
    if width is None:
        width = tf.cast(tf.shape(bits)[1], tf.int64)
    row = tf.range(workers, dtype=tf.int64)[:, tf.newaxis] * width
    return index - row, used


def unpack(form: Format, messages: tf.Tensor, ones: Ones = listed) -> Contents:
    """Read messages, whatever their words are; `faults` tells which are whole.

    Args:
        form: the form that the senders used.
        messages: shape [N, form.words], int32.
        ones: finds those of the high bits, as `listed` does.
    """
    workers = messages.shape[0]
    octets = _octets(form, messages)
    header = Header(
        *tf.unstack(_joined(octets[:, :_HEADER_BYTES], HEADER_WORDS, tf.int32), axis=1)
    )
    if not form.slots:
        nothing = tf.zeros([workers, 0], tf.int64)
        values, scales = (tf.cast(nothing, t) for t in (form.value_dtype, coarse.SCALE))
        return Contents(header, nothing, values, scales)
    scales, values, low, high = _parts(form, octets)
    scales = _joined(scales, len(form.begins), coarse.SCALE)
    places = form.in_shapes(form.slots)
    if form.code_bits:
        values = coarse.from_octets(form.code_bits, values, form.slots_now)
    else:
        values = _joined(values, places, form.value_dtype)
    if form.low_bits == 16:
        low = _joined(low, places, tf.uint16)
    index, used = ones(high, form.slots_now)
    slot = tf.range(form.slots_now, dtype=tf.int64)
    found = (index - slot) * 2**form.low_bits + tf.cast(low, tf.int64)
    return Contents(
        header,
        tf.where(used, found, form.size),
        tf.where(used, values, tf.zeros_like(values)),
        scales,
    )


def numbers(
    form: Format, contents: Contents, places: tf.Tensor | None = None
) -> tf.Tensor:
    """Return what the values of messages stand for: shape [N, K], float32.

    Args:
        form: of the messages.
        contents: what `unpack` returned.
        places: in the arena of `form.begins`, where positions are of another one.
    """
    header, positions, values, scales = contents
    if not form.begins:
        return decoded(values, header.exponent[:, tf.newaxis])
    tensors = coarse.tensors_of(form.begins, positions if places is None else places)
    found = coarse.decode(form.code_bits, values, tensors, scales)
    return tf.where(positions < form.size, found, tf.zeros_like(found))


def _octets(form: Format, messages: tf.Tensor) -> tf.Tensor:
    """Return messages, [N, form.words], as uint8, shape [N, form.bytes]."""
    octets = tf.bitcast(messages, tf.uint8)
    return tf.reshape(octets, [messages.shape[0], form.in_shapes(form.bytes)])


def _parts(form: Format, octets: tf.Tensor) -> list[tf.Tensor]:
    """Return the octets of the parts of the body, each of shape [N, bytes]."""
    if form.sizes is None:
        return [octets[:, a:b] for a, b in itertools.pairwise(_ends(form))]
    with tf.device("CPU:0"):  # where shapes are
        bounds = [tf.stack([0, end]) for end in form.sizes[1:]]
        beyond = tf.constant([octets.shape[0], 0], tf.int64)
        pairs = [(a, b + beyond) for a, b in itertools.pairwise(bounds)]
    parts = [tf.strided_slice(octets, a, b) for a, b in pairs]
    for part in parts:
        part.set_shape([octets.shape[0], None])
    return parts


def _joined(octets: tf.Tensor, slots: int, dtype: tf.DType) -> tf.Tensor:
    """Return octets, shape [N, K * size], as numbers, shape [N, K]."""
    parts = tf.reshape(octets, [octets.shape[0], slots, dtype.size])
    return tf.bitcast(parts, dtype)


def _ones_in(high: tf.Tensor) -> tf.Tensor:
    """Count the ones in each message's high bits, [N, bytes]: shape [N], int64."""
    bits = tf.raw_ops.PopulationCount(x=high)
    return tf.reduce_sum(tf.cast(bits, tf.int64), axis=1)


def faults(form: Format, messages: tf.Tensor, contents: Contents) -> tf.Tensor:
    """Find what is wrong with messages: what `pack` never writes.

    Args:
        form: the form that the senders used.
        messages: shape [N, form.words], int32.
        contents: what `unpack` made of them, the values as `numbers`.

    Returns:
        Indices into FAULTS, shape [N], int64.
    """
    header, positions, values, scales = contents
    most = MAX_EXPONENT if form.value_dtype == tf.float16 else 0
    high = _parts(form, _octets(form, messages))[3]
    count = _ones_in(high)
    used = positions < form.size
    # Those that are no positions of the arena end the ascent before its time.
    ascend = (positions[:, :-1] < positions[:, 1:]) | ~used[:, 1:]
    places = tf.reduce_sum(tf.cast(used, tf.int64), axis=1)
    wrong = [
        tf.zeros_like(count, tf.bool),
        (header.format != FORMAT)
        | (header.exponent < -most)
        | (header.exponent > most),
        (tf.cast(header.count, tf.int64) != count) | (count > form.slots_now),
        ~_all(ascend) | (places != count),
        ~_all(tf.math.is_finite(values)),
        ~_all((scales >= 0) & tf.math.is_finite(scales)),
    ]
    return first_true(tf.stack(wrong))


def _all(mask: tf.Tensor) -> tf.Tensor:
    """Do what `tf.reduce_all` does along the last axis, in half the time."""
    return tf.reduce_min(tf.cast(mask, tf.float32), axis=-1) != 0
