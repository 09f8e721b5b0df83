"""Dense tensors through TensorFlow's collectives, others through Horovod."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import base, rendezvous
from tf_dgc.transports.collective import CollectiveTransport
from tf_dgc.transports.horovod import HorovodTransport, initialize


class HybridTransport(base.Transport):
    """All-reduce by TensorFlow's collectives, all-gather and all-to-all by Horovod.

    The workers are those that horovodrun started. They find each other through its
    rendezvous store, because TensorFlow's collectives must be set up before any
    operation runs, Horovod's included.
    """

    name = "hybrid"

    def __init__(self, *, timeout: float | None = None) -> None:
        """Start Horovod and TensorFlow's collectives.

        Args:
            timeout: seconds after which a collective that not all workers entered
                fails; by default TF_DGC_TIMEOUT or 300.

        Raises:
            ImportError: Horovod is not installed, or was built against another
                TensorFlow.
            NoHybridTransport: on some worker TensorFlow has already run operations,
                or the launcher has no rendezvous store; on all workers alike.
            RuntimeError: Horovod sees one worker where MPI started several.
            TimeoutError: a worker did not come.
        """
        timeout = base.default_timeout() if timeout is None else timeout
        rank, size = initialize(timeout)
        obstacle = (
            "TensorFlow has already run operations; create the strategy before any "
            "other TensorFlow or Keras call"
            if _host.tensorflow.tensorflow_has_started()
            else ""
        )
        addresses = rendezvous.exchange_addresses(rank, size, obstacle, timeout)
        dense = CollectiveTransport(addresses, rank, timeout=timeout)
        self._dense: base.Transport = dense
        self._sparse: base.Transport = HorovodTransport(timeout=timeout)
        self.timeout, self.rank, self.size = timeout, rank, size
        self.device, self.addresses = self._dense.device, addresses

    def group(
        self, parts: Sequence[Sequence[int]], apart: bool = False
    ) -> base.Transport:
        """Return the same in the group of which this worker is one."""
        other = self._copy()
        other._dense, other._sparse = (
            each.group(parts, apart) for each in (self._dense, self._sparse)
        )
        other.rank, other.size = other._dense.rank, other._dense.size
        other.addresses = other._dense.addresses
        return other

    @property
    def host(self) -> str:
        """Name of this worker's host."""
        return self._sparse.host

    def aside(self, thread: threading.Thread) -> base.Transport:
        """Return the same for collectives that a thread makes."""
        other = self._copy()
        other._dense, other._sparse = (
            self._dense.aside(thread),
            self._sparse.aside(thread),
        )
        return other

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this worker trains."""
        return self._dense.training()

    @contextlib.contextmanager
    def at_end(self, batches: int) -> Iterator[None]:
        """Return a context in which this worker has no more batches."""
        with self._dense.at_end(batches), self._sparse.at_end(batches):
            yield

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum each tensor over the workers by TensorFlow's collectives."""
        return self._dense.all_reduce(tensors, name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor from each worker by Horovod."""
        return self._sparse.all_gather(tensor, name)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send each worker a row by Horovod."""
        return self._sparse.all_to_all(tensor, name)
