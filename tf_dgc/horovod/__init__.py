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

Elastic training is in `tf_dgc.horovod.elastic`, which imports Horovod.
"""

from tf_dgc.horovod import callbacks
from tf_dgc.horovod.compressor import DGCCompressor
from tf_dgc.horovod.core import (
    hierarchical,
    init,
    local_rank,
    local_size,
    rank,
    size,
    transport,
)
from tf_dgc.horovod.optimizer import DistributedOptimizer, stats
from tf_dgc.horovod.tape import DistributedGradientTape

__all__ = [
    "DGCCompressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "callbacks",
    "hierarchical",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "size",
    "stats",
    "transport",
]
