"""Looks whether private names are where they are expected, and says what is not."""

import contextlib
import dis
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

_HINT = (
    "tf_dgc needs {name}, which this version does not have: TensorFlow {tf}, Keras "
    "{keras}. Install versions that its setup.cfg allows, or report this."
)

if keras.config.backend() != "tensorflow":  # other backends lack other names, too
    raise ImportError(
        "tf_dgc distributes Keras over TensorFlow: Keras's backend must be "
        f"'tensorflow'. Received: keras.config.backend()={keras.config.backend()!r}, "
        "from the environment variable KERAS_BACKEND or ~/.keras/keras.json. Set "
        "KERAS_BACKEND=tensorflow before Keras is imported."
    )


def missing(name: str | None) -> ImportError:
    """Return an error that names what is not there, and the installed versions."""
    return ImportError(
        _HINT.format(name=name, tf=tf.__version__, keras=keras.__version__)
    )


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Say of a private module that cannot be imported what it is needed for."""
    try:
        yield
    except ImportError as error:
        raise missing(error.name) from error


def check(wanted: Iterable[tuple[Any, str]]) -> None:
    """Check that private names are where they are expected.

    Args:
        wanted: names, with the object or class that must have each, or whose methods
            set it.

    Raises:
        ImportError: one has moved; names it and the installed versions.
    """
    for owner, name in wanted:
        if not hasattr(owner, name) and not setters_of(owner, name):
            place = getattr(owner, "__name__", type(owner).__name__)
            raise missing(f"{place}.{name}")


def setters_of(owner: Any, name: str) -> list[tuple[type, str]]:
    """Return the methods of a class that set an attribute of its instances.

    To make an instance may start TensorFlow, which must not start before a strategy.
    """
    return [
        (each, method)
        for each in (owner.__mro__ if inspect.isclass(owner) else ())
        for method, function in vars(each).items()
        if inspect.isfunction(function)
        and _sets(inspect.unwrap(function).__code__, name)
    ]


def _sets(code: types.CodeType, name: str) -> bool:
    return name in code.co_names and any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for instruction in dis.get_instructions(code)
    )
