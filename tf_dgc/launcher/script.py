"""A worker that runs a script which knows nothing of this package.

    python -m tf_dgc.launcher.script SETTINGS [-m] SCRIPT [ARGUMENT ...]

The strategy is made and set, then the script runs as if Python had been given it.
"""

import importlib
import os
import runpy
import sys
import types
from collections.abc import Sequence

from tf_dgc.launcher import settings

_MIXED = (
    "tf-dgc-run --strategy has set a strategy for the whole script: make no other one "
    "in it, or leave out --strategy"
)


def set_strategy(chosen: settings.Settings) -> None:
    """Make the strategy and set it for all that this thread does.

    Raises:
        ValueError, TimeoutError, RuntimeError: see `tf_dgc.DenseStrategy`.
    """
    tf = importlib.import_module("tensorflow")
    strategies = importlib.import_module("tf_dgc.strategies")
    record = chosen.record()
    if chosen.strategy == "dense":
        strategy = strategies.DenseStrategy()
    elif chosen.strategy == "dgc":
        strategy = strategies.DGCStrategy(record)
    elif chosen.strategy == "downpour":  # does not come back in a server's task
        strategy = strategies.DownpourStrategy(record)
    else:
        strategy = strategies.ParameterAveragingStrategy(record)
    tf.distribute.experimental_set_strategy(strategy)


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
    if not sys.flags.safe_path:
        sys.path[0] = folder
    set_strategy(settings.of_text(text))
    run(script, arguments, module)


if __name__ == "__main__":
    main(sys.argv[1:])
