"""Workers compare what must be equal, before it costs anything."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_dgc.transports.base import Transport

MAX_BYTES = 2**26  # of a text that is taken from another worker


def agree(transport: Transport, subject: str, record: Mapping[str, object]) -> None:
    """Compare a record over all workers, eagerly.

    Args:
        transport: N workers; all call this at the same place.
        subject: what is compared, for the message.
        record: its fields, of values that JSON can hold.

    Raises:
        ValueError: on every worker, where a field differs between some of them; names
            the fields, the ranks and the values. Or what a worker told is damaged.
    """
    if transport.alone:
        return
    text = json.dumps(record, sort_keys=True).encode()
    digest = tf.constant([zlib.crc32(text), len(text)], tf.int64)
    digests = transport.all_gather(digest, "agree.digest").numpy()
    if (digests == digests[0]).all():
        return
    text = json.dumps(record).encode()  # as long, and in its own order
    records = _gathered(transport, subject, text, digests[:, 1])
    raise ValueError(
        f"All workers must have the same {subject}. " + _differences(records)
    )


def tell(
    transport: Transport, subject: str, record: Mapping[str, object]
) -> list[dict[str, Any]]:
    """Return the records of all workers, by rank, eagerly; arguments as of `agree`.

    Raises:
        ValueError: what a worker told is damaged.
    """
    text = json.dumps(record).encode()
    length = tf.constant(len(text), tf.int64)
    lengths = transport.all_gather(length, "tell.length").numpy()
    return _gathered(transport, subject, text, lengths)


def _gathered(
    transport: Transport, subject: str, text: bytes, lengths: Any
) -> list[dict[str, Any]]:
    """Gather objects of JSON, of as many bytes as each worker has told."""
    for rank, length in enumerate(lengths):
        check_length(int(length), f"What rank {rank} tells of its {subject}")
    octets = tf.constant(list(text), tf.uint8)
    gathered = transport.all_gather_ragged(octets, "agree.record").numpy().tobytes()
    records, start = [], 0
    for rank, length in enumerate(lengths):
        what = f"What rank {rank} tells of its {subject}"
        records.append(read_object(gathered[start : start + length], what))
        start += length
    return records


def check_length(length: int, what: str) -> None:
    """Raise ValueError where a text that a worker announces is too long, or damaged."""
    if not 0 <= length <= MAX_BYTES:
        raise ValueError(
            f"{what} must be of at most {MAX_BYTES} bytes, or is damaged. Received: "
            f"{length} bytes"
        )


def read_json(text: bytes, what: str) -> Any:
    """Parse what a worker told, as data.

    Raises:
        ValueError: it is not JSON; says so of `what`.
    """
    try:
        found = json.loads(text)
        repr(found)  # goes no less deep than whatever is done with it later
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is damaged, no JSON: {error}") from None
    return found


def read_object(text: bytes, what: str) -> dict[str, Any]:
    """Parse an object of JSON; see `read_json`."""
    found = read_json(text, what)
    if not isinstance(found, dict):
        raise ValueError(f"{what} is damaged, no object: {ascii(found)[:80]}")
    return found


def _differences(records: list[dict[str, object]]) -> str:
    """Say which fields differ, and which ranks have which value."""
    lines = []
    for field in dict.fromkeys(field for record in records for field in record):
        ranks: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            ranks.setdefault(repr(record.get(field)), []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"{value} on ranks {who}" for value, who in ranks.items())
            lines.append(f"`{ascii(field)[1:-1]}` differs: {found}.")
    return "Received: " + " ".join(lines[:10])
