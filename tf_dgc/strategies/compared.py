"""Variables of a model are compared over the workers before the first step of a `fit`.

Axes: N workers, T variables.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.transports.base import Transport

_MOST_NAMED = 8


def take_over(
    model: keras.Model, transport: Transport, quiet: bool
) -> tuple[list[str], list[int]]:
    """Give all workers the chief's values of what differs, eagerly; all call this.

    Left out are metrics, which count the rows of each, gradients that optimizers add up
    over steps, and parts of split layers.
    Models of other forms are left to the comparison of what is trained.

    Args:
        model: of the user, built.
        transport: between the workers.
        quiet: whether steps may have changed what is not trained.

    Returns:
        Paths of variables that should have been alike and were not, and the ranks on
        which they differed from those of the chief.
    """
    variables = _variables_of(model)
    plain = [_host.keras.plain(variable) for variable in variables]
    own = np.array([_checksum(variable) for variable in plain], np.int64)
    form = str([(v.shape.as_list(), v.dtype.name) for v in plain])
    digest = [zlib.crc32(form.encode()), zlib.crc32(own.tobytes())]
    digests = transport.all_gather(tf.constant(digest, tf.int64), "variables.digest")
    differs = (digests != digests[0]).numpy()
    if differs[:, 0].any() or not differs[:, 1].any():
        return [], []
    found = transport.all_gather(tf.constant(own), "variables.checksums").numpy()
    places = np.flatnonzero((found != found[0]).any(axis=0))
    values = [plain[i].read_value() for i in places]
    for i, value in zip(places, transport.broadcast(values, "variables"), strict=True):
        plain[i].assign(value)
    told = [i for i in places if not _may_differ(variables[i], quiet)]
    ranks = np.flatnonzero((found[:, told] != found[0, told]).any(axis=1))
    paths = [getattr(variables[i], "path", plain[i].name) for i in told]
    return paths, ranks.tolist()


def warning(paths: Sequence[str], ranks: Sequence[int]) -> str:
    """Say what was taken over."""
    named = ", ".join(map(repr, paths[:_MOST_NAMED]))
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return (
        f"Before the first step of `fit` variables of ranks {list(ranks)} differ from "
        "those of the chief, which all take over now. Make them alike on all workers: "
        "seed what sets them (as np.random.default_rng(seed)), or set them after the "
        f"strategy is made, by `numpy.random` or `random`. Received: {named}{more}"
    )


def _may_differ(variable: Any, quiet: bool) -> bool:
    """Tell whether steps leave other values on each worker."""
    by_steps = quiet and not getattr(variable, "trainable", True)
    return by_steps or variable.name == "seed_generator_state"


def _variables_of(model: keras.Model) -> list[Any]:
    """Return the variables of a model and its optimizers that all have alike."""
    optimizers = _host.keras.optimizers_of(model)
    every = [v for owner in (model, *optimizers) for v in owner.variables]
    own = [v for each in optimizers for v in _host.keras.added_up_by(each)]
    counted = {id(variable) for variable in (*model.metrics_variables, *own)}
    found = {id(v): v for v in every if id(v) not in counted and _is_alike(v)}
    return list(found.values())


def _is_alike(variable: Any) -> bool:
    plain = _host.keras.plain(variable)
    return (
        isinstance(plain, tf.Variable)
        and not _host.distribute.is_metric_variable(plain)
        and plain.dtype != tf.string
        and plain.shape.is_fully_defined()
        and plain.synchronization != tf.VariableSynchronization.NONE
        and not bands.of(plain)
    )


def _checksum(variable: tf.Variable) -> int:
    """Return a checksum of a variable's bits."""
    array = np.ascontiguousarray(variable.numpy())
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)
