"""Gathers of tensors whose number of rows differs between workers.

Axis: N workers.
"""

import abc
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_dgc.values import added_up, require

_MAX_ROWS = 2**31


class Gathering(abc.ABC):
    """Gathers of any rows, made of gathers of tensors of one shape.

    Attributes:
        size: N.
    """

    size: int

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor from each worker; see `Transport`."""

    def lengths(self, tensors: Sequence[tf.Tensor], name: str) -> tf.Tensor:
        """Gather the first dimensions of tensors.

        Args:
            tensors: T of them, of shape [C, ...], C of any worker's own.
            name: as for `all_reduce`.

        Returns:
            shape [N, T], int64.
        """
        own = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors])
        lengths = self.all_gather(own, name)
        sound = tf.reduce_all((lengths >= 0) & (lengths < _MAX_ROWS))
        text = "A worker's number of rows is damaged. Numbers of rows, by rank:"
        sound = require(sound, lambda: [text, lengths], summarize=-1)
        with tf.control_dependencies([sound]):
            return tf.identity(lengths)

    def all_gather_ragged(
        self, tensor: tf.Tensor, name: str, lengths: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Join tensors whose first dimension may differ between workers.

        Args:
            tensor: shape [C, ...], any integer or float type, bool or string.
            name: as for `all_reduce`.
            lengths: C of all workers, where that is known: shape [N], int64.

        Returns:
            shape [sum of all C, ...], in the order of rank.
        """
        if self.size == 1:
            return tf.identity(tensor)
        if tensor.dtype == tf.string:
            return self._gather_strings(tensor, name)
        if lengths is None:
            lengths = self.lengths([tensor], f"{name}.lengths")[:, 0]
        length = tf.shape(tensor, tf.int64)[0]
        longest = tf.maximum(tf.reduce_max(lengths), 1)
        missing = [[0, longest - length]] + [[0, 0]] * (tensor.shape.rank - 1)
        bits, back = unmoved(tensor)
        carried, restore = carrier(bits)
        gathered = self.all_gather(tf.pad(carried, missing), name)
        present = tf.range(longest) < lengths[:, tf.newaxis]
        return back(restore(tf.boolean_mask(gathered, present)))

    def _gather_strings(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        split = tf.strings.bytes_split(tf.reshape(tensor, [-1]))
        octets = tf.reshape(tf.io.decode_raw(split.values, tf.uint8), [-1])
        own = tf.reshape(split.row_lengths(), tf.shape(tensor))
        lengths = self.all_gather_ragged(own, f"{name}.lengths_of_strings")
        octets = self.all_gather_ragged(octets, f"{name}.octets")
        count = tf.size(lengths)
        place = tf.repeat(tf.range(count), tf.reshape(lengths, [-1]))
        letters = tf.gather([bytes([i]) for i in range(256)], tf.cast(octets, tf.int32))
        joined = tf.strings.unsorted_segment_join(letters, place, count)
        joined = tf.reshape(joined, tf.shape(lengths))
        return tf.ensure_shape(joined, [None, *tensor.shape[1:]])

    def sum_slices(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        """Sum IndexedSlices over the workers.

        Args:
            slices: values [C, ...] and indices [C]; C may differ between workers.
            name: as for `all_reduce`.

        Returns:
            IndexedSlices without repeated indices, the same on every worker.
        """
        return added_up(self.gather_slices(slices, name))

    def gather_slices(
        self, slices: tf.IndexedSlices, name: str, lengths: tf.Tensor | None = None
    ) -> tf.IndexedSlices:
        """Return the IndexedSlices of all workers, by rank; see `sum_slices`.

        Indices repeat as they do in one process, which computes all rows.

        Args:
            slices: as in `sum_slices`.
            name: as for `all_reduce`.
            lengths: C of all workers, where that is known: shape [N], int64.
        """
        if lengths is None and self.size > 1:
            lengths = self.lengths([slices.values], f"{name}.lengths")[:, 0]
        values = self.all_gather_ragged(slices.values, f"{name}.values", lengths)
        indices = self.all_gather_ragged(slices.indices, f"{name}.indices", lengths)
        if self.size > 1 and slices.dense_shape is not None:
            with tf.device("CPU:0"):
                rows = tf.cast(slices.dense_shape[0], indices.dtype)
                sound = tf.reduce_all((indices >= 0) & (indices < rows))
            text = "IndexedSlices must be of rows that their variable has. Rows:"
            with tf.control_dependencies([require(sound, lambda: [text, rows])]):
                indices = tf.identity(indices)
        return tf.IndexedSlices(values, indices, slices.dense_shape)


def carrier(
    tensor: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Return the tensor in a type that every transport takes, and the way back."""
    dtype = tensor.dtype
    if dtype in (tf.float16, tf.float32, tf.float64, tf.int64):
        return tensor, tf.identity
    carrier = tf.float32 if dtype.is_floating else tf.int64
    return tf.cast(tensor, carrier), lambda carried: tf.cast(carried, dtype)


def unmoved(
    tensor: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Return a tensor that can be reshaped where it is, and the way back.

    TensorFlow takes int32 for shapes, and reshapes and slices it in the host's memory,
    where a worker computes on a GPU, too. The same bits as float32 stay there.
    """
    if tensor.dtype != tf.int32:
        return tensor, lambda same: same
    return tf.bitcast(tensor, tf.float32), lambda bits: tf.bitcast(bits, tf.int32)
