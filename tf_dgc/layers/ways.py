"""By which way each kernel is cut: columns, rows, or one after the other.

Axes: N workers, m rows of a worker's batch, I inputs, U units.

    columns    inputs go to all workers, units come home    m (N - 1) (I + U / N)
    rows       inputs go to their workers, sums come home   m (N - 1) (I / N + U)
    rows after columns, nothing between them                m (N - 1) (I + U) of both

numbers sent in the forward pass, and as many in the backward one.
"""

from collections.abc import Callable
from typing import Any

import keras

from tf_dgc import _host
from tf_dgc.bands import COLUMNS, ROWS
from tf_dgc.layers import trials

WAYS = {"columns": COLUMNS, "rows": ROWS}
# Of an element by itself, so that they may be computed where units are.
_ELEMENTWISE = (
    "elu exponential gelu hard_sigmoid leaky_relu linear mish relu relu6 selu sigmoid "
    "silu softplus softsign tanh"
)


def numbers_sent(way: str, inputs: int, units: int, workers: int, after: bool) -> float:
    """Return how many numbers go forth, for a row, to or from each other worker.

    Args:
        way: "columns" or "rows".
        inputs: I.
        units: U.
        workers: N.
        after: whether a layer by columns before this one leaves its units away; what it
            would have sent of them is taken off.
    """
    if way == "columns":
        return inputs + units / workers
    return units - inputs / workers if after else inputs / workers + units


def chosen(
    model: keras.Model, is_large: Callable[[Any], bool], workers: int
) -> dict[int, str]:
    """Choose a way for each large dense layer of a model: least is sent.

    Args:
        model: and models within it.
        is_large: tells whether a layer is to be split.
        workers: N.

    Returns:
        "columns" or "rows", by the id of the layer.
    """
    large = {id(each): each for each in _host.keras.layers_within(model)}
    large = {key: each for key, each in large.items() if is_large(each)}
    after = {key: next_ for key, next_ in followers(model).items() if key in large}
    follows = {id(each) for each in after.values()}
    found: dict[int, str] = {}
    for layer in large.values():
        if id(layer) in follows:
            continue  # its chain begins before it
        chain = [layer]
        while (follower := after.get(id(chain[-1]))) and id(follower) in large:
            chain.append(follower)
        ways = _cheapest(chain, workers)
        found |= {id(each): way for each, way in zip(chain, ways, strict=True)}
    return found


def _cheapest(chain: list[Any], workers: int) -> list[str]:
    """Return the ways of layers, each of which hands its units to the next."""
    best: dict[str, tuple[float, list[str]]] = {"": (0.0, [])}
    for layer in chain:
        inputs, units = layer.kernel.shape
        best = {
            way: min(
                (
                    cost + numbers_sent(way, inputs, units, workers, last == "columns"),
                    [*ways, way],
                )
                for last, (cost, ways) in best.items()
            )
            for way in possible(layer)
        }
    return min(best.values())[1]


def possible(layer: keras.layers.Dense) -> list[str]:
    """Return the ways that regularizer and constraint of a kernel allow; or columns."""
    norm, keep = layer.kernel_regularizer, layer.kernel_constraint
    found = [
        way
        for way, axis in WAYS.items()
        if (norm is None or trials.sums_over(norm, axis))
        and (keep is None or trials.keeps_to(keep, axis))
    ]
    return found or ["columns"]  # which tells what is wrong


def followers(model: keras.Model) -> dict[int, Any]:
    """Return what alone reads the units of a layer, each used once, by its id.

    Of dense layers whose units may stay away from home, in a model and those within it.
    """
    graphs = _host.keras.layers_within(model)
    links = [
        link
        for graph in graphs
        if isinstance(graph, keras.Model)
        for link in _host.keras.links_of(graph)
    ]
    readers: dict[int, list[Any]] = {}
    reads: dict[int, int] = {}
    for giver, taker in links:
        readers.setdefault(id(giver), []).append(taker)
        reads[id(taker)] = reads.get(id(taker), 0) + 1
    return {
        id(layer): readers[id(layer)][0]
        for layer in graphs
        if isinstance(layer, keras.layers.Dense)
        and reads.get(id(layer)) == 1
        and len(readers.get(id(layer), [])) == 1
        and isinstance(readers[id(layer)][0], keras.layers.Dense)
        and reads[id(readers[id(layer)][0])] == 1
        and may_stay(layer)
    }


def may_stay(layer: keras.layers.Dense) -> bool:
    """Tell whether a layer's units can be left where they were computed."""
    known = [getattr(keras.activations, name) for name in _ELEMENTWISE.split()]
    plain = layer.activation is None or layer.activation in known
    return plain and layer.activity_regularizer is None
