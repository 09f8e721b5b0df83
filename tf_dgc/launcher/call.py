"""A worker that calls a function; see `function.launch`.

    python -m tf_dgc.launcher.call FOLDER

FOLDER has what is to be called, and gets what was returned, or raised.
"""

import importlib
import json
import os
import pathlib
import pickle
import sys
import time
import traceback
from typing import Any, NamedTuple

CALL = "call"  # file of a `FunctionCall`


class FunctionCall(NamedTuple):
    """A function that all workers call, with its arguments."""

    function: Any
    args: tuple[Any, ...]
    settings: str  # of the strategy, as `settings.Settings.text`; "" for none


class Outcome(NamedTuple):
    """Outcome of the call on one worker.

    Attributes:
        value: what was returned.
        error: what was raised; None where it cannot be carried.
        trace: the traceback as text; "" where nothing was raised.
        when: in seconds since 1970.
        too: whether that was for the error of another worker.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    when: float = 0.0
    too: bool = False


def file_of(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Return the file of a worker's outcome."""
    return folder / f"outcome-{rank}"


def _write(folder: pathlib.Path, outcome: Outcome) -> None:
    cloudpickle = importlib.import_module("cloudpickle")
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    path = file_of(folder, rank)
    part = path.with_suffix(".part")
    try:
        carried = cloudpickle.dumps(tuple(outcome))
        if outcome.trace:
            cloudpickle.loads(carried)  # some errors can be written, and not read
        part.write_bytes(carried)
    except Exception as error:  # whatever a value's own code raises
        if not outcome.trace:
            raise TypeError(
                "What a function returns to tf_dgc.launch must be such that pickle can "
                f"carry it. Received: {type(outcome.value).__name__}: {error}"
            ) from error
        part.write_bytes(cloudpickle.dumps(tuple(outcome._replace(error=None))))
    part.replace(path)


def main(folder: pathlib.Path) -> None:
    """Call the function, and write what comes of it."""
    cloudpickle = importlib.import_module("cloudpickle")
    path, todo = pickle.loads((folder / CALL).read_bytes())
    sys.path[:] = [*path, *(each for each in sys.path if each not in path)]
    call = FunctionCall(*cloudpickle.loads(todo))
    script = importlib.import_module("tf_dgc.launcher.script")
    settings = importlib.import_module("tf_dgc.launcher.settings")
    try:
        if call.settings:
            script.set_strategy(settings.of_text(call.settings))
        _write(folder, Outcome(call.function(*call.args)))
    except BaseException as error:
        _write(folder, _failed(error))
        sys.excepthook = lambda *_: None  # who has launched it tells
        raise


def _failed(error: BaseException) -> Outcome:
    if "tensorflow" not in sys.modules:  # nor is it loaded to tell of an error
        here = error.__traceback__
        own = error.with_traceback(here and here.tb_next)
        trace = "".join(traceback.format_exception(own))
        return Outcome(None, own.with_traceback(None), trace, time.time())
    tracebacks = importlib.import_module("tf_dgc._host.tracebacks")
    short = tracebacks.brief(error)
    trace = "".join(traceback.format_exception(short))
    too = tracebacks.of_another(error) is not None
    return Outcome(None, short.with_traceback(None), trace, time.time(), too)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
