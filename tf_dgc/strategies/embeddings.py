"""Unmodified `keras.layers.Embedding` whose table lives on the servers only.

Keras's `take` converts the variable before it looks at the indices, so that it is the
layer that is asked here, instead of the variable.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc._host.shared import Table
from tf_dgc.config import DownpourConfig
from tf_dgc.servers import tables
from tf_dgc.strategies.served import DownpourExtended


def _is_large(layer: Any, limit: int | None) -> bool:
    size = layer.input_dim * layer.output_dim * tf.as_dtype(layer.variable_dtype).size
    return limit is not None and size >= limit


def check(optimizer: Any, variables: Sequence[Any], config: DownpourConfig) -> None:
    """Refuse what tables that live on the servers only cannot have.

    Raises:
        ValueError: the optimizer, or a setting, needs what is not there.
    """
    if not any(isinstance(v, Table) for v in variables):
        return
    told = {
        "push_period": config.push_period > 1,
        "gradient_accumulation_steps": optimizer.gradient_accumulation_steps,
        "use_ema": optimizer.use_ema,
        "weight_decay": optimizer.weight_decay,
        "an optimizer that looks at whole tensors": not optimizers.is_elementwise(
            optimizer
        ),
    }
    if found := [name for name, used in told.items() if used]:
        raise ValueError(
            "Embedding tables that live on the servers only are trained by the "
            f"gradients of single rows. Received: {', '.join(found)}. Leave it "
            "out, or set a larger `DownpourConfig(table_bytes=...)`"
        )


def check_callbacks(callbacks: Iterable[Any], model: Any, limit: int | None) -> None:
    """Refuse callbacks that need tables as a whole, before the first step.

    Args:
        callbacks: of a `fit`.
        model: that is trained.
        limit: bytes from which on the table of an Embedding lives on the servers only.

    Raises:
        ValueError: there is such a callback, and a table.
    """
    if limit is None:
        return
    tables = [
        v.name for v in model.variables if isinstance(_host.keras.plain(v), Table)
    ]
    unbuilt = [
        layer.name
        for layer in _host.keras.layers_within(model)
        if isinstance(layer, keras.layers.Embedding) and not layer.built
        if _is_large(layer, limit)
    ]
    for callback in callbacks:
        callback = getattr(callback, "on_chief", callback)
        needed = _needs_whole(callback)
        if needed and (tables or unbuilt):
            raise ValueError(
                f"{type(callback).__name__} must be without {needed[0]}, which needs "
                "all weights in a worker's memory, where tables live on the servers "
                f"only. Received: {callback!r}, tables {tables or unbuilt}. "
                f"{needed[1]}, or set a larger `DownpourConfig(table_bytes=...)`"
            )


def _needs_whole(callback: Any) -> tuple[str, str] | None:
    """Return what of a callback of Keras reads all weights, and what to do instead."""
    kinds = keras.callbacks
    if isinstance(callback, kinds.EarlyStopping) and callback.restore_best_weights:
        return (
            "`restore_best_weights=True`",
            "Write the best by ModelCheckpoint(path, save_best_only=True), and load "
            "that file after `fit`",
        )
    if isinstance(callback, kinds.TensorBoard) and callback.histogram_freq:
        return "`histogram_freq`", "Leave it out"
    orbax = getattr(kinds, "OrbaxCheckpoint", None)
    if orbax is not None and isinstance(callback, orbax):
        return "weights of its own", "Take ModelCheckpoint, which writes them in parts"
    return None


def _extended() -> DownpourExtended | None:
    extended = tf.distribute.get_strategy().extended
    return extended if isinstance(extended, DownpourExtended) else None


def initialize(original: Callable[..., Any], variable: Any, initializer: Any) -> Any:
    """Make the variable of a table on the servers."""
    extended = _extended()
    if extended is None:
        return original(variable, initializer)
    made = tuple(variable.shape), variable.dtype, initializer
    making = extended.tables
    making.form, before = made, making.form
    layer, later = making.layer, making.later.pop(id(variable), None)
    making.layer = layer if later is None else later()
    try:
        return original(variable, initializer)
    finally:
        making.form, making.layer = before, layer


def build(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a large table of an Embedding on the servers."""
    extended = _extended()
    if extended is None or layer.built or not _is_large(layer, extended.tables.bytes):
        return original(layer, *args, **kwargs)
    told = {
        "embeddings_regularizer": layer.embeddings_regularizer,
        "embeddings_constraint": layer.embeddings_constraint,
        "lora_rank": layer.lora_rank,
        "quantization": layer.quantization_mode,
    }
    if found := [f"{name}={value!r}" for name, value in told.items() if value]:
        raise ValueError(
            f"The table of {layer.name!r} lives on the servers only, as it has "
            "`DownpourConfig(table_bytes=...)` or more, and must have nothing that "
            f"needs it as a whole. Received: {', '.join(found)}"
        )
    extended.tables.layer = layer
    try:
        found = original(layer, *args, **kwargs)
    finally:
        extended.tables.layer = None
    if _table_of(layer) is None:  # Keras gives it its value when all is built
        variable = getattr(layer, "_embeddings", None)
        extended.tables.later[id(variable)] = weakref.ref(layer)
    return found


def look_up(original: Callable[..., Any], layer: Any, inputs: Any) -> Any:
    """Look up rows of a table that is on the servers."""
    if (table := _table_of(layer)) is None:
        return original(layer, inputs)
    if isinstance(inputs, tf.SparseTensor | tf.RaggedTensor):
        raise TypeError(
            "The table lives on the servers only: its layer takes dense indices. "
            f"Received: inputs={inputs!r} for {layer.name!r}"
        )
    extended = _extended()
    count = None if extended is None else extended.count_received
    rows = tables.look_up(table, tf.cast(inputs, "int64"), count)
    return tf.cast(rows, layer.compute_dtype)


def _table_of(layer: Any) -> Any:
    table = _host.keras.plain(getattr(layer, "_embeddings", None))
    return table if isinstance(table, Table) else None


def save_embedding(original: Callable[..., Any], layer: Any, store: Any) -> None:
    """Save a table in parts."""
    if (table := _table_of(layer)) is None:
        original(layer, store)
    else:
        tables.write(table, _host.stores.dataset_in(store, "0", table))


def load_embedding(original: Callable[..., Any], layer: Any, store: Any) -> None:
    """Load a table in parts."""
    if (table := _table_of(layer)) is None:
        original(layer, store)
    else:
        tables.load(table, _host.stores.dataset_in(store, "0"))


def save_optimizer(original: Callable[..., Any], optimizer: Any, store: Any) -> None:
    """Save the slots of tables in parts."""
    own = [_host.keras.plain(v) for v in optimizer.variables]
    if not any(isinstance(v, Table) for v in own):
        original(optimizer, store)
        return
    for i, variable in enumerate(own):
        if isinstance(variable, Table):
            tables.write(variable, _host.stores.dataset_in(store, str(i), variable))
        else:
            store[str(i)] = variable.numpy()


def load_optimizer(original: Callable[..., Any], optimizer: Any, store: Any) -> None:
    """Load the slots of tables in parts."""
    own = [_host.keras.plain(v) for v in optimizer.variables]
    if not any(isinstance(v, Table) for v in own) or len(store.keys()) != len(own):
        original(optimizer, store)
        return
    for i, variable in enumerate(optimizer.variables):
        if isinstance(own[i], Table):
            tables.load(own[i], _host.stores.dataset_in(store, str(i)))
        else:
            variable.assign(store[str(i)])


def is_memory_sufficient(original: Callable[..., Any], model: Any) -> bool:
    """Let Keras put files with tables together on the disk."""
    if any(isinstance(_host.keras.plain(v), Table) for v in model.variables):
        return False
    return bool(original(model))
