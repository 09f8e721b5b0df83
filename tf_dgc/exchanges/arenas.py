"""Arenas of the state of Deep Gradient Compression, which exchanges lend each other.

Where an optimizer trains now these variables, now others, the state of a variable lies
with the first set that had it. The others borrow it for the time of a step, and hold
zeros in its place in between.

Axes: P arena elements, T tensors in the arena.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.compression import arena, dgc
from tf_dgc.compression.arena import Layout
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.inplace import own_variable


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

    def owned_among(self, variables: Sequence[Any]) -> list[bool]:
        """Tell of each of T tensors whether its state is here, and it is among some."""
        known = {id(variable) for variable in variables}
        return [
            owned and id(tensor) in known
            for owned, tensor in zip(self.owned, self.tensors, strict=True)
        ]

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

    def fallen(self, rate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what the learning rate of a step leaves of v; it is the last from now.

        Args:
            rate: shape [].

        Returns:
            A factor of each tensor, shape [T]; and whether all of them are 1, shape [],
            bool.
        """
        with tf.device("CPU:0"):  # which chooses what is done
            last = self.rates.read_value()
            factors = dgc.fall(rate, last)
            stays = tf.reduce_all(factors >= 1.0)
            last = tf.where(rate > 0, rate, last)
        with tf.device(self.rates.device):
            self.rates.assign(last, read_value=False)
        return factors, stays


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
