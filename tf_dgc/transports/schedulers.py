"""Environment of processes that schedulers start: how many, which, and where.

Slurm's srun, MPI's mpirun without an MPI in Horovod, and Indexed Jobs of Kubernetes.
None of them gives out ports: these are counted from a number that all compute alike.
"""

import itertools
import logging
import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

PORT, HOSTS = "TF_DGC_PORT", "TF_DGC_HOSTS"
WORKERS, SERVICE = "TF_DGC_WORKERS", "TF_DGC_SERVICE"
# What srun tells the processes that it starts; a batch script or an allocation's shell
# has SLURM_NTASKS, too, but not this.
SRUN_SIZE = "SLURM_STEP_NUM_TASKS"
INDEX = "JOB_COMPLETION_INDEX"
# Size, rank, and how many and which on this host, as Open MPI and MPICH name them.
_MPI = (
    (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
# Below those that Linux gives to outgoing connections; some for each job of a host.
_FIRST_PORT, _JOBS, _EACH = 12_000, 250, 80
# Launchers by their name: rank and number of all processes that they start; some tell
# no number, or, as a batch script of Slurm's, have one that is not of processes.
_RANKS = (
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("mpirun", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
)
_TORCH = ("RANK", "WORLD_SIZE")
_HALF = (
    "{} started this process as one of several, and does not tell it enough of the "
    "others. Received: {}. Use srun or tf-dgc-run, or set TF_CONFIG; where each "
    "process is to train alone, transport='local'"
)
_logger = logging.getLogger("tf_dgc")
_NODES = re.compile(r"((?:[^,\[\]]|\[[^\]]*\])+)(?:,|$)")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_HOSTS = re.compile(r"([^,:\s]+)(?::([0-9]{1,5}))?(?:,|$)")
_MOST = 100_000  # nodes or workers


class ProcessPlace(NamedTuple):
    """Place of a process, as it was told.

    Attributes:
        source: who told it.
        addresses: "host:port" of each worker, in the order of rank.
        rank: of this worker.
    """

    source: str
    addresses: list[str]
    rank: int


def find() -> ProcessPlace | None:
    """Return what this process's environment tells of others, None if nothing.

    Raises:
        RuntimeError: a part is missing; the message names it.
        ValueError: a part is malformed.
    """
    if _number(SRUN_SIZE, 1) > 1:
        return _slurm()
    for names in _MPI:
        if _number(names[0], 1) > 1:
            return _mpi(*names)
    if os.environ.get(INDEX):
        return _kubernetes()
    _refuse_half()
    return None


def _refuse_half() -> None:
    """Refuse a process that is one of several by its rank, and knows no others.

    The first of several may be a batch script: it trains alone, with a warning.

    Raises:
        RuntimeError: it is not the first, or a launcher for PyTorch has started it.
    """
    if all(map(os.environ.get, _TORCH)) and _number_or_none(_TORCH[1]) != 1:
        told = ", ".join(f"{name}={os.environ[name]}" for name in _TORCH)
        raise RuntimeError(_HALF.format("torchrun, or a launcher like it,", told))
    if any(_number_or_none(name) == 1 for name in (SRUN_SIZE, *(n for n, *_ in _MPI))):
        return
    for launcher, rank_name, size_name in _RANKS:
        rank, size = _number_or_none(rank_name), _number_or_none(size_name)
        told = f"{rank_name}={rank}, " + (f"{size_name}={size}" if size else "no size")
        if rank:
            raise RuntimeError(_HALF.format(launcher, told))
        if rank == 0 and (launcher != "Slurm" if size is None else size > 1):
            _logger.warning(
                "This process trains alone (%s): where it is one of several, start it "
                "by srun, mpirun or tf-dgc-run, or set TF_CONFIG",
                told,
            )
            return


def _number_or_none(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _slurm() -> ProcessPlace:
    own = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
    _require("srun", *own, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    rank, node, local = (_number(name) for name in own)
    nodes = expand_nodes(os.environ["SLURM_STEP_NODELIST"])
    tasks = expand_tasks(os.environ["SLURM_STEP_TASKS_PER_NODE"])
    size = _number(SRUN_SIZE)
    if len(nodes) != len(tasks) or sum(tasks) != size:
        raise ValueError(
            "Slurm's variables must agree. Received: "
            f"{SRUN_SIZE}={size}, {len(nodes)} nodes, tasks on each {tasks}"
        )
    if not (node < len(nodes) and rank == sum(tasks[:node]) + local < size):
        raise RuntimeError(
            "Ranks must follow the nodes, as with srun --distribution=block. Received: "
            f"SLURM_PROCID={rank} is SLURM_LOCALID={local} of SLURM_NODEID={node}"
        )
    job, step = _number("SLURM_JOB_ID", 0), _number("SLURM_STEP_ID", 0)
    return ProcessPlace("srun", _addresses(nodes, tasks, 31 * job + step), rank)


def _mpi(
    size_name: str, rank_name: str, count_name: str, local_name: str
) -> ProcessPlace:
    _require(f"mpirun ({size_name})", rank_name)
    size, rank = _number(size_name), _number(rank_name)
    if HOSTS in os.environ:
        found = _HOSTS.findall(os.environ[HOSTS])
        nodes, tasks = [host for host, _ in found], [int(n or 1) for _, n in found]
    elif _number(count_name, 0) == size:
        nodes, tasks = ["127.0.0.1"], [size]
    else:
        raise RuntimeError(
            "mpirun does not tell processes the hosts of the others, and Horovod has "
            f"no MPI. Received: {size_name}={size}, no {HOSTS}. Set {HOSTS}=a:2,b:2 "
            "for all, in the order of ranks, or use tf-dgc-run --hosts"
        )
    if sum(tasks) != size or rank >= size:
        raise ValueError(
            f"{HOSTS} must have as many workers as mpirun started. "
            f"Received: {size_name}={size}, {HOSTS} of {sum(tasks)}, rank {rank}"
        )
    return ProcessPlace("mpirun", _addresses(nodes, tasks, 0), rank)


def _kubernetes() -> ProcessPlace | None:
    if os.environ.get(WORKERS) == "1":
        return None
    _require("An Indexed Job of Kubernetes", WORKERS, SERVICE, "HOSTNAME")
    rank, size = _number(INDEX), _number(WORKERS)
    name, dash, index = os.environ["HOSTNAME"].rpartition("-")
    if not dash or index != str(rank) or rank >= size:
        raise ValueError(
            f"HOSTNAME must end in -{INDEX}, which must be less than {WORKERS}. "
            f"Received: HOSTNAME={os.environ['HOSTNAME']}, {INDEX}={rank}, "
            f"{WORKERS}={size}"
        )
    hosts = [f"{name}-{i}.{os.environ[SERVICE]}" for i in range(size)]
    return ProcessPlace("Kubernetes", _addresses(hosts, [1] * size, 0), rank)


def _addresses(hosts: Sequence[str], counts: Sequence[int], job: int) -> list[str]:
    """Return an address for each worker; `job` parts those of jobs on one host."""
    first = _number(PORT, _FIRST_PORT + job % _JOBS * _EACH)
    hosts = ["127.0.0.1"] if len(hosts) == 1 else hosts
    return [
        f"{host}:{first + local}"
        for host, count in zip(hosts, counts, strict=True)
        for local in range(count)
    ]


def expand_nodes(text: str) -> list[str]:
    """Return the names in a list of Slurm's, such as "a[1-2,07],b".

    Raises:
        ValueError: it is no such list.
    """
    nodes: list[str] = []
    for part in _NODES.findall(text):
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [[piece] for piece in pieces]
        choices[1::2] = [_numbers(piece, text) for piece in pieces[1::2]]
        if len(nodes) + math.prod(map(len, choices)) > _MOST:
            raise ValueError(f"Too many nodes. Received: {text[:80]!r}")
        nodes += ["".join(names) for names in itertools.product(*choices)]
    if not nodes or ",".join(_NODES.findall(text)) != text:
        raise ValueError(f"No list of Slurm's nodes. Received: {text[:80]!r}")
    return nodes


def _numbers(text: str, whole: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()):
            raise ValueError(f"No list of Slurm's nodes. Received: {whole[:80]!r}")
        if int(last) - int(first) > _MOST:
            raise ValueError(f"Too many nodes. Received: {whole[:80]!r}")
        found += [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    return found


def expand_tasks(text: str) -> list[int]:
    """Return the numbers in Slurm's "2(x3),1".

    Raises:
        ValueError: it is no such list.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if not match or len(tasks) > _MOST or int(match[2] or 1) > _MOST:
            raise ValueError(f"No list of Slurm's tasks. Received: {text[:80]!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _require(source: str, *names: str) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"{source} started this process as one of several, and does not tell it "
            f"enough of the others. Received: no {', no '.join(missing)}. Set them, or "
            "TF_CONFIG; where each process is to train alone, transport='local'"
        )


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name) or ("" if default is None else str(default))
    if not (text.isdecimal() and text.isascii()) or len(text) > 18:
        raise ValueError(f"{name} must be a number. Received: {name}={text[:80]!r}")
    return int(text)
