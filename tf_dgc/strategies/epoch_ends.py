"""Backups at the ends of epochs of a `fit`, and how a job takes one up."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.exchanges import records as saving
from tf_dgc.exchanges import state_files
from tf_dgc.strategies import backups, owners, positions, remembered
from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.transports import Transport, handshake

_logger = logging.getLogger("tf_dgc")

# Backups of a worker that are compared; there are four unless removing them failed.
_LOOKED_AT = 8


def last_common(folder: pathlib.Path, transport: Transport) -> backups.Position | None:
    """Return the last position of which every worker has a whole backup.

    Raises:
        ValueError: some workers have none.
    """
    whole, begun = [-1] * _LOOKED_AT, 0
    for position in backups.listed(folder):
        begun = 1
        own = folder / position.name
        if backups.is_whole(own, transport.rank, transport.size):
            whole = [*whole[1:], position.number]
    mine = tf.constant([begun, *whole], tf.int64)
    gathered = transport.all_gather(mine, "backups").numpy().tolist()
    common = set.intersection(*[set(row[1:]) for row in gathered]) - {-1}
    without = [rank for rank, row in enumerate(gathered) if not row[0]]
    if not common and without and any(max(row[1:]) >= 0 for row in gathered):
        raise ValueError(
            f"All workers must find a backup in {folder}, or none. "
            f"Received: no backup on ranks {without}. Copy it there, or remove it "
            "everywhere to begin anew."
        )
    return backups.of_number(max(common)) if common else None


@contextlib.contextmanager
def named(folder: pathlib.Path) -> Iterator[None]:
    """Say what to do where a backup cannot be taken up."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The backup in {folder} cannot be taken up: {error}. Start with its "
            "model, optimizer, strategy and data. If a file is damaged or missing, "
            f"remove {folder} on all workers: the job then continues from the backup "
            "before it, or where there is none, begins anew"
        ) from None


def take_up_data(
    folder: pathlib.Path, position: backups.Position, rank: int, iterator: Any
) -> None:
    """Bring data to where they were at a position within an epoch.

    Raises:
        ValueError: they are others, or a file is damaged.
    """
    with named(folder / position.name):
        place = backups.data_of(folder / position.name, rank)
        if positions.has_state(place):
            positions.take_up(iterator, place)
        else:
            positions.read_again(iterator, position.step)


class EpochEnds:
    """Backups of one `fit`, which all workers write and take up together."""

    def __init__(self, folder: pathlib.Path, strategy: BaseStrategy, fit: Any) -> None:
        """Take what they are of.

        Args:
            folder: of the backups of this `fit`.
            strategy: of the model.
            fit: its last callback.
        """
        self._folder, self._strategy, self._fit = folder, strategy, fit

    def write(self, epochs: int) -> None:
        """Write a backup after some epochs, then remove those before it."""
        strategy, model = self._strategy, self._fit.model
        folder = self._folder / backups.Position(epochs).name
        weights, rest = _files(folder, strategy.rank)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            # Of a run that was killed; without a manifest the backup is not whole.
            (folder / state_files.MANIFEST).unlink(missing_ok=True)
            values = {name: v.numpy() for name, v in backups.seeds(model).items()}
            values |= remembered.arrays_of(self._fit.others, model)
            with backups.leaving_none(weights, rest):
                backups.write_weights(model, weights)
                np.savez(rest, allow_pickle=False, **values)
                state_files.sync(rest)

        with backups.leaving_none(weights, rest):
            saving.together(strategy.transport, f"success in writing {folder}", write)
        strategy.save_state(folder, model)
        for other in backups.listed(self._folder):
            if other != (epochs, 0):
                owners.remove(self._folder / other.name)

    def restore(
        self, position: backups.Position, passes_over: bool
    ) -> dict[str, np.ndarray]:
        """Take over a backup, on all workers.

        Args:
            position: of the backup.
            passes_over: whether a `fit` that had ended does nothing more.

        Returns:
            What metrics had counted in the epoch, within which it may be; by name.
        """
        strategy, model = self._strategy, self._fit.model
        folder = self._folder / position.name
        subject = f"success in reading {folder}"

        def look() -> tuple[Any, ...]:
            saved = state_files.read_manifest(folder)["world_size"]
            weights, rest = _files(folder, strategy.rank % saved)
            return saved, weights, rest, remembered.read(rest, model)

        saved, weights, rest, memory = saving.together(
            strategy.transport, subject, look
        )
        if strategy.is_chief:
            _tell_other_data(folder, memory, self._fit.params.get("steps"))
        slots = {"slots of optimizers": memory.optimizers}
        handshake.agree(strategy.transport, f"backup in {folder}", slots)
        told = {"stopped": memory.stopped}  # of a worker that has, all were to end
        stopped = handshake.tell(strategy.transport, "end of `fit`", told)
        ends = any(each["stopped"] for each in stopped)
        if ends and passes_over and not position.step:
            # By a callback; the process ended after that, or the next epoch would be.
            epochs = max(position.epoch, self._fit.params["epochs"])
            _host.keras.set_initial_epoch(model, epochs)
        with strategy.scope():
            remembered.build_optimizers(memory, model)

        def read() -> dict[str, np.ndarray]:
            remembered.restore(rest, memory, self._fit.others, model)
            if position.step:
                return self._read_within(rest)
            self._read_end(weights, rest, strategy.rank < saved)
            return {}

        counted = saving.together(strategy.transport, subject, read)
        strategy.restore_state(folder, model)
        return dict(counted)

    def _read_end(
        self, weights: pathlib.Path, rest: pathlib.Path, is_own: bool
    ) -> None:
        """Take over what was written at the end of an epoch."""
        model = self._fit.model
        with bands.kept_elsewhere(), backups.naming(weights):
            model.load_weights(weights)
        own = backups.seeds(model)  # all together: it may make variables
        if is_own:  # a worker that is new draws numbers of its own
            shapes = {name: v.shape.as_list() for name, v in own.items()}
            for name, array in state_files.read_arrays(rest, shapes).items():
                own[name].assign(array)

    def _read_within(self, rest: pathlib.Path) -> dict[str, np.ndarray]:
        """Take over what was copied within an epoch, but for what metrics count."""
        variables = backups.Variables(self._fit.model)
        counted = variables.read(rest)
        variables.assign(counted, of_metrics=False)
        backups.read_seeds(rest, self._fit.model)
        return counted


def _files(folder: pathlib.Path, rank: int) -> tuple[pathlib.Path, ...]:
    """Return where weights and the rest go, which are there before the manifest."""
    return folder / f"rank-{rank:05d}.weights.h5", backups.rest_of(folder, rank)


def _tell_other_data(
    folder: pathlib.Path, before: remembered.Remembered, steps: int | None
) -> None:
    """Warn where epochs have other numbers of steps, or data of rows, than before."""
    sizes, told = remembered.sizes_now(), ""
    if before.steps is not None and steps and before.steps != steps:
        told = f"its epochs have {before.steps} steps, those of this `fit` {steps}"
    elif before.sizes and sizes and list(before.sizes) != sizes:
        told = f"they have {sizes} rows, and had {list(before.sizes)}"
    if told:
        _logger.warning(
            "The data, or the size of batches, are not those of the backup in %s: %s",
            folder,
            told,
        )
