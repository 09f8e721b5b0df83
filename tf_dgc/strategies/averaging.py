"""The strategy of parameter averaging."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc.config import AveragingConfig
from tf_dgc.exchanges import Averaging
from tf_dgc.exchanges.figures import RoundStats
from tf_dgc.exchanges.inplace import unseen
from tf_dgc.strategies.averaging_inner import AveragingInner
from tf_dgc.strategies.base import BaseStrategy, agree
from tf_dgc.transports import Transport, resolve, sites
from tf_dgc.transports.mesh import Mesh


class ParameterAveragingStrategy(BaseStrategy):
    """Local steps with the user's own optimizer; parameters averaged in rounds.

    A round is held after `period` local steps, and wherever workers meet outside of
    steps: where metrics are read, as `fit` does at the end of an epoch, and before
    `fit`, `evaluate` and `predict`. So these, callbacks at the end of epochs, and what
    follows `fit`, see averaged parameters. (Not a `fit` whose model has no metrics, not
    even a loss; and not what follows `restore_state` until the next step.)

    In a loop of one's own `flush(model)` holds a round. There, all variables of
    floating point that were made in the scope as not trainable count as statistics.

    With `AveragingConfig(within=...)` the workers of a site take each step together,
    as those of `DenseStrategy` or `DGCStrategy` do, and sites average.

    Within a period the weights of each worker are a part of its state: `save_state`
    writes them then, with its optimizer's, and `restore_state` brings them back.

    Example:
        config = tf_dgc.AveragingConfig(period=16)
        strategy = tf_dgc.ParameterAveragingStrategy(config)
        with strategy.scope():
            model = ...
            model.compile("adam", "mse")
        model.fit(dataset_of_global_batches)

    References:
        See `tf_dgc.averaging`.
    """

    _inner_class = AveragingInner
    inner: AveragingInner

    def __init__(
        self,
        config: AveragingConfig | None = None,
        *,
        transport: str | Transport = "auto",
    ) -> None:
        """Find the other workers; call this before any other TensorFlow operation.

        Args:
            config: the settings, the same on every worker; by default
                `AveragingConfig()`.
            transport: see `tf_dgc.transports.resolve`.

        Raises:
            TypeError: `config` is not an AveragingConfig.
            ValueError: `transport` is unknown, or the workers differ in version,
                strategy or settings; names the field and the ranks.
            RuntimeError: TensorFlow has started, too early for its collectives.
            TimeoutError: a worker did not come; names it.
        """
        config = AveragingConfig() if config is None else config
        if not isinstance(config, AveragingConfig):
            raise TypeError(
                f"`config` must be an AveragingConfig. Received: config={config!r}"
            )
        try:
            found = resolve(transport)  # before any variable is made
            make = unseen(lambda: Averaging(config))
            super().__init__(self._mesh_of(found, config), config, make)
        except RuntimeError as error:
            if hasattr(config.outer_optimizer, "apply"):
                raise RuntimeError(
                    f"{error} The outer optimizer is such a call: give a function, "
                    "`outer_optimizer=lambda: keras.optimizers.SGD(...)`."
                ) from error
            raise

    def _mesh_of(self, transport: Transport, config: AveragingConfig) -> Mesh:
        """Return the mesh of the workers, or of their sites; all workers call this."""
        mesh = Mesh.over(transport)
        if config.within is None:
            return mesh
        # Before it is acted on, as it makes workers meet.
        agree(type(self).__name__, mesh.everybody, config)
        return Mesh.of(sites.among(mesh.everybody))

    def round_stats(self) -> RoundStats:
        """Return how many rounds there were, and what the last one found."""
        found: list[Any] = self._ledger.exchanges()
        if not found:
            zero = tf.zeros([], tf.int64)
            return RoundStats(zero, zero, zero, tf.zeros([]))
        return found[-1].progress.stats()

    def flush(self, model: keras.Model) -> None:
        """Hold a round, and apply what compression keeps back; all workers call this.

        Args:
            model: one that was trained in this strategy's scope.

        Raises:
            ValueError: a state was restored, and not trained with since.
        """
        super().flush(model)
