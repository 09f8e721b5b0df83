"""`tf.train.Checkpoint` and its manager, where several workers save in one folder.

The chief writes and deletes as one process does. Another worker writes where there is
nothing, or what is its own or older than the job, and deletes what is its own: so files
of the chief stay as they are, and a folder of one worker alone is that worker's. Who
asks for the latest checkpoint waits until the chief has recorded what it saves.
"""

import glob
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc.strategies import shared_paths
from tf_dgc.transports import base

_STATE = "checkpoint"  # TensorFlow's name of the file that names the latest one
_POLL_SECONDS = 0.2

_own: dict[str, tuple[int, int] | None] = {}  # files of this worker, with their stamps
# Folders whose latest checkpoint the chief has not recorded yet, with the stamps that
# their records had when this worker has saved.
_awaited: dict[str, tuple[int, int] | None] = {}


def save(
    original: Callable[..., Any], saver: Any, file_prefix: Any, *args: Any, **kw: Any
) -> Any:
    """Write the files of a checkpoint, unless they are the chief's."""
    eager = tf.executing_eagerly()  # else the files come later, by an operation
    if not (eager and shared_paths.is_beside_chief() and _is_local(file_prefix)):
        return original(saver, file_prefix, *args, **kw)
    target = pathlib.Path(os.fspath(file_prefix))
    temporary = target.with_name(_temporary_name(target.name))
    original(saver, str(temporary), *args, **kw)
    # Data first: readers look for the index.
    for path in sorted(temporary.parent.glob(f"{glob.escape(temporary.name)}.*")):
        _put(path, target.with_name(target.name + path.name[len(temporary.name) :]))
    return tf.constant(os.fspath(file_prefix))


def record(
    original: Callable[..., None],
    save_dir: Any,
    model_checkpoint_path: Any,
    all_model_checkpoint_paths: Any = None,
    latest_filename: Any = None,
    **kw: Any,
) -> None:
    """Record the latest checkpoint of a folder, unless the chief does."""
    own = save_dir, model_checkpoint_path, all_model_checkpoint_paths
    if not (shared_paths.is_beside_chief() and _is_local(save_dir)):
        original(*own, latest_filename, **kw)
        return
    state = pathlib.Path(os.fspath(save_dir)) / (latest_filename or _STATE)
    temporary = state.with_name(_temporary_name(state.name))
    original(*own, temporary.name, **kw)
    before = shared_paths.stamp(state)
    name = pathlib.Path(os.fspath(model_checkpoint_path)).name
    if not _put(temporary, state) and f'{name}"' not in state.read_text():
        _awaited[os.path.realpath(state)] = before


def delete(original: Callable[..., None], filespec: Any) -> None:
    """Delete files of an old checkpoint that are this worker's to delete."""
    if not (shared_paths.is_beside_chief() and _is_local(filespec)):
        original(filespec)
        return
    pattern = pathlib.Path(os.fspath(filespec))
    for path in pattern.parent.glob(pattern.name):
        stamped = _own.pop(os.path.realpath(path), None)
        if stamped is not None and stamped == shared_paths.stamp(path):
            path.unlink(missing_ok=True)


def read_record(
    original: Callable[..., Any], checkpoint_dir: Any, latest_filename: Any = None
) -> Any:
    """Read the latest checkpoint of a folder, once the chief has recorded it.

    Raises:
        TimeoutError: it has not.
    """
    if _is_local(checkpoint_dir):
        folder = os.fspath(checkpoint_dir)
        state = os.path.realpath(os.path.join(folder, latest_filename or _STATE))
        if state in _awaited:
            _wait_for(pathlib.Path(state), _awaited.pop(state))
    return original(checkpoint_dir, latest_filename)


def _wait_for(state: pathlib.Path, before: tuple[int, int] | None) -> None:
    timeout = base.default_timeout()
    until = time.monotonic() + timeout
    while shared_paths.stamp(state) == before:
        if time.monotonic() > until:
            raise TimeoutError(
                f"Worker 0 must save a checkpoint in {state.parent}, as this worker "
                f"has, and now asks for the latest one. It has not within {timeout:g} "
                "s; TF_DGC_TIMEOUT sets the time"
            )
        time.sleep(_POLL_SECONDS)


def _put(temporary: pathlib.Path, target: pathlib.Path) -> bool:
    """Move a file to its place, unless one of the chief is there; tell whether."""
    try:
        os.link(temporary, target)  # where there is none, in one instant
    except OSError:
        stamped, key = shared_paths.stamp(target), os.path.realpath(target)
        of_chief = stamped is not None and shared_paths.is_of_this_job(stamped)
        if of_chief and stamped != _own.get(key):
            temporary.unlink()
            return False
        temporary.replace(target)
    temporary.unlink(missing_ok=True)
    _own[os.path.realpath(target)] = shared_paths.stamp(target)
    return True


def _temporary_name(name: str) -> str:
    return f".{os.getpid()}.{os.urandom(4).hex()}.{name}"


def _is_local(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and "://" not in os.fspath(path)
