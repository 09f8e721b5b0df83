"""What the Horovod front ends share: Horovod itself, and an exchange of means."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import dgc
from tf_dgc.config import DGCConfig
from tf_dgc.synchronizers import DeepGradientCompression, Dense, Exchanged, Synchronizer
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport
from tf_dgc.transports.hierarchical import HierarchicalTransport
from tf_dgc.transports.horovod import HorovodTransport
from tf_dgc.version import __version__


@functools.cache
def transport() -> HorovodTransport:
    """Start Horovod, once; return what carries tensors.

    Raises:
        ImportError: Horovod is not installed, or was built against another TensorFlow.
    """
    # Read by Horovod when it starts; `hierarchical` needs it.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    return HorovodTransport()


@functools.cache
def hierarchical() -> HierarchicalTransport:
    """Return what carries tensors between nodes, started once; all workers call this.

    Within a node, where the wire is fast, gradients are summed densely; between nodes
    one message of each is exchanged.

    Raises:
        ValueError: the nodes have different numbers of workers.
    """
    return HierarchicalTransport(transport())


def started(between_nodes: bool) -> Transport:
    """Return `hierarchical()` or `transport()`, from within a graph, too."""
    with tf.init_scope():
        return hierarchical() if between_nodes else transport()


def init() -> None:
    """Start Horovod, and claim the GPU of this worker."""
    transport()


def rank() -> int:
    """Return the number of this worker, in [0, size)."""
    return transport().rank


def size() -> int:
    """Return the number of workers, N."""
    return transport().size


class Exchange:
    """A synchronizer for gradients that are not divided by the number of workers."""

    def __init__(self, found: Transport, config: DGCConfig | None) -> None:
        if config is not None and not isinstance(config, DGCConfig):
            raise TypeError(
                f"`config` must be a DGCConfig or None. Received: config={config!r}"
            )
        self.node = found if isinstance(found, HierarchicalTransport) else None
        self.everybody = self.node.everybody if self.node else found
        record = {"tf_dgc": __version__, "compressed": config is not None}
        record |= {"transport": found.name} | (config.get_config() if config else {})
        handshake.agree(self.everybody, "versions and settings", record)
        self.transport = found
        self.synchronizer: Synchronizer = (
            DeepGradientCompression(found, config) if config else Dense(found)
        )

    def __call__(
        self,
        owner: object,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None = None,
    ) -> Exchanged:
        """Return the means over the workers."""
        shares = [_divided(gradient, self.everybody.size) for gradient in gradients]
        if self.node:
            shares = [tf.convert_to_tensor(share) for share in shares]
            shares = self.node.reduce(shares, "shares")
        return self.synchronizer.exchange(owner, shares, variables, momentum)


def _divided(gradient: Any, by: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / by
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.convert_to_tensor(gradient) / by


class Owner:
    """Owns the state of what has no optimizer."""
