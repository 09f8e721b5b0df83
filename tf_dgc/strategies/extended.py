"""Implementation of tf.distribute for a strategy of one replica in each process.

Variables are plain tf.Variables, so models save and load as on one machine; only what
Keras metrics accumulate is kept by worker and summed when it is read.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.strategies import outside
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.distribution import Distribution, SharedData
from tf_dgc.strategies.made_variables import MadeVariables
from tf_dgc.strategies.one_device import OneDevice
from tf_dgc.strategies.reductions import Reductions
from tf_dgc.transports.mesh import Mesh

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
        distribution: of data.
        reductions: that scripts and metrics ask for.
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
        self.distribution = Distribution(mesh)
        self.reductions = Reductions(mesh)

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
        outside.refuse_foreign(self._container_strategy(), colocate_with_variable)
        return super().colocate_vars_with(colocate_with_variable)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass  # done above

    @property
    def several(self) -> bool:
        """Tell whether an optimizer's step must be that of several workers."""
        return self._mesh.everybody.size > 1

    def _update(
        self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        outside.refuse_foreign(self._container_strategy(), var)
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

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        strategy = self._container_strategy()
        strategy.inner.settle()
        own_batches = strategy.inner.own_batches
        if own_batches is not None and own_batches.is_alone:
            shared = SharedData(dataset)
        else:
            shared = self.distribution.shared(dataset, strategy.lockstep)
        how = shared.meeting, shared.marks, shared.pieces
        return _host.distribute.distributed_dataset(
            strategy, shared.dataset, self._device, *how
        )

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        strategy = self._container_strategy()
        strategy.inner.settle()
        own = self.distribution.own(
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
            core = self._container_strategy().inner.core
            result = _finite_on_all(core, fn, args[0], result)
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
        return self.reductions.reduced(reduce_op, values, core.over)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> tf.Tensor:
        return self.reductions.gathered(value, axis)


def _finite_on_all(core: Core, check: Any, gradients: Any, own: Any) -> tf.Tensor:
    """Tell whether gradients are finite on all workers, which all call this.

    For LossScaleOptimizer: an overflow on one worker is one for all.

    Args:
        core: of the strategy.
        check: method of the optimizer that asks.
        gradients: of this worker.
        own: whether these are, shape [], bool.
    """
    if core.share is None:
        return core.over.holds_on_all(own, "finite")
    inner = _host.keras.inner_optimizers(getattr(check, "__self__", None))[-1]
    variables = _host.keras.variables_of(inner)
    own = core.share.weights.all_finite(own, gradients, variables)
    return core.share.rows.over.holds_on_all(own, "finite")
