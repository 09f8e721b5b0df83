"""Rows of earlier batches, one of which stands where a worker has no row of a batch.

A step without rows runs as any other, with a row that counts nothing. Zeros would do
for the arithmetic, but not for all that a script makes of rows: an empty text is no
number and no picture, and a matrix of zeros has no inverse.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.exchanges.inplace import own_variable

_UNKEPT = (tf.resource, tf.variant)


class EarlierRows:
    """First row that a worker has seen of each kind of batch; zeros before that."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: dict[Any, tuple[list[tf.Variable], tf.Variable]] = {}

    def of(self, parts: Sequence[Any]) -> list[tf.Variable] | None:
        """Return a row of each part, and keep the first of a batch in which all have.

        Args:
            parts: of a batch, with its rows along the first axis, maybe none.

        Returns:
            Variables of shape [1, ...], each of the type of its part; None where the
            rows of another batch may have another form.
        """
        if not parts or not all(isinstance(part, tf.Tensor) for part in parts):
            return None
        forms = [(part.dtype, part.shape[1:]) for part in parts]
        known = all(form.is_fully_defined() for _, form in forms)
        if not known or any(dtype in _UNKEPT for dtype, _ in forms):
            return None
        key = tuple((dtype, tuple(form)) for dtype, form in forms)
        if key not in self._kept:
            with tf.init_scope(), tf.device("CPU:0"):
                rows = [tf.zeros([1, *form], dtype) for dtype, form in forms]
                kept = [own_variable(row, "tf_dgc_row") for row in rows]
                self._kept[key] = kept, own_variable(tf.constant(False), "tf_dgc_kept")
        kept, is_there = self._kept[key]

        def keep() -> None:
            for variable, part in zip(kept, parts, strict=True):
                variable.assign(part[:1])
            is_there.assign(True)

        # What workers share may have no row where the batch has some.
        complete = tf.reduce_all([tf.shape(part)[0] > 0 for part in parts])
        tf.cond(complete & ~is_there.read_value(), keep, lambda: None)
        return kept
