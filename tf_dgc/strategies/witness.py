"""A witness of each batch: numbers that all workers compute of its first rows.

It comes with the batch, and travels with what workers tell each other in a step, where
it is compared; see `exchanges.parts`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.slicing import is_nothing

COUNT = 4  # numbers, each of one component of the elements
_MOST = 2048  # elements of a part that count
_FACTOR = -7046029254386353131  # odd: 2**64 divided by the golden ratio
# Paths without the folders that each machine may have its own of.
_END_OF_PATH = r"^.*/([^/]*/[^/]*)$"
_NAME_OF_FILE = r"^.*/([^/]*)$"


class Witness:
    """The witness of the batch that this worker has read last.

    Attributes:
        numbers: shape [COUNT], float32, on the host; 0 where there are fewer.
        names: shape [COUNT], string: the components that they are of.
        marks: lets iterators keep the witness of what they read.
    """

    def __init__(self) -> None:
        """Create the variables, outside of any graph."""
        own = tf.VariableSynchronization.NONE  # each worker's
        with tf.init_scope(), tf.device("CPU:0"):
            self.numbers, self.names = (
                tf.Variable(value, trainable=False, synchronization=own)
                for value in (tf.zeros([COUNT]), tf.constant([""] * COUNT))
            )
        self.marks = _host.iterators.Marks(self._keep)

    def begin(self, names: Sequence[str]) -> None:
        """Begin with a dataset: nothing is read of it yet.

        Args:
            names: of its components that have a number; none where there is no
                witness, as of a worker's own data.
        """
        self.numbers.assign(tf.zeros([COUNT]))
        self.names.assign([*names, *[""] * (COUNT - len(names))])

    def _keep(self, numbers: tf.Tensor) -> None:
        with tf.device("CPU:0"):
            self.numbers.assign(numbers, read_value=False)


def of_rows(parts: Sequence[Any], targets: int = 0) -> tf.Tensor:
    """Return numbers of the first rows of some parts of a batch.

    Other rows have other numbers, but for few; the same rows have the same, to some
    units in the last place where they were computed on another processor.

    Args:
        parts: at most COUNT tensors of any kind with rows along the first axis.
        targets: how many of them, the first, targets are made of. Of paths these have
            the last folder, which may be a class, and others the name of the file.

    Returns:
        shape [COUNT], float32, finite, none of them negative.
    """
    found = [
        _number(part, _END_OF_PATH if i < targets else _NAME_OF_FILE)
        for i, part in enumerate(parts)
    ]
    return tf.stack([*found, *[tf.zeros([])] * (COUNT - len(found))])


def of_records(records: tf.Tensor) -> tf.Tensor:
    """Return numbers of serialized protocol buffers, for `of_rows`.

    The entries of a map, as the features of `tf.train.Example`, stand in another order
    in each process that has written them.

    Args:
        records: shape [n], string, one of them at least.

    Returns:
        shape [n + 1], int64: the lengths, and a sum over the bytes of the first one.
    """
    first = tf.cast(tf.io.decode_raw(records[:1], tf.uint8), tf.int64) + 1
    total = tf.reduce_sum(first**4)
    lengths = tf.cast(tf.strings.length(records), tf.int64)
    return tf.concat([lengths, [total]], axis=0)


def names_of(spec: Any) -> list[str]:
    """Return a name for each part of a structure, in the order of `tf.nest.flatten`."""
    return list(_paths(spec, "element"))


def _paths(spec: Any, path: str) -> Iterator[str]:
    if isinstance(spec, dict):
        for key in sorted(spec):
            yield from _paths(spec[key], f"{path}[{key!r}]")
    elif isinstance(spec, tuple | list):
        keys = getattr(spec, "_fields", range(len(spec)))
        for key, part in zip(keys, spec, strict=True):
            yield from _paths(part, f"{path}[{key!r}]")
    else:
        yield path


def _number(part: Any, end_of_path: str) -> tf.Tensor:
    """Return a number of the first rows of a part: shape [], float32."""
    if is_nothing(part):
        return tf.zeros([])
    values = tf.reshape(_first_values(part), [-1])
    if values.dtype == tf.string:
        # Hashes of texts, of which folders do not count.
        ends = tf.strings.regex_replace(values, end_of_path, r"\1")
        values = tf.strings.to_hash_bucket_fast(ends, 2**62)
    if not values.dtype.is_floating:
        return _of_integers(tf.cast(values, tf.int64))
    return _of_numbers(tf.cast(values, tf.float32))


def _first_values(part: Any) -> tf.Tensor:
    """Return some elements of the first rows, or of one where it has many."""
    if isinstance(part, tf.RaggedTensor):
        return part.flat_values[:_MOST]
    if isinstance(part, tf.SparseTensor):
        return part.values[:_MOST]
    if part.dtype.is_complex:
        part = tf.math.real(part)
    size = part.shape[1:].num_elements()
    if size is None or size <= _MOST:
        return tf.reshape(part, [-1])[:_MOST]
    return tf.reshape(part[:1], [-1])[:: -(-size // _MOST)]


def _of_integers(values: tf.Tensor) -> tf.Tensor:
    """Return a hash in [1, 2) of integers, shape [n]."""
    places = 2 * tf.range(tf.size(values, tf.int64), dtype=tf.int64) + 1
    mixed = (values * _FACTOR + places) * (values ^ _FACTOR)
    total = tf.reduce_sum(mixed * places) * _FACTOR
    bits = tf.bitwise.right_shift(total, 40)  # in [-2**23, 2**23)
    return 1.5 + tf.cast(bits, tf.float32) / 2.0**24


def _of_numbers(values: tf.Tensor) -> tf.Tensor:
    """Return a sum of positive terms, which is as exact as they are."""
    count = values.shape[0]
    if count is None:
        weights = 1.0 + tf.range(tf.cast(tf.size(values), tf.float32)) * 0.618034 % 1.0
    else:
        weights = tf.constant(1 + np.arange(count) * 0.618034 % 1, tf.float32)
    total = tf.reduce_sum(tf.maximum(2 * values, -values) * weights)
    return tf.where(tf.math.is_finite(total), total, 0.0)
