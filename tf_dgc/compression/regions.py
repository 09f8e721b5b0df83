"""An arena, shared out among N owners in interleaved regions. Pure functions.

Block b of the arena belongs to worker b mod N, so that regions are balanced whatever
the tensors' sizes. In a region positions ascend as in the arena:

    p in the arena  <->  q = (p div BLOCK div N) BLOCK + p mod BLOCK  in the region

Axes: P arena elements, R elements of a region, padding included; N workers, C selected
elements, K slots of a message to an owner.

References:
    Li, Hoefler: Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
    2022, https://arxiv.org/abs/2201.07598 (regions, and a selection of the sums)
"""

import tensorflow as tf

from tf_dgc.compression import arena, selection
from tf_dgc.compression.arena import BLOCK, Layout

_SHIFT = BLOCK.bit_length() - 1


def size_of(elements: int, workers: int) -> int:
    """Return R, given P and N; the same for every owner."""
    return -(-elements // (BLOCK * workers)) * BLOCK


def owners_of(positions: tf.Tensor, workers: int) -> tf.Tensor:
    """Return which worker each position in the arena belongs to, int64."""
    return tf.bitwise.right_shift(positions, _SHIFT) % workers


def to_region(positions: tf.Tensor, workers: int) -> tf.Tensor:
    """Return where positions in the arena are in their owners' regions."""
    block = tf.bitwise.right_shift(positions, _SHIFT) // workers
    return BLOCK * block + tf.bitwise.bitwise_and(positions, BLOCK - 1)


def to_arena(
    positions: tf.Tensor, owner: tf.Tensor, workers: int, elements: int
) -> tf.Tensor:
    """Return where positions in a region are in the arena.

    Args:
        positions: shape [..., K], int64; R in unused slots.
        owner: of the region, int64, of a shape that is broadcast.
        workers: N.
        elements: P.

    Returns:
        The same shape; P in unused slots, more than P for padding of a region.
    """
    block = tf.bitwise.right_shift(positions, _SHIFT) * workers + owner
    found = BLOCK * block + tf.bitwise.bitwise_and(positions, BLOCK - 1)
    found = tf.where(found < elements, found, elements + 1)
    return tf.where(positions < size_of(elements, workers), found, elements)


def part(whole: tf.Tensor, owner: tf.Tensor, workers: int) -> tf.Tensor:
    """Take an owner's region, shape [R], out of an arena of shape [P]."""
    size = size_of(whole.shape[0], workers)
    padded = tf.pad(whole, [[0, size * workers - whole.shape[0]]])
    return tf.reshape(tf.reshape(padded, [-1, workers, BLOCK])[:, owner], [size])


def spread(
    region: tf.Tensor, owner: tf.Tensor, workers: int, elements: int
) -> tf.Tensor:
    """Return an arena, shape [P], that is zero but for an owner's region."""
    blocks = tf.reshape(region, [-1, 1, BLOCK])
    owner = tf.cast(owner, tf.int32)
    around = [[0, 0], [owner, workers - 1 - owner], [0, 0]]
    return tf.reshape(tf.pad(blocks, around), [-1])[:elements]


def split_by_owner(
    positions: tf.Tensor, magnitudes: tf.Tensor, workers: int, slots: int
) -> tf.Tensor:
    """Choose what goes to each owner: the largest, where there are too many.

    Args:
        positions: in the arena, shape [C], int64, ascending.
        magnitudes: of what is there, shape [C], float32, none negative.
        workers: N.
        slots: K.

    Returns:
        Indices of selected elements, shape [N, K], int64, ascending in each row; C in
        unused slots.
    """
    count = tf.size(positions, tf.int64)
    owner = owners_of(positions, workers)
    # One order by owner and magnitude, which is ordered as its bits are.
    bits = tf.cast(tf.bitcast(magnitudes, tf.int32), tf.int64)
    key = tf.bitwise.left_shift(workers - owner, 32) + bits
    order = tf.math.top_k(key, tf.cast(count, tf.int32)).indices
    owners = tf.range(workers + 1, dtype=tf.int64)
    bounds = tf.searchsorted(tf.gather(owner, order), owners, out_type=tf.int64)
    index = bounds[:-1, tf.newaxis] + tf.range(slots, dtype=tf.int64)
    index = tf.where(index < bounds[1:, tf.newaxis], index, count)
    order = tf.concat([tf.cast(order, tf.int64), count[tf.newaxis]], axis=0)
    chosen = tf.gather(order, index)
    return -tf.math.top_k(-chosen, slots).values


def chosen_by(picked: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return, ascending, which of C elements `split_by_owner` chose: int64."""
    picked = tf.reshape(picked, [-1])
    ones = tf.ones_like(picked, tf.float32)
    times = tf.math.unsorted_segment_sum(ones, picked, count + 1)
    return tf.where(times[:-1] > 0)[:, 0]


def summed(
    region: tf.Tensor, positions: tf.Tensor, values: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Add what N workers sent, in the order of rank.

    Under XLA, which leaves unused slots out; so it is with `kept`.

    Args:
        region: what waits there, shape [..., R].
        positions: in it, shape [..., N, K], int64.
        values: of the same shape, float32.

    Returns:
        The sums, and `selection.peaks` of them.
    """
    workers = positions.shape[-2]

    def add(rank: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        where = places(positions[..., rank, :])
        flat = tf.reshape(values[..., rank, :], [-1])
        return rank + 1, tf.tensor_scatter_nd_add(found, where, flat)

    start = tf.zeros([], tf.int32), region
    _, found = tf.while_loop(
        lambda rank, _: rank < workers, add, start, maximum_iterations=workers
    )
    return found, selection.peaks(found)


def places(positions: tf.Tensor) -> tf.Tensor:
    """Return positions, [K] or [W, K], as indices: [K, 1], or [W * K, 2]."""
    where = positions[..., tf.newaxis]
    if where.shape.rank > 2:
        number = tf.range(where.shape[0], dtype=tf.int64)
        number = number[:, tf.newaxis, tf.newaxis] + tf.zeros_like(where)
        where = tf.concat([number, where], axis=-1)
    return tf.reshape(where, [-1, where.shape[-1]])


def kept(
    _: tf.Tensor, region: tf.Tensor, positions: tf.Tensor, sent: tf.Tensor
) -> tf.Tensor:
    """Return what waits in a region, shape [..., R], when some of it was passed on."""
    flat = tf.reshape(sent, [-1])
    return tf.tensor_scatter_nd_sub(region, places(positions), flat)


def reselect(
    region: tf.Tensor, peaks: tf.Tensor, slots: int, step: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Choose the largest sums of a region.

    Args:
        region: shape [R], float32.
        peaks: `selection.peaks` of it.
        slots: how many.
        step: shape [], int64; by it equals take turns.

    Returns:
        Positions in the region, ascending, shape [C], int64, C <= slots, and what is
        there.
    """
    size = region.shape[0]
    layout = Layout((arena.Segment("region", (size,), 0, size),), size)
    plan = selection.exact(size, slots)
    least = selection.thresholds(region, peaks, layout, plan, step)
    return selection.select(region, peaks, layout, least, plan.slots, step)


def merged(
    positions: tf.Tensor, values: tf.Tensor, workers: int, elements: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Bring what N owners passed on into the order of the arena, without a search.

    Args:
        positions: in each owner's region, shape [N, K], int64; R in unused slots.
        values: what is there, shape [N, K], float32.
        workers: N.
        elements: P.

    Returns:
        Positions in the arena, shape [1, N * K], ascending, P in unused slots; and
        what is there.
    """
    slots = positions.shape[1]
    owner = tf.range(workers, dtype=tf.int64)[:, tf.newaxis]
    size = size_of(elements, workers)
    blocks = size * workers // BLOCK
    used = positions < size
    block = tf.bitwise.right_shift(positions, _SHIFT) * workers + owner
    block = tf.where(used, block, blocks)
    ones = tf.ones([workers * slots])
    counts = tf.math.unsorted_segment_sum(ones, tf.reshape(block, [-1]), blocks + 1)
    # Where each block begins, of all owners and among its own. Sums that GPUs do for
    # floating-point types alone.
    counts = tf.cast(counts[:-1], tf.float64)
    begins = tf.cumsum(counts, exclusive=True)
    rows = tf.reshape(counts, [-1, workers])
    begins -= tf.reshape(tf.cumsum(rows, exclusive=True), [-1])
    first = tf.cast(tf.gather(begins, tf.where(used, block, 0)), tf.int64)
    last = workers * slots  # where unused ones go, one more than there are places
    place = tf.where(used, first + tf.range(slots, dtype=tf.int64), last)
    place = tf.reshape(place, [-1, 1])
    where = tf.where(used, to_arena(positions, owner, workers, elements), elements)
    found = [
        tf.tensor_scatter_nd_update(
            tf.fill([last + 1], tf.cast(unused, part.dtype)),
            place,
            tf.reshape(part, [-1]),
        )
        for unused, part in ((elements, where), (0, values))
    ]
    return found[0][tf.newaxis, :-1], found[1][tf.newaxis, :-1]
