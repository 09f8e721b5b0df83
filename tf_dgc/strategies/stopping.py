"""The end of training on all workers at once, whichever of them asks for it.

A callback, or a step, sets `model.stop_training`, maybe on one worker only. The votes
travel with the gradients: a worker that ends takes part in further steps until all
know, and then all end. Steps that exchange no gradients tell nothing: then all know at
the end of the epoch's data, where they meet. Where all have ended after the same batch,
as one process does, what these steps have changed is taken back.
"""

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges.ledger import Ledger
from tf_dgc.exchanges.parts import Ballot
from tf_dgc.strategies import fits
from tf_dgc.strategies.snapshot import Snapshot
from tf_dgc.transports import handshake
from tf_dgc.transports.mesh import Mesh, Sites

_logger = logging.getLogger("tf_dgc")


class _Training:
    """A `fit` that runs."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.steps: Iterator[Any] = iter(())  # of the epoch
        self.batches = 0  # done in the epoch, until this worker asks to end
        self.done = 0  # and those in which it took part since
        self.before: Snapshot | None = None  # as all was when it asked
        self.asked = False  # whether this worker has asked to end
        self.settled = False  # whether all know, and who has asked was told
        self.names: list[str] = []  # of callbacks


class Stopping:
    """Lets the workers of a strategy end `fit` after the same batch.

    Attributes:
        ballot: votes of the workers, which steps exchange.
    """

    def __init__(self, mesh: Mesh, ledger: Ledger, settle: Callable[[], None]) -> None:
        """Create the votes, outside of any graph.

        Args:
            mesh: of the workers.
            ledger: its exchanges.
            settle: makes workers meet that train by themselves.
        """
        self._mesh, self._ledger, self._settle = mesh, ledger, settle
        self.ballot = Ballot.of(mesh.everybody.size)
        self._trainings: list[_Training] = []

    @contextlib.contextmanager
    def training(self, model: keras.Model) -> Iterator[None]:
        """Watch a `fit` of a model."""
        self._trainings.append(_Training(model))
        self._vote()
        try:
            with self._mesh.everybody.training():
                yield
        finally:
            self._trainings.pop()
            self._vote()

    def _vote(self) -> None:
        asked = bool(self._trainings) and self._trainings[-1].asked
        self.ballot.own.assign(float(asked))
        self.ballot.last.assign(tf.zeros([self._mesh.everybody.size]))

    def training_of(self, model: keras.Model) -> _Training | None:
        """Return the `fit` that runs, where it is of a model."""
        found = self._trainings[-1] if self._trainings else None
        return found if found is not None and found.model is model else None

    def after_batch(
        self, training: _Training, batches: int, callbacks: Sequence[Any]
    ) -> None:
        """Let training go on, or end, as the workers have voted in the last step.

        Args:
            training: that runs.
            batches: done in this epoch.
            callbacks: of the `fit`.
        """
        model, training.batches = training.model, batches
        training.done = batches
        if self.ballot.last.numpy().any():
            if self._ledger.lockstep:  # else at the end of the epoch, where all meet
                self._tell(training)
            model.stop_training = True
        elif model.stop_training and not training.asked:
            self._ask(training, _stoppers(callbacks, "batch"))
            if self._ledger.lockstep:
                self._take_part(training)

    def _ask(self, training: _Training, names: list[str]) -> None:
        training.asked, training.names = True, names
        self.ballot.own.assign(1.0)

    def _take_part(self, training: _Training) -> None:
        """Take part in steps of those that train, until all know of this one's vote."""
        training.before = Snapshot(training.model, self._ledger.exchanges())
        while not self.ballot.last.numpy().any():
            try:
                *_, last, iterator = next(training.steps)
                training.model.train_function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                sites = isinstance(self._ledger.transport, Sites)
                if sites and training.done > training.batches:
                    training.before = None  # workers of a site have exchanged
                return  # all are told at the end of the data
            training.done = last + 1
        self._tell(training)

    def _tell(self, training: _Training) -> None:
        """Say who has ended training, and why; as one process does, where all have.

        All workers call this.
        """
        record = {
            "asked": training.asked,
            "batches": training.batches,
            "done": training.done,
            "names": training.names,
        }
        records = handshake.tell(self._mesh.everybody, "end of training", record)
        training.settled = True
        asked = [rank for rank, each in enumerate(records) if each["asked"]]
        alike = {each["batches"] for each in records}
        if len(asked) == len(records) and len(alike) == 1:
            if training.before is not None:
                training.before.put_back()
        elif self._mesh.everybody.rank == 0:
            who = "; ".join(_told(rank, records[rank]) for rank in asked)
            _logger.warning(
                "Training ends on all %d workers, after %d batches of the epoch: %s",
                len(records),
                max(each["done"] for each in records),
                who,
            )

    def after_epoch(self, training: _Training, callbacks: Sequence[Any]) -> None:
        """End training on all workers where one of them has ended it by now."""
        if training.settled:
            return
        self._settle()
        if training.model.stop_training and not training.asked:
            self._ask(training, _stoppers(callbacks, "epoch"))
        self._meet(training)

    def _meet(self, training: _Training) -> None:
        """End training on all workers where one has asked for it; all call this."""
        votes = self._mesh.everybody.all_gather(self.ballot.own.read_value(), "stops")
        if tf.reduce_any(votes > 0):
            self._tell(training)
            training.model.stop_training = True

    @contextlib.contextmanager
    def at_the_end_of_data(self, training: _Training) -> Iterator[None]:
        """Let others know that this worker has no more batches in the epoch.

        Here all meet, and end training where one has asked for it in a step that told
        nothing.
        """
        if not self._ledger.lockstep:
            yield
            return
        with self._mesh.everybody.at_end(training.batches):
            if not training.settled:
                self._meet(training)
            yield


def _told(rank: int, record: dict[str, Any]) -> str:
    names = record["names"]
    why = f"by {' or '.join(names)}" if names else "by `model.stop_training`"
    return f"worker {rank} has ended it after {record['batches']}, {why}"


# Which callbacks may have ended training.

_WHEN = {"batch": "epoch", "epoch": "batch"}


def _stoppers(callbacks: Sequence[Any], when: str) -> list[str]:
    """Return the classes of callbacks whose code names `stop_training`.

    Args:
        callbacks: of the `fit`.
        when: "batch" or "epoch", at whose end it was set.
    """
    return [
        type(callback).__name__
        for callback in callbacks
        if any(
            names(function.__code__, "stop_training")
            for name, function in functions_of(callback)
            if not (name.startswith("on_") and _WHEN[when] in name)
        )
    ]


def functions_of(callback: Any) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions of a callback, and of its classes but Keras's base."""
    base = keras.callbacks.Callback.__mro__
    for owner in (callback, *type(callback).__mro__):
        if owner not in base:
            for name, value in vars(owner).items():
                if isinstance(value, types.FunctionType):
                    yield name, value


def names(code: types.CodeType, attribute: str) -> bool:
    """Tell whether code, or what is defined in it, names an attribute."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return attribute in code.co_names or any(names(each, attribute) for each in inner)


# What is put around functions of Keras.


def _of(model: Any) -> Stopping | None:
    found = fits.inner_of(_host.keras.strategy_of(model), "stopping")
    return found if isinstance(found, Stopping) else None


def fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Watch a `fit`, which may end on one worker; compare weights at its end."""
    if (stopping := _of(model)) is None:
        return original(model, *args, **kwargs)
    with stopping.training(model):
        history = original(model, *args, **kwargs)
    strategy: Any = _host.keras.strategy_of(model)
    strategy.inner.agreement.compare_trained(model)
    return history


def _training_now() -> tuple[Stopping, _Training] | None:
    """Return the `fit` that this thread runs, unless something runs within it."""
    run = fits.current()
    if run is None or run.what != "fit" or (stopping := _of(run.model)) is None:
        return None
    training = stopping.training_of(run.model)
    return None if training is None else (stopping, training)


def steps(original: Callable[..., Iterator[Any]], epoch: Any) -> Iterator[Any]:
    """Yield the steps of an epoch, and leave those that follow to `Stopping`."""
    entries = original(epoch)
    if (found := _training_now()) is not None:
        found[1].steps, found[1].batches = entries, 0
    yield from entries


def end_of_data(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Let others know that the data of an epoch have ended here."""
    found = _training_now()
    if found is None:
        return original(model, logs)
    with found[0].at_the_end_of_data(found[1]):
        return original(model, logs)


def end_batch(
    original: Callable[..., None], callbacks: Any, batch: int, logs: Any = None
) -> None:
    """Let training go on, or end, after a batch."""
    original(callbacks, batch, logs)
    if (found := _training_now()) is not None:
        found[0].after_batch(found[1], batch + 1, callbacks.callbacks)


def end_epoch(
    original: Callable[..., None], callbacks: Any, epoch: int, logs: Any = None
) -> None:
    """Let training go on, or end, after an epoch."""
    original(callbacks, epoch, logs)
    if (found := _training_now()) is not None:
        found[0].after_epoch(found[1], callbacks.callbacks)
