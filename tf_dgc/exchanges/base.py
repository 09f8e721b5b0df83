"""Interface of exchanges: one object for one optimizer's variables, with its state.

It reads its state, calls pure functions, calls the wire and writes its state. It knows
gradients, variables and a transport, and nothing of Keras or Horovod.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import dgc
from tf_dgc.exchanges.figures import Clock, Counters, TensorStats
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.replicas import Replicas
from tf_dgc.transports.base import Transport


class Place(NamedTuple):
    """Place of an exchange: whose gradients it sums, and with whom."""

    transport: Transport
    number: int  # in the order of first exchanges; the same on every worker
    variables: Sequence[Any]  # with a name, a shape and a dtype
    owner: Callable[[], Any]  # the optimizer, or what else; None when it is gone
    clock: Clock  # of all exchanges of a ledger
    interval: int  # steps between two comparisons of replicas; 0 is never
    siblings: Sequence[Any] = ()  # exchanges that the owner has by now
    part: float = 1.0  # of the bytes of what all optimizers of the model train

    @property
    def name(self) -> str:
        """Prefix of the names of its collectives."""
        return f"optimizer{self.number}"

    @property
    def forms(self) -> list[str]:
        """Types and shapes of the variables, which every worker must have alike."""
        return values.forms(self.variables)


class LocalStep(NamedTuple):
    """Step of an optimizer that the exchange takes itself, along local gradients."""

    learning_rate: tf.Tensor | float  # lr, shape []
    take: Callable[[list[Any]], None]  # changes the variables by their gradients
    slots: Sequence[Any]  # what the optimizer keeps of them
    accumulates: Callable[[], bool]  # whether w - w' is of gradients alone


TakenOver = dgc.Momentum | LocalStep


def momentum_in(taken_over: TakenOver | None) -> dgc.Momentum | None:
    """Return what is taken over, where that is the step of SGD."""
    return taken_over if isinstance(taken_over, dgc.Momentum) else None


def take_velocity(
    momentum: dgc.Momentum, which: Sequence[int]
) -> list[tf.Tensor] | None:
    """Take what SGD has kept of steps before, as that of a model that was loaded.

    Eagerly; SGD's own is zero then, so that a model that is saved has none of it.

    Args:
        momentum: of the optimizer, which is left to an exchange.
        which: the indices of the variables.

    Returns:
        u of each, float32, of all workers together; None where SGD keeps nothing.
    """
    if not momentum.slots or not momentum.factor:
        return None
    slots = [momentum.slots[i] for i in which]
    if not all(slot.is_initialized() for slot in slots):
        return None  # it was made in this graph, and is zero when that begins
    factor = momentum.factor if momentum.nesterov else 1.0
    found = [-factor * tf.cast(slot.read_value(), tf.float32) for slot in slots]
    for slot in slots:
        slot.assign(tf.zeros(slot.shape, slot.dtype))
    return found


class Update(NamedTuple):
    """Outcome of an exchange, the same on every worker."""

    gradients: list[Any]  # summed over the workers; rows of IndexedSlices
    # still repeat; None is in the variables already
    finished: list[bool]  # per gradient: it is SGD's step, momentum and rate in it
    applies: tf.Tensor | None = None  # shape [], bool: False where all skip; None: True
    traffic: tf.Tensor | None = None  # of this worker, see `sums.traffic_of`
    weight: tf.Tensor | None = None  # of all workers: shape []; None: not known


Apply = Callable[[Update, Sequence[Any]], None]


class Exchange(abc.ABC):
    """Exchanges the gradients of an owner's variables; lives as long as the owner.

    Attributes:
        lockstep: whether all workers meet in each step.
        variables: what it is about.
        counters: what this worker sends.
        replicas: compares what should be alike on all workers.
    """

    lockstep = True

    def __init__(self, place: Place) -> None:
        self.transport, self.number, self.name = (
            place.transport,
            place.number,
            place.name,
        )
        self.variables, self.owner = place.variables, place.owner
        self.forms = place.forms
        self.counters = Counters(place.clock)
        self.replicas = Replicas(self.transport.everybody, place.interval, self.name)

    @property
    def clips(self) -> bool:
        """Tell whether the owner may clip what was exchanged, each row by itself."""
        names, missing = ("clipnorm", "global_clipnorm", "clipvalue"), object()
        owner = self.owner()
        owners = [owner, getattr(owner, "inner_optimizer", owner)]
        return any(getattr(o, n, missing) is not None for o in owners for n in names)

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """State of this worker that is saved, by name."""
        return {}

    @property
    def owed(self) -> Mapping[str, tf.Tensor]:
        """State that is saved beside `state`, where there is any, in its own form."""
        return {}

    @property
    def own_slots(self) -> Sequence[Any]:
        """Slots of the owner for steps of this worker's own."""
        return ()

    @property
    def steps(self) -> int:
        """Number of exchanges that count towards its schedule."""
        return 0

    @abc.abstractmethod
    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Exchange this worker's gradients, before the optimizer's step.

        Args:
            local: for each variable a tensor or IndexedSlices of static shape.
            taken_over: what the optimizer leaves to the exchange.
            part: what they count; None where those of all workers count alike.
        """

    def parameters(self) -> None:
        """Exchange parameters, where that is what is exchanged: after the step."""
        return

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved: all of `state`, some of `owed`, and `steps`."""
        state = self.state
        for name, array in arrays.items():
            value = tf.cast(array, state[name].dtype)
            state[name].assign(tf.broadcast_to(value, state[name].shape))

    def flush(self, variables: Sequence[Any], apply: Apply) -> None:
        """Apply, eagerly, what all workers keep back of variables; then clear it.

        Args:
            variables: of which; others are left alone.
            apply: takes an update, and the variables it is of.
        """
        return

    def kept(self) -> list[tf.Tensor]:
        """Return what is kept back."""
        return []

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        return []
