"""Implementation of tf.distribute for variables that are trained on servers.

A mirror is a worker's own variable of a model; its twin, on the servers, is what is
trained. W is the number of workers.
"""

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc._host.shared import Table
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.together import Pieces
from tf_dgc.strategies import data
from tf_dgc.strategies.extended import OneReplicaExtended


class DownpourExtended(OneReplicaExtended):
    """Trains what is on the servers in the place of this worker's own variables.

    Attributes:
        slots: the trained variable beside which an optimizer's variable was made.
        layer_variables: what layers have, of floating point, in the order of making.
    """

    def __init__(self, strategy: Any, transport: Any, replica_context: Any) -> None:
        super().__init__(strategy, transport, replica_context)
        self.slots: weakref.WeakValueDictionary[str, Any] = (
            weakref.WeakValueDictionary()
        )
        self.layer_variables: list[weakref.ref[Any]] = []
        self._running = 0  # steps that are run or traced
        self.applying = False  # an optimizer is between its gradients and constraints
        self.training_next = False
        # For a share that a script has distributed by itself, all of the dataset.
        self._whole: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.table_bytes: int | None = None  # from which on tables are on servers only
        self.embedding: Any = None  # a layer, whose table is made for the servers
        # By identity of variables that Keras initializes later, their layers.
        self.tables_to_come: dict[int, weakref.ref[Any]] = {}
        self.initializing: Any = None  # shape, type and initializer of what is made

    # Variables.

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        near = kwargs.get("colocate_with")
        if (table := self._table(near)) is not None:
            return table
        own = kwargs.get("synchronization") in (
            tf.VariableSynchronization.NONE,
            tf.VariableSynchronization.ON_READ,
        )
        by_optimizer = _host.keras.calling_optimizer() is not None
        if by_optimizer and not tf.executing_eagerly():
            variable = _made_now(**kwargs)
        else:
            variable = super()._create_variable(next_creator, **kwargs)
        if by_optimizer:
            if near is not None:
                self.slots[_host.shared.identity_of(variable)] = near
        elif not own and variable.dtype.is_floating:
            self.layer_variables.append(weakref.ref(variable))
            if kwargs.get("trainable") is not False:
                self._watch(variable)
        return variable

    def _table(self, near: Any) -> Any:
        """Return a table on the servers, where one is to be made; else None."""
        layer, made = self.embedding, self.initializing
        if made is None or not (layer is not None or isinstance(near, Table)):
            return None
        shape, dtype, initializer = made
        strategy = self._container_strategy()
        if isinstance(near, Table):
            if near.whole != tf.TensorShape(shape):
                return None
            slot = strategy.inner.tables.make(shape, dtype, initializer, near)
            self.slots[_host.shared.identity_of(slot)] = near
            return slot
        return strategy.inner.tables.make(shape, dtype, initializer)

    def count_received(self, size: tf.Tensor) -> None:
        """Count bytes of rows that a step fetches."""
        if self.running:
            self._container_strategy().inner.count_received(size)

    def _watch(self, variable: Any) -> None:
        """Follow what else assigns a variable: its twin must know."""
        reference = weakref.ref(variable)

        def watched(name: str) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                return self._assigned(reference(), name, args, kwargs)

            return method

        for name in ("assign", "assign_add", "assign_sub"):
            setattr(variable, name, watched(name))

    def _assigned(self, variable: Any, name: str, args: Any, kwargs: Any) -> Any:
        strategy = self._container_strategy()
        twin = strategy.inner.twin_of(variable)
        optimizer = _host.keras.calling_optimizer()
        if self.running and optimizer is not None and twin is not None:
            if not self.applying:
                return variable  # a constraint, which the servers have applied
            strategy.inner.at_push(lambda: self._move(variable, twin, name, *args))
        elif self.running and twin is not None:
            getattr(twin, name)(*args, **kwargs)
            strategy.inner.twins.mark(twin)
        elif not (self.running and strategy.inner.steps_locally):
            strategy.inner.twins.note()
        return _host.shared.bypassed(variable, name)(*args, **kwargs)

    def _move(self, mirror: Any, twin: Any, name: str, value: Any) -> None:
        """Do to a twin what an optimizer does to its mirror, such as weight decay."""
        if name != "assign" or self._container_strategy().workers == 1:
            getattr(twin, name)(value)
        else:
            twin.assign_add(value - mirror.read_value())

    def _update(
        self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        strategy = self._container_strategy()
        twin = strategy.inner.twin_of(var)
        if twin is None or not self.running:
            return super()._update(var, fn, args, kwargs, group)
        self.refuse_foreign(var)
        if not self.exchanged:  # such as weight decay, before the exchange
            strategy.inner.at_push(lambda: self.on_servers(twin, fn, args, kwargs))
        else:
            self.on_servers(twin, fn, args, kwargs)
        return None if group else ()

    def on_servers(
        self, twin: Any, fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> None:
        """Let a function change a twin, and what goes with it, where they are."""
        args = _host.distribute.local_component(args)
        optimizer = _host.keras.calling_optimizer()
        by_rows = isinstance(twin, Table) and optimizers.is_rowwise(optimizer)
        for at in twin.cursor.over(len(twin.pieces)):
            piece = twin.pieces[at]
            own = [_rows(part, twin, at) for part in args]
            with tf.device(piece.device), _host.distribute.update_context():
                if by_rows and own and isinstance(own[0], tf.IndexedSlices):
                    with twin.cursor.only(tf.identity(own[0].indices)):
                        fn(twin, tf.identity(own[0].values), *own[1:])
                else:
                    fn(twin, *own, **(kwargs or {}))

    @property
    def running(self) -> bool:
        """Tell whether a step is run or traced."""
        return self._running > 0

    @property
    def several(self) -> bool:
        """Always: a step of this worker's own variables alone trains nothing."""
        return True

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        self._running += 1
        self._container_strategy().inner.moves.step()
        try:
            return super()._call_for_each_replica(fn, args, kwargs)
        finally:
            self._running -= 1

    # Data.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        strategy = self._container_strategy()
        strategy.inner.fetch()
        if strategy.inner.fits.running:
            divided, self.training_next = self.training_next, False
        else:
            divided = not strategy.inner.fits.evaluating  # a loop of the user's
        whole = dataset
        if divided:
            # A step of all is of those without rows, too.
            fits, share = strategy.inner.fits, strategy.inner.share
            all_batches = fits.running and share is not None
            share_of = data.share_of if all_batches else own_share
            dataset = share_of(dataset, strategy.rank, strategy.workers)
        found = _host.distribute.distributed_dataset(strategy, dataset, self._device)
        if divided:
            self._whole[found] = whole
        return found

    def of_fit(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of `fit` with validation data that have all rows.

        What is distributed next is its training data, if the script has not done so.
        """
        given = arguments.get("x")
        self.training_next = not _host.distribute.is_distributed(given)
        names = arguments.keys() & {"validation_data"}
        return arguments | {name: self._all_of(arguments[name]) for name in names}

    def of_evaluation(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments of `evaluate` or `predict` with data that have all rows."""
        if args:
            return (self._all_of(args[0]), *args[1:]), kwargs
        return args, {k: self._all_of(v) if k == "x" else v for k, v in kwargs.items()}

    def _all_of(self, data: Any) -> Any:
        shared_out = _host.distribute.is_distributed(data)
        return self._whole.get(data, data) if shared_out else data

    def _input_context(self) -> tf.distribute.InputContext:
        strategy = self._container_strategy()
        return tf.distribute.InputContext(strategy.workers, strategy.rank, 1)


def _made_now(initial_value: Any, name: str | None = None, **kwargs: Any) -> Any:
    """Return a variable that has its value at once, where a step is being traced.

    What an optimizer makes there has none until the step is traced.
    """
    with tf.init_scope():
        value = initial_value() if callable(initial_value) else initial_value
        value = tf.convert_to_tensor(value, kwargs.get("dtype"))
        return own_variable(value, name or "slot")


def _rows(part: Any, twin: Any, at: int) -> Any:
    """Return what belongs to a piece of a twin: rows of a gradient; else all."""
    if isinstance(part, Pieces):
        return part.parts[at]
    if len(twin.pieces) == 1:
        return part
    _, start, stop = twin.pieces[at]
    if isinstance(part, tf.IndexedSlices):
        mine = (part.indices >= start) & (part.indices < stop)
        return tf.IndexedSlices(
            tf.boolean_mask(part.values, mine),
            tf.boolean_mask(part.indices, mine) - start,
            tf.constant([stop - start, *twin.whole[1:]], part.indices.dtype),
        )
    if tf.is_tensor(part) and part.shape == twin.whole:
        return part[start:stop]
    return part


def own_share(dataset: tf.data.Dataset, rank: int, workers: int) -> tf.data.Dataset:
    """Return a worker's rows of global batches, without batches of no rows."""
    share = data.share_of(dataset, rank, workers)
    first = tf.nest.flatten(dataset.element_spec)[0]
    if workers == 1 or (first.shape.rank and first.shape[0] is not None):
        return share

    def has_rows(*element: Any) -> tf.Tensor:
        part = tf.nest.flatten(element)[0]
        return tf.shape(part)[0] > 0

    return share.filter(has_rows)
