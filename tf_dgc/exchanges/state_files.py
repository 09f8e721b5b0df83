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
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

FORMAT = "tf_dgc state, version 1"
MANIFEST = "manifest.json"
Arrays = Mapping[str, np.ndarray]
_MAX_MANIFEST = 2**26  # bytes
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib takes a slash away


class _WrongField(ValueError):
    """A field is not what it should be; its text says so."""


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


def local_folder(argument: str, path: Any) -> pathlib.Path:
    """Return the path of a folder that the disks of this machine have.

    Raises:
        ValueError: it is one of a remote store.
    """
    text = os.fsdecode(path)
    if _SCHEME.match(text):
        raise ValueError(
            f"`{argument}` must be a folder of a disk that is mounted here, of each "
            f"worker or shared by all. Received: {argument}={text!r}. Mount the bucket "
            "(gcsfuse, mountpoint-s3 or the like) and give the path of that"
        )
    return pathlib.Path(text)


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
    path = folder / name_of(rank, manifest["save"])
    try:
        with path.open("wb") as file:
            octets = np.frombuffer(text.encode(), np.uint8)
            np.savez(file, allow_pickle=False, manifest=octets, **arrays)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # such as a full disk: a part of a file takes what is left
        path.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise


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
    with path.open("rb") as file:
        return checked_manifest(path, file.read(_MAX_MANIFEST + 1))


def checked_manifest(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    """Parse a manifest; raise as `read_manifest` does, in the name of `path`."""
    try:
        if len(text) > _MAX_MANIFEST:
            raise ValueError(f"it has more than {_MAX_MANIFEST} bytes")
        manifest = json.loads(text)
        fields = ("format", "save", "world_size", "accounts")
        found = {key: manifest[key] for key in fields}
        accounts = list(map(_checked_account, found["accounts"]))
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a manifest of tf_dgc, or damaged: {error}"
        ) from None
    if found["format"] != FORMAT:
        raise ValueError(
            f"{path}: field 'format' must be {FORMAT!r}. Received: {found['format']!r}"
        )
    for field, least in (("save", 0), ("world_size", 1)):
        if type(found[field]) is not int or not least <= found[field] < 2**31:
            raise ValueError(
                f"{path}: field {field!r} must be an integer of at least {least}, "
                f"below 2**31. Received: {found[field]!r}"
            )
    return manifest_of(found["save"], found["world_size"], accounts)


def _checked_account(found: Any) -> dict[str, Any]:
    variables, arrays, step = found["variables"], found["arrays"], found["step"]
    shapes = list(arrays.values())
    if not (
        all(isinstance(each, list) for each in (variables, *shapes))
        and all(isinstance(form, str) for form in variables)
        and all(type(n) is int and 0 <= n < 2**63 for s in [*shapes, [step]] for n in s)
    ):
        raise ValueError(f"no account of an optimizer: {ascii(found)[:200]}")
    return {"variables": variables, "arrays": arrays, "step": step}


def read(
    folder: pathlib.Path,
    rank: int,
    manifest: dict[str, Any],
    chosen: Collection[int] | None = None,
) -> dict[str, np.ndarray]:
    """Read and check the arrays of a rank.

    Args:
        folder: of state.
        rank: whose file to read, in [0, world size at saving).
        manifest: of the folder.
        chosen: numbers of the accounts to read; by default all.

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
    text = read_arrays(path, {"manifest": None})["manifest"].tobytes()
    own = checked_manifest(path, text)
    for field, value in manifest.items():
        if own[field] != value:
            raise ValueError(
                f"{path}: field {field!r} is not that of {MANIFEST} beside it: the "
                "files are of different saves"
            )
    wanted = {
        f"{i}.{name}": tuple(shape)
        for i, account in enumerate(manifest["accounts"])
        if chosen is None or i in chosen
        for name, shape in account["arrays"].items()
    }
    return read_arrays(path, wanted)


def read_arrays(
    path: pathlib.Path, shapes: Mapping[str, Sequence[int] | None]
) -> dict[str, np.ndarray]:
    """Read arrays that `numpy.savez` wrote, no more of them than their shapes allow.

    Args:
        path: of the file.
        shapes: of the arrays to read, by name; None is a text of bytes.

    Raises:
        ValueError: the file is damaged, or an array is not there or not of numbers in
            this shape; names file and field.
    """
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            return {name: _array(archive, name, shapes[name]) for name in shapes}
    except _WrongField as error:
        raise ValueError(f"{path}: {error}") from None
    except Exception as error:  # zipfile, its codecs and NumPy raise whatever they meet
        raise ValueError(f"{path}: not a file of state, or damaged: {error}") from None


def _array(
    archive: zipfile.ZipFile, name: str, wanted: Sequence[int] | None
) -> np.ndarray:
    if f"{name}.npy" not in archive.namelist():
        raise _WrongField(f"field {name!r} is missing")
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise ValueError(f"field {name!r} has format {version}")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
        count = math.prod(shape)
        if wanted is None:
            if dtype != np.uint8 or len(shape) != 1 or count > _MAX_MANIFEST:
                raise _WrongField(f"field {name!r} must be text")
        elif (
            shape != tuple(wanted)
            or dtype.kind not in "fiu"
            or dtype.itemsize > 8
            or not dtype.isnative
        ):
            raise _WrongField(
                f"field {name!r} must be numbers of shape {tuple(wanted)}. Received: "
                f"{dtype} {shape}"
            )
        octets = member.read(count * dtype.itemsize)
        if len(octets) < count * dtype.itemsize or member.read(1):
            raise ValueError(f"field {name!r} has too few or too many bytes")
    values = np.frombuffer(octets, dtype)
    return values.reshape(shape[::-1]).T if fortran else values.reshape(shape)
