"""Keras callbacks for workers without a strategy.

Those with names that end in Callback are Horovod's, with its arguments. The callbacks
of a model that trains alone although there are several workers say so when training
begins, and what XLA was to compile it compiles no longer.
"""

import logging
import math
import zlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc.horovod import operations
from tf_dgc.horovod.core import has_exchanged, transport
from tf_dgc.horovod.optimizer import (
    agree_on_overflow,
    compresses,
    is_distributed,
    own_slots,
)
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport

_logger = logging.getLogger("tf_dgc")


class _AmongWorkers(keras.callbacks.Callback):
    """Looks whether the model trains with the other workers."""

    def __init__(self, over: Transport | None) -> None:
        super().__init__()
        self._transport = over or transport()

    def set_model(self, model: keras.Model) -> None:
        """Switch off XLA, which cannot compile an exchange.

        `fit` makes the function that it would compile before training begins.
        """
        super().set_model(model)
        exchanges = any(map(is_distributed, _host.keras.optimizers_of(model)))
        if (exchanges or self._transport.size > 1) and model.jit_compile:
            _logger.info("XLA cannot compile an exchange: jit_compile is now False")
            model.jit_compile = False
            model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse to train alone.

        Raises:
            ValueError: there are other workers, and nothing distributes the optimizer.
        """
        optimizer = self.model.optimizer
        if self._transport.size == 1 or optimizer is None or _has_own_step(self.model):
            return
        if not is_distributed(optimizer):
            raise ValueError(
                f"The optimizer {optimizer.name!r} is not distributed, and each of the "
                f"{self._transport.size} workers would train alone. Compile the model "
                "with hvd.DistributedOptimizer(optimizer), and load one that was saved "
                "with hvd.load_model, as keras.models.load_model does not distribute "
                "its optimizer"
            )


def _has_own_step(model: keras.Model) -> bool:
    """Tell whether a model may exchange by itself, as with a tape."""
    own = "train_step" in vars(model)
    return own or type(model).train_step is not keras.Model.train_step


class BroadcastVariables(_AmongWorkers):
    """Begins training with the variables of one worker on all.

    Of model and optimizers, when training begins, or after the first batch where the
    model is not built before; random generators stay each worker's own. It also lets
    loss scaling agree.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        *,
        over: Transport | None = None,
    ) -> None:
        """Choose the worker.

        Args:
            root_rank: its rank.
            device: taken for Horovod's sake.
            local_variables: one, or some, that stay each worker's own.
            over: a transport other than Horovod's.

        Raises:
            ValueError: there is no such worker.
        """
        super().__init__(over)
        operations.check_root(self._transport, root_rank)
        self._root = root_rank
        single = isinstance(local_variables, tf.Variable | keras.Variable)
        self._local = [local_variables] if single else list(local_variables or ())
        self._waits = False  # for the first batch
        self._unsure = False  # whether an own step exchanges

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, where there is something."""
        super().on_train_begin(logs)
        for optimizer in _host.keras.optimizers_of(self.model):
            agree_on_overflow(optimizer)
        agree_on_overflow(self.model.optimizer)
        self._waits, self._unsure = not self.model.built, _has_own_step(self.model)
        if not self._waits:
            self._build_optimizer()
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast what the first batch has built; look whether workers part.

        Raises:
            ValueError: the model's own step trains on each worker alone.
        """
        if self._waits:
            self._waits = False
            self._broadcast()
        elif self._unsure:
            self._unsure = False
            self._refuse_parted()

    def _refuse_parted(self) -> None:
        """Raise ValueError where a step has made workers differ, and none exchanged."""
        found = [v for v in self.model.trainable_variables if not self._is_local(v)]
        crc = zlib.crc32(b"".join(v.numpy().tobytes() for v in found))
        own = {"crc": crc, "exchanges": has_exchanged(self._transport)}
        told = handshake.tell(self._transport, "first step", own)
        if any(each["exchanges"] for each in told):
            return
        if len({each["crc"] for each in told}) > 1:
            raise ValueError(
                f"The training step of {self.model.name!r} exchanges nothing, and each "
                f"of the {self._transport.size} workers trains alone: their weights "
                "differ after the first step. Use hvd.DistributedOptimizer, or "
                "hvd.DistributedGradientTape in the step"
            )

    def _build_optimizer(self) -> None:
        """Make what another worker may have loaded already."""
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        known = optimizer is not None and not _has_own_step(self.model)
        if known and variables and not optimizer.built:
            optimizer.build(variables)

    def _broadcast(self) -> None:
        found = [self.model.optimizer, *_host.keras.optimizers_of(self.model)]
        kept = [v for each in found if each is not None for v in each.variables]
        every = {id(v): v for v in [*self.model.weights, *kept]}
        slots = {id(slot) for each in found for slot in own_slots(each)}
        variables = [
            v
            for v in every.values()
            if not self._is_local(v) and id(v.value) not in slots
        ]
        operations.broadcast_variables(variables, self._root, over=self._transport)

    def _is_local(self, variable: keras.Variable) -> bool:
        """Tell whether a variable stays each worker's own."""
        own = {id(variable), id(variable.value)}
        return any(
            own & {id(v), id(v.value) if isinstance(v, keras.Variable) else id(v)}
            for v in self._local
        )


class MetricAverage(_AmongWorkers):
    """Averages the logs of each epoch over the workers.

    List it before callbacks that read logs.
    """

    def __init__(self, device: str = "", *, over: Transport | None = None) -> None:
        """Begin.

        Args:
            device: taken for Horovod's sake.
            over: a transport other than Horovod's.
        """
        super().__init__(over)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average."""
        if not logs:
            return
        names = sorted(logs)
        handshake.agree(self._transport, "metrics", {"names": names})
        own = tf.constant([float(logs[name]) for name in names], tf.float64)
        (total,) = self._transport.all_reduce([own], "metrics")
        means = total.numpy() / self._transport.size
        logs.update(zip(names, map(float, means), strict=True))


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate, batch by batch, to what the model is compiled with.

    It goes by the batches of training, those before a restart included: `fit` tells the
    epoch and how many batches it has, and where that is not known the optimizer tells
    its iterations.

    References:
        Goyal et al.: Accurate, Large Minibatch SGD, 2017,
        https://arxiv.org/abs/1706.02677
    """

    def __init__(self, steps: int, initial: float = 0.0) -> None:
        """Choose the length.

        Args:
            steps: number of batches over which it rises.
            initial: share of the learning rate that it begins with, in [0, 1].

        Raises:
            ValueError: an argument is out of its range.
        """
        super().__init__()
        if steps < 1 or not 0 <= initial <= 1:
            raise ValueError(
                "`steps` must be 1 or more and `initial` in [0, 1]. Received: "
                f"steps={steps}, initial={initial}"
            )
        self._steps, self._initial = steps, initial
        self._before, self._taken = 0, 0  # batches, before this epoch and in all
        self._first = True  # epoch of a `fit`
        self._goal: float | None = None

    def set_model(self, model: keras.Model) -> None:
        """Learn the goal, before a backup brings back what was risen to."""
        super().set_model(model)
        if self._goal is None and model.optimizer is not None:
            self._goal = float(model.optimizer.learning_rate)

    def on_train_begin(self, logs: Any = None) -> None:
        """Expect an epoch of any number."""
        self._first = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Learn how far training is."""
        if batches := self.params.get("steps"):
            self._taken = max(self._taken, epoch * batches)
        elif self._first and epoch:
            iterations = int(self.model.optimizer.iterations)
            self._taken = max(self._taken, iterations)
        self._before, self._first = self._taken, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch, and those that run with it."""
        at, together = self._before + batch, self.model.steps_per_execution
        if self._goal is None or at - together >= self._steps:
            return
        risen = min(1.0, at / self._steps)
        share = self._initial + (1 - self._initial) * risen
        self.model.optimizer.learning_rate = self._goal * share

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self._taken = self._before + batch + 1


BroadcastGlobalVariablesCallback = BroadcastVariables
MetricAverageCallback = MetricAverage


class LearningRateScheduleCallback(_AmongWorkers):
    """Multiplies the learning rate by what a function of the epoch says."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: float = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        *,
        over: Transport | None = None,
    ) -> None:
        """Choose rates and epochs.

        Args:
            initial_lr: what is multiplied.
            multiplier: function of the epoch; or a number, by whose power to the epochs
                since `start_epoch` it is multiplied.
            start_epoch: from which on.
            end_epoch: from which on the rate is left alone.
            staircase: set it when an epoch begins; else with each batch, by fractions
                of epochs.
            momentum_correction: let the velocities of SGD change with the rate that is
                in them, but where gradients are compressed.
            steps_per_epoch: by default what `fit` knows of the data.
            over: a transport other than Horovod's.
        """
        super().__init__(over)
        self._initial, self._staircase = initial_lr, staircase
        self._multiplier = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self._start = start_epoch
        self._end = math.inf if end_epoch is None else end_epoch
        self._corrects, self._of_epoch = momentum_correction, steps_per_epoch
        self._batches, self._epoch = 1, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Learn how many batches an epoch has.

        Raises:
            ValueError: nobody knows; or there are other workers, and nothing
                distributes the optimizer.
        """
        super().on_train_begin(logs)
        batches = self._of_epoch or self.params.get("steps")
        if not batches and not self._staircase:
            raise ValueError(
                "`steps_per_epoch` must be given, as the length of the data is not "
                "known. Received: steps_per_epoch=None"
            )
        self._batches = batches or 1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Learn the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate: of the last of the batches that run together."""
        if not self._start <= self._epoch < self._end:
            return
        if not self._staircase:
            last = min(batch + self.model.steps_per_execution, self._batches) - 1
            self._adjust(self._epoch + last / self._batches)
        elif batch == 0:
            self._adjust(self._epoch)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = float(optimizer.learning_rate)
        optimizer.learning_rate = self._initial * self._multiplier(epoch)
        new = float(optimizer.learning_rate)
        if self._corrects and old > 0 and new != old and not compresses(optimizer):
            for inner in _host.keras.inner_optimizers(optimizer):
                if optimizers.momentum_of(inner, new) is not None:
                    for velocity in getattr(inner, "momentums", ()):
                        velocity.assign(velocity * tf.cast(new / old, velocity.dtype))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate as `lr`."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one worker to that of all."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        *,
        over: Transport | None = None,
    ) -> None:
        """Choose rate and length.

        Args:
            initial_lr: what is reached, usually N times the rate of one worker.
            warmup_epochs: until then.
            momentum_correction: as in `LearningRateScheduleCallback`.
            steps_per_epoch: by default what `fit` knows of the data.
            verbose: 1 logs when it is reached.
            over: a transport other than Horovod's.
        """

        def multiplier(epoch: float) -> float:
            size = self._transport.size
            risen = (epoch + 1 / self._batches) / warmup_epochs
            return min(1.0, (1 + risen * (size - 1)) / size)

        end = warmup_epochs
        arguments = (0, end, False, momentum_correction, steps_per_epoch)
        super().__init__(initial_lr, multiplier, *arguments, over=over)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate, and say that it is reached."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch == math.ceil(self._end) - 1:
            _logger.info("The learning rate has reached %g", self._initial)


def BestModelCheckpoint(*args: Any, **options: Any) -> None:
    """Refuse what only Horovod's estimators for Spark can use.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "`BestModelCheckpoint` is told its file only by Horovod's estimators of Spark. "
        "Use keras.callbacks.ModelCheckpoint(path, save_best_only=True) on rank 0"
    )
