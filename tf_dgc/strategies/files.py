"""Files of ordinary scripts, which run on each of several workers.

Callbacks of Keras that are known to write, and what is derived from them, write on the
chief alone; `fit` goes on on the others when that is written, and what one of them has
read back all get. Models are saved beside their file, which is then replaced, so that
several workers may save to one path, and read it at any time.
"""

import contextlib
import contextvars
import functools
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.strategies import shared_paths
from tf_dgc.strategies.extended import OneReplicaExtended, on_one_worker

# They do nothing on workers that are not the chief.
_SILENT = (
    "BackupAndRestore",
    "CSVLogger",
    "OrbaxCheckpoint",
    "RemoteMonitor",
    "TensorBoard",
)
_FILES = (".keras", ".h5", ".hdf5")  # that models are saved to, each a single one
_silent = contextvars.ContextVar("tf_dgc_silent", default=False)


class _FilesProcess:
    """State of this process, as a worker among several, or alone."""

    several = False
    chief = True


def set_worker(rank: int, workers: int) -> None:
    """Note that this process is a worker among several, or alone.

    Nothing changes for models of other strategies, but that several workers can save
    them to one path.
    """
    _FilesProcess.several, _FilesProcess.chief = workers > 1, rank == 0
    shared_paths.set_worker(rank, workers)


def strategy_of(model: Any) -> Any:
    """Return the strategy of a model, if it is one of this package."""
    strategy = getattr(model, "distribute_strategy", None)
    own = isinstance(getattr(strategy, "extended", None), OneReplicaExtended)
    return strategy if own else None


# Callbacks that write.


def methods_that_write() -> Iterator[tuple[Any, str, Callable[..., None]]]:
    """Yield methods of callbacks: class, name, and the hook that replaces each."""
    for name in _SILENT:
        if hasattr(keras.callbacks, name):
            yield from _methods_of(getattr(keras.callbacks, name), _do_nothing)
    yield from _methods_of(keras.callbacks.ModelCheckpoint, _decide_only)
    set_only = functools.partial(_on_chief, _set_model_only, "set_model")
    yield keras.callbacks.TensorBoard, "set_model", set_only


def _methods_of(
    kind: Any, elsewhere: Callable[..., None]
) -> Iterator[tuple[Any, str, Callable[..., None]]]:
    for name in vars(kind):
        if name.startswith("on_"):
            yield kind, name, functools.partial(_on_chief, elsewhere, name)


def _on_chief(
    elsewhere: Callable[..., None],
    name: str,
    original: Callable[..., None],
    callback: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call a method of a callback on the chief, and `elsewhere` on other workers."""
    model = args[0] if name == "set_model" else callback.model
    strategy = strategy_of(model)
    if strategy is None:
        original(callback, *args, **kwargs)
    elif strategy.is_chief:
        with on_one_worker():
            original(callback, *args, **kwargs)
    else:
        elsewhere(original, callback, *args, **kwargs)


def _do_nothing(
    original: Callable[..., None], callback: Any, *args: Any, **kwargs: Any
) -> None:
    """Write nothing."""


def _decide_only(
    original: Callable[..., None], callback: Any, *args: Any, **kwargs: Any
) -> None:
    """Keep in mind what the chief saves, and save nothing."""
    verbose, callback.verbose = callback.verbose, 0
    token = _silent.set(True)
    try:
        original(callback, *args, **kwargs)
    finally:
        _silent.reset(token)
        callback.verbose = verbose


def _set_model_only(original: Callable[..., None], callback: Any, model: Any) -> None:
    """Draw no graph of the model, and let what is derived from this write nothing."""
    kept = callback.write_graph, callback.embeddings_freq
    callback.write_graph, callback.embeddings_freq = False, 0
    try:
        original(callback, model)
    finally:
        callback.write_graph, callback.embeddings_freq = kept
    _host.keras.silence_tensorboard(callback)


def _writer_in(callback: Any) -> Any:
    """Return what writes on the chief alone, if a callback is such, or wraps one."""
    if (limited := getattr(callback, "on_chief", None)) is not None:
        return limited
    names = (*_SILENT, "ModelCheckpoint")
    kinds = tuple(getattr(keras.callbacks, n, _Missing) for n in names)
    return callback if isinstance(callback, kinds) else None


class _Missing:
    """Stands for a class that this version of Keras does not have."""


# Workers wait for what was written.


class AtTheEnd:
    """A callback that is the last of its list in all that it does.

    Attributes:
        others: the callbacks before it.
    """

    others: Sequence[Any] = ()


class _WaitingPlan:
    """Places where the workers of a `fit` wait: behind each writer, or after all.

    Workers may have other callbacks, such as those that a script gives to the chief
    only; then there is no place but the end at which all meet.
    """

    def __init__(self, writers: Sequence[Any]) -> None:
        self.writers = writers
        self.behind_each = self.at_the_end = False
        self.restores = False

    def make(self, transport: Any) -> None:
        """Compare the writers of all workers."""
        names = json.dumps([type(writer).__name__ for writer in self.writers])
        restoring = any(map(_restores, self.writers))
        own = [zlib.crc32(names.encode()), len(self.writers), restoring]
        found = transport.all_gather(tf.constant(own, tf.int64), "writers").numpy()
        self.behind_each = bool((found == found[0]).all())
        self.at_the_end = not self.behind_each
        self.restores = bool(found[:, 2].any())


def _restores(writer: Any) -> bool:
    return isinstance(writer, keras.callbacks.BackupAndRestore)


class _Begin(keras.callbacks.Callback):
    """The first of a list."""

    def __init__(self, strategy: Any, plan: _WaitingPlan) -> None:
        super().__init__()
        self._strategy, self._plan = strategy, plan

    def on_train_begin(self, logs: Any = None) -> None:
        self._plan.make(self._strategy.transport)


class _Meeting(keras.callbacks.Callback):
    """Stands behind a writer, or at the end of a list: nobody goes on before others."""

    def __init__(self, strategy: Any, plan: _WaitingPlan, writer: Any = None) -> None:
        super().__init__()
        self._strategy, self._plan = strategy, plan
        self._at_the_end = writer is None
        self._writers = plan.writers if writer is None else [writer]

    @property
    def _held(self) -> bool:
        plan = self._plan
        return plan.at_the_end if self._at_the_end else plan.behind_each

    def on_train_begin(self, logs: Any = None) -> None:
        restoring = [writer for writer in self._writers if _restores(writer)]
        if self._held and (restoring or (self._at_the_end and self._plan.restores)):
            _share_restored(self._strategy, self.model, restoring)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._held:
            self._strategy.barrier()

    def on_train_end(self, logs: Any = None) -> None:
        if self._held:
            self._strategy.barrier()


def set_model(original: Callable[..., None], callbacks: Any, model: Any) -> None:
    """Let a list of callbacks begin, with what lets the workers wait for each other."""
    shared_paths.begin()
    if model and (strategy := strategy_of(model)):
        _join(callbacks, strategy, model)
    original(callbacks, model)


def _join(callbacks: Any, strategy: Any, model: Any) -> None:
    """Put into a list of callbacks what lets the workers wait for each other."""
    given = callbacks.callbacks
    if any(map(_restores, given)):
        what = f"The model {model.name!r}, which BackupAndRestore would save,"
        bands.refuse_to_save(model.variables, what)
    last = [each for each in given if isinstance(each, AtTheEnd)]
    others = [each for each in given if not isinstance(each, AtTheEnd)]
    for each in last:
        each.others = others
    if strategy.num_replicas_in_sync > 1 and not any(
        isinstance(each, _Begin) for each in given
    ):
        writers = list(filter(None, map(_writer_in, others)))
        plan = _WaitingPlan(writers)
        found: list[Any] = [_Begin(strategy, plan)]
        for each in others:
            found.append(each)
            if (writer := _writer_in(each)) is not None:
                found.append(_Meeting(strategy, plan, writer))
        others = [*found, _Meeting(strategy, plan)]
    given[:] = [*others, *last]


def _share_restored(strategy: Any, model: Any, writers: Sequence[Any]) -> None:
    """Give all workers the epoch and the variables that the chief has restored."""
    transport = strategy.transport
    epoch = _host.keras.initial_epoch(model)
    found = any(tf.io.gfile.glob(os.path.join(w.backup_dir, "*")) for w in writers)
    own = tf.constant([found, -1 if epoch is None else epoch], tf.int64)
    (told,) = transport.broadcast([own], "restored")
    if not int(told[0]):
        return
    _host.keras.set_initial_epoch(model, None if int(told[1]) < 0 else int(told[1]))
    optimizers = _host.keras.optimizers_of(model)
    variables = [v for each in (model, *optimizers) for v in each.variables]
    unique = {id(v): v for v in variables if "seed_generator_state" not in v.path}
    for variable in unique.values():
        if not _host.distribute.is_metric_variable(variable.value):
            (value,) = transport.broadcast([variable.value], "restored.variable")
            variable.assign(value)


# Models that all workers save.


def save(
    original: Callable[..., None],
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Save a model, or its weights, to a file that is replaced in one instant."""
    bands.refuse_to_save(model.variables, f"The model {model.name!r}")
    if _silent.get():
        return
    target = _plain_file(filepath, overwrite) if _FilesProcess.several else None
    if target is None or args or any(v is not None for v in kwargs.values()):
        original(model, filepath, overwrite, *args, **kwargs)
        return
    strategy = strategy_of(model)
    chief = strategy.is_chief if strategy else _FilesProcess.chief
    shared_paths.note_saving(target)
    with _replaced(target, chief) as temporary, on_one_worker():
        original(model, temporary, overwrite, **kwargs)


def export(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to export a model with split layers."""
    bands.refuse_to_save(model.variables, f"The model {model.name!r}")
    return original(model, *args, **kwargs)


class _Without(dict[str, Any]):
    """Store to which an optimizer saves, but for some of it."""

    def __init__(self, store: Any, left_out: set[str]) -> None:
        super().__init__()
        self._store, self._left_out = store, left_out

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._left_out:
            self._store[key] = value


def save_slots(original: Callable[..., None], optimizer: Any, store: Any) -> None:
    """Leave out what is kept elsewhere."""
    kept = _kept_elsewhere(optimizer)
    original(optimizer, _Without(store, set(kept)) if kept else store)


def load_slots(original: Callable[..., None], optimizer: Any, store: Any) -> None:
    """Leave alone what is kept elsewhere."""
    if kept := _kept_elsewhere(optimizer):
        own = {key: np.array(variable) for key, variable in kept.items()}
        store = {key: store[key] for key in store.keys()} | own
    original(optimizer, store)


def _kept_elsewhere(optimizer: Any) -> dict[str, Any]:
    """Return the variables of an optimizer that are in no file of weights now."""
    if not bands.are_kept_elsewhere():
        return {}
    numbered = enumerate(optimizer.variables)
    return {str(i): v for i, v in numbered if bands.of(v) is not None}


def save_model(
    original: Callable[..., None],
    model: keras.Model,
    filepath: Any,
    overwrite: bool = True,
    **kwargs: Any,
) -> None:
    """Save a model as `Model.save` does it."""
    model.save(filepath, overwrite, **kwargs)


def _plain_file(filepath: Any, overwrite: bool) -> pathlib.Path | None:
    """Return the file that can be replaced; None of what is remote, asks, and so on."""
    if not isinstance(filepath, (str, os.PathLike)) or "://" in str(filepath):
        return None
    path = pathlib.Path(os.path.realpath(filepath))
    if not path.name.endswith(_FILES) or (path.exists() and not path.is_file()):
        return None
    return path if overwrite or not path.exists() else None


@contextlib.contextmanager
def _replaced(target: pathlib.Path, chief: bool) -> Iterator[pathlib.Path]:
    """Yield where to write; then replace the target, which so is whole at any time.

    What another worker has put there meanwhile stays, unless this one is the chief.
    """
    temporary = target.with_name(f".{os.getpid()}.{os.urandom(4).hex()}.{target.name}")
    before = shared_paths.stamp(target)
    try:
        yield temporary
        if chief or shared_paths.stamp(target) == before:
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)
    except OSError as error:
        if error.filename is None:  # as of a disk that is full
            error.filename = str(target)
        raise
    finally:
        temporary.unlink(missing_ok=True)
