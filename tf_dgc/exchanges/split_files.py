"""Parts of weights in files of state: cut by other ways, on any number of workers.

Axes: I rows and U columns of the whole, W columns or rows of a part.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import bands
from tf_dgc.bands import Band
from tf_dgc.exchanges import state_files
from tf_dgc.exchanges.records import PARTS, Record, together
from tf_dgc.transports.base import Transport

_AXES = ("rows", "columns")  # as in `Band`


def record_of(parts: Sequence[Any]) -> list[Record]:
    """Return what is saved of parts by this worker, as one record, or none."""
    if not parts:
        return []
    arrays = {f"part {i}": _array_of(part) for i, part in enumerate(parts)}
    return [Record([PARTS, *_forms(parts)], 0, arrays)]


def load(transport: Transport, path: Any, parts: Sequence[Any]) -> list[np.ndarray]:
    """Read what `record_of` has made of as many parts; all workers call this.

    On another number of workers, or where matrices are cut by other ways now, each
    reads those files in which is what it needs.

    Args:
        transport: to the other workers.
        path: of the folder.
        parts: variables, which are not changed.

    Returns:
        For each part an array, [I, W] or [W, U].

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or of other layers; names file and field.
    """
    folder = state_files.local_folder("path", path)

    def read() -> list[np.ndarray]:
        manifest = state_files.read_manifest(folder)
        found = _account_of(folder, manifest, parts)
        return [] if found is None else _joined(folder, manifest, *found, parts)

    return list(together(transport, "outcome of reading split layers", read))


def _account_of(
    folder: Any, manifest: dict[str, Any], parts: Any
) -> tuple[int, list[int]] | None:
    """Return the number of the account of parts, and along which axis each was cut."""
    found = {
        i: account["variables"][1:]
        for i, account in enumerate(manifest["accounts"])
        if account["variables"][:1] == [PARTS]
    }
    number, forms = next(iter(found.items()), (None, []))
    cuts = [str(form).rpartition(", by ")[::2] for form in forms]
    wanted = [form.rpartition(", by ")[0] for form in _forms(parts)]
    known = all(axis in _AXES for _, axis in cuts)
    if not known or [form for form, _ in cuts] != wanted:
        raise ValueError(
            f"{folder}: the state must be of split layers, and slots of built "
            f"optimizers, of types and shapes {wanted}. Received: {forms}. Give "
            "`restore_state` the `model`"
        )
    return None if number is None else (number, [_AXES.index(a) for _, a in cuts])


def _joined(
    folder: pathlib.Path,
    manifest: dict[str, Any],
    number: int,
    axes: Sequence[int],
    parts: Sequence[Any],
) -> list[np.ndarray]:
    """Read what is own from the files of those who had it."""
    saved = manifest["world_size"]
    files: dict[int, dict[str, np.ndarray]] = {}
    found = []
    for i, (part, axis) in enumerate(zip(parts, axes, strict=True)):
        now = _band_of(part)
        whole = now.shape(part.shape)
        then = Band(0, saved, whole[axis], axis)
        form = [then.width if a == axis else size for a, size in enumerate(whole)]
        if manifest["accounts"][number]["arrays"].get(f"part {i}") != form:
            raise ValueError(f"{folder}: the array 'part {i}' must be of shape {form}")
        array = np.zeros(tuple(part.shape), np.float64)
        own = now.place(whole)
        for rank in range(saved):
            its = then._replace(rank=rank).place(whole)
            common = [_common(a, b) for a, b in zip(own, its, strict=True)]
            if any(low >= high for low, high in common):
                continue
            if rank not in files:
                files[rank] = state_files.read(folder, rank, manifest, [number])
            to, come = (_within(common, block) for block in (own, its))
            array[to] = files[rank][f"{number}.part {i}"][come]
        found.append(array)
    return found


def _common(one: slice, other: slice) -> tuple[int, int]:
    return max(one.start, other.start), min(one.stop, other.stop)


def _within(
    ranges: Sequence[tuple[int, int]], block: Sequence[slice]
) -> tuple[slice, ...]:
    """Return ranges of a whole matrix as they are in a block of it."""
    return tuple(
        slice(low - own.start, high - own.start)
        for (low, high), own in zip(ranges, block, strict=True)
    )


def _band_of(part: Any) -> Band:
    own = bands.of(part)
    if own is None:
        raise TypeError(f"{part.name!r} is no part")
    return own


def _forms(parts: Sequence[Any]) -> list[str]:
    """Return what is known of parts: types, shapes of the whole, by what it is cut."""
    return [
        f"{tf.as_dtype(part.dtype).name} {_band_of(part).shape(part.shape)}, "
        f"by {_AXES[_band_of(part).axis]}"
        for part in parts
    ]


def _array_of(part: Any) -> np.ndarray:
    value = part.read_value()
    return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()
