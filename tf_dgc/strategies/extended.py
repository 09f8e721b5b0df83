"""Implementation of tf.distribute for a strategy of one replica in each process.

Variables are plain tf.Variables, so models save and load as on one machine; only what
Keras metrics accumulate is kept by worker and summed when it is read.
"""

import contextlib
import contextvars
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.strategies import (
    data,
    outside,
    randomness,
    witness,
)
from tf_dgc.strategies.distribution import Distribution, SharedData
from tf_dgc.strategies.made_variables import MadeVariables
from tf_dgc.strategies.one_device import OneDevice
from tf_dgc.strategies.reductions import Reductions
from tf_dgc.transports.mesh import Mesh

_logger = logging.getLogger("tf_dgc")

_alone = contextvars.ContextVar("tf_dgc_alone", default=False)


@contextlib.contextmanager
def on_one_worker() -> Iterator[None]:
    """Let variables be made on this worker only, such as those of a model's copy."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


class OneReplicaExtended(OneDevice):
    """Places one replica on this worker's device and reduces over a transport.

    Attributes:
        used: whether a variable was made in the strategy's scope.
        ran: whether a step was run by the strategy.
        exchanged: whether the gradients that are applied now are those of all workers.
        made: variables of the strategy.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        mesh: Mesh,
        replica_context: Callable[[Any], Any],
    ) -> None:
        super().__init__(strategy, mesh)
        self._replica_context = replica_context
        self.used = self.ran = False
        self.exchanged = False
        self.made = MadeVariables(mesh)
        self._distribution = Distribution(mesh)
        self._reductions = Reductions(mesh)

    @property
    def witness(self) -> witness.Witness:
        """Witness of the batch of all workers that was read last."""
        return self._distribution.witness

    # Variables.

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        self.used = True
        beside = bands.of(kwargs.pop("colocate_with", None))  # of a slot of a part
        synchronization = kwargs.get("synchronization")

        def create(**kwargs: Any) -> Any:
            with tf.device(self._device):
                return next_creator(**kwargs)

        if (optimizer := _host.keras.calling_optimizer()) is not None:
            self._container_strategy().inner.exchanging.take_in(optimizer)
        own = synchronization == tf.VariableSynchronization.NONE or beside is not None
        if synchronization == tf.VariableSynchronization.ON_READ:
            return _host.distribute.create_on_read_variable(
                self._container_strategy(), lambda **kw: [create(**kw)], **kwargs
            )
        if not own and self._mesh.everybody.size > 1 and not _alone.get():
            kwargs["initial_value"] = self.made.initial_value(kwargs)
        with bands.noticing() as drawn:
            variable = create(**kwargs)
        for band in [*drawn, *([beside] if beside else [])]:
            self.made.note_part(variable, band)
        kept = kwargs.get("trainable") is False and variable.dtype.is_floating
        if kept and not own and _host.keras.calling_optimizer() is None:
            self.made.note_statistic(variable)
        return variable

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Return a context in which an optimizer makes a slot for a variable."""
        self.refuse_foreign(colocate_with_variable)
        return super().colocate_vars_with(colocate_with_variable)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass  # done above

    @property
    def several(self) -> bool:
        """Tell whether an optimizer's step must be that of several workers."""
        return self._mesh.everybody.size > 1

    def refuse_foreign(self, variable: Any) -> None:
        """Raise ValueError where a variable is not of this strategy."""
        if _host.keras.strategy_of(variable) is not self._container_strategy():
            raise ValueError(
                f"The variable {variable.name!r} was made outside the scope of this "
                "strategy, and its optimizer inside. Build and compile the model "
                "inside `with strategy.scope():`."
            )

    def _update(
        self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        self.refuse_foreign(var)
        # Optimizers also update what they keep, decay weights without arguments, and
        # overwrite them with a variable, their average.
        gradient = args and isinstance(args[0], tf.Tensor | tf.IndexedSlices)
        applies = (
            var.trainable and gradient and _host.keras.calling_optimizer() is not None
        )
        if applies and not self.exchanged and self.several:
            raise outside.error(var.name)
        with tf.device(self._device), _host.distribute.update_context():
            result = fn(
                var,
                *_host.distribute.local_component(args),
                **_host.distribute.local_component(kwargs),
            )
        return result if group else tf.nest.map_structure(self._local_results, result)

    # Data.

    def share_seed(self) -> None:
        """Let all workers draw the order of their data alike."""
        seed = tf.constant(secrets.randbits(31), tf.int64)
        everybody = self._mesh.everybody
        (seed,) = everybody.broadcast([seed], "seed")
        randomness.share(int(seed))
        if not randomness.take_over(everybody) and everybody.rank == 0:
            _logger.warning(randomness.OTHER_HASHES)

    def own_rows(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return this worker's rows of batches; see `data.share_of`."""
        everybody = self._mesh.everybody
        return data.share_of(dataset, everybody.rank, everybody.size)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        strategy = self._container_strategy()
        strategy.inner.settle()
        own_batches = strategy.inner.own_batches
        if own_batches is not None and own_batches.is_alone:
            shared = SharedData(dataset)
        else:
            shared = self._distribution.shared(dataset, strategy.lockstep)
        return _host.distribute.distributed_dataset(
            strategy, shared.dataset, self._device, shared.meeting, shared.marks
        )

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        strategy = self._container_strategy()
        strategy.inner.settle()
        own = self._distribution.own(
            lambda: dataset_fn(self._input_context()), strategy.lockstep
        )
        return _host.distribute.distributed_dataset(
            strategy, own.dataset, self._device, own.meeting
        )

    # Running and reducing.

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        self.ran = True
        context = self._replica_context(self._container_strategy())
        with tf.device(self._device), context:
            result = fn(
                *_host.distribute.local_component(args),
                **_host.distribute.local_component(kwargs),
            )
        context.refuse_pending()
        if getattr(fn, "__name__", "") == "check_finite":
            # LossScaleOptimizer: an overflow on one worker is one for all.
            core = self._container_strategy().inner.core
            if core.share is not None:
                optimizer = getattr(fn, "__self__", None)
                inner = _host.keras.inner_optimizers(optimizer)[-1]
                variables = _host.keras.variables_of(inner)
                weights = core.share.weights
                result = weights.all_finite(result, args[0], variables)
            result = core.over.holds_on_all(result, "finite")
        return result

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        if _host.distribute.is_metric_variable(value) and tf.executing_eagerly():
            # As at the end of an epoch, before evaluation and callbacks: all are here.
            self._container_strategy().inner.settle()
        return self._batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        values = [value for value, _ in value_destination_pairs]
        core = self._container_strategy().inner.core
        return self._reductions.reduced(reduce_op, values, core.over)

    def of_first(self, value: Any) -> tf.Tensor:
        """Return what rank 0 has of a variable of a metric; all workers call this."""
        return self._reductions.of_first(value)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> tf.Tensor:
        return self._reductions.gathered(value, axis)
