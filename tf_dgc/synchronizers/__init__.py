"""What is done with gradients between their computation and their use."""

from tf_dgc.synchronizers.averaging import ParameterAveraging
from tf_dgc.synchronizers.base import Exchanged, Synchronizer
from tf_dgc.synchronizers.compressed import DeepGradientCompression
from tf_dgc.synchronizers.dense import Dense
from tf_dgc.synchronizers.rounds import Companions

__all__ = [
    "Companions",
    "DeepGradientCompression",
    "Dense",
    "Exchanged",
    "ParameterAveraging",
    "Synchronizer",
]
