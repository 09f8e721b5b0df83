"""Notes of a step while it runs: the rows of its batch, and its gradients."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.verify.records import RecordedSample, RecordedStep, sample_of

_SHOWN = 4  # numbers of each component


class StepNotes:
    """Notes of one step after the other; operations in the step make them."""

    def __init__(self) -> None:
        """Begin with a step of which nothing is known."""
        self._rows: dict[str, list[str]] = {}
        self._shown: dict[str, list[float]] = {}
        self._gradients: dict[str, RecordedSample] = {}

    def note_rows(self, data: Any) -> None:
        """Note the rows of a batch, where the step reads them."""
        paths = _named(data)
        components = [c for c in paths if c[1] is not None]

        def note(*arrays: np.ndarray) -> None:
            rest = list(arrays)
            for name, tensor in components:
                count = len(tf.nest.flatten(tensor, expand_composites=True))
                own, rest = rest[:count], rest[count:]
                self._rows[name] = [_digest(row) for row in _rows_of(tensor, own)]
                self._shown[name] = _first_numbers(own[0])

        flat = tf.nest.flatten([t for _, t in components], expand_composites=True)
        tf.numpy_function(note, flat, [])

    def note_gradients(self, names: Sequence[str], gradients: Sequence[Any]) -> None:
        """Note the gradients of variables of these names."""

        def note(*arrays: np.ndarray) -> None:
            self._gradients |= dict(zip(names, map(sample_of, arrays), strict=True))

        tf.numpy_function(note, [tf.convert_to_tensor(g) for g in gradients], [])

    def ended(
        self, weights: Mapping[str, RecordedSample], logs: Mapping[str, float]
    ) -> RecordedStep:
        """Return the record of the step that has ended, and begin the next."""
        notes = self._rows, self._shown, self._gradients
        self._rows, self._shown, self._gradients = {}, {}, {}
        return RecordedStep(*notes, weights, logs)


def _named(data: Any) -> list[tuple[str, Any]]:
    """Return the components of a batch, each with a name."""
    parts = data if isinstance(data, tuple) else (data,)
    whole = len(parts) == 1
    named = []
    for part, name in zip(parts, ("x", "y", "sample_weight"), strict=False):
        for path, tensor in keras.tree.flatten_with_path(part):
            inner = "".join(f"[{each!r}]" for each in path)
            named.append((("x" if whole else name) + inner, tensor))
    return named


def _rows_of(tensor: Any, arrays: Sequence[np.ndarray]) -> list[bytes]:
    """Return the content of each row of a component; of a scalar, itself.

    Args:
        tensor: dense, ragged or sparse.
        arrays: its parts, as `tf.nest.flatten` has them.
    """
    if isinstance(tensor, tf.RaggedTensor):
        values, *splits = arrays
        ragged = tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)
        return [repr(row).encode() for row in ragged.to_list()]
    if isinstance(tensor, tf.SparseTensor):
        indices, values, shape = arrays
        rows = range(int(shape[0]))
        return [
            indices[indices[:, 0] == i][:, 1:].tobytes()
            + values[indices[:, 0] == i].tobytes()
            for i in rows
        ]
    (array,) = arrays
    if array.ndim == 0:
        return [_content(array)]
    return [_content(row) for row in array]


def _content(array: Any) -> bytes:
    array = np.asarray(array)
    return repr(array.tolist()).encode() if array.dtype == object else array.tobytes()


def _digest(row: bytes) -> str:
    return hashlib.blake2b(row, digest_size=8).hexdigest()


def _first_numbers(array: np.ndarray) -> list[float]:
    numeric = np.issubdtype(array.dtype, np.number)
    return np.ravel(array)[:_SHOWN].astype(float).tolist() if numeric else []
