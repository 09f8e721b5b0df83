"""Tuners of KerasTuner, shared by workers as they are.

Of the workers that train a trial together the chief asks the oracle, and the others
follow. What a tuner writes goes into its folder on the chief, and elsewhere into one
that is removed.
"""

import atexit
import functools
import inspect
import logging
import os
import shutil
import sys
import tempfile
import types
import weakref
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.imported import when_imported
from tf_dgc.search import chief, groups
from tf_dgc.search.oracles import Book, Decider, Shared
from tf_dgc.transports.base import Transport
from tf_dgc.transports.local import LocalTransport

_logger = logging.getLogger("tf_dgc")
_LATE = (
    "This tuner was made before the strategy, so its trials would be others on each "
    "worker. Make the strategy before the tuner"
)
_CHIEF_ORACLE = (
    "The variable KERASTUNER_ORACLE_IP is set, by which tuners of one worker each "
    "share an oracle. Workers that train a trial together need none: unset it, or use "
    "`tf-dgc-run --trials` for several trials at once"
)


_NO_STRATEGY = (
    "The {workers} workers of each group train a trial together, which needs a "
    "strategy: give `tf-dgc-run --strategy`, or make one before the tuner. Received: a "
    "tuner of {own} worker(s)"
)


class _TunedProcess:
    """Part of this process in a search."""

    transport: Transport | None = None
    refusal = ""
    service: groups.Service | None = None
    made = 0  # tuners
    searched = False  # with all groups


_shared: weakref.WeakSet[Any] = weakref.WeakSet()  # tuners
_served: "weakref.WeakKeyDictionary[Any, groups.Hall]" = weakref.WeakKeyDictionary()


def install(transport: Transport | None = None, refusal: str = "") -> None:
    """Prepare KerasTuner for the workers of a strategy, when it is imported.

    Args:
        transport: between the workers.
        refusal: why they cannot share a tuner, or "".
    """
    _TunedProcess.transport, _TunedProcess.refusal = transport, refusal
    when_imported("keras_tuner", prepare)


@functools.cache
def prepare(module: types.ModuleType) -> None:
    """Let the tuners of KerasTuner look what this process is.

    Args:
        module: `keras_tuner`.
    """
    kind = module.engine.base_tuner.BaseTuner
    kind.__init__ = _making(kind.__init__)
    kind.search = _searching(kind.search)


def _making(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(tuner: Any, *args: Any, **kwargs: Any) -> None:
        _host.startup.prepare_now()  # a launcher's strategy comes first
        transport, place = _TunedProcess.transport or LocalTransport(), groups.place()
        if place is None and transport.size == 1 and not _TunedProcess.refusal:
            original(tuner, *args, **kwargs)
            return
        if _TunedProcess.refusal:
            raise ValueError(_TunedProcess.refusal)
        if os.environ.get("KERASTUNER_ORACLE_IP"):
            raise ValueError(_CHIEF_ORACLE)
        if place and place.group is not None and place.workers != transport.size:
            told = {"workers": place.workers, "own": transport.size}
            raise ValueError(_NO_STRATEGY.format(**told))
        number, _TunedProcess.made = _TunedProcess.made, _TunedProcess.made + 1
        given = signature.bind(tuner, *args, **kwargs)
        given.apply_defaults()
        if place is not None and place.group is None:
            original(tuner, *args, **kwargs)
            if _TunedProcess.service is None:
                _TunedProcess.service = groups.Service(place)
            _served[tuner] = _TunedProcess.service.add(Book(tuner))
            return
        follows = place is not None or transport.rank > 0
        files = {}
        if place is None:  # the others reload what the chief does
            files = chief.told(transport, {} if follows else _saved(given.arguments))
        if follows:
            given.arguments["directory"] = folder = _folder_for_now()
            given.arguments["overwrite"] = False
            _write(os.path.join(folder, _project(given.arguments)), files)
        original(*given.args, **given.kwargs)
        decider: Decider | None = None
        if transport.rank == 0:
            decider = Book(tuner) if place is None else groups.Client(place, number)
        Shared(tuner, transport, decider)
        _shared.add(tuner)

    return __init__


def _searching(original: Any) -> Any:
    @functools.wraps(original)
    def search(tuner: Any, *args: Any, **kwargs: Any) -> None:
        if tuner in _served:
            hall = _served[tuner]
            if "verbose" in kwargs:
                tuner.oracle.verbose = kwargs["verbose"]
            tuner.save()
            if not _TunedProcess.searched:
                _TunedProcess.searched = True
                hall.serve()
                return
            _logger.warning(
                "All groups have ended with the search before: this one runs here alone"
            )
        elif tuner not in _shared and _several():
            raise RuntimeError(_LATE)
        original(tuner, *args, **kwargs)
        if groups.place() is not None and tuner in _shared:
            _logger.info("The search has ended, and with it this group")
            sys.exit(0)

    return search


def _several() -> bool:
    """Tell whether a tuner of this process should be shared."""
    transport = _TunedProcess.transport
    return groups.place() is not None or (transport is not None and transport.size > 1)


def _project(arguments: dict[str, Any]) -> str:
    """Return the name of a tuner's project, as KerasTuner's BaseTuner has it."""
    return arguments["project_name"] or "untitled_project"


def _saved(arguments: dict[str, Any]) -> dict[str, str]:
    """Return what a tuner is going to reload: texts by names."""
    if arguments["overwrite"]:
        return {}
    folder = os.path.join(str(arguments["directory"] or "."), _project(arguments))
    found = {}
    for pattern in ("*.json", "trial_*/*.json"):
        for file in tf.io.gfile.glob(os.path.join(folder, pattern)):
            with tf.io.gfile.GFile(file) as stream:
                found[os.path.relpath(file, folder)] = stream.read()
    return found


def _write(folder: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as stream:
            stream.write(text)


def _folder_for_now() -> str:
    """Return a folder that is removed at the end of this process."""
    folder = tempfile.mkdtemp(prefix="tf_dgc-search-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
