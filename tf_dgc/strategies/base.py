"""The tf.distribute strategies: one replica in each process.

How an optimizer's gradients come here is told in `context.py`.
"""

import atexit
import contextlib
import functools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands, optimizers, step
from tf_dgc.config import AveragingConfig, DGCConfig, DownpourConfig
from tf_dgc.exchanges import (
    EachStep,
    Ledger,
    Make,
    Part,
    Update,
    records,
    split_files,
)
from tf_dgc.exchanges.figures import StepStats, TensorStats
from tf_dgc.exchanges.records import Record
from tf_dgc.search import tuners
from tf_dgc.strategies import (
    adopted,
    compared,
    files,
    fits,
    patches,
    randomness,
    statistics,
    watched,
)
from tf_dgc.strategies.context import ReplicaContext
from tf_dgc.strategies.early_ends import EarlyEnds
from tf_dgc.strategies.extended import OneReplicaExtended
from tf_dgc.strategies.own_batches import OwnBatches
from tf_dgc.strategies.replicas import Replicas
from tf_dgc.strategies.share import Share
from tf_dgc.strategies.stopping import Stopping
from tf_dgc.transports import Transport, handshake, resolve
from tf_dgc.transports.mesh import Mesh
from tf_dgc.transports.resolver import cluster_resolver
from tf_dgc.version import __version__

_logger = logging.getLogger("tf_dgc")


class BaseStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Base of the strategies: methods and properties that each of them has.

    Nominally a MultiWorkerMirroredStrategy, for `isinstance` checks in other libraries;
    none of its code runs.
    """

    _extended_class = OneReplicaExtended

    def __init__(
        self,
        mesh: Mesh,
        config: DGCConfig | AveragingConfig | DownpourConfig | None,
        make: Make,
    ) -> None:
        _host.tracebacks.install()
        self._mesh, self._transport = mesh, mesh.everybody
        self._config = config
        self._ledger = Ledger(mesh.voices, make)
        self._ledger.part_of = self._part_of_model
        self._warned: set[str] = set()
        # Not weakly: workers would learn at different times that it is gone.
        self._to_compare: keras.Model | None = None
        self._compared: weakref.WeakSet[Any] = weakref.WeakSet()  # models, once
        self._settled = 0  # steps whose statistics are those of all workers
        self._restored = False  # what each worker had of its own, since a `fit`
        self.share: Share | None = None  # of a step, where there are several workers
        self.own_batches: OwnBatches | None = None
        self.stopping: Stopping | None = None
        self.early_ends: EarlyEnds | None = None
        agree(type(self).__name__, self._transport, config)
        tf.distribute.Strategy.__init__(
            self, self._extended_class(self, self._transport, ReplicaContext)
        )
        fits.note(self)
        patches.install()
        files.set_worker(self.rank, self._transport.size)
        if self._transport.size > 1:
            tuners.install(self._transport)
            watched.of_several.add(self)
            self.share = Share(self._transport, *self._kinds_of_steps())
            self.own_batches = OwnBatches(self._transport)
            self.stopping = Stopping(self._transport, self._ledger, self.settle)
            self.early_ends = EarlyEnds(self._transport, self.own_batches)
            self.extended.share_seed()
            atexit.register(self.extended.warn_if_unused)

    def _kinds_of_steps(self) -> tuple[bool, bool, bool]:
        """Return what `Share` asks of steps."""
        clips_sum = not isinstance(self._config, DGCConfig)
        averages = isinstance(self._config, AveragingConfig)
        return clips_sum, not self.lockstep, averages

    def _decide(self, config: DGCConfig | AveragingConfig | None, make: Make) -> None:
        """Take other settings and exchanges, before the first step."""
        self._config = config
        self._ledger.decide(make)
        if self.share is not None:
            self.share.decide(*self._kinds_of_steps())

    def scope(self) -> Any:
        """Return a context in which variables, models and optimizers are of this.

        It stays entered where TensorFlow's default graph is reset, as by
        `keras.utils.clear_session`.
        """
        return _host.scopes.Scope(super().scope)

    @property
    def rank(self) -> int:
        """Number of this worker, in [0, num_replicas_in_sync)."""
        return self._transport.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of workers, N; a loss divided by it counts as if it were not."""
        workers = self._mesh.replicas
        if self.share is not None:
            self.share.note_asked()
        return Replicas(workers) if workers > 1 else workers

    @property
    def is_chief(self) -> bool:
        """Tell whether this is rank 0, the worker that saves and reports."""
        return self.rank == 0

    @property
    def saves_state(self) -> bool:
        """Tell whether what this worker has is a part of backups."""
        return True

    @property
    def transport(self) -> Transport:
        """Transport of tensors between the workers."""
        return self._transport

    @property
    def mesh(self) -> Mesh:
        """Mesh of the workers: who takes part in what."""
        return self._mesh

    @property
    def config(self) -> DGCConfig | AveragingConfig | DownpourConfig | None:
        """The settings; None where the strategy has none."""
        return self._config

    @property
    def lockstep(self) -> bool:
        """Tell whether all workers meet in each step: none may have fewer batches.

        Elsewhere one whose data end early takes part in what the others still do.
        """
        return self._ledger.lockstep

    @functools.cached_property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Task of this worker, for scripts of MultiWorkerMirroredStrategy."""
        return cluster_resolver(self._transport)

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
        everybody = self._ledger.transport.everybody
        records.save(everybody, path, self.own_state(model))

    def own_state(self, model: keras.Model) -> list[Record]:
        """Return what `save_state` writes of this worker, eagerly; not collective.

        The arrays may be those of variables: copy them before the next step.
        """
        own = self._ledger.records(*_trained_in(model))
        return own + split_files.record_of(self._parts_of(model))

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
        if model is not None:
            self._build_for_parts(model)
        parts = self._parts_of(model)
        everybody = self._ledger.transport.everybody
        arrays = split_files.load(everybody, path, parts)
        self._ledger.restore(path, *_trained_in(model))
        self._restored = True
        with self.scope():
            for variable, array in zip(parts, arrays, strict=True):
                variable.assign(tf.cast(array, variable.dtype))

    def _parts_of(self, model: keras.Model | None) -> list[Any]:
        """Return what this worker has parts of: all, or that of a model."""
        found = self.extended.parts()
        if model is None:
            return found
        owners = (model, *_host.keras.optimizers_of(model))
        own = {id(v.value) for each in owners for v in each.variables}
        return [variable for variable in found if id(variable) in own]

    def _build_for_parts(self, model: keras.Model) -> None:
        """Make the slots of a model's parts, which a state has."""
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and self._parts_of(model):
            with self.scope():
                optimizer.build(model.trainable_variables)

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
        own = [variable.value for variable in model.weights]  # frozen ones, too

        def apply(optimizer: Any, found: Update, variables: Sequence[Any]) -> None:
            rate = tf.convert_to_tensor(optimizer.learning_rate)
            update = functools.partial(_host.keras.update_variables, optimizer, self)
            with self._exchanged():
                step.apply(optimizer, found, variables, rate, update, self._clips_sum)
            constrain(_host.keras.variables_of(optimizer))

        with self.scope():
            self._ledger.flush(own, apply)

    def take_in(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Prepare an optimizer that is being made in the scope."""
        if isinstance(self._config, DGCConfig) and self._config.nonfinite == "skip":
            optimizers.leave_out_whole_steps(optimizer, self._transport)

    def tell_what_is_lost(self, optimizer: Any) -> None:
        """Warn where an optimizer that is given up still keeps something back."""
        parts = {id(each) for each in _host.keras.inner_optimizers(optimizer)}
        found = [e for e in self._ledger.exchanges() if id(e.owner()) in parts]
        kept = [tf.reduce_any(part != 0) for each in found for part in each.kept()]
        if any(map(bool, kept)):
            name = optimizer.name
            self._warn(
                [
                    f"The model is compiled anew, and what was kept back of {name!r}, "
                    "its optimizer before, is lost. Call `strategy.flush(model)` "
                    "before `compile`, which applies it"
                ]
            )

    @property
    def holds_alike(self) -> bool:
        """Tell whether weights should be the same on all workers between steps."""
        return True

    def expect_fit(self, model: keras.Model) -> None:
        """Let the workers' variables be compared before the next step of Keras."""
        self._to_compare = model

    def expect_steps(self, steps: int) -> None:
        """Note how many steps the `fit` that begins has, where that is known."""
        return

    def compare_variables(self) -> None:
        """Compare the variables of the model that is to be trained, where it is time.

        What `random` and NumPy draw is made alike, too. Nothing is done where a state
        was restored since the last `fit`: each worker has its own then, such as moving
        statistics. All workers call this.
        """
        model, self._to_compare = self._to_compare, None
        if model is None or not self.holds_alike or not tf.executing_eagerly():
            return
        restored, self._restored = self._restored, False
        if restored:
            return
        randomness.take_over(self._transport)
        quiet = model in self._compared
        self._compared.add(model)
        with self.scope():
            paths, ranks = compared.take_over(model, self._transport, quiet)
        if paths and self.is_chief:
            self._warn([compared.warning(paths, ranks)])

    def compare_trained(self, model: keras.Model) -> None:
        """Compare what was trained of a model, at the end of a `fit`.

        As in steps: that may have been none since the weights of one worker were set.
        All workers call this.
        """
        with self.scope():
            self._ledger.compare(_host.keras.optimizers_of(model))

    def settle(self) -> None:
        """Make variables the same on all workers, where these may differ by now.

        Called where all workers meet outside of steps: where the data of `fit`,
        `evaluate` or `predict` are shared out, and where metrics are read, as at the
        end of an epoch.
        """
        run = fits.current()
        if run is None or self.stopping is None or not self.lockstep:
            return
        training = self.stopping.training_of(run.model)
        begins = run.what == "fit" and not (training and training.batches)
        if begins or self.share is None or run.model.distribute_strategy is not self:
            return
        steps = self.share.steps_with_rows
        statistics.settle(run.model, self._transport, steps - self._settled)
        self._settled = steps

    def barrier(self) -> None:
        """Wait until all workers have come here; all workers call this.

        Outside of steps: so that a file, say, is read when the chief has written it.

        Raises:
            tf.errors.OpError: a worker has not come within the transport's timeout.
        """
        self.settle()
        self._transport.barrier()

    def run(
        self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Run `fn` on this worker's replica; Keras calls this for every step.

        Raises:
            ValueError: `fn` is a step of a model that cannot be trained like this.
        """
        optimizers.check_function(fn)
        model = _host.keras.model_of(fn)
        if model is not None:
            optimizers.check_model(model, self)
        if self.share is not None and model is not None:
            adopted.take_over(model, self)
            step = functools.partial(super().run, fn, kwargs=kwargs, options=options)
            return self.share.run(model, fn, args, step)
        predicts = getattr(fn, "__name__", "") == "one_step_on_data"
        if self.own_batches is None or not predicts:
            return super().run(fn, args, kwargs, options)
        step = functools.partial(super().run, fn, kwargs=kwargs, options=options)
        return self.own_batches.predict(args, step)

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
        if self.share is None:
            return list(gradients)
        if self.share.model is None:
            raise RuntimeError(
                "`strategy.exchange` must be called in a step of a model, as its "
                "`train_step`, which `fit` runs"
            )
        if isinstance(self._config, DGCConfig):
            raise ValueError(
                "`strategy.exchange` must not be called with DGCConfig: workers send a "
                "part of each gradient. DGCConfig(clip_norm=...) clips them"
            )
        return self.share.early.exchanged(gradients)

    def _part_of_model(self, owner: object, variables: Sequence[Any]) -> float:
        """Return what part variables are, in bytes, of what a model's step trains."""
        model = None if self.share is None else self.share.model
        if model is None:
            limit = getattr(self._config, "bytes_per_step", None)
            others = [e for e in self._ledger.exchanges() if e.owner() is not owner]
            if limit is not None and others:
                self._warn(
                    [
                        "In a loop of your own each optimizer keeps to "
                        f"bytes_per_step={limit} by itself, and all send as many"
                    ]
                )
            return 1.0
        trained = list(model.trainable_variables)
        for optimizer in _host.keras.optimizers_of(model):
            built = _host.keras.variables_of(optimizer) if optimizer.built else []
            trained += [v for v in built if v.trainable]
        whole = {id(_host.keras.plain(v)): v for v in trained}
        whole |= {id(v): v for v in variables}
        own, of_all = (
            sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in each)
            for each in (variables, whole.values())
        )
        return own / of_all

    def _warn(self, warnings: Sequence[str]) -> None:
        """Give each warning once."""
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _logger.warning(warning)

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
        if self.share is not None:
            self.share.decisions.refuse_undecided()
        workers = self._mesh.replicas
        self._warn(optimizers.warnings_about(optimizer, workers, self._config))
        for g, variable in pairs:  # some are changed in the exchange itself
            if g is not None:
                self.extended.refuse_foreign(variable)
        variables = [v for _, v in pairs]
        if self.share is not None and self.share.step.is_done(variables):
            done = [(g, v) for g, v in pairs if g is not None]
            found = Update([g for g, _ in done], [False] * len(done))
            variables = [v for _, v in done]
            with self._exchanged():
                step.apply(
                    optimizer, found, variables, learning_rate, update, self._clips_sum
                )
            return
        part = self._part(optimizer, pairs, learning_rate)
        whole = 1 if part is None else part.whole
        pairs, own = self._without_parts(optimizer, pairs, whole)
        variables = [v for g, v in pairs if g is not None]
        optimizers.refuse_whole_tensors(optimizer, variables, self._config)
        args = optimizer, pairs, learning_rate, update
        with self._exchanged():
            step.synchronised(
                self._ledger, *args, part=part, clips=self._clips_sum, own=own
            )

    def _part(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
    ) -> Part | None:
        """Return what gradients count, and the witness of the batch they are of."""
        part = None
        if self.share is not None:
            variables = [v for _, v in pairs]
            part = self.share.weights.part(optimizer, learning_rate, variables)
        if part is None:
            return None
        if self.stopping is not None:
            part = part._replace(ballot=self.stopping.ballot)
        witness = self.extended.witness
        given = [g for g, _ in pairs if g is not None]
        # Nothing else tells TensorFlow that a step which reads its batch itself reads
        # before it compares.
        with tf.control_dependencies(tf.nest.flatten(given, expand_composites=True)):
            with tf.device("CPU:0"):
                numbers = witness.numbers.read_value()
        return part._replace(witness=numbers, components=witness.names)

    def _without_parts(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        whole: int,
    ) -> tuple[list[tuple[Any, Any]], step.Own | None]:
        """Tell pairs of gradient and variable of all workers from those of this one.

        Args:
            optimizer: of the user.
            pairs: of both.
            whole: what the gradients of this one's are multiplied by; see `Part`.
        """
        # One worker has all of it, and leaves out of its state what several do.
        split = [(g, v) for g, v in pairs if g is not None and bands.of(v)]
        if not split:
            return list(pairs), None
        found = [tf.convert_to_tensor(g) for g, _ in split]
        gradients = [g * tf.cast(whole, g.dtype) for g in found]
        own = step.Own(self._transport, gradients, [v for _, v in split])
        if self._transport.size > 1:
            optimizers.refuse_parts(optimizer, own.variables, self._config)
        if isinstance(self._config, DGCConfig) and self._config.nonfinite == "raise":
            own.refuse_nonfinite()
        return [(g, v) for g, v in pairs if not bands.of(v)], own

    @property
    def _clips_sum(self) -> bool:
        """Tell whether optimizers clip what was exchanged."""
        return self.share is not None and self.share.clips_sum

    @contextlib.contextmanager
    def _exchanged(self) -> Iterator[None]:
        """Let variables be updated: by what was exchanged."""
        self.extended.exchanged = True
        try:
            yield
        finally:
            self.extended.exchanged = False


def agree(strategy: str, transport: Transport, config: Any) -> None:
    """Compare versions and settings over the workers.

    Args:
        strategy: name of the class.
        transport: among all workers.
        config: of the strategy, or None.

    Raises:
        ValueError: they differ; names the field and the ranks.
    """
    record = {
        "strategy": strategy,
        "tf_dgc": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "transport": transport.name,
        **(config.get_config() if config else {}),
    }
    handshake.agree(transport, "versions and settings", record)


def _trained_in(model: keras.Model | None) -> tuple[list[Any] | None, list[Any]]:
    """Return a model's optimizers, or if it has none, the variables that others train.

    None, for all optimizers, where there is no model.
    """
    if model is None:
        return None, []
    own = _host.keras.optimizers_of(model)
    return own, [] if own else [v.value for v in model.variables]


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
