"""Calibration of the model in `costs`: this network and this machine, in a second.

Axes: N workers, P arena elements, K message slots.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.compression import arena, dgc, message, selection
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import inplace
from tf_dgc.prediction.costs import Measured, Network
from tf_dgc.transports import sums
from tf_dgc.transports.base import Transport
from tf_dgc.transports.grid import Grid

_TRIALS = 3
# An all-reduce grows by this factor until it takes long enough, or is large.
_LEAST_BYTES, _MOST_BYTES, _FACTOR = 2**16, 2**24, 16
_LONG_SECONDS = 0.1
# Of larger arenas a part is measured: all costs are linear in it.
_MOST_ELEMENTS = 2**22
_MOST_MESSAGES = 8  # that are read at once
_MOMENTUM = 0.9


class Messages:
    """Messages of one worker, of random numbers, and an arena that they are added to.

    Attributes:
        read: takes messages, shape [N, words], and adds them; returns something to
            wait for.
    """

    def __init__(self, layout: Layout, config: DGCConfig, device: str) -> None:
        """Create the arenas.

        Args:
            layout: of an arena, not empty.
            config: with a sparsity, not 0.
            device: where they are.
        """
        slots = sum(selection.slots_per_segment(layout, config.sparsity))
        begins = [segment.offset for segment in layout.segments]
        args = slots, layout.size, config.value_dtype, begins
        self._form = message.make_format(*args)
        self._layout, self._config, self._device = layout, config, device
        with tf.device(device):
            numbers = tf.random.stateless_normal([layout.size], [1, 2])
            self._total = inplace.own_variable(tf.zeros([layout.size]), "calibration")
        self._numbers = numbers
        self._write = tf.function(self._written, autograph=False)
        self.read = tf.function(self._read, autograph=False)

    def write(self, number: int) -> tf.Tensor:
        """Return the message of a number, shape [words], int32."""
        return self._write(tf.roll(self._numbers, number, 0))

    def _written(self, residual: tf.Tensor) -> tf.Tensor:
        return dgc.send(
            residual,
            inplace.call(self._device, selection.peaks, residual),
            form=self._form,
            layout=self._layout,
            sparsities=[self._config.sparsity],
            config=self._config,
            step=tf.zeros([], tf.int64),
        )

    def _read(self, messages: tf.Tensor) -> tf.Tensor:
        contents = sums.receive(self._form, messages)
        args = self._total, contents.positions, contents.values
        inplace.update(self._device, _with_messages, *args)
        return self._total[0]


def _median(act: Callable[[], Any], trials: int = _TRIALS) -> float:
    """Return the seconds of an action, after a first time, where it is short."""
    act()
    found: list[float] = []
    while len(found) < trials and sum(found) < _LONG_SECONDS:
        begin = time.perf_counter()
        act()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def network(transport: Transport) -> Network:
    """Measure what collectives deliver while all workers send; all call this.

    Args:
        transport: of two workers or more.

    Returns:
        The network, by this worker's clock.
    """
    ring = transport.everybody if isinstance(transport, Grid) else transport
    workers, name = transport.size, "calibration"

    def gather() -> None:
        ring.all_gather(tf.zeros([4]), f"{name}.gather").numpy()

    gather()
    waits = []
    for _ in range(_TRIALS):  # as often on all workers, which wait for each other
        begin = time.perf_counter()
        gather()
        waits.append(time.perf_counter() - begin)
    latency = statistics.median(waits) / (workers - 1)
    size = _LEAST_BYTES
    while True:
        with tf.device(ring.device):
            zeros = tf.zeros([size // 4])
        found = []
        for _ in range(_TRIALS):
            begin = time.perf_counter()
            ring.all_reduce([zeros], f"{name}.reduce")[0][0].numpy()
            found.append(time.perf_counter() - begin)
        seconds = min(found)
        enough = tf.constant(seconds > _LONG_SECONDS or size >= _MOST_BYTES)
        if ring.broadcast([enough], f"{name}.enough")[0]:
            break
        size *= _FACTOR
    wire = max(seconds - 2 * (workers - 1) * latency, seconds / 2)
    bandwidth = 8 * sums.in_ring(size, workers) / wire
    return Network(bandwidth, latency, ring is not transport)


def machine(layout: Layout, config: DGCConfig, device: str, workers: int) -> Measured:
    """Measure what compression takes here, beside the forward and backward pass.

    Args:
        layout: of the arena.
        config: with a sparsity.
        device: where this worker computes.
        workers: N, whose messages are read.

    Returns:
        `dense` is an update of momentum alone, `round` 0.
    """
    elements = min(layout.elements, _MOST_ELEMENTS)
    part = arena.build([("calibration", (elements,))])
    factor = layout.elements / elements
    with tf.device(device):
        gradient = tf.random.stateless_normal([part.size], [3, 4])
        state = [inplace.own_variable(tf.zeros([part.size]), f"u{i}") for i in range(2)]

    def update() -> None:
        inplace.update(device, _accumulated, state, gradient)
        state[0][0].numpy()

    bare = factor * _median(update)
    if not config.sparsity:
        return Measured(bare, bare, bare, 0.0, 0.0)
    messages = Messages(part, config, device)
    count = min(workers, _MOST_MESSAGES)
    gathered = tf.stack([messages.write(i * elements // count) for i in range(count)])
    write = factor * _median(lambda: messages.write(0).numpy())
    read = factor * _median(lambda: messages.read(gathered).numpy()) / count
    return Measured(bare, bare + write + read, bare, read, 0.0)


def _with_messages(
    arena: tf.Tensor, positions: tf.Tensor, values: tf.Tensor
) -> tf.Tensor:
    """Return an arena, shape [P], with messages added, in place under XLA."""
    for where, own in zip(tf.unstack(positions), tf.unstack(values), strict=True):
        arena = tf.tensor_scatter_nd_add(arena, where[:, tf.newaxis], own)
    return arena


def _accumulated(
    state: Sequence[tf.Tensor], gradient: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return momentum and residual after a gradient."""
    momentum, residual = state
    momentum = _MOMENTUM * momentum + gradient
    return momentum, residual + momentum
