"""Choose the elements to send: sampled thresholds, exact selection. Pure functions.

Axes: P arena elements, B = P / BLOCK blocks, L lanes of a block, T tensors, K message
slots, C candidates.
"""

import functools
import math

import tensorflow as tf

from tf_dgc import layout as layout_lib
from tf_dgc.layout import BLOCK, Layout, Segment

# The k-th largest of a sample scatters by about 1/sqrt(k): at least so many.
MIN_SAMPLED_ABOVE = 64
# Zeros are never worth a slot; the smallest normal float32 keeps them out.
SMALLEST = 1.1754944e-38
# As many maxima are taken side by side, in the registers of a processor.
LANES = 16


def slots_per_segment(layout: Layout, sparsity: float) -> list[int]:
    """Return how many elements of each of the T segments a message has room for.

    At least one per tensor, so that no tensor starves.
    """
    return [max(1, round(s.size * (1.0 - sparsity))) for s in layout.segments]


def thresholds(
    arena: tf.Tensor,
    layout: Layout,
    sparsity: float,
    sample_fraction: float,
    step: tf.Tensor,
) -> tf.Tensor:
    """Estimate, for each tensor, the magnitude that `1 - sparsity` of it exceeds.

    The k-th largest magnitude of an evenly spaced sample, which starts elsewhere at
    every step. The sample is `sample_fraction` of the tensor, more where that would
    leave fewer than MIN_SAMPLED_ABOVE above the threshold, and then, for small
    tensors, all of it: their thresholds are exact.

    Args:
        arena: shape [P], float32, the residual v.
        layout: T segments.
        sparsity: fraction not sent.
        sample_fraction: in (0, 1].
        step: shape [], int64.

    Returns:
        shape [T], float32, positive.
    """
    found = []
    for segment, slots in zip(
        layout.segments, slots_per_segment(layout, sparsity), strict=True
    ):
        if slots >= segment.size:
            found.append(tf.constant(SMALLEST))
            continue
        stride = _stride(segment, slots, sample_fraction)
        start = tf.cast(segment.offset + step * 7919 % stride, tf.int32)
        values = arena[start : segment.offset + segment.size : stride]
        count = max(1, min(round(slots / stride), segment.size // stride))
        largest = tf.math.top_k(tf.abs(values), count).values
        found.append(tf.maximum(largest[-1], SMALLEST))
    return tf.stack(found) if found else tf.zeros([0])


def _stride(segment: Segment, slots: int, sample_fraction: float) -> int:
    """Return the step width of a segment's sample, coprime to common row lengths."""
    wanted = max(
        segment.size * sample_fraction, MIN_SAMPLED_ABOVE * segment.size / slots
    )
    stride = int(segment.size / wanted)
    while stride > 1 and math.gcd(stride, 2 * 3 * 5 * 7) > 1:
        stride -= 1
    return max(stride, 1)


def peaks(arena: tf.Tensor) -> tf.Tensor:
    """Return the largest magnitudes of each block, one of every L-th element.

    XLA makes vector instructions of it, other than of a reduction. Magnitudes are
    ordered as their bits are; NaN comes last.

    Args:
        arena: shape [..., P], float32.

    Returns:
        shape [..., B, L], float32.
    """
    *axes, size = arena.shape.as_list()
    bits = tf.bitwise.bitwise_and(tf.bitcast(arena, tf.int32), 0x7FFFFFFF)
    rows = tf.reshape(bits, [*axes, size // BLOCK, BLOCK // LANES, LANES])
    found = functools.reduce(tf.maximum, tf.unstack(rows, axis=-2))
    return tf.bitcast(found, tf.float32)


def select(
    arena: tf.Tensor,
    peaks: tf.Tensor,
    layout: Layout,
    threshold: tf.Tensor,
    slots: int,
    step: tf.Tensor,
) -> tf.Tensor:
    """Select the elements that reach their own tensor's threshold.

    Only blocks whose largest element reaches it are looked into.

    Where more do than there are slots, those that exceed it the most, relative to
    it, are kept; among equals those that follow a place which moves with every step.
    No element is preferred for its position.

    Args:
        arena: shape [P], float32.
        peaks: of the arena, shape [B, L].
        layout: T segments.
        threshold: shape [T], float32, positive.
        slots: K, the most elements to select.
        step: shape [], int64.

    Returns:
        Positions in the arena, ascending: shape [C'], int64, C' <= K.
    """
    of_block = tf.gather(threshold, layout_lib.segment_of_block(layout))
    blocks = tf.where(~(tf.reduce_max(peaks, axis=1) < of_block))[:, 0]
    magnitudes = tf.abs(tf.gather(tf.reshape(arena, [-1, BLOCK]), blocks))
    passes = tf.where(magnitudes >= tf.gather(of_block, blocks)[:, tf.newaxis])
    candidates = tf.gather(blocks, passes[:, 0]) * BLOCK + passes[:, 1]

    def strongest() -> tf.Tensor:
        # top_k takes the first of equals.
        moved = tf.roll(candidates, -step * 7919 % tf.size(candidates, tf.int64), 0)
        excess = tf.abs(tf.gather(arena, moved)) / tf.gather(of_block, moved // BLOCK)
        kept = tf.math.top_k(excess, slots, sorted=False, index_type=tf.int64).indices
        return tf.sort(tf.gather(moved, kept))

    positions = tf.cond(
        tf.size(candidates, tf.int64) > slots, strongest, lambda: candidates
    )
    positions.set_shape([None])
    return positions
