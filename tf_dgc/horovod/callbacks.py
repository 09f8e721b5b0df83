"""Keras callbacks for workers without a strategy.

Those with names that end in Callback take the first arguments of Horovod's own, and
some of the others by name.
"""

import logging
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.horovod.core import transport
from tf_dgc.horovod.optimizer import agree_on_overflow
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport

_logger = logging.getLogger("tf_dgc")


class BroadcastVariables(keras.callbacks.Callback):
    """Begins training with the variables of one worker on all.

    Of model and optimizer, when training begins, or after the first batch where the
    model is not built before; random generators stay each worker's own. It also lets
    loss scaling agree, and switches XLA off, which cannot compile an exchange.
    """

    def __init__(self, root_rank: int = 0, *, over: Transport | None = None) -> None:
        """Choose the worker.

        Args:
            root_rank: its rank.
            over: a transport other than Horovod's.

        Raises:
            ValueError: there is no such worker.
        """
        super().__init__()
        self._transport = over or transport()
        if not 0 <= root_rank < self._transport.size:
            raise ValueError(
                f"`root_rank` must be in [0, {self._transport.size}). Received: "
                f"root_rank={root_rank}"
            )
        self._root = root_rank
        self._waits = False  # for the first batch

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, where there is something."""
        self.model.jit_compile = False
        agree_on_overflow(self.model.optimizer)
        self._waits = not self.model.built
        if not self._waits:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast what the first batch has built."""
        if self._waits:
            self._waits = False
            self._broadcast()

    def _broadcast(self) -> None:
        variables = [*self.model.weights, *self.model.optimizer.variables]
        values = [tf.convert_to_tensor(variable) for variable in variables]
        forms = {f"variable {i}": f"{v.dtype} {v.shape}" for i, v in enumerate(values)}
        handshake.agree(self._transport, "variables to broadcast", forms)
        shared = _from_root(self._transport, values, self._root)
        for variable, value in zip(variables, shared, strict=True):
            variable.assign(value)


class MetricAverage(keras.callbacks.Callback):
    """Averages the logs of each epoch over the workers.

    List it before callbacks that read logs.
    """

    def __init__(self, *, over: Transport | None = None) -> None:
        """Begin.

        Args:
            over: a transport other than Horovod's.
        """
        super().__init__()
        self._transport = over or transport()

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
    """Raises the learning rate, batch by batch, to what the optimizer begins with.

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
        self._steps, self._initial, self._taken = steps, initial, 0
        self._goal: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch."""
        optimizer = self.model.optimizer
        if self._goal is None:
            self._goal = float(optimizer.learning_rate)
        if self._taken <= self._steps:
            risen = self._taken / self._steps
            share = self._initial + (1 - self._initial) * risen
            optimizer.learning_rate = self._goal * share
        self._taken += 1


BroadcastGlobalVariablesCallback = BroadcastVariables
MetricAverageCallback = MetricAverage


class LearningRateWarmupCallback(LearningRateWarmup):
    """Raises the learning rate from that of one worker to that of all."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        *,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        over: Transport | None = None,
    ) -> None:
        """Choose rate and length.

        Args:
            initial_lr: what is reached, usually N times the rate of one worker.
            warmup_epochs: until then.
            steps_per_epoch: by default what `fit` knows of the data.
            verbose: 1 logs when it is reached.
            over: a transport other than Horovod's.
        """
        super().__init__(1, 1 / (over or transport()).size)
        self._goal, self._epochs, self._verbose = initial_lr, warmup_epochs, verbose
        self._of_epoch = steps_per_epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Learn how many batches an epoch has.

        Raises:
            ValueError: nobody knows.
        """
        batches = self._of_epoch or self.params.get("steps")
        if not batches:
            raise ValueError(
                "`steps_per_epoch` must be given, as the length of the data is not "
                "known. Received: steps_per_epoch=None"
            )
        self._steps = max(1, round(self._epochs * batches))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch."""
        super().on_train_batch_begin(batch, logs)
        if self._verbose and self._taken == self._steps + 1:
            _logger.info("The learning rate has reached %g", self._goal)


def _from_root(found: Transport, values: list[Any], root: int) -> list[Any]:
    """Broadcast tensors from any worker, which `Transport.broadcast` does from 0."""
    if root == 0:
        return found.broadcast(values, "variables")
    gathered = [
        found.all_gather_ragged(v[tf.newaxis], f"v{i}") for i, v in enumerate(values)
    ]
    return [parts[root] for parts in gathered]
