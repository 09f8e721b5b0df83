"""What a synchronizer is: it exchanges gradients.

It reads state, calls the pure step, calls the transport and writes state. It knows
gradients, variables, state and a transport, and nothing of Keras or Horovod. It has no
mathematics of its own.
"""

import abc
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc import dgc
from tf_dgc.layout import Layout
from tf_dgc.state import (
    ArenaState,
    Clock,
    Counters,
    ReplicaState,
    StepStats,
    TensorStats,
)
from tf_dgc.synchronizers import replicas, saving
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport


class ArenaSum(NamedTuple):
    """What all workers sent of the compressed tensors; until the next exchange."""

    indices: list[int]  # of these among all gradients
    dtypes: list[tf.DType]  # of all gradients
    layout: Layout
    state: ArenaState


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """The result of one exchange."""

    summed: list[Any]  # over the workers; None is in the arena, or already applied
    compressed: list[bool]  # per gradient: it is SGD's step, momentum and rate in it
    apply: tf.Tensor | None  # shape [], bool: False where all skip; None is True
    arena: ArenaSum | None = None

    @property
    def gradients(self) -> list[Any]:
        """All sums, those in the arena as well; to be read before the next exchange.

        None is what was applied already.
        """
        found = list(self.summed)
        if self.arena is not None:
            indices, dtypes, layout, state = self.arena
            for i, tensor in zip(indices, state.tensors(layout), strict=True):
                found[i] = tf.cast(tensor, dtypes[i])
        return found


@dataclasses.dataclass(eq=False)
class Account:
    """What a synchronizer keeps for an owner's variables, and as long as the owner."""

    number: int  # in the order of first exchanges; the same on every worker
    variables: Sequence[Any]  # held, so that their identities stay theirs
    counters: Counters
    owner: Callable[[], Any]  # None when it is gone
    replicas: ReplicaState

    @property
    def name(self) -> str:
        """Prefix of the names of its collectives."""
        return f"optimizer{self.number}"

    @property
    def forms(self) -> list[str]:
        """What every worker must have alike: types and shapes of the variables."""
        return [f"{v.dtype.name} {v.shape}" for v in self.variables]


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
        self._restored: list[saving.Record] = []  # for accounts to come
        self._restored_for: Sequence[Any] | None = None  # their owners; None is all
        self._clock = Clock()
        self._check_interval = replicas.default_interval()

    def exchange(
        self,
        owner: object,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None = None,
        subtract: bool = False,
    ) -> Exchanged:
        """Sum gradients over all workers, by whatever means.

        Args:
            owner: the optimizer, or what else these gradients belong to.
            gradients: tensors or IndexedSlices of static shape, none of them None.
            variables: what they belong to, of the same length: objects with a name,
                a shape and a dtype, the same objects at every step.
            momentum: what the caller leaves to the exchange.
            subtract: where a sum is SGD's finished step, subtract it from the
                variables, which are tf.Variables, and return None in its place.

        Returns:
            Gradients of the same shapes, the same bits on every worker.

        Raises:
            ValueError: the workers' variables differ.
            tf.errors.InvalidArgumentError: their weights have drifted apart, see
                `replicas`.
        """
        accounts = self._owners.setdefault(owner, {})
        key = tuple(id(v) for v in variables)  # names repeat themselves in Keras 3
        if key not in accounts:
            with tf.init_scope():
                accounts[key] = self._open(owner, variables, momentum)
        account = accounts[key]
        self._before_step(account, variables)
        exchanged, sent_bytes, sent_elements = self._exchange(
            account, list(gradients), momentum, subtract
        )
        elements = sum(v.shape.num_elements() for v in variables)
        size = sum(v.shape.num_elements() * v.dtype.size for v in variables)
        account.counters.record(tf.stack([sent_bytes, size, sent_elements, elements]))
        return exchanged

    def _before_step(self, account: Account, variables: Sequence[Any]) -> None:
        """Do what a step begins with: compare the replicas, where it is time."""
        self._compare(account, variables, 1)

    def _compare(self, account: Account, variables: Sequence[Any], steps: Any) -> None:
        every = self._check_interval
        state, name = account.replicas, account.name
        replicas.compare(self.transport, state, variables, steps, every, name)

    def _open(
        self, owner: object, variables: Sequence[Any], momentum: dgc.Momentum | None
    ) -> Account:
        counters = Counters(self._clock)
        account = Account(
            self._opened, list(variables), counters, weakref.ref(owner), ReplicaState()
        )
        listed = {f"variable {i}": form for i, form in enumerate(account.forms)}
        listed["TF_DGC_CHECK_STEPS"] = str(self._check_interval)
        handshake.agree(self.transport, "trained variables", listed)
        self._opened += 1
        self._prepare(account, momentum)
        wanted = self._restored_for
        if self._restored and (wanted is None or _has(wanted, owner)):
            self._check(account, self._restored[0])
            self._load(account, self._restored.pop(0))
        return account

    def _prepare(self, account: Account, momentum: dgc.Momentum | None) -> None:
        """Create what a new account's exchanges need, eagerly."""
        return

    # State: what is kept back, and restored.

    def save(self, path: Any, owners: Sequence[Any] | None = None) -> None:
        """Write this state, of all workers, to a folder. All workers call this.

        Args:
            path: of the folder.
            owners: only what is theirs; by default all there is.
        """
        saving.save(self.transport, path, self.records(owners))

    def records(self, owners: Sequence[Any] | None = None) -> list[saving.Record]:
        """Return this worker's state, eagerly; arguments as in `save`."""
        records = [
            saving.Record(
                account.forms,
                self._step_of(account),
                {k: _array_of(v) for k, v in self._arrays_of(account).items()},
            )
            for account in self._accounts_of(owners)
        ]
        return [*records, *(self._restored if owners is None else [])]

    def begin_anew(self, records: Sequence[saving.Record]) -> None:
        """Forget all owners; those to come take over these records, in their order."""
        self._owners.clear()
        self._opened = 0
        self._restored, self._restored_for = list(records), None

    def restore(self, path: Any, owners: Sequence[Any] | None = None) -> None:
        """Take over a state that was saved. All workers call this.

        Optimizers that have not exchanged yet get theirs when they do, in the order of
        their first exchanges.

        Args:
            path: of the folder.
            owners: only for these; by default for all.

        Raises:
            ValueError: the state is not of these variables; nothing was changed.
        """
        records = saving.load(self.transport, path)
        accounts = self._accounts_of(owners)
        if len(records) < len(accounts):
            raise ValueError(
                f"The state in {path} must be of {len(accounts)} optimizers. Received: "
                f"field 'accounts' has {len(records)}"
            )
        for account, record in zip(accounts, records, strict=False):
            self._check(account, record)
        for account, record in zip(accounts, records, strict=False):
            self._load(account, record)
        self._restored = records[len(accounts) :]
        self._restored_for = owners

    def _accounts_of(self, owners: Sequence[Any] | None) -> list[Account]:
        gc.collect()  # owners that are gone, on all workers alike
        found = self.accounts()
        return (
            found if owners is None else [a for a in found if _has(owners, a.owner())]
        )

    def _check(self, account: Account, record: saving.Record) -> None:
        shapes = {k: v.shape.as_list() for k, v in self._arrays_of(account).items()}
        saved = {name: list(array.shape) for name, array in record.arrays.items()}
        for field, own, found in (
            ("variables", account.forms, record.variables),
            ("arrays", shapes, saved),
        ):
            if own != found:
                raise ValueError(
                    f"The restored state does not fit {account.name}: field {field!r} "
                    f"must be {own}. Received: {found}"
                )

    def _load(self, account: Account, record: saving.Record) -> None:
        variables = self._arrays_of(account)
        for name, array in record.arrays.items():
            variables[name].assign(tf.cast(array, variables[name].dtype))
        self._load_step(account, record.step)

    def _arrays_of(self, account: Account) -> dict[str, tf.Variable]:
        """Return by name what is saved of an account."""
        return {}

    def _step_of(self, account: Account) -> int:
        """Return how many exchanges count towards an account's schedule."""
        return 0

    def _load_step(self, account: Account, step: int) -> None:
        """Take over what `_step_of` returned."""
        return

    def flush(
        self, variables: Sequence[Any]
    ) -> Iterator[tuple[Any, Exchanged, Sequence[Any]]]:
        """Sum up what all workers keep back of these variables, and clear it.

        Yields:
            An owner, gradients and their variables. They are cleared when the next
            ones are asked for.
        """
        yield from ()

    def _refuse_unclaimed(self) -> None:
        if self._restored:
            raise ValueError(
                "What was restored is taken over in the first step of its optimizer; "
                "flush after that"
            )

    @abc.abstractmethod
    def _exchange(
        self,
        account: Account,
        gradients: list[Any],
        momentum: dgc.Momentum | None,
        subtract: bool,
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        """Exchange; return also the bytes and elements that this worker sent."""

    def accounts(self) -> list[Account]:
        """Return the accounts of all living owners, in the order of their numbers."""
        found = [a for owned in self._owners.values() for a in owned.values()]
        return sorted(found, key=lambda account: account.number)

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        return tf.zeros([])

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor."""
        return []

    def stats(self, total: bool = False) -> StepStats:
        """Return this worker's figures of the last step, or summed over all steps."""
        if total:
            counted = self._clock.total.read_value()
        else:
            last = [account.counters.last for account in self.accounts()]
            counted = sum(last, tf.zeros([4], tf.int64))
        return StepStats._make([*tf.unstack(counted, 4), self.residual_norm()])

    def _sum_dense(
        self, gradients: list[Any], variables: Sequence[Any], name: str
    ) -> tuple[list[Any], tf.Tensor, tf.Tensor]:
        """Sum tensors in one fused reduction, IndexedSlices by gathering them.

        Args:
            gradients: of this worker.
            variables: what they belong to.
            name: prefix of the names of the collectives.

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
        counts = [variables[i].shape.num_elements() for i in dense]
        elements: Any = sum(counts)
        size: Any = sum(
            count * gradients[i].dtype.size
            for count, i in zip(counts, dense, strict=True)
        )
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                summed[i] = self.transport.sum_slices(gradient, f"{name}.slices{i}")
                elements += tf.size(gradient.values, tf.int64)
                for part in (gradient.values, gradient.indices):
                    size += tf.size(part, tf.int64) * part.dtype.size
        return summed, tf.cast(size, tf.int64), tf.cast(elements, tf.int64)


def _array_of(variable: tf.Variable) -> np.ndarray:
    """Return a value in a type that NumPy has by itself."""
    value = variable.read_value()
    return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()


def _has(owners: Sequence[Any], owner: Any) -> bool:
    return any(owner is each for each in owners)
