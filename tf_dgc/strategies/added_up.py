"""Variables of metrics that do not add up over workers, found where a step writes them.

What N workers keep of a metric is summed when it is read. That is what one process has
where each step adds a sum over rows; not of a maximum, of a last value or a moving
mean, nor of a count of steps.
"""

from collections.abc import Sequence
from typing import Any

import keras

from tf_dgc import _host
from tf_dgc._host.operations import Write
from tf_dgc.strategies.known import CONSTANT, COUNT, NUMBER, SUM
from tf_dgc.strategies.readings import Reading

_SAME = {"Identity", "Cast", "EnsureShape", "Reshape"}
_SUMS = {"AddV2", "Add", "AddN"}
_ADD_UP = {(SUM, 0), (COUNT, 0)}


def others(
    model: keras.Model, writes: Sequence[Write], reading: Reading
) -> list[tuple[str, str]]:
    """Return names of metrics, and of those variables of theirs that do not add up.

    Args:
        model: whose metrics are meant, but for those of Keras itself, which are known.
        writes: of a step.
        reading: of it.
    """
    by_handle = {id(write.handle): write for write in writes}
    found = []
    for metric in _host.keras.metrics_within(model):
        if type(metric).update_state.__module__.startswith("keras."):
            continue
        for variable in metric.variables:
            if getattr(variable, "aggregation", "sum") != "sum":
                continue
            handle = _host.keras.component_of(variable).handle
            write = by_handle.get(id(handle))
            if write is not None and not _adds_up(write, reading):
                found.append((metric.name, variable.name))
    return found


def of_met_rows(
    model: keras.Model, writes: Sequence[Write], reading: Reading
) -> list[str]:
    """Return names of metrics to which rows were given that sums over rows went into.

    Args:
        model: whose metrics are meant, but for means of numbers, which are told apart.
        writes: of a step.
        reading: of it.
    """
    by_handle = {id(write.handle): write for write in writes}
    found = []
    for metric in _host.keras.metrics_within(model):
        wrapped = isinstance(metric, keras.metrics.MeanMetricWrapper)
        if isinstance(metric, keras.metrics.Mean) and not wrapped:
            continue
        if hasattr(metric, "metrics"):
            continue  # these are named themselves
        handles = [_host.keras.component_of(v).handle for v in metric.variables]
        own = [by_handle[id(each)] for each in handles if id(each) in by_handle]
        added = [_added(w.value, w.handle) if not w.adds else [w.value] for w in own]
        if any(reading.of(each).nested for values in added for each in values or []):
            found.append(metric.name)
    return found


def counters(
    model: keras.Model, writes: Sequence[Write], reading: Reading
) -> list[str]:
    """Return names of variables to which a number of this worker's rows was added.

    Args:
        model: whose variables are meant, but for those of metrics and Keras's layers.
        writes: of a step.
        reading: of it.
    """
    if reading.static in (None, 1):
        return []
    kept = {id(v.handle): v for v in _host.keras.kept_by_users(model)}
    found = []
    for write in writes:
        variable = kept.get(id(write.handle))
        if variable is None:
            continue
        added = [write.value] if write.adds else _added(write.value, write.handle)
        constants = [e for e in added or [] if reading.of(e).kind == CONSTANT]
        if any(map(reading.shapes.counts, constants)):
            found.append(variable.name)
    return found


def _adds_up(write: Write, reading: Reading) -> bool:
    added = [write.value] if write.adds else _added(write.value, write.handle)
    if added is None or any(_depends(each, write.handle) for each in added):
        return False
    return all(_is_of_rows(each, reading) for each in added)


def _added(value: Any, handle: Any) -> list[Any] | None:
    """Return what is added to a variable; None where something else is done to it."""
    if _host.operations.reads_of(value, handle):
        return []
    operation = _host.operations.of(value)
    if operation is None:
        return None
    if operation.kind in _SAME or operation.kind == "Sub":
        first = _added(operation.inputs[0], handle)
        more = operation.inputs[1:] if operation.kind == "Sub" else []
        return None if first is None else [*first, *more]
    if operation.kind not in _SUMS:
        return None
    old = [each for each in operation.inputs if _depends(each, handle)]
    first = _added(old[0], handle) if len(old) == 1 else None
    new = [each for each in operation.inputs if each is not old[0]] if old else []
    return None if first is None else [*first, *new]


def _depends(tensor: Any, handle: Any) -> bool:
    """Tell whether a tensor was computed of what a variable had."""
    waiting, seen = [tensor], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if _host.operations.reads_of(each, handle):
            return True
        operation = _host.operations.of(each)
        waiting.extend([] if operation is None else operation.inputs)
    return False


def _is_of_rows(tensor: Any, reading: Reading) -> bool:
    """Tell whether a number may be a sum over rows; what nobody can tell may be."""
    known = reading.of(tensor)
    if known.kind == CONSTANT:
        return reading.shapes.may_count(tensor)
    if known.kind != NUMBER or tensor.shape.rank != 0:
        return True
    if known.terms is None or known.terms <= _ADD_UP:
        return known.terms is not None
    operation = _host.operations.of(tensor)  # maybe a mean times the number of rows
    times = operation.inputs if operation and operation.kind == "Mul" else []
    constants = [each for each in times if reading.of(each).kind == CONSTANT]
    return any(map(reading.shapes.may_count, constants))
