"""A worker that runs a script which knows nothing of this package.

    python -m tf_dgc.launcher.script SETTINGS [-m] SCRIPT [ARGUMENT ...]

SETTINGS are `-` where the script makes its strategy itself.
The script runs as if Python had been given it. The strategy is made and set when it
first uses TensorFlow, so that it may configure TensorFlow before (`tf.config`).
"""

import atexit
import importlib
import json
import logging
import os
import pathlib
import random
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

from tf_dgc.imported import when_imported
from tf_dgc.launcher import settings

_PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep
_MIXED = (
    "tf-dgc-run --strategy has set a strategy for the whole script: make no other one "
    "in it, or leave out --strategy"
)


_UNUSED = (
    "The script has run no operation of TensorFlow, so --strategy has done nothing: "
    "each worker ran by itself"
)
_ALL_RUN = (
    "All workers run the whole script, so another one may have made it already: call "
    "`os.makedirs(..., exist_ok=True)`, or make it on one worker only"
)
_NO_INPUT = (
    "Workers of tf-dgc-run have no standard input: give the script arguments, or a "
    "file, in the place of `input()`"
)
_logger = logging.getLogger("tf_dgc")


class Pending:
    """A strategy that is made and set when it is first needed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """Take what makes the strategy."""
        self._make, self._process = make, os.getpid()
        self._thread = threading.current_thread()
        self._lock, self._making = threading.Lock(), False
        self._strategy: Any = None
        self._error: BaseException | None = None
        self._set = False

    def settle(self) -> bool:
        """Make the strategy, and set it in the thread that made this object.

        Returns:
            Whether it is set. A child of this process is no worker, and gets none.
        """
        if os.getpid() != self._process:
            return True
        if self._making:  # what makes it uses TensorFlow, in threads of its own, too
            return False
        with self._lock:
            if self._set:
                return True
            if self._error is not None:
                raise RuntimeError(
                    f"tf-dgc-run --strategy could not make the strategy: {self._error}"
                ) from self._error
            if self._strategy is None:
                self._strategy = self._made()
            if threading.current_thread() is not self._thread:
                return False
            self._set = True
        tf = importlib.import_module("tensorflow")
        tf.distribute.experimental_set_strategy(self._strategy)
        return True

    def _made(self) -> Any:
        self._making = True
        try:
            return self._make()
        except BaseException as error:
            self._error = error  # for those who go on after it
            raise
        finally:
            self._making = False

    def warn_if_unused(self) -> None:
        """Warn where the strategy was never needed, at the end of the process."""
        failed = isinstance(getattr(sys, "last_value", None), BaseException)
        if self._strategy is None and self._error is None and not failed:
            _logger.warning(_UNUSED)


def set_strategy(chosen: settings.Settings) -> None:
    """Let the strategy be made and set when this process first uses TensorFlow.

    A parameter server makes it at once, and serves.

    Raises:
        ValueError, TimeoutError, RuntimeError: see `tf_dgc.DenseStrategy`; by what uses
            TensorFlow first.
    """
    strategies = importlib.import_module("tf_dgc.strategies")
    startup = importlib.import_module("tf_dgc._host.startup")
    random.seed(chosen.seed)
    importlib.import_module("numpy").random.seed(chosen.seed)
    record: Any = chosen.record()

    def make() -> Any:
        if chosen.strategy == "auto":
            own = {"dgc": record.dgc, "averaging": record.averaging}
            return strategies.AutoStrategy(record.allow, **own)
        if chosen.strategy == "dense":
            return strategies.DenseStrategy()
        if chosen.strategy == "dgc":
            return strategies.DGCStrategy(record)
        if chosen.strategy == "downpour":  # does not come back in a server's task
            return strategies.DownpourStrategy(record)
        return strategies.ParameterAveragingStrategy(record)

    pending = Pending(make)
    if _is_server():
        pending.settle()
        return
    startup.before_first_use(pending.settle)
    # A script may fetch its data before it uses TensorFlow.
    importlib.import_module("tf_dgc.strategies.patches").fetch_whole_files()
    if not importlib.import_module("tf_dgc._host.tensorflow").tensorflow_has_started():
        atexit.register(pending.warn_if_unused)


def _share_tuners(keras_tuner: types.ModuleType) -> None:
    importlib.import_module("tf_dgc.search.tuners").prepare(keras_tuner)


def _is_server() -> bool:
    try:
        return json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps"
    except (KeyError, TypeError, ValueError):  # told by the strategy
        return False


def run(script: str, arguments: Sequence[str], module: bool = False) -> None:
    """Run a script, or a module, as Python does: as `__main__`, with its arguments."""
    sys.argv = [script, *arguments]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            _run_file(script)
    except RuntimeError as error:
        if "Mixing different tf.distribute.Strategy" in str(error):
            error.add_note(_MIXED)
        raise
    except FileExistsError as error:
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        if not last.f_code.co_filename.startswith(_PACKAGE):
            error.add_note(_ALL_RUN)
        raise
    except EOFError as error:
        if sys.stdin is None or not sys.stdin.isatty():
            error.add_note(_NO_INPUT)
        raise


def find_first(folder: str) -> None:
    """Let the modules of a folder be found first, as Python does for a script's."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)


def _run_file(path: str) -> None:
    # Not by runpy: it takes the module away again, which functions may still need when
    # this process ends, and what unpickles them looks into `__main__`.
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, vars(main))


def main(argv: Sequence[str]) -> None:
    """Set the strategy and run the script."""
    text, *rest = argv
    module = rest[:1] == ["-m"]
    script, *arguments = rest[module:]
    folder = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    find_first(folder)
    when_imported("keras_tuner", _share_tuners)
    if text != settings.NO_STRATEGY:
        set_strategy(settings.of_text(text))
    run(script, arguments, module)


if __name__ == "__main__":
    main(sys.argv[1:])
