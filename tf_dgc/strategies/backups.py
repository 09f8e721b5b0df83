"""Backups within an epoch: each worker copies, and writes while the training goes on.

No worker waits for another, so that a backup is whole when each worker has marked its
own as whole; those that are older are kept until all must have a newer one.
"""

import contextlib
import errno
import json
import math
import os
import pathlib
import re
import shutil
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc._host.shared import Table
from tf_dgc.exchanges import records, state_files
from tf_dgc.strategies import owners, positions, remembered
from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.strategies.extended import on_one_worker

_VALUE, _SEED = "value", "seed"
# What Keras says of a variable that cannot be loaded
# (keras/src/backend/common/variables.py), and how it prints an array.
_OF_SHAPES = re.compile(
    r"variable\.shape=(\(.*?\)), Received: value\.shape=(\(.*?\))\. "
    r"Target variable: <Variable path=([^,]*),"
)
_ARRAY = re.compile(r", value=[^>]*")
_SKIPPED = "Skipping variable loading for optimizer"
_OF_COUNTS = re.compile(_SKIPPED + r" ('.*?'), because it has (\d+) .* has (\d+) ")


class Position(NamedTuple):
    """Of a training: epochs that are done, and steps of the next."""

    epoch: int
    step: int = 0

    @property
    def name(self) -> str:
        """Of the folder."""
        within = f"-step-{self.step:08d}" if self.step else ""
        return f"epoch-{self.epoch:05d}{within}"

    @property
    def number(self) -> int:
        """That orders positions."""
        return self.epoch << 32 | self.step


def of_name(name: str) -> Position | None:
    """Invert `Position.name`; None for other names."""
    parts = name.split("-")
    if parts[::2] not in (["epoch"], ["epoch", "step"]):
        return None
    if not all(part.isdecimal() and len(part) < 10 for part in parts[1::2]):
        return None
    return Position(*map(int, parts[1::2]))


def of_number(number: int) -> Position:
    """Invert `Position.number`."""
    return Position(number >> 32, number & 2**32 - 1)


class Variables:
    """All that a model and its optimizers keep, but for random generators.

    What metrics have counted is each worker's own.
    """

    def __init__(self, model: keras.Model) -> None:
        """Find them, in an order that is the same in each run."""
        owners = (model, *_host.keras.optimizers_of(model), *model.metrics)
        found = [v for each in owners for v in each.variables]
        unique = {
            id(v): v
            for v in found
            # `save_state` has what is split.
            if "seed_generator_state" not in v.path and bands.of(v) is None
        }
        self._found = list(unique.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return copies, by name."""
        return {
            f"{_VALUE}.{i}": remembered.portable(np.array(_own(v).read_value()))
            for i, v in enumerate(self._found)
        }

    def read(self, path: pathlib.Path) -> dict[str, np.ndarray]:
        """Read what `arrays` returned.

        Raises:
            ValueError: the file is damaged, or of another model; names it.
        """
        shapes = {f"{_VALUE}.{i}": list(v.shape) for i, v in enumerate(self._found)}
        return state_files.read_arrays(path, shapes)

    def assign(self, arrays: dict[str, np.ndarray], of_metrics: bool) -> None:
        """Set those that metrics count in, or all others."""
        for i, variable in enumerate(self._found):
            own = _own(variable)
            if _host.distribute.is_metric_variable(variable.value) == of_metrics:
                own.assign(tf.cast(arrays[f"{_VALUE}.{i}"], own.dtype))


def refuse_tables(model: keras.Model) -> None:
    """Refuse backups within epochs of what no worker can copy while it trains.

    Raises:
        ValueError: the model has a table that lives on the servers only.
    """
    plain = [_host.keras.plain(v) for v in model.variables]
    if found := [v.name for v in plain if isinstance(v, Table)]:
        raise ValueError(
            "BackupState must be without `save_freq` and `save_seconds`, and back up "
            "at the ends of epochs, where tables live on the servers only. "
            f"Received: {found}"
        )


def _own(variable: Any) -> Any:
    """Return this worker's: what a metric counts in is summed where it is read."""
    value = variable.value
    return (_host.distribute.components_of(value) or (value,))[0]


class Copy(NamedTuple):
    """Copy of a worker's state, to be written."""

    position: Position
    manifest: dict[str, Any]
    state: dict[str, np.ndarray]
    rest: dict[str, np.ndarray]
    data: tf.Tensor | None


def copy(
    position: Position,
    run: int,
    strategy: BaseStrategy,
    model: keras.Model,
    callbacks: Sequence[Any],
    iterator: Any,
) -> Copy:
    """Copy all that a job needs to continue from here; not collective.

    Args:
        position: here.
        run: a number of this run, the same on all workers.
        strategy: of the model.
        model: that is trained.
        callbacks: whose memory belongs to it.
        iterator: of the data.
    """
    number = zlib.crc32(f"{run} {position}".encode()) % 2**31
    workers = strategy.transport.size
    manifest, state = records.as_file(number, workers, strategy.inner.own_state(model))
    state = {name: np.array(array) for name, array in state.items()}
    rest = Variables(model).arrays() | remembered.arrays_of(callbacks, model)
    rest |= {f"{_SEED}.{n}": np.array(v) for n, v in seeds(model).items()}
    return Copy(position, manifest, state, rest, positions.read_state(iterator))


def seeds(model: keras.Model) -> dict[str, Any]:
    """Return the states of random generators, which Keras does not save."""
    own = [v for v in model.variables if "seed_generator_state" in v.path]
    found = [_host.keras.global_seed_state(), *own]
    return {str(i): variable for i, variable in enumerate(found)}


class BackupWriter:
    """Writes the copies of one worker, one after another, in a thread."""

    def __init__(self, folder: pathlib.Path, rank: int, keep: int) -> None:
        """Say where.

        Args:
            folder: of all backups.
            rank: of this worker.
            keep: how many backups within epochs there are at least.
        """
        self._folder, self._rank, self._keep = folder, rank, keep
        self._written: futures.Future[None] | None = None

    def write(self, found: Copy) -> None:
        """Begin to write, when what was begun before is written.

        Raises:
            OSError: the one before could not be written.
        """
        self.wait()
        self._written = futures.Future()
        threading.Thread(target=self._run, args=(found, self._written)).start()

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: it could not be.
        """
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _run(self, found: Copy, written: "futures.Future[None]") -> None:
        try:
            self._write(found)
        except BaseException as error:
            written.set_exception(error)
        else:
            written.set_result(None)

    def _write(self, found: Copy) -> None:
        folder = self._folder / found.position.name
        folder.mkdir(parents=True, exist_ok=True)
        mark(folder, self._rank).unlink(missing_ok=True)
        rest = rest_of(folder, self._rank)
        with leaving_none(rest):
            self._write_files(folder, found)
        self._clean()

    def _write_files(self, folder: pathlib.Path, found: Copy) -> None:
        rest = rest_of(folder, self._rank)
        np.savez(rest, allow_pickle=False, **found.rest)
        state_files.sync(rest)
        if found.data is not None:
            positions.write_state(found.data, data_of(folder, self._rank))
        state_files.prepare(folder, self._rank, found.manifest, found.state)
        state_files.commit(folder, self._rank, found.manifest)
        temporary = folder / f"mark.tmp{self._rank}"
        temporary.write_text(json.dumps(found.manifest["save"]))
        state_files.sync(temporary)
        temporary.replace(mark(folder, self._rank))

    def _clean(self) -> None:
        within = [p for p in listed(self._folder) if p.step]
        for position in within[: -self._keep]:
            owners.remove(self._folder / position.name)


def listed(folder: pathlib.Path) -> list[Position]:
    """Return the positions of which there is a folder, in their order."""
    return sorted(filter(None, (of_name(path.name) for path in folder.glob("epoch-*"))))


def write_weights(model: keras.Model, path: pathlib.Path) -> None:
    """Write the weights and slots of a model to a disk that may be full.

    Raises:
        OSError: of the disk.
    """
    with bands.kept_elsewhere(), on_one_worker():
        if _has_tables(model):  # they are read in parts, as no worker may hold one
            _check_room(path.parent, model)
            model.save_weights(path, overwrite=True)
        else:
            path.write_bytes(_host.keras.weights_file(model))
    state_files.sync(path)


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Let errors of HDF5 and Keras, which name no file, name this one."""
    try:
        with warnings.catch_warnings():
            # Keras leaves an optimizer as it is that has other variables.
            warnings.filterwarnings("error", _SKIPPED)
            yield
    except (OSError, KeyError, RuntimeError, ValueError, UserWarning) as error:
        text = str(error)
        if (found := _OF_SHAPES.search(text)) is not None:
            here, there, name = found.groups()
            what = (
                f"of another model: {name!r} has shape {there} in it, and {here} here"
            )
        elif (found := _OF_COUNTS.search(text)) is not None:
            name, here, there = found.groups()
            what = (
                f"of another optimizer: {name} has {there} variables in it, and {here} "
                "here"
            )
        else:
            what = f"damaged, or of another model: {_ARRAY.sub('', text)}"
        raise ValueError(f"{path}: {what}") from None


@contextlib.contextmanager
def leaving_none(*paths: pathlib.Path) -> Iterator[None]:
    """Remove files that could not be written whole, as they take what room is left."""
    try:
        yield
    except Exception as error:
        for path in paths:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(paths[0].parent)
        raise


def _check_room(folder: pathlib.Path, model: keras.Model) -> None:
    """Raise OSError where a disk has no room for a model."""
    holders = (model, *_host.keras.optimizers_of(model))
    plain = {id(v): _host.keras.plain(v) for each in holders for v in each.variables}
    values = plain.values()
    size = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in values)
    free = shutil.disk_usage(folder).free
    if free < size:
        text = f"{os.strerror(errno.ENOSPC)}: {free} bytes, where {size} are needed"
        raise OSError(errno.ENOSPC, text, str(folder))


def _has_tables(model: keras.Model) -> bool:
    return any(isinstance(_host.keras.plain(v), Table) for v in model.variables)


def mark(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Return what says that a worker has written all of its own."""
    return folder / f"rank-{rank:05d}.whole"


def rest_of(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Return the file of all but the state of the strategy."""
    return folder / f"rank-{rank:05d}.rest.npz"


def data_of(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Return how the files begin that tell the place in the data."""
    return folder / f"rank-{rank:05d}.data"


def is_whole(folder: pathlib.Path, rank: int, workers: int) -> bool:
    """Tell whether a worker's part of a backup is there, and of as many workers."""
    try:
        position = of_name(folder.name)
        if position is None or not position.step:  # all have written, or none counts
            return (folder / state_files.MANIFEST).exists()
        manifest = state_files.read_manifest(folder)
        number = json.loads(mark(folder, rank).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest["save"] == number and manifest["world_size"] == workers)


def read_seeds(path: pathlib.Path, model: keras.Model) -> None:
    """Let random generators go on from what a file tells."""
    own = seeds(model)
    shapes = {f"{_SEED}.{name}": v.shape.as_list() for name, v in own.items()}
    for name, array in state_files.read_arrays(path, shapes).items():
        own[name.partition(".")[2]].assign(array)
