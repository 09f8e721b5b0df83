"""Comparison of the data that workers hand to `predict` and `evaluate`.

All are to hand over the same, of which each computes its rows. Where workers hand over
data of their own, each predicts those alone, as one process does; metrics, which count
the rows of all, cannot be of both: that is refused. To `train_on_batch` each hands rows
of its own: the same rows on all count once for each worker, of which a warning tells.
"""

import logging
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import data
from tf_dgc.strategies.fits import inner_of
from tf_dgc.transports import handshake

_MOST_BYTES = 2**20  # of an array that is looked at as a whole
_ROWS = 256  # that are looked at in larger ones
_MOST_PARTS = 100
_logger = logging.getLogger("tf_dgc")
_trained_on_batches: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def predict(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Predict by itself where workers hand over data of their own."""
    strategy: Any = _host.keras.strategy_of(model)
    own: Any = inner_of(strategy, "own_batches")
    given = _given(args, kwargs)
    found = None if own is None else _differing(strategy, "predict", given)
    if found is None:
        return original(model, *args, **kwargs)
    if strategy.extended.made.parts():
        raise ValueError(
            "All workers must hand the same data to `predict`, as they compute split "
            f"layers together. Received, by rank: {found}"
        )
    return own.call(lambda: original(model, *args, **kwargs))


def evaluate(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Compare the data that workers hand over."""
    strategy: Any = _host.keras.strategy_of(model)
    _refuse_differing(strategy, "evaluate", _given(args, kwargs))
    return original(model, *args, **kwargs)


def fit(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Compare before the first step what would be found at the end of an epoch."""
    if (given := kwargs.get("validation_data")) is not None:
        _refuse_differing(_host.keras.strategy_of(model), "validation", [given])
    return original(model, *args, **kwargs)


def train_on_batch(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Warn, before a model's first step, of the same rows on all workers."""
    strategy: Any = _host.keras.strategy_of(model)
    if (
        inner_of(strategy, "own_batches") is not None
        and model not in _trained_on_batches
    ):
        _trained_on_batches.add(model)
        given = _given(args, kwargs)
        differing = _differing(strategy, "train on batch", given)
        workers, known = strategy.num_replicas_in_sync, any(map(fingerprint, given))
        if strategy.is_chief and workers > 1 and known and differing is None:
            _logger.warning(
                "All workers hand the same rows to `train_on_batch`, which takes a "
                "batch of each worker's own: a loss that is a sum counts each row "
                f"{workers} times, and no step is faster. Hand over rows of this "
                "worker, or train with `fit`, which shares a batch"
            )
    return original(model, *args, **kwargs)


def _refuse_differing(strategy: Any, what: str, given: list[Any]) -> None:
    if inner_of(strategy, "own_batches") is None:
        return
    found = _differing(strategy, what, given)
    if found is not None:
        raise ValueError(
            "All workers must hand the same data to `evaluate`, or as "
            "`validation_data` to `fit`: each computes its rows of every batch, and "
            "metrics are of all. Where each has data of its own, let a dataset say so "
            "by AutoShardPolicy.OFF, which gives metrics of all, or use what "
            f"`predict` returns. Received, by rank: {found}"
        )


def _given(args: Any, kwargs: Any) -> list[Any]:
    """Return x, y and weights of rows, as far as they are given."""
    names = ("x", "y")
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in (*names, "sample_weight")]


def _differing(strategy: Any, what: str, given: list[Any]) -> list[Any] | None:
    """Return what workers hand over, by rank, where that differs; all call this."""
    record = {"data": [each for part in given for each in fingerprint(part)]}
    found = handshake.tell(strategy.transport, what, record)
    return None if all(each == found[0] for each in found) else found


def fingerprint(given: Any) -> list[str]:
    """Return texts that differ, as far as one can see, where data do.

    Args:
        given: arrays or tensors in any structure, or a dataset, of which only what it
            says of itself counts; of anything else nothing is known.
    """
    if isinstance(given, tf.data.Dataset):
        if data.is_own(given):
            return []
        return [f"dataset of {int(given.cardinality())} batches"]
    try:
        flat = tf.nest.flatten(given, expand_composites=True)
    except (TypeError, ValueError):
        return []
    known = [part for part in flat if hasattr(part, "__array__")]
    return [_fingerprint(np.asarray(part)) for part in known[:_MOST_PARTS]]


def _fingerprint(array: np.ndarray) -> str:
    rows = array
    if array.ndim and array.nbytes > _MOST_BYTES:
        places = np.linspace(0, len(array) - 1, min(len(array), _ROWS)).astype(int)
        rows = array[places]
    if rows.dtype == object:
        octets = repr(rows.tolist()).encode()
    else:
        octets = np.ascontiguousarray(rows).tobytes()
    return f"{array.dtype} {array.shape} {zlib.crc32(octets):08x}"
