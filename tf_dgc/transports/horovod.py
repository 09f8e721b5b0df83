"""Horovod's operations: Gloo or MPI on CPUs, NCCL on GPUs."""

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, Self

import tensorflow as tf

from tf_dgc.transports import base, gathering
from tf_dgc.transports.generation import Generation
from tf_dgc.transports.local import LocalTransport
from tf_dgc.transports.named_calls import NamedCalls
from tf_dgc.transports.schedulers import SRUN_SIZE
from tf_dgc.transports.turnstile import FLIGHT, GROUP, Turnstile
from tf_dgc.transports.watchdog import Watchdog, complaint

_logger = logging.getLogger("tf_dgc")

# What horovodrun tells each process; mpirun tells by names of its own.
_GLOO = ("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
# What Open MPI, MPICH and Slurm's PMI tell each process.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def import_horovod() -> Any:
    """Return `horovod.tensorflow`, which may not have been started.

    Raises:
        ImportError: Horovod is not installed, or was built against another TensorFlow.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ImportError(
            "This transport needs Horovod, built against the installed TensorFlow: "
            f"run scripts/install_horovod.sh. Importing it failed: {error}"
        ) from error
    return hvd


def has_mpi() -> bool:
    """Tell whether there is a Horovod, and it was built with MPI."""
    try:
        return bool(import_horovod().mpi_built())
    except ImportError:
        return False


def require_told() -> None:
    """Refuse a process that is one of several, and not told where the others are.

    Horovod itself would abort the process, or take it for the only one.

    Raises:
        RuntimeError: a variable is missing; the message names it.
    """
    told, size = os.environ, os.environ.get("HOROVOD_SIZE") or "1"
    by_mpi = told.get("HOROVOD_CONTROLLER") == "mpi" or any(map(told.get, MPI_SIZES))
    missing = [name for name in _GLOO if not told.get(name)]
    if size != "1" and missing and not by_mpi:
        raise RuntimeError(
            "Horovod must be told which of several processes this one is, and where "
            f"they meet. Received: HOROVOD_SIZE={size}, no {', no '.join(missing)}. "
            "Start all of them by horovodrun; or unset HOROVOD_SIZE, for tf-dgc-run or "
            "TF_CONFIG, or to train alone"
        )


def initialize(timeout: float) -> tuple[int, int]:
    """Start Horovod, let a stalled collective fail, claim the GPU of the local rank.

    Args:
        timeout: seconds after which a collective that not all workers entered fails.

    Returns:
        Rank and size.

    Raises:
        ImportError: Horovod is not installed, or was built against another TensorFlow.
        RuntimeError: Horovod sees one worker where MPI started several, or is not told
            where the others are.
    """
    require_told()
    # Read by Horovod when it starts; what the user has set stays.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(timeout) or 1))
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")  # for `group`
    hvd = import_horovod()
    hvd.init()
    # Built without MPI it takes each process that mpirun starts for a job of its own.
    if hvd.size() == 1 and not os.environ.get("HOROVOD_SIZE"):
        for name in (*MPI_SIZES, SRUN_SIZE):
            if (size := os.environ.get(name) or "1") != "1":
                raise RuntimeError(
                    "Horovod must see as many workers as the launcher started. "
                    f"Received: hvd.size()=1, {name}={size}. Use horovodrun, or build "
                    "Horovod with MPI: HOROVOD_CPU_OPERATIONS=MPI "
                    "scripts/install_horovod.sh; where each process is to train "
                    "alone, set transport='local'"
                )
    base.claim_gpu(hvd.local_rank(), hvd.local_size())
    return hvd.rank(), hvd.size()


def wire_device(hvd: Any, device: str) -> str:
    """Return where Horovod's operations are to run, of a worker that computes there.

    Only one that was built for GPUs has operations on them. Another one's are put on
    the host by name, so that this is no matter of TensorFlow's soft placement.

    Args:
        hvd: `horovod.tensorflow`.
        device: of the worker.
    """
    if "GPU" not in device or hvd.nccl_built():
        return device
    _logger.info(
        "Horovod was built without NCCL: what it carries is copied from the GPU to the "
        "host and back, with DGC and hybrid transport the messages only. "
        "HOROVOD_GPU_OPERATIONS=NCCL scripts/install_horovod.sh builds it with"
    )
    return "/device:CPU:0"


class HorovodTransport(base.Transport):
    """All-reduce, all-gather and all-to-all by Horovod, under horovodrun or mpirun."""

    name = "horovod"

    def __init__(self, *, timeout: float | None = None) -> None:
        """Start Horovod.

        Args:
            timeout: seconds after which a collective that not all workers entered
                fails; by default TF_DGC_TIMEOUT or 300.

        Raises:
            ImportError: Horovod is not installed, or was built against another
                TensorFlow.
            RuntimeError: Horovod sees one worker where MPI started several.
        """
        self.timeout = base.default_timeout() if timeout is None else timeout
        initialize(self.timeout)
        self.device = base.default_device()
        self._hvd = import_horovod()
        self._wire = wire_device(self._hvd, self.device)
        self._begin(Generation())

    @property
    def host(self) -> str:
        """Name of this worker's host, by which horovodrun knows it."""
        return os.environ.get("HOROVOD_HOSTNAME") or super().host

    def _begin(self, generation: Generation) -> None:
        self.rank, self.size = self._hvd.rank(), self._hvd.size()
        self._calls = NamedCalls(self.device, generation)
        # That were added, by their ranks: none may be added twice.
        self._process_sets: dict[tuple[int, ...], Any] = {}
        self._watchdogs: list[Watchdog] = []
        self._watch()

    def aside(self, thread: threading.Thread) -> Self:
        """Return the same with a watchdog of its own; Horovod tells calls by names."""
        other = self._copy()
        other._calls = dataclasses.replace(self._calls, turnstile=Turnstile(FLIGHT))
        other._watch(thread)
        return other

    def _watch(self, thread: threading.Thread | None = None) -> None:
        args = self._calls.turnstile.calls, self.timeout, self._abort
        self._watchdogs.append(Watchdog(*args, waiting=thread))

    def _watch_no_more(self) -> None:
        for watchdog in self._watchdogs:
            watchdog.end()

    def restart(self) -> None:
        """Go on among other workers, once Horovod was started among them.

        What was traced before raises an error from now on.
        """
        self._watch_no_more()
        self._begin(self._calls.generation.next())

    def start_again(self) -> None:
        """Start Horovod after `shutdown`, and go on.

        Raises:
            RuntimeError: as when it was started first.
        """
        initialize(self.timeout)
        self.restart()

    def shutdown(self) -> None:
        """End Horovod, on all workers; what would meet the others then fails."""
        self._watch_no_more()
        self._hvd.shutdown()

    def _abort(self) -> None:
        places = {self.rank: self._calls.turnstile.where}
        _logger.error(complaint(self.rank, self.timeout, places))
        self._hvd.shutdown()  # fails what waits, on all workers

    def within(self, process_set: Any, apart: bool = False) -> Self:
        """Return the same among the workers of a process set, of which this is one.

        Args:
            process_set: a `horovod.tensorflow.ProcessSet` that all workers have added.
            apart: see `group`.
        """
        other = self._copy()
        other.rank, other.size = process_set.rank(), process_set.size()
        turnstile = Turnstile(GROUP) if apart else self._calls.turnstile
        among = {"process_set": process_set}
        other._calls = dataclasses.replace(
            self._calls, among=among, turnstile=turnstile
        )
        if apart:
            other._watch()
        return other

    def group(
        self, parts: Sequence[Sequence[int]], apart: bool = False
    ) -> base.Transport:
        """Return the same in the process set of which this worker is one.

        Horovod must have been started with HOROVOD_DYNAMIC_PROCESS_SETS=1.
        """
        found: base.Transport = LocalTransport()
        for ranks in [each for each in parts if len(each) > 1]:
            process_set = _process_set(self._hvd, ranks, self._process_sets)
            if self._hvd.rank() in ranks:
                found = self.within(process_set, apart)
        return found

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum each tensor over the workers, one collective for each type."""

        def reduce(vector: tf.Tensor) -> tf.Tensor:
            unique = f"HorovodAllreduce.tf_dgc.{name}.{vector.dtype.name}"
            operation = functools.partial(self._hvd.allreduce, op=self._hvd.Sum)
            return self._calls.call(operation, name, unique, vector)

        with tf.device(self._wire):
            return base.fuse(tensors, reduce)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor from each worker."""
        unique = f"HorovodAllgather.tf_dgc.{name}"
        with tf.device(self._wire):
            bits, restore = gathering.unmoved(tensor)
            flat = tf.reshape(bits, [-1])
            gathered = self._calls.call(self._hvd.allgather, name, unique, flat)
            shape = base.gathered_shape(self.size, tensor)
            result = restore(tf.reshape(gathered, shape))
        result.set_shape([self.size, *tensor.shape])
        return result

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send each worker a row of a tensor, and get one from each."""
        unique = f"HorovodAlltoall.tf_dgc.{name}"
        with tf.device(self._wire):
            bits, restore = gathering.unmoved(tensor)
            flat = tf.reshape(bits, [-1])
            received = self._calls.call(self._hvd.alltoall, name, unique, flat)
            result = restore(tf.reshape(received, tf.shape(tensor)))
        result.set_shape(tensor.shape)
        return result

    def at_end(self, batches: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this worker has no more batches."""
        return self._calls.turnstile.at_end(batches)


def _process_set(
    hvd: Any, ranks: Sequence[int], added: dict[tuple[int, ...], Any]
) -> Any:
    """Return the process set of some ranks, which is added where it is not yet."""
    if len(ranks) == hvd.size():  # which cannot be added again
        return hvd.global_process_set
    key = tuple(ranks)
    if key not in added:
        added[key] = hvd.add_process_set(list(ranks))
    return added[key]
