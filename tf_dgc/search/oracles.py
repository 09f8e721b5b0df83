"""An oracle of KerasTuner that decides for many, and those that follow it.

An *outcome* is what an oracle has decided, and what has changed by it, as JSON holds
it: its state, as it would be saved, and the states of trials.
"""

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import tensorflow as tf

from tf_dgc.search import chief
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport

Files = dict[str, bytes]  # of a folder, by their names
_LONGEST = 4000  # characters of an error that others are told
_OF_TRIAL = "trial.json"  # which the oracle writes itself
_logger = logging.getLogger("tf_dgc")


class Decider(Protocol):
    """Oracle that is asked: of this process, or of another one."""

    def call(
        self, name: str, arguments: Mapping[str, Any], since: int
    ) -> dict[str, Any]:
        """Call one of its methods; return the outcome.

        Args:
            name: "create_trial", "update_trial", "end_trial", or "look".
            arguments: of the method; a trial as its state.
            since: number of changes that are known to who asks.
        """

    def files(self, trial_id: str) -> Files:
        """Return what a trial has left in its folder."""

    def put(self, trial_id: str, files: Files) -> None:
        """Take over what a trial has left in its folder."""


class Book:
    """The oracle of a tuner of this process, and what it has decided so far.

    Attributes:
        tuner: of KerasTuner.
        oracle: of the tuner.
        lock: held while the oracle decides.
    """

    def __init__(self, tuner: Any) -> None:
        """Take the tuner, whose oracle has its own methods yet."""
        self.tuner, self.oracle = tuner, tuner.oracle
        names = "create_trial", "update_trial", "end_trial"
        self._methods = {name: getattr(self.oracle, name) for name in names}
        self._changed: list[str] = list(self.oracle.trials)  # ids, the last one last
        self.lock = threading.RLock()

    def create_trial(self, tuner_id: str) -> Any:
        """Return the oracle's next trial."""
        with self.lock:
            trial = self._methods["create_trial"](tuner_id)
            self._note(trial)
            return trial

    def end_trial(self, trial: Any) -> None:
        """Let the oracle take note that a trial has ended."""
        with self.lock:
            try:
                self._methods["end_trial"](trial)
            finally:
                self._note(trial)

    def call(
        self, name: str, arguments: Mapping[str, Any], since: int
    ) -> dict[str, Any]:
        """Call a method of the oracle; see `Decider`."""
        with self.lock:
            trial, error = None, ""
            try:
                trial = self._call(name, arguments)
            except Exception as failure:  # told to all who follow
                error = f"{type(failure).__name__}: {failure}"
                _logger.debug("The oracle refuses", exc_info=failure)
            return self.outcome(trial, error, since)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name == "create_trial":
            return self.create_trial(**arguments)
        if name == "end_trial":
            self.end_trial(trial_of(arguments["trial"]))
        if name == "update_trial":
            trial = self._methods["update_trial"](**arguments)
            self._note(trial)
        return None

    def _note(self, trial: Any) -> None:
        if trial.trial_id in self.oracle.trials:
            self._changed.append(trial.trial_id)

    def outcome(self, trial: Any, error: str, since: int) -> dict[str, Any]:
        """Return the outcome of a call.

        Args:
            trial: that was created, or None.
            error: that was raised, or "".
            since: number of changes that are known.
        """
        changed = dict.fromkeys(self._changed[since:])
        return {
            "trial": None if trial is None else trial.get_state(),
            "error": error,
            "state": self.oracle.get_state(),
            "trials": [self.oracle.trials[each].get_state() for each in changed],
            "changes": len(self._changed),
        }

    def files(self, trial_id: str) -> Files:
        """Return what a trial has left in its folder."""
        return read_folder(self._folder_of(trial_id))

    def put(self, trial_id: str, files: Files) -> None:
        """Take over what a trial has left in its folder."""
        write_folder(self._folder_of(trial_id), files)

    def _folder_of(self, trial_id: str) -> str:
        if trial_id not in self.oracle.trials:
            raise ValueError(f"There is no trial of this id: {trial_id!r}")
        return str(self.tuner.get_trial_dir(trial_id))


class Shared:
    """The oracle of a tuner, as each of several workers has it.

    All workers call its methods in the same order, and get the same trials.
    """

    def __init__(
        self, tuner: Any, transport: Transport, decider: Decider | None
    ) -> None:
        """Let a tuner follow the chief's decisions.

        Args:
            tuner: of KerasTuner, made alike on all workers.
            transport: between the workers.
            decider: whom the chief asks; None on the others.
        """
        self._tuner, self._oracle = tuner, tuner.oracle
        self._transport, self._decider = transport, decider
        self._decides = isinstance(decider, Book)  # here
        self._changes = 0
        self._ask("look")
        for name in ("create_trial", "update_trial", "end_trial"):
            setattr(self._oracle, name, getattr(self, name))
        self._load, self._run = tuner.load_model, tuner.run_trial
        tuner.load_model, tuner.run_trial = self.load_model, self.run_trial

    def create_trial(self, tuner_id: str) -> Any:
        """Return the next trial, the same on all workers."""
        state = self._ask("create_trial", tuner_id=tuner_id)["trial"]
        trial = self._oracle.trials.get(state["trial_id"])
        if state["status"] != "RUNNING" or trial is None:
            return trial_of(state)
        self._fetch_before(trial)
        return trial

    def update_trial(
        self, trial_id: str, metrics: Mapping[str, Any], step: int = 0
    ) -> Any:
        """Report the metrics of the chief."""
        self._ask("update_trial", trial_id=trial_id, metrics=dict(metrics), step=step)
        return self._oracle.trials[trial_id]

    def end_trial(self, trial: Any) -> None:
        """Report that a trial has ended, on all workers alike.

        A worker that has lost the others reports nothing: the trial goes to others.
        """
        if self._transport.size > 1:
            self._transport.barrier()
        folder = self._tuner.get_trial_dir(trial.trial_id)
        if self._decider is not None and not self._decides:
            if trial.status == "COMPLETED":
                self._decider.put(trial.trial_id, read_folder(folder))
        if not self._decides:  # whose folder is the one that stays
            tf.io.gfile.rmtree(folder)
        self._ask("end_trial", trial=trial.get_state())

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Train a trial; one that fails on a worker fails on all.

        Raises:
            RuntimeError: it has failed on another worker.
        """
        try:
            results = self._run(trial, *args, **kwargs)
        except Exception as error:
            _logger.warning("Trial %s has failed: %s", trial.trial_id, error)
            self._failures(f"{type(error).__name__}: {error}")
            raise
        for rank, failure in enumerate(self._failures("")):
            if failure:
                raise RuntimeError(f"Worker {rank}: {failure}")
        return results

    def _failures(self, failure: str) -> list[str]:
        """Return by what a trial has failed on each worker; "" where it has not."""
        if self._transport.size == 1:
            return []
        own = {"failure": failure[-_LONGEST:]}
        records = handshake.tell(self._transport, "trial", own)
        return [str(record["failure"]) for record in records]

    def load_model(self, trial: Any) -> Any:
        """Return the model of a trial, by the chief's files."""
        self._fetch_before(trial)
        self._fetch(trial.trial_id)
        return self._load(trial)

    def _ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Return what the chief's decider says, on all workers.

        Raises:
            RuntimeError: the oracle has raised an error; on all workers.
        """
        outcome: dict[str, Any] = {}
        if self._decider is not None:
            outcome = self._decider.call(name, arguments, self._changes)
        outcome = chief.told(self._transport, outcome)
        self._changes = outcome["changes"]
        if not self._decides:
            for state in outcome["trials"]:
                trial = trial_of(state)
                self._oracle.trials[trial.trial_id] = trial
                folder = self._tuner.get_trial_dir(trial.trial_id)
                trial.save(os.path.join(folder, _OF_TRIAL))
            self._oracle.set_state(outcome["state"])
        if outcome["error"]:
            raise RuntimeError(f"The oracle of the search: {outcome['error']}")
        return outcome

    def _fetch_before(self, trial: Any) -> None:
        """Get the trial that this one of Hyperband continues: a build reads it."""
        before = trial.hyperparameters.values.get("tuner/trial_id")
        if before is not None:
            self._fetch(before)

    def _fetch(self, trial_id: str) -> None:
        """Get what a trial has left, where it is not here."""
        files = {} if self._decider is None else self._decider.files(trial_id)
        for name in chief.told(self._transport, sorted(files)):
            data = chief.given(self._transport, files.get(name, b""))
            if not self._decides:
                write_folder(self._tuner.get_trial_dir(trial_id), {name: data})


def trial_of(state: Mapping[str, Any]) -> Any:
    """Return KerasTuner's trial of a state."""
    from keras_tuner.engine.trial import Trial  # there, as whoever has a state has it

    return Trial.from_state(state)


def read_folder(path: str) -> Files:
    """Return the files of a trial's folder, but for the oracle's own."""
    found: Files = {}
    for folder, _, names in tf.io.gfile.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            relative = os.path.relpath(file, path)
            if relative != _OF_TRIAL:
                with tf.io.gfile.GFile(file, "rb") as stream:
                    found[relative] = stream.read()
    return found


def write_folder(path: str, files: Files) -> None:
    """Write files into a trial's folder.

    Raises:
        ValueError: a name leads out of it.
    """
    for name, data in files.items():
        parts = name.split("/")
        if os.path.isabs(name) or ".." in parts or not name:
            raise ValueError(f"A file must be in the folder of its trial: {name!r}")
        file = os.path.join(path, name)
        tf.io.gfile.makedirs(os.path.dirname(file))
        with tf.io.gfile.GFile(file, "wb") as stream:
            stream.write(data)
