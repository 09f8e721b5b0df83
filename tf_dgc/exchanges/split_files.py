"""Parts of weights in files of state: each worker's columns, on any number of workers.

Axes: I rows, W columns of a part, U of the whole.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import columns
from tf_dgc.exchanges import files as state_files
from tf_dgc.exchanges.records import PARTS, Record, together
from tf_dgc.transports.base import Transport


def record_of(parts: Sequence[Any]) -> list[Record]:
    """Return what is saved of parts by this worker, as one record, or none."""
    if not parts:
        return []
    arrays = {f"part {i}": _array_of(part) for i, part in enumerate(parts)}
    return [Record([PARTS, *_forms(parts)], 0, arrays)]


def load(transport: Transport, path: Any, parts: Sequence[Any]) -> list[np.ndarray]:
    """Read what `record_of` has made of as many parts; all workers call this.

    On another number of workers each reads those files in which its columns are.

    Args:
        transport: to the other workers.
        path: of the folder.
        parts: variables, which are not changed.

    Returns:
        For each part an array, [I, W].

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or of other layers; names file and field.
    """
    folder = pathlib.Path(path)

    def read() -> list[np.ndarray]:
        manifest = state_files.read_manifest(folder)
        number = _account_of(folder, manifest, parts)
        return [] if number is None else _joined(folder, manifest, number, parts)

    return list(together(transport, "outcome of reading split layers", read))


def _account_of(folder: Any, manifest: dict[str, Any], parts: Any) -> int | None:
    """Return the number of the account of parts; None where there are none."""
    found = {
        i: account["variables"][1:]
        for i, account in enumerate(manifest["accounts"])
        if account["variables"][:1] == [PARTS]
    }
    number, forms = next(iter(found.items()), (None, []))
    if forms != _forms(parts):
        raise ValueError(
            f"{folder}: the state must be of split layers, and slots of built "
            f"optimizers, of types and shapes {_forms(parts)}. Received: {forms}. Give "
            "`restore_state` the `model`"
        )
    return number


def _joined(
    folder: pathlib.Path, manifest: dict[str, Any], number: int, parts: Sequence[Any]
) -> list[np.ndarray]:
    """Read own columns from the files of those who had them."""
    saved = manifest["world_size"]
    own = [_columns_of(part) for part in parts]
    before = [each._replace(workers=saved) for each in own]
    files: dict[int, dict[str, np.ndarray]] = {}
    found = []
    for i, (now, then) in enumerate(zip(own, before, strict=True)):
        rows = parts[i].shape[0]
        if manifest["accounts"][number]["arrays"].get(f"part {i}") != [
            rows,
            then.width,
        ]:
            raise ValueError(
                f"{folder}: the array 'part {i}' must be of shape {[rows, then.width]}"
            )
        array = np.zeros((rows, now.width), np.float64)
        end = min(now.start + now.width, now.units)
        for rank in range(saved):
            first, last = rank * then.width, (rank + 1) * then.width
            low, high = max(first, now.start), min(last, end)
            if low >= high:
                continue
            if rank not in files:
                files[rank] = state_files.read(folder, rank, manifest, [number])
            part = files[rank][f"{number}.part {i}"]
            array[:, low - now.start : high - now.start] = part[
                :, low - first : high - first
            ]
        found.append(array)
    return found


def _columns_of(part: Any) -> columns.Columns:
    own = columns.of(part)
    if own is None:
        raise TypeError(f"{part.name!r} is no part")
    return own


def _forms(parts: Sequence[Any]) -> list[str]:
    return [
        f"{tf.as_dtype(part.dtype).name} ({part.shape[0]}, {_columns_of(part).units})"
        for part in parts
    ]


def _array_of(part: Any) -> np.ndarray:
    value = part.read_value()
    return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()
