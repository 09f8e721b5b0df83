"""Facts of a worker: versions, names, memory, disk and GPUs."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tf_dgc.version import __version__

_PACKAGES = ("tensorflow", "keras", "horovod", "numpy")
_ABILITIES = ("gloo", "mpi", "nccl", "cuda")
# Prints what Horovod was built with; an import of it loads TensorFlow.
_HOROVOD = f"""
import json
import horovod.tensorflow as hvd
built = {{n: bool(getattr(hvd, n + "_built")()) for n in {_ABILITIES!r}}}
print(json.dumps([n for n, there in built.items() if there]))
"""
_HOROVOD_SECONDS = 120.0
_GPU_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that a worker knows of itself.

    Attributes:
        address: "host:port", by which the others know it.
        host: name that its machine has by itself.
        machine: the same for workers of one machine only.
        versions: by package; "none" of one that is not installed.
        horovod: what it was built with, or why it cannot be loaded.
        gpus: of its machine, each with its number.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        memory: bytes that are free.
        disk: bytes that are free in the folder.
        folder: for backups.
        obstacle: why nothing can be written there; "" where it can.
        resolved: for the name of each worker's host, its IP addresses; none where it
            has none.
    """

    rank: int
    address: str
    host: str = ""
    machine: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    horovod: str = ""
    gpus: Sequence[str] = ()
    visible: str | None = None
    memory: int = 0
    disk: int = 0
    folder: str = ""
    obstacle: str = ""
    resolved: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Facts":
        """Invert `dataclasses.asdict`; what is not known is left out."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: record[name] for name in names & record.keys()})


def gather(rank: int, addresses: Sequence[str], folder: str) -> Facts:
    """Look at this worker's machine.

    Args:
        rank: of this worker.
        addresses: "host:port" of all workers.
        folder: for backups; the first of it that exists is looked at.
    """
    versions = {"tf_dgc": __version__, "Python": platform.python_version()}
    versions |= {name: _version(name) for name in _PACKAGES}
    place = pathlib.Path(folder).absolute()
    while not place.exists():
        place = place.parent
    hosts = {host_of(address) for address in addresses}
    return Facts(
        rank=rank,
        address=addresses[rank],
        host=socket.gethostname(),
        machine=f"{socket.gethostname()} {_read('/proc/sys/kernel/random/boot_id')}",
        versions=versions,
        horovod="" if versions["horovod"] == "none" else _horovod(),
        gpus=_gpus(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        memory=_free_memory(),
        disk=shutil.disk_usage(place).free,
        folder=str(pathlib.Path(folder).absolute()),
        obstacle="" if os.access(place, os.W_OK) else f"{place} cannot be written",
        resolved={host: _resolved(host) for host in sorted(hosts)},
    )


def host_of(address: str) -> str:
    """Return the host of "host:port"."""
    return address.rpartition(":")[0].strip("[]")


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "none"


def _horovod() -> str:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _HOROVOD],
            env=os.environ | quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_HOROVOD_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return ", ".join(json.loads(done.stdout.splitlines()[-1])) or "nothing"
        last = done.stderr.strip().rpartition("\n")[2]
        return f"cannot be loaded: {last[:200]}"
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return f"cannot be loaded: {error}"


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=index,name,uuid", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_GPU_SECONDS, check=True
        )
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(path).read_text().strip()
    return ""


def _free_memory() -> int:
    for line in _read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(rest.split()[0])
    return 0


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})
