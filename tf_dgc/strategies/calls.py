"""Calls of `fit` of one script that back up into one folder, told apart.

The first has the folder itself, those after it have folders `fit-002` and so on in it.
Where the script is started again, each call finds its own backups: by the weights it
begins with where these are the same as before, else by the form of its model, else by
the order of the calls.
"""

import json
import pathlib
import zlib
from typing import Any, NamedTuple

import keras
import numpy as np

from tf_dgc import _host, bands
from tf_dgc._host.shared import Table
from tf_dgc.strategies import owners
from tf_dgc.strategies.owners import FileOwner
from tf_dgc.transports import Transport, handshake


class Fit(NamedTuple):
    """Arguments of a call of `fit`, and its model, when it begins."""

    start: int  # checksum of the weights, and of what optimizers keep
    form: int  # checksum of their types and shapes, and of what is trained


def fit_of(model: keras.Model) -> Fit:
    """Return what is known of the `fit` that a model begins."""
    variables = {
        id(v): v
        for each in (model, *_host.keras.optimizers_of(model))
        for v in each.variables
        if "seed_generator_state" not in v.path and bands.of(v) is None
    }
    start = form = 0
    for variable in variables.values():
        plain = _host.keras.plain(variable)
        if isinstance(plain, Table) or _host.distribute.is_metric_variable(plain):
            continue
        form = zlib.crc32(f"{variable.dtype} {variable.shape}".encode(), form)
        start = zlib.crc32(np.array(variable).tobytes(), start)
    flags = [bool(variable.trainable) for variable in model.weights]
    return Fit(start, zlib.crc32(json.dumps(flags).encode(), form))


def begin(
    folder: pathlib.Path,
    strategy: Any,
    workers: int,
    model: keras.Model,
    deletes: bool,
) -> tuple[int, pathlib.Path]:
    """Become the owner of a folder, and tell the `fit` that begins from others.

    Args:
        folder: of the backups of all calls.
        strategy: of the model.
        workers: how many must end well, before the backups may go.
        model: that is trained.
        deletes: whether they are to go then; else all calls have one place.

    Returns:
        Number of the call, and the folder of its backups.

    Raises:
        OSError: the folder cannot be written.
        ValueError: another job uses it, or the workers have ended different calls.
    """
    owner, transport = owners.of(folder, strategy.rank), strategy.transport
    owners.claim(owner, transport, workers, deletes)
    owner.complete = False
    number = choose(owner, strategy.rank, transport, model) if deletes else 1
    return number, place_of(number, folder)


def place_of(number: int, folder: pathlib.Path) -> pathlib.Path:
    """Return the folder of the backups of a call of `fit`, counted from 1."""
    return folder if number == 1 else folder / f"fit-{number:03d}"


def choose(
    owner: FileOwner, rank: int, transport: Transport, model: keras.Model
) -> int:
    """Return which call of `fit` this one is, and note it; the chief decides.

    Args:
        owner: of the folder.
        rank: of this worker.
        transport: to the others.
        model: that is trained.

    Raises:
        OSError: the folder cannot be written.
        ValueError: the workers have ended different calls before.
    """
    handshake.agree(transport, "calls of `fit` before", {"ended": sorted(owner.done)})
    own = fit_of(model)
    number = chosen(own, known(owner.folder, rank), owner.done)
    number = int(handshake.tell(transport, "`fit`", {"number": number})[0]["number"])
    if number not in known(owner.folder, rank):
        path = _file(owner.folder, number, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(own._asdict()))
    return number


def chosen(own: Fit, found: dict[int, Fit], done: set[int]) -> int:
    """Return the number of a call, given those that the folder knows.

    Args:
        own: of this call.
        found: what earlier processes, or this one, have noted, by number.
        done: those that have ended in this process.
    """
    left = [number for number in sorted(found) if number not in done]
    same = [number for number in left if found[number] == own]
    alike = [number for number in left if found[number].form == own.form]
    return (same or alike or left or [max([*found, *done, 0]) + 1])[0]


def known(folder: pathlib.Path, rank: int) -> dict[int, Fit]:
    """Return what a worker has noted of calls of `fit` in a folder, by number."""
    found: dict[int, Fit] = {}
    while (path := _file(folder, len(found) + 1, rank)).exists():
        found[len(found) + 1] = _read(path)
    return found


def _read(path: pathlib.Path) -> Fit:
    try:
        told: dict[str, Any] = json.loads(path.read_bytes())
        return Fit(int(told["start"]), int(told["form"]))
    except (KeyError, TypeError, ValueError):  # the writing was cut short
        return Fit(-1, -1)


def _file(folder: pathlib.Path, number: int, rank: int) -> pathlib.Path:
    return place_of(number, folder) / f"rank-{rank:05d}.fit"
