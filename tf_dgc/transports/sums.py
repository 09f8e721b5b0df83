"""Sums over the workers: dense tensors in one reduction, sparse messages by gathering.

Axes: N workers, P arena elements, K message slots.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import message
from tf_dgc.transports.base import Transport


class Summed(NamedTuple):
    """Sums over the workers, and what they cost this one."""

    gradients: list[Any]
    votes: list[tf.Tensor]
    sent: tf.Tensor  # bytes and elements of gradients, shape [2], int64


def dense(
    transport: Transport,
    gradients: Sequence[Any],
    name: str,
    votes: Sequence[tf.Tensor] = (),
) -> Summed:
    """Sum tensors in one fused reduction, IndexedSlices by gathering them.

    Their indices repeat, as in one process: Keras clips before it adds rows up.

    Args:
        transport: to the other workers.
        gradients: of this worker, of static shapes.
        name: prefix of the names of the collectives.
        votes: tensors that are summed beside them; no elements of a gradient.
    """
    tensors = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor)]
    own = [*(gradients[i] for i in tensors), *votes]
    reduced = transport.all_reduce(own, f"{name}.dense")
    # Where one process is several workers, what it hands over has an axis more.
    shapes = [
        after.shape if after.shape.is_fully_defined() else before.shape
        for before, after in zip(own, reduced, strict=True)
    ]
    counts = [shape.num_elements() for shape in shapes]
    size: Any = sum(n * t.dtype.size for n, t in zip(counts, own, strict=True))
    elements: Any = sum(counts[: len(tensors)])
    summed = list(gradients)
    for i, tensor in zip(tensors, reduced, strict=False):
        summed[i] = tensor
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            summed[i] = transport.gather_slices(gradient, f"{name}.slices{i}")
            elements += tf.size(gradient.values, tf.int64)
            for part in (gradient.values, gradient.indices):
                size += tf.size(part, tf.int64) * part.dtype.size
    with tf.device("CPU:0"):
        sent = tf.cast([size, elements], tf.int64)
    return Summed(summed, reduced[len(tensors) :], sent)


class Sparse(NamedTuple):
    """Elements of an arena; the positions of each row ascend."""

    positions: tf.Tensor  # shape [..., K], int64; P in unused slots
    values: tf.Tensor  # shape [..., K], float32; 0 in unused slots


class SparseSum(abc.ABC):
    """A way to sum what all workers select: the only thing that knows how it travels.

    What is kept back depends on what was used of a worker's message, not on what it
    sent.
    """

    @abc.abstractmethod
    def __call__(self, own: tf.Tensor, name: str) -> tuple[Sparse, Sparse, tf.Tensor]:
        """Exchange messages.

        Args:
            own: this worker's, shape [words], int32; of a process that is all
                workers [N, words].
            name: of the collectives.

        Returns:
            What is to be added up, [N, K]; what was used of each worker that this
            process is, [W, K]; and how many elements of the first of these, shape [],
            int64.

        Raises:
            tf.errors.InvalidArgumentError: a message is damaged, or not of this step.
        """

    @staticmethod
    @abc.abstractmethod
    def cost(form: message.Format, workers: int) -> int:
        """Return the bytes that a worker receives in one sum."""


class GatherSum(SparseSum):
    """Everybody's message to everybody."""

    def __init__(
        self, transport: Transport, form: message.Format, ranks: Sequence[int]
    ) -> None:
        """Choose the wire.

        Args:
            transport: to the other workers.
            form: of the messages.
            ranks: of the workers that this process is.
        """
        self._transport, self._form, self._ranks = transport, form, ranks

    def __call__(self, own: tf.Tensor, name: str) -> tuple[Sparse, Sparse, tf.Tensor]:
        """Gather the messages; see the base class."""
        messages = self._transport.all_gather(own, name)
        contents = receive(self._form, messages)
        total = Sparse(contents.positions, contents.values)
        first, count = self._ranks[0], len(self._ranks)
        used = Sparse(*[part[first : first + count] for part in total])
        return total, used, tf.cast(contents.header.count[first], tf.int64)

    @staticmethod
    def cost(form: message.Format, workers: int) -> int:
        """Return the bytes of N messages."""
        return workers * form.bytes


def ring_cost(elements: int) -> int:
    """Return the bytes that a worker receives in a ring all-reduce of float32."""
    return 8 * elements


def receive(form: message.Format, messages: tf.Tensor) -> message.Contents:
    """Read the messages of all workers, shape [N, words].

    Raises:
        tf.errors.InvalidArgumentError: one is damaged, or not of this step.
    """
    found = message.unpack(form, messages)
    found = found._replace(values=message.numbers(form, found))
    faults = message.faults(form, messages, found)
    with tf.control_dependencies([_require_sound(faults, found.header)]):
        return tf.nest.map_structure(tf.identity, found)


def _require_sound(faults: tf.Tensor, header: message.Header) -> tf.Tensor:
    """Raise InvalidArgumentError where messages are not those of one and the same step.

    Args:
        faults: as of `message.faults`, shape [N].
        header: each field of shape [N].
    """
    marks = tf.stack([header.format, header.checksum, header.step], axis=1)
    whole = tf.reduce_all(faults == 0)
    alike = tf.reduce_all(marks == marks[0])

    def damaged() -> tf.Tensor:
        rank = values.first_true(faults > 0)
        what = tf.gather(tf.constant(message.FAULTS), faults[rank])
        rank = tf.strings.as_string(rank)
        return tf.strings.join(["The message of rank ", rank, " is damaged: ", what])

    def told() -> list[Any]:
        strangers = (
            "The workers are not in the same step of the same training. Message "
            "format, checksum of the layout and step, by rank:"
        )
        return [tf.cond(whole, lambda: tf.constant(strangers), damaged), marks]

    return values.require(whole & alike, told, summarize=-1)
