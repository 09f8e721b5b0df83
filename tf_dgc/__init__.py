"""Deep Gradient Compression for Keras and TensorFlow, over ordinary networks."""

from tf_dgc import transports
from tf_dgc.config import DGCConfig
from tf_dgc.state import StepStats
from tf_dgc.strategy import DenseStrategy, DGCStrategy
from tf_dgc.version import __version__

__all__ = [
    "DGCConfig",
    "DGCStrategy",
    "DenseStrategy",
    "StepStats",
    "__version__",
    "transports",
]
