"""Records that the chief of a job writes to the servers, and others wait for."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_dgc._host.shared import SharedVariable
from tf_dgc.transports import handshake

_POLL_SECONDS = 0.05


class ChiefRecords:
    """Records of the chief, as this worker reads or writes them."""

    def __init__(
        self, make: Callable[..., SharedVariable], is_chief: bool, timeout: float
    ) -> None:
        """Take the place of this worker.

        Args:
            make: takes name, type and shape of a variable on server 0.
            is_chief: whether this worker writes them.
            timeout: seconds to wait for the chief.
        """
        self._is_chief, self._timeout = is_chief, timeout
        self._progress = make("progress", tf.int64, [2])

    def begin(self) -> None:
        """Give first values: the chief has told nothing."""
        self._progress.assign(tf.zeros([2], tf.int64))

    @property
    def progress(self) -> tuple[int, int]:
        """Number of the chief's `fit`, from 1, and its epoch; 0, 0 before it told."""
        fit, epoch = self._progress.read_value().numpy().tolist()
        return fit, epoch

    @progress.setter
    def progress(self, value: tuple[int, int]) -> None:
        """Tell it; the chief does."""
        self._progress.assign(tf.constant(value, tf.int64))

    def share(
        self,
        subject: str,
        variable: SharedVariable,
        record: Mapping[str, Any],
        begin: Callable[[], None],
    ) -> dict[str, Any]:
        """Let the chief write a record, after other values; others wait for it.

        A chief that is started again finds what is there, and leaves it.

        Args:
            subject: of the error.
            variable: of the record.
            record: what JSON can hold.
            begin: gives first values to what belongs to it.

        Returns:
            The record that is there.

        Raises:
            TimeoutError: the chief has not written it.
        """
        if self._is_chief and not variable.initialized:
            begin()
            variable.assign(json.dumps(record))
        self.wait_for(lambda: variable.initialized, subject)
        text = variable.read_value().numpy()
        return handshake.read_object(text, f"What the chief tells of its {subject}")

    def wait_for(self, there: Callable[[], bool], subject: str) -> None:
        """Wait until something is there that the chief makes.

        Raises:
            TimeoutError: it is not within the timeout.
        """
        deadline = time.monotonic() + self._timeout
        while not there():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Worker 0, the chief, has not begun within {self._timeout:g} s: "
                    f"its {subject} is not on the servers. Start it, or look why it "
                    "failed; TF_DGC_TIMEOUT sets the time."
                )
            time.sleep(_POLL_SECONDS)


def compare(
    subject: str, chief: Mapping[str, Any], own: Mapping[str, Any], index: int
) -> None:
    """Raise ValueError where a worker's record is not the chief's; names the fields."""
    own = json.loads(json.dumps(own))
    differ = [f for f in {*chief, *own} if chief.get(f) != own.get(f)]
    differ.sort(
        key=lambda field: (field == "shards", field)
    )  # which follow from shapes
    if differ:
        lines = [
            f"`{ascii(field)[1:-1]}` differs: {chief.get(field)!r} on rank 0; "
            f"{own.get(field)!r} on rank {index}."
            for field in differ
        ]
        raise ValueError(
            f"All workers must have the same {subject}. Received: "
            + " ".join(lines[:10])
        )
