"""The tf.distribute strategies: one replica in each process.

How an optimizer's gradients come here is told in `context.py`.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.config import AveragingConfig, DGCConfig, DownpourConfig
from tf_dgc.exchanges import EachStep, Ledger, Make
from tf_dgc.exchanges.figures import StepStats, TensorStats
from tf_dgc.search import tuners
from tf_dgc.strategies import (
    files,
    fits,
    patches,
    watched,
)
from tf_dgc.strategies.context import ReplicaContext
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.extended import OneReplicaExtended
from tf_dgc.strategies.inner import Inner
from tf_dgc.transports import Transport, handshake, resolve
from tf_dgc.transports.mesh import Mesh
from tf_dgc.transports.resolver import cluster_resolver
from tf_dgc.version import __version__


class BaseStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Base of the strategies: methods and properties that each of them has.

    Nominally a MultiWorkerMirroredStrategy, for `isinstance` checks in other libraries;
    none of its code runs.

    Attributes:
        inner: what this package needs of a strategy, and users do not.
    """

    _extended_class = OneReplicaExtended
    _inner_class: type[Inner] = Inner

    def __init__(
        self,
        mesh: Mesh,
        config: DGCConfig | AveragingConfig | DownpourConfig | None,
        make: Make,
    ) -> None:
        _host.tracebacks.install()
        self._ledger = Ledger(mesh.voices, make)
        self._core = Core(self, mesh, config, self._ledger, make)
        self.inner = self._inner_class(self._core)
        agree(type(self).__name__, self.transport, config)
        extended = self._extended_class(self, mesh, ReplicaContext)
        tf.distribute.Strategy.__init__(self, extended)
        fits.note(self)
        patches.install()
        files.set_worker(self.rank, self.transport.size)
        if self.transport.size > 1:
            tuners.install(self.transport)
            watched.of_several.add(self)
            self.inner.join()

    def scope(self) -> Any:
        """Return a context in which variables, models and optimizers are of this.

        It stays entered where TensorFlow's default graph is reset, as by
        `keras.utils.clear_session`.
        """
        return _host.scopes.Scope(super().scope)

    @property
    def rank(self) -> int:
        """Number of this worker, in [0, num_replicas_in_sync)."""
        return self.transport.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of workers, N; a loss divided by it counts as if it were not."""
        return self.inner.replicas()

    @property
    def is_chief(self) -> bool:
        """Tell whether this is rank 0, the worker that saves and reports."""
        return self.rank == 0

    @property
    def transport(self) -> Transport:
        """Transport of tensors between the workers."""
        return self._core.transport

    @property
    def mesh(self) -> Mesh:
        """Mesh of the workers: who takes part in what."""
        return self._core.mesh

    @property
    def config(self) -> DGCConfig | AveragingConfig | DownpourConfig | None:
        """The settings; None where the strategy has none."""
        return self._core.config

    @property
    def lockstep(self) -> bool:
        """Tell whether all workers meet in each step: none may have fewer batches.

        Elsewhere one whose data end early takes part in what the others still do.
        """
        return self._ledger.lockstep

    @functools.cached_property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Task of this worker, for scripts of MultiWorkerMirroredStrategy."""
        return cluster_resolver(self.transport)

    def stats(self, total: bool = False) -> StepStats:
        """Return what this worker sent in the last step, or in all steps so far.

        Args:
            total: sum over all steps; `residual_norm` is the present one either way.

        Returns:
            Scalar tensors; see `StepStats` for their units.
        """
        return self._ledger.stats(total)

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return what this worker sent of each compressed tensor, eagerly.

        Args:
            reset: start the figures anew after this.
        """
        return self._ledger.tensor_stats(reset)

    def save_state(
        self, path: str | os.PathLike[str], model: keras.Model | None = None
    ) -> None:
        """Write what all workers keep back to a folder; all workers call this.

        The weights are not in it: the model saves those; but what each worker has of
        split layers, and of their optimizer's slots, is. Each worker writes a file of
        its own; the folder may be on a disk that they share, or on one of each.

        Args:
            path: of the folder; what was saved there is replaced.
            model: only what is of its optimizers, or where it has none, of those that
                have trained it; by default all there is.

        Raises:
            OSError, ValueError: a worker could not write; on all workers.
        """
        self.inner.save_state(path, model)

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
        self.inner.restore_state(path, model)

    def flush(self, model: keras.Model) -> None:
        """Apply all that the workers still keep back; all workers call this.

        A last step without a new gradient, sent densely, of all optimizers that have
        trained the model, layers that were frozen since included. Averages of weights
        (`use_ema`) do not see it.

        Args:
            model: one that was trained in this strategy's scope.

        Raises:
            ValueError: a state was restored, and not trained with since.
        """
        self.inner.flush(model)

    def barrier(self) -> None:
        """Wait until all workers have come here; all workers call this.

        Outside of steps: so that a file, say, is read when the chief has written it.

        Raises:
            tf.errors.OpError: a worker has not come within the transport's timeout.
        """
        self.inner.barrier()

    def run(
        self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Run `fn` on this worker's replica; Keras calls this for every step.

        Raises:
            ValueError: `fn` is a step of a model that cannot be trained like this.
        """
        step = functools.partial(super().run, fn, kwargs=kwargs, options=options)
        return self.inner.run(fn, args, step)

    def exchange(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of all workers, before an optimizer applies them.

        For a `train_step` that looks at them, as by their norm. The optimizer applies
        what is made of them without exchanging it once more. All workers call this.

        Args:
            gradients: all that `tape.gradient` has returned for a list of variables:
                tensors of any shape, `tf.IndexedSlices`, or None.

        Returns:
            Gradients of the same shapes, as one process computes them. In steps that
            are a worker's own, as of ParameterAveragingStrategy, those that were given.

        Raises:
            RuntimeError: no step of a model runs.
            ValueError: they are not of this step, or the strategy compresses them.
        """
        return self.inner.exchanging.exchanged(gradients)


def agree(strategy: str, transport: Transport, config: Any) -> None:
    """Compare versions and settings over the workers.

    Args:
        strategy: name of the class.
        transport: among all workers.
        config: of the strategy, or None.

    Raises:
        ValueError: they differ; names the field and the ranks.
    """
    record = versions(strategy) | {"transport": transport.name}
    record |= config.get_config() if config else {}
    handshake.agree(transport, "versions and settings", record)


def versions(strategy: str) -> dict[str, Any]:
    """Return the kind of a strategy, and the versions, which all workers must have.

    Args:
        strategy: name of the class.
    """
    return {
        "strategy": strategy,
        "tf_dgc": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


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
        super().__init__(Mesh.over(resolve(transport)), None, EachStep(None))


def of_callback(callback: keras.callbacks.Callback) -> BaseStrategy:
    """Return the strategy of the model that a callback is of.

    Raises:
        ValueError: the model was not compiled in the scope of one of this package.
    """
    strategy = callback.model.distribute_strategy
    if not isinstance(strategy, BaseStrategy):
        raise ValueError(
            f"{type(callback).__name__} needs a model that was compiled in the scope "
            f"of a strategy of tf_dgc. Received: a model of {strategy!r}"
        )
    return strategy
