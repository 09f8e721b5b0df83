"""Selection of a fixed size, which XLA compiles as a whole. Pure functions.

What selection.py does in lists whose lengths the data decide, each of which the host
waits for, is done here in arrays of static shapes: a GPU runs it by itself. On a
processor it takes many times as long.

The elements are the same, to the last of equal ones, as long as no tensor has more
elements over its threshold than its room in the list of candidates: `CROWDED` times its
slots and a few. Where one has, as with very many equal elements, candidates are some of
them: all that are over the threshold where these fit, and of the others, which equal
it, or of all, a part that is even over the positions and another one at every step. So
each tensor has at least as many candidates as slots.

Axes: P arena elements, L = P / LINE lines of them, B = P / BLOCK blocks, T tensors,
K message slots, M candidates, S rows of a sample.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc.compression import arena as arenas
from tf_dgc.compression import dgc, message
from tf_dgc.compression.arena import BLOCK, Layout
from tf_dgc.compression.selection import LINE, SMALLEST, Plan, Sample

CROWDED = 4  # slots of a tensor that its candidates have room for
_MORE = 64  # candidates of each tensor
_ROW = 32  # lines of a sample that are counted together
_DIGIT = 4  # bits of a threshold that are found in one pass
_GOLDEN = 0x9E3779B9  # multiples modulo 2**32 are even over all numbers
_TURN = 0x85EBCA6B  # by which they move with every step
_INFINITE = 0x7F800000  # the bits of infinity; those of NaN are more


def first_above(running: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    """Find the first place at which an ascending vector is above a number.

    XLA's own search compares each number with all of the vector.

    Args:
        running: shape [n], n at least 1.
        wanted: any shape, of the same type.

    Returns:
        The shape of `wanted`, int32; n where there is none.
    """
    size = running.shape[0]
    found = tf.zeros_like(wanted, tf.int32)
    for power in reversed(range(size.bit_length())):
        probe = found + 2**power
        value = tf.gather(running, tf.minimum(probe, size) - 1)
        found = tf.where((probe <= size) & (value <= wanted), probe, found)
    return found


class PlanTables(NamedTuple):
    """Tables of a plan, in tensors: XLA would compute with constants itself."""

    owner: tf.Tensor  # the tensor of each block, shape [B], float32
    rows: tf.Tensor  # of a sample, see `_sampled`: shape [S, 5], int64


def tables(layout: Layout, plan: Plan) -> PlanTables:
    """Return the tables of a plan that is known beforehand."""
    blocks = [-(-segment.size // BLOCK) for segment in layout.segments]
    owner = np.repeat(np.arange(len(blocks), dtype=np.float32), blocks)
    return PlanTables(tf.constant(owner), tf.constant(_sampled(layout, plan)[0]))


def thresholds(
    arena: tf.Tensor, layout: Layout, plan: Plan, known: PlanTables, step: tf.Tensor
) -> tf.Tensor:
    """Return what `selection.thresholds` returns, to the bit.

    The k-th largest of a sample is found by counting: four of its bits in one pass,
    those of all tensors together.

    Args:
        arena: shape [P], float32, the residual v.
        layout: T segments.
        plan: of a sparsity, known beforehand.
        known: its tables.
        step: shape [], int64.
    """
    tensors = len(layout.segments)
    ranks = _sampled(layout, plan)[1]
    all_of_it = tf.fill([tensors], SMALLEST)
    if not ranks.any():
        return all_of_it
    owner, first, stride, begin, used = tf.split(known.rows, 5, axis=1)
    owner = tf.cast(owner[:, 0], tf.int32)
    place = begin + tf.range(_ROW, dtype=tf.int64)
    golden = tf.bitwise.bitwise_and(place * _GOLDEN, 0xFFFFFFFF)
    shift = tf.bitwise.right_shift(golden * stride, 32)
    line = first + place * stride + (shift + step * 7919) % stride
    valid = place < used
    elements = tf.gather(tf.reshape(arena, [-1, LINE]), tf.where(valid, line, 0))
    bits = tf.bitcast(tf.abs(elements), tf.int32)
    bits = tf.where(valid[..., tf.newaxis] & (bits <= _INFINITE), bits, 0)
    bits = tf.reshape(bits, [-1, _ROW * LINE])
    kth = _kth_largest(bits, owner, ranks[:, 0])
    own = tf.gather(kth, owner)[:, tf.newaxis]
    reach = _by_tensor(tf.reduce_sum(tf.cast(bits >= own, tf.int32), 1), owner, tensors)
    below = tf.reduce_max(tf.where(bits < own, bits, 0), axis=1)
    below = tf.math.unsorted_segment_max(below, owner, tensors)
    following = tf.where(reach < ranks[:, 1], tf.maximum(below, 0), kth)
    kth, following = (tf.bitcast(each, tf.float32) for each in (kth, following))
    middle = tf.maximum(0.5 * kth + 0.5 * following, SMALLEST)
    return tf.where(ranks[:, 0] > 0, middle, all_of_it)


def _sampled(layout: Layout, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return what is looked at: of each row of a sample its tensor, where that begins
    in lines, its stride, its first line in the sample, and how many this has; and the
    ranks of each tensor's two elements, 0 where it has no sample.
    """  # noqa: D205
    ranks = np.zeros([len(layout.segments), 2], np.int32)
    rows = [np.zeros([0, 5], np.int64)]
    for own, row in zip(plan.alike, plan.samples.tolist(), strict=True):
        sample = Sample(*row)
        if not sample.above:
            continue
        used = sample.lines // sample.depth * sample.depth
        for i in own:
            ranks[i] = sample.above, sample.ordered
            begins = np.arange(0, used, _ROW)
            first = layout.segments[i].offset // LINE
            fixed = np.full([len(begins), 5], [i, first, sample.stride, 0, used])
            fixed[:, 3] = begins
            rows.append(fixed)
    return np.concatenate(rows), ranks


def _kth_largest(keys: tf.Tensor, owner: tf.Tensor, ranks: np.ndarray) -> tf.Tensor:
    """Find the k-th largest key of each tensor.

    Args:
        keys: shape [S, W], int32, none negative.
        owner: the tensor of each row, shape [S], int32.
        ranks: k of each tensor, shape [T], int32.

    Returns:
        shape [T], int32.
    """
    found = tf.zeros([len(ranks)], tf.int32)
    shifts = [*range(0, 31, _DIGIT)]
    for shift in reversed(shifts):
        digits = 2 ** min(_DIGIT, 31 - shift)
        more = tf.range(1, digits) * 2**shift
        tried = tf.gather(found[:, tf.newaxis] + more, owner)
        reach = keys[:, tf.newaxis] >= tried[..., tf.newaxis]
        counts = tf.reduce_sum(tf.cast(reach, tf.int32), axis=2)
        counts = _by_tensor(counts, owner, len(ranks))
        digit = tf.reduce_sum(tf.cast(counts >= ranks[:, np.newaxis], tf.int32), 1)
        found += digit * 2**shift
    return found


def _by_tensor(counts: tf.Tensor, owner: Any, tensors: int) -> tf.Tensor:
    """Add up counts, int32 of any rows: the same in any order."""
    return tf.math.unsorted_segment_sum(counts, owner, tensors)


def rooms(layout: Layout, slots: Sequence[int]) -> list[int]:
    """Return how many candidates each of T tensors has room for; M together."""
    return [
        max(own, min(segment.size, CROWDED * own + _MORE))
        for segment, own in zip(layout.segments, slots, strict=True)
    ]


def select(
    arena: tf.Tensor,
    layout: Layout,
    threshold: tf.Tensor,
    slots: Sequence[int],
    known: PlanTables,
    step: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Select the elements that reach their own tensor's threshold.

    Where more do than there are slots, those of `selection.strongest` are kept.

    Args:
        arena: shape [P], float32.
        layout: T segments.
        threshold: shape [T], float32, positive.
        slots: each tensor's own; K together.
        known: tables of the plan.
        step: shape [], int64.

    Returns:
        Positions in the arena, ascending, P in unused slots: shape [K], int64; what is
        there, shape [K], float32; and how many are used, shape [], int32.
    """
    owner = tf.cast(known.owner, tf.int32)
    room = rooms(layout, slots)
    line, column, live, total = _candidates(arena, owner, threshold, room, step)
    flat = line * LINE + column
    values = tf.where(live, tf.gather(arena, flat), 0.0)
    tensor = tf.gather(owner, flat // BLOCK)
    kept = _strongest(values, tensor, live, total, slots, step)
    # One more, for unused slots.
    where = tf.concat([tf.cast(flat, tf.int64), [layout.size]], axis=0)
    found = tf.gather(where, kept), tf.gather(tf.pad(values, [[0, 1]]), kept)
    return *found, tf.minimum(total, sum(slots))


def _candidates(
    arena: tf.Tensor,
    owner: tf.Tensor,
    threshold: tf.Tensor,
    rooms: Sequence[int],
    step: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """List what reaches its threshold, as much of it as there is room for.

    Args:
        arena: shape [P].
        owner: the tensor of each block, shape [B], int32.
        threshold: shape [T].
        rooms: of each tensor, M together.
        step: shape [], int64.

    Returns:
        The line of each and its place there, ascending, and whether there is one:
        shape [M]; and how many there are, shape [], int32.
    """
    room, size = np.array(rooms, np.int32), arena.shape[0]
    lines = tf.reshape(arena, [-1, BLOCK])
    least = tf.gather(threshold, owner)[:, tf.newaxis]
    reach, over = (
        _by_tensor(tf.reduce_sum(tf.cast(each, tf.int32), 1), owner, len(room))
        for each in (tf.abs(lines) >= least, tf.abs(lines) > least)
    )
    # Of crowded tensors half of the room is filled, so that chance does not pass it.
    half = room // 2
    sure = tf.where(over <= half, over, 0)
    left, many = tf.cast(half - sure, tf.float64), tf.cast(reach - sure, tf.float64)
    part = left / tf.maximum(many, 1.0)
    part = tf.where(reach <= room, tf.ones_like(part), part)
    chance = tf.cast(part * 2.0**32, tf.int64)
    turn = tf.bitwise.bitwise_and(step, 0xFFFFFFFF) * _TURN

    def wanted(values: tf.Tensor, line: tf.Tensor) -> tf.Tensor:
        """Tell which elements of lines, [n, LINE], count."""
        own = tf.gather(owner, line // (BLOCK // LINE))
        least = tf.gather(threshold, own)[:, tf.newaxis]
        first = tf.cast(line, tf.int64)[:, tf.newaxis] * LINE
        place = first + tf.range(LINE, dtype=tf.int64)
        drawn = tf.bitwise.bitwise_and(place * _GOLDEN + turn, 0xFFFFFFFF)
        is_sure = tf.gather(over <= half, own)[:, tf.newaxis] & (tf.abs(values) > least)
        is_drawn = drawn < tf.gather(chance, own)[:, tf.newaxis]
        return (tf.abs(values) >= least) & (is_sure | is_drawn)

    lines = tf.reshape(arena, [-1, LINE])
    counts = tf.reduce_sum(
        tf.cast(wanted(lines, tf.range(size // LINE)), tf.int32), axis=1
    )
    running = tf.cumsum(counts)
    total = tf.minimum(running[-1], int(room.sum()))
    number = tf.range(int(room.sum()))
    line = tf.minimum(first_above(running, number), size // LINE - 1)
    before = tf.gather(running - counts, line)
    mask = tf.cast(wanted(tf.gather(lines, line), line), tf.int32)
    rank = tf.cumsum(mask, axis=1) - mask
    here = (mask > 0) & (rank == (number - before)[:, tf.newaxis])
    column = tf.reduce_sum(tf.where(here, tf.range(LINE), 0), axis=1)
    return line, column, number < total, total


def _strongest(
    values: tf.Tensor,
    tensor: tf.Tensor,
    live: tf.Tensor,
    total: tf.Tensor,
    slots: Sequence[int],
    step: tf.Tensor,
) -> tf.Tensor:
    """Choose among candidates as `selection.strongest` does, the same ones.

    Args:
        values: shape [M], float32.
        tensor: which each is of, shape [M], int32, ascending.
        live: whether there is one, shape [M]; the first of all.
        total: how many there are, shape [], int32.
        slots: of each tensor; K together.
        step: shape [], int64.

    Returns:
        Which are kept, shape [K], int32, ascending; M in unused slots.
    """
    number, room = tf.range(values.shape[0]), values.shape[0]
    own = tf.constant(slots, tf.int32)
    counts = _by_tensor(tf.cast(live, tf.int32), tensor, len(slots))
    begins = tf.cumsum(counts) - counts
    shift = tf.cast(step * 7919 % tf.cast(tf.maximum(total, 1), tf.int64), tf.int32)
    # The sum of two numbers may pass int32.
    turned = number + tf.where(number < total - shift, shift, shift - total)
    turned = tf.where(live, turned, number)
    bits = tf.bitcast(tf.abs(tf.gather(values, turned)), tf.int32)
    of = tf.cast(len(slots) - tf.gather(tensor, turned), tf.int64)
    key = tf.where(live, of * 2**32 + tf.cast(bits, tf.int64), -1)
    order = tf.gather(turned, tf.math.top_k(key, room).indices)
    sizes = tf.abs(tf.gather(values, order))
    of = tf.gather(tensor, order)
    last = tf.clip_by_value(begins + own - 1, 0, room - 1)
    least = tf.gather(tf.gather(sizes, last), of)
    near = tf.where(number < tf.gather(begins + own, of), np.inf, sizes / least)
    near = tf.where(number < total, near, -1.0)
    best = tf.math.top_k(near, sum(slots)).indices
    kept = tf.where(best < total, tf.gather(order, best), room)
    return tf.sort(kept)


def send(
    residual: tf.Tensor,
    layout: Layout,
    plan: Plan,
    known: PlanTables,
    form: message.Format,
    value_type: str,
    step: tf.Tensor,
) -> tf.Tensor:
    """Write this worker's message of a step, the one that `dgc.send` writes.

    Args:
        residual: v after `dgc.accumulate`.
        layout: of the arena.
        plan: of the present stage.
        known: its tables.
        form: of the message.
        value_type: as in `DGCConfig`.
        step: shape [], int64.

    Returns:
        The message, shape [form.words], int32.
    """
    threshold = thresholds(residual, layout, plan, known, step)
    args = residual, layout, threshold, plan.slots.tolist(), known, step
    positions, values, count = select(*args)
    used = tf.range(form.slots) < count
    chosen = dgc.encoded(positions, values, layout, value_type, used)
    rows = positions[tf.newaxis], chosen.values[tf.newaxis], count[tf.newaxis]
    exponent, scales, checksum = chosen.exponent, chosen.scales, arenas.checksum(layout)
    return message.pack_rows(form, *rows, exponent, scales, checksum, step)[0]


def read(
    form: message.Format, messages: tf.Tensor
) -> tuple[message.Contents, tf.Tensor]:
    """Read messages, shape [N, words], int32, with values as `message.numbers`.

    Returns:
        What they hold, and `message.faults`.
    """
    found = message.unpack(form, messages, _ones)
    found = found._replace(values=message.numbers(form, found))
    return found, message.faults(form, messages, found)


def _ones(high: tf.Tensor, slots: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Find what `message.listed` finds, without a list of all there are."""
    workers, size = high.shape
    octets = tf.cast(tf.reshape(high, [-1]), tf.int32)
    bits = tf.bitwise.right_shift(octets[:, tf.newaxis], tf.range(8)) % 2
    counts = tf.reduce_sum(bits, axis=1)
    running = tf.cumsum(counts)
    ends = tf.reshape(running, [workers, size])[:, -1:]
    begins = tf.concat([tf.zeros([1, 1], tf.int32), ends[:-1]], axis=0)
    slot = tf.range(slots)
    used = slot < ends - begins
    wanted = tf.reshape(tf.where(used, begins + slot, 0), [-1])
    octet = tf.minimum(first_above(running, wanted), workers * size - 1)
    within = wanted - tf.gather(running - counts, octet)
    own = tf.gather(bits, octet)
    rank = tf.cumsum(own, axis=1) - own
    here = (own > 0) & (rank == within[:, tf.newaxis])
    bit = octet * 8 + tf.reduce_sum(tf.where(here, tf.range(8), 0), axis=1)
    row = tf.range(workers)[:, tf.newaxis] * (8 * size)
    return tf.cast(tf.reshape(bit, [workers, slots]) - row, tf.int64), used
