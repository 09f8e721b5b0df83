"""The tf.distribute strategies: one replica in each process."""

from tf_dgc.strategies.auto import AutoStrategy
from tf_dgc.strategies.averaging import ParameterAveragingStrategy
from tf_dgc.strategies.base import BaseStrategy, DenseStrategy
from tf_dgc.strategies.dgc import DGCStrategy
from tf_dgc.strategies.downpour import DownpourStrategy

__all__ = [
    "AutoStrategy",
    "BaseStrategy",
    "DGCStrategy",
    "DenseStrategy",
    "DownpourStrategy",
    "ParameterAveragingStrategy",
]
