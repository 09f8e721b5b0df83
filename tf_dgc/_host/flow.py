"""Flow of some tensors: what depends on them, and which variables it was written to.

Variables end a flow: what is read of them depends on nothing. So do collectives, which
give all workers the same. FRAME is tensorflow/python/framework.
"""

import contextlib
import contextvars
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc._host import probe

with probe.imports():
    from tensorflow.python.framework import op_callbacks


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    return [
        (tf.Graph, "_get_function"),
        (op_callbacks, "add_op_callback"),
        (op_callbacks, "remove_op_callback"),
    ]


probe.check(wanted())

_COLLECTIVES = (
    "CollectiveBcast",
    "CollectiveGather",
    "CollectiveReduce",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodBroadcast",
    "HorovodGroupedAll",
)
_WRITERS = ("Assign", "Resource")  # beginnings; of these some are no more than reads
_READERS = ("ReadVariableOp", "ResourceGather")
_SIDE_BY_SIDE = "IdentityN"  # by which TensorFlow gives a function its own gradient
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CHOICES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")


_current: contextvars.ContextVar["Flow | None"] = contextvars.ContextVar(
    "tf_dgc_flow", default=None
)


def current() -> "Flow | None":
    """Return the flow that is followed, if one is."""
    return _current.get()


class Flow:
    """Follows tensors through what is computed while this context is entered."""

    def __init__(self, sources: Iterable[Any]) -> None:
        """Begin with tensors.

        Args:
            sources: of this graph, or eager; what is no tensor is left out.
        """
        flat = tf.nest.flatten(list(sources), expand_composites=True)
        self._reached = {id(t): t for t in flat if isinstance(t, tf.Tensor)}
        self._written: dict[int, Any] = {}
        self._graph: Any = None
        self._count = 0
        self._entered = False

    def add(self, tensors: Iterable[tf.Tensor]) -> None:
        """Follow more tensors, from here on."""
        if self._graph is not None:
            self._follow_graph()
        self._reached.update((id(tensor), tensor) for tensor in tensors)

    def end_at(self, tensors: Iterable[tf.Tensor]) -> None:
        """Follow tensors no further, as those that a collective returns."""
        if self._graph is not None:
            self._follow_graph()
        for tensor in tensors:
            self._reached.pop(id(tensor), None)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Follow in this context, beside the flow that is the current one."""
        before = _current.get()
        with self:
            token = _current.set(before)
            try:
                yield
            finally:
                _current.reset(token)

    def __enter__(self) -> "Flow":
        """Begin to follow."""
        self._token, self._entered = _current.set(self), True
        if tf.executing_eagerly():
            op_callbacks.add_op_callback(self._follow_eagerly)
        else:
            self._graph = tf.compat.v1.get_default_graph()
            self._count = len(self._graph.get_operations())
        return self

    def __exit__(
        self, kind: Any, value: Any, traceback: types.TracebackType | None
    ) -> None:
        """End it."""
        _current.reset(self._token)
        if self._graph is None:
            op_callbacks.remove_op_callback(self._follow_eagerly)
        elif kind is None:
            self._follow_graph()
        self._entered = False

    def reaches(self, tensor: tf.Tensor) -> bool:
        """Tell whether a tensor depends on them; in a function within, it may."""
        if self._graph is not None:
            if tensor.graph is not self._graph:
                return True
            self._follow_graph()
        return id(tensor) in self._reached

    def wrote(self, variable: Any) -> bool:
        """Tell whether what was written to a variable of TensorFlow depends on them."""
        if self._graph is not None and self._entered:
            self._follow_graph()
        return id(variable.handle) in self._written

    def _follow_graph(self) -> None:
        operations = self._graph.get_operations()
        new, self._count = operations[self._count :], len(operations)
        written = _follow(self._graph, new, self._reached)
        for handle in written:
            found = outside(self._graph, handle)
            self._written[id(found)] = found

    def _follow_eagerly(
        self,
        op_type: Any,
        inputs: Sequence[Any],
        attrs: Any,
        outputs: Sequence[Any],
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        """Take part in each operation. FRAME/op_callbacks.py: add_op_callback."""
        kind = tf.compat.as_str_any(op_type)
        if graph is not None or kind.startswith(_COLLECTIVES):
            return
        places = [i for i, each in enumerate(inputs) if id(each) in self._reached]
        if not places:
            return
        if kind == _SIDE_BY_SIDE:
            outputs = [outputs[i] for i in places]
        self._reached.update((id(each), each) for each in outputs)
        if not kind.startswith(_READERS):  # a function may write to all that it has
            handles = [t for t in inputs if getattr(t, "dtype", None) == tf.resource]
            self._written.update((id(each), each) for each in handles)


def outside(graph: Any, handle: Any) -> Any:
    """Return the handle, outside of all graphs, that one of a graph stands for."""
    while graph is not None:
        pairs = getattr(graph, "captures", ())
        found = [outer for outer, inner in pairs if inner is handle]
        if not found:
            return handle
        handle, graph = found[0], getattr(graph, "outer_graph", None)
    return handle


def _follow(
    graph: Any, operations: Sequence[Any], reached: dict[int, Any]
) -> list[Any]:
    """Follow tensors through operations.

    Args:
        graph: of the operations.
        operations: in the order in which they were made.
        reached: the tensors, by identity; those that depend on them are added.

    Returns:
        The handles of variables to which was written what depends on them.
    """
    written: list[Any] = []
    for operation in operations:
        inputs, outputs = list(operation.inputs), list(operation.outputs)
        places = frozenset(i for i, t in enumerate(inputs) if id(t) in reached)
        if not places or operation.type.startswith(_COLLECTIVES):
            continue
        if operation.type in (*_CALLS, *_CHOICES, *_LOOPS):
            reaching, handles = _follow_call(graph, operation, places)
            reached.update((id(outputs[i]), outputs[i]) for i in reaching)
            written += [inputs[i] for i in handles]
            continue
        if operation.type == _SIDE_BY_SIDE:
            outputs = [outputs[i] for i in places]
        reached.update((id(each), each) for each in outputs)
        reads = operation.type.startswith(_READERS)
        if operation.type.startswith(_WRITERS) and not reads:
            written.append(inputs[0])
    return written


def _follow_call(
    graph: Any, operation: Any, places: frozenset[int]
) -> tuple[set[int], set[int]]:
    """Follow inputs of an operation that calls functions.

    FRAME/func_graph.py: the functions of a graph, by name.

    Returns:
        Which of its outputs depend on these inputs, and which of its inputs are handles
        of variables to which was written what does.
    """
    outputs = set(range(len(operation.outputs)))
    handles = {i for i, t in enumerate(operation.inputs) if t.dtype == tf.resource}
    skipped = 1 if operation.type in _CHOICES else 0
    bodies = [_graph_of(graph, name) for name in _functions_of(operation)]
    if None in bodies:
        return outputs, handles  # whatever is written may depend on it
    if skipped and 0 in places:
        return outputs, {i + skipped for i in _written_in(bodies)}
    inner = frozenset(i - skipped for i in places)
    if operation.type in _LOOPS:
        return _follow_loop(bodies, inner, outputs)
    found = [_follow_function(each, inner) for each in bodies]
    reaching = {i for each, _ in found for i in each}
    return reaching, {i + skipped for _, each in found for i in each}


def _written_in(bodies: Sequence[Any]) -> set[int]:
    """Return which inputs are handles of variables that functions write to at all."""
    found = (_follow_function(each, range(len(each.inputs))) for each in bodies)
    return {i for _, handles in found for i in handles}


def _follow_loop(
    bodies: Sequence[Any], places: frozenset[int], outputs: set[int]
) -> tuple[set[int], set[int]]:
    condition, body = bodies
    written: set[int] = set()
    while True:
        if _follow_function(condition, places)[0]:
            return outputs, _written_in([body])
        reaching, handles = _follow_function(body, places)
        written |= handles
        more = places | reaching
        if more == places:
            return set(places), written
        places = frozenset(more)


def _follow_function(graph: Any, places: Iterable[int]) -> tuple[set[int], set[int]]:
    """Follow inputs of a function; return places of outputs, and of handles."""
    inputs = list(graph.inputs)
    reached = {id(inputs[i]): inputs[i] for i in places}
    written = {id(each) for each in _follow(graph, graph.get_operations(), reached)}
    return (
        {i for i, t in enumerate(graph.outputs) if id(t) in reached},
        {i for i, t in enumerate(inputs) if id(t) in written},
    )


def called_by(graph: Any, operation: Any) -> list[Any]:
    """Return the graphs of the functions that an operation always calls."""
    names = _functions_of(operation) if operation.type in _CALLS else []
    found = [_graph_of(graph, name) for name in names]
    return [each for each in found if each is not None]


def _functions_of(operation: Any) -> list[str]:
    """Return the names of functions that it calls; of a loop the condition first."""
    names = {
        **dict.fromkeys(_CALLS, ("f",)),
        **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
        **dict.fromkeys(_LOOPS, ("cond", "body")),
    }.get(operation.type)
    if names is None:
        return [each.name for each in operation.get_attr("branches")]
    return [operation.get_attr(name).name for name in names]


def _graph_of(graph: Any, name: str) -> Any:
    while graph is not None:
        found = getattr(graph._get_function(name), "graph", None)
        if found is not None:
            return found
        graph = getattr(graph, "outer_graph", None)
    return None
