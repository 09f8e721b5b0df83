"""The state of Deep Gradient Compression: what a worker has accumulated and not sent.

u and v of `compression/dgc.py` belong to variables. Where an optimizer trains now these
variables, now others, each set has an exchange and a `Residual` of its own, but the
state of a variable lies with the first of them that had it. The others borrow it for
the time of a step, and hold zeros in its place in between. The sum of all is so what
all variables have.

Axes: P arena elements, T tensors in the arena, K message slots, N workers, W of them in
this process: one, but in a simulation.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.compression import arena, dgc, selection
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.figures import Coverage
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports.sums import Kept, Sparse
from tf_dgc.values import unless

RATES = "learning rate"  # name of what is saved of them
OWNED = "residual at owners"  # and of what these have not passed on: `SparseSum.whole`


class Loan(NamedTuple):
    """State that a step borrows: segments of another arena."""

    lender: "Arenas"
    theirs: list[int]  # numbers of the segments in the lender's layout
    own: list[int]  # and in the borrower's, in the same order


class Arenas:
    """Arenas of one layout; those who had a tensor before lend its part of them.

    Attributes:
        layout: of each arena.
        tensors: T variables, whose state they hold.
        variables: the arenas, of shape [*axis, P]; None where there is none.
        rates: shape [T], float32; learning rate of the last step of each tensor, 0
            before the first.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Any],
        variables: Sequence[tf.Variable | None],
        device: str,
        earlier: Sequence["Arenas"],
        rates_on: str = "CPU:0",
    ) -> None:
        """Find out of whom to borrow.

        Args:
            layout: of T tensors.
            tensors: see above.
            variables: see above; in the same order in all of `earlier`.
            device: where the arenas are.
            earlier: those that may have had some of the tensors.
            rates_on: where their learning rates are.
        """
        self.layout, self.tensors = layout, list(tensors)
        self.variables, self._device = list(variables), device
        with tf.init_scope(), tf.device(rates_on):
            self.rates = own_variable(tf.zeros([len(self.tensors)]), "dgc_rate")
        self.loans = [
            Loan(other, theirs, own)
            for other in earlier
            for theirs, own in [self._shared_with(other)]
            if own
        ]
        lent = {i for loan in self.loans for i in loan.own}
        self.owned = [i not in lent for i in range(len(self.tensors))]

    def _shared_with(self, other: "Arenas") -> tuple[list[int], list[int]]:
        numbers = {
            id(tensor): j for j, tensor in enumerate(other.tensors) if other.owned[j]
        }
        own = [i for i, tensor in enumerate(self.tensors) if id(tensor) in numbers]
        return [numbers[id(self.tensors[i])] for i in own], own

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Hold the state of all tensors, for the time of a step."""
        for loan in self.loans:
            _move(loan.lender, loan.theirs, self, loan.own)
        yield
        self.give_back()

    def give_back(self) -> None:
        """Let those who lend have the state of their tensors."""
        for loan in self.loans:
            _move(self, loan.own, loan.lender, loan.theirs)


def _move(
    source: Arenas, numbers: Sequence[int], target: Arenas, others: Sequence[int]
) -> None:
    """Move the state of some tensors, given as numbers of segments."""
    begins = [source.layout.segments[i].offset for i in numbers]
    ends = [target.layout.segments[i].offset for i in others]
    sizes = [source.layout.segments[i].size for i in numbers]
    for pair in zip(source.variables, target.variables, strict=True):
        if all(arenas is not None for arenas in pair):
            args = list(pair), begins, ends, sizes
            inplace.update(source._device, arena.moved, *args)
    with tf.device(target.rates.device):
        where = tf.constant(others, tf.int32, [len(others), 1])
        rates = tf.gather(source.rates.read_value(), list(numbers))
        before = target.rates.read_value()
        target.rates.assign(tf.tensor_scatter_nd_update(before, where, rates))


def bare(momentum: dgc.Momentum | None) -> dgc.Momentum | None:
    """Return momentum as a compiled function takes it: its rate a tensor, no slots."""
    if momentum is None:
        return None
    rate = tf.cast(momentum.learning_rate, tf.float32)
    return momentum._replace(learning_rate=rate, slots=())


class Keeping(Kept, abc.ABC):
    """Something to be summed, of which a worker keeps what was not used."""

    @abc.abstractmethod
    def keep(self, used: Sparse | None) -> None:
        """Take out what was used; None is everything."""


class Passing(Keeping):
    """A tensor that all workers send whole, and keep nothing of."""

    def __init__(self, tensor: tf.Tensor, coverage: Coverage) -> None:
        """Take the tensor, shape [*axis, P], and what counts elements sent."""
        self._tensor, self._coverage = tensor, coverage

    def read(self) -> tf.Tensor:
        """Return the tensor."""
        return self._tensor

    def peaks(self) -> tf.Tensor:
        """Return the peaks of its blocks."""
        return selection.peaks(self._tensor)

    def keep(self, used: Sparse | None) -> None:
        """Count it as sent."""
        self._coverage.record_all()


class Residual(Keeping):
    """u and v of the tensors of one arena, and how far their training has come.

    Attributes:
        layout: of the arena.
        unit: what v is a sum of, "steps" or "gradients".
        u: velocity, shape [*axis, P], float32; None where no momentum is corrected.
        v: residual, of the same shape.
        device: where they are.
        step: shape [], int64, number of exchanges done; of all that share tensors.
        arenas: of u and v.
        coverage: counts the elements sent.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Any],
        config: DGCConfig,
        device: str,
        *,
        momentum: dgc.Momentum | None = None,
        unit: str = "gradients",
        axis: Sequence[int] = (),
        earlier: Sequence["Residual"] = (),
        figures_on: str = "CPU:0",
    ) -> None:
        """Create the variables, zero, outside of any graph.

        Args:
            layout: of T tensors.
            tensors: T variables.
            config: the settings.
            device: where the state is.
            momentum: that is corrected, in the first step.
            unit: see above.
            axis: of several workers in this process.
            earlier: of the same optimizer, opened before.
            figures_on: where learning rates and counts are.
        """
        self.layout, self.unit, self.config = layout, unit, config
        self.device = device
        with tf.init_scope(), tf.device(device):
            zeros = tf.zeros([*axis, layout.size])
            self.u: tf.Variable | None = None
            if momentum is not None and momentum.factor:
                self.u = own_variable(zeros, "dgc_velocity")
            self.v = own_variable(zeros, "dgc_residual")
        alike = [other for other in earlier if other.unit == unit]
        lenders: list[Arenas] = [other.arenas for other in alike]
        self.arenas: Arenas = Arenas(
            layout, tensors, [self.u, self.v], device, lenders, figures_on
        )
        lenders = [loan.lender for loan in self.arenas.loans]
        clocks: list[tf.Variable] = [o.step for o in alike if o.arenas in lenders]
        with tf.init_scope(), tf.device("CPU:0"):
            none = tf.zeros([], tf.int64)
            self.step: tf.Variable = (
                clocks[0] if clocks else own_variable(none, "dgc_step")
            )
            self._seen = own_variable(none, "dgc_seen_step")
        self.coverage = Coverage(layout, device, figures_on)

    # Steps.

    def present_step(self) -> tf.Tensor:
        """Return the number of the step that has begun, shape [], int64.

        A step ends where the same tensors come for the second time; those of others,
        with which they share some, are of the same step.
        """
        with tf.device("CPU:0"):
            return self.step.read_value() - 1 + self._comes_again()

    def count(self) -> None:
        """End a step."""
        with tf.device("CPU:0"):
            step = self.step.assign_add(self._comes_again())
            self._seen.assign(step)

    def _comes_again(self) -> tf.Tensor:
        return tf.cast(self._seen.read_value() == self.step.read_value(), tf.int64)

    def fall(
        self, rate: tf.Tensor, others: Sequence[Callable[[tf.Tensor], None]] = ()
    ) -> None:
        """Let v fall with the learning rate, shape []; it is the last from now on.

        Args:
            rate: of this step.
            others: scale what waits elsewhere, by numbers of the elements, shape [P].
        """
        rates = self.arenas.rates
        with tf.device("CPU:0"):  # which chooses what is done
            last = rates.read_value()
            fallen = dgc.fall(rate, last)
            stays = tf.reduce_all(fallen >= 1.0)
            last = tf.where(rate > 0, rate, last)
        with tf.device(rates.device):
            rates.assign(last, read_value=False)

        def scale() -> None:
            by = arena.spread(self.layout, fallen)
            self.v.assign(by * self.v, read_value=False)
            for other in others:
                other(by)

        if self.config.rate_correction and self.unit == "steps":
            unless(stays, scale)

    def decay(self, factor: float) -> None:
        """Multiply v, of which so a part is never sent."""
        self.v.assign(factor * self.v, read_value=False)

    def add(
        self,
        gradient: tf.Tensor,
        momentum: dgc.Momentum | None,
        scale: tf.Tensor | float = 1.0,
    ) -> None:
        """Accumulate; see `dgc.accumulate`."""
        momentum = bare(momentum)
        state = dgc.ArenaState(self.u, self.v)
        inplace.update(self.device, dgc.accumulate, state, gradient, momentum, scale)

    def read(self) -> tf.Tensor:
        """Return v."""
        return self.v.read_value()

    def peaks(self) -> tf.Tensor:
        """Return `selection.peaks` of v."""
        return inplace.call(self.device, selection.peaks, self.v)

    def keep(self, used: Sparse | None) -> None:
        """Take what was used out of u and v: sent + kept = accumulated.

        Args:
            used: of each worker in this process, [W, K]; None is all of v. u stays
                then: to the letter, momentum factor masking would clear it, and leave
                SGD without momentum.
        """
        if used is None:
            self.clear()
            self.coverage.record_all()
            return
        where = used.positions[..., tf.newaxis]
        if self.v.shape.rank > 1:
            number = tf.range(self.v.shape[0], dtype=tf.int64)
            number = number[:, tf.newaxis, tf.newaxis] + tf.zeros_like(where)
            where = tf.concat([number, where], axis=-1)
        where = tf.reshape(where, [-1, where.shape[-1]])
        state = dgc.ArenaState(self.u if self.config.momentum_masking else None, self.v)
        sent = tf.reshape(used.values, [-1])
        inplace.update(self.device, dgc.keep, state, where, sent)
        self.coverage.record(used.positions[0])

    def clear(self, sent: tf.Tensor | None = None) -> None:
        """Take out of v what went densely: what is marked, shape [P], bool, or all."""
        kept = tf.zeros_like(self.v)
        if sent is not None:
            kept = tf.where(sent, kept, self.v.read_value())
        self.v.assign(kept)

    # State.

    def owned_among(self, variables: Sequence[Any]) -> list[bool]:
        """Tell of each of T tensors whether its state is here, and it is among some."""
        known = {id(variable) for variable in variables}
        return [
            owned and id(tensor) in known
            for owned, tensor in zip(
                self.arenas.owned, self.arenas.tensors, strict=True
            )
        ]

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """The residual and, where momentum is corrected, the velocity."""
        found = {f"residual of {self.unit}": self.v}
        if self.u is not None:
            found[f"velocity of {self.unit}"] = self.u
        if self.unit == "steps":
            found[RATES] = self.arenas.rates
        return found

    def loaded(self, steps: int) -> None:
        """Go on, eagerly, from a state that was loaded, after so many exchanges."""
        self.step.assign(steps)
        self._seen.assign(steps)
        self.arenas.give_back()
