"""TensorFlow's own collectives, over gRPC on CPUs and NCCL on GPUs.

`MultiWorkerMirroredStrategy` is held for what it sets up: the server, the coordination
service and the collective runtime. Its gradient path is not used.
"""

import atexit
import contextlib
import copy
import functools
import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any, Self

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import base, ending, gathering, rendezvous
from tf_dgc.transports.leaving import Leaving
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.peers import Peers
from tf_dgc.transports.presence import Presence, PresenceApart
from tf_dgc.transports.turnstile import FLIGHT, GROUP, Turnstile
from tf_dgc.transports.watchdog import Watchdog

# Groups of this package's collectives, beside those of MultiWorkerMirroredStrategy.
_FIRST_GROUP = 7_400
_GATHER, _REDUCE, _EXCHANGE = range(_KINDS := 3)
_REDUCED = (tf.float16, tf.float32, tf.float64, tf.int64)


def implementation() -> tf.distribute.experimental.CommunicationImplementation:
    """Return what TF_DGC_COLLECTIVES names, by which TensorFlow's collectives run.

    Raises:
        ValueError: it is none of their names, or NCCL and no GPU is visible.
    """
    known = tf.distribute.experimental.CommunicationImplementation
    text = os.environ.get("TF_DGC_COLLECTIVES") or known.AUTO.value
    names = [each.value for each in known]
    if text.upper() not in names:
        raise ValueError(
            "The environment variable TF_DGC_COLLECTIVES must be one of "
            f"{', '.join(names)}. Received: TF_DGC_COLLECTIVES={text!r}"
        )
    found = known(text.upper())
    if found == known.NCCL and not tf.config.get_visible_devices("GPU"):
        raise ValueError(
            "NCCL carries tensors between GPUs, and this worker sees none. Received: "
            f"TF_DGC_COLLECTIVES={text!r}. Use RING, or AUTO on all workers"
        )
    return found


def _started(
    addresses: Sequence[str],
    rank: int,
    timeout: float,
    found: tf.distribute.experimental.CommunicationImplementation,
) -> tf.distribute.Strategy:
    """Wait for all workers; start TensorFlow's server; return what holds that.

    Raises:
        RuntimeError: TensorFlow has already run operations.
        TimeoutError: a worker did not come; the message names it.
    """
    if _host.tensorflow.tensorflow_has_started():
        raise RuntimeError(
            "TensorFlow has already run operations in this process, too late to "
            "start its collectives. Create the strategy before any other "
            "TensorFlow or Keras call."
        )
    hosts = [address.rpartition(":")[0] for address in addresses]
    local = [i for i, host in enumerate(hosts) if host == hosts[rank]]
    base.claim_gpu(local.index(rank), len(local))
    rendezvous.wait_for_peers(addresses, rank, timeout)
    _host.tensorflow.configure_coordination(len(addresses), timeout)
    with _host.tensorflow.kept_sigterm():
        return tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": list(addresses)}),
                task_type="worker",
                task_id=rank,
                num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
                rpc_layer="grpc",
            ),
            tf.distribute.experimental.CommunicationOptions(implementation=found),
        )


class GroupKeys:
    """Keys of TensorFlow's collectives in one group of workers, and their order.

    An instance key is the number of elements, and each type has a group of its own.
    So what matches on two workers is what they execute next, however often each has
    traced its graph; TensorFlow's default keys count traces, or break in control flow.

    Attributes:
        first: of the group's keys.
    """

    def __init__(self, hint: str, device: str) -> None:
        """Begin with the group of all workers.

        Args:
            hint: how collectives are run.
            device: of this worker.
        """
        self._hint, self._device = hint, device
        self.first, self._groups = _FIRST_GROUP, itertools.count(1)
        self._order = self._new_order()

    def _new_order(self) -> tf.Variable:
        """Return what orders the collectives of one thread."""
        with tf.init_scope(), tf.device(self._device):
            return tf.Variable(0.0, trainable=False, name="tf_dgc_order")

    def of_next_group(self) -> Self:
        """Return those of the next group that is made, in the same order."""
        other = copy.copy(self)
        other.first = _FIRST_GROUP + next(self._groups) * _KINDS * len(_REDUCED)
        return other

    def in_own_order(self) -> Self:
        """Return the same in an order of their own."""
        other = copy.copy(self)
        other._order = self._new_order()
        return other

    def of(self, vector: tf.Tensor, kind: int, size: int) -> dict[str, object]:
        """Return the arguments of a collective, but for its input.

        Args:
            vector: its input.
            kind: of the collective.
            size: of the group.
        """
        group = self.first + _KINDS * _REDUCED.index(vector.dtype) + kind
        with tf.device("CPU:0"):
            return {
                "group_size": tf.constant(size),
                "group_key": tf.constant(group),
                "instance_key": tf.size(vector),
                "ordering_token": [self._order.handle],
                "communication_hint": self._hint,
            }


class CollectiveTransport(base.Transport):
    """All-reduce, all-gather and all-to-all by TensorFlow's collective operations."""

    name = "collective"

    def __init__(
        self,
        addresses: Sequence[str] | None = None,
        rank: int | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Wait for all workers and start TensorFlow's server.

        Must run before any TensorFlow operation of the process, and once.

        Args:
            addresses: "host:port" of each worker; by default those of TF_CONFIG.
            rank: the index of this worker in `addresses`.
            timeout: seconds after which a collective that not all workers entered
                fails; by default TF_DGC_TIMEOUT or 300.

        Raises:
            RuntimeError: TensorFlow has already run operations.
            TimeoutError: a worker did not come; the message names it.
            ValueError: TF_CONFIG is no cluster of workers, or TF_DGC_COLLECTIVES is
                wrong.
        """
        found = implementation()
        self.timeout = base.default_timeout() if timeout is None else timeout
        if addresses is None or rank is None:
            addresses, rank = rendezvous.read_tf_config(os.environ.get("TF_CONFIG", ""))
        self.rank, self.size = rank, len(addresses)
        self._strategy = _started(addresses, rank, self.timeout, found)
        self.device = self._strategy.extended.worker_devices[0]
        self._turnstile = Turnstile()
        self._keys = GroupKeys(found.value.lower(), self.device)
        self.addresses = list(addresses)
        self._ranks: Sequence[int] = range(len(addresses))  # among all workers
        peers = Peers(self.addresses, rank)
        args = peers, self.timeout, self._turnstile
        self._presence = presence = Presence(*args)
        Watchdog(self._turnstile.calls, self.timeout, presence.abort, presence.in_vain)
        ending.watch()
        atexit.register(Leaving(peers, self.timeout).leave)

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum each tensor over the workers, one collective for each type."""
        with tf.device(self.device):
            return base.fuse(tensors, functools.partial(self._reduce, name=name))

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor from each worker."""
        with tf.device(self.device):
            bits, restore = gathering.unmoved(tensor)
            flat = tf.reshape(bits, [-1])
            if maybe_empty := not tensor.shape.num_elements():
                # TensorFlow 2.21 dies in CollectiveGatherV2 of nothing.
                flat = tf.pad(flat, [[0, 1]])
            with self._turnstile.entered(flat, name) as leave:
                gathered = leave(
                    tf.raw_ops.CollectiveGatherV2(
                        input=flat, **self._keys.of(flat, _GATHER, self.size)
                    )
                )
            rows = tf.reshape(gathered, [self.size, -1])
            result = tf.reshape(
                rows[:, :-1] if maybe_empty else rows,
                base.gathered_shape(self.size, tensor),
            )
            result = restore(result)
        result.set_shape([self.size, *tensor.shape])
        return result

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send each worker a row of a tensor, and get one from each."""
        with tf.device(self.device):
            bits, restore = gathering.unmoved(tensor)
            rows = tf.reshape(bits, [self.size, tf.size(tensor) // self.size])
            if maybe_empty := not tensor.shape.num_elements():
                rows = tf.pad(rows, [[0, 0], [0, 1]])
            with self._turnstile.entered(rows, name) as leave:
                received = leave(
                    tf.raw_ops.CollectiveAllToAllV2(
                        input=rows, **self._keys.of(rows, _EXCHANGE, self.size)
                    )
                )
            received = received[:, :-1] if maybe_empty else received
            result = restore(tf.reshape(received, tf.shape(tensor)))
        result.set_shape(tensor.shape)
        return result

    def group(
        self, parts: Sequence[Sequence[int]], apart: bool = False
    ) -> base.Transport:
        """Return the same in the group of which this worker is one.

        Group keys of TensorFlow count the groups that were made, on all workers alike.
        """
        groups = [self._keys.of_next_group() for _ in parts]
        for keys, ranks in zip(groups, parts, strict=True):
            if self.rank in ranks and len(ranks) > 1:
                other = self._copy()
                other.rank, other.size = list(ranks).index(self.rank), len(ranks)
                other.addresses = [self.addresses[rank] for rank in ranks]
                other._ranks = [self._ranks[rank] for rank in ranks]
                other._keys = keys
                if apart:
                    other._watch_apart(GROUP)
                return other
        return LocalTransport() if apart else Bystander(self._turnstile)

    def aside(self, thread: threading.Thread) -> Self:
        """Return the same, in groups of its own and with a watchdog of its own."""
        other = self._copy()
        other._keys = self._keys.of_next_group()
        other._watch_apart(FLIGHT, thread)
        return other

    def _watch_apart(self, unnamed: str, thread: Any = None) -> None:
        """Count and order collectives of one's own, with a watchdog of one's own."""
        self._turnstile = Turnstile(unnamed)
        self._keys = self._keys.in_own_order()
        args = self._presence, self._ranks, self._keys.first, self._turnstile
        apart = PresenceApart(*args)
        calls = self._turnstile.calls
        Watchdog(calls, self.timeout, apart.abort, apart.in_vain, thread)

    def at_end(self, batches: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this worker has no more batches."""
        return self._turnstile.at_end(batches)

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that tells others where it is left by an exception."""
        return self._presence.training()

    def all_leave(self) -> bool:
        """Tell whether all workers leave where this one does."""
        return self._presence.all_leave()

    def _reduce(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        with self._turnstile.entered(vector, name) as leave:
            return leave(
                tf.raw_ops.CollectiveReduceV2(
                    input=vector,
                    merge_op="Add",
                    final_op="Id",
                    **self._keys.of(vector, _REDUCE, self.size),
                )
            )


class Bystander(LocalTransport):
    """A worker in none of some groups: alone, it counts the others' calls as its own.

    By how many calls they have made, workers tell whether they wait for one another.
    """

    def __init__(self, turnstile: Turnstile) -> None:
        """Take what counts the calls."""
        super().__init__()
        self._turnstile = turnstile

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return the tensors."""
        return base.fuse(tensors, functools.partial(self._passed, name=name))

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensor with a first axis of length 1."""
        return self._passed(tensor, name)[tf.newaxis]

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensor."""
        return self._passed(tensor, name)

    def _passed(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        with self._turnstile.entered(tensor, name) as leave:
            return leave(tensor)
