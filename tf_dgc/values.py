"""Operations on tensors and IndexedSlices alike, and conditions that must hold.

Pure functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host

# Name of the operations by which something is refused; `_host.tracebacks` knows it.
REFUSAL = "tf_dgc_refuses"
# And of those that choose something which an ordinary step does not.
SELDOM = "tf_dgc_seldom"
_SMALL = 2**14  # elements


def mapped(fn: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """Apply a function to a tensor, or to the values of IndexedSlices.

    Args:
        fn: keeps the shape.
        gradient: a tensor or IndexedSlices.
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = fn(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return fn(tf.convert_to_tensor(gradient))


def scaled(gradient: Any, factor: Any) -> Any:
    """Multiply by a number, in the gradient's own type."""
    return mapped(lambda part: part * tf.cast(factor, part.dtype), gradient)


def divided(gradient: Any, divisor: Any) -> Any:
    """Divide by a number, in the gradient's own type."""
    return mapped(lambda part: part / tf.cast(divisor, part.dtype), gradient)


def zero_unless(wanted: tf.Tensor | None, gradient: Any) -> Any:
    """Return zeros where a shape-[] bool is False; None stands for True."""
    if wanted is None:
        return gradient
    return mapped(lambda part: tf.where(wanted, part, tf.zeros_like(part)), gradient)


def shaped(gradient: Any, shape: tf.TensorShape) -> Any:
    """Return a tensor of a shape that is known, where it was not; else the same."""
    if not isinstance(gradient, tf.Tensor) or gradient.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, shape)


def filled_up(vector: tf.Tensor, length: Any, value: Any = 0) -> tf.Tensor:
    """Return a vector with one value after its own.

    GPUs have no kernel that pads int64.

    Args:
        vector: shape [C].
        length: of the result: an integer, or int64 of shape [] on the host.
        value: of the rest.
    """
    value = tf.cast(value, vector.dtype)
    if isinstance(length, int):
        rest = tf.fill([length - tf.size(vector)], value)
        return tf.ensure_shape(tf.concat([vector, rest], axis=0), [length])
    with tf.device("CPU:0"):  # where shapes are
        missing = (length - tf.size(vector, tf.int64))[tf.newaxis]
    return tf.concat([vector, tf.fill(missing, value)], axis=0)


def widened(value: tf.Tensor) -> tf.Tensor:
    """Return a tensor of 16 bits in float32, any other as it is."""
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value


def added_up(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return IndexedSlices without repeated indices, with the same bits everywhere."""
    # On GPUs the order of a sum, and so its last bits, are other ones every time.
    with tf.device("CPU:0"):
        unique, position = tf.unique(slices.indices)
        found = tf.math.unsorted_segment_sum(slices.values, position, tf.size(unique))
    return tf.IndexedSlices(found, unique, slices.dense_shape)


def without_repetition(gradient: Any) -> Any:
    """Return a tensor as it is, IndexedSlices added up."""
    return added_up(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def copied(gradient: Any) -> Any:
    """Return the same value in tensors of its own."""
    return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


def forms(tensors: Sequence[Any]) -> list[str]:
    """Return what every worker must have alike: types and shapes."""
    return [f"{tf.as_dtype(t.dtype).name} {t.shape}" for t in tensors]


def first_true(mask: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Return the place of the first True, int64; 0 where there is none.

    GPUs have no kernel that finds it among integers.
    """
    return tf.argmax(tf.cast(mask, tf.float32), axis)


def require(
    ok: tf.Tensor, told: Callable[[], list[Any]], summarize: int | None = None
) -> tf.Tensor:
    """Raise InvalidArgumentError unless a shape-[] bool is True; return it.

    Args:
        ok: what must be.
        told: returns what the error says, texts and tensors. In a graph it is made on
            the host, and only where it is raised: GPUs know no texts.
        summarize: how many elements of each tensor to show; -1 is all, None three.
    """
    if tf.executing_eagerly():
        if not ok:
            parts = [_shown(part, summarize or 3) for part in told()]
            raise tf.errors.InvalidArgumentError(None, None, " ".join(parts))
        return ok

    def refuse() -> tf.Tensor:
        with tf.device("CPU:0"):
            data = [tf.convert_to_tensor(part) for part in told()]
            raised = tf.raw_ops.Assert(
                condition=ok,
                data=data,
                summarize=summarize or 3,
                name=REFUSAL,
            )
            with tf.control_dependencies([raised]):
                return tf.identity(ok)

    return tf.cond(ok, lambda: tf.constant(True), refuse, name=SELDOM)


def _shown(part: Any, summarize: int) -> str:
    """Return a text, or what a tensor holds as TensorFlow writes it."""
    if isinstance(part, str):
        return part
    part = tf.convert_to_tensor(part)
    if part.dtype == tf.string and not part.shape.rank:
        return str(part.numpy().decode())
    return str(tf.strings.format("{}", part, summarize=summarize).numpy().decode())


def unless(
    usual: tf.Tensor,
    seldom: Callable[[], Any],
    otherwise: Callable[[], Any] = lambda: None,
) -> Any:
    """Return what is seldom needed where a shape-[] bool is False.

    It is a function of its own in a graph, whose operations TensorFlow optimizes when
    it comes there first, if ever, and not before the first step.
    """

    def apart() -> Any:
        eagerly = tf.executing_eagerly()
        return seldom() if eagerly else _host.tensorflow.not_inlined(seldom)()

    return tf.cond(usual, otherwise, apart, name=SELDOM)


def one_of(branches: Sequence[Callable[[], Any]], number: tf.Tensor | None) -> Any:
    """Return what the branch of a number, shape [], int32, returns.

    Shapes that differ between them become unknown. Of one branch there is no number.
    """
    return branches[0]() if len(branches) == 1 else tf.switch_case(number, branches)


def _parts(gradients: Sequence[Any]) -> list[tf.Tensor]:
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def first_nonfinite(
    gradients: Sequence[Any],
    others: Sequence[tf.Tensor] = (),
    together: Sequence[Any] | None = None,
) -> tf.Tensor:
    """Find what is not finite.

    Args:
        gradients: tensors or IndexedSlices.
        others: tensors that count as well, after these.
        together: the gradients in fewer tensors, which take less time to look at.

    Returns:
        0, or the index + 1 of the first one that is not finite; shape [], int32.
    """
    parts = [*_parts(gradients), *others]
    if not parts:
        return tf.zeros([], tf.int32)

    def search() -> tf.Tensor:
        bad = tf.stack([tf.reduce_any(~tf.math.is_finite(part)) for part in parts])
        return tf.where(tf.reduce_any(bad), tf.cast(first_true(bad), tf.int32) + 1, 0)

    # One pass of reading; only what overflows is looked at more closely.
    few = [*_parts(gradients if together is None else together), *others]
    finite = tf.math.is_finite(half_square(few))
    return unless(finite, search, lambda: tf.zeros([], tf.int32))


def half_square(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return half the sum of all squares, in float32, where it may overflow."""
    parts = [tf.cast(part, tf.float32) for part in tensors]
    small = [i for i, part in enumerate(parts) if _is_small(part)]
    if len(small) > 1:
        joined = tf.concat([tf.reshape(parts[i], [-1]) for i in small], axis=0)
        parts = [*(p for i, p in enumerate(parts) if i not in small), joined]
    return tf.add_n([tf.nn.l2_loss(part) for part in parts])


def _is_small(part: tf.Tensor) -> bool:
    """Tell whether a copy takes less time than one operation more."""
    size = part.shape.num_elements()
    return size is not None and size <= _SMALL
