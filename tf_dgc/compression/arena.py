"""The arena: one flat vector that holds all compressed tensors. Pure functions.

Axes: P arena elements, B = P / BLOCK blocks, T tensors (segments).
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

BLOCK = 128
COMPRESSED_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


class Segment(NamedTuple):
    """Segment of the arena that holds one tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements, a multiple of BLOCK
    size: int  # elements without padding


class Layout(NamedTuple):
    """The table of an arena."""

    segments: tuple[Segment, ...]
    size: int  # P, padding included

    @property
    def elements(self) -> int:
        """Number of elements without padding."""
        return sum(segment.size for segment in self.segments)


def is_compressed(shape: Sequence[int], dtype: tf.DType, min_elements: float) -> bool:
    """Tell whether a tensor is compressed or reduced densely.

    Only tensors of rank 2 and more are compressed, the rule that gives the
    paper's ratios: biases and batch-norm parameters stay dense.
    """
    return (
        len(shape) >= 2
        and tf.as_dtype(dtype) in COMPRESSED_DTYPES
        and math.prod(shape) >= max(min_elements, 1)
    )


def build(tensors: Sequence[tuple[str, Sequence[int]]]) -> Layout:
    """Lay tensors, given as (name, static shape), end to end.

    Raises:
        ValueError: the arena would pass 2**31 - 1 elements.
    """
    segments, offset = [], 0
    for name, shape in tensors:
        size = math.prod(shape)
        segments.append(Segment(name, tuple(shape), offset, size))
        offset += -(-size // BLOCK) * BLOCK
    if offset >= 2**31:
        raise ValueError(
            "The compressed tensors of one optimizer must have fewer than 2**31 "
            f"elements together. Received: {offset} elements"
        )
    return Layout(tuple(segments), offset)


class Division(NamedTuple):
    """Division of tensors into large ones, which are in an arena, and small ones."""

    large: list[int]  # indices
    small: list[int]
    layout: Layout  # of the large ones

    def merged(self, large: Sequence[Any], small: Sequence[Any]) -> list[Any]:
        """Return what belongs to each tensor, in the order of all."""
        found = dict(zip(self.large, large, strict=True))
        found |= dict(zip(self.small, small, strict=True))
        return [found[i] for i in range(len(found))]


def divide(
    tensors: Sequence[Any],
    min_elements: float,
    dtypes: Sequence[tf.DType] = COMPRESSED_DTYPES,
) -> Division:
    """Divide tensors by whether they are compressed.

    Args:
        tensors: objects with a name, a static shape and a dtype.
        min_elements: of a large one; infinity has all small.
        dtypes: of large ones.
    """
    shapes = [tensor.shape.as_list() for tensor in tensors]
    large = [
        i
        for i, tensor in enumerate(tensors)
        if tensor.dtype in dtypes
        and is_compressed(shapes[i], tensor.dtype, min_elements)
    ]
    small = [i for i in range(len(shapes)) if i not in large]
    return Division(large, small, build([(tensors[i].name, shapes[i]) for i in large]))


def checksum(layout: Layout) -> int:
    """Return a signed 32-bit checksum of shapes and offsets."""
    table = repr([segment[1:] for segment in layout.segments])
    return int(np.uint32(zlib.crc32(table.encode())).view(np.int32))


def flatten(layout: Layout, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Copy tensors into one arena; padding is zero.

    Args:
        layout: T segments.
        tensors: T tensors of the segments' shapes, any float type.

    Returns:
        shape [P], float32.
    """
    pieces = []
    for segment, tensor in zip(layout.segments, tensors, strict=True):
        pieces.append(tf.reshape(tf.cast(tensor, tf.float32), [segment.size]))
        if padding := -segment.size % BLOCK:
            pieces.append(tf.zeros([padding]))
    return tf.concat(pieces, axis=0) if pieces else tf.zeros([0])


def unflatten(layout: Layout, arena: tf.Tensor) -> list[tf.Tensor]:
    """Return the T tensors that an arena of shape [P] holds."""
    return [
        tf.reshape(arena[s.offset : s.offset + s.size], s.shape)
        for s in layout.segments
    ]


def mask(layout: Layout, chosen: Sequence[bool]) -> tf.Tensor:
    """Mark the elements of those of T tensors that are chosen: shape [P], bool."""
    pieces = [
        tf.fill([-(-segment.size // BLOCK) * BLOCK], value)
        for segment, value in zip(layout.segments, chosen, strict=True)
    ]
    return tf.concat(pieces, axis=0) if pieces else tf.zeros([0], tf.bool)


def subtract(
    tensors: Sequence[tf.Tensor], arena: tf.Tensor, offsets: Sequence[int]
) -> list[tf.Tensor]:
    """Subtract from each tensor what begins at its offset in an arena of shape [P]."""
    parts = [
        tf.reshape(arena[offset : offset + math.prod(tensor.shape)], tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    return [tensor - part for tensor, part in zip(tensors, parts, strict=True)]


def spread(layout: Layout, numbers: tf.Tensor) -> tf.Tensor:
    """Repeat a number of each of T tensors over its elements: shape [P]."""
    if not layout.segments:
        return tf.zeros([0], numbers.dtype)
    blocks = tf.gather(numbers, of_blocks(layout))
    repeated = tf.broadcast_to(blocks[:, None], [layout.size // BLOCK, BLOCK])
    return tf.reshape(repeated, [-1])


def moved(
    arenas: Sequence[tf.Tensor],
    begins: Sequence[int],
    others: Sequence[int],
    sizes: Sequence[int],
) -> list[tf.Tensor]:
    """Move pieces from one arena to another, which has zeros there; leave zeros.

    Args:
        arenas: from which and to which, of shapes [..., P] and [..., P'].
        begins: of each piece in the first, ascending.
        others: where each begins in the second, in the same order of pieces.
        sizes: of each piece, in elements.

    Returns:
        Both.
    """
    source, target = arenas
    nothing = [tf.zeros_like(source[..., :size]) for size in sizes]
    parts = [
        source[..., b : b + size] + target[..., o : o + size]
        for b, o, size in zip(begins, others, sizes, strict=True)
    ]
    return [_replaced(source, begins, nothing), _replaced(target, others, parts)]


def _replaced(
    arena: tf.Tensor, begins: Sequence[int], parts: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Return an arena, shape [..., P], with other parts at some places."""
    pieces, end = [], 0
    for begin, part in sorted(
        zip(begins, parts, strict=True), key=lambda pair: pair[0]
    ):
        pieces += [arena[..., end:begin], part]
        end = begin + part.shape[-1]
    return tf.concat([*pieces, arena[..., end:]], axis=-1)


def of_blocks(layout: Layout) -> tf.Tensor:
    """Return which tensor each block of an arena is of, shape [B], int64."""
    begins = [segment.offset // BLOCK for segment in layout.segments]
    begins = tf.constant(begins, tf.int32, [len(begins), 1])
    marks = tf.scatter_nd(begins, tf.ones([begins.shape[0]]), [layout.size // BLOCK])
    # A sum that GPUs do for floats alone.
    return tf.cast(tf.cumsum(marks) - 1.0, tf.int64)


def bounds(layout: Layout, positions: tf.Tensor) -> tf.Tensor:
    """Find the segments among positions, shape [..., K], int64, ascending.

    Returns:
        Where each segment begins, and the last one ends: shape [..., T + 1], int64.
    """
    offsets = [*(segment.offset for segment in layout.segments), layout.size]
    wanted = tf.constant(offsets, tf.int64)
    wanted = tf.broadcast_to(wanted, [*positions.shape[:-1], len(offsets)])
    return tf.searchsorted(positions, wanted, out_type=tf.int64)


def count_by_segment(layout: Layout, positions: tf.Tensor) -> tf.Tensor:
    """Count positions, shape [C], int64, ascending, by segment: shape [T], int64."""
    found = bounds(layout, positions)
    return found[1:] - found[:-1]
