"""The state of all workers, to files and back: collective, eager."""

import contextlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc import state_files
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport


class Record(NamedTuple):
    """What is saved for an optimizer by one worker."""

    variables: list[str]  # types and shapes
    step: int  # exchanges done
    arrays: dict[str, np.ndarray]


def save(transport: Transport, path: Any, records: Sequence[Record]) -> None:
    """Write the records of all workers to a folder; all files change, or none does.

    Raises:
        OSError: of the disk, on the worker that met it.
        ValueError: on the others then.
    """
    folder = pathlib.Path(path)
    manifest = state_files.manifest_of(
        transport.size,
        [
            {
                "variables": record.variables,
                "arrays": {name: list(a.shape) for name, a in record.arrays.items()},
                "step": record.step,
            }
            for record in records
        ],
    )
    arrays = {
        f"{i}.{name}": array
        for i, record in enumerate(records)
        for name, array in record.arrays.items()
    }
    for write in (
        lambda: state_files.prepare(folder, transport.rank, manifest, arrays),
        lambda: state_files.commit(folder, transport.rank),
    ):
        together(transport, "outcome of save_state", write)


def load(transport: Transport, path: Any) -> list[Record]:
    """Read what `save` wrote, on any number of workers.

    On as many as saved it, each gets its own arrays back. On another number, each gets
    an equal share of the sum of all workers' arrays, so that the sum stays.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or workers see different states; names it.
    """
    folder, size = pathlib.Path(path), transport.size
    manifest = together(
        transport, "manifest", lambda: state_files.read_manifest(folder)
    )
    found = {f"account {i}": a for i, a in enumerate(manifest["accounts"])}
    found["world_size"] = manifest["world_size"]
    handshake.agree(transport, f"state in {folder}", found)
    same = manifest["world_size"] == size
    own = (
        [transport.rank]
        if same
        else range(transport.rank, manifest["world_size"], size)
    )
    parts = together(
        transport,
        "outcome of restore_state",
        lambda: [state_files.read(folder, rank, manifest) for rank in own],
    )
    records = []
    for i, account in enumerate(manifest["accounts"]):
        arrays = {}
        for name, shape in account["arrays"].items():
            start = np.zeros(shape, np.float32)
            arrays[name] = sum((part[f"{i}.{name}"] for part in parts), start)
        if not same:
            names = list(arrays)
            values = [tf.constant(arrays[name], tf.float32) for name in names]
            sums = transport.all_reduce(values, "state")
            arrays = {
                name: total.numpy() / np.float32(size)
                for name, total in zip(names, sums, strict=True)
            }
        records.append(Record(account["variables"], account["step"], arrays))
    return records


def together(transport: Transport, subject: str, act: Callable[[], Any]) -> Any:
    """Do something on all workers; where it fails on one, fail on all.

    Returns:
        What `act` returns.

    Raises:
        Exception: what `act` raised here, else a ValueError that says which rank met
            what.
    """
    try:
        result = act()
    except Exception as error:
        with contextlib.suppress(ValueError):
            handshake.agree(transport, subject, {"error": str(error)})
        raise
    handshake.agree(transport, subject, {"error": None})
    return result
