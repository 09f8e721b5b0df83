"""TensorFlow's own collectives, over gRPC on CPUs and NCCL on GPUs.

`MultiWorkerMirroredStrategy` is held for what it sets up: the server, the coordination
service and the collective runtime. Its gradient path is not used.
"""

import atexit
import contextlib
import functools
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import base, ending, rendezvous
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.turnstile import END, FLIGHT, GROUP, STEP, Turnstile
from tf_dgc.transports.watchdog import DONE, LEFT, Watchdog, complaint

_logger = logging.getLogger("tf_dgc")

# Groups of this package's collectives, beside those of MultiWorkerMirroredStrategy.
_FIRST_GROUP = 7_400
_GATHER, _REDUCE, _EXCHANGE = range(_KINDS := 3)
# A result is there before all others have fetched theirs from this worker.
_LEAVE_SECONDS = 10.0
# How often a worker that waits for others to be done looks whether they are there.
_LOOK_SECONDS = 2.0
# What ends all workers alike, each shall tell in its own words before it hears others.
_TELL_SECONDS = 1.0
_TOLD_CHARACTERS = 1_000
_LOST = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError)
# How the service on worker 0 names workers that are stopped or cut off.
_SILENT = re.compile(r"stopped sending heartbeats\):((?:\s*/job:\S+)+)")
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


class CollectiveTransport(base.Transport):
    """All-reduce, all-gather and all-to-all by TensorFlow's collective operations.

    An instance key is the number of elements, and each type has a group of its own.
    So what matches on two workers is what they execute next, however often each has
    traced its graph; TensorFlow's default keys count traces, or break in control flow.
    """

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
        self._hint = found.value.lower()
        self.timeout = base.default_timeout() if timeout is None else timeout
        if addresses is None or rank is None:
            addresses, rank = rendezvous.read_tf_config(os.environ.get("TF_CONFIG", ""))
        if _host.tensorflow.tensorflow_has_started():
            raise RuntimeError(
                "TensorFlow has already run operations in this process, too late to "
                "start its collectives. Create the strategy before any other "
                "TensorFlow or Keras call."
            )
        self.rank, self.size = rank, len(addresses)
        hosts = [address.rpartition(":")[0] for address in addresses]
        local = [i for i, host in enumerate(hosts) if host == hosts[rank]]
        base.claim_gpu(local.index(rank), len(local))
        rendezvous.wait_for_peers(addresses, rank, self.timeout)
        _host.tensorflow.configure_coordination(len(addresses), self.timeout)
        with _host.tensorflow.kept_sigterm():
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
                tf.distribute.cluster_resolver.SimpleClusterResolver(
                    tf.train.ClusterSpec({"worker": list(addresses)}),
                    task_type="worker",
                    task_id=rank,
                    num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))},
                    rpc_layer="grpc",
                ),
                tf.distribute.experimental.CommunicationOptions(implementation=found),
            )
        self.device = self._strategy.extended.worker_devices[0]
        self._order = self._new_order()
        self._turnstile = Turnstile()
        self._first_group, self._groups = _FIRST_GROUP, itertools.count(1)
        self.addresses = list(addresses)
        self._ranks: Sequence[int] = range(len(addresses))  # among all workers
        self._places: dict[int, str] = {}  # where workers wait, and in which call
        self._waits = -1
        self._done_since: dict[int, float] = {}
        self._trainings = 0  # begun
        self._left: dict[int, tuple[str, float]] = {}  # why, and since when
        Watchdog(self._turnstile.calls, self.timeout, self._abort, self._in_vain)
        ending.watch()
        atexit.register(self._leave)

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum each tensor over the workers, one collective for each type."""
        with tf.device(self.device):
            return base.fuse(tensors, functools.partial(self._reduce, name=name))

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor from each worker."""
        with tf.device(self.device):
            bits, restore = base.unmoved(tensor)
            flat = tf.reshape(bits, [-1])
            if maybe_empty := not tensor.shape.num_elements():
                # TensorFlow 2.21 dies in CollectiveGatherV2 of nothing.
                flat = tf.pad(flat, [[0, 1]])
            with self._turnstile.entered(flat, name) as leave:
                gathered = leave(
                    tf.raw_ops.CollectiveGatherV2(
                        input=flat, **self._arguments(flat, _GATHER)
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
            bits, restore = base.unmoved(tensor)
            rows = tf.reshape(bits, [self.size, tf.size(tensor) // self.size])
            if maybe_empty := not tensor.shape.num_elements():
                rows = tf.pad(rows, [[0, 0], [0, 1]])
            with self._turnstile.entered(rows, name) as leave:
                received = leave(
                    tf.raw_ops.CollectiveAllToAllV2(
                        input=rows, **self._arguments(rows, _EXCHANGE)
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
        groups = [self._next_group() for _ in parts]
        for group, ranks in zip(groups, parts, strict=True):
            if self.rank in ranks and len(ranks) > 1:
                other = self._copy()
                other.rank, other.size = list(ranks).index(self.rank), len(ranks)
                other.addresses = [self.addresses[rank] for rank in ranks]
                other._ranks = [self._ranks[rank] for rank in ranks]
                other._first_group = group
                if apart:
                    other._watch_apart(GROUP)
                return other
        return LocalTransport() if apart else Bystander(self._turnstile)

    def _next_group(self) -> int:
        return _FIRST_GROUP + next(self._groups) * _KINDS * len(_REDUCED)

    def _new_order(self) -> tf.Variable:
        """Return what orders the collectives of one thread."""
        with tf.init_scope(), tf.device(self.device):
            return tf.Variable(0.0, trainable=False, name="tf_dgc_order")

    def aside(self, thread: threading.Thread) -> Self:
        """Return the same, in groups of its own and with a watchdog of its own."""
        other = self._copy()
        other._first_group = self._next_group()
        other._watch_apart(FLIGHT, thread)
        return other

    def _watch_apart(self, unnamed: str, thread: Any = None) -> None:
        """Count and order collectives of one's own, with a watchdog of one's own."""
        self._turnstile = Turnstile(unnamed)
        self._order = self._new_order()
        self._done_since = {}
        calls, vain = self._turnstile.calls, self._apart_in_vain
        Watchdog(calls, self.timeout, self._abort_apart, vain, thread)

    def at_end(self, batches: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this worker has no more batches."""
        return self._turnstile.at_end(batches)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Tell others where this worker leaves the context by an exception."""
        self._trainings += 1
        self._left = {}
        key = f"tf_dgc/left/{self._trainings}/{self.rank}"
        try:
            yield
        except Exception as error:
            with contextlib.suppress(tf.errors.OpError):
                told = _host.tracebacks.told(error)[:_TOLD_CHARACTERS]
                _host.tensorflow.publish(key, told)
            raise

    def all_leave(self) -> bool:
        """Tell whether all workers leave where this one does.

        Who goes on waits in the next call, and says so when it has waited a while, see
        `_in_vain`; who leaves, too, has made as many calls.
        """
        calls = int(self._turnstile.calls.numpy())
        peers = set(range(self.size)) - {self.rank}
        deadline = time.monotonic() + self.timeout
        with contextlib.suppress(tf.errors.OpError):  # an outer run asks once more
            _host.tensorflow.publish(f"tf_dgc/leaves/{calls}/{self.rank}")
        while peers and time.monotonic() < deadline:
            for peer in sorted(peers):
                if _is_published(f"tf_dgc/waits/{calls + 1}/{peer}"):
                    return False
                if _is_published(f"tf_dgc/leaves/{calls}/{peer}"):
                    peers.discard(peer)
            if peers & set(rendezvous.unreachable(self.addresses, self.rank)):
                return False
            time.sleep(_LOOK_SECONDS / 4)
        return not peers

    def _leave(self) -> None:
        """Stay for those who still fetch something or do not end; if this failed, tell.

        TensorFlow takes workers that leave before others for crashed, and says so.
        """
        if (error := ending.failure()) is not None:
            self._tell(error)
            return
        deadline = time.monotonic() + self.timeout
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.publish(f"tf_dgc/done/{self.rank}")
            # Rank 0 has the service, and leaves after those who look into it.
            what, first = ("done", 0) if self.rank else ("seen", 1)
            for peer in range(first, self.size):
                self._wait_for(f"tf_dgc/{what}/{peer}", peer, deadline)
            _host.tensorflow.publish(f"tf_dgc/seen/{self.rank}")

    def _wait_for(self, key: str, peer: int, deadline: float) -> None:
        """Wait until another worker has published a key, while that is there."""
        while (seconds := deadline - time.monotonic()) > 0:
            try:
                _host.tensorflow.wait_for_key(key, min(seconds, _LOOK_SECONDS))
                return
            except tf.errors.DeadlineExceededError:
                if peer in rendezvous.unreachable(self.addresses, self.rank):
                    return

    def _tell(self, error: BaseException) -> None:
        """Tell the user who is missing, and the others what this worker died of."""
        if isinstance(error, _LOST) and (missing := self._missing(str(error))):
            _logger.error("Worker %d ends.%s", self.rank, missing)
        time.sleep(_TELL_SECONDS)
        text = _host.tracebacks.told(error)[:_TOLD_CHARACTERS]
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.report_failure(f"Worker {self.rank} failed: {text}")

    def _missing(self, error: str = "") -> str:
        """Say which other workers do not answer now, or did not by an error's text."""
        gone = set(rendezvous.unreachable(self.addresses, self.rank))
        for tasks in _SILENT.findall(error):
            gone |= {int(task) for task in re.findall(r"/task:(\d+)", tasks)}
        if self.rank and "CoordinationService/" in error:
            gone.add(0)  # which has that service; TensorFlow does not say so
        each = [f"{self._ranks[i]} ({self.addresses[i]})" for i in sorted(gone)]
        return f" No longer reachable: worker {', '.join(each)}." if gone else ""

    def _abort(self) -> None:
        self._places.setdefault(self.rank, self._turnstile.where)
        text = complaint(self.rank, self.timeout, self._places)
        _host.tensorflow.abort_collectives(text + self._missing())

    def _in_vain(self, calls: int) -> bool:
        """Tell the others where this worker waits, and whether one waits elsewhere.

        What all do is the same, so that those who wait have made as many calls. Where
        one is in a graph its names are not known here, and all wait out the time.
        """
        key = f"tf_dgc/waits/{calls}"
        own = self._turnstile.where
        if int(self._turnstile.calls.numpy()) != calls:
            return False  # it went on meanwhile
        if own != self._places.get(self.rank) or self._waits != calls:
            self._places, self._waits = {self.rank: own}, calls
            with contextlib.suppress(tf.errors.OpError):
                _host.tensorflow.publish(f"{key}/{self.rank}", own)
        for peer in set(range(self.size)) - self._places.keys():
            with contextlib.suppress(tf.errors.OpError):
                self._places[peer] = _host.tensorflow.wait_for_key(
                    f"{key}/{peer}", 0.001
                )
        self._places |= dict.fromkeys(self._done(), DONE)
        self._places |= self._gone_from_training()
        places = {*self._places.values()}
        elsewhere = DONE in places or len(places - {STEP}) > 1
        elsewhere |= any(each.startswith(LEFT) for each in places)
        # Whose data have ended waits eagerly for all, none of whom is in a step then.
        elsewhere |= STEP in places and any(e.startswith(END) for e in places)
        return elsewhere and int(self._turnstile.calls.numpy()) == calls

    def _abort_apart(self) -> None:
        """Abort a collective beside the program's; name those who are not in it."""
        absent = []
        for peer in set(range(self.size)) - {self.rank}:
            try:
                _host.tensorflow.wait_for_key(self._wait_of(peer), 0.001)
            except tf.errors.OpError:
                absent.append(f"{self._ranks[peer]} ({self.addresses[peer]})")
        own = self._ranks[self.rank]
        text = complaint(own, self.timeout, {own: self._turnstile.where})
        if absent:
            text += f" Not in it: worker {', '.join(absent)}."
        _host.tensorflow.abort_collectives(text + self._missing())

    def _wait_of(self, rank: int) -> str:
        """Return the key that a worker sets where it waits in this collective."""
        return f"tf_dgc/apart/{self._first_group}/{self._waits}/{rank}"

    def _apart_in_vain(self, calls: int) -> bool:
        """Tell the others that this worker waits there, and whether one is done."""
        self._waits = calls
        with contextlib.suppress(tf.errors.OpError):
            _host.tensorflow.publish(self._wait_of(self.rank))
        return bool(self._done())

    def _gone_from_training(self) -> dict[int, str]:
        """Return why workers left this training by an exception a while ago."""
        for peer in set(range(self.size)) - {self.rank} - self._left.keys():
            key = f"tf_dgc/left/{self._trainings}/{peer}"
            with contextlib.suppress(tf.errors.OpError):
                told = _host.tensorflow.wait_for_key(key, 0.001)
                self._left[peer] = told, time.monotonic()
        late = time.monotonic() - _LEAVE_SECONDS
        left = [(p, told) for p, (told, since) in self._left.items() if since < late]
        return {peer: f"{LEFT} {told}" for peer, told in left}

    def _done(self) -> list[int]:
        """Return the workers that have been done for longer than a message takes."""
        for peer in set(range(self.size)) - {self.rank} - self._done_since.keys():
            if _is_published(f"tf_dgc/done/{self._ranks[peer]}"):
                self._done_since[peer] = time.monotonic()
        late = time.monotonic() - _LEAVE_SECONDS
        return [peer for peer, since in self._done_since.items() if since < late]

    def _reduce(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        with self._turnstile.entered(vector, name) as leave:
            return leave(
                tf.raw_ops.CollectiveReduceV2(
                    input=vector,
                    merge_op="Add",
                    final_op="Id",
                    **self._arguments(vector, _REDUCE),
                )
            )

    def _arguments(self, vector: tf.Tensor, kind: int) -> dict[str, object]:
        group = self._first_group + _KINDS * _REDUCED.index(vector.dtype) + kind
        with tf.device("CPU:0"):
            return {
                "group_size": tf.constant(self.size),
                "group_key": tf.constant(group),
                "instance_key": tf.size(vector),
                "ordering_token": [self._order.handle],
                "communication_hint": self._hint,
            }


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


def _is_published(key: str) -> bool:
    try:
        _host.tensorflow.wait_for_key(key, 0.001)
    except tf.errors.OpError:
        return False
    return True
