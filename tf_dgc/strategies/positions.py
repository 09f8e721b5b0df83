"""Positions within an epoch: the steps done, and the place in the data."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# Of SerializeIterator: leave out what Python and random operations keep to themselves.
_IGNORE = 1
_STATE = "iterator"
_next: list[tuple[int, Callable[[Any], None]]] = []


def at_next_epoch(steps: int, ready: Callable[[Any], None]) -> None:
    """Let the next epoch that `fit` begins leave out its first steps.

    Args:
        steps: how many were done before.
        ready: is called with the iterator of the data, before anything is read of it.
    """
    _next[:] = [(steps, ready)]


def steps_from_position(
    original: Callable[..., Iterator[Any]], epoch: Any
) -> Iterator[Any]:
    """Yield the steps of an epoch that a backup leaves to do."""
    steps, ready = _next.pop() if _next else (0, None)
    for entry in original(epoch):  # in older versions of Keras without the end
        begin, iterator = entry[0], entry[-1]
        if begin < steps:  # nothing was read for it yet
            continue
        if ready is not None:
            ready(iterator)
            ready = None
        yield entry


def read_state(iterator: Any) -> tf.Tensor | None:
    """Return a copy of an iterator's state; None where a dataset cannot tell it."""
    try:
        return tf.raw_ops.SerializeIterator(
            resource_handle=_resource_of(iterator),
            external_state_policy=_IGNORE,
        )
    except (tf.errors.OpError, ValueError):
        return None


def write_state(state: tf.Tensor, path: pathlib.Path) -> None:
    """Write what `read_state` returned, to several files that begin with `path`."""
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=str(path),
            tensor_names=[_STATE],
            shape_and_slices=[""],
            tensors=[state],
        )


def has_state(path: pathlib.Path) -> bool:
    """Tell whether `write_state` has written there."""
    return path.with_name(f"{path.name}.index").exists()


def take_up(iterator: Any, path: pathlib.Path) -> None:
    """Bring a new iterator of the same data to the place of a state.

    Raises:
        ValueError: the file is damaged, or of other data; names it.
    """
    try:
        with tf.device("CPU:0"):
            (state,) = tf.raw_ops.RestoreV2(
                prefix=str(path),
                tensor_names=[_STATE],
                shape_and_slices=[""],
                dtypes=[tf.variant],
            )
            tf.raw_ops.DeserializeIterator(
                resource_handle=_resource_of(iterator),
                serialized=state,
            )
    except tf.errors.OpError as error:
        raise ValueError(f"{path}: damaged, or of other data: {error}") from None


def read_again(iterator: Any, steps: int) -> None:
    """Read what was read in so many steps, and forget it.

    Raises:
        ValueError: there is less.
    """
    for step in range(steps):
        if next(iterator, None) is None:
            raise ValueError(
                f"The data must be those of the backup, which was made after {steps} "
                f"batches of an epoch. Received: {step} batches"
            )


def _resource_of(iterator: Any) -> tf.Tensor:
    """Return the one tensor that an iterator of tf.data is made of."""
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    return resource
