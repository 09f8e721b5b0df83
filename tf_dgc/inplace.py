"""What changes the large variables: functions that XLA compiles, to work in place.

Axes: P arena elements, N workers, T tensors, K message slots. Positions that are not
below P stand for unused slots: XLA leaves out what lies outside of a tensor.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import dgc, sparsify
from tf_dgc import layout as layout_lib
from tf_dgc.layout import Layout


class Variable:
    """A variable within a compiled function, which outlives it."""

    def __init__(self, handle: tf.Tensor, shape: tf.TensorShape, dtype: Any) -> None:
        self._handle, self._shape, self._dtype = handle, shape, dtype

    def read(self) -> tf.Tensor:
        """Return the value."""
        value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)
        return tf.ensure_shape(value, self._shape)

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
        static: what is not a tensor.
    """
    flat = tf.nest.flatten(args)
    forms = [
        None if v is None else (isinstance(v, tf.Variable), v.shape, v.dtype)
        for v in flat
    ]
    key = (device, function, str(forms), str(static))
    if key not in _compiled:
        structure = tf.nest.map_structure(lambda _: None, args)

        def call(given: list[Any]) -> Any:
            own = [
                Variable(part, *form[1:]) if form and form[0] else part
                for part, form in zip(given, forms, strict=True)
            ]
            return function(*tf.nest.pack_sequence_as(structure, own), **static)

        _compiled[key] = tf.function(call, autograph=False, jit_compile=True)
    with tf.device(device):
        return _compiled[key](
            [v.handle if isinstance(v, tf.Variable) else v for v in flat]
        )


_compiled: dict[Any, Callable[..., Any]] = {}


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
    layout: Layout,
    rooms: list[int],
) -> None:
    """Subtract what a worker sent, shape [K], from T tensors.

    Args:
        weights: T tensors.
        positions: ascending.
        values: what was sent.
        begins: where to look for each tensor among the positions, shape [T].
        layout: T segments.
        rooms: how many of the positions to look at, for each tensor.
    """
    end = [[0, max(rooms)]]
    positions = tf.pad(positions, end, constant_values=layout.size)
    values = tf.pad(values, end)
    for weight, segment, begin, room in zip(
        weights, layout.segments, tf.unstack(begins), rooms, strict=True
    ):
        window = begin + tf.range(room, dtype=tf.int64)
        where = tf.gather(positions, window)[:, tf.newaxis] - segment.offset
        what = tf.gather(values, window)
        flat = tf.reshape(weight.read(), [segment.size])
        flat = tf.tensor_scatter_nd_sub(flat, where, what)
        weight.assign(tf.reshape(flat, segment.shape))


def subtract_densely(
    weights: list[Variable], summed: tf.Tensor, layout: Layout
) -> None:
    """Subtract an arena, shape [P], from the T tensors that it holds."""
    tensors = layout_lib.unflatten(layout, summed)
    for weight, tensor in zip(weights, tensors, strict=True):
        weight.assign(weight.read() - tensor)


def mark(sent: Variable, where: tf.Tensor) -> None:
    """Set elements of a bool arena, at places of shape [K, 1]."""
    marks = tf.ones(where.shape[:1], tf.bool)
    sent.assign(tf.tensor_scatter_nd_update(sent.read(), where, marks))
