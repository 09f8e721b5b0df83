"""Deep Gradient Compression for scripts that use Horovod without a strategy.

Also what Horovod 0.28 does not do on Keras 3: an optimizer that synchronises, a tape
and callbacks that take Keras variables. Start the script with horovodrun.

Example:
    import tf_dgc
    from tf_dgc import horovod as hvd

    hvd.init()
    sgd = keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, tf_dgc.DGCConfig())
    model.compile(optimizer, "mse")
    model.fit(own_data, callbacks=[hvd.callbacks.BroadcastVariables()])

The other names of `horovod.tensorflow` and `horovod.tensorflow.keras` are here, too, so
that a script changes its import only. Some are taken from Horovod when they are asked
for, and so is `elastic`: importing this package does not import Horovod.
"""

import importlib
from typing import Any

from tf_dgc.horovod import callbacks
from tf_dgc.horovod.compressor import DGCCompressor
from tf_dgc.horovod.core import (
    cross_rank,
    cross_size,
    hierarchical,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    transport,
)
from tf_dgc.horovod.normalization import SyncBatchNormalization
from tf_dgc.horovod.operations import (
    BORROWED,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    join,
    reducescatter,
)
from tf_dgc.horovod.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
    stats,
)
from tf_dgc.horovod.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from tf_dgc.transports.horovod import import_horovod

__all__ = [
    "DGCCompressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "grouped_allgather",
    "grouped_allreduce",
    "hierarchical",
    "init",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    "stats",
    "transport",
]


def __getattr__(name: str) -> Any:
    """Take from Horovod what it has itself; import `elastic` when it is asked for."""
    if name in BORROWED:
        return getattr(import_horovod(), name)
    if name == "elastic":
        return importlib.import_module("tf_dgc.horovod.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that are there, and those that are imported late."""
    return sorted({*globals(), *BORROWED, "elastic"})
