"""Files of state: one for each rank, and a manifest. No TensorFlow, no pickle.

A folder of state holds

    manifest.json            format, number of the save, world size, and for each
                             optimizer its variables, the shapes of its arrays, and the
                             number of its exchanges
    rank-00000.1a2b3c4d.npz  the manifest once more, and the arrays of rank 0; in its
                             name the number of the save

Every rank writes the manifest, the same one, as ranks may not share a disk. It is
replaced when all files of its save are there, and the old ones go after that.
"""

import json
import os
import pathlib
import re
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

FORMAT = "tf_dgc state, version 1"
MANIFEST = "manifest.json"
Arrays = Mapping[str, np.ndarray]
# What zipfile and NumPy raise when bytes are not what they should be.
_DAMAGE = (
    AttributeError,
    OSError,
    TypeError,
    ValueError,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    OverflowError,
    SyntaxError,
    zipfile.BadZipFile,
    zlib.error,
)


def name_of(rank: int, save: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.{save:08x}.npz"


def manifest_of(
    save: int, world_size: int, accounts: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a manifest.

    Args:
        save: any number below 2**31; another one at the next save.
        world_size: N.
        accounts: for each optimizer "variables", a list of text; "arrays", a dictionary
            of names and shapes; "step", an integer.
    """
    return {
        "format": FORMAT,
        "save": save,
        "world_size": world_size,
        "accounts": accounts,
    }


def prepare(
    folder: pathlib.Path, rank: int, manifest: dict[str, Any], arrays: Arrays
) -> None:
    """Write a rank's file, beside those of the save before.

    Args:
        folder: made where it is missing.
        rank: of this worker.
        manifest: what `manifest_of` returned.
        arrays: float32 or int64, named as "0.residual" for the first account.

    Raises:
        OSError: of the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(manifest)
    with (folder / name_of(rank, manifest["save"])).open("wb") as file:
        octets = np.frombuffer(text.encode(), np.uint8)
        np.savez(file, allow_pickle=False, manifest=octets, **arrays)
        file.flush()
        os.fsync(file.fileno())


def commit(folder: pathlib.Path, rank: int, manifest: dict[str, Any]) -> None:
    """Make this save the one that counts, once all ranks have prepared it."""
    temporary = folder / f"{MANIFEST}.tmp{rank}"
    temporary.write_text(json.dumps(manifest))
    sync(temporary)
    temporary.replace(folder / MANIFEST)


def clean(folder: pathlib.Path, rank: int, manifest: dict[str, Any]) -> None:
    """Remove a rank's files of other saves, once all ranks have committed this one."""
    own = re.compile(rf"rank-{rank:05d}\.[0-9a-f]{{8}}\.npz")
    for path in folder.iterdir():
        if own.fullmatch(path.name) and path.name != name_of(rank, manifest["save"]):
            path.unlink(missing_ok=True)


def sync(path: pathlib.Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Read and check the manifest of a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one of tf_dgc, or not whole; names file and field.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}: it is not a folder that `save_state` wrote, "
            "or the writing did not end"
        )
    return _checked_manifest(path, path.read_bytes())


def _checked_manifest(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
        fields = ("format", "save", "world_size", "accounts")
        found = {key: manifest[key] for key in fields}
        accounts = [
            (
                list(map(str, account["variables"])),
                {name: list(map(int, s)) for name, s in account["arrays"].items()},
                int(account["step"]),
            )
            for account in found["accounts"]
        ]
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a manifest of tf_dgc, or damaged: {error}"
        ) from None
    if found["format"] != FORMAT:
        raise ValueError(
            f"{path}: field 'format' must be {FORMAT!r}. Received: {found['format']!r}"
        )
    for field, least in (("save", 0), ("world_size", 1)):
        if type(found[field]) is not int or found[field] < least:
            raise ValueError(
                f"{path}: field {field!r} must be an integer of at least {least}. "
                f"Received: {found[field]!r}"
            )
    return manifest_of(
        found["save"],
        found["world_size"],
        [dict(zip(("variables", "arrays", "step"), a, strict=True)) for a in accounts],
    )


def read(
    folder: pathlib.Path, rank: int, manifest: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Read and check the arrays of a rank.

    Args:
        folder: of state.
        rank: whose file to read, in [0, world size at saving).
        manifest: of the folder.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it is damaged, or does not belong to the manifest; names file and
            field.
    """
    path = folder / name_of(rank, manifest["save"])
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: the state was saved by {manifest['world_size']} "
            "workers, each of which wrote a file"
        )
    try:
        # NumPy does not close a file of its own that turns out to be damaged.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except _DAMAGE as error:
        raise ValueError(f"{path}: not a file of state, or damaged: {error}") from None
    text = arrays.pop("manifest", np.zeros(0, np.uint8)).tobytes()
    own = _checked_manifest(path, text)
    for field, value in manifest.items():
        if own[field] != value:
            raise ValueError(
                f"{path}: field {field!r} is not that of {MANIFEST} beside it: the "
                "files are of different saves"
            )
    wanted = {
        f"{i}.{name}": tuple(shape)
        for i, account in enumerate(manifest["accounts"])
        for name, shape in account["arrays"].items()
    }
    for name, shape in wanted.items():
        if name not in arrays:
            raise ValueError(f"{path}: field {name!r} is missing")
        if arrays[name].shape != shape or arrays[name].dtype.kind not in "fi":
            raise ValueError(
                f"{path}: field {name!r} must be numbers of shape {shape}. Received: "
                f"{arrays[name].dtype} {arrays[name].shape}"
            )
    return {name: arrays[name] for name in wanted}
