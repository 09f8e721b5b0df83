"""Provenance of the parts of a dataset that may differ between workers.

Random operations of `Dataset.map` give each worker other numbers, be it without a seed
or because elements meet them in any order. What depends on them is no evidence.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import randomness

# Stateful operations that draw nothing.
_READERS = ("HashTable", "LookupTable", "TensorArray", "VarHandle")
_DRAWERS = ("Multinomial", "Random", "TruncatedNormal")


def random_parts(dataset: tf.data.Dataset) -> list[bool]:
    """Tell which parts of a dataset's elements depend on what each worker draws.

    Python code in `Dataset.map` is taken to draw. Generators are not, nor is what
    shuffles and filters: these decide which data there are.

    Returns:
        One for each part of `element_spec`, flat; None is a part, too.
    """
    present = [not is_none(part) for part in _parts(dataset)]
    found = iter(_random_tensors(dataset))
    return [there and next(found) for there in present]


def is_none(spec: Any) -> bool:
    """Tell whether a part is None; TensorFlow 2.18 has no public name for that."""
    return type(spec).__name__ == "NoneTensorSpec"


def decided_by_chance(dataset: tf.data.Dataset) -> bool:
    """Tell whether an operation without a seed decides which elements there are.

    As in a filter that draws, or reads what a `Dataset.map` before it has drawn; a map
    by itself may draw as it likes.
    """
    graphs = _host.tensorflow.graphs_of(dataset)
    if not _host.tensorflow.maps(dataset) and any(
        _draws_inside(graph, seeded=False) for graph in graphs
    ):
        return True
    sources = _host.tensorflow.inputs_of(dataset)
    if graphs and _host.tensorflow.chooses(dataset):
        (graph,), (source,) = graphs, sources
        if any(_flow(graph, _random_tensors(source, False), True, False)):
            return True
    return any(map(decided_by_chance, sources))


def is_of_python(dataset: tf.data.Dataset) -> bool:
    """Tell whether Python code makes elements, as a generator does."""
    if any(
        node.op.endswith("PyFunc")
        for graph in _host.tensorflow.graphs_of(dataset)
        for node in _nodes(graph)
    ):
        return True
    return any(map(is_of_python, _host.tensorflow.inputs_of(dataset)))


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a function, and of all that it calls."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def _parts(dataset: tf.data.Dataset) -> list[Any]:
    return list(tf.nest.flatten(dataset.element_spec))


def _random_tensors(dataset: tf.data.Dataset, python: bool = True) -> list[bool]:
    """Tell the same of what is passed between datasets: there None is nothing.

    Args:
        dataset: whose elements it is about.
        python: whether Python code is taken to draw.
    """
    sources = _host.tensorflow.inputs_of(dataset)
    before = [_random_tensors(source, python) for source in sources]
    joined = [each for part in before for each in part]
    if _host.tensorflow.maps(dataset):
        (graph,) = _host.tensorflow.graphs_of(dataset)
        in_order = _host.tensorflow.maps_in_order(dataset)
        return _flow(graph, joined, in_order, python)
    if _host.tensorflow.chooses(dataset):
        return joined
    alike = [
        part
        for part, source in zip(before, sources, strict=True)
        if source.element_spec == dataset.element_spec
    ]
    if len(sources) > 1 and alike:  # elements of one or another
        return [any(each) for each in zip(*alike, strict=True)]
    count = sum(not is_none(part) for part in _parts(dataset))
    draws = any(_draws_inside(graph) for graph in _host.tensorflow.graphs_of(dataset))
    if len(joined) == count and not draws:
        return joined
    return [draws or any(joined)] * count


def _draws_inside(graph: Any, seeded: bool = True) -> bool:
    """Tell whether a function, or one that it calls, draws without Python code.

    Args:
        graph: of the function.
        seeded: whether operations that have a seed count.
    """
    return any(
        draws(node) and (seeded or not (has_seed(node) or "Dataset" in node.op))
        for node in _nodes(graph)
    )


def draws(node: Any) -> bool:
    """Tell whether an operation draws random numbers."""
    return bool(node.op.startswith(_DRAWERS))


def has_seed(node: Any) -> bool:
    """Tell whether an operation draws the same numbers in every process."""
    return any(name in node.attr and node.attr[name].i for name in ("seed", "seed2"))


def _flow(
    graph: Any, before: list[bool], in_order: bool, python: bool = True
) -> list[bool]:
    """Follow random numbers through a function.

    Args:
        graph: of the function; its inputs begin with those of `before`.
        before: which of them are random.
        in_order: whether elements come one after another, so that workers with the
            same seed draw alike.
        python: whether Python code, and any other state, is taken to draw.
    """
    drawing = _drawing_functions(graph, in_order, python)
    found = {t.ref() for t, each in zip(graph.inputs, before, strict=False) if each}
    for operation in graph.get_operations():
        if operation.name.rpartition("/")[2].startswith(randomness.ALIKE):
            continue
        random = _draws(operation.node_def, in_order, python, drawing)
        if random or any(tensor.ref() in found for tensor in operation.inputs):
            found.update(tensor.ref() for tensor in operation.outputs)
    return [tensor.ref() in found for tensor in graph.outputs]


def _drawing_functions(graph: Any, in_order: bool, python: bool) -> set[str]:
    """Name the functions in which something is drawn, or in one that they call."""
    functions = graph.as_graph_def().library.function
    found: set[str] = set()
    for _ in functions:  # as deep as calls may be nested
        before = len(found)
        for function in functions:
            nodes = function.node_def
            if any(_draws(node, in_order, python, found) for node in nodes):
                found.add(function.signature.name)
        if len(found) == before:
            break
    return found


def _draws(node: Any, in_order: bool, python: bool, drawing: set[str]) -> bool:
    called = {
        name
        for value in node.attr.values()
        for name in (value.func.name, *(each.name for each in value.list.func))
        if name
    }
    if called:
        return not called.isdisjoint(drawing)
    if node.op.startswith(_READERS) or (has_seed(node) and in_order):
        return False
    if not python:
        return draws(node)
    return _host.tensorflow.is_stateful(node.op)
