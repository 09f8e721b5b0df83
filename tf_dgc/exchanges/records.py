"""The state of all workers, to files and back: collective, eager."""

import contextlib
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc.exchanges import state_files
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport


class Record(NamedTuple):
    """Record of an optimizer that one worker saves."""

    variables: list[str]  # types and shapes
    step: int  # exchanges done
    arrays: dict[str, np.ndarray]


# First words of the names of arrays of which the sum over the workers is to stay.
OWED = ("residual", "velocity")
# First of the variables of the account of what each worker has a part of.
PARTS = "parts of split layers"
# First of the variables of an account of what a strategy has chosen; a text follows.
CHOICE = "choice of a strategy"
# First word of the names of arrays of what the workers of a site exchange in steps.
WITHIN = "within"
_MAX_ELEMENTS = 2**31  # of an array, as of an arena


def adds_up(name: str) -> bool:
    """Tell whether it is the sum over the workers of an array that is to stay."""
    return name.removeprefix(f"{WITHIN} ").split()[0] in OWED


def save(transport: Transport, path: Any, records: Sequence[Record]) -> None:
    """Write the records of all workers to a folder.

    Whenever it is cut short, the folder holds the state of before or this one, whole;
    where workers have disks of their own, some may hold the one and some the other, and
    `load` says so.

    Raises:
        OSError: of the disk, on the worker that met it.
        ValueError: on the others then, or where the workers' records differ.
    """
    folder = state_files.local_folder("path", path)
    number = tf.constant([secrets.randbelow(2**31)], tf.int64)
    if not transport.alone:
        number = transport.all_gather(number, "save")[0]
    manifest, arrays = as_file(int(number[0]) % 2**31, transport.size, records)
    handshake.agree(transport, "state to save", _flat(manifest))
    rank = transport.rank
    for write in (
        lambda: state_files.prepare(folder, rank, manifest, arrays),
        lambda: state_files.commit(folder, rank, manifest),
        lambda: state_files.clean(folder, rank, manifest),
    ):
        together(transport, "outcome of save_state", write)


def as_file(
    number: int, workers: int, records: Sequence[Record]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what goes into a file of state: the manifest, and arrays by name."""
    accounts = [
        {
            "variables": record.variables,
            "arrays": {name: list(a.shape) for name, a in record.arrays.items()},
            "step": record.step,
        }
        for record in records
    ]
    arrays = {
        f"{i}.{name}": array
        for i, record in enumerate(records)
        for name, array in record.arrays.items()
    }
    return state_files.manifest_of(number, workers, accounts), arrays


def _flat(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest as a record whose fields can be compared."""
    accounts = {f"accounts[{i}]": a for i, a in enumerate(manifest["accounts"])}
    return accounts | {name: manifest[name] for name in ("save", "world_size")}


def load(transport: Transport, path: Any) -> list[Record]:
    """Read what `save` wrote, on any number of workers.

    On as many as saved it, each gets its own arrays back. On another number, each gets
    an equal share of the sum of all workers' arrays that are OWED, so that the sum
    stays, and the mean of the others.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or workers see different states; names it.
    """
    folder, size = state_files.local_folder("path", path), transport.size
    manifest = together(
        transport, "manifest", lambda: state_files.read_manifest(folder)
    )
    handshake.agree(transport, f"state in {folder}", _flat(manifest))
    saved: int = manifest["world_size"]
    same = saved == size
    if transport.alone and size > 1 and not same:
        raise ValueError(
            f"{folder}: field 'world_size' must be {size}, as simulated workers are "
            f"restored on as many. Received: {saved}"
        )
    own = [transport.rank] if same else range(transport.rank, saved, size)
    accounts = {
        i: account
        for i, account in enumerate(manifest["accounts"])
        if account["variables"][:1] not in ([PARTS], [CHOICE])
    }
    parts = together(
        transport,
        "outcome of restore_state",
        lambda: [state_files.read(folder, rank, manifest, accounts) for rank in own],
    )
    records = []
    for i, account in accounts.items():
        arrays = {}
        for name, shape in account["arrays"].items():
            if same:
                arrays[name] = parts[0][f"{i}.{name}"]
                continue
            total = np.zeros(shape)
            for part in parts:
                total += part[f"{i}.{name}"]
            arrays[name] = total
        records.append(Record(account["variables"], account["step"], arrays))
    return records if same else shares(summed(transport, records), saved, size)


def summed(transport: Transport, records: Sequence[Record]) -> list[Record]:
    """Return records whose arrays are sums over the workers; all call this, eagerly."""
    found = []
    for record in records:
        own = [tf.constant(array) for array in record.arrays.values()]
        sums = [total.numpy() for total in transport.all_reduce(own, "state")]
        arrays = dict(zip(record.arrays, sums, strict=True))
        found.append(record._replace(arrays=arrays))
    return found


def shares(records: Sequence[Record], saved: int, size: int) -> list[Record]:
    """Return what a worker gets of sums: an equal share, or the mean if not OWED.

    Args:
        records: that hold sums over the workers.
        saved: how many workers these were.
        size: how many they are now.
    """
    return [
        record._replace(
            arrays={
                name: total / (size if adds_up(name) else saved)
                for name, total in record.arrays.items()
            }
        )
        for record in records
    ]


def check_told(told: Any) -> None:
    """Check what another worker tells of the records it has, by ledger.

    Args:
        told: for each record its variables, its step, and by name the shapes of its
            arrays; or None.

    Raises:
        ValueError: it is anything else.
    """
    try:
        for variables, step, shapes in [each for part in told or [] for each in part]:
            if not all(isinstance(form, str) for form in variables):
                raise ValueError(f"variables are {variables}")
            for shape in [*shapes.values(), [step]]:
                if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
                    raise ValueError(f"a shape, or the step, is {shape}")
            if any(math.prod(shape) > _MAX_ELEMENTS for shape in shapes.values()):
                raise ValueError(f"shapes are {shapes}")
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            "What the first worker tells of what is kept back is damaged: "
            + ascii(str(error))[1:-1][:300]
        ) from None


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
    except Exception as error:  # whatever it is, the others must hear of it
        with contextlib.suppress(ValueError):
            handshake.agree(transport, subject, {"error": str(error)})
        raise
    handshake.agree(transport, subject, {"error": None})
    return result
