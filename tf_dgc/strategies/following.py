"""Epochs and backups of workers with servers, which follow their chief."""

import os
import pathlib
import sys
from typing import Any

import keras

from tf_dgc import _host
from tf_dgc._host.shared import SharedVariable, Table
from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.strategies.served_training import Fits


class Following:
    """Place of this worker among those that follow the chief's epochs."""

    def __init__(self, make: Downpouring, fits: Fits) -> None:
        """Take the members of the job, and the calls of `fit`.

        Args:
            make: of exchanges with servers.
            fits: that run.
        """
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

    def give(self, model: keras.Model) -> None:
        """Let the others have the weights of a model whose `fit` is passed over.

        No step of it moves them to the servers. The chief does it before it tells the
        epoch.
        """
        for variable, shared in self._passed(model):
            shared.assign(variable.read_value())

    def lead(self, model: keras.Model, epochs: int) -> None:
        """Tell the others the first epoch of a `fit`, which may be beyond all."""
        first = _host.keras.initial_epoch(model) or 0
        if first >= epochs:
            self.give(model)
        self.tell_epoch(first)

    def take(self, model: keras.Model) -> None:
        """Take over the weights that the chief has given, if it has."""
        for variable, shared in self._passed(model):
            if shared.initialized:
                _host.shared.bypassed(variable, "assign")(shared.read_value())

    def _passed(self, model: keras.Model) -> list[tuple[Any, SharedVariable]]:
        """Return weights, and what stands for them on the servers after this `fit`."""
        make, count = self._servers.variable, len(self._servers.devices)
        found = []
        for i, weight in enumerate(model.weights):
            own = _host.keras.plain(weight)
            if not isinstance(own, Table):
                name = f"passed.{self._fits.count}.{i}"
                shape = own.shape.as_list()
                found.append((own, make(name, own.dtype, shape, i % count)))
        return found

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
