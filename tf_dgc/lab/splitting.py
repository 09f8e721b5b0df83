"""Traffic of split layers of a model, in a step of N workers."""

import math
from typing import Any, NamedTuple

import keras

from tf_dgc.layers import ways

MIN_ELEMENTS = 2**20  # of a kernel that `split_dense` splits by default
_EXCHANGES = 5  # of a layer: numbers of rows, inputs, units, and the gradients of both


class Chain(NamedTuple):
    """Dense layers, each of which hands its units to the next alone."""

    rows: int  # of a worker
    forms: tuple[ways.WayForm, ...]


class Split(NamedTuple):
    """The dense layers of a model that are worth splitting."""

    weight_bytes: int = 0  # of their kernels, which are exchanged no more
    exchanges: int = 0  # all-gathers, and others with as many hops
    chains: tuple[Chain, ...] = ()

    def activation_bytes(self, workers: int) -> float:
        """Return what goes to or from each other worker: activations, gradients."""
        numbers = [
            rows * ways.cheapest(forms, workers)[0] for rows, forms in self.chains
        ]
        return 8 * sum(numbers)


def split_of(model: keras.Model, rows: int) -> Split:
    """Return what `split_dense` would split, and what that sends.

    Args:
        model: built.
        rows: of a worker's batch.
    """

    def is_large(layer: Any) -> bool:
        return (
            type(layer) is keras.layers.Dense
            and math.prod(layer.kernel.shape) >= MIN_ELEMENTS
            and None not in layer.output.shape[1:]
        )

    chains = tuple(
        Chain(
            rows * math.prod(chain[0].output.shape[1:-1]),
            tuple(map(ways.form_of, chain)),
        )
        for chain in ways.chains(model, is_large)
    )
    forms = [form for chain in chains for form in chain.forms]
    weights = sum(4 * form.inputs * form.units for form in forms)
    return Split(weights, _EXCHANGES * len(forms), chains)
