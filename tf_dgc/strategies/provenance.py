"""Which parts of a dataset may differ between workers that read the same data.

Random operations of `Dataset.map` give each worker other numbers, be it without a seed
or because elements meet them in any order. What depends on them is no evidence.
"""

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

    As in a filter that draws; not in `Dataset.map`, which may draw as it likes.
    """
    graphs = _host.tensorflow.graphs_of(dataset)
    if not _host.tensorflow.maps(dataset) and any(
        _draws_inside(graph, seeded=False) for graph in graphs
    ):
        return True
    return any(map(decided_by_chance, _host.tensorflow.inputs_of(dataset)))


def _parts(dataset: tf.data.Dataset) -> list[Any]:
    return list(tf.nest.flatten(dataset.element_spec))


def _random_tensors(dataset: tf.data.Dataset) -> list[bool]:
    """Tell the same of what is passed between datasets: there None is nothing."""
    sources = _host.tensorflow.inputs_of(dataset)
    before = [_random_tensors(source) for source in sources]
    joined = [each for part in before for each in part]
    if _host.tensorflow.maps(dataset):
        (graph,) = _host.tensorflow.graphs_of(dataset)
        return _flow(graph, joined, in_order=_host.tensorflow.maps_in_order(dataset))
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
    definition = graph.as_graph_def()
    functions = [definition.node, *(f.node_def for f in definition.library.function)]
    return any(
        node.op.startswith(_DRAWERS)
        and (seeded or not (has_seed(node) or "Dataset" in node.op))
        for nodes in functions
        for node in nodes
    )


def has_seed(node: Any) -> bool:
    """Tell whether an operation draws the same numbers in every process."""
    return any(name in node.attr and node.attr[name].i for name in ("seed", "seed2"))


def _flow(graph: Any, before: list[bool], in_order: bool) -> list[bool]:
    """Follow random numbers through a function.

    Args:
        graph: of the function; its inputs begin with those of `before`.
        before: which of them are random.
        in_order: whether elements come one after another, so that workers with the
            same seed draw alike.
    """
    drawing = _drawing_functions(graph, in_order)
    found = {t.ref() for t, each in zip(graph.inputs, before, strict=False) if each}
    for operation in graph.get_operations():
        if operation.name.rpartition("/")[2].startswith(randomness.ALIKE):
            continue
        random = _draws(operation.node_def, in_order, drawing)
        if random or any(tensor.ref() in found for tensor in operation.inputs):
            found.update(tensor.ref() for tensor in operation.outputs)
    return [tensor.ref() in found for tensor in graph.outputs]


def _drawing_functions(graph: Any, in_order: bool) -> set[str]:
    """Name the functions in which something is drawn, or in one that they call."""
    functions = graph.as_graph_def().library.function
    found: set[str] = set()
    for _ in functions:  # as deep as calls may be nested
        before = len(found)
        for function in functions:
            if any(_draws(node, in_order, found) for node in function.node_def):
                found.add(function.signature.name)
        if len(found) == before:
            break
    return found


def _draws(node: Any, in_order: bool, drawing: set[str]) -> bool:
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
    return _host.tensorflow.is_stateful(node.op)
