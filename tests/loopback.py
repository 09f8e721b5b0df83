"""A transport between threads: N workers in one process, eagerly, without a network."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc.transports.base import Transport
from tf_dgc.transports.local import LocalTransport

TIMEOUT_SECONDS = 60.0
_DEVICE = "/device:CPU:0"
_GATHERED = (tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)


class Owner:
    """Stands for an optimizer."""


OWNER = Owner()


class Sent(NamedTuple):
    """One call of a collective, as one worker made it."""

    call: str  # "all_reduce", "all_gather" or "all_to_all"
    name: str
    arrays: list[np.ndarray]

    @property
    def bytes(self) -> int:
        """Bytes handed to the transport."""
        return sum(array.nbytes for array in self.arrays)


class Hub:
    """Where N workers meet: round after round, each leaves a value and takes all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._rounds = [0] * size
        self._places: dict[int, dict[int, Any]] = {}
        self._gone: set[int] = set()
        self._groups: dict[tuple[tuple[int, ...], bool], Hub] = {}

    def meet(self, rank: int, call: Any, value: Any) -> list[Any]:
        """Return the values of all workers; a worker that is gone or late raises."""
        with self._condition:
            number = self._rounds[rank]
            self._rounds[rank] += 1
            self._places.pop(number - 2, None)
            places = self._places.setdefault(number, {})
            places[rank] = (call, value)
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: len(places) == self.size or self._gone - places.keys(),
                TIMEOUT_SECONDS,
            )
            missing = sorted(set(range(self.size)) - places.keys())
        if missing:
            raise ConnectionError(f"Workers {missing} did not come to {call}")
        calls = [places[other][0] for other in range(self.size)]
        if any(other != call for other in calls):
            raise ConnectionError(f"Workers make different calls: {calls}")
        return [places[other][1] for other in range(self.size)]

    def of_group(self, ranks: tuple[int, ...], apart: bool = False) -> "Hub":
        """Return the hub of some of the workers."""
        with self._condition:
            return self._groups.setdefault((ranks, apart), Hub(len(ranks)))

    def leave(self, rank: int) -> None:
        """Let nobody wait for this worker any more."""
        with self._condition:
            self._gone.add(rank)
            self._condition.notify_all()
        for (ranks, _), hub in self._groups.items():
            if rank in ranks:
                hub.leave(ranks.index(rank))


class Loopback(Transport):
    """One worker's end of a Hub. Values meet as NumPy arrays, eagerly.

    Attributes:
        sent: every call made, in order.
    """

    name = "loopback"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        self.device = _DEVICE
        self.sent: list[Sent] = []

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum in the order of rank."""
        if not tensors:
            return []
        if not tf.executing_eagerly():
            return self._traced(self.all_reduce, tensors, name)
        found = self._meet("all_reduce", name, [tensor.numpy() for tensor in tensors])
        sums = []
        for parts in zip(*found, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            sums.append(tf.constant(total))
        return sums

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Stack in the order of rank."""
        if tensor.dtype not in _GATHERED:
            raise TypeError(f"No transport gathers {tensor.dtype}: {name}")
        if not tf.executing_eagerly():

            def gather(tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
                return [self.all_gather(tensors[0], name)]

            (gathered,) = self._traced(gather, [tensor], name)
            return tf.ensure_shape(gathered, [self.size, *tensor.shape])
        found = self._meet("all_gather", name, [tensor.numpy()])
        return tf.constant(np.stack([array for (array,) in found]))

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Take this worker's row of what each has."""
        if not tf.executing_eagerly():
            return super().all_to_all(tensor, name)
        found = self._meet("all_to_all", name, [tensor.numpy()])
        return tf.constant(np.stack([array[self.rank] for (array,) in found]))

    def group(self, parts: Sequence[Sequence[int]], apart: bool = False) -> Transport:
        """Meet in a hub of the group."""
        for ranks in parts:
            if self.rank in ranks:
                hub = self.hub.of_group(tuple(ranks), apart)
                return Loopback(hub, list(ranks).index(self.rank))
        return LocalTransport()

    def aside(self, thread: threading.Thread) -> "Loopback":
        """Meet in a hub of the threads; what is sent counts here, too."""
        found = Loopback(self.hub.of_group(tuple(range(self.size))), self.rank)
        found.sent = self.sent
        return found

    def _traced(
        self, call: Any, tensors: Sequence[tf.Tensor], name: str
    ) -> list[tf.Tensor]:
        """Make a call from a graph; one that runs needs as many threads as workers."""
        reduces = call == self.all_reduce
        results = tf.py_function(
            lambda *given: call(given, name), tensors, [t.dtype for t in tensors]
        )
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape if reduces else None)
        return list(results)

    def _meet(
        self, call: str, name: str, arrays: list[np.ndarray]
    ) -> list[list[np.ndarray]]:
        self.sent.append(Sent(call, name, arrays))
        forms = [(str(array.dtype), array.shape) for array in arrays]
        return self.hub.meet(self.rank, (call, name, forms), arrays)


class Tampering(Transport):
    """Another transport, on which something of rank 1 is damaged on its way."""

    name = "tampering"

    def __init__(
        self, inner: Transport, ending: str, damage: Callable[[np.ndarray], None]
    ) -> None:
        """Let `damage` change what rank 1 gives to calls whose names end so.

        Of what it sends to each worker, what it sends to rank 0.
        """
        self.inner, self.ending, self.damage = inner, ending, damage
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum in the order of rank."""
        return self.inner.all_reduce(tensors, name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Stack in the order of rank; damage what is of rank 1."""
        gathered = self.inner.all_gather(tensor, name).numpy()
        if name.endswith(self.ending):
            self.damage(gathered[1:2])
        return tf.constant(gathered)

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Take this worker's row of what each has; damage what is of rank 1."""
        received = self.inner.all_to_all(tensor, name).numpy()
        if name.endswith(self.ending) and self.rank == 0:
            self.damage(received[1:2])
        return tf.constant(received)


def outcomes(size: int, work: Callable[[Loopback], Any]) -> list[Any]:
    """Run `work` on N threads; return what each returned or raised, by rank."""
    hub = Hub(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            # Threads that run eagerly on one GPU get each other's tensors.
            with tf.device(_DEVICE):
                found[rank] = work(Loopback(hub, rank))
        except Exception as error:
            found[rank] = error
        finally:
            hub.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def run_workers(size: int, work: Callable[[Loopback], Any]) -> list[Any]:
    """Run `work` on N threads; return what each returned, or raise what one raised."""
    found = outcomes(size, work)
    errors = [outcome for outcome in found if isinstance(outcome, Exception)]
    # A worker that was left alone says less than the one that left it.
    errors.sort(key=lambda error: isinstance(error, ConnectionError))
    if errors:
        raise errors[0]
    return found


def in_scopes(
    size: int, work: Callable[[Any], Any], make: Any = tf_dgc.DenseStrategy
) -> list[Any]:
    """Run `work` on N threads, each in the scope of a strategy that it is given."""

    def run(transport: Loopback) -> Any:
        strategy = make(transport=transport)
        with strategy.scope():
            return work(strategy)

    return run_workers(size, run)
