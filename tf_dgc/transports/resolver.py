"""Choice of the transport that this process takes."""

import contextlib
import functools
import logging
import os

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import base, rendezvous, schedulers
from tf_dgc.transports.collective import CollectiveTransport
from tf_dgc.transports.horovod import MPI_SIZES, HorovodTransport, has_mpi
from tf_dgc.transports.hybrid import HybridTransport
from tf_dgc.transports.local import LocalTransport

_logger = logging.getLogger("tf_dgc")


def resolve(transport: "str | base.Transport") -> base.Transport:
    """Return the transport of that name, or the transport itself.

    There is one of each name in a process, however often it is asked for.

    Args:
        transport: a `Transport`, or "local", "collective", "horovod", "hybrid", or
            "auto": under horovodrun hybrid, or where hybrid cannot be had, as under
            mpirun where Horovod has MPI, horovod; with a TF_CONFIG of several workers,
            under srun, mpirun or in an Indexed Job of Kubernetes collective; else
            local.

    Raises:
        ValueError: there is no such name, or what tells of other workers is malformed.
        TypeError: `transport` is neither a name nor a `Transport`.
        ImportError: Horovod is needed and cannot be imported.
        RuntimeError: TensorFlow has already run operations, or a scheduler does not
            tell enough of other workers; names what is missing.
        TimeoutError: a worker did not come.
    """
    _host.startup.prepare_now()  # a launcher's strategy comes first
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
    horovod = os.environ.get("HOROVOD_SIZE")
    if horovod and horovod != "1":
        return "auto-hybrid"
    sizes = [os.environ[name] for name in MPI_SIZES if os.environ.get(name)]
    if not horovod and sizes and sizes[0] != "1" and has_mpi():
        return "auto-hybrid"
    return "collective" if len(_place(bool(horovod)).addresses) > 1 else "local"


def _place(alone: bool = False) -> schedulers.ProcessPlace:
    """Return which of which workers this process is, by TF_CONFIG or a scheduler.

    Args:
        alone: it is the only one, unless TF_CONFIG says otherwise.
    """
    text = os.environ.get("TF_CONFIG", "")
    addresses, rank = rendezvous.read_tf_config(text)
    if rendezvous.is_evaluator(text):
        _logger.warning("TF_CONFIG: an evaluator is no worker, and trains alone")
    elif not addresses and not alone and (found := schedulers.find()):
        return found
    return schedulers.ProcessPlace("TF_CONFIG", addresses, rank)


def cluster_resolver(
    transport: base.Transport,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Tell scripts of MultiWorkerMirroredStrategy which task this worker is.

    Where TF_CONFIG has started the workers it is TensorFlow's own, which has no task
    for a worker that is alone without it. Else task r of the job "worker" has rank r;
    where addresses are unknown, names stand in their place.
    """
    told: list[str] = []
    with contextlib.suppress(ValueError):  # of another launcher
        told, _ = rendezvous.read_tf_config(os.environ.get("TF_CONFIG", ""))
    known = list(transport.addresses)
    if len(told) <= 1 if transport.size == 1 else told and told == known:
        return tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    members = known or [f"worker-{rank}" for rank in range(transport.size)]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": members}),
        master=members[transport.rank],
        task_type="worker",
        task_id=transport.rank,
        num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
        rpc_layer="grpc",
    )


@functools.cache
def _shared(name: str) -> base.Transport:
    if name == "local":
        return LocalTransport()
    if name == "collective":
        source, addresses, rank = _place()
        if not addresses:
            raise ValueError(
                "transport='collective' needs the environment variable TF_CONFIG with "
                "the cluster of workers (tf-dgc-run sets it), or those of a scheduler"
            )
        _logger.info("%s: worker %d of %s", source, rank, ", ".join(addresses))
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
