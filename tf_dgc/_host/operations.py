"""Operations by which a tensor was computed, in a graph or eagerly, and once more."""

import contextlib
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc._host import flow, probe
from tf_dgc._host import tensorflow as host

with probe.imports():
    from tensorflow.python.framework import op_callbacks


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    return [
        (op_callbacks, "add_op_callback"),
        (op_callbacks, "remove_op_callback"),
    ]


probe.check(wanted())

_PATCHES = "/tf_dgc/_host/patches.py"
_LIBRARIES = ("/tensorflow/", "/keras/", "/tf_dgc/")


class Operation(NamedTuple):
    """One operation.

    Attributes:
        kind: its type, as "Sum".
        inputs: tensors.
        attributes: returns the attribute of a name.
        output: index of the tensor among the outputs.
        line: of the user's code, file and number; empty where nobody knows.
    """

    kind: str
    inputs: Sequence[Any]
    attributes: Callable[[str], Any]
    output: int
    line: Callable[[], str]


class Write(NamedTuple):
    """One assignment to a variable.

    Attributes:
        handle: of the variable, outside of all graphs.
        value: that is assigned, or added.
        adds: whether it is added.
    """

    handle: Any
    value: Any
    adds: bool


_WRITES = {"AssignVariableOp": False, "AssignAddVariableOp": True}
_running = threading.local()


@contextlib.contextmanager
def recorded() -> Iterator[Callable[[], list[Write]]]:
    """Keep the operations that are run eagerly, for `of`.

    Yields:
        What returns the assignments since.
    """
    if not tf.executing_eagerly():
        graph: Any = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield lambda: list(_writes(graph, first))
        return
    before = getattr(_running, "found", None), getattr(_running, "marks", None)
    found: dict[int, Any] = {}
    writes: list[Write] = []

    def note(
        kind: Any,
        inputs: Any,
        attributes: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        if graph is None:
            kind = kind.decode() if isinstance(kind, bytes) else kind
            for i, output in enumerate(outputs):
                found[id(output)] = output, kind, tuple(inputs), attributes, i
            if kind in _WRITES:
                writes.append(Write(inputs[0], inputs[1], _WRITES[kind]))

    _running.found, _running.marks = found, {}
    op_callbacks.add_op_callback(note)
    try:
        yield lambda: writes
    finally:
        op_callbacks.remove_op_callback(note)
        _running.found, _running.marks = before


def _writes(graph: Any, first: int = 0) -> Iterator[Write]:
    """Yield the assignments of a graph, and of the functions that it calls.

    Args:
        graph: of a step.
        first: number of operations that came before.
    """
    for each in graph.get_operations()[first:]:
        if each.type in _WRITES:
            handle = flow.outside(graph, each.inputs[0])
            yield Write(handle, each.inputs[1], _WRITES[each.type])
        for called in flow.called_by(graph, each):
            yield from _writes(called)


def mark(tensor: Any, mark: int) -> None:
    """Remember something of an eager tensor, as long as operations are recorded."""
    if (marks := getattr(_running, "marks", None)) is not None:
        marks[id(tensor)] = tensor, mark


def mark_of(tensor: Any) -> int:
    """Return what is remembered of an eager tensor, or 0."""
    marks = getattr(_running, "marks", None) or {}
    return marks.get(id(tensor), (tensor, 0))[1]


def of(tensor: Any) -> Operation | None:
    """Return the operation of a tensor; None where none is known."""
    if hasattr(tensor, "numpy"):
        entry = (getattr(_running, "found", None) or {}).get(id(tensor))
        if entry is None:
            return None
        _, kind, inputs, attributes, index = entry
        found = dict(zip(attributes[::2], attributes[1::2], strict=False))
        return Operation(kind, inputs, found.__getitem__, index, lambda: "")
    operation = tensor.op
    return Operation(
        operation.type,
        operation.inputs,
        operation.get_attr,
        tensor.value_index,
        lambda: _line_of(operation.traceback or ()),
    )


def own_line() -> str:
    """Return the line of the user's code that runs; empty where there is none."""
    frame: Any = inspect.currentframe()
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_own(name: str) -> bool:
    """Tell whether a file is a user's."""
    name = name.replace("\\", "/")
    return not any(part in name for part in _LIBRARIES) and not name.startswith("<")


def line_in(error: BaseException) -> str:
    """Return the line of the user's code where an error came up, or ""."""
    return _line_of(traceback.extract_tb(error.__traceback__))


def called_by_library() -> bool:
    """Tell whether TensorFlow or Keras, not a user's script, asks this package."""
    frame: Any = inspect.currentframe()
    while frame is not None and "/tf_dgc/" in frame.f_code.co_filename:
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    return any(part in name for part in _LIBRARIES)


def is_of_user() -> bool:
    """Tell whether a script, not Keras or this package, calls TensorFlow now."""
    frame: Any = inspect.currentframe()
    for part in ("/tf_dgc/", "/tensorflow/"):
        while frame is not None and part in frame.f_code.co_filename:
            frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    return not any(part in name for part in _LIBRARIES)


def asks_for_user() -> bool:
    """Tell whether a script itself has called what runs in the place of a function."""
    frame: Any = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.endswith(_PATCHES):
        frame = frame.f_back
    frame = None if frame is None else frame.f_back
    return frame is not None and _is_own(frame.f_code.co_filename)


def _line_of(frames: Sequence[Any]) -> str:
    for frame in reversed(list(frames)):
        if _is_own(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def reads_of(tensor: Any, handle: Any) -> bool:
    """Tell whether a tensor is what a variable had, by its handle outside of graphs."""
    operation = of(tensor)
    if operation is None or operation.kind != "ReadVariableOp":
        return False
    own = operation.inputs[0]
    return (own if hasattr(own, "numpy") else flow.outside(own.graph, own)) is handle


def again(operation: Operation, inputs: Sequence[Any]) -> Any:
    """Run an operation with other inputs, of the same types; return its output."""
    function, names, counts, attributes = _signature(operation.kind)
    values, waiting = [], list(inputs)
    for count in counts:
        size = 1 if count is None else len(inputs) - len(counts) + 1
        part, waiting = waiting[:size], waiting[size:]
        values.append(part if count is not None else part[0])
    given = {name: operation.attributes(name) for name in attributes}
    found = function(**dict(zip(names, values, strict=True)), **given)
    parts = tf.nest.flatten(found)
    return parts[operation.output]


@functools.cache
def _signature(kind: str) -> tuple[Any, list[str], list[str | None], list[str]]:
    """Return the function of `tf.raw_ops`, and the names of what it takes.

    The public functions name some inputs otherwise than the definitions do.
    """
    function, definition = getattr(tf.raw_ops, kind), host.op_def(kind)
    parameters = list(inspect.signature(function).parameters)
    inferred, counts = set(), []
    for each in definition.input_arg:
        inferred |= {each.type_attr, each.number_attr, each.type_list_attr}
        counts.append(each.number_attr or None)
    if sum(count is not None for count in counts) > 1:
        raise NotImplementedError(f"{kind} takes several lists of tensors")
    names = parameters[: len(counts)]
    attributes = [
        each.name
        for each in definition.attr
        if each.name not in inferred and each.name in parameters
    ]
    return function, names, counts, attributes
