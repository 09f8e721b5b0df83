"""Keras callbacks: figures for people, and jobs that continue after a kill."""

import contextlib
import functools
import logging
import pathlib
from typing import Any

import keras

from tf_dgc import _host
from tf_dgc.exchanges import state_files
from tf_dgc.exchanges.figures import StepStats
from tf_dgc.exchanges.server_traffic import ServerStats
from tf_dgc.strategies import backups, calls, epoch_ends, kept, owners, positions
from tf_dgc.strategies.averaging import ParameterAveragingStrategy
from tf_dgc.strategies.base import BaseStrategy, of_callback
from tf_dgc.strategies.downpour import DownpourStrategy
from tf_dgc.strategies.epoch_ends import EpochEnds
from tf_dgc.strategies.extended import on_one_worker
from tf_dgc.strategies.files import AtTheEnd
from tf_dgc.strategies.timeline import Timed
from tf_dgc.strategies.timeline import Timeline as Timeline
from tf_dgc.strategies.within_epoch import Interval, WithinEpochs
from tf_dgc.transports import waiting

_logger = logging.getLogger("tf_dgc")


class CompressionStats(keras.callbacks.Callback):
    """Adds to the logs of each epoch what this worker sent and received in it.

    So they come into History, CSVLogger, TensorBoard and the progress bar. Callbacks
    that are listed before this one do not see them.

    | log | meaning |
    |---|---|
    | `sent_bytes` | handed to the transport in this epoch |
    | `avoided_bytes` | what dense training would have handed to it, less that |
    | `compression` | dense bytes over sent bytes |
    | `received_bytes` | received from other workers in this epoch |
    | `density` | share of the gradients' elements that were sent |
    | `residual_norm` | Euclidean norm of what is kept back at the end of the epoch |
    | `stale` | share of the compressed elements not sent once in this epoch |

    With `times=True` also

    | log | meaning |
    |---|---|
    | `exchange_share` | share of the epoch's time in collectives, waiting included |
    | `slowest_rank` | the worker that was most often the last to begin a step's first |
    |  | collective: the one that the others wait for |

    With `ParameterAveragingStrategy` also

    | log | meaning |
    |---|---|
    | `rounds` | rounds of averaging in this epoch |
    | `period` | local steps between two rounds at the end of the epoch |
    | `distance` | of this worker's parameters from those then agreed on, before the |
    |  | last round, Euclidean norm: how far workers part within a period |

    With `DownpourStrategy` also, of this worker in this epoch,

    | log | meaning |
    |---|---|
    | `pushes`, `pulls` | how often it pushed gradients, and fetched parameters |
    | `staleness` | mean number of pushes of others that its own pushes had missed |
    | `dropped` | its gradients that came too late for a step of all workers |
    | `received_bytes` | of parameters that it fetched, instead |

    Example:
        model.fit(dataset, callbacks=[tf_dgc.callbacks.CompressionStats()])
    """

    def __init__(self, by_tensor: bool = False, times: bool = False) -> None:
        """Choose the figures.

        Args:
            by_tensor: add `density/NAME` for every compressed tensor.
            times: add `exchange_share` and `slowest_rank`, on all workers or on none;
                the step is then traced with marks of time in it. Not with
                DownpourStrategy.
        """
        super().__init__()
        self.by_tensor, self.times = by_tensor, times
        self._timed: Timed | None = None
        self._before: list[int] = []
        self._rounds = 0
        self._served: ServerStats | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to note times, where they are wanted."""
        if self.times:
            self._timed = Timed(self)

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the step as it was."""
        if self._timed is not None:
            self._timed.end()
            self._timed = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where the counters stand."""
        strategy = of_callback(self)
        if self._timed is not None:
            self._timed.begin_epoch()
        self._before = _counted(strategy.stats(total=True))
        strategy.tensor_stats(reset=True)
        if isinstance(strategy, ParameterAveragingStrategy):
            self._rounds = int(strategy.round_stats().rounds)
        if isinstance(strategy, DownpourStrategy):
            self._served = strategy.server_stats()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the figures to `logs`."""
        strategy = of_callback(self)
        total = strategy.stats(total=True)
        sent, dense, sent_elements, elements, received = (
            after - before
            for after, before in zip(_counted(total), self._before, strict=True)
        )
        figures = {
            "sent_bytes": sent,
            "avoided_bytes": dense - sent,
            "compression": dense / max(sent, 1),
            "received_bytes": received,
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
        if isinstance(strategy, DownpourStrategy) and self._served is not None:
            figures |= _served(self._served, strategy.server_stats())
        if self._timed is not None:
            figures |= self._timed.figures()
        if self.by_tensor:
            figures |= {f"density/{tensor.name}": tensor.density for tensor in tensors}
        if logs is not None:
            logs.update(figures)


def _counted(stats: StepStats) -> list[int]:
    """Return those of the figures that add up over steps."""
    return [int(figure) for figure in (*stats[:4], stats.received_bytes)]


def _served(before: ServerStats, after: ServerStats) -> dict[str, float]:
    """Return what a worker did with the servers between two times."""
    differences = [float(b) - float(a) for a, b in zip(before, after, strict=True)]
    found = ServerStats._make(differences)
    return {
        "pushes": int(found.pushes),
        "pulls": int(found.pulls),
        "staleness": found.staleness / max(found.pushes, 1.0),
        "received_bytes": int(found.received_bytes),
        "dropped": int(found.dropped),
    }


class BackupState(keras.callbacks.Callback, AtTheEnd):
    """Backs up a job at the end of each epoch; started again, it continues from there.

    The backups are removed when all workers have ended well, not when `fit` does: a
    worker that dies at `model.save` costs no training. A process that ends by an error,
    by `sys.exit(1)` or by a signal has not ended well. The job that is started again
    then passes over each `fit` that had ended, whose weights and `History` it takes
    from the backup. Several calls of `fit` may use one folder.

    In place of `keras.callbacks.BackupAndRestore`, on all workers. The last backup that
    all of them have is continued bit for bit: each worker's weights, optimizers,
    statistics, random generators of Keras, and what it keeps back, and the epoch; and
    what `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint` and `SwapEMAWeights`,
    or what is derived from them, remember. It acts after all other callbacks of `fit`.
    What it does not know is the state of the data, and of `tf.random`: batches must be
    the same in an epoch whether or not epochs ran before it in this process.

    With `save_freq` or `save_seconds` it also backs up within epochs: then training
    waits only while each worker copies its arrays, which are written meanwhile. What
    metrics have counted in the epoch is in it, and the place in the data: as tf.data
    tells it, or where it cannot (Python generators), by the number of batches, which
    are then read again. What other callbacks count within an epoch is not.

    A backup is a folder `epoch-00003`, or `epoch-00003-step-00000500`, with the files
    of `save_state` and the weights of each worker. Workers may share the disk, or have
    one each; to continue on another number of workers, from the last end of an epoch,
    they must share it. A backup is removed only when all have written newer ones.

    With `DownpourStrategy` the chief alone writes, what the servers have at that time;
    a worker that joins begins with the chief's epoch. With compression the others write
    what they keep back, at the ends of their epochs.
    """

    def __init__(
        self,
        backup_dir: Any,
        delete_checkpoint: bool = True,
        *,
        save_freq: int | None = None,
        save_seconds: float | None = None,
    ) -> None:
        """Say where, and how often.

        Args:
            backup_dir: a folder for this job alone, the same at every start, on a disk
                of each worker or one that they share.
            delete_checkpoint: remove the backups when all workers have ended well.
                False: they stay, and the next `fit` continues from them.
            save_freq: number of steps between backups within an epoch, at least 1; with
                `steps_per_execution`, at the end of the execution.
            save_seconds: seconds between them, by the clock of the chief, which tells
                the others every ten steps.

        Raises:
            ValueError: `backup_dir` is empty or remote, both intervals are given, or
                one is out of its range.
        """
        super().__init__()
        self.backup_dir = _checked(backup_dir)
        self._interval = Interval(save_freq, save_seconds)
        self._interval.check()
        self.delete_checkpoint = delete_checkpoint
        self.save_freq, self.save_seconds = save_freq, save_seconds
        self._number, self._folder = 1, self.backup_dir  # of this call of `fit`
        self._within: WithinEpochs | None = None
        self._resumed: backups.Position | None = None
        self._counted: dict[str, Any] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Continue from the last backup, if there is one."""
        strategy = of_callback(self)
        if not strategy.inner.saves_state:
            deletes, within = self.delete_checkpoint, bool(self._interval)
            kept.follow(self.backup_dir, strategy, self, deletes, within)
            return
        args = _workers_of(strategy), self.model, self.delete_checkpoint
        self._number, self._folder = calls.begin(self.backup_dir, strategy, *args)
        every = self._folder, strategy, self, self._interval
        self._within = WithinEpochs(*every) if self._interval else None
        position = epoch_ends.last_common(self._folder, strategy.transport)
        self._resumed = position
        _host.keras.set_initial_epoch(self.model, position and position.epoch)
        if position is None:
            kept.clear(self.backup_dir, strategy)
            return
        with epoch_ends.named(self._folder / position.name):
            ends = EpochEnds(self._folder, strategy, self)
            self._counted = ends.restore(position, self.delete_checkpoint)
        if strategy.is_chief:
            _tell(self, self._folder / position.name, position)
        if isinstance(strategy, DownpourStrategy):  # there may be no epoch to come
            strategy.inner.following.lead(self.model, self.params["epochs"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Go to where the backup was made in the epoch, if it was."""
        _host.keras.set_initial_epoch(self.model, None)
        strategy = of_callback(self)
        if not strategy.inner.saves_state:
            return
        if isinstance(strategy, DownpourStrategy):
            strategy.inner.following.tell_epoch(epoch)
        position, self._resumed = self._resumed, None
        done = position.step if position else 0
        if self._within is not None:
            self._within.begin_epoch(epoch, done)
        if done:
            backups.Variables(self.model).assign(self._counted, of_metrics=True)
            self._counted = {}
        if done or self._within is not None:
            ready = functools.partial(self._begin_data, position)
            positions.at_next_epoch(done, ready)

    def _begin_data(self, position: backups.Position | None, iterator: Any) -> None:
        """Bring the data to where they were, and note them."""
        if position is not None and position.step:
            rank = of_callback(self).rank
            epoch_ends.take_up_data(self._folder, position, rank, iterator)
        if self._within is not None:
            self._within.iterator = iterator

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Copy what is to be backed up within an epoch, and begin to write it."""
        if self._within is not None and of_callback(self).inner.saves_state:
            self._within.after_step(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write a backup, then remove those before it."""
        strategy = of_callback(self)
        if not strategy.inner.saves_state:
            kept.save(self.backup_dir, strategy, self.model, epoch + 1)
            return
        shown = strategy.is_chief and self.params.get("verbose")
        with _telling(epoch + 1) if shown else contextlib.nullcontext():
            if self._within is not None:
                self._within.end_epoch()
            EpochEnds(self._folder, strategy, self).write(epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        """Note that this `fit` has ended; its backups stay until the process does."""
        strategy = of_callback(self)
        owner = owners.of(self.backup_dir, strategy.rank)
        owner.complete = True
        if not strategy.inner.saves_state:
            return
        _host.keras.set_initial_epoch(self.model, None)
        if self.delete_checkpoint:
            owner.done.add(self._number)
        strategy.transport.barrier()


def _checked(backup_dir: Any) -> pathlib.Path:
    """Return the folder of backups.

    Raises:
        ValueError: it is empty or remote.
    """
    if not backup_dir:
        raise ValueError(
            "`backup_dir` must be the path of a folder. Received: "
            f"backup_dir={backup_dir!r}"
        )
    return state_files.local_folder("backup_dir", backup_dir)


def _workers_of(strategy: BaseStrategy) -> int:
    """Return how many workers must end well, before backups may go."""
    if isinstance(strategy, DownpourStrategy):
        return strategy.workers
    return 1 if strategy.transport.alone else strategy.transport.size


def _telling(epochs: int) -> contextlib.AbstractContextManager[None]:
    return waiting.telling(f"tf_dgc: writing the backup of epoch {epochs}")


def _tell(
    backup: BackupState, folder: pathlib.Path, position: backups.Position
) -> None:
    """Say on the chief where training goes on, or that it does not."""
    first = _host.keras.initial_epoch(backup.model) or 0
    if not position.step and first >= backup.params["epochs"]:
        _logger.warning(
            "This `fit` had ended in an earlier run of the job and is passed over: "
            "weights and `History` are those of the backup in %s. To train anew, "
            "remove %s on all workers, or give another `backup_dir`",
            folder,
            backup.backup_dir,
        )
    elif backup.params.get("verbose"):
        _host.keras.say(f"tf_dgc: training goes on {_after(position)}")


def _after(position: backups.Position) -> str:
    """Say where a backup was made, counted from 1 as Keras prints epochs."""
    if position.step:
        return f"in epoch {position.epoch + 1}, after {position.step} of its steps"
    return f"after epoch {position.epoch}"


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
        self.on_chief = callback

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.on_chief.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if of_callback(self).is_chief:
            self.on_chief.set_model(model)


def _on_chief(name: str) -> Any:
    def hook(self: _ChiefOnly, *args: Any, **kwargs: Any) -> None:
        if of_callback(self).is_chief:
            with on_one_worker():
                getattr(self.on_chief, name)(*args, **kwargs)

    return hook


for _name in dir(keras.callbacks.Callback):
    if _name.startswith("on_"):
        setattr(_ChiefOnly, _name, _on_chief(_name))
