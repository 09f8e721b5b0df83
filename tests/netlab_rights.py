"""Whether this machine can have the hosts of scripts/netlab.py."""

import functools
import importlib
import sys
import types
import unittest

from launch import ROOT


@functools.cache
def _laboratory() -> tuple[types.ModuleType, str]:
    """Return the module, and why there can be no laboratory here, or nothing."""
    sys.path.insert(0, str(ROOT / "scripts"))
    netlab = importlib.import_module("netlab")
    try:
        with netlab.Laboratory(2, "1gbit") as lab:
            failed = lab.run(["true"], launch="tf_config")
            return netlab, "a host runs no commands" if failed else ""
    except netlab.LabError as error:
        return netlab, str(error)


def skip_without_laboratory() -> types.ModuleType:
    """Return scripts/netlab.py, or skip the test where it has no rights."""
    netlab, why = _laboratory()
    if why:
        raise unittest.SkipTest(f"no laboratory here: {why}")
    return netlab
