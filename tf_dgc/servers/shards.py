"""Placement of the rows of tensors on servers. Pure functions.

Axes: M servers, T tensors.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Shard(NamedTuple):
    """Some rows of a tensor, or all of it, on one server."""

    server: int
    start: int  # rows along the first axis
    stop: int


def plan(
    shapes: Sequence[Sequence[int]],
    whole: Sequence[bool],
    servers: int,
    load: Sequence[int] | None = None,
) -> list[list[Shard]]:
    """Share tensors out evenly: the largest first, each to the lightest server.

    A tensor that is larger than a fair share, an M-th of all, is cut into pieces of
    rows.

    Args:
        shapes: of T tensors; the same result on all workers for the same ones.
        whole: which must not be cut, of length T.
        servers: M.
        load: elements that each server has already.

    Returns:
        For each tensor its shards, in the order of rows.
    """
    sizes = [math.prod(shape) for shape in shapes]
    fair = -(-sum(sizes) // servers)
    pieces = [
        (tensor, start, stop, sizes[tensor] // max(_rows(shape), 1) * (stop - start))
        for tensor, shape in enumerate(shapes)
        for start, stop in _cut(shape, sizes[tensor], fair, whole[tensor])
    ]
    weights = list(load) if load is not None else [0] * servers
    placed: list[list[Shard]] = [[] for _ in shapes]
    for tensor, start, stop, size in sorted(pieces, key=lambda piece: -piece[3]):
        server = weights.index(min(weights))
        weights[server] += size
        placed[tensor].append(Shard(server, start, stop))
    return [sorted(shards, key=lambda shard: shard.start) for shards in placed]


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _cut(
    shape: Sequence[int], size: int, fair: int, whole: bool
) -> list[tuple[int, int]]:
    """Return the bounds of the pieces of a tensor."""
    rows = _rows(shape)
    count = 1 if whole or size <= fair else min(-(-size // fair), rows)
    edges = [rows * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))
