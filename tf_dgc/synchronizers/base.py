"""What a synchronizer is: it exchanges gradients.

It reads state, calls the pure step, calls the transport and writes state. It knows
gradients, variables, state and a transport, and nothing of Keras or Horovod. It has no
mathematics of its own.
"""

import abc
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import dgc
from tf_dgc.state import Clock, Counters, StepStats
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport


class Exchanged(NamedTuple):
    """The result of one exchange."""

    gradients: list[Any]  # summed over the workers, each as it came in
    compressed: list[bool]  # per gradient: momentum is already in it
    apply: tf.Tensor | None  # shape [], bool: False where all skip; None is True


@dataclasses.dataclass(eq=False)
class Account:
    """What a synchronizer keeps for an owner's variables, and as long as the owner."""

    number: int  # in the order of first exchanges; the same on every worker
    variables: Sequence[Any]  # held, so that their identities stay theirs
    counters: Counters

    @property
    def name(self) -> str:
        """Prefix of the names of its collectives."""
        return f"optimizer{self.number}"


class Synchronizer(abc.ABC):
    """Exchanges the gradients of any number of optimizers over one transport.

    The first exchange of an owner compares its variables over all workers and creates
    its state, outside of the graph that is being traced. The state lives as long as
    the owner.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._owners: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Account]] = (
            weakref.WeakKeyDictionary()
        )
        self._opened = 0
        self._clock = Clock()

    def exchange(
        self,
        owner: object,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None = None,
    ) -> Exchanged:
        """Sum gradients over all workers, by whatever means.

        Args:
            owner: the optimizer, or what else these gradients belong to.
            gradients: tensors or IndexedSlices of static shape, none of them None.
            variables: what they belong to, of the same length: objects with a name,
                a shape and a dtype, the same objects at every step.
            momentum: what the caller leaves to the exchange.

        Returns:
            Gradients of the same shapes, the same bits on every worker.

        Raises:
            ValueError: the workers' variables differ.
        """
        accounts = self._owners.setdefault(owner, {})
        key = tuple(id(v) for v in variables)  # names repeat themselves in Keras 3
        if key not in accounts:
            with tf.init_scope():
                accounts[key] = self._open(variables)
        account = accounts[key]
        exchanged, sent_bytes, sent_elements = self._exchange(
            account, list(gradients), variables, momentum
        )
        elements = sum(v.shape.num_elements() for v in variables)
        size = sum(v.shape.num_elements() * v.dtype.size for v in variables)
        account.counters.record(tf.stack([sent_bytes, size, sent_elements, elements]))
        return exchanged

    def _open(self, variables: Sequence[Any]) -> Account:
        listed = {
            f"variable {i}": f"{v.dtype.name} {v.shape}"
            for i, v in enumerate(variables)
        }
        handshake.agree(self.transport, "trained variables", listed)
        account = Account(self._opened, list(variables), Counters(self._clock))
        self._opened += 1
        return account

    @abc.abstractmethod
    def _exchange(
        self,
        account: Account,
        gradients: list[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None,
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        """Exchange; return also the bytes and elements that this worker sent."""

    def accounts(self) -> list[Account]:
        """Return the accounts of all living owners, in the order of their numbers."""
        found = [a for owned in self._owners.values() for a in owned.values()]
        return sorted(found, key=lambda account: account.number)

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        return tf.zeros([])

    def stats(self, total: bool = False) -> StepStats:
        """Return this worker's figures of the last step, or summed over all steps."""
        counters = [account.counters for account in self.accounts()]
        counted = [each.total if total else each.last for each in counters]
        figures = tf.unstack(sum(counted, tf.zeros([4], tf.int64)), 4)
        return StepStats._make([*figures, self.residual_norm()])

    def _sum_dense(
        self, gradients: list[Any], name: str
    ) -> tuple[list[Any], tf.Tensor, tf.Tensor]:
        """Sum tensors in one fused reduction, IndexedSlices by gathering them.

        Returns:
            The sums, and the bytes and elements that this worker sent.
        """
        dense = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor)]
        summed = list(gradients)
        reduced = self.transport.all_reduce(
            [gradients[i] for i in dense], f"{name}.dense"
        )
        for i, tensor in zip(dense, reduced, strict=True):
            summed[i] = tensor
        sent = [gradients[i] for i in dense]
        elements: Any = sum(g.shape.num_elements() for g in sent)
        size: Any = sum(g.shape.num_elements() * g.dtype.size for g in sent)
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                summed[i] = self.transport.sum_slices(gradient, f"{name}.slices{i}")
                elements += tf.size(gradient.values, tf.int64)
                for part in (gradient.values, gradient.indices):
                    size += tf.size(part, tf.int64) * part.dtype.size
        return summed, tf.cast(size, tf.int64), tf.cast(elements, tf.int64)
