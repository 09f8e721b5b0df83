"""Implementation of tf.distribute for a strategy of one replica in each process.

Variables are plain tf.Variables, so models save and load as on one machine; only what
Keras metrics accumulate is kept by worker and summed when it is read.
"""

import contextlib
import contextvars
import functools
import gc
import logging
import secrets
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.strategies import (
    data,
    level,
    outside,
    provenance,
    randomness,
    slicing,
    split,
    witness,
)
from tf_dgc.transports import Transport, ending, handshake

_logger = logging.getLogger("tf_dgc")
_ReduceOp = tf.distribute.ReduceOp
# What tf.random.Generator calls its state.
_GENERATOR = "StateVar"


_alone = contextvars.ContextVar("tf_dgc_alone", default=False)


@contextlib.contextmanager
def on_one_worker() -> Iterator[None]:
    """Let variables be made on this worker only, such as those of a model's copy."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


class OneReplicaExtended(tf.compat.v1.distribute.StrategyExtended):
    """Places one replica on this worker's device and reduces over a transport.

    Attributes:
        used: whether a variable was made in the strategy's scope.
        ran: whether a step was run by the strategy.
        exchanged: whether the gradients that are applied now are those of all workers.
        witness: of the batch of all workers that was read last.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        transport: Transport,
        replica_context: Callable[[Any], Any],
    ) -> None:
        super().__init__(strategy)
        self._transport = transport
        self._replica_context = replica_context
        self._device = _host.distribute.resolve_device(transport.device)
        self._default_device = None
        self.experimental_enable_get_next_as_optional = False
        self.used = self.ran = False
        self.exchanged = False
        self.witness = witness.Witness()
        self._told_chance = self._told_work = False
        self._end = _host.iterators.Meeting(functools.partial(level.agreed, transport))
        self._statistics: list[weakref.ref[Any]] = []
        self._parts: list[weakref.ref[Any]] = []

    # Variables.

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        self.used = True
        beside = bands.of(kwargs.pop("colocate_with", None))  # of a slot of a part
        synchronization = kwargs.get("synchronization")

        def create(**kwargs: Any) -> Any:
            with tf.device(self._device):
                return next_creator(**kwargs)

        if (optimizer := _host.keras.calling_optimizer()) is not None:
            self._container_strategy().inner.take_in(optimizer)
        own = synchronization == tf.VariableSynchronization.NONE or beside is not None
        if synchronization == tf.VariableSynchronization.ON_READ:
            return _host.distribute.create_on_read_variable(
                self._container_strategy(), lambda **kw: [create(**kw)], **kwargs
            )
        if not own and self._transport.size > 1 and not _alone.get():
            kwargs["initial_value"] = self._shared_initial_value(kwargs)
        with bands.noticing() as drawn:
            variable = create(**kwargs)
        for each in [*drawn, *([beside] if beside else [])]:
            self._note_part(variable, each)
        kept = kwargs.get("trainable") is False and variable.dtype.is_floating
        if kept and not own and _host.keras.calling_optimizer() is None:
            self._statistics.append(weakref.ref(variable))
        return variable

    def _note_part(self, variable: Any, own: bands.Band) -> None:
        if variable.shape.rank == 2 and variable.shape[own.axis] == own.width:
            bands.mark(variable, own)
            self._parts.append(weakref.ref(variable))
            weak = weakref.ref(variable)
            refuse = functools.partial(bands.refuse_to_save, what="The checkpoint")
            _host.tensorflow.hook_checkpoints(variable, lambda: refuse([weak()]))

    def parts(self) -> list[Any]:
        """Return the variables that are parts, in the order in which they were made."""
        gc.collect()  # models that are gone, on all workers alike
        found = [reference() for reference in self._parts]
        return [variable for variable in found if variable is not None]

    def statistics(self) -> list[Any]:
        """Return the variables of layers that gradients do not train, floating point.

        In the order in which they were made, in this strategy's scope.
        """
        gc.collect()  # models that are gone, on all workers alike
        found = [reference() for reference in self._statistics]
        return [variable for variable in found if variable is not None]

    def _shared_initial_value(self, kwargs: dict[str, Any]) -> Callable[[], tf.Tensor]:
        value, name = kwargs["initial_value"], kwargs.get("name")
        transport = self._transport

        def initial_value() -> tf.Tensor:
            local = value() if callable(value) else value
            local = tf.convert_to_tensor(local, dtype=kwargs.get("dtype"))
            if local.dtype == tf.string:
                return local
            if tf.executing_eagerly():
                form = {"shape": local.shape.as_list(), "dtype": local.dtype.name}
                handshake.agree(transport, f"variable {name!r}", form)
            (shared,) = transport.broadcast([local], "variable")
            if name == _GENERATOR:
                return randomness.key_by(transport.rank, shared)
            return shared

        return initial_value

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Return a context in which an optimizer makes a slot for a variable."""
        self.refuse_foreign(colocate_with_variable)
        return super().colocate_vars_with(colocate_with_variable)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass  # done above

    @property
    def several(self) -> bool:
        """Tell whether an optimizer's step must be that of several workers."""
        return self._transport.size > 1

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

    def _update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        group: bool,
    ) -> Any:
        with tf.device(self._device), _host.distribute.update_context():
            result = fn(
                *_host.distribute.local_component(args),
                **_host.distribute.local_component(kwargs),
            )
        return result if group else tf.nest.map_structure(self._local_results, result)

    def read_var(self, v: Any) -> tf.Tensor:
        """Return a variable's value."""
        return tf.identity(v)

    def value_container(self, value: Any) -> Any:
        """Return the distributed value that `value` is a part of, or itself."""
        return _host.distribute.value_container(value)

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return _host.distribute.components_of(value) or (value,)

    def warn_if_unused(self) -> None:
        """Warn, at the end of the process, where the strategy had no part in it."""
        if not self.used:
            _logger.warning(
                "No variable was made in the scope of this strategy, so nothing was "
                "synchronised: build and compile the model inside `with "
                "strategy.scope():`"
            )
        elif not self.ran and self._transport.rank == 0 and ending.failure() is None:
            _logger.warning(
                "The strategy has run no step, so nothing was exchanged: each worker "
                "has computed everything by itself. Train by `fit`, or call the step "
                "by `strategy.run` on data that `experimental_distribute_dataset` has "
                "shared out; or leave out `--strategy` of tf-dgc-run"
            )

    # Data.

    def share_seed(self) -> None:
        """Let all workers draw the order of their data alike."""
        seed = tf.constant(secrets.randbits(31), tf.int64)
        (seed,) = self._transport.broadcast([seed], "seed")
        randomness.share(int(seed))
        if not randomness.take_over(self._transport) and self._transport.rank == 0:
            _logger.warning(randomness.OTHER_HASHES)

    def own_rows(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return this worker's rows of batches; see `data.share_of`."""
        return data.share_of(dataset, self._transport.rank, self._transport.size)

    def _input_context(self) -> tf.distribute.InputContext:
        size = self._transport.size
        return tf.distribute.InputContext(size, self._transport.rank, size)

    def _tell_chance(self) -> None:
        if self._told_chance:
            return
        self._told_chance = True
        _logger.warning(
            "A random operation without a seed decides which elements the dataset has "
            "(in Dataset.filter, flat_map or the like): each worker draws its own "
            "numbers, and so has rows of other batches. Give the operation a `seed`"
        )

    def _tell_work(self, dataset: tf.data.Dataset) -> None:
        if self._told_work or data.is_own(dataset):
            return
        if not (work := split.work_for_others(dataset)):
            return
        self._told_work = True
        _logger.warning(
            f"Each of the {self._transport.size} workers does this for all rows of the "
            f"global batches, and keeps its own: {'; '.join(work)}. So input takes as "
            "long as on one worker. Rows are chosen earlier where only such `map`s as "
            "depend on nothing but their element, without a seed or Python code, stand "
            "between the source and `batch`, and after it such as map rows alone. "
            "Or set AutoShardPolicy.FILE, where a dataset reads files, or let each "
            "worker make its own data: `strategy.distribute_datasets_from_function`"
        )

    def _meeting_of(
        self, dataset: tf.data.Dataset, unequal: bool
    ) -> _host.iterators.Meeting | None:
        """Let no worker wait for others that have no more batches of their own.

        Args:
            dataset: of this worker's own data.
            unequal: whether workers may have known and different numbers of batches.

        Returns:
            Where they agree on the end of data, if there is need to.

        Raises:
            ValueError: these numbers must not differ, and do.
        """
        lockstep = self._container_strategy().lockstep
        if self._transport.alone or not lockstep or not tf.executing_eagerly():
            return None
        batches = int(dataset.cardinality())
        names = {-1: "endless", -2: "unknown"}
        record = {"number of batches": names.get(batches, batches)}
        if unequal:
            found = handshake.tell(self._transport, "data", record)
            alike = all(each == found[0] for each in found)
        else:
            handshake.agree(self._transport, "data", record)
            alike = True
        known = alike and batches != -2
        return None if known or not level.can_end(dataset.element_spec) else self._end

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        strategy = self._container_strategy()
        strategy.inner.settle()
        own_batches = strategy.inner.own_batches
        if own_batches is not None and own_batches.is_alone:
            return _host.distribute.distributed_dataset(
                strategy, dataset, self._device, None
            )
        if self._transport.size > 1:
            if provenance.decided_by_chance(dataset):
                self._tell_chance()
            self._tell_work(dataset)
        if self._transport.size > 1 and not data.is_own(dataset):
            return self._distribute_alike(dataset)
        self.witness.begin([])
        own = self.own_rows(dataset)
        unequal = data.may_be_unequal(dataset)
        meeting = self._meeting_of(own if unequal else dataset, unequal)
        return _host.distribute.distributed_dataset(
            self._container_strategy(),
            own,
            self._device,
            meeting if data.is_own(dataset) else None,
        )

    def _distribute_alike(self, dataset: tf.data.Dataset) -> Any:
        """Share out batches that all workers read alike."""
        self._meeting_of(dataset, unequal=False)
        rank, size = self._transport.rank, self._transport.size
        share = data.marked_share_of(dataset, rank, size)
        self.witness.begin(share.names)
        return _host.distribute.distributed_dataset(
            self._container_strategy(),
            share.pairs,
            self._device,
            marks=self.witness.marks,
        )

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        self._container_strategy().inner.settle()
        self.witness.begin([])
        own = dataset_fn(self._input_context())
        return _host.distribute.distributed_dataset(
            self._container_strategy(),
            own,
            self._device,
            self._meeting_of(own, unequal=False),
        )

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        context = tf.distribute.experimental.ValueContext(
            self._transport.rank, self._transport.size
        )
        return value_fn(context)

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
            share = self._container_strategy().inner.share
            if share is not None:
                optimizer = getattr(fn, "__self__", None)
                inner = _host.keras.inner_optimizers(optimizer)[-1]
                variables = _host.keras.variables_of(inner)
                result = share.weights.all_finite(result, args[0], variables)
            result = self._transport.holds_on_all(result, "finite")
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
        flat = [_own_value(part) for part in tf.nest.flatten(values)]
        dense = [part for part in flat if isinstance(part, tf.Tensor)]
        read = any(map(_host.distribute.is_metric_variable, values))
        name = "metric" if read else "reduce"
        reduced = iter(self._transport.all_reduce(dense, name))
        summed = [
            next(reduced)
            if isinstance(part, tf.Tensor)
            else self._transport.sum_slices(part, f"reduce.slices{i}")
            for i, part in enumerate(flat)
        ]
        if reduce_op == _ReduceOp.MEAN:
            summed = [
                part / tf.cast(self._transport.size, part.dtype) for part in summed
            ]
        return tf.nest.pack_sequence_as(values, summed)

    def of_first(self, value: Any) -> tf.Tensor:
        """Return what rank 0 has of a variable of a metric; all workers call this."""
        return self._transport.broadcast([_own_value(value)], "metric.first")[0]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> tf.Tensor:
        value = _own_value(value)
        order = list(range(value.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        rows = tf.transpose(value, order)
        return tf.transpose(self._transport.all_gather_ragged(rows, "gather"), order)

    def _broadcast_to(self, tensor: tf.Tensor, destinations: Any) -> tf.Tensor:
        return tensor

    # Who and where.

    def _in_multi_worker_mode(self) -> bool:
        # True would lead Keras into branches that only fit TensorFlow's own strategy.
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self._transport.rank

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._transport.size

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The one device of this worker."""
        return (self._device,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The one device of this worker."""
        return (self._device,)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Return the one device of this worker."""
        return (self._device,)

    @property
    def experimental_between_graph(self) -> bool:
        """True: every worker builds its own graph."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """True: every worker initialises its own variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Tell whether this worker is the one that saves."""
        return self._transport.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Tell whether this worker is the one that writes summaries."""
        return self._transport.rank == 0

    @property
    def _global_batch_size(self) -> bool:
        return True


def build_by_first_batches(
    original: Callable[..., Any],
    model: Any,
    iterator: Any = None,
    data_batch: Any = None,
) -> Any:
    """Let Keras build a model without using up what data give only once.

    Under a strategy it reads a batch of an iterator that it then gives up, and what was
    read ahead is lost with it; maps that count have counted it.
    """
    extended = model.distribute_strategy.extended
    if iterator is None or not isinstance(extended, OneReplicaExtended):
        return original(model, iterator=iterator, data_batch=data_batch)
    batches = _host.keras.first_batches_of(iterator)
    if batches is not None:
        data_batch = slicing.first_of(extended.own_rows(batches))
    elif (zeros := _zeros_like(iterator)) is not None:
        return _built(original, model, zeros)
    else:
        for *_, batches in iterator:
            data_batch = next(batches, None)
            break
    if data_batch is None:  # there are no data
        data_batch = _zeros_of(_host.keras.distributed_dataset_of(iterator))
        if data_batch is None:  # as without a strategy, which builds in the first step
            return None
    refuse_stateful(model, data_batch, extended._num_replicas_in_sync)
    return _built(original, model, data_batch)


def _built(original: Callable[..., Any], model: Any, batch: Any) -> Any:
    """Let Keras build a model by a batch, which may have no targets.

    A step then makes them, and what `compile` was given is built there, as in Keras
    without a strategy; so it is where targets do not fit what the model gives outside
    of training.
    """
    own = not _host.keras.is_of_keras(model.train_step)
    if own and isinstance(batch, tuple) and len(batch) > 3:
        return None  # as without a strategy: the step alone knows what a batch has
    _, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if targets is not None:
        # Metrics may not take what the model gives when it does not train.
        misfits = ValueError, tf.errors.InvalidArgumentError
        with contextlib.suppress(*misfits, *[Exception] * own):
            return original(model, data_batch=batch)
    # A step may take the parts of a batch otherwise; it is built there then, too.
    with contextlib.suppress(*[Exception] * own):
        with _host.keras.built_without_targets(model):
            return original(model, data_batch=batch)
    return None


def _zeros_like(iterator: Any) -> Any:
    """Return a batch of zeros in the place of one whose reading would be counted.

    Returns:
        None where nothing is, or where shapes do not tell what a batch is.
    """
    dataset = _host.keras.distributed_dataset_of(iterator)
    share = getattr(dataset, "share", None)
    if not isinstance(share, tf.data.Dataset) or not split.assigns(share):
        return None
    return _zeros_of(dataset)


def _zeros_of(dataset: Any) -> Any:
    """Return a batch of zeros, or None where shapes do not tell what a batch is."""
    spec = dataset.element_spec
    flat = tf.nest.flatten(spec)
    if not all(
        isinstance(part, tf.TensorSpec) and part.shape[1:].is_fully_defined()
        for part in flat
    ):
        return None
    shapes = [[size or 1 for size in part.shape] for part in flat]
    zeros = [tf.zeros(s, p.dtype) for s, p in zip(shapes, flat, strict=True)]
    return tf.nest.pack_sequence_as(spec, zeros)


def refuse_stateful(model: Any, batch: Any, size: int) -> None:
    """Raise ValueError where layers keep states for more rows than a worker has.

    Args:
        model: of Keras.
        batch: of this worker.
        size: N.
    """
    inputs = tf.nest.flatten(getattr(model, "inputs", None) or [])
    made_for = {each.shape[0] for each in inputs} - {None}
    rows: set[Any] = {c.rows for c in slicing.components_of(batch) if c.has_rows}
    names = [
        layer.name
        for layer in getattr(model, "layers", [])
        if getattr(layer, "stateful", False) is True
    ]
    if size > 1 and names and made_for and None not in rows and made_for != rows:
        raise ValueError(
            "A stateful layer keeps states of the rows of its worker: `batch_shape` "
            f"must begin with {min(rows)}, the rows of one of {size} workers, while "
            "data stay in batches of all rows. "
            f"Received: batch_shape=({min(made_for)}, ...), layers {names}"
        )


def _own_value(value: Any) -> tf.Tensor | tf.IndexedSlices:
    """Return this worker's component of a value as a tensor or IndexedSlices."""
    if found := _host.distribute.components_of(value):
        value = found[0]
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(value)
