"""Deep Gradient Compression for Keras and TensorFlow, over ordinary networks.

Names are fetched when they are first used: what needs no TensorFlow, such as
`tf_dgc.run`, starts without it. With the first strategy comes a check that this
TensorFlow and this Keras have what is needed.
"""

import importlib as _importlib
import typing as _typing

from tf_dgc.version import __version__

if _typing.TYPE_CHECKING:
    from tf_dgc import callbacks, layers, search, simulate, transports
    from tf_dgc.config import AveragingConfig, DGCConfig, DownpourConfig
    from tf_dgc.exchanges.figures import RoundStats, StepStats, TensorStats
    from tf_dgc.launcher.function import launch
    from tf_dgc.layers import joined, split_dense
    from tf_dgc.strategies import (
        AutoStrategy,
        DenseStrategy,
        DGCStrategy,
        DownpourStrategy,
        ParameterAveragingStrategy,
    )

__all__ = [
    "AutoStrategy",
    "AveragingConfig",
    "DGCConfig",
    "DGCStrategy",
    "DenseStrategy",
    "DownpourConfig",
    "DownpourStrategy",
    "ParameterAveragingStrategy",
    "RoundStats",
    "StepStats",
    "TensorStats",
    "__version__",
    "callbacks",
    "joined",
    "launch",
    "layers",
    "search",
    "simulate",
    "split_dense",
    "transports",
]

_ORIGINS = {
    "AutoStrategy": "strategies",
    "AveragingConfig": "config",
    "DGCConfig": "config",
    "DGCStrategy": "strategies",
    "DenseStrategy": "strategies",
    "DownpourConfig": "config",
    "DownpourStrategy": "strategies",
    "ParameterAveragingStrategy": "strategies",
    "RoundStats": "exchanges.figures",
    "StepStats": "exchanges.figures",
    "TensorStats": "exchanges.figures",
    "joined": "layers",
    "launch": "launcher.function",
    "split_dense": "layers",
}
_MODULES = (
    "callbacks",
    "config",
    "layers",
    "search",
    "simulate",
    "strategies",
    "transports",
)


def __getattr__(name: str) -> _typing.Any:
    """Import what has the name, once."""
    if name in _ORIGINS:
        origin = _importlib.import_module(f"tf_dgc.{_ORIGINS[name]}")
        return globals().setdefault(name, getattr(origin, name))
    if name in _MODULES:
        return _importlib.import_module(f"tf_dgc.{name}")
    raise AttributeError(f"module 'tf_dgc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
