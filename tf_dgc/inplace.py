"""What changes the large variables: functions that XLA compiles, to work in place.

Axes: P arena elements, N workers, T tensors, K message slots. Positions that are not
below P stand for unused slots: XLA leaves out what lies outside of a tensor.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import dgc, sparsify


class Variable:
    """A variable within a compiled function, which outlives it."""

    def __init__(self, handle: tf.Tensor, shape: tf.TensorShape, dtype: Any) -> None:
        self._handle, self.shape, self._dtype = handle, shape, dtype

    def read(self) -> tf.Tensor:
        """Return the value."""
        value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)
        return tf.ensure_shape(value, self.shape)

    def assign(self, value: tf.Tensor) -> None:
        """Set the value."""
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)


def run(device: str, function: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Run a function that XLA compiles: what it changes, it changes in place.

    It is compiled once for all arguments of the same shapes, and for these settings.

    Args:
        device: where the variables are.
        function: one of this module; takes a Variable in place of a tf.Variable.
        args: tensors, variables, None, and lists of them.
        static: what is not a tensor; settings that look alike are alike.
    """
    flat = tf.nest.flatten(args)
    forms = [_Form.of(part) for part in flat]
    structure = tf.nest.map_structure(lambda _: None, args)
    key = (device, function, str(forms), str(structure), str(static))
    if key not in _compiled:
        while len(_compiled) >= _MOST_COMPILED:
            del _compiled[next(iter(_compiled))]

        def call(*given: tf.Tensor) -> Any:
            parts = iter(given)
            own = [form and form.argument(next(parts)) for form in forms]
            return function(*tf.nest.pack_sequence_as(structure, own), **static)

        # A concrete one: it is compiled even where functions are to run eagerly.
        with tf.init_scope(), tf.device(device):
            compiled = tf.function(call, autograph=False, jit_compile=True)
            specs = [form.spec for form in forms if form]
            _compiled[key] = compiled.get_concrete_function(*specs)
    given = [form.given(part) for form, part in zip(forms, flat, strict=True) if form]
    with tf.device(device):
        return _compiled[key](*given)


_NOWHERE = 2**31 - 1  # no arena has as many elements
_MOST_COMPILED = 256
_compiled: dict[Any, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True)
class _Form:
    """What a compiled function knows of an argument."""

    is_variable: bool
    shape: tf.TensorShape
    dtype: tf.DType

    @classmethod
    def of(cls, part: Any) -> "_Form | None":
        if part is None:
            return None
        return cls(isinstance(part, tf.Variable), part.shape, part.dtype)

    @property
    def spec(self) -> tf.TensorSpec:
        if self.is_variable:
            return tf.TensorSpec([], tf.resource)
        return tf.TensorSpec(self.shape, self.dtype)

    def given(self, part: Any) -> tf.Tensor:
        return part.handle if self.is_variable else part

    def argument(self, tensor: tf.Tensor) -> Any:
        return Variable(tensor, self.shape, self.dtype) if self.is_variable else tensor


def accumulate(
    velocity: Variable | None,
    residual: Variable,
    gradient: tf.Tensor,
    scale: tf.Tensor,
    rate: tf.Tensor | None,
    form: tuple[float, bool] | None,
) -> tf.Tensor:
    """Add a gradient, as `dgc.accumulate` does; return `sparsify.peaks` of v."""
    momentum = None if form is None else dgc.Momentum(*form, rate)
    gradient = scale[..., tf.newaxis] * gradient
    before = dgc.State(velocity and velocity.read(), residual.read())
    u, v = dgc.accumulate(before, gradient, momentum)
    if velocity is not None:
        velocity.assign(u)
    residual.assign(v)
    return sparsify.peaks(v)


def keep(
    velocity: Variable | None,
    residual: Variable,
    where: tf.Tensor,
    sent: tf.Tensor,
) -> None:
    """Take what was sent out of v, at places of shape [K, axes], and clear u there."""
    residual.assign(tf.tensor_scatter_nd_sub(residual.read(), where, sent))
    if velocity is not None:
        none = tf.zeros_like(sent)
        velocity.assign(tf.tensor_scatter_nd_update(velocity.read(), where, none))


def sum_up(total: Variable, positions: tf.Tensor, values: tf.Tensor) -> None:
    """Put the sum of what N workers sent, shape [N, K], into an arena."""
    summed = tf.zeros_like(total.read())
    # In the order of rank, so that the sum has the same bits everywhere.
    for rank in range(positions.shape[0]):
        where = positions[rank, :, tf.newaxis]
        summed = tf.tensor_scatter_nd_add(summed, where, values[rank])
    total.assign(summed)


def subtract(
    weights: list[Variable],
    positions: tf.Tensor,
    values: tf.Tensor,
    begins: tf.Tensor,
    offsets: Sequence[int],
    rooms: Sequence[int],
) -> None:
    """Subtract what a worker sent, shape [K], from T tensors.

    Args:
        weights: T tensors.
        positions: ascending.
        values: what was sent.
        begins: where to look for each tensor among the positions, shape [T].
        offsets: where each tensor begins in the arena.
        rooms: how many of the positions to look at, for each tensor.
    """
    end = [[0, max(rooms)]]
    positions = tf.pad(positions, end, constant_values=_NOWHERE)
    values = tf.pad(values, end)
    for weight, begin, offset, room in zip(
        weights, tf.unstack(begins), offsets, rooms, strict=True
    ):
        window = begin + tf.range(room, dtype=tf.int64)
        where = tf.gather(positions, window)[:, tf.newaxis] - offset
        flat = tf.reshape(weight.read(), [-1])
        flat = tf.tensor_scatter_nd_sub(flat, where, tf.gather(values, window))
        weight.assign(tf.reshape(flat, weight.shape))


def subtract_densely(
    weights: list[Variable], summed: tf.Tensor, offsets: Sequence[int]
) -> None:
    """Subtract from T tensors what begins at their offsets in an arena, shape [P]."""
    for weight, offset in zip(weights, offsets, strict=True):
        end = offset + weight.shape.num_elements()
        weight.assign(weight.read() - tf.reshape(summed[offset:end], weight.shape))


def mark(sent: Variable, where: tf.Tensor) -> None:
    """Set elements of a bool arena, at places of shape [K, 1]."""
    marks = tf.ones(where.shape[:1], tf.bool)
    sent.assign(tf.tensor_scatter_nd_update(sent.read(), where, marks))
