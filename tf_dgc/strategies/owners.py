"""Owners of folders of backups: which process, which `fit`, and how the process ended.

Each worker has a file `rank-00000.owner` in the folder. As long as its process lives it
holds a lock of the kernel on this file, which ends with the process in whatever way, so
that a second job is refused and a killed one is not waited for. When the process ends
well it notes so in the file; the last of the workers that share a disk then removes the
backups. Where one of them did not end well, all backups stay.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import json
import os
import pathlib
import re
import shutil
import socket
import time
from collections.abc import Callable
from typing import Any

from tf_dgc.exchanges import records as saving
from tf_dgc.transports import Transport, ending, handshake

# Seconds for which a job waits for another that uses its folder; a worker that failed
# ends within 20 seconds, whatever it waits for at its exit.
PATIENCE = 25.0
_BUSY = (errno.EACCES, errno.EAGAIN)
_MAX_BYTES = 4096  # of the file
_FILE = re.compile(r"rank-(\d{5})\.owner")


class FileOwner:
    """This process, as one of the workers that a folder of backups belongs to.

    Attributes:
        done: numbers of the calls of `fit` of this process that have ended.
        deletes: whether the backups are removed when all workers have ended well.
        complete: whether no `fit` with backups in this folder is under way.
    """

    def __init__(self, folder: pathlib.Path, rank: int) -> None:
        self.folder, self._rank = folder, rank
        self.done: set[int] = set()
        self.deletes = self.complete = True
        self._process = os.getpid()
        self._descriptor = -1
        self._record: dict[str, Any] = {}

    @property
    def _path(self) -> pathlib.Path:
        return self.folder / f"rank-{self._rank:05d}.owner"

    @property
    def holds(self) -> bool:
        """Tell whether this process has the lock of the file that is there now."""
        with contextlib.suppress(OSError):
            own, there = os.fstat(self._descriptor), self._path.stat()
            same = (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
            return same and self._process == os.getpid()
        return False

    def take(self) -> str:
        """Take the lock; return who has it, or "" where this process does now.

        Raises:
            OSError: the folder cannot be made or written.
        """
        if self.holds:
            return ""
        self.release()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = os.getpid()
        self._record = {}
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        holder = ""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # others: a file system without locks
            busy = error.errno in _BUSY
            holder = _name_of(self.before(), only_if_alive=not busy)
        if holder:
            self.release()
        return holder

    def release(self) -> None:
        """Give the lock up."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    def before(self) -> dict[str, Any] | None:
        """Return what the file tells; None where it is new."""
        # Not opened again: to close a file ends all locks that this process has on it.
        return _parsed(os.pread(self._descriptor, _MAX_BYTES, 0))

    def begin(self, job: str, workers: int) -> None:
        """Note that this process uses the folder.

        Args:
            job: what is the same on all workers that wait for each other's end.
            workers: how many these are.

        Raises:
            OSError: the folder cannot be written.
        """
        self._record = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "place": _place(),
            "launch": _launch(),
            "job": job,
            "workers": workers,
            "deletes": self.deletes,
            "ended": False,
        }
        self._write()

    def follow(self, workers: int, deletes: bool) -> bool:
        """Begin as a worker that does not meet others, where that can be noted.

        Returns:
            Whether the job before had ended well here.

        Args:
            workers: how many must end well, before the backups may go.
            deletes: whether they are to go then.

        Raises:
            OSError: the folder cannot be written.
        """
        self.complete, self.deletes = False, deletes
        if _writable(self, self.take):
            return False
        before = _state(self, meets=False)
        _writable(self, lambda: self.begin(_launch(), workers))
        return deletes and before == "ended"

    def end(self) -> None:
        """Note that this process has ended well; remove all if it is the last."""
        if not self.complete or not self.holds or not self._record:
            return
        self._record["ended"] = True
        self._write()
        if self.deletes and self._all_have_ended():
            clear(self.folder)

    def _write(self) -> None:
        octets = json.dumps(self._record).encode()
        os.ftruncate(self._descriptor, 0)
        written = os.pwrite(self._descriptor, octets, 0)
        if written < len(octets):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        os.fsync(self._descriptor)

    def _all_have_ended(self) -> bool:
        job = self._record["job"]
        others = [
            record is not None and record.get("job") == job and record.get("ended")
            for rank, record in records_in(self.folder, but=self._rank).items()
            if rank < self._record["workers"]
        ]
        return len(others) == self._record["workers"] - 1 and all(others)


_owners: dict[tuple[str, int], FileOwner] = {}


def of(folder: pathlib.Path, rank: int) -> FileOwner:
    """Return the owner that this process is of a folder, as one of the workers."""
    _watch_the_end()
    key = os.path.realpath(folder), rank
    owner = _owners.get(key)
    if owner is None or owner._process != os.getpid():
        owner = _owners[key] = FileOwner(pathlib.Path(key[0]), rank)
    return owner


def claim(owner: FileOwner, transport: Transport, workers: int, deletes: bool) -> None:
    """Become the owner of a folder, together with all other workers.

    Args:
        owner: of this worker.
        transport: to the others.
        workers: how many must end well, before the backups may go.
        deletes: whether the backups are to go when all workers have ended well.

    Raises:
        OSError: the folder cannot be written; on the worker that met it.
        ValueError: on the others then, or where another job uses the folder.
    """
    owner.deletes = deletes
    told = f"success in writing to {owner.folder}"
    until = time.monotonic() + PATIENCE
    while True:
        own = saving.together(transport, told, lambda: _writable(owner, owner.take))
        holders = handshake.tell(transport, "owner of backups", {"holder": own})
        found = {rank: each["holder"] for rank, each in enumerate(holders)}
        if not any(found.values()):
            break
        if time.monotonic() > until:
            owner.release()
            rank, holder = next((r, h) for r, h in found.items() if h)
            raise ValueError(
                f"`backup_dir` must be a folder that no other job uses. Received: "
                f"{owner.folder}, which {holder} uses on rank {rank}. Give this job "
                "another folder, or end that process"
            )
        time.sleep(min(1.0, PATIENCE))
    meets = workers == (1 if transport.alone else transport.size)
    own = {"state": _state(owner, meets), "job": os.urandom(8).hex()}
    verdicts = handshake.tell(transport, "end of the job before", own)
    states = [each["state"] for each in verdicts]
    job = str(verdicts[0]["job"]) if meets else _launch()
    for rank in records_in(owner.folder, but=owner._rank):
        if rank >= workers:  # there were more before
            (owner.folder / f"rank-{rank:05d}.owner").unlink(missing_ok=True)
    if deletes and "ended" in states and "cut short" not in states:
        clear(owner.folder, records=False)
    saving.together(
        transport, told, lambda: _writable(owner, lambda: owner.begin(job, workers))
    )


def _writable(owner: FileOwner, act: Callable[[], Any]) -> Any:
    try:
        return act()
    except OSError as error:
        kind = type(error)
        raise kind(
            error.errno,
            "`backup_dir` must be a folder that all workers can write. Received: "
            f"{owner.folder} ({error.strerror})",
        ) from None


def _state(owner: FileOwner, meets: bool) -> str:
    """Tell how the job before ended, as far as this worker can see."""
    if owner._record:  # a `fit` before, of this process
        return "cut short"
    records = [owner.before()]
    if meets:  # elsewhere other workers come and go by themselves
        records += records_in(owner.folder, but=owner._rank).values()
    known = [record for record in records if record]
    begun = any(owner.folder.glob("epoch-*")) or any(owner.folder.glob("fit-*"))
    if not known:
        return "cut short" if begun else "nothing"
    same = _launch() and any(r.get("launch") == _launch() for r in known)
    ended = all(record.get("ended") and record.get("deletes") for record in known)
    return "ended" if ended and not same else "cut short"


def records_in(folder: pathlib.Path, but: int) -> dict[int, dict[str, Any] | None]:
    """Return what the owners' files tell, by rank, without one of them."""
    found = {}
    for path in folder.glob("rank-*.owner"):
        match = _FILE.fullmatch(path.name)
        if match and int(match[1]) != but:
            with contextlib.suppress(OSError), path.open("rb") as file:
                found[int(match[1])] = _parsed(file.read(_MAX_BYTES))
    return found


def _parsed(octets: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(octets)
    except ValueError:  # new, or the writing was cut short
        return None
    return found if isinstance(found, dict) else None


def _name_of(record: dict[str, Any] | None, only_if_alive: bool) -> str:
    """Return the name of a process, for a message; "" where it is not alive."""
    if record is None:
        return "" if only_if_alive else "another process"
    process, host = record.get("process"), record.get("host")
    if only_if_alive:
        own = record.get("place") == _place() and process != os.getpid()
        alive = own and os.path.exists(f"/proc/{process}")
        if record.get("ended") or not alive:
            return ""
    return ascii(f"process {process} on host {host}")[1:-1]


def _place() -> str:
    """Name the kernel and the processes that this one can see."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _launch() -> str:
    """Name the call of tf-dgc-run that has started this job, perhaps again."""
    return os.environ.get("TF_DGC_LAUNCH", "")


# What goes when a job has ended well.


def remove(folder: pathlib.Path) -> None:
    """Remove one backup: first what says that it is whole."""
    for path in [folder / "manifest.json", *folder.glob("rank-*.whole")]:
        with contextlib.suppress(OSError):
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def clear(folder: pathlib.Path, records: bool = True) -> None:
    """Remove all backups, and at last the folder, if nothing else is in it.

    Args:
        folder: of backups of all calls of `fit`.
        records: whether also the owners' files, and the folder.
    """
    for fit in [folder, *folder.glob("fit-*")]:
        for backup in fit.glob("epoch-*"):
            remove(backup)
        shutil.rmtree(fit / "workers", ignore_errors=True)
        for path in fit.glob("rank-*.fit"):
            path.unlink(missing_ok=True)
        if fit != folder:
            shutil.rmtree(fit, ignore_errors=True)
    if records:
        for path in folder.glob("rank-*.owner"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


# How this process ends.


@functools.cache
def _watch_the_end() -> None:
    ending.watch()
    atexit.register(_finish)


def _finish() -> None:
    """Note in the folders of this process that it has ended well, if it has."""
    failed = ending.failure() is not None
    for owner in list(_owners.values()):
        if not failed and owner._process == os.getpid():
            with contextlib.suppress(OSError):
                owner.end()
