"""Backups within the epochs of a `fit`: when they are made."""

import pathlib
import secrets
import time
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.exchanges import records
from tf_dgc.strategies import backups
from tf_dgc.strategies.base import BaseStrategy

# A worker that begins to write a backup has written that before the last.
_KEPT = 3
# Steps between two questions of the clock of the chief.
_ASKED = 10


class Interval(NamedTuple):
    """Interval between backups within an epoch; both None where there are none."""

    steps: int | None
    seconds: float | None

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return self.steps is not None or self.seconds is not None

    def check(self) -> None:
        """Raise ValueError where both are given, or one is out of its range."""
        steps, seconds = self
        whole = isinstance(steps, int) and not isinstance(steps, bool)
        if steps is not None and (not whole or steps < 1):
            raise ValueError(
                "`save_freq` must be a number of steps, at least 1, or None. "
                f"Received: save_freq={steps!r}"
            )
        if seconds is None:
            return
        number = isinstance(seconds, int | float)
        if not number or not 0 < seconds < float("inf"):
            raise ValueError(
                "`save_seconds` must be a positive number of seconds, or None. "
                f"Received: save_seconds={seconds!r}"
            )
        if steps is not None:
            raise ValueError(
                "Only one of `save_freq` and `save_seconds` must be given. Received: "
                f"save_freq={steps!r}, save_seconds={seconds!r}"
            )


class WithinEpochs:
    """Backups within epochs, which are written while training goes on.

    Attributes:
        iterator: of the data of the epoch; None where nothing was read yet.
        writer: of this worker's.
    """

    def __init__(
        self, folder: pathlib.Path, strategy: BaseStrategy, fit: Any, every: Interval
    ) -> None:
        """Agree on a number of this run; all workers call this.

        Args:
            folder: of the backups of this `fit`.
            strategy: of the model.
            fit: its last callback.
            every: how often.

        Raises:
            ValueError: the model has a table that can be copied in parts only.
        """
        backups.refuse_tables(fit.model)
        self._strategy, self._fit, self._every = strategy, fit, every
        own = tf.constant([secrets.randbelow(2**31)], tf.int64)
        self._run = int(strategy.transport.broadcast([own], "run")[0][0])
        self.writer = backups.BackupWriter(folder, strategy.rank, _KEPT)
        self.iterator: Any = None
        self._waiting: backups.Copy | None = None
        self._epoch = self._done = 0  # epochs, and steps of the present one
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._since, self._last = 0, time.monotonic()

    def begin_epoch(self, epoch: int, done: int) -> None:
        """Begin an epoch of which some steps may be done."""
        self._epoch, self._done = epoch, done

    def after_step(self, batch: int) -> None:
        """Copy what is to be backed up, and begin to write it.

        Args:
            batch: number of the last step in its epoch, from 0.
        """
        model, steps = self._fit.model, batch + 1 - self._done
        self._done = batch + 1
        if self._waiting is not None:  # the epoch has gone on
            self.writer.write(self._waiting)
            self._waiting = None
        # After its last step an epoch would begin with no step, and end without logs.
        total = self._fit.params.get("steps")
        ends = model.stop_training or (total and self._done >= total)
        if not self._due(steps) or ends:
            return
        position = backups.Position(self._epoch, batch + 1)
        args = self._strategy, model, self._fit.others, self.iterator
        copied = backups.copy(position, self._run, *args)
        if total:
            self.writer.write(copied)
        else:
            self._waiting = copied

    def _due(self, steps: int) -> bool:
        before, every = self._since, self._every
        self._since += steps
        if every.steps is not None:
            due = self._since >= every.steps
        elif before // _ASKED == self._since // _ASKED:
            due = False
        else:
            late = time.monotonic() - self._last >= (every.seconds or 0.0)
            own = tf.constant([late])
            due = bool(self._strategy.transport.broadcast([own], "backup")[0][0])
        if due:
            self._begin_interval()
        return due

    def end_epoch(self) -> None:
        """Wait until all is written, before the backup of the epoch's end."""
        self.iterator = self._waiting = None
        self._begin_interval()
        transport = self._strategy.transport
        records.together(transport, "success in writing backups", self.writer.wait)
