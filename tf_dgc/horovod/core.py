"""What the Horovod front ends share: Horovod itself, and an exchange of means."""

import functools
import gc
import os
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import dgc
from tf_dgc.config import DGCConfig
from tf_dgc.synchronizers import (
    DeepGradientCompression,
    Dense,
    Exchanged,
    Synchronizer,
    saving,
)
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
        RuntimeError: Horovod sees one worker where MPI started several.
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


def local_rank() -> int:
    """Return the number of this worker among those of its machine."""
    return _horovod().local_rank()


def local_size() -> int:
    """Return the number of workers on this machine."""
    return _horovod().local_size()


def _horovod() -> Any:
    transport()
    import horovod.tensorflow as hvd

    return hvd


class Exchange:
    """A synchronizer for gradients that are not divided by the number of workers.

    What is asked of the other workers waits for the first gradients: until then, those
    that join an elastic job do what the others did long ago.
    """

    def __init__(self, found: Transport, config: DGCConfig | None) -> None:
        if config is not None and not isinstance(config, DGCConfig):
            raise TypeError(
                f"`config` must be a DGCConfig or None. Received: config={config!r}"
            )
        self.node = found if isinstance(found, HierarchicalTransport) else None
        self.everybody = self.node.everybody if self.node else found
        self.transport = found
        self.synchronizer: Synchronizer = (
            DeepGradientCompression(found, config) if config else Dense(found)
        )
        self._record = {"tf_dgc": __version__, "compressed": config is not None}
        self._record |= {"transport": found.name}
        self._record |= config.get_config() if config else {}
        self._agreed = False
        if isinstance(self.everybody, HorovodTransport):
            _made.append(weakref.ref(self))
            if _waiting:
                self.begin_anew(_waiting.pop(0))

    def begin_anew(self, records: Sequence[saving.Record]) -> None:
        """Go on among other workers, with these records."""
        self._agreed = False
        self.synchronizer.begin_anew(records)

    def __call__(
        self,
        owner: object,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None = None,
        subtract: bool = False,
    ) -> Exchanged:
        """Return the means over the workers; `subtract` is that of `Synchronizer`.

        Raises:
            ValueError: the workers' settings or variables differ.
        """
        if not self._agreed:
            with tf.init_scope():
                subject = "versions and settings"
                handshake.agree(self.everybody, subject, self._record)
            self._agreed = True
        shares = [_divided(gradient, self.everybody.size) for gradient in gradients]
        if self.node:
            shares = [tf.convert_to_tensor(share) for share in shares]
            shares = self.node.reduce(shares, "shares")
        return self.synchronizer.exchange(owner, shares, variables, momentum, subtract)


def _divided(gradient: Any, by: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / by
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.convert_to_tensor(gradient) / by


class Owner:
    """Owns the state of what has no optimizer."""


_made: list[weakref.ref[Exchange]] = []  # in this order on all workers
_of_tapes: dict[tuple[DGCConfig | None, Transport], tuple[Owner, Exchange]] = {}
_waiting: list[list[saving.Record]] = []  # each for an exchange to come


def exchange_of_tapes(
    config: DGCConfig | None, found: Transport
) -> tuple[Owner, Exchange]:
    """Return what all tapes of a config share, and its owner."""
    if (config, found) not in _of_tapes:
        with tf.init_scope():
            _of_tapes[config, found] = Owner(), Exchange(found, config)
    return _of_tapes[config, found]


def exchanges() -> list[Exchange]:
    """Return the exchanges over Horovod that are in use, those of tapes last."""
    gc.collect()  # those that are gone, on all workers alike
    found = [exchange for made in _made if (exchange := made())]
    tapes = [exchange for _, exchange in _of_tapes.values() if exchange in found]
    return [*[each for each in found if each not in tapes], *tapes]


def records() -> list[list[saving.Record]]:
    """Return what this worker keeps, by exchange."""
    return [*[each.synchronizer.records() for each in exchanges()], *_waiting]


def begin_anew(kept: list[list[saving.Record]]) -> None:
    """Let the exchanges in use, and then those to come, go on from `records`."""
    _of_tapes.clear()  # made in the steps, which other workers have yet to trace
    for exchange in (found := exchanges()):
        exchange.begin_anew(kept.pop(0) if kept else [])
    _made[:] = map(weakref.ref, found)
    _waiting[:] = kept
