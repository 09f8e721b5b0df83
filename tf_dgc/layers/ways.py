"""By which way each kernel is cut: columns, rows, or one after the other.

Axes: N workers, m rows of a worker's batch, I inputs, U units.

    columns    inputs go to all workers, units come home    m (N - 1) (I + U / N)
    rows       inputs go to their workers, sums come home   m (N - 1) (I / N + U)
    rows after columns, nothing between them                m (N - 1) (I + U) of both

numbers sent in the forward pass, and as many in the backward one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class WayForm(NamedTuple):
    """Sizes and settings on which the choice of a way depends.

    Attributes:
        inputs: I.
        units: U.
        ways: those that are possible.
    """

    inputs: int
    units: int
    ways: Sequence[str] = tuple(WAYS)


def numbers_sent(way: str, form: WayForm, workers: int, after: bool) -> float:
    """Return how many numbers go forth, for a row, to or from each other worker.

    Args:
        way: "columns" or "rows".
        form: of the layer.
        workers: N.
        after: whether a layer by columns before this one leaves its units away from
            home; what it would have sent of them is taken off.
    """
    inputs, units, _ = form
    if way == "columns":
        return inputs + units / workers
    return units - inputs / workers if after else inputs / workers + units


def cheapest(chain: Sequence[WayForm], workers: int) -> tuple[float, list[str]]:
    """Choose the ways of layers, each of which hands its units to the next alone.

    Returns:
        The least sum of `numbers_sent`, and the ways.
    """
    best: dict[str, tuple[float, list[str]]] = {"": (0.0, [])}
    for form in chain:
        best = {
            way: min(
                (
                    cost + numbers_sent(way, form, workers, last == "columns"),
                    [*ways, way],
                )
                for last, (cost, ways) in best.items()
            )
            for way in form.ways
        }
    return min(best.values())


def chains(model: keras.Model, is_large: Callable[[Any], bool]) -> list[list[Any]]:
    """Return the large dense layers of a model, those together that form chains.

    Args:
        model: and models within it.
        is_large: tells whether a layer is to be split.
    """
    layers = {id(e): e for e in _host.keras.layers_within(model) if is_large(e)}
    after = {key: each for key, each in followers(model).items() if key in layers}
    inner = {id(each) for each in after.values()}
    found = []
    for key, layer in layers.items():
        if key in inner:
            continue  # its chain begins before it
        chain = [layer]
        while id(follower := after.get(id(chain[-1]))) in layers:
            chain.append(follower)
        found.append(chain)
    return found


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
    found: dict[int, str] = {}
    for chain in chains(model, is_large):
        _, ways = cheapest(list(map(form_of, chain)), workers)
        found |= {id(layer): way for layer, way in zip(chain, ways, strict=True)}
    return found


def form_of(layer: keras.layers.Dense) -> WayForm:
    """Return what the choice for a built layer depends on."""
    inputs, units = layer.kernel.shape
    return WayForm(inputs, units, possible(layer))


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


def feeds_rows(layer: Any, model: keras.Model | None) -> bool:
    """Tell whether in the step that runs a layer by rows reads this one's units.

    Args:
        layer: by columns, that is called.
        model: of which a step runs, if one does.
    """
    if model is None or not _host.keras.has_steps_of_keras(model):
        return False
    reader: Any = followers(model).get(id(layer))
    return getattr(reader, "by", None) == "rows" and reader.is_split


def may_stay(layer: keras.layers.Dense) -> bool:
    """Tell whether a layer's units can be left where they were computed."""
    known = [getattr(keras.activations, name) for name in _ELEMENTWISE.split()]
    plain = layer.activation is None or layer.activation in known
    return plain and layer.activity_regularizer is None
