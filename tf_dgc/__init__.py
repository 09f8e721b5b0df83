"""Deep Gradient Compression for Keras and TensorFlow, over ordinary networks."""

from tf_dgc import callbacks, simulate, transports
from tf_dgc.averaging_strategy import ParameterAveragingStrategy
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.state import RoundStats, StepStats, TensorStats
from tf_dgc.strategy import DenseStrategy, DGCStrategy
from tf_dgc.version import __version__

__all__ = [
    "AveragingConfig",
    "DGCConfig",
    "DGCStrategy",
    "DenseStrategy",
    "ParameterAveragingStrategy",
    "RoundStats",
    "StepStats",
    "TensorStats",
    "__version__",
    "callbacks",
    "simulate",
    "transports",
]
