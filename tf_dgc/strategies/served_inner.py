"""Inside of DownpourStrategy: runs, meetings and backups of a worker with servers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.exchanges.served import served
from tf_dgc.servers.tables import Tables
from tf_dgc.strategies import drawn_rows, embeddings
from tf_dgc.strategies.common_steps import CommonSteps
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.following import Following
from tf_dgc.strategies.inner import Inner
from tf_dgc.strategies.served_rounds import LocalTraining
from tf_dgc.strategies.served_share import OverServers, ServedShare
from tf_dgc.strategies.served_training import Fits, ServedTraining


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
        self.following = Following(self.make, self.fits, self.exchanging.prepare)
        self.tables = Tables(self.make.servers, self.members, core.strategy)
        self._common = CommonSteps(core.ledger)
        self._workers = OverServers(self.make.servers, self.members)

    def _make_exchanging(self) -> ServedTraining:
        return ServedTraining(self.core, self.make, self.fits)

    def sum_losses(self) -> None:
        """Let losses be of the rows of all workers, in steps that all take together."""
        self._common.sums = self._workers
        self.core.share = ServedShare(self._workers)

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
        model = None if self.fits.evaluating else self.fits.model
        if self.local is not None and model is not None:
            for each in self.local.rounds_of(model):
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
        self._common.meet(self.members.meetings.barrier)
        self.fetch()

    # Runs.

    def run(self, fn: Any, args: Any, step: Callable[[Any], Any]) -> Any:
        """Run a function as a step; see `Inner.run`.

        What it draws by a seed is for this worker's rows, of which others are taken to
        have as many where workers do not meet.
        """
        if self.share is None and self._workers.size > 1 and _trains(fn):
            step = _drawing(step, self._workers, self.core.warn)
        return super().run(fn, args, step)

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
        told = self.members.meetings.told
        told.tell(told.fits, fits.count)
        self.take_back()
        try:
            yield
        finally:
            fits.running -= 1
            fits.model, fits.callbacks, fits.data = None, (), None
            self.members.succession.leave()
            self.core.extended.shares.training_next = False
            with contextlib.suppress(tf.errors.OpError):  # of a server that has failed
                self._common.leave(bool(model.stop_training))

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
        self.core.warn([self._common.told_of_end()])
        if self.fits.model is not None:
            self.fits.model.stop_training = True


def _drawing(
    step: Callable[[Any], Any],
    workers: OverServers,
    warn: Callable[[Sequence[str]], None],
) -> Callable[[Any], Any]:
    """Return a step that draws for this worker's rows; the others have as many."""

    def say(warning: str) -> None:
        warn([warning])

    return lambda args: drawn_rows.run_own(args, step, workers, True, say)


def _trains(fn: Any) -> bool:
    """Tell whether a function is a step of training, or a loop's own."""
    model = _host.keras.model_of(fn)
    if model is None:  # of a loop of one's own, or of `predict`
        return getattr(fn, "__name__", "") != "one_step_on_data"
    return bool(_host.keras.step_named(model, fn) == "train_step")
