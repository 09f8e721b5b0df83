"""The tf.distribute strategies: one replica in each process.

How an optimizer's gradients come to the synchronizer is told in `seam.py`.
"""

import atexit
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, data, optimizers
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.extended import OneReplicaExtended
from tf_dgc.seam import ReplicaContext
from tf_dgc.state import StepStats, TensorStats
from tf_dgc.synchronizers import DeepGradientCompression, Dense, Exchanged, Synchronizer
from tf_dgc.transports import Transport, handshake, resolve
from tf_dgc.version import __version__

_logger = logging.getLogger("tf_dgc")


class BaseStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """What the strategies share.

    Nominally a MultiWorkerMirroredStrategy, for `isinstance` checks in other libraries;
    none of its code runs.
    """

    def __init__(
        self,
        transport: str | Transport,
        config: DGCConfig | AveragingConfig | None,
        synchronizer: Callable[[Transport], Synchronizer],
    ) -> None:
        self._transport = resolve(transport)
        self._config = config
        self._synchronizer = synchronizer(self._transport)
        self._warned: set[str] = set()
        record = {
            "strategy": type(self).__name__,
            "tf_dgc": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "transport": self._transport.name,
            **(config.get_config() if config else {}),
        }
        handshake.agree(self._transport, "versions and settings", record)
        tf.distribute.Strategy.__init__(
            self, OneReplicaExtended(self, self._transport, ReplicaContext)
        )
        if self._transport.size > 1:
            self.extended.share_seed()
            atexit.register(self.extended.warn_if_unused)

    @property
    def rank(self) -> int:
        """Number of this worker, in [0, num_replicas_in_sync)."""
        return self._transport.rank

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, the worker that saves and reports."""
        return self.rank == 0

    @property
    def transport(self) -> Transport:
        """What carries tensors between the workers."""
        return self._transport

    @property
    def config(self) -> DGCConfig | AveragingConfig | None:
        """The settings; None where the strategy has none."""
        return self._config

    @property
    def waits_for_others(self) -> bool:
        """Whether a worker whose data end early takes part in what others still do."""
        return False

    @property
    def cluster_resolver(self) -> None:
        """None: the transport knows the workers."""
        return None

    def stats(self, total: bool = False) -> StepStats:
        """Return what this worker sent in the last step, or in all steps so far.

        Args:
            total: sum over all steps; `residual_norm` is the present one either way.

        Returns:
            Scalar tensors; see `StepStats` for their units.
        """
        return self._synchronizer.stats(total)

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return what this worker sent of each compressed tensor, eagerly.

        Args:
            reset: start the figures anew after this.
        """
        return self._synchronizer.tensor_stats(reset)

    def save_state(
        self, path: str | os.PathLike[str], model: keras.Model | None = None
    ) -> None:
        """Write what all workers keep back to a folder; all workers call this.

        The weights are not in it: the model saves those. Each worker writes a file of
        its own; the folder may be on a disk that they share, or on one of each.

        Args:
            path: of the folder; what was saved there is replaced.
            model: only what is of its optimizers; by default all there is.

        Raises:
            OSError, ValueError: a worker could not write; on all workers.
        """
        self._synchronizer.save(path, model and _host.optimizers_of(model))

    def restore_state(
        self, path: str | os.PathLike[str], model: keras.Model | None = None
    ) -> None:
        """Take over what `save_state` wrote; all workers call this.

        On the same number of workers training goes on bit for bit. On another number
        each worker, which must see all files, gets an equal share of the sum of what
        was kept back. Before the first step it is taken over in the first step.

        Args:
            path: of the folder.
            model: as it was given to `save_state`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged or not of this training; names file and
                field. Raised in the first step, where that sees the variables first.
        """
        self._synchronizer.restore(path, model and _host.optimizers_of(model))

    def flush(self, model: keras.Model) -> None:
        """Apply all that the workers still keep back; all workers call this.

        A last step without a new gradient, sent densely, of all optimizers that have
        trained the model. Averages of weights (`use_ema`) do not see it.

        Args:
            model: one that was trained in this strategy's scope.

        Raises:
            ValueError: a state was restored, and not trained with since.
        """
        own = [variable.value for variable in model.trainable_variables]
        with self.scope():
            for optimizer, exchanged, variables in self._synchronizer.flush(own):
                rate = tf.convert_to_tensor(optimizer.learning_rate)
                update = functools.partial(_host.update_variables, optimizer, self)
                self._apply(optimizer, exchanged, variables, rate, update)
        constrain(model.trainable_variables)

    def settle(self) -> None:
        """Make variables the same on all workers, where these may differ by now.

        Called where all workers meet outside of steps: where the data of `fit`,
        `evaluate` or `predict` are shared out, and where metrics are read, as at the
        end of an epoch.
        """
        return

    def run(
        self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Run `fn` on this worker's replica; Keras calls this for every step.

        Raises:
            ValueError: `fn` is a step of a model that cannot be trained like this.
        """
        model = getattr(fn, "__self__", None)
        if isinstance(model, keras.Model):
            optimizers.check_model(model, self)
        alone = self._transport.size == 1
        if alone or getattr(fn, "__name__", "") != "one_step_on_data":
            return super().run(fn, args, kwargs, options)
        # Model.predict: each worker has the rows of its own share, maybe none.
        args, count = data.at_least_one_row(args)
        outputs = super().run(fn, args, kwargs, options)
        return tf.nest.map_structure(
            lambda rows: self._transport.all_gather_ragged(rows[:count], "predict"),
            outputs,
        )

    def exchange_and_update(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Exchange (gradient, variable) pairs and update the variables.

        The variables whose momentum the exchange has taken over are updated with the
        optimizer's own momentum suspended.
        """
        workers = self.num_replicas_in_sync
        for warning in optimizers.warnings_about(optimizer, workers, self._config):
            if warning not in self._warned:
                self._warned.add(warning)
                _logger.warning(warning)
        if not self._transport.alone:
            self.extended.first_targets.compare(self._transport)
        used = [(g, v) for g, v in pairs if g is not None]
        variables = [v for _, v in used]
        for variable in variables:  # some are changed in the exchange itself
            self.extended.refuse_foreign(variable)
        exchanged = self._synchronizer.exchange(
            optimizer,
            [g for g, _ in used],
            variables,
            optimizers.momentum_of(optimizer, learning_rate),
            subtract=True,
        )
        apply = functools.partial(
            self._apply, optimizer, exchanged, variables, learning_rate, update
        )
        if exchanged.apply is None:
            apply()
        else:
            tf.cond(exchanged.apply, apply, lambda: None)

    def _apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        exchanged: Exchanged,
        variables: Sequence[Any],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        self.extended.exchanged = True
        try:
            optimizers.update(optimizer, exchanged, variables, learning_rate, update)
        finally:
            self.extended.exchanged = False


def constrain(variables: Sequence[Any]) -> None:
    """Apply their constraints to Keras variables, as optimizers do after a step."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


class DenseStrategy(BaseStrategy):
    """Plain synchronous data parallelism over several machines, for Keras 3.

    Example:
        strategy = tf_dgc.DenseStrategy()
        with strategy.scope():
            model = ...
            model.compile("adam", "mse")
        model.fit(dataset_of_global_batches)
    """

    def __init__(self, *, transport: str | Transport = "auto") -> None:
        """Find the other workers; call this before any other TensorFlow operation.

        Args:
            transport: see `tf_dgc.transports.resolve`.

        Raises:
            ValueError: `transport` is unknown, or the workers differ in version or
                strategy; names the field and the ranks.
            TimeoutError: a worker did not come; names it.
            RuntimeError, ImportError: see `transports.resolve`.
        """
        super().__init__(transport, None, Dense)


class DGCStrategy(BaseStrategy):
    """Deep Gradient Compression: each worker sends its largest gradient elements.

    Example:
        strategy = tf_dgc.DGCStrategy(tf_dgc.DGCConfig(sparsity=0.999))
        with strategy.scope():
            model = ...
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(dataset_of_global_batches)

    References:
        Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018,
        https://arxiv.org/abs/1712.01887
    """

    def __init__(
        self, config: DGCConfig | None = None, *, transport: str | Transport = "auto"
    ) -> None:
        """Find the other workers; call this before any other TensorFlow operation.

        Args:
            config: the settings, the same on every worker; by default `DGCConfig()`.
            transport: see `tf_dgc.transports.resolve`.

        Raises:
            TypeError: `config` is not a DGCConfig.
            ValueError: `transport` is unknown, or the workers differ in version,
                strategy or settings; names the field and the ranks.
            TimeoutError: a worker did not come; names it.
            RuntimeError, ImportError: see `transports.resolve`.
        """
        config = DGCConfig() if config is None else config
        if not isinstance(config, DGCConfig):
            raise TypeError(
                f"`config` must be a DGCConfig. Received: config={config!r}"
            )
        super().__init__(
            transport, config, lambda found: DeepGradientCompression(found, config)
        )
