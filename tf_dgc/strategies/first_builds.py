"""Builds of models by the first batches of their data."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import data, data_graphs, slicing, split
from tf_dgc.strategies.extended import OneReplicaExtended

_UNBUILT = (
    "The model was not built, and could not be by the first part of a batch. If its "
    "own step takes the parts otherwise, build it before `fit`: call its layers once, "
    "in the scope of the strategy"
)


def build_by_first_batches(
    original: Callable[..., Any],
    model: Any,
    iterator: Any = None,
    data_batch: Any = None,
) -> Any:
    """Let Keras build a model without using up what data give only once.

    Under a strategy it reads a batch of an iterator that it then gives up, and what was
    read ahead is lost with it; maps that count have counted it.
    """
    extended = model.distribute_strategy.extended
    if iterator is None or not isinstance(extended, OneReplicaExtended):
        return original(model, iterator=iterator, data_batch=data_batch)
    reads = _host.keras.keeps_first_batches(iterator) or _keeps_states(model)
    if not reads and (zeros := _zeros_like(iterator)) is not None:
        return _built(original, model, zeros)
    batches = _host.keras.first_batches_of(iterator)
    if batches is not None:
        workers = model.distribute_strategy.transport
        own = data.share_of(batches, workers.rank, workers.size)
        data_batch = slicing.first_of(own)
    else:
        for *_, batches in iterator:
            data_batch = next(batches, None)
            break
    if data_batch is None:  # there are no data
        data_batch = _zeros_of(_host.keras.distributed_dataset_of(iterator))
        if data_batch is None:  # as without a strategy, which builds in the first step
            return None
    refuse_stateful(model, data_batch, extended._num_replicas_in_sync)
    return _built(original, model, data_batch)


def _built(original: Callable[..., Any], model: Any, batch: Any) -> Any:
    """Let Keras build a model by a batch, which may have no targets.

    A step then makes them, and what `compile` was given is built there, as in Keras
    without a strategy; so it is where targets do not fit what the model gives outside
    of training.
    """
    own = not _host.keras.is_of_keras(model.train_step)
    eager = own and model.run_eagerly  # such a step can build the model itself
    if eager and isinstance(batch, tuple) and len(batch) > 3:
        return None  # as without a strategy: the step alone knows what a batch has
    _, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if targets is not None:
        # Metrics may not take what the model gives when it does not train.
        misfits = ValueError, tf.errors.InvalidArgumentError
        with contextlib.suppress(*misfits, *[Exception] * own):
            return original(model, data_batch=batch)
    try:
        with _host.keras.built_without_targets(model):
            return original(model, data_batch=batch)
    except Exception as error:
        if eager:  # its step may take the parts of a batch otherwise
            return None
        if own:
            error.add_note(_UNBUILT)
        raise


def _zeros_like(iterator: Any) -> Any:
    """Return a batch of zeros in the place of one whose reading would be counted.

    Returns:
        None where nothing is, or where shapes do not tell what a batch is.
    """
    dataset = _host.keras.distributed_dataset_of(iterator)
    share = getattr(dataset, "share", None)
    if not isinstance(share, tf.data.Dataset):
        return None
    of_python = data_graphs.has_node(share, data_graphs.is_of_python)
    return _zeros_of(dataset) if of_python or split.assigns(share) else None


def _zeros_of(dataset: Any) -> Any:
    """Return a batch of zeros, or None where shapes do not tell what a batch is."""
    spec = dataset.element_spec
    flat = tf.nest.flatten(spec)
    if not all(
        isinstance(part, tf.TensorSpec) and part.shape[1:].is_fully_defined()
        for part in flat
    ):
        return None
    shapes = [[size or 1 for size in part.shape] for part in flat]
    zeros = [tf.zeros(s, p.dtype) for s, p in zip(shapes, flat, strict=True)]
    return tf.nest.pack_sequence_as(spec, zeros)


def _keeps_states(model: Any) -> list[str]:
    """Return the names of layers that keep states of rows from batch to batch."""
    return [
        layer.name
        for layer in getattr(model, "layers", [])
        if getattr(layer, "stateful", False) is True
    ]


def refuse_stateful(model: Any, batch: Any, size: int) -> None:
    """Raise ValueError where layers keep states for more rows than a worker has.

    Args:
        model: of Keras.
        batch: of this worker.
        size: N.
    """
    inputs = tf.nest.flatten(getattr(model, "inputs", None) or [])
    made_for = {each.shape[0] for each in inputs} - {None}
    rows: set[Any] = {c.rows for c in slicing.components_of(batch) if c.has_rows}
    names = _keeps_states(model)
    if size > 1 and names and made_for and None not in rows and made_for != rows:
        begins = f"begin with {min(rows)}, the rows of one of {size} workers"
        if not min(rows):
            begins = f"begin with rows of one of {size} workers, and this one has none"
        raise ValueError(
            "A stateful layer keeps states of the rows of its worker: `batch_shape` "
            f"must {begins}, while data stay in batches of all rows, a multiple of "
            f"{size}. "
            f"Received: batch_shape=({min(made_for)}, ...), layers {names}"
        )
