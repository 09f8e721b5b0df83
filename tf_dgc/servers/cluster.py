"""Servers and workers of a job, and which of them this process is."""

import dataclasses
import logging
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import tensorflow as tf

from tf_dgc.transports import base, rendezvous

_logger = logging.getLogger("tf_dgc")

_EXAMPLE: Final = (
    '{"cluster": {"ps": ["a:2222"], "worker": ["b:2222", "c:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_JOBS: Final = ("ps", "chief", "worker")
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a job, and this one's place.

    Attributes:
        ps: "host:port" of each server.
        workers: how many workers there may be.
        task_type: "ps" or "worker".
        index: of this task among those of its type.
        address: "host:port" of this task.
    """

    ps: tuple[str, ...]
    workers: int
    task_type: str
    index: int
    address: str


def resolve() -> Cluster:
    """Read TF_CONFIG, as TensorFlow and Kubeflow's TFJob have it.

    A job "chief" has the first worker; the workers of "worker" follow it.

    Raises:
        ValueError: it is missing, malformed or without servers, this is the task of an
            evaluator, or this process was started by horovodrun.
    """
    if os.environ.get("HOROVOD_SIZE"):
        raise ValueError(
            "DownpourStrategy must not run under horovodrun, which ends all workers "
            "when one has failed: here the others are to go on. Received: "
            f"HOROVOD_SIZE={os.environ['HOROVOD_SIZE']!r}. Start the job with "
            "tf-dgc-run -n 4 --ps 2 train.py, or each task with a TF_CONFIG such as "
            f"{_EXAMPLE}"
        )
    text = os.environ.get("TF_CONFIG", "")
    jobs, (kind, index) = rendezvous.read_jobs(text)
    if kind == rendezvous.EVALUATOR:
        raise ValueError(
            "An evaluator has no place in DownpourStrategy: the chief evaluates. "
            f"Received: task of type {kind!r}. Leave it out of the job"
        )
    ps, workers = jobs.get("ps", []), jobs.get("chief", []) + jobs.get("worker", [])
    if not ps or not workers:
        raise ValueError(
            "DownpourStrategy needs servers and workers: TF_CONFIG must have the jobs "
            f"`ps` and `worker`, such as {_EXAMPLE}; tf-dgc-run -n 4 --ps 2 sets it. "
            f"Received: TF_CONFIG={text!r}"
        )
    rendezvous.check_addresses([*ps, *workers], "TF_CONFIG")
    places = [(job, i) for job in _JOBS for i in range(len(jobs.get(job, [])))]
    if (kind, index) not in places:
        raise ValueError(
            "`task` in TF_CONFIG must have the `type` and `index` of a server or "
            f"worker. Received: task={kind, index}, cluster={jobs}"
        )
    place = places.index((kind, index))
    address = [*ps, *workers][place]
    if kind == "ps":
        return Cluster(tuple(ps), len(workers), "ps", place, address)
    return Cluster(tuple(ps), len(workers), "worker", place - len(ps), address)


def serve(cluster: Cluster) -> NoReturn:
    """Hold variables for the workers, until a signal ends this process.

    It listens at the port of its address on all interfaces, of IPv4 and IPv6, as
    TensorFlow's servers do. SIGTERM ends it with status 0.

    Args:
        cluster: in which this task is of type "ps".

    Raises:
        ValueError: another process has the port.
    """
    # What would be on them is on none of the workers.
    tf.config.set_visible_devices([], "GPU")
    spec = tf.train.ClusterSpec({"ps": {cluster.index: cluster.address}})
    try:
        # Not tf.distribute.Server, which clients can crash. Who finds no context on it
        # replaces what collectives are run by (tensorflow/core/distributed_runtime/
        # eager/eager_service_impl.cc, update_collective_executor_mgr); of two that come
        # in one instant the first is left with a pointer to what is gone. Here this
        # process has a context of its own before others come.
        tf.config.experimental_connect_to_cluster(
            spec, job_name="ps", task_index=cluster.index
        )
        tf.timestamp()  # the first operation starts the server
    except tf.errors.UnknownError as error:
        raise ValueError(
            "A server's port must be free. Received: "
            f"index={cluster.index}, address={cluster.address!r}, where TensorFlow "
            f"says: {error.message}"
        ) from error
    place = f"Parameter server {cluster.index} at {cluster.address}"
    _logger.info("%s serves, until it gets a signal", place)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)
    while True:
        time.sleep(1.0)  # not for ever: a signal may come just before


def _end(number: int, _: types.FrameType | None) -> None:
    """End the process: TensorFlow's server cannot be stopped in another way."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0 if number == signal.SIGTERM else 128 + number)


def connect(cluster: Cluster) -> None:
    """Let this process, a worker, use the servers, which may still have to come.

    Args:
        cluster: in which this task is of type "worker".

    Raises:
        TimeoutError: a server did not come within TF_DGC_TIMEOUT; names it.
        ValueError: another process has this worker's port.
    """
    _wait_for(cluster.ps, base.default_timeout())
    # A server need not know of a worker before; it answers at this address.
    spec: dict[str, Any] = {
        "ps": list(cluster.ps),
        "worker": {cluster.index: cluster.address},
    }
    try:
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(spec), job_name="worker", task_index=cluster.index
        )
    except tf.errors.UnknownError as error:
        raise ValueError(
            "A worker's port must be free, and its index its own. Received: "
            f"index={cluster.index}, address={cluster.address!r}, where TensorFlow "
            f"says: {error.message}"
        ) from error


def _wait_for(servers: Sequence[str], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while missing := rendezvous.unreachable(servers, None):
        if time.monotonic() > deadline:
            named = ", ".join(f"{j} ({servers[j]})" for j in missing)
            raise TimeoutError(
                f"Parameter server {named} did not come within {timeout:g} s "
                "(TF_DGC_TIMEOUT). Start every task of the cluster, those of type "
                "`ps` with the same script, and check that addresses and ports are "
                "reachable from this machine."
            )
        time.sleep(_POLL_SECONDS)
