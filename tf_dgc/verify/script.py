"""A process that runs a script until the first steps of its first `fit` are recorded.

    python -m tf_dgc.verify.script SETTINGS [-m] SCRIPT [ARGUMENT ...]

SETTINGS is a JSON object: `path`, of the record; `steps`, to record; `workers`, whether
the strategy is set, for one of several.
"""

import importlib
import json
import os
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_dgc.launcher import script, settings

_OURS = ("DGCStrategy", "DenseStrategy", "ParameterAveragingStrategy")
_SEED = 1


def main(argv: Sequence[str]) -> int:
    """Run the script; return the exit status: 3 where it has called no `fit`."""
    text, *rest = argv
    told = json.loads(text)
    module = rest[:1] == ["-m"]
    name, *arguments = rest[module:]
    folder = os.getcwd() if module else os.path.dirname(os.path.realpath(name))
    script.find_first(folder)
    recording = importlib.import_module("tf_dgc.verify.recording")
    quiet = importlib.import_module("tf_dgc.verify.quiet")
    if told["workers"]:
        script.set_strategy(settings.Settings("dense", {}))
    _keep_to_dense()
    quiet.switch_off()
    rank = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank = rank.get("task", {}).get("index", 0)
    path = pathlib.Path(f"{told['path']}-{rank}")
    recording.Recorder(path, told["steps"]).install()
    _seed()
    try:
        script.run(name, arguments, module)
    except recording.Enough:
        return 0
    except SystemExit as end:
        if isinstance(end.code, str) or end.code:
            raise
    return 0 if path.with_suffix(".json").exists() else NO_FIT


NO_FIT = 3


def _keep_to_dense() -> None:
    """Let strategies that the script makes be the one that is set, or dense."""
    tf = importlib.import_module("tensorflow")
    package = importlib.import_module("tf_dgc")
    dense = package.DenseStrategy
    made: list[Any] = []
    present = tf.distribute.get_strategy()
    if isinstance(present, dense):
        made.append(present)

    def strategy(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(dense())
        return made[0]

    for name in _OURS:
        setattr(package, name, strategy)


def _seed() -> None:
    random.seed(_SEED)
    np.random.seed(_SEED)
    importlib.import_module("keras").utils.set_random_seed(_SEED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
