"""Agreement of the workers on variables, between steps."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import compared, fits, randomness, statistics
from tf_dgc.strategies.core import Core


class Agreement:
    """Agreement of the workers on what they train, and on moving statistics.

    Attributes:
        to_compare: model whose variables are compared before the next step.
    """

    def __init__(self, core: Core) -> None:
        """Take the core of the strategy."""
        self._core = core
        # Not weakly: workers would learn at different times that it is gone.
        self.to_compare: keras.Model | None = None
        self._compared: weakref.WeakSet[Any] = weakref.WeakSet()  # models, once
        self._settled = 0  # steps whose statistics are those of all workers

    def expect_fit(self, model: keras.Model) -> None:
        """Let the workers' variables be compared before the next step of Keras."""
        self.to_compare = model

    def compare_variables(self, holds_alike: bool) -> None:
        """Compare the variables of the model that is to be trained, where it is time.

        What `random` and NumPy draw is made alike, too. Nothing is done where a state
        was restored since the last `fit`: each worker has its own then, such as moving
        statistics. All workers call this.

        Args:
            holds_alike: whether weights should be the same on all workers by now.
        """
        core = self._core
        model, self.to_compare = self.to_compare, None
        if model is None or not holds_alike or not tf.executing_eagerly():
            return
        restored, core.restored = core.restored, False
        if restored:
            return
        randomness.take_over(core.transport)
        quiet = model in self._compared
        self._compared.add(model)
        with core.strategy.scope():
            paths, ranks = compared.take_over(model, core.transport, quiet)
        if paths and core.transport.rank == 0:
            core.warn([compared.warning(paths, ranks)])

    def compare_trained(self, model: keras.Model) -> None:
        """Compare what was trained of a model, at the end of a `fit`.

        As in steps: that may have been none since the weights of one worker were set.
        All workers call this.
        """
        core = self._core
        with core.strategy.scope():
            core.ledger.compare(_host.keras.optimizers_of(model))

    def settle(self) -> None:
        """Make moving statistics the same on all workers, which may differ by now."""
        core, run = self._core, fits.current()
        if run is None or core.stopping is None or not core.ledger.lockstep:
            return
        training = core.stopping.training_of(run.model)
        begins = run.what == "fit" and not (training and training.batches)
        of_another = run.model.distribute_strategy is not core.strategy
        if begins or core.share is None or of_another:
            return
        steps = core.share.small_steps.count
        statistics.settle(run.model, core.transport, steps - self._settled)
        self._settled = steps
