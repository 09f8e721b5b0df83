"""Residuals of workers that are not the chief, among the backups of a job.

Workers of parameter servers do not meet. Each writes what it keeps back at the ends of
its own epochs. When a job is started again, on new servers, from the chief's backup, it
takes over what belongs to the chief's epoch or, where it was ahead, to the first after
that: so that nothing is pushed twice, but for what it pushed between its own end of
that epoch and the chief's. What it has pushed since is lost with the servers.
"""

import pathlib
import shutil
from typing import Any

import keras

from tf_dgc import _host
from tf_dgc.strategies import backups, owners
from tf_dgc.strategies.downpour import DownpourStrategy

_FOLDER = "workers"  # within that of the backups


def save(
    backup_dir: pathlib.Path, strategy: Any, model: keras.Model, epochs: int
) -> None:
    """Write what a worker keeps back after some epochs, if it keeps anything back.

    Args:
        backup_dir: of all backups.
        strategy: of the model.
        model: that is trained.
        epochs: that this worker has done.
    """
    if not _is_follower(strategy):
        return
    folder = backup_dir / _FOLDER
    strategy.save_state(folder / backups.Position(epochs).name, model)
    least = min(strategy.inner.following.progress, epochs)
    for other in backups.listed(folder):
        if other.epoch < least:
            own = strategy.inner.following.part_of_state(folder / other.name)
            shutil.rmtree(own, ignore_errors=True)


def restore(
    backup_dir: pathlib.Path,
    strategy: Any,
    model: keras.Model,
    epochs: int,
    within: bool,
) -> None:
    """Take over what a worker kept back, where a job continues on new servers.

    Args:
        backup_dir: of all backups.
        strategy: of the model.
        model: that is trained.
        epochs: of the chief's backup.
        within: whether that may have been made within the next epoch.
    """
    if not (_is_follower(strategy) and strategy.inner.following.is_first and epochs):
        return
    for position in backups.listed(backup_dir / _FOLDER):
        folder = backup_dir / _FOLDER / position.name
        if position.epoch >= epochs + within and _is_whole(strategy, folder):
            strategy.restore_state(folder, model)
            return


def follow(
    backup_dir: pathlib.Path, strategy: Any, fit: Any, deletes: bool, within: bool
) -> None:
    """Begin a `fit` with the chief's epoch, where workers do not meet.

    Args:
        backup_dir: of all backups.
        strategy: of the model.
        fit: its last callback.
        deletes: whether backups go when all workers have ended well.
        within: whether there are some within epochs.
    """
    if not isinstance(strategy, DownpourStrategy):
        return
    owner = owners.of(backup_dir, strategy.rank)
    if owner.follow(strategy.workers, deletes):
        remove(backup_dir, strategy)
    epoch = strategy.inner.following.chief_epoch()
    _host.keras.set_initial_epoch(fit.model, epoch)
    if epoch >= fit.params["epochs"]:
        strategy.inner.following.find(fit.model)
    restore(backup_dir, strategy, fit.model, epoch, within)


def clear(backup_dir: pathlib.Path, strategy: Any) -> None:
    """Remove, where the chief begins anew, what others kept back in another job."""
    if isinstance(strategy, DownpourStrategy):
        shutil.rmtree(backup_dir / _FOLDER, ignore_errors=True)


def remove(backup_dir: pathlib.Path, strategy: Any) -> None:
    """Remove what this worker wrote in a job that has ended well."""
    if _is_follower(strategy):
        for position in backups.listed(backup_dir / _FOLDER):
            own = strategy.inner.following.part_of_state(
                backup_dir / _FOLDER / position.name
            )
            shutil.rmtree(own, ignore_errors=True)


def _is_whole(strategy: DownpourStrategy, folder: pathlib.Path) -> bool:
    own = strategy.inner.following.part_of_state(folder)
    return backups.is_whole(own, 0, 1)


def _is_follower(strategy: Any) -> bool:
    if not isinstance(strategy, DownpourStrategy):
        return False
    return not strategy.is_chief and strategy.inner.following.keeps_back
