"""Keras callbacks: figures for people, and jobs that continue after a kill."""

import pathlib
import shutil
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host, state_files
from tf_dgc.averaging_strategy import ParameterAveragingStrategy
from tf_dgc.strategy import BaseStrategy
from tf_dgc.synchronizers import saving

# Backups of a worker that are compared; there are two unless removing them failed.
_LOOKED_AT = 8


class CompressionStats(keras.callbacks.Callback):
    """Adds to the logs of each epoch what this worker sent in it.

    So they come into History, CSVLogger, TensorBoard and the progress bar. Callbacks
    that are listed before this one do not see them.

    | log | meaning |
    |---|---|
    | `sent_bytes` | handed to the transport in this epoch |
    | `avoided_bytes` | what dense training would have handed to it, less that |
    | `compression` | dense bytes over sent bytes |
    | `density` | share of the gradients' elements that were sent |
    | `residual_norm` | Euclidean norm of what is kept back at the end of the epoch |
    | `stale` | share of the compressed elements not sent once in this epoch |

    With `ParameterAveragingStrategy` also

    | log | meaning |
    |---|---|
    | `rounds` | rounds of averaging in this epoch |
    | `period` | local steps between two rounds at the end of the epoch |
    | `distance` | of this worker's parameters from those then agreed on, before the |
    |  | last round, Euclidean norm: how far workers part within a period |

    Example:
        model.fit(dataset, callbacks=[tf_dgc.callbacks.CompressionStats()])
    """

    def __init__(self, by_tensor: bool = False) -> None:
        """Choose the figures.

        Args:
            by_tensor: add `density/NAME` for every compressed tensor.
        """
        super().__init__()
        self.by_tensor = by_tensor
        self._before: list[int] = []
        self._rounds = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where the counters stand."""
        strategy = _strategy_of(self)
        self._before = [int(figure) for figure in strategy.stats(total=True)[:4]]
        strategy.tensor_stats(reset=True)
        if isinstance(strategy, ParameterAveragingStrategy):
            self._rounds = int(strategy.round_stats().rounds)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the figures to `logs`."""
        strategy = _strategy_of(self)
        total = strategy.stats(total=True)
        now = [int(figure) for figure in total[:4]]
        sent, dense, sent_elements, elements = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        figures = {
            "sent_bytes": sent,
            "avoided_bytes": dense - sent,
            "compression": dense / max(sent, 1),
            "density": sent_elements / max(elements, 1),
            "residual_norm": float(total.residual_norm),
        }
        tensors = strategy.tensor_stats()
        if size := sum(tensor.elements for tensor in tensors):
            stale = sum(tensor.stale * tensor.elements for tensor in tensors)
            figures["stale"] = stale / size
        if isinstance(strategy, ParameterAveragingStrategy):
            stats = strategy.round_stats()
            figures["rounds"] = int(stats.rounds) - self._rounds
            figures["period"] = int(stats.period)
            figures["distance"] = float(stats.distance)
        if self.by_tensor:
            figures |= {f"density/{tensor.name}": tensor.density for tensor in tensors}
        if logs is not None:
            logs.update(figures)


class BackupState(keras.callbacks.Callback):
    """Backs up a job at the end of each epoch; started again, it continues from there.

    In place of `keras.callbacks.BackupAndRestore`, on all workers. The last backup that
    all of them have is continued bit for bit: each worker's weights, optimizers,
    statistics, random generators of Keras, and what it keeps back, and the epoch.
    What it does not know is the state of the data, and of `tf.random`: batches must be
    the same in an epoch whether or not epochs ran before it in this process.

    A backup is a folder `epoch-00003` with the files of `save_state` and the weights of
    each worker. Workers may share the disk, or have one each; to continue on another
    number of workers they must share it. The backup before is removed only when all
    have written the next.
    """

    def __init__(self, backup_dir: Any, delete_checkpoint: bool = True) -> None:
        """Say where.

        Args:
            backup_dir: a folder for this alone, the same at every start.
            delete_checkpoint: remove the backups at the end of `fit`.

        Raises:
            ValueError: `backup_dir` is empty.
        """
        super().__init__()
        if not backup_dir:
            raise ValueError(
                "`backup_dir` must be the path of a folder. Received: "
                f"backup_dir={backup_dir!r}"
            )
        self.backup_dir = pathlib.Path(backup_dir)
        self.delete_checkpoint = delete_checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        """Continue from the last backup, if there is one."""
        strategy = _strategy_of(self)
        epoch = self._last_common(strategy)
        _host.set_initial_epoch(self.model, epoch)
        if epoch is None:
            return
        folder = self._folder(epoch)

        def read() -> None:
            saved = state_files.read_manifest(folder)["world_size"]
            weights, seeds = self._files(folder, strategy.rank % saved)
            self.model.load_weights(weights)
            if strategy.rank < saved:  # a worker that is new draws numbers of its own
                own = self._seeds()
                shapes = {name: v.shape.as_list() for name, v in own.items()}
                for name, array in state_files.read_arrays(seeds, shapes).items():
                    own[name].assign(array)

        saving.together(strategy.transport, f"success in reading {folder}", read)
        strategy.restore_state(folder, self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Let a second `fit` begin where it is told to."""
        _host.set_initial_epoch(self.model, None)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write a backup, then remove those before it."""
        strategy = _strategy_of(self)
        folder = self._folder(epoch + 1)
        weights, seeds = self._files(folder, strategy.rank)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            # Of a run that was killed; without a manifest the backup is not whole.
            (folder / state_files.MANIFEST).unlink(missing_ok=True)
            self.model.save_weights(weights, overwrite=True)
            values = {name: v.numpy() for name, v in self._seeds().items()}
            np.savez(seeds, allow_pickle=False, **values)
            for path in (weights, seeds):
                state_files.sync(path)

        saving.together(strategy.transport, f"success in writing {folder}", write)
        strategy.save_state(folder, self.model)
        for other in self._epochs():
            if other != epoch + 1:
                shutil.rmtree(self._folder(other), ignore_errors=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the backups."""
        strategy = _strategy_of(self)
        _host.set_initial_epoch(self.model, None)
        strategy.transport.barrier()
        if self.delete_checkpoint:
            shutil.rmtree(self.backup_dir, ignore_errors=True)

    def _folder(self, epoch: int) -> pathlib.Path:
        return self.backup_dir / f"epoch-{epoch:05d}"

    def _files(self, folder: pathlib.Path, rank: int) -> tuple[pathlib.Path, ...]:
        """Return where weights and seeds go; both are there before the manifest."""
        names = f"rank-{rank:05d}.weights.h5", f"rank-{rank:05d}.seeds.npz"
        return tuple(folder / name for name in names)

    def _seeds(self) -> dict[str, Any]:
        """Return the states of random generators, which Keras does not save."""
        own = [v for v in self.model.variables if "seed_generator_state" in v.path]
        seeds = [_host.global_seed_state(), *own]
        return {str(i): variable for i, variable in enumerate(seeds)}

    def _epochs(self) -> list[int]:
        names = [folder.name for folder in self.backup_dir.glob("epoch-*")]
        return sorted(int(name[6:]) for name in names if name[6:].isdigit())

    def _last_common(self, strategy: BaseStrategy) -> int | None:
        """Return the last epoch of which every worker has a whole backup."""
        whole, begun = [-1] * _LOOKED_AT, 0
        for epoch in self._epochs():
            begun = 1
            if (self._folder(epoch) / state_files.MANIFEST).exists():
                whole = [*whole[1:], epoch]
        mine = tf.constant([begun, *whole], tf.int64)
        found = strategy.transport.all_gather(mine, "backups").numpy().tolist()
        common = set.intersection(*[set(row[1:]) for row in found]) - {-1}
        without = [rank for rank, row in enumerate(found) if not row[0]]
        if not common and without and any(max(row[1:]) >= 0 for row in found):
            raise ValueError(
                f"All workers must find a backup in {self.backup_dir}, or none. "
                f"Received: no backup on ranks {without}. Copy it there, or remove it "
                "everywhere to begin anew."
            )
        return max(common, default=None)


def chief_only(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return a callback that runs on the chief and does nothing on other workers.

    For what writes files or reports, such as `ModelCheckpoint`, `CSVLogger` and
    `TensorBoard`. Not for what evaluates, predicts or stops training: all workers must
    do that together.
    """
    return _ChiefOnly(callback)


class _ChiefOnly(keras.callbacks.Callback):
    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self._callback = callback

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if _strategy_of(self).is_chief:
            self._callback.set_model(model)


def _on_chief(name: str) -> Any:
    def hook(self: _ChiefOnly, *args: Any, **kwargs: Any) -> None:
        if _strategy_of(self).is_chief:
            getattr(self._callback, name)(*args, **kwargs)

    return hook


for _name in dir(keras.callbacks.Callback):
    if _name.startswith("on_"):
        setattr(_ChiefOnly, _name, _on_chief(_name))


def _strategy_of(callback: keras.callbacks.Callback) -> BaseStrategy:
    strategy = callback.model.distribute_strategy
    if not isinstance(strategy, BaseStrategy):
        raise ValueError(
            f"{type(callback).__name__} needs a model that was compiled in the scope "
            f"of a strategy of tf_dgc. Received: a model of {strategy!r}"
        )
    return strategy
