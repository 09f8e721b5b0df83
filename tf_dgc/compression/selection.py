"""Choose the elements to send, and sum what was sent. Pure functions.

Thresholds are sampled, selection by them is exact.

Axes: P arena elements, L = P / LINE lines of them, B = P / BLOCK blocks, T tensors,
K message slots, C candidates.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_dgc.compression import arena as arenas
from tf_dgc.compression.arena import BLOCK, Layout

# The k-th largest of a sample scatters by about 1/sqrt(k), more where large elements
# come in rows: at least so many.
MIN_SAMPLED_ABOVE = 64
# Of smaller tensors a sample would save nothing.
MIN_SAMPLED = 8192
# Zeros are never worth a slot; the smallest normal float32 keeps them out.
SMALLEST = 1.1754944e-38
# The elements of a line lie side by side; only lines with a large one are looked into.
LINE = 8
_NOWHERE = 2**31 - 1  # no arena has as many elements


def peaks(arena: tf.Tensor) -> tf.Tensor:
    """Return the largest magnitude of each line.

    XLA makes vector instructions of it, other than of a reduction. Magnitudes are
    ordered as their bits are; NaN comes last.

    Args:
        arena: shape [..., P], float32.

    Returns:
        shape [..., L], float32.
    """
    *axes, size = arena.shape.as_list()
    bits = tf.bitwise.bitwise_and(tf.bitcast(arena, tf.int32), 0x7FFFFFFF)
    lines = tf.reshape(bits, [*axes, size // LINE, LINE])
    found = functools.reduce(tf.maximum, tf.unstack(lines, axis=-1))
    return tf.bitcast(found, tf.float32)


def slots_per_segment(layout: Layout, sparsity: float) -> list[int]:
    """Return how many elements of each of the T segments a message has room for.

    At least one per tensor, so that no tensor starves.
    """
    return [max(1, round(s.size * (1.0 - sparsity))) for s in layout.segments]


def thresholds(
    arena: tf.Tensor,
    peaks: tf.Tensor,
    layout: Layout,
    sparsity: float,
    sample_fraction: float,
    step: tf.Tensor,
) -> tf.Tensor:
    """Estimate, for each tensor, the magnitude that `1 - sparsity` of it exceeds.

    Halfway from the k-th largest magnitude of a sample to the next: of as many lines
    each, one is taken, another one at every step. The sample is `sample_fraction` of
    the tensor, more where that would leave fewer than MIN_SAMPLED_ABOVE above the
    threshold, and then, for small tensors, all of it: their thresholds are exact.
    Tensors of one size are looked at together.

    Args:
        arena: shape [P], float32, the residual v.
        peaks: of the arena, shape [L].
        layout: T segments.
        sparsity: fraction not sent.
        sample_fraction: in (0, 1].
        step: shape [], int64.

    Returns:
        shape [T], float32, positive.
    """
    by_size: dict[int, list[int]] = {}
    for i, segment in enumerate(layout.segments):
        by_size.setdefault(segment.size, []).append(i)
    slots = slots_per_segment(layout, sparsity)
    found = [tf.zeros([0])]
    for size, own in by_size.items():
        if slots[own[0]] >= size:
            found.append(tf.fill([len(own)], SMALLEST))
            continue
        wanted = max(
            size * sample_fraction,
            MIN_SAMPLED_ABOVE * size / slots[own[0]],
            MIN_SAMPLED,
        )
        stride = max(1, int(size / wanted))
        lines = -(-size // BLOCK) * BLOCK // LINE // stride
        k = slots[own[0]]
        places = tf.range(lines, dtype=tf.int64)
        if stride > 1:
            k = max(1, round(k * lines * LINE / size))
            # Multiples of the golden ratio: rows of no length can fool the sample.
            golden = tf.bitwise.bitwise_and(places * 0x9E3779B9, 0xFFFFFFFF)
            shift = tf.bitwise.right_shift(golden * stride, 32)
            places = places * stride + (shift + step * 7919) % stride
        first = [[layout.segments[i].offset // LINE] for i in own]
        places += tf.constant(first, tf.int64)
        found.append(_halfway(arena, peaks, places, k))
    order = [i for own in by_size.values() for i in own]
    return tf.gather(tf.concat(found, axis=0), np.argsort(order))


def _halfway(
    arena: tf.Tensor, peaks: tf.Tensor, places: tf.Tensor, k: int
) -> tf.Tensor:
    """Return what is between the k-th magnitude and the next, of lines of n tensors.

    Were it the k-th itself, that element would never exceed it, and go first wherever
    there are too many for a message.

    Args:
        arena: shape [P].
        peaks: of the arena, shape [L].
        places: N lines of each tensor, shape [n, N].
        k: at most as many as the elements of N lines.

    Returns:
        shape [n], positive.
    """
    # The k largest are in the k groups of lines that have the largest peaks. Least is
    # looked at where there are as many groups as elements in k of them.
    tensors, lines = places.shape
    depth = max(1, 2 ** round(math.log2(lines / (LINE * k)) / 2))
    depth = min(depth, BLOCK // LINE, lines)
    groups = tf.reshape(places[:, : lines // depth * depth], [tensors, -1, depth])
    largest = tf.reduce_max(tf.gather(peaks, groups), axis=2)
    best = tf.math.top_k(largest, min(k + 1, lines // depth), sorted=False).indices
    chosen = tf.gather(groups, best, batch_dims=1)
    elements = tf.gather(tf.reshape(arena, [-1, LINE]), chosen)
    magnitudes = tf.reshape(tf.abs(elements), [tensors, -1])
    ordered = tf.math.top_k(magnitudes, min(k + 1, magnitudes.shape[1])).values
    return tf.maximum(0.5 * ordered[:, k - 1] + 0.5 * ordered[:, -1], SMALLEST)


def select(
    arena: tf.Tensor,
    peaks: tf.Tensor,
    layout: Layout,
    threshold: tf.Tensor,
    slots: Sequence[int],
    step: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Select the elements that reach their own tensor's threshold.

    Only lines whose largest element reaches it are looked into.

    Where more do than there are slots, `strongest` are kept.

    Args:
        arena: shape [P], float32.
        peaks: of the arena, shape [L].
        layout: T segments.
        threshold: shape [T], float32, positive.
        slots: each tensor's own, T; K together.
        step: shape [], int64.

    Returns:
        Positions in the arena, ascending: shape [C'], int64, C' <= K; and what is
        there, shape [C'], float32.
    """
    counts = [-(-segment.size // BLOCK) for segment in layout.segments]
    filled = [tf.fill([count], threshold[i]) for i, count in enumerate(counts)]
    of_block = tf.concat(filled, axis=0) if filled else tf.zeros([0])
    # From blocks to lines to elements; a NaN is no reason to pass over its line.
    by_block = tf.reshape(peaks, [-1, BLOCK // LINE])
    blocks = tf.where(~(tf.reduce_max(by_block, axis=1) < of_block))[:, 0]
    least = tf.gather(of_block, blocks)[:, tf.newaxis]
    lines, _ = _within(blocks, ~(tf.gather(by_block, blocks) < least))
    elements = tf.gather(tf.reshape(arena, [-1, LINE]), lines)
    least = tf.gather(of_block, _shift(lines, BLOCK // LINE))[:, tf.newaxis]
    candidates, index = _within(lines, tf.abs(elements) >= least)
    values = tf.gather(tf.reshape(elements, [-1]), index)

    def kept() -> tuple[tf.Tensor, tf.Tensor]:
        best = strongest(candidates, values, layout, slots, step)
        return tf.gather(candidates, best), tf.gather(values, best)

    crowded = tf.size(candidates, tf.int64) > sum(slots)
    found = tf.cond(crowded, kept, lambda: (candidates, values))
    for part in found:
        part.set_shape([None])
    return found


def strongest(
    positions: tf.Tensor,
    values: tf.Tensor,
    layout: Layout,
    slots: Sequence[int],
    step: tf.Tensor,
) -> tf.Tensor:
    """Choose among more candidates than there are slots.

    The largest of each tensor, as many as it has slots. What others leave free goes to
    those that come nearest to the least of these of their own tensor. Of equals those
    go first that follow a place which moves with every step: no element is preferred
    for its position.

    Args:
        positions: of the candidates in the arena, shape [C], int64, ascending.
        values: what is there, shape [C], float32.
        layout: T segments.
        slots: of each tensor, T; K together.
        step: shape [], int64.

    Returns:
        The indices of K candidates, shape [K], int64, ascending.
    """
    count, tensors = tf.size(positions, tf.int64), len(slots)
    bounds = arenas.bounds(layout, positions)
    begins, own = bounds[:-1], tf.constant(slots, tf.int64)
    turned = tf.roll(tf.range(count, dtype=tf.int64), -(step * 7919 % count), 0)
    tensor = tf.searchsorted(bounds[1:], turned, side="right", out_type=tf.int64)
    # One order by tensor and magnitude, which is ordered as its bits are. Equals stay
    # in their order.
    bits = tf.bitcast(tf.abs(tf.gather(values, turned)), tf.int32)
    key = tf.bitwise.left_shift(tensors - tensor, 32) + tf.cast(bits, tf.int64)
    order = tf.math.top_k(key, tf.cast(count, tf.int32)).indices
    order, tensor = tf.gather(turned, order), tf.gather(tensor, order)
    is_own = tf.range(count, dtype=tf.int64) < tf.gather(begins + own, tensor)
    mine, rest = tf.where(is_own)[:, 0], tf.where(~is_own)[:, 0]
    # Where a tensor has as many, its last own one is its threshold, to the bit.
    last = tf.gather(order, tf.clip_by_value(begins + own - 1, 0, count - 1))
    least = tf.gather(tf.abs(tf.gather(values, last)), tf.gather(tensor, rest))
    near = tf.abs(tf.gather(values, tf.gather(order, rest))) / least
    more = tf.math.top_k(near, sum(slots) - tf.size(mine), sorted=False).indices
    kept = tf.gather(order, tf.concat([mine, tf.gather(rest, more)], axis=0))
    times = tf.math.unsorted_segment_sum(tf.ones_like(kept, tf.float32), kept, count)
    return tf.where(times > 0)[:, 0]


def _within(parents: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Number the parts of some parents.

    Args:
        parents: shape [C], int64, the numbers of the parents.
        mask: which of their W parts count, shape [C, W], W a power of 2.

    Returns:
        The numbers of the parts that count, and their places in the flat mask; int64.
    """
    index = tf.where(tf.reshape(mask, [-1]))[:, 0]
    width = mask.shape[1]
    own = tf.gather(parents, _shift(index, width))
    return own * width + tf.bitwise.bitwise_and(index, width - 1), index


def _shift(numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Divide by a power of 2, as a division of int64 takes several times as long."""
    return tf.bitwise.right_shift(numbers, width.bit_length() - 1)


def densify(arena: tf.Tensor, positions: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Sum what N workers sent, in the order of rank: the same bits everywhere.

    Positions of P and more, of unused slots, need XLA, which leaves them out; so it is
    with `subtract` and `mark`.

    Args:
        arena: of the shape of the result, [P], float32; its values do not count.
        positions: shape [N, K], int64, each worker's without repetition.
        values: shape [N, K], float32.

    Returns:
        shape [P], float32.
    """
    workers = positions.shape[0]

    def add(rank: tf.Tensor, summed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        where = positions[rank, :, tf.newaxis]
        return rank + 1, tf.tensor_scatter_nd_add(summed, where, values[rank])

    # A loop, in place: its graph does not grow with N. One scattering of all would add
    # equal positions in any order on GPUs.
    start = tf.zeros([], tf.int32), tf.zeros_like(arena)
    _, summed = tf.while_loop(
        lambda rank, _: rank < workers, add, start, maximum_iterations=workers
    )
    return summed


def subtract(
    tensors: Sequence[tf.Tensor],
    positions: tf.Tensor,
    values: tf.Tensor,
    begins: tf.Tensor,
    offsets: Sequence[int],
    rooms: Sequence[int],
) -> list[tf.Tensor]:
    """Subtract what a worker sent from T tensors of the arena.

    Args:
        tensors: T, float32.
        positions: in the arena, shape [K], int64, ascending.
        values: shape [K], float32.
        begins: where each tensor is looked for among the positions, shape [T], int64.
        offsets: where each tensor begins in the arena.
        rooms: in how many of the positions each tensor is looked for.

    Returns:
        T tensors.
    """
    end = [[0, max(rooms)]]
    positions = tf.pad(positions, end, constant_values=_NOWHERE)
    values = tf.pad(values, end)
    changed = []
    for tensor, begin, offset, room in zip(
        tensors, tf.unstack(begins), offsets, rooms, strict=True
    ):
        window = begin + tf.range(room, dtype=tf.int64)
        where = tf.gather(positions, window)[:, tf.newaxis] - offset
        flat = tf.reshape(tensor, [-1])
        flat = tf.tensor_scatter_nd_sub(flat, where, tf.gather(values, window))
        changed.append(tf.reshape(flat, tensor.shape))
    return changed


def mark(marks: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return marks, shape [P], bool, with those at positions, shape [K], set."""
    own = tf.ones_like(positions, tf.bool)
    return tf.tensor_scatter_nd_update(marks, positions[:, tf.newaxis], own)
