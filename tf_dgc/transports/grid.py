"""Collectives in two hops over a grid of workers, for where latency is the limit.

Axes: N = R C workers, in R rows and C columns; rank r C + c is in row r and column c.

A ring passes N workers one after the other, so that a small message waits N - 1 times;
over rows and then over columns it waits R + C - 2 times. What travels is as much, but
for all-to-all, where it is twice as much.
"""

import contextlib
import functools
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_dgc.transports import base, gathering

_logger = logging.getLogger("tf_dgc")

LEAST_SIDE = 3  # of a grid that saves waiting
MOST_BYTES = 2**16  # that are summed over a grid: columns gather sums of rows
VARIABLE, SETTINGS = "TF_DGC_GRID", ("auto", "on", "off")
# A grid is taken where the ring takes so long for a few bytes, and it so much less.
_SLOW_SECONDS, _SHARE, _TRIALS = 1e-3, 0.7, 5


class Grid(base.Transport):
    """Another transport, whose small tensors go over rows and columns."""

    def __init__(self, ring: base.Transport) -> None:
        """Make the groups; all workers call this.

        Args:
            ring: the other transport, of N workers, which `sides` can arrange.

        Raises:
            ValueError: its workers make no grid, or it has no groups.
        """
        rows, columns = sides(ring.size)
        if rows < LEAST_SIDE:
            raise ValueError(
                f"A grid needs {LEAST_SIDE} rows and columns or more. Received: "
                f"{ring.size} workers, at most {rows} x {columns}"
            )
        ranks = np.arange(ring.size).reshape(rows, columns)
        self._row = ring.group(ranks.tolist())
        self._column = ring.group(ranks.T.tolist())
        self._ring, self.name = ring, ring.name
        self.rank, self.size = ring.rank, ring.size
        self.device, self.addresses = ring.device, ring.addresses

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum over rows, then these sums in their order; large tensors at once."""
        sizes = [(t.shape.num_elements() or 0) * t.dtype.size for t in tensors]
        known = all(tensor.shape.is_fully_defined() for tensor in tensors)
        if not known or sum(sizes) > MOST_BYTES:
            return self._ring.all_reduce(tensors, name)

        def reduce(vector: tf.Tensor) -> tf.Tensor:
            (summed,) = self._row.all_reduce([vector], f"{name}.row")
            gathered = self._column.all_gather(summed, f"{name}.column")
            return tf.add_n(tf.unstack(gathered, self._column.size))

        with tf.device(self.device):
            return base.fuse(tensors, reduce)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather rows, and then these in columns."""
        row = self._row.all_gather(tensor, f"{name}.row")
        grid = self._column.all_gather(row, f"{name}.column")
        return _reshaped(grid, [self.size], 2)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send what is for a column to the worker of the own row in it, then on."""
        axes = [1, 0, *range(2, tensor.shape.rank + 1)]
        by_row = _reshaped(tensor, [self._column.size, self._row.size], 1)
        sent = tf.transpose(by_row, axes)  # [C, R, *S], by receivers
        passed = self._row.all_to_all(sent, f"{name}.row")  # by senders' columns
        sent = tf.transpose(passed, axes)  # [R, C, *S]
        received = self._column.all_to_all(sent, f"{name}.column")
        return _reshaped(received, [self.size], 2)

    @property
    def host(self) -> str:
        """Name of this worker's host."""
        return self._ring.host

    def group(
        self, parts: Sequence[Sequence[int]], apart: bool = False
    ) -> base.Transport:
        """Return the other transport's group."""
        return self._ring.group(parts, apart)

    def aside(self, thread: threading.Thread) -> base.Transport:
        """Return a grid over the other transport's."""
        return Grid(self._ring.aside(thread))

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this worker trains."""
        return self._ring.training()

    def all_leave(self) -> bool:
        """Tell whether all workers leave where this one does."""
        return self._ring.all_leave()

    def at_end(self, batches: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this worker has no more batches."""
        return self._ring.at_end(batches)


def _reshaped(tensor: tf.Tensor, first: list[int], replaced: int) -> tf.Tensor:
    """Return a tensor with other first axes, in the place of some; S may be unknown."""
    bits, restore = gathering.unmoved(tensor)
    shape = tf.concat([first, tf.shape(bits)[replaced:]], axis=0)
    found = restore(tf.reshape(bits, shape))
    return tf.ensure_shape(found, [*first, *tensor.shape[replaced:]])


def sides(workers: int) -> tuple[int, int]:
    """Return numbers of rows and columns, as equal as N allows; rows are not more."""
    rows = max(r for r in range(1, math.isqrt(workers) + 1) if workers % r == 0)
    return rows, workers // rows


def chosen(everybody: base.Transport) -> base.Transport:
    """Return a grid where it pays by the latency measured now, else the transport.

    All workers call this; rank 0 decides.

    Args:
        everybody: a transport between all workers.

    Raises:
        ValueError: TF_DGC_GRID is wrong.
    """
    wanted = base.setting(VARIABLE, SETTINGS)
    if sides(everybody.size)[0] < LEAST_SIDE:
        if wanted == "on" and everybody.rank == 0:
            _tell_none(everybody.size)
        return everybody
    if wanted == "off":
        return everybody
    if wanted == "on":
        return Grid(everybody)
    ring = _seconds(everybody)
    slow = tf.constant(ring > _SLOW_SECONDS)
    if not everybody.broadcast([slow], "grid.slow")[0]:
        return everybody
    grid = Grid(everybody)
    faster = tf.constant((found := _seconds(grid)) < _SHARE * ring)
    pays = bool(everybody.broadcast([faster], "grid.faster")[0])
    _logger.info(
        "A few bytes go round %d workers in %.1f ms, and over a grid of %d x %d in "
        "%.1f ms: %s",
        everybody.size,
        1e3 * ring,
        *sides(everybody.size),
        1e3 * found,
        "the grid is taken for small tensors" if pays else "no grid is taken",
    )
    return grid if pays else everybody


@functools.cache
def _tell_none(workers: int) -> None:
    """Warn, once, that workers make no grid."""
    _logger.warning(
        "%s=on changes nothing: %d workers make no grid of %d rows and columns or "
        "more, as 9, 12 or 16 do",
        VARIABLE,
        workers,
        LEAST_SIDE,
    )


def _seconds(transport: base.Transport) -> float:
    """Return how long a few bytes take to everybody, after a first time."""
    return seconds(lambda: transport.all_gather(tf.zeros([4]), "grid.trial"))


def seconds(act: Callable[[], tf.Tensor]) -> float:
    """Return how long something takes whose outcome is a tensor, after a first time."""

    def once() -> float:
        begin = time.perf_counter()
        act().numpy()
        return time.perf_counter() - begin

    once()
    return statistics.median(once() for _ in range(_TRIALS))
