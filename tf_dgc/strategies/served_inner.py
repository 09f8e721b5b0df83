"""Inside of DownpourStrategy: runs, meetings and backups of a worker with servers."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.exchanges.ledger import Ledger
from tf_dgc.exchanges.served import served
from tf_dgc.servers.tables import Tables
from tf_dgc.servers.turns import Turns
from tf_dgc.strategies import embeddings
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.following import Following
from tf_dgc.strategies.inner import Inner
from tf_dgc.strategies.served_rounds import LocalTraining
from tf_dgc.strategies.served_share import OverServers, ServedShare
from tf_dgc.strategies.served_training import Fits, ServedTraining

# How TensorFlow names a server in its errors.
_SERVER = re.compile(r"/job:ps/replica:0/task:(\d+)")


class ServedInner(Inner):
    """Inside of a strategy whose parameters are on servers.

    Attributes:
        make: of exchanges with servers.
        members: of the job.
        fits: that run.
        following: of the chief, in backups.
        tables: of embeddings that are on the servers only.
    """

    exchanging: ServedTraining

    def __init__(self, core: Core) -> None:
        """Begin outside of `fit`."""
        self.make = cast(Downpouring, core.make)
        self.members, self.fits = self.make.members, Fits()
        super().__init__(core)
        self.make.last = self._end_fit
        self.following = Following(self.make, self.fits)
        self.tables = Tables(self.make.servers, self.members, core.strategy)
        self._sums: OverServers | None = None  # of losses, where steps are of all

    def _make_exchanging(self) -> ServedTraining:
        return ServedTraining(self.core, self.make, self.fits)

    def sum_losses(self) -> None:
        """Let losses be of the rows of all workers, in steps that all take together."""
        self._sums = OverServers(self.make.servers, self.members)
        self.core.share = ServedShare(self._sums)

    @property
    def holds_alike(self) -> bool:
        """False: workers do not wait for each other, and have what the servers have."""
        return False

    @property
    def local(self) -> LocalTraining | None:
        """Local steps, where it is an outer optimizer that is on the servers."""
        return self.exchanging.local

    @property
    def steps_locally(self) -> bool:
        """Tell whether an optimizer updates this worker's own copy."""
        return self.local is not None and not self.local.on_servers

    def twin_of(self, variable: Any) -> Any:
        """Return what is updated on the servers in the place of a variable, or None."""
        return None if self.steps_locally else self.twins.of(variable)

    @property
    def twins(self) -> Any:
        """Server variables of what is trained."""
        return self.make.twins

    @property
    def moves(self) -> Any:
        """Moves of this worker's main thread."""
        return self.members.meetings.moves

    def count_received(self, size: tf.Tensor) -> None:
        """Count bytes that were fetched: shape [], int64."""
        self.make.totals.add(received=size)

    # Steps.

    def prepare(
        self, optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]]
    ) -> None:
        """Move what an optimizer trains to the servers, before its first step."""
        self.exchanging.prepare(optimizer, pairs)

    def at_push(self, do: Callable[[], None]) -> None:
        """Do something in the steps that push."""
        self.exchanging.at_push(do)

    # Backups.

    @property
    def saves_state(self) -> bool:
        """Tell whether this worker's state is a part of backups: the chief's is."""
        return self.members.is_chief

    # Meetings.

    def settle(self) -> None:
        """Fetch what the servers have, unless this worker's model was assigned since.

        What is evaluated, predicted or saved next is what the servers have then.
        """
        if not tf.executing_eagerly() or bool(self.twins.changed):
            return
        self._fetch(always=False)

    def fetch(self) -> None:
        """Fetch in any case what the servers have; where `fit` begins, with others."""
        if self.local is not None and self.fits.running and not self.fits.evaluating:
            for each in self.local.rounds():
                each.come()
        elif not bool(self.twins.changed):
            self._fetch(always=True)

    def take_back(self) -> None:
        """Let this worker's model be that of the servers, where a chief repeats."""
        if self.members.succession.repeats and bool(self.twins.changed):
            self.twins.changed.assign(False)
            self._fetch(always=True)

    def _fetch(self, always: bool) -> None:
        for exchange in served(self.core.ledger.exchanges()):
            exchange.settle(always)
        for each in self.local.rounds() if self.local else []:
            each.settle(always)

    def barrier(self) -> None:
        """Wait until all workers have come here; then fetch."""
        takes_part = [turns for turns in self._turns() if turns.attendance.takes_part]
        self._leave_clocks()
        self.members.meetings.barrier()
        for turns in takes_part:  # before anybody takes a step
            turns.attendance.enter()
        if takes_part:
            self.members.meetings.barrier()
        self.fetch()

    def _leave_clocks(self, stops: bool = False) -> None:
        """Hold nobody back who still trains; or let a callback end what all train."""
        for exchange in served(self.core.ledger.exchanges()):
            if exchange.clocks is not None:
                exchange.clocks.leave()
        for turns in _turns_of(self.core.ledger):
            turns.attendance.leave(stops)
        for turns in self._turns():
            turns.attendance.leave()

    def _turns(self) -> list[Turns]:
        of_sums = [] if self._sums is None else self._sums.turns
        return [*of_sums, *_turns_of(self.core.ledger)]

    # Runs.

    @contextlib.contextmanager
    def fitting(
        self, model: keras.Model, callbacks: Sequence[Any] = ()
    ) -> Iterator[None]:
        """Let `fit` run: it has a number, and may be ended."""
        embeddings.check_callbacks(callbacks, model, self.make.config.table_bytes)
        fits = self.fits
        fits.running += 1
        fits.model, fits.callbacks = model, callbacks
        fits.count += 1
        self.members.succession.enter(fits.count)
        self.take_back()
        try:
            yield
        finally:
            fits.running -= 1
            fits.model, fits.callbacks = None, ()
            self.members.succession.leave()
            self.core.extended.shares.training_next = False
            with contextlib.suppress(tf.errors.OpError):  # of a server that has failed
                self._leave_clocks(bool(model.stop_training))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Take the data that are distributed next for those that all read."""
        self.fits.evaluating += 1
        try:
            yield
        finally:
            self.fits.evaluating -= 1

    def _end_fit(self) -> None:
        """End `fit`, where too few others are left for a step, or one has stopped."""
        self.core.warn([_told_of_end(_turns_of(self.core.ledger))])
        if self.fits.model is not None:
            self.fits.model.stop_training = True

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Say which server has failed, where TensorFlow says it in its own way.

        Raises:
            tf.errors.OpError: a server has failed, or cannot be reached.
        """
        try:
            yield
        except tf.errors.OpError as error:
            number = _SERVER.search(error.message)
            if number is None or "Parameter server" in error.message:
                raise
            name = self.members.pulse.name_of(int(number[1]))
            text = (
                f"{name} has failed, or cannot be reached; what it held is lost. Start "
                "the job again: with tf_dgc.callbacks.BackupState it continues from "
                f"its last backup. TensorFlow says: {error.message}"
            )
            raise type(error)(error.node_def, error.op, text) from error


def _turns_of(ledger: Ledger) -> list[Turns]:
    """Return the turns of steps that workers take together, but for sums of losses."""
    found = [exchange.turns for exchange in served(ledger.exchanges())]
    return [turns for turns in found if turns is not None]


def _told_of_end(turns: Sequence[Turns]) -> str:
    """Say why a worker computes nothing further for the others."""
    stopped = {k for t in turns for k in np.flatnonzero(t.attendance.stopped())}
    if not stopped:
        return "The others have ended: what this worker computes further is dropped"
    return (
        f"A callback has stopped `fit` on workers {sorted(map(int, stopped))}: it ends "
        "on the others after the same step"
    )
