"""Graphs of tf.data: the datasets that one reads, and what their functions do.

One walk for all who ask what a dataset's elements depend on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc import _host

_T = TypeVar("_T")

# Stateful operations that draw nothing, by the beginnings of their names ...
_KEEPERS = ("HashTable", "LookupTable", "TensorArray", "VarHandle")
# ... and those that give the same for the same element.
READERS = (
    "Assert",
    "HashTableV2",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarHandleOp",
    "VarIsInitializedOp",
)
_WRITERS = ("Assign", "LookupTableInsert", "ResourceScatter")
_DRAWERS = ("Multinomial", "Random", "TruncatedNormal")


# Datasets.


def upstream(
    dataset: tf.data.Dataset, through_caches: bool = True
) -> Iterator[tf.data.Dataset]:
    """Yield a dataset, and those that it reads.

    Args:
        dataset: the last one.
        through_caches: whether also those that are read only once, into a cache.
    """
    yield dataset
    if through_caches or not _host.datasets.caches(dataset):
        for each in _host.tensorflow.inputs_of(dataset):
            yield from upstream(each, through_caches)


def has_node(dataset: tf.data.Dataset, is_meant: Callable[[Any], bool]) -> bool:
    """Tell whether a function of a dataset, or of those it reads, has such a node."""
    return any(
        is_meant(node)
        for each in upstream(dataset)
        for graph in _host.tensorflow.graphs_of(each)
        for node in nodes(graph)
    )


def is_none(spec: Any) -> bool:
    """Tell whether a part is None; TensorFlow 2.18 has no public name for that."""
    return type(spec).__name__ == "NoneTensorSpec"


# Functions.


def nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a function, and of all that it calls."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def followed(
    graph: Any, before: Sequence[_T], judge: Callable[[Any, list[_T | None]], _T | None]
) -> list[_T | None]:
    """Follow facts about tensors through a function.

    Args:
        graph: of the function.
        before: facts of the first of its inputs.
        judge: takes an operation, and the facts of its inputs; returns that of what it
            makes, or None.

    Returns:
        Those of its outputs.
    """
    found: dict[Any, _T | None] = dict(
        zip((tensor.ref() for tensor in graph.inputs), before, strict=False)
    )
    for operation in graph.get_operations():
        inputs = [found.get(tensor.ref()) for tensor in operation.inputs]
        made = judge(operation, inputs)
        for tensor in operation.outputs:
            found.setdefault(tensor.ref(), made)
    return [found.get(tensor.ref()) for tensor in graph.outputs]


# Nodes.


def draws(node: Any) -> bool:
    """Tell whether an operation draws random numbers."""
    return bool(node.op.startswith(_DRAWERS))


def has_seed(node: Any) -> bool:
    """Tell whether an operation draws the same numbers in every process."""
    return any(name in node.attr and node.attr[name].i for name in ("seed", "seed2"))


def keeps(node: Any) -> bool:
    """Tell whether an operation has a state, and draws nothing."""
    return bool(node.op.startswith(_KEEPERS))


def writes(node: Any) -> bool:
    """Tell whether an operation sets variables."""
    return bool(node.op.startswith(_WRITERS))


def is_of_python(node: Any) -> bool:
    """Tell whether an operation runs Python code, as a generator does."""
    return bool(node.op.endswith("PyFunc"))


def called(node: Any) -> set[str]:
    """Return the names of the functions that an operation calls."""
    return {
        name
        for value in node.attr.values()
        for name in (value.func.name, *(each.name for each in value.list.func))
        if name
    }
