"""Choose the elements to send, and sum what was sent. Pure functions.

Thresholds are sampled, selection by them is exact.

Axes: P arena elements, L = P / LINE lines of them, B = P / BLOCK blocks, T tensors,
K message slots, C candidates. Plans of several sparsities share one graph: numbers of
theirs may be tensors.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
# Times that an element may go as far by its senders alone as by the mean over all.
FARTHEST = 4.0
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


class Sample(NamedTuple):
    """Sample of each tensor of a size: integers, or int64 of shape []."""

    lines: Any  # of each tensor
    stride: Any  # one line of so many
    above: Any  # how many elements are to exceed the threshold; 0 where all of it may
    depth: Any  # lines of a group
    groups: Any  # that may hold these elements
    ordered: Any  # how many of what they hold


class Plan(NamedTuple):
    """Plan of a selection at a sparsity; arrays, or tensors on the host."""

    alike: tuple[tuple[int, ...], ...]  # the tensors of each of S sizes
    samples: Any  # a Sample for each size: shape [S, 6], int64
    slots: Any  # of each tensor: shape [T], int64; K together


def plan(layout: Layout, sparsity: float, sample_fraction: float) -> Plan:
    """Find out beforehand what is to be selected.

    Args:
        layout: T segments.
        sparsity: fraction not sent.
        sample_fraction: of each tensor, in (0, 1]. More is looked at where that would
            leave fewer than MIN_SAMPLED_ABOVE above the threshold, and then, of small
            tensors, all: their thresholds are exact.
    """
    by_size: dict[int, list[int]] = {}
    for i, segment in enumerate(layout.segments):
        by_size.setdefault(segment.size, []).append(i)
    slots = slots_per_segment(layout, sparsity)
    samples = [
        _sample(size, slots[own[0]], sample_fraction) for size, own in by_size.items()
    ]
    return Plan(
        tuple(tuple(own) for own in by_size.values()),
        np.array(samples, np.int64).reshape([-1, len(Sample._fields)]),
        np.array(slots, np.int64),
    )


def _sample(size: int, slots: int, sample_fraction: float) -> Sample:
    if slots >= size:
        return Sample(1, 1, 0, 1, 1, 1)
    least = MIN_SAMPLED_ABOVE * size / slots
    stride = max(1, int(size / max(size * sample_fraction, least, MIN_SAMPLED)))
    lines = -(-size // BLOCK) * BLOCK // LINE // stride
    k = slots if stride == 1 else max(1, round(slots * lines * LINE / size))
    # The k largest are in the k groups of lines that have the largest peaks. Least is
    # looked at where there are as many groups as elements in k of them.
    depth = max(1, 2 ** round(math.log2(lines / (LINE * k)) / 2))
    depth = min(depth, BLOCK // LINE, lines)
    groups = min(k + 1, lines // depth)
    return Sample(lines, stride, k, depth, groups, min(k + 1, groups * depth * LINE))


def exact(size: int, slots: int) -> Plan:
    """Return the plan that selects the K largest elements of one tensor, exactly."""
    samples = np.array([_sample(size, slots, 1.0)], np.int64)
    return Plan(((0,),), samples, np.array([slots], np.int64))


def one_of(plans: Sequence[Plan], number: tf.Tensor | None = None) -> Plan:
    """Return the plan of a number, shape []; it need not be known beforehand."""
    if len(plans) == 1:
        return plans[0]
    with tf.device("CPU:0"):  # where shapes are
        samples = tf.constant(np.stack([each.samples for each in plans]))[number]
        slots = tf.constant(np.stack([each.slots for each in plans]))[number]
    return Plan(plans[0].alike, samples, slots)


def thresholds(
    arena: tf.Tensor, peaks: tf.Tensor, layout: Layout, plan: Plan, step: tf.Tensor
) -> tf.Tensor:
    """Estimate, for each tensor, the magnitude that `1 - sparsity` of it exceeds.

    Halfway from the k-th largest magnitude of a sample to the next: of as many lines
    each, one is taken, another one at every step. Tensors of one size are looked at
    together.

    Args:
        arena: shape [P], float32, the residual v.
        peaks: of the arena, shape [L].
        layout: T segments.
        plan: of a sparsity.
        step: shape [], int64.

    Returns:
        shape [T], float32, positive.
    """
    found = [tf.zeros([0])]
    with tf.device("CPU:0"):
        known = plan.samples
        is_known = isinstance(known, np.ndarray)
        rows = known.tolist() if is_known else map(tf.unstack, tf.unstack(known))
        samples = [Sample(*row) for row in rows]
    for own, sample in zip(plan.alike, samples, strict=True):
        all_of_it = tf.fill([len(own)], SMALLEST)
        first = [[layout.segments[i].offset // LINE] for i in own]
        if tf.is_tensor(sample.above):
            halfway = _halfway(arena, peaks, first, sample, step)
            found.append(tf.where(sample.above > 0, halfway, all_of_it))
        elif sample.above:
            found.append(_halfway(arena, peaks, first, sample, step))
        else:
            found.append(all_of_it)
    order = [i for own in plan.alike for i in own]
    return tf.gather(tf.concat(found, axis=0), np.argsort(order))


def _halfway(
    arena: tf.Tensor,
    peaks: tf.Tensor,
    first: Sequence[Sequence[int]],
    sample: Sample,
    step: tf.Tensor,
) -> tf.Tensor:
    """Return what is between the k-th magnitude of a sample and the next.

    Were it the k-th itself, that element would never exceed it, and go first wherever
    there are too many for a message.

    Args:
        arena: shape [P].
        peaks: of the arena, shape [L].
        first: the first line of each of n tensors, shape [n, 1].
        sample: of their size.
        step: shape [], int64.

    Returns:
        shape [n], positive.
    """
    lines, stride, k, depth, count, ordered = sample
    with tf.device("CPU:0"):
        used = lines // depth * depth
        shape = [len(first), -1, depth]
        before = k - 1
        if tf.is_tensor(depth):
            shape = tf.stack([len(first), -1, tf.cast(depth, tf.int32)])
            before = tf.cast(before, tf.int32)
            count, ordered = tf.cast(count, tf.int32), tf.cast(ordered, tf.int32)
            used = tf.cast(used, tf.int32)
    places = tf.range(tf.cast(lines, tf.int64), dtype=tf.int64)
    if tf.is_tensor(stride) or stride > 1:
        # Multiples of the golden ratio: rows of no length can fool the sample.
        golden = tf.bitwise.bitwise_and(places * 0x9E3779B9, 0xFFFFFFFF)
        shift = tf.bitwise.right_shift(golden * stride, 32)
        places = places * stride + (shift + step * 7919) % stride
    places += tf.constant(first, tf.int64)
    groups = tf.reshape(places[:, :used], shape)
    largest = tf.reduce_max(tf.gather(peaks, groups), axis=2)
    best = tf.math.top_k(largest, count, sorted=False).indices
    chosen = tf.gather(groups, best, batch_dims=1)
    elements = tf.gather(tf.reshape(arena, [-1, LINE]), chosen)
    magnitudes = tf.reshape(tf.abs(elements), [len(first), -1])
    strongest = tf.math.top_k(magnitudes, ordered).values
    middle = 0.5 * strongest[:, before] + 0.5 * strongest[:, -1]
    return tf.maximum(middle, SMALLEST)


def select(
    arena: tf.Tensor,
    peaks: tf.Tensor,
    layout: Layout,
    threshold: tf.Tensor,
    slots: Any,
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
        slots: each tensor's own, shape [T], int64; K together.
        step: shape [], int64.

    Returns:
        Positions in the arena, ascending: shape [C'], int64, C' <= K; and what is
        there, shape [C'], float32.
    """
    of_block = tf.gather(threshold, arenas.of_blocks(layout))
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

    count = tf.size(candidates, tf.int64)  # which is on the host
    with tf.device("CPU:0"):
        slots = tf.convert_to_tensor(slots, tf.int64)
        crowded = count > tf.reduce_sum(slots)
    found = tf.cond(crowded, kept, lambda: (candidates, values))
    for part in found:
        part.set_shape([None])
    return found


def strongest(
    positions: tf.Tensor,
    values: tf.Tensor,
    layout: Layout,
    slots: Any,
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
        slots: of each tensor, shape [T], int64; K together.
        step: shape [], int64.

    Returns:
        The indices of K candidates, shape [K], int64, ascending.
    """
    count, tensors = tf.size(positions, tf.int64), len(layout.segments)
    bounds = arenas.bounds(layout, positions)
    begins, own = bounds[:-1], tf.convert_to_tensor(slots, tf.int64)
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
    left = tf.cast(tf.reduce_sum(own), tf.int32) - tf.size(mine)
    more = tf.math.top_k(near, left, sorted=False).indices
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
    return added(tf.zeros_like(arena), positions, values)


def added(arena: tf.Tensor, positions: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return an arena to which is added what N workers sent; arguments as above."""
    workers = positions.shape[0]

    def add(rank: tf.Tensor, summed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        where = positions[rank, :, tf.newaxis]
        return rank + 1, tf.tensor_scatter_nd_add(summed, where, values[rank])

    # A loop, in place: its graph does not grow with N. One scattering of all would add
    # equal positions in any order on GPUs.
    start = tf.zeros([], tf.int32), arena
    # Of one counter, so that XLA knows how often, and a GPU does not ask the host.
    _, summed = tf.while_loop(lambda rank, _: rank < workers, add, start)
    return summed


def average(arena: tf.Tensor, positions: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Sum, as `densify` does, but N times the mean over those that sent an element.

    At most `FARTHEST` times the sum: what one of many workers has sent is mostly noise.

    Args:
        arena: as for `densify`.
        positions: as for `densify`; P in unused slots.
        values: as for `densify`.

    Returns:
        shape [P], float32; 0 where nobody sent.
    """
    senders = densify(arena, positions, tf.ones_like(values))
    scale = tf.cast(positions.shape[0], tf.float32) / tf.maximum(senders, 1.0)
    return tf.minimum(scale, FARTHEST) * densify(arena, positions, values)


def in_rooms(
    positions: tf.Tensor, values: tf.Tensor, slots: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Give what N workers sent a shape that is the same at all stages.

    Args:
        positions: in the arena, shape [N, K]; those of unused slots are not below P.
        values: shape [N, K], float32.
        slots: K at each stage; rows become a multiple of the last.

    Returns:
        Positions, filled up with places of no arena, values, and how many slots of each
        row count: of shapes [N, K'], [N, K'] and [N], int32.
    """
    workers, last = positions.shape[0], slots[-1]
    length = -(-max(slots) // last) * last
    counts = tf.fill([workers], tf.shape(positions)[1])
    if len(slots) > 1:
        fill = [[0, 0], [0, length - tf.shape(positions)[1]]]
        positions = tf.pad(positions, fill, constant_values=_NOWHERE)
        positions = tf.ensure_shape(positions, [workers, length])
        values = tf.ensure_shape(tf.pad(values, fill), [workers, length])
    return positions, values, counts


class Windows(NamedTuple):
    """Windows of a message in which tensors are looked for, R places for each."""

    rooms: tuple[int, ...]  # how many places each of T tensors has, R together
    tensor: tf.Tensor  # whose each place is, shape [R], int64
    place: tf.Tensor  # which of its own, shape [R], int64


def windows(rooms: Sequence[int]) -> Windows:
    """Lay out a stretch of places for each of T tensors."""
    ends = np.cumsum(rooms)
    places = tf.range(int(ends[-1]), dtype=tf.int64)
    tensor = tf.searchsorted(ends, places, side="right", out_type=tf.int64)
    return Windows(tuple(rooms), tensor, places - tf.gather(ends - rooms, tensor))


def looked_into(
    look: Windows,
    positions: tf.Tensor,
    values: tf.Tensor,
    begins: tf.Tensor,
    offsets: Sequence[int],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Take what a worker sent from where T tensors are looked for.

    Args:
        look: what `windows` returned.
        positions: in the arena, shape [K], int64, ascending.
        values: shape [K], float32.
        begins: where each tensor is looked for among the positions, shape [T], int64.
        offsets: where each tensor begins in the arena.

    Returns:
        Places in these tensors, shape [R], int64, those of others beyond their ends;
        and what is there, shape [R], float32.
    """
    wanted = tf.gather(begins, look.tensor) + look.place
    wanted = tf.minimum(wanted, tf.size(positions, tf.int64))
    positions = tf.concat([positions, [_NOWHERE]], axis=0)
    offset = tf.gather(tf.constant(offsets, tf.int64), look.tensor)
    places = tf.gather(positions, wanted) - offset
    return places, tf.gather(tf.pad(values, [[0, 1]]), wanted)


def subtract(
    tensors: Sequence[tf.Tensor],
    places: tf.Tensor,
    values: tf.Tensor,
    rooms: Sequence[int],
) -> list[tf.Tensor]:
    """Subtract what a worker sent from T tensors.

    Args:
        tensors: T, float32.
        places: in each of them, shape [R], int64.
        values: shape [R], float32.
        rooms: how many of these are each tensor's.

    Returns:
        T tensors.
    """
    changed, begin = [], 0
    for tensor, room in zip(tensors, rooms, strict=True):
        own = slice(begin, begin + room)
        begin += room
        flat = tf.reshape(tensor, [-1])
        where = places[own, tf.newaxis]
        flat = tf.tensor_scatter_nd_sub(flat, where, values[own])
        changed.append(tf.reshape(flat, tensor.shape))
    return changed


def mark(marks: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return marks, shape [P], bool, with those at positions, shape [K], set."""
    own = tf.ones_like(positions, tf.bool)
    return tf.tensor_scatter_nd_update(marks, positions[:, tf.newaxis], own)
