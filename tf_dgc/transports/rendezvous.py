"""Rendezvous of workers before TensorFlow has started.

What comes over the network here is parsed as text and checked; nothing is unpickled.
"""

import contextlib
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

from tf_dgc.transports.waiting import WaitReport

_LABEL = r"[A-Za-z0-9_-]{1,63}"
_ADDRESS = re.compile(
    rf"({_LABEL}(?:\.{_LABEL})*\.?|\[[0-9A-Fa-f:.]+\]):([0-9]{{1,5}})"
)
EVALUATOR: Final = "evaluator"
_MAX_HOST = 255  # characters
_MAX_TEXT = 4096  # bytes that are read of what a worker told the store
_POLL_SECONDS = 0.05
_REQUEST_SECONDS = 10.0


class NoHybridTransport(RuntimeError):
    """Some worker cannot take TensorFlow's collectives beside Horovod."""


def read_tf_config(text: str) -> tuple[list[str], int]:
    """Read the value of TF_CONFIG.

    Args:
        text: JSON with `cluster` (jobs "worker" and, before it, "chief") and `task`, as
            Kubeflow's TFJob writes it: evaluators may be there, and are no workers.

    Returns:
        The address of each worker in the order of rank, and this worker's rank. The
        addresses are empty where there is no cluster, and for an evaluator.

    Raises:
        ValueError: it is not JSON, or no cluster of workers only.
    """
    jobs, place = read_jobs(text)
    if not jobs or place[0] == EVALUATOR:
        return [], 0
    if set(jobs) - {"chief", "worker", EVALUATOR}:
        raise ValueError(
            "TF_CONFIG must have no jobs but `chief`, `worker` and `evaluator`: the "
            "servers of a job `ps` are for tf_dgc.DownpourStrategy only. Take it, or "
            f"start the job without them. Received: jobs {sorted(jobs)}"
        )
    order = [
        (job, i) for job in ("chief", "worker") for i in range(len(jobs.get(job, [])))
    ]
    addresses = [jobs[job][i] for job, i in order]
    check_addresses(addresses, "TF_CONFIG")
    if place not in order:
        raise ValueError(
            "`task` in TF_CONFIG must have the `type` and `index` of a member of "
            f"`cluster`. Received: task={place}, cluster={jobs}"
        )
    return addresses, order.index(place)


def read_jobs(text: str) -> tuple[dict[str, list[str]], tuple[Any, Any]]:
    """Read the value of TF_CONFIG, whatever jobs it has.

    Returns:
        The addresses of each job, not checked, and this task's type and index; nothing
        of them where there is no cluster.

    Raises:
        ValueError: it is not JSON, or not of that form.
    """
    try:
        config = json.loads(text) if text.strip() else {}
        cluster = config.get("cluster") or {}
        task = config.get("task") or {}
        jobs = {job: list(map(str, members)) for job, members in cluster.items()}
        return jobs, (task.get("type"), task.get("index"))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"TF_CONFIG must be a JSON object with `cluster` and `task`: {error}. "
            f"Received: TF_CONFIG={text!r}"
        ) from error


def is_evaluator(text: str) -> bool:
    """Tell whether a TF_CONFIG that `read_tf_config` has read is of an evaluator."""
    return read_jobs(text)[1][0] == EVALUATOR


def check_address(address: str) -> tuple[str, int]:
    """Split "host:port".

    Raises:
        ValueError: it is something else.
    """
    match = _ADDRESS.fullmatch(address)
    if not match or len(match[1]) > _MAX_HOST or not 0 < int(match[2]) < 65536:
        raise ValueError(
            f'A worker\'s address must be "host:port". Received: {address[:80]!r}'
        )
    return match[1].strip("[]"), int(match[2])


def check_addresses(addresses: Sequence[str], source: str) -> None:
    """Refuse what is no address, and one that is there twice."""
    for address in addresses:
        check_address(address)
    if len(set(addresses)) != len(addresses):
        raise ValueError(f"{source} names an address twice. Received: {addresses}")


def wait_for_peers(addresses: Sequence[str], rank: int, timeout: float) -> None:
    """Listen on this worker's port until every other worker's port answers.

    Args:
        addresses: "host:port" of each worker; the port of `rank` must be free.
        rank: of this worker.
        timeout: seconds to wait.

    Raises:
        TimeoutError: some worker did not come; names it.
        OSError: this worker's port is taken.
    """
    deadline = time.monotonic() + timeout
    waiting = WaitReport(rank, addresses)
    missing = {i: check_address(a) for i, a in enumerate(addresses) if i != rank}
    with _listen(check_address(addresses[rank])[1], addresses[rank], len(addresses)):
        while missing:
            for peer, place in list(missing.items()):
                with contextlib.suppress(OSError):
                    socket.create_connection(place, timeout=1.0).close()
                    del missing[peer]
            if missing and time.monotonic() > deadline:
                named = ", ".join(f"{i} ({addresses[i]})" for i in sorted(missing))
                raise TimeoutError(
                    f"Worker {named} did not come within {timeout:g} s. Start every "
                    "worker of the cluster with its own `task`, and check that "
                    "addresses and ports are reachable from this machine."
                )
            if missing:
                waiting.still(missing)
                time.sleep(_POLL_SECONDS)
    waiting.over()


def unreachable(addresses: Sequence[str], rank: int | None) -> list[int]:
    """Return the numbers of those whose port does not answer now, but for `rank`."""
    gone = []
    for peer, address in enumerate(addresses):
        if peer != rank:
            try:
                socket.create_connection(check_address(address), timeout=1.0).close()
            except OSError:
                gone.append(peer)
    return gone


def _listen(port: int, address: str, workers: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=workers + 8, dualstack_ipv6=both
        )
    except OSError as error:
        raise OSError(
            error.errno, f"This worker's port is taken: {address} ({error.strerror})"
        ) from error


def exchange_addresses(
    rank: int, size: int, obstacle: str, timeout: float
) -> list[str]:
    """Tell all workers a free port of this one, through horovodrun's store.

    Args:
        rank: of this worker.
        size: number of workers.
        obstacle: why this worker cannot take TensorFlow's collectives, or "".
        timeout: seconds to wait for the others.

    Returns:
        "host:port" of each worker.

    Raises:
        NoHybridTransport: some worker has an obstacle, or there is no store; raised
            on all workers alike.
        TimeoutError: a worker did not answer; names it.
        ValueError: the store holds something that is no address.
    """
    host = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not host or not port:
        raise NoHybridTransport(
            "the launcher has no rendezvous store (horovodrun has one, mpirun not)"
        )
    scope = f"http://{host}:{port}/tf_dgc"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reserved:
        reserved.bind(("", 0))
        own = f"{_own_host(host, int(port))}:{reserved.getsockname()[1]}"
        _put(f"{scope}/{rank}", f"!{obstacle}" if obstacle else own)
        deadline, waiting = time.monotonic() + timeout, WaitReport(rank, [""] * size)
        found = [_get(scope, peer, deadline, waiting) for peer in range(size)]
        waiting.over()
    obstacles = [
        f"on rank {peer}, {_printable(text[1:])}"
        for peer, text in enumerate(found)
        if text.startswith("!")
    ]
    if obstacles:
        raise NoHybridTransport("; ".join(obstacles))
    check_addresses(found, "The rendezvous store")
    return found


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:400])


def _own_host(host: str, port: int) -> str:
    """Return this machine's address on the network of the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]


def _put(url: str, text: str) -> None:
    request = urllib.request.Request(url, data=text.encode(), method="PUT")
    with _opener.open(request, timeout=_REQUEST_SECONDS):
        pass


def _get(scope: str, peer: int, deadline: float, waiting: WaitReport) -> str:
    while True:
        try:
            with _opener.open(f"{scope}/{peer}", timeout=_REQUEST_SECONDS) as response:
                return response.read(_MAX_TEXT).decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"Worker {peer} did not tell its address in time. Do all workers "
                "create the same strategy?"
            )
        waiting.still([peer])
        time.sleep(_POLL_SECONDS)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        return None  # then it is an error


# The store is on the local network: never through a proxy, and nowhere else.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
