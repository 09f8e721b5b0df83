"""Whether what a step computes is divided by the number of workers: read in its code.

Keras would divide some of its losses, and not others, before anybody can know what else
is added to them: all are right undivided, but where a step divides, or adds up rows.
"""

import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

_NAMES = {"num_replicas_in_sync", "compute_average_loss", "scale_regularization_loss"}
_OTHERS = ("keras", "tensorflow", "tf_dgc")


def is_left_to_keras(model: keras.Model, step: Any) -> bool:
    """Tell whether Keras is to divide the losses of a step.

    Args:
        model: of the user.
        step: the function of a method of the model.

    Returns:
        Whether the step, or a loss, divides something itself, or adds up rows.
    """
    if sums_of(model):
        return True
    first = [step, type(model).compute_loss, *_losses_of(model)]
    return any(_NAMES & set(code.co_names) for code in _codes(model, first))


def sums_of(model: keras.Model) -> list[Any]:
    """Return those losses of a model that are sums of rows."""
    found = [v for v in _losses_of(model) if not isinstance(v, keras.metrics.Metric)]
    sums = [each for each in found if getattr(each, "reduction", None) == "sum"]
    return list({id(each): each for each in sums}.values())


def _losses_of(model: keras.Model) -> list[Any]:
    return [*tf.nest.flatten(getattr(model, "loss", None)), *vars(model).values()]


def _codes(model: keras.Model, first: list[Any]) -> Iterator[types.CodeType]:
    """Yield the code of functions and of those that they name, but for libraries'."""
    waiting, seen = list(first), set()
    while waiting:
        function = _plain(waiting.pop())
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        cells = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        )
        for code in _nested(function.__code__):
            yield code
            for name in {*code.co_names, *code.co_freevars}:
                waiting.append(getattr(type(model), name, None))
                waiting.append(vars(model).get(name))
                waiting.append(function.__globals__.get(name))
                if name in cells:
                    waiting.append(_content(cells[name]))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _plain(thing: Any) -> types.FunctionType | None:
    """Return the function of a function of the user, if it is one."""
    thing = getattr(thing, "python_function", thing)
    thing = thing.fget if isinstance(thing, property) else thing
    thing = getattr(thing, "__func__", thing)
    if not isinstance(thing, types.FunctionType):
        return None
    module = thing.__module__ or ""
    return None if module.partition(".")[0] in _OTHERS else thing
