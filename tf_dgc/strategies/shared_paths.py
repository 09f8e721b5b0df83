"""Paths that several workers write to, or that one writes and others read.

* `Dataset.cache(path)`: each worker has a file of its own, as two may not write one.
* SavedModel, `model.export`: a folder is replaced in one instant, and whole before and
  after it.
* `keras.utils.get_file`: a file is whole as soon as it is there.
* TensorFlow's recipe for saving with several workers: each saves to a path of its own,
  then all load that of the chief; who loads waits until the chief has written it.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from tf_dgc.transports import base

_AT_FDCWD, _EXCHANGE = -100, 2  # of renameat2(2)
_POLL_SECONDS = 0.2
# What TensorFlow writes into the folder of a SavedModel.
_OWN = frozenset(
    "assets assets.extra fingerprint.pb keras_metadata.pb saved_model.pb variables"
    " debug".split()
)


class _Process:
    """State of this process, as a worker among several, or alone."""

    rank, workers = 0, 1
    begun = 0.0  # when this became a worker, by the clock of files
    # When `fit` or the like began last, by the clock of files.
    since = 0.0
    # Of files that this worker has saved beside that of the chief, the names, and what
    # was at the chief's path before.
    beside: ClassVar[dict[str, "tuple[int, int] | None"]] = {}


def is_beside_chief() -> bool:
    """Tell whether another worker of this job is the one that writes."""
    return bool(_Process.rank) and _Process.workers > 1


def is_of_this_job(stamped: tuple[int, int]) -> bool:
    """Tell whether a file was written since this became a worker, by its stamp."""
    return stamped[1] >= _Process.begun * 1e9


def set_worker(rank: int, workers: int) -> None:
    """Note that this process is a worker among several, or alone."""
    _Process.rank, _Process.workers = rank, workers
    _Process.begun = time.time()


# Downloads of Keras.


def retrieve(
    original: Callable[..., Any], url: str, filename: Any = None, *args: Any
) -> Any:
    """Download a file that another worker may look for in the same folder."""
    if filename is None:
        return original(url, filename, *args)
    part = f"{os.fspath(filename)}.{os.getpid()}.part"
    try:
        found = original(url, part, *args)
        os.replace(part, filename)
    finally:
        pathlib.Path(part).unlink(missing_ok=True)
    return filename, found[1]


# Caches of tf.data.


def cache(
    original: Callable[..., Any], dataset: Any, filename: Any = "", **kwargs: Any
) -> Any:
    """Cache a dataset in a file of this worker alone."""
    if isinstance(filename, (str, bytes, os.PathLike)) and os.fspath(filename):
        filename = own_path(os.fsdecode(filename))
        if os.environ.get("TF_DGC_ATTEMPT", "0") != "0":
            _unlock(filename)
    return original(dataset, filename, **kwargs)


def own_path(path: str) -> str:
    """Return a path of this worker alone; the given one where there is no other.

    Rows that a worker caches may be its own, so that the number of workers is in it.
    """
    if _Process.workers == 1:
        return path
    return f"{path}.worker-{_Process.rank:05d}-of-{_Process.workers:05d}"


def _unlock(path: str) -> None:
    """Remove what is left of the writing of a cache by a process that was killed.

    For a job that tf-dgc-run has started again, which has ended all processes before.
    """
    found = pathlib.Path(path)
    for pattern in ("_*.lockfile", "_*.tempstate*"):
        for each in found.parent.glob(f"{found.name}{pattern}"):
            with contextlib.suppress(OSError):
                each.unlink()


# Folders of models.


def save_folder(
    original: Callable[..., Any],
    obj: Any,
    export_dir: Any,
    signatures: Any = None,
    options: Any = None,
) -> Any:
    """Save a model to a folder, which is replaced in one instant."""
    target = _plain_folder(export_dir) if _Process.workers > 1 else None
    if target is None or getattr(options, "experimental_image_format", False):
        return original(obj, export_dir, signatures, options)
    with replaced_folder(target, _Process.rank == 0) as temporary:
        return original(obj, str(temporary), signatures, options)


def _plain_folder(path: Any) -> pathlib.Path | None:
    """Return the folder that can be replaced, as it holds nothing but a SavedModel."""
    if not isinstance(path, (str, os.PathLike)) or "://" in str(path):
        return None
    folder = pathlib.Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        if not folder.is_dir() or not set(os.listdir(folder)) <= _OWN:
            return None if folder.exists() else folder
    return folder


@contextlib.contextmanager
def replaced_folder(target: pathlib.Path, chief: bool) -> Iterator[pathlib.Path]:
    """Yield where to write; then replace a folder, which so is whole at any time.

    What another worker has put there meanwhile stays, unless this one is the chief.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{os.getpid()}.{os.urandom(4).hex()}.{target.name}")
    before = stamp(target)
    try:
        yield temporary
        if chief or stamp(target) == before:
            try:
                temporary.rename(target)  # where there is none, or an empty one
            except OSError:
                _exchange(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(one: pathlib.Path, other: pathlib.Path) -> None:
    """Let two folders change their names, in one instant where the disk can do that."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2") and not libc.renameat2(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE
    ):
        return
    aside = one.with_name(f"{one.name}.old")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def stamp(path: pathlib.Path) -> tuple[int, int] | None:
    """Return what changes when a file or folder is replaced."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


# The recipe.


def begin() -> None:
    """Note that a `fit`, or the like, begins: files of before are none of after it."""
    _Process.since = time.time()


def note_saving(path: pathlib.Path) -> None:
    """Note that this worker saves to a path, perhaps beside that of the chief.

    The recipe puts it into a folder of the worker, in the folder of the chief's file.
    """
    if is_beside_chief():
        chief = path.parent.parent / path.name
        _Process.beside.setdefault(str(chief), stamp(chief))


def load_weights(
    original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load weights once the chief has written them."""
    wait_for_chief(filepath)
    return original(model, filepath, *args, **kwargs)


def load_model(
    original: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load a model once the chief has written it."""
    wait_for_chief(filepath)
    return original(filepath, *args, **kwargs)


def wait_for_chief(filepath: Any) -> None:
    """Wait until the chief has written a file that this worker has saved beside it.

    Raises:
        TimeoutError: it has not.
    """
    if not isinstance(filepath, (str, os.PathLike)):
        return
    path = pathlib.Path(os.path.realpath(filepath))
    if str(path) not in _Process.beside:
        return
    before = _Process.beside.pop(str(path))
    timeout = base.default_timeout()
    until = time.monotonic() + timeout
    while (now := stamp(path)) is None or (
        now == before and now[1] < _Process.since * 1e9
    ):
        if time.monotonic() > until:
            raise TimeoutError(
                f"Worker 0 must save {path}, as this worker has saved a file of this "
                f"name and now loads that one. It has not within {timeout:g} s; "
                "TF_DGC_TIMEOUT sets the time"
            )
        time.sleep(_POLL_SECONDS)
