"""Provenance of the parts of a dataset that may differ between workers.

Random operations of `Dataset.map` give each worker other numbers, be it without a seed
or because elements meet them in any order. What depends on them is no evidence.
"""

from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import data_graphs, randomness


def random_parts(dataset: tf.data.Dataset) -> list[bool]:
    """Tell which parts of a dataset's elements depend on what each worker draws.

    Python code in `Dataset.map` is taken to draw. Generators are not, nor is what
    shuffles and filters: these decide which data there are.

    Returns:
        One for each part of `element_spec`, flat; None is a part, too.
    """
    present = [not data_graphs.is_none(part) for part in _parts(dataset)]
    found = iter(_random_tensors(dataset))
    return [there and next(found) for there in present]


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
    count = sum(not data_graphs.is_none(part) for part in _parts(dataset))
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
        data_graphs.draws(node)
        and (seeded or not (data_graphs.has_seed(node) or "Dataset" in node.op))
        for node in data_graphs.nodes(graph)
    )


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

    def judge(operation: Any, inputs: list[bool | None]) -> bool:
        if operation.name.rpartition("/")[2].startswith(randomness.ALIKE):
            return False
        return any(inputs) or _draws(operation.node_def, in_order, python, drawing)

    return [bool(each) for each in data_graphs.followed(graph, before, judge)]


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
    if called := data_graphs.called(node):
        return not called.isdisjoint(drawing)
    if data_graphs.keeps(node) or (data_graphs.has_seed(node) and in_order):
        return False
    if not python:
        return data_graphs.draws(node)
    return _host.tensorflow.is_stateful(node.op)
