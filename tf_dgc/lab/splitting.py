"""What split layers of a model would send, in a step of N workers."""

import math
from typing import Any, NamedTuple

import keras

MIN_ELEMENTS = 2**20  # of a kernel that `split_dense` splits by default
_EXCHANGES = 5  # of a layer: numbers of rows, inputs, units, and the gradients of both


class Split(NamedTuple):
    """The dense layers of a model that are worth splitting."""

    weight_bytes: int = 0  # of their kernels, which are exchanged no more
    input_bytes: int = 0  # of a worker's rows, and of their gradients
    unit_bytes: int = 0  # the same
    exchanges: int = 0  # all-gathers, and others with as many hops


def split_of(model: keras.Model, rows: int) -> Split:
    """Return what `split_dense` would split, and what that sends.

    Args:
        model: built.
        rows: of a worker's batch.
    """
    found = [
        (*layer.kernel.shape, rows * math.prod(layer.output.shape[1:-1]))
        for layer in _layers(model)
        if type(layer) is keras.layers.Dense
        and math.prod(layer.kernel.shape) >= MIN_ELEMENTS
        and None not in layer.output.shape[1:]
    ]
    return Split(
        sum(4 * inputs * units for inputs, units, _ in found),
        sum(8 * m * inputs for inputs, _, m in found),
        sum(8 * m * units for _, units, m in found),
        _EXCHANGES * len(found),
    )


def _layers(model: Any) -> list[Any]:
    """Return the layers of a model, and of models within it."""
    inner = [
        _layers(layer) if hasattr(layer, "layers") else [layer]
        for layer in model.layers
    ]
    return [layer for layers in inner for layer in layers]
