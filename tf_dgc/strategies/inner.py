"""Inside of a strategy: what this package needs of it, and users do not."""

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tf_dgc import _host, optimizers
from tf_dgc.exchanges import records
from tf_dgc.exchanges.records import Record
from tf_dgc.strategies import adopted, randomness, unused
from tf_dgc.strategies.agreement import Agreement
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.early_ends import EarlyEnds
from tf_dgc.strategies.exchanging import Exchanging
from tf_dgc.strategies.own_batches import OwnBatches
from tf_dgc.strategies.replicas import ReplicaCount
from tf_dgc.strategies.share import Share
from tf_dgc.strategies.states import States
from tf_dgc.strategies.stopping import Stopping


class Inner:
    """Inside of a strategy, which other rooms of the package ask.

    Attributes:
        core: of the strategy.
        states: in files.
        agreement: of workers on what they train.
        exchanging: of gradients.
        own_batches: batches of this worker's own, where there are several workers.
        early_ends: of `evaluate` and `predict`, where there are several workers.
    """

    def __init__(self, core: Core) -> None:
        """Begin without what several workers have."""
        self.core = core
        self.states = States(core)
        self.agreement = Agreement(core)
        self.exchanging = self._make_exchanging()
        self.own_batches: OwnBatches | None = None
        self.early_ends: EarlyEnds | None = None

    def _make_exchanging(self) -> Exchanging:
        return Exchanging(self.core)

    def join(self) -> None:
        """Make what several workers have."""
        core, transport = self.core, self.core.transport
        kinds = core.kinds_of_steps()
        core.share = Share(core.mesh, *kinds)
        warnings = core.share.warnings
        own_batches = OwnBatches(transport, warnings.met_in_outputs, warnings.say)
        self.own_batches = own_batches
        core.stopping = Stopping(core.mesh, core.ledger, lambda: self.settle())
        self.early_ends = EarlyEnds(core.mesh, self.own_batches)
        randomness.agree(transport)
        atexit.register(unused.warn, core.extended, core.mesh)

    @property
    def share(self) -> Share | None:
        """Share of a step, where there are several workers."""
        return self.core.share

    @property
    def stopping(self) -> Stopping | None:
        """End of training, where there are several workers."""
        return self.core.stopping

    @property
    def saves_state(self) -> bool:
        """Tell whether what this worker has is a part of backups."""
        return True

    @property
    def holds_alike(self) -> bool:
        """Tell whether weights should be the same on all workers between steps."""
        return True

    def own_state(self, model: keras.Model | None) -> list[Record]:
        """Return what `save_state` writes of this worker, eagerly; not collective.

        The arrays may be those of variables: copy them before the next step.
        """
        return self.states.records_of(model)

    def save_state(
        self, path: str | os.PathLike[str], model: keras.Model | None
    ) -> None:
        """Write a state to a folder; see `BaseStrategy.save_state`."""
        everybody = self.core.ledger.transport.everybody
        records.save(everybody, path, self.own_state(model))

    def restore_state(
        self, path: str | os.PathLike[str], model: keras.Model | None
    ) -> None:
        """Take over what `save_state` wrote; see `BaseStrategy.restore_state`."""
        self.states.restore(path, model)

    def flush(self, model: keras.Model) -> None:
        """Apply what workers keep back of a model; see `BaseStrategy.flush`."""
        self.states.flush(model)

    # Between steps.

    def expect_fit(self, model: keras.Model) -> None:
        """Let the workers' variables be compared before the next step of Keras."""
        self.agreement.expect_fit(model)

    def expect_steps(self, steps: int) -> None:
        """Note how many steps the `fit` that begins has, where that is known."""
        return

    def compare_variables(self) -> None:
        """Compare variables where it is time; all workers call this."""
        self.agreement.compare_variables(self.holds_alike)

    def settle(self) -> None:
        """Make variables the same on all workers, where these may differ by now.

        Called where all workers meet outside of steps: where the data of `fit`,
        `evaluate` or `predict` are shared out, and where metrics are read, as at the
        end of an epoch.
        """
        self.agreement.settle()

    def barrier(self) -> None:
        """Wait until all workers have come here."""
        self.settle()
        self.core.transport.barrier()

    # Steps.

    def replicas(self) -> int:
        """Return N for a script, which may divide by it in the step that runs."""
        workers = self.core.mesh.replicas
        if self.share is not None:
            self.share.step.note_asked()
        return ReplicaCount(workers) if workers > 1 else workers

    def run(self, fn: Any, args: Any, step: Callable[[Any], Any]) -> Any:
        """Run a function of a script, or of Keras, as a step.

        Args:
            fn: the function.
            args: of it.
            step: takes such arguments, and calls the function in a replica.
        """
        optimizers.check_function(fn)
        model = _host.keras.model_of(fn)
        if model is not None:
            optimizers.check_model(model, self.core.strategy)
        if self.share is not None and model is not None:
            adopted.take_over(model, self.core.strategy)
            return self.share.run(model, fn, args, step)
        if getattr(fn, "__name__", "") == "one_step_on_data":  # of `predict`
            if self.own_batches is None:  # each worker has all rows
                return step(args)
            return self.own_batches.predict(args, step)
        return step(args) if self.share is None else self.share.run_own(args, step)

    def exchange_and_update(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Exchange (gradient, variable) pairs and update the variables."""
        self.exchanging.exchange_and_update(optimizer, pairs, learning_rate, update)
