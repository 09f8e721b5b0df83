"""Number of workers as scripts get it: an int that tensors remember.

A loss that a script divides by it is found again when the loss is read, wherever the
number was asked for; see `readings.py`.
"""

from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from tf_dgc import _host

_NAME = "tf_dgc_replicas"


class ReplicaCount(int):
    """Number of workers, N."""

    dtype = "int32"  # Keras asks numbers that are not exactly int

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return a tensor that is known for N."""
        return _marked(int(self), tf.int32 if dtype is None else dtype, 1)

    def __rtruediv__(self, numerator: Any) -> Any:
        """Return numerator / N, which is remembered, too."""
        if tf.is_tensor(numerator):  # which TensorFlow would divide by an int32
            return numerator / self.__tf_tensor__(numerator.dtype)
        if isinstance(numerator, int | float):
            return _Part(float(numerator) / int(self))
        return numerator / int(self)

    def __reduce__(self) -> Any:
        """Leave a plain int in files and copies."""
        return int, (int(self),)


class _Part(float):
    """A number divided by N."""

    dtype = "float32"

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return _marked(float(self), tf.float32 if dtype is None else dtype, -1)

    def __rtruediv__(self, numerator: Any) -> Any:
        if tf.is_tensor(numerator):
            return numerator / self.__tf_tensor__(numerator.dtype)
        return numerator / float(self)

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _marked(value: Any, dtype: Any, power: int) -> tf.Tensor:
    tensor = tf.constant(value, dtype, name=f"{_NAME}{power + 1}")
    if hasattr(tensor, "numpy"):
        # Equal constants may be one tensor, eagerly.
        tensor = tf.convert_to_tensor(tensor.numpy())
        _host.operations.mark(tensor, power)
    return tensor


def power_of(tensor: Any) -> int:
    """Return the power of N that a tensor is known to have been multiplied by."""
    if hasattr(tensor, "numpy"):
        return _host.operations.mark_of(tensor)
    name = tensor.op.name.rpartition("/")[2] if tensor.op.type == "Const" else ""
    return int(name[len(_NAME)]) - 1 if name.startswith(_NAME) else 0


def power_between(
    tensor: tf.Tensor, known: Collection[int], guess: Callable[[tf.Tensor], int]
) -> int:
    """Return the power of N by which a step has multiplied a tensor.

    Args:
        tensor: that may have been made of a known one by multiplying and dividing.
        known: the `id` of each tensor that is known.
        guess: returns the power that a number, of which it is not known, may stand for.
            What may be a division counts where there is no other.

    Returns:
        0 where it was not made like that.
    """
    power = guessed = 0
    while id(tensor) not in known:
        operation = _host.operations.of(tensor)
        if operation is None or operation.kind not in _SCALES:
            return 0
        tensor, *others = operation.inputs
        if others and operation.kind == "Mul" and tensor.shape.rank == 0:
            tensor, others = others[0], [tensor]
        for other in others:
            number = _without_casts(other)
            sign = -1 if operation.kind in _DIVIDE else 1
            power += sign * power_of(number)
            guessed += sign * guess(number)
    return power or min(guessed, 0)


_DIVIDE = ("RealDiv", "Div", "DivNoNan")
_SCALES = ("Identity", "Cast", "Mul", *_DIVIDE)


def _without_casts(tensor: tf.Tensor) -> tf.Tensor:
    """Return what a number was before its type was changed."""
    while (operation := _host.operations.of(tensor)) is not None:
        if operation.kind not in ("Identity", "Cast"):
            break
        tensor = operation.inputs[0]
    return tensor
