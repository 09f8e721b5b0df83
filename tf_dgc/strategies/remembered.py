"""Memory of Keras's callbacks from epoch to epoch, as arrays of a file.

The logs of the epochs so far belong to it, and whether training was to stop. And of
which variables the optimizers of a model have slots, as Keras loads only those
of optimizers that are built. No pickle; what is read is data, and checked.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tf_dgc import _host
from tf_dgc.exchanges import state_files
from tf_dgc.strategies import fits
from tf_dgc.transports import handshake

TEXT = "remembered"
# Which older files do not have.
_OF_FIT = "epochs", "logs", "stopped", "steps", "sizes", "kinds"


class Remembered(NamedTuple):
    """Content of a file."""

    callbacks: list[dict[str, Any]]
    optimizers: list[list[int] | None]  # indices of variables of the model
    epochs: Sequence[int] = ()  # that have ended
    logs: Mapping[str, Sequence[float | None]] = {}  # of these epochs, by name
    stopped: bool = False  # whether a callback has stopped training
    steps: int | None = None  # of an epoch, where that is known
    sizes: Sequence[int] = ()  # of the sources of the data, as far as they are known
    kinds: Sequence[str] | None = None  # names of the optimizers' classes


def arrays_of(callbacks: Iterable[Any], model: keras.Model) -> dict[str, np.ndarray]:
    """Return what callbacks remember, by name; a text among it tells the rest."""
    arrays, entries = {}, []
    for i, callback in enumerate(_known(callbacks)):
        names = _host.keras.remembered_by(callback)
        best = getattr(callback, "best_weights", None)
        entries.append(
            {
                "class": type(callback).__name__,
                "fields": {name: _plain(getattr(callback, name)) for name in names},
                "best_weights": best is not None,
            }
        )
        for j, array in enumerate(best or []):
            arrays[f"best.{i}.{j}"] = portable(array)
    epochs, logs = _history_of(callbacks)
    told = {
        "callbacks": entries,
        "optimizers": _slots_of(model),
        "epochs": epochs,
        "logs": logs,
        "stopped": bool(getattr(model, "stop_training", False)),
        "steps": _steps_of(callbacks),
        "sizes": sizes_now(),
        "kinds": _kinds_of(model),
    }
    arrays[TEXT] = np.frombuffer(json.dumps(told).encode(), np.uint8)
    return arrays


def read(path: pathlib.Path, model: keras.Model) -> Remembered:
    """Read the text of a file, and check it.

    Raises:
        ValueError: it is damaged, or of another model; names file and field.
    """
    text = state_files.read_arrays(path, {TEXT: None})[TEXT].tobytes()
    told = handshake.read_object(text, f"{path}: field {TEXT!r}")
    try:
        found = Remembered(
            told["callbacks"],
            told["optimizers"],
            **{name: told[name] for name in _OF_FIT if name in told},
        )
        for entry in found.callbacks:
            kinds = type(entry["class"]), type(entry["best_weights"])
            fields = entry["fields"].values()
            if kinds != (str, bool) or not all(map(_is_plain, fields)):
                raise ValueError(f"an entry is {entry}")
        count = len(model.variables)
        for indices in found.optimizers:
            for i in indices or []:
                if type(i) is not int or not 0 <= i < count:
                    raise ValueError(f"indices are {indices}")
        _check_history(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: field {TEXT!r} is damaged, or of another model: "
            + ascii(str(error))[1:-1][:300]
        ) from None
    # Those with as many slots as each other would take them for their own.
    here = _kinds_of(model)
    if found.kinds is not None and found.kinds != here:
        there = ascii(found.kinds)[:300]
        raise ValueError(
            f"{path}: of another optimizer: {there} in it, and {here} here"
        )
    return found


def build_optimizers(found: Remembered, model: keras.Model) -> None:
    """Build optimizers as they were, so that their slots can be loaded."""
    variables = model.variables
    optimizers = _host.keras.optimizers_of(model)
    for optimizer, indices in zip(optimizers, found.optimizers, strict=False):
        if indices and not optimizer.built:
            optimizer.build([variables[i] for i in indices])


def _kinds_of(model: keras.Model) -> list[str]:
    return [type(each).__name__ for each in _host.keras.optimizers_of(model)]


def _check_history(found: Remembered) -> None:
    values = [value for log in found.logs.values() for value in log]
    whole = all(type(epoch) is int and epoch >= 0 for epoch in found.epochs)
    flags = type(found.stopped) is bool and type(found.steps) in (int, type(None))
    whole = whole and all(type(size) is int for size in found.sizes)
    whole = whole and all(type(kind) is str for kind in found.kinds or [])
    if not whole or not all(map(_is_plain, values)) or not flags:
        raise ValueError(f"logs of epochs {found.epochs} are {found.logs}")


def _steps_of(callbacks: Iterable[Any]) -> int | None:
    """Return how many steps an epoch of the `fit` of callbacks has."""
    told = [(getattr(each, "params", None) or {}).get("steps") for each in callbacks]
    return next((int(steps) for steps in told if steps), None)


def sizes_now() -> list[int]:
    """Return how many rows the sources have of the data of the `fit` that runs."""
    run = fits.current()
    return [] if run is None else list(run.sizes)


def restore(
    path: pathlib.Path,
    found: Remembered,
    callbacks: Iterable[Any],
    model: keras.Model,
) -> None:
    """Let callbacks remember what those of the same class did, in their order.

    Raises:
        ValueError: what they remember is damaged; names file and field.
    """
    for history in _histories(callbacks) if found.epochs else []:
        history.epoch = list(found.epochs)
        history.history = {name: list(log) for name, log in found.logs.items()}
    left = list(enumerate(found.callbacks))
    shapes = [list(v.shape) for v in model.weights]
    for callback in _known(callbacks):
        name = type(callback).__name__
        same = [item for item in left if item[1]["class"] == name]
        if not same:
            continue
        left.remove(same[0])
        i, entry = same[0]
        for field in _host.keras.remembered_by(callback):
            if field in entry["fields"]:
                setattr(callback, field, entry["fields"][field])
        if entry["best_weights"] and hasattr(callback, "best_weights"):
            wanted = {f"best.{i}.{j}": shape for j, shape in enumerate(shapes)}
            arrays = state_files.read_arrays(path, wanted)
            callback.best_weights = list(arrays.values())


def _histories(callbacks: Iterable[Any]) -> list[Any]:
    """Return those that a `fit` has begun."""
    histories = [c for c in callbacks if isinstance(c, keras.callbacks.History)]
    return [history for history in histories if hasattr(history, "epoch")]


def _history_of(
    callbacks: Iterable[Any],
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Return epochs that have ended, and of their logs what are numbers."""
    for history in _histories(callbacks):
        logs = {
            str(name): [_plain(value) for value in log]
            for name, log in history.history.items()
            if all(_is_plain(value) or np.ndim(value) == 0 for value in log)
        }
        return list(map(int, history.epoch)), logs
    return [], {}


def _known(callbacks: Iterable[Any]) -> list[Any]:
    own = [getattr(callback, "on_chief", callback) for callback in callbacks]
    return [callback for callback in own if _host.keras.remembered_by(callback)]


def _plain(value: Any) -> Any:
    return value if _is_plain(value) else float(value)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float)


def portable(array: Any) -> np.ndarray:
    """Return an array in a type that NumPy has by itself, of the same values."""
    array = np.asarray(array)
    if array.dtype.kind in "fiu":
        return array
    return array.astype(np.uint8 if array.dtype.kind == "b" else np.float32)


def _slots_of(model: keras.Model) -> list[list[int] | None]:
    place = {id(variable): i for i, variable in enumerate(model.variables)}
    found: list[list[int] | None] = []
    for optimizer in _host.keras.optimizers_of(model):
        own: Sequence[Any] = (
            _host.keras.variables_of(optimizer) if optimizer.built else []
        )
        known = all(id(variable) in place for variable in own)
        found.append([place[id(v)] for v in own] if own and known else None)
    return found
