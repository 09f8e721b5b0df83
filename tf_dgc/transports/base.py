"""Interface of transports.

Axis: N workers, one process each, numbered by rank.
"""

import abc
import contextlib
import copy
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import tensorflow as tf

from tf_dgc.transports.gathering import Gathering, carrier

_logger = logging.getLogger("tf_dgc")

NAMES: Final = ("auto", "local", "collective", "horovod", "hybrid")
DEFAULT_TIMEOUT: Final = 300.0


def setting(variable: str, names: Sequence[str]) -> str:
    """Return which of some names an environment variable holds; the first by default.

    Args:
        variable: its name.
        names: what it may hold.

    Raises:
        ValueError: it holds something else.
    """
    found = os.environ.get(variable) or names[0]
    if found not in names:
        raise ValueError(
            f"The environment variable {variable} must be one of {', '.join(names)}. "
            f"Received: {variable}={found!r}"
        )
    return found


def default_timeout() -> float:
    """Return the seconds in TF_DGC_TIMEOUT, or DEFAULT_TIMEOUT.

    Raises:
        ValueError: the variable does not hold a positive number.
    """
    text = os.environ.get("TF_DGC_TIMEOUT", "")
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(
            "The environment variable TF_DGC_TIMEOUT must be a positive number of "
            f"seconds. Received: TF_DGC_TIMEOUT={text!r}"
        )
    return seconds


class Transport(Gathering):
    """Moves tensors between workers.

    Every worker makes the same calls in the same order. A call that not all workers
    make fails on those that made it, after the transport's timeout. All methods work
    eagerly and in graphs.

    Attributes:
        name: "local", "collective", "horovod", "hybrid", or a name of your own.
        rank: of this worker, in [0, size).
        size: N.
        device: where this worker computes, e.g. "/device:GPU:0".
        addresses: "host:port" of each worker, where that is known.
    """

    name: str
    rank: int
    size: int
    device: str
    addresses: Sequence[str] = ()

    @property
    def alone(self) -> bool:
        """Tell whether there is no other process to agree with."""
        return self.size == 1

    @property
    def everybody(self) -> "Transport":
        """Transport between all workers; another one where this is between some."""
        return self

    @property
    def host(self) -> str:
        """Name of this worker's host, the same for all workers there."""
        if self.addresses:
            return self.addresses[self.rank].rpartition(":")[0]
        return socket.gethostname()

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum each tensor over the workers.

        Args:
            tensors: any number, of any integer or float types and of the same shapes
                and types on every worker.
            name: the same on every worker; two calls of a step have different ones.

        Returns:
            The sums, the same bits on every worker.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor from each worker.

        Args:
            tensor: shape S, the same on every worker; int32, int64, float16, float32
                or float64.
            name: as for `all_reduce`.

        Returns:
            shape [N, *S], in the order of rank.
        """

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send each worker a row of a tensor, and get one from each.

        Here all rows go to everybody; transports that can send less do.

        Args:
            tensor: shape [N, *S], S the same on every worker; types as for
                `all_gather`. Row j is for worker j.
            name: as for `all_reduce`.

        Returns:
            shape [N, *S]; row j came from worker j.
        """
        return self.all_gather(tensor, name)[:, self.rank]

    def broadcast(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return rank 0's tensors, bit for bit, on every worker.

        Args:
            tensors: of static shapes, the same on every worker; any type but string.
            name: as for `all_reduce`.

        Returns:
            Tensors of the same shapes and types.
        """
        if self.size == 1 or not tensors:
            return [tf.identity(tensor) for tensor in tensors]
        words = [to_words(tensor) for tensor in tensors]
        if self.rank:
            words = [tf.zeros_like(word) for word in words]
        summed = self.all_reduce(words, name)
        return [from_words(*pair) for pair in zip(summed, tensors, strict=True)]

    def group(self, parts: Sequence[Sequence[int]], apart: bool = False) -> "Transport":
        """Return the same among some of the workers; all workers call this alike.

        Args:
            parts: disjoint groups, each of ascending ranks.
            apart: whether a group may make collectives that others do not make.

        Returns:
            A transport in the group that this worker is of, whose ranks are places in
            it; of none, or in one of its own, that of a worker that is alone.

        Raises:
            ValueError: this transport carries tensors between all workers only.
        """
        raise ValueError(
            f"The transport {self.name!r} carries tensors between all workers only, "
            f"and not in groups of them. Received: groups {list(parts)}"
        )

    def aside(self, thread: threading.Thread) -> "Transport":
        """Return the same for collectives that a thread makes beside the program's.

        They are under way while others are, and meet nobody but those of this thread on
        other workers. All workers call this alike.

        Args:
            thread: which alone makes them; for whom it waits, the timeout bounds.

        Raises:
            ValueError: this transport carries tensors in one order only.
        """
        raise ValueError(
            f"The transport {self.name!r} carries one tensor after the other, and no "
            "round in flight beside them. Set overlap=None"
        )

    def _copy(self) -> Self:
        """Return a copy whose collectives are its own, whatever is around these."""
        other = copy.copy(self)
        for name in ("all_reduce", "all_gather", "all_to_all"):
            vars(other).pop(name, None)
        return other

    def holds_on_all(self, own: tf.Tensor, name: str) -> tf.Tensor:
        """Tell all workers whether something is true on each of them.

        Args:
            own: shape [], bool.
            name: as in `all_reduce`.

        Returns:
            Shape [], bool.
        """
        (count,) = self.all_reduce([tf.cast(own, tf.int32)], name)
        return tf.equal(count, self.size)

    def all_leave(self) -> bool:
        """Tell whether all workers leave where this one does, without a collective.

        For what leaves a run in its middle. True where this cannot be found out.
        """
        return True

    def at_end(self, batches: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this worker has no more batches.

        What it waits for in there, others know when they wait elsewhere.

        Args:
            batches: how many it had in the epoch.
        """
        return contextlib.nullcontext()

    def training(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this worker trains, as in a `fit`.

        Others, which wait for it, know where it has left the context by an exception.
        All workers enter as many.
        """
        return contextlib.nullcontext()

    def barrier(self) -> None:
        """Wait, eagerly, until every worker has come here."""
        self.all_reduce([tf.zeros([], tf.int32)], "barrier")


def fuse(
    tensors: Sequence[tf.Tensor], reduce: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Reduce any number of tensors with one call of `reduce` for each type.

    Args:
        tensors: any shapes and types; integers and bool travel as int64, as TensorFlow
            sums no int32 between GPUs.
        reduce: takes and returns a vector.

    Returns:
        The reduced tensors in their order, of their types.
    """
    results: list[tf.Tensor] = list(tensors)
    by_type: dict[tf.DType, list[int]] = {}
    carriers = [carrier(tensor) for tensor in tensors]
    for i, (carried, _) in enumerate(carriers):
        by_type.setdefault(carried.dtype, []).append(i)
    for indices in by_type.values():
        flat = [tf.reshape(carriers[i][0], [-1]) for i in indices]
        joined = flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)
        total = reduce(joined)
        total.set_shape(joined.shape)
        known = all(part.shape.is_fully_defined() for part in flat)
        sizes = [part.shape[0] if known else tf.size(part) for part in flat]
        for i, part in zip(indices, parts(total, sizes), strict=True):
            shape = tensors[i].shape
            # Where it is known, the sum does not depend on this worker's own tensor.
            form = shape if shape.is_fully_defined() else tf.shape(tensors[i])
            restored = tf.reshape(carriers[i][1](part), form)
            restored.set_shape(tensors[i].shape)
            results[i] = restored
    return results


def parts(total: tf.Tensor, sizes: Sequence[Any]) -> list[tf.Tensor]:
    """Return the parts of a vector, of so many elements each."""
    if len(sizes) == 1:
        return [total]
    if total.dtype != tf.int64:  # which has no such kernel on GPUs
        return list(tf.split(total, sizes))
    ends = tf.cumsum(sizes)
    starts = ends - sizes
    return [total[starts[i] : ends[i]] for i in range(len(sizes))]


def gathered_shape(workers: int, tensor: tf.Tensor) -> Any:
    """Return the shape of a tensor, shape S, gathered from N workers: [N, *S].

    Where one dimension is unknown it follows from the others, so that the result does
    not depend on this worker's own tensor, and is the same on all.
    """
    sizes = tensor.shape.as_list()
    if sizes.count(None) > 1 or 0 in sizes:
        return tf.concat([[workers], tf.shape(tensor)], axis=0)
    return [workers, *[-1 if size is None else size for size in sizes]]


def to_words(tensor: tf.Tensor) -> tf.Tensor:
    """Return the bytes of a tensor of static shape, padded, as a vector of int64.

    Which stays on a GPU: TensorFlow computes with int32 on the host.
    """
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    octets = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
    octets = tf.pad(octets, [[0, -octets.shape[0] % 8]])
    return tf.bitcast(tf.reshape(octets, [-1, 8]), tf.int64)


def from_words(words: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Invert `to_words`, to the shape and type of `like`."""
    dtype = tf.uint8 if like.dtype == tf.bool else like.dtype
    count = like.shape.num_elements() * dtype.size
    octets = tf.reshape(tf.bitcast(words, tf.uint8), [-1])[:count]
    form = [*like.shape, dtype.size] if dtype.size > 1 else like.shape
    return tf.cast(tf.bitcast(tf.reshape(octets, form), dtype), like.dtype)


def claim_gpu(local_rank: int, local_size: int) -> None:
    """Make only the GPU of this worker's local rank visible to TensorFlow.

    Leaves alone what the user has chosen with `tf.config.set_visible_devices`, and a
    machine on which TensorFlow has already started.

    Args:
        local_rank: among the workers of this machine.
        local_size: how many they are.
    """
    if text := os.environ.get("TF_DGC_LOCAL"):  # groups of workers share this machine
        local_rank, local_size = map(int, text.split("/"))
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus or tf.config.get_visible_devices("GPU") != gpus or len(gpus) == 1:
        return
    if local_size > len(gpus):
        _logger.warning(
            "%d workers share the %d GPUs of this machine", local_size, len(gpus)
        )
    try:
        tf.config.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")
    except RuntimeError:
        _logger.warning(
            "TensorFlow has already started, so this worker cannot be given a GPU of "
            "its own; create the strategy before any other TensorFlow call"
        )


def default_device() -> str:
    """Return the first visible GPU, else the CPU, as a device name."""
    return "/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0"
