"""Which transport this process takes."""

import functools
import logging
import os

from tf_dgc.transports import base, rendezvous
from tf_dgc.transports.collective import CollectiveTransport
from tf_dgc.transports.horovod import MPI_SIZES, HorovodTransport
from tf_dgc.transports.hybrid import HybridTransport
from tf_dgc.transports.local import LocalTransport

_logger = logging.getLogger("tf_dgc")

_SIZES = ("HOROVOD_SIZE", *MPI_SIZES)  # by horovodrun; by others


def resolve(transport: "str | base.Transport") -> base.Transport:
    """Return the transport of that name, or the transport itself.

    There is one of each name in a process, however often it is asked for.

    Args:
        transport: a `Transport`, or "local", "collective", "horovod", "hybrid", or
            "auto": under horovodrun hybrid, or where hybrid cannot be had, as under
            mpirun, horovod; with a TF_CONFIG of several workers collective; else local.

    Raises:
        ValueError: there is no such name, or TF_CONFIG is malformed.
        TypeError: `transport` is neither a name nor a `Transport`.
        ImportError: Horovod is needed and cannot be imported.
        RuntimeError: TensorFlow has already run operations, or Horovod sees one
            worker where MPI started several.
        TimeoutError: a worker did not come.
    """
    if isinstance(transport, base.Transport):
        return transport
    if not isinstance(transport, str):
        raise TypeError(
            f"`transport` must be one of {base.NAMES}, or a Transport. "
            f"Received: transport={transport!r}"
        )
    if transport not in base.NAMES:
        raise ValueError(
            f"`transport` must be one of {base.NAMES}, or a Transport. "
            f"Received: transport={transport!r}"
        )
    return _shared(_launched() if transport == "auto" else transport)


def _launched() -> str:
    """Tell by its environment how this process was started."""
    sizes = [os.environ[name] for name in _SIZES if os.environ.get(name)]
    if sizes and sizes[0] != "1":
        return "auto-hybrid"
    addresses, _ = rendezvous.read_tf_config(os.environ.get("TF_CONFIG", ""))
    return "collective" if len(addresses) > 1 else "local"


@functools.cache
def _shared(name: str) -> base.Transport:
    if name == "local":
        return LocalTransport()
    if name == "collective":
        addresses, rank = rendezvous.read_tf_config(os.environ.get("TF_CONFIG", ""))
        if not addresses:
            raise ValueError(
                "transport='collective' needs the environment variable TF_CONFIG with "
                "the cluster of workers (scripts/run_local.py sets it on one machine)"
            )
        return CollectiveTransport(addresses, rank)
    if name == "horovod":
        return HorovodTransport()
    if name == "hybrid":
        return HybridTransport()
    try:
        return _shared("hybrid")
    except rendezvous.NoHybridTransport as reason:
        _logger.warning("Horovod for dense and sparse tensors alike: %s", reason)
        return _shared("horovod")
