"""Implementation of tf.distribute for variables that are trained on servers.

A mirror is a worker's own variable of a model; its twin, on the servers, is what is
trained. W is the number of workers.
"""

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc._host.shared import Table
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.strategies import data, outside, pieces
from tf_dgc.strategies.extended import OneReplicaExtended
from tf_dgc.strategies.served_data import DataShares


class TablesInMaking:
    """Tables that Keras makes now, or later, on the servers.

    Attributes:
        bytes: from which on tables are on the servers only; None keeps all on workers.
        layer: whose table is made; None where none is.
        later: by identity of variables that Keras initializes later, their layers.
        form: shape, type and initializer of the variable that is made, or None.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.bytes: int | None = None
        self.layer: Any = None
        self.later: dict[int, weakref.ref[Any]] = {}
        self.form: Any = None

    def form_of(self, near: Any) -> Any:
        """Return the form of a variable that is to be a table, or None.

        Args:
            near: variable beside which it is made, if beside one.
        """
        if self.form is None or not (self.layer is not None or isinstance(near, Table)):
            return None
        fits = not isinstance(near, Table) or near.whole == tf.TensorShape(self.form[0])
        return self.form if fits else None


class DownpourExtended(OneReplicaExtended):
    """Trains what is on the servers in the place of this worker's own variables.

    Attributes:
        slots: the trained variable beside which an optimizer's variable was made.
        layer_variables: what layers have, of floating point, in the order of making.
        shares: of data.
        tables: that are being made on the servers.
    """

    def __init__(self, strategy: Any, mesh: Any, replica_context: Any) -> None:
        super().__init__(strategy, mesh, replica_context)
        self.slots: weakref.WeakValueDictionary[str, Any] = (
            weakref.WeakValueDictionary()
        )
        self.layer_variables: list[weakref.ref[Any]] = []
        self._running = 0  # steps that are run or traced
        self.applying = False  # an optimizer is between its gradients and constraints
        self.shares, self.tables = DataShares(), TablesInMaking()

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
        form = self.tables.form_of(near)
        if form is None:
            return None
        if not isinstance(near, Table):
            return self._container_strategy().inner.tables.make(*form)
        slot = self._container_strategy().inner.tables.make(*form, near)
        self.slots[_host.shared.identity_of(slot)] = near
        return slot

    def count_received(self, size: tf.Tensor) -> None:
        """Count bytes of rows that a step fetches."""
        if self.running:
            self._container_strategy().inner.make.totals.add(received=size)

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
            alone = strategy.workers == 1
            change = _change_of(variable, twin, name, args[0], alone)
            strategy.inner.exchanging.at_push(change)
        elif self.running and twin is not None:
            getattr(twin, name)(*args, **kwargs)
            strategy.inner.twins.mark(twin)
        elif not (self.running and strategy.inner.steps_locally):
            strategy.inner.twins.note()
        return _host.shared.bypassed(variable, name)(*args, **kwargs)

    def _update(
        self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        strategy = self._container_strategy()
        twin = strategy.inner.twin_of(var)
        if twin is None or not self.running:
            return super()._update(var, fn, args, kwargs, group)
        outside.refuse_foreign(strategy, var)
        if not self.exchanged:  # such as weight decay, before the exchange
            strategy.inner.exchanging.at_push(
                lambda: pieces.change(twin, fn, args, kwargs)
            )
        else:
            pieces.change(twin, fn, args, kwargs)
        return None if group else ()

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
        self._container_strategy().inner.members.meetings.moves.step()
        try:
            return super()._call_for_each_replica(fn, args, kwargs)
        finally:
            self._running -= 1

    # Data.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        strategy = self._container_strategy()
        strategy.inner.fetch()
        found, divided = self.shares.shared(dataset, strategy)
        cuts = data.pieces_of(dataset, strategy.workers) if divided else 1
        found = _host.distribute.distributed_dataset(
            strategy, found, self._device, pieces=cuts
        )
        if divided:
            self.shares.note(found, dataset)
        return found

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


def _change_of(
    mirror: Any, twin: Any, name: str, value: Any, alone: bool
) -> Callable[[], None]:
    """Return what does to a twin what an optimizer does to its mirror now.

    Such as weight decay.
    """
    if name != "assign" or alone:
        return lambda: getattr(twin, name)(value)
    change = value - mirror.read_value()  # before the mirror is assigned
    optimizer: Any = _host.keras.calling_optimizer()
    rate = tf.cast(optimizer.learning_rate, change.dtype)

    def do() -> None:
        # The chief's rate, of the step that is taken, may be another one by then.
        now = tf.cast(optimizer.learning_rate, change.dtype)
        twin.assign_add(change * tf.math.divide_no_nan(now, rate))

    return do
