"""Epochs and backups of workers with servers, which follow their chief."""

import contextlib
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host
from tf_dgc._host.shared import SharedVariable
from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.strategies.served_training import Fits

_logger = logging.getLogger("tf_dgc")


class PassedOver(keras.callbacks.Callback):
    """Passes over a `fit` that was over before this worker came."""

    def __init__(self, following: "Following") -> None:
        """Take what finds the model on the servers."""
        super().__init__()
        self._following = following

    def on_train_begin(self, logs: Any = None) -> None:
        """Let no epoch run."""
        _host.keras.set_initial_epoch(self.model, sys.maxsize)
        self._following.find(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """Let the next `fit` begin where it says."""
        _host.keras.set_initial_epoch(self.model, None)


class Following:
    """Place of this worker among those that follow the chief's epochs."""

    def __init__(
        self,
        make: Downpouring,
        fits: Fits,
        prepare: Callable[[Any, Sequence[tuple[Any, Any]]], None],
    ) -> None:
        """Take the members of the job, and the calls of `fit`.

        Args:
            make: of exchanges with servers.
            fits: that run.
            prepare: moves what an optimizer trains to the servers.
        """
        self._move, self._found = prepare, 0
        self._members, self._config, self._fits = make.members, make.settings, fits
        self._servers = make.servers

    def tell_epoch(self, epoch: int) -> None:
        """Tell the other workers at which epoch of its `fit` the chief is."""
        self._members.records.progress = self._fits.count, epoch

    def chief_epoch(self) -> int:
        """Return where to begin a `fit`: at the chief's epoch, once it has told.

        Beyond all epochs, where the chief is at a later `fit`.

        Raises:
            TimeoutError: the chief has not told.
        """
        records, own = self._members.records, self._fits.count
        records.wait_for(lambda: records.progress[0] >= own, "epoch of `BackupState`")
        fit, epoch = records.progress
        return epoch if fit == own else sys.maxsize

    def lead(self, model: keras.Model, epochs: int) -> None:
        """Tell the others the first epoch of a `fit`, which may be beyond all."""
        first = _host.keras.initial_epoch(model) or 0
        if first >= epochs:
            self.pass_over(model)
        self.tell_epoch(first)

    def pass_over(self, model: keras.Model) -> None:
        """Move what a passed-over `fit` trains to the servers, or find it there.

        By its step, which is traced, and finds no data: so this worker knows the model
        as those that have trained it do.
        """
        succession, data = self._members.succession, self._fits.data
        succession.passes = True
        try:
            if model.run_eagerly:
                self._prepare(model)
            else:
                with contextlib.suppress(tf.errors.OutOfRangeError, StopIteration):
                    model.train_function(iter(data.share.take(0)))
        finally:
            succession.passes = False

    def _prepare(self, model: keras.Model) -> None:
        """Move the weights there that a step trains which is not traced."""
        optimizer, weights = model.optimizer, model.trainable_variables
        strategy: Any = _host.keras.strategy_of(model)
        with strategy.scope():
            optimizer.build(weights)
            self._move(optimizer, [(weight, weight) for weight in weights])

    def find(self, model: keras.Model) -> None:
        """Find the model of a `fit` that is over, with its `History`, and say so."""
        if self._found == self._fits.count:
            return
        level = logging.INFO if self._found else logging.WARNING
        self._found = self._fits.count
        self.pass_over(model)
        self.take_history(model)
        _logger.log(
            level,
            "Worker %d came when `fit` number %d of its script was over on the others, "
            "and passes it over: weights are those on the servers",
            self._members.index,
            self._fits.count,
        )

    def tell_history(self, history: Mapping[str, Any]) -> None:
        """Let those who come later have the `History` of a `fit` that is over."""
        if self._members.is_chief:
            text = json.dumps(history, default=lambda each: np.asarray(each).tolist())
            self._history.assign(text)

    def take_history(self, model: keras.Model) -> None:
        """Take over what the chief has told of this `fit`, if it has."""
        if self._history.initialized:
            text = self._history.read_value().numpy()
            model.history.history.update(json.loads(text))

    @property
    def _history(self) -> SharedVariable:
        return self._servers.variable(f"history.{self._fits.count}", tf.string)

    @property
    def progress(self) -> int:
        """At which epoch of its `fit` the chief is, as far as it has told."""
        return self._members.records.progress[1]

    @property
    def is_first(self) -> bool:
        """Tell whether no worker had this one's place before, on these servers."""
        return self._members.is_first

    @property
    def keeps_back(self) -> bool:
        """Tell whether a worker keeps back a part of what it is to push."""
        return self._config.compression is not None

    def part_of_state(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Return where in a folder of state this worker writes."""
        own = [] if self._members.is_chief else [f"worker-{self._members.index:05d}"]
        return pathlib.Path(path, *own)
