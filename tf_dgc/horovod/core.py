"""What the Horovod front ends share: Horovod itself, and an exchange of means."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import dgc
from tf_dgc.config import DGCConfig
from tf_dgc.synchronizers import DeepGradientCompression, Dense, Exchanged, Synchronizer
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport
from tf_dgc.version import __version__


@functools.cache
def transport() -> Transport:
    """Start Horovod, once; return what carries tensors.

    Raises:
        ImportError: Horovod is not installed, or was built against another TensorFlow.
    """
    from tf_dgc.transports.horovod import HorovodTransport

    return HorovodTransport()


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
        record = {"tf_dgc": __version__, "compressed": config is not None}
        settings = config.get_config() if config else {}
        handshake.agree(found, "versions and settings", record | settings)
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
        shares = [_divided(gradient, self.transport.size) for gradient in gradients]
        return self.synchronizer.exchange(owner, shares, variables, momentum)


def _divided(gradient: Any, by: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / by
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.convert_to_tensor(gradient) / by


class Owner:
    """Owns the state of what has no optimizer."""
