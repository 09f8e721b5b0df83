"""The state of Deep Gradient Compression: what a worker has accumulated and not sent.

u and v of `compression/dgc.py` belong to variables. Each set of variables that an
optimizer trains together has a `Residual`; what several sets have in common they lend
each other, see `arenas.py`. The sum of all is so what all variables have.

Axes: P arena elements, T tensors in the arena, K message slots, N workers, W of them in
this process: one, but in a simulation.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.compression import arena, dgc, selection
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.arenas import Arenas
from tf_dgc.exchanges.figures import Coverage
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports.sums import Kept, Sparse
from tf_dgc.values import unless

RATES = "learning rate"  # name of what is saved of them
OWNED = "residual at owners"  # and of what these have not passed on: `SparseSum.whole`


def bare(momentum: dgc.Momentum | None) -> dgc.Momentum | None:
    """Return momentum as a compiled function takes it: its rate a tensor, no slots."""
    if momentum is None:
        return None
    rate = tf.cast(momentum.learning_rate, tf.float32)
    return momentum._replace(learning_rate=rate, slots=())


def _kept_and_marked(
    held: tuple[dgc.ArenaState, tf.Tensor],
    where: tf.Tensor,
    sent: tf.Tensor,
    positions: tf.Tensor,
) -> tuple[dgc.ArenaState, tf.Tensor]:
    """Take what was sent out of u and v, and mark its positions."""
    state, marks = held
    return dgc.keep(state, where, sent), selection.mark(marks, positions)


def _indices(positions: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Return where v of a shape has positions of the arena: [W * K, rank], int64."""
    where = positions[..., tf.newaxis]
    if shape.rank > 1:
        number = tf.range(shape[0], dtype=tf.int64)
        number = number[:, tf.newaxis, tf.newaxis] + tf.zeros_like(where)
        where = tf.concat([number, where], axis=-1)
    return tf.reshape(where, [-1, where.shape[-1]])


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


class StepCount:
    """Number of exchanges done by all that share tensors.

    A step ends where the same tensors come for the second time; those of others, with
    which they share some, are of the same step.

    Attributes:
        done: shape [], int64.
    """

    def __init__(self, shared: "StepCount | None") -> None:
        """Create the variables, outside of any graph.

        Args:
            shared: count of another set of tensors, which is of the same steps.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            none = tf.zeros([], tf.int64)
            done = own_variable(none, "dgc_step") if shared is None else shared.done
            self.done: tf.Variable = done
            self.seen = own_variable(none, "dgc_seen_step")  # by these tensors

    def present(self) -> tf.Tensor:
        """Return the number of the step that has begun, shape [], int64."""
        with tf.device("CPU:0"):
            return self.done.read_value() - 1 + self._comes_again()

    def add(self) -> None:
        """End a step."""
        with tf.device("CPU:0"):
            done = self.done.assign_add(self._comes_again())
            self.seen.assign(done)

    def _comes_again(self) -> tf.Tensor:
        return tf.cast(self.seen.read_value() == self.done.read_value(), tf.int64)

    def loaded(self, steps: int) -> None:
        """Go on, eagerly, after so many exchanges."""
        self.done.assign(steps)
        self.seen.assign(steps)


class Residual(Keeping):
    """u and v of the tensors of one arena, and how far their training has come.

    Attributes:
        layout: of the arena.
        unit: what v is a sum of, "steps" or "gradients".
        u: velocity, shape [*axis, P], float32; None where no momentum is corrected.
        v: residual, of the same shape.
        device: where they are.
        count: of exchanges.
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
        clocks: list[StepCount] = [o.count for o in alike if o.arenas in lenders]
        self.count: StepCount = StepCount(clocks[0] if clocks else None)
        self.step: tf.Variable = self.count.done
        self.coverage = Coverage(layout, device, figures_on)

    def fall(
        self, rate: tf.Tensor, others: Sequence[Callable[[tf.Tensor], None]] = ()
    ) -> None:
        """Let v fall with the learning rate, shape []; it is the last from now on.

        Args:
            rate: of this step.
            others: scale what waits elsewhere, by numbers of the elements, shape [P].
        """
        fallen, stays = self.arenas.fallen(rate)

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
        where = _indices(used.positions, self.v.shape)
        state = dgc.ArenaState(self.u if self.config.momentum_masking else None, self.v)
        sent = tf.reshape(used.values, [-1])
        own = used.positions[0]
        held = state, self.coverage.sent
        inplace.update(self.device, _kept_and_marked, held, where, sent, own)
        self.coverage.record(own)

    def clear(self, sent: tf.Tensor | None = None) -> None:
        """Take out of v what went densely: what is marked, shape [P], bool, or all."""
        kept = tf.zeros_like(self.v)
        if sent is not None:
            kept = tf.where(sent, kept, self.v.read_value())
        self.v.assign(kept)

    # State.

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
        self.count.loaded(steps)
        self.arenas.give_back()
