"""Workers compare what must be equal, before it costs anything."""

import json
import zlib
from collections.abc import Mapping

import tensorflow as tf

from tf_dgc.transports.base import Transport


def agree(transport: Transport, subject: str, record: Mapping[str, object]) -> None:
    """Compare a record over all workers, eagerly.

    Args:
        transport: N workers; all call this at the same place.
        subject: what is compared, for the message.
        record: its fields, of values that JSON can hold.

    Raises:
        ValueError: on every worker, where a field differs between some of them; names
            the fields, the ranks and the values.
    """
    if transport.alone:
        return
    text = json.dumps(record, sort_keys=True).encode()
    digest = tf.constant([zlib.crc32(text), len(text)], tf.int64)
    digests = transport.all_gather(digest, "agree.digest").numpy()
    if (digests == digests[0]).all():
        return
    octets = tf.constant(list(text), tf.uint8)
    gathered = transport.all_gather_ragged(octets, "agree.record").numpy().tobytes()
    records, start = [], 0
    for _, length in digests:
        records.append(json.loads(gathered[start : start + length]))
        start += length
    raise ValueError(
        f"All workers must have the same {subject}. " + _differences(records)
    )


def _differences(records: list[dict[str, object]]) -> str:
    """Say which fields differ, and which ranks have which value."""
    lines = []
    for field in sorted({field for record in records for field in record}):
        ranks: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            ranks.setdefault(repr(record.get(field)), []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"{value} on ranks {who}" for value, who in ranks.items())
            lines.append(f"`{field}` differs: {found}.")
    return "Received: " + " ".join(lines[:10])
