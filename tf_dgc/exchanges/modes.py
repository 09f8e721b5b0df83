"""Modes of accumulation: what of a step v takes in, and where the sum of all goes.

Axes: P arena elements, W of N workers in this process: one, but in a simulation.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import tensorflow as tf

from tf_dgc.compression import arena, dgc
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import applied
from tf_dgc.exchanges.applied import Target, Total, Weights
from tf_dgc.exchanges.base import LocalStep, TakenOver, momentum_in, take_velocity
from tf_dgc.exchanges.local_steps import LocalSteps
from tf_dgc.exchanges.residual import Keeping, Passing, Residual
from tf_dgc.transports.sums import Sparse, Wire


class Combining(NamedTuple):
    """Combination of what N workers send, and what is left of the rest.

    Attributes:
        senders: whether an element becomes N times the mean over those that sent it, in
            the place of the sum.
        decay: of the residual, before a step adds to it; 1 keeps all.
    """

    senders: bool = False
    decay: float = 1.0


SUM = Combining()


class Contribution(NamedTuple):
    """Of a worker to a step; of each worker, the first axis is W."""

    gradient: tf.Tensor  # of the arena, shape [P]
    scale: tf.Tensor  # that clips it, shape []
    factor: tf.Tensor  # of the clipped one in the sum, shape []; may be one for all W
    small: list[Any]  # gradients of the small tensors, summed; one for all W
    whole: int  # of the clipped one in the mean over this worker's rows
    taken_over: TakenOver | None  # from the optimizer, in this step


class Gain(NamedTuple):
    """Part of a contribution that v takes in; arguments of `Residual.add`."""

    gradient: tf.Tensor  # shape [P]
    momentum: dgc.Momentum | None
    scale: tf.Tensor  # of the gradient, shape []


class Mode(abc.ABC):
    """Adds a worker's contribution to v, and applies what all workers sent.

    Attributes:
        is_step: whether what is summed is a step of the optimizer, not a gradient.
        takes_small: whether the small tensors take their step as well.
        target: where sums of messages go.
        decay: of the residual, before a step adds to it; 1 keeps all.
    """

    is_step: bool
    takes_small = False
    target: Target
    decay = 1.0

    @abc.abstractmethod
    def gain(self, share: Contribution) -> Gain:
        """Return what v takes in, where not everything will be sent."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Apply what the target has taken and not applied by itself."""

    @abc.abstractmethod
    def add(self, share: Contribution, whole: bool) -> Keeping:
        """Take in a contribution; return what is to be summed.

        Args:
            share: of each worker in this process.
            whole: whether everything will be sent.
        """

    @abc.abstractmethod
    def apply(
        self,
        share: Contribution,
        total: Sparse | tf.Tensor,
        slots: Sequence[int],
        stage: tf.Tensor | None,
    ) -> None:
        """Apply what all workers sent.

        Args:
            share: as in `add`.
            total: see `sums.Exchanged`.
            slots: K at each of some stages.
            stage: the number of the present one, shape [], int32; None of one.
        """

    @abc.abstractmethod
    def gradients(self) -> list[Any]:
        """Return what the optimizer is to apply to each large tensor, or None."""


class Gradients(Mode):
    """Gradients are accumulated, or the steps of SGD along them."""

    def __init__(
        self, residual: Residual, target: Target, is_step: bool, decay: float = 1.0
    ) -> None:
        """Take the state, where sums go, whether they are steps of SGD, and a decay."""
        self._residual, self.target, self.is_step = residual, target, is_step
        self.decay = decay

    def gain(self, share: Contribution) -> Gain:
        """Return the gradient; with momentum, where that is taken over."""
        momentum = momentum_in(share.taken_over)
        return Gain(share.gradient, momentum, share.scale * share.factor)

    def add(self, share: Contribution, whole: bool) -> Keeping:
        """Add the gradient to v."""
        if self.decay < 1:
            self._residual.decay(self.decay)
        self._residual.add(*self.gain(share))
        return self._residual

    def apply(
        self,
        share: Contribution,
        total: Sparse | tf.Tensor,
        slots: Sequence[int],
        stage: tf.Tensor | None,
    ) -> None:
        """Let the target take it."""
        if isinstance(total, Sparse):
            self.target.take_sparse(total, slots, stage)
        else:
            self.target.take_dense(total)

    def settle(self) -> None:
        """Leave it to the optimizer."""

    def gradients(self) -> list[Any]:
        """Return the sums that are still to be applied."""
        return self.target.parts()


class OwnSteps(Mode):
    """The optimizer's steps along this worker's gradients are accumulated.

    Where all is sent, the step is along the gradient of all.
    """

    is_step = takes_small = True

    def __init__(
        self,
        residual: Residual,
        target: Target,
        steps: LocalSteps,
        large: Sequence[tf.Variable],
    ) -> None:
        """Take the state, where sums go, the steps, and the large variables."""
        self._residual, self.target = residual, target
        self.steps, self._large = steps, large

    def gain(self, share: Contribution) -> Gain:
        """Take a step; return it."""
        own = (share.whole * share.scale)[..., tf.newaxis] * share.gradient
        step = cast(LocalStep, share.taken_over)
        taken = self.steps.along_own(step, own, share.small)
        return Gain(taken, None, share.factor / share.whole)

    def add(self, share: Contribution, whole: bool) -> Keeping:
        """Take a step; add it to v."""
        if whole:
            own = (share.scale * share.factor)[..., tf.newaxis] * share.gradient
            return Passing(own, self._residual.coverage)
        self._residual.add(*self.gain(share))
        return self._residual

    def apply(
        self,
        share: Contribution,
        total: Sparse | tf.Tensor,
        slots: Sequence[int],
        stage: tf.Tensor | None,
    ) -> None:
        """Subtract steps; take the step along a gradient."""
        if not isinstance(total, Sparse):
            step = cast(LocalStep, share.taken_over)
            self.steps.along(step, total, share.small)
            return
        self.target.take_sparse(total, slots, stage)
        self.settle()

    def settle(self) -> None:
        """Subtract what the target only adds up."""
        for variable, part in zip(self._large, self.target.parts(), strict=True):
            if part is not None:
                applied.subtract_all([variable], [part])

    def gradients(self) -> list[Any]:
        """Return None of each: all is in the variables."""
        return [None] * len(self._large)


def accumulated(
    config: DGCConfig, taken_over: TakenOver | None, any_large: bool
) -> TakenOver | None:
    """Return what is taken over; None where gradients are accumulated."""
    if not config.momentum_correction:
        return None
    if isinstance(taken_over, LocalStep):
        return taken_over if any_large and taken_over.accumulates() else None
    return taken_over


def opened(
    wire: Wire,
    variables: Sequence[tf.Variable],
    large: Sequence[int],
    taken: TakenOver | None,
    earlier: Sequence[tuple[Residual, Mode]],
    combining: Combining,
    figures_on: str = "CPU:0",
) -> tuple[Residual, Mode]:
    """Return the state of an exchange, with the momentum so far, and its mode.

    Args:
        wire: of the exchange.
        variables: of the optimizer, in this exchange.
        large: the indices of those in the arena.
        taken: what `accumulated` returned.
        earlier: those of the same optimizer that were opened before.
        combining: of what is sent; by default only where gradients are accumulated.
        figures_on: see `Residual`.
    """
    residuals = [r for r, _ in earlier]
    residual = _residual_of(wire, variables, large, taken, residuals, figures_on)
    if combining != SUM:
        target = Total(wire.layout, wire.transport.device, combining.senders)
        return residual, Gradients(residual, target, False, combining.decay)
    others = [mode for _, mode in earlier]
    return residual, _mode_of(wire, residual, variables, large, taken, others)


def _residual_of(
    wire: Wire,
    variables: Sequence[tf.Variable],
    large: Sequence[int],
    taken: TakenOver | None,
    earlier: Sequence[Residual],
    figures_on: str,
) -> Residual:
    momentum, device = momentum_in(taken), wire.transport.device
    found = Residual(
        wire.layout,
        [variables[i] for i in large],
        wire.config,
        device,
        momentum=momentum,
        unit="gradients" if taken is None else "steps",
        axis=wire.workers.axis,
        earlier=earlier,
        figures_on=figures_on,
    )
    if momentum is not None and found.u is not None:
        with tf.init_scope(), tf.device(device):
            if (begun := take_velocity(momentum, large)) is not None:
                # Each worker has its share of it.
                own = arena.flatten(wire.layout, begun) / wire.transport.size
                found.u.assign(tf.broadcast_to(own, found.u.shape))
    return found


def _mode_of(
    wire: Wire,
    residual: Residual,
    variables: Sequence[tf.Variable],
    large: Sequence[int],
    taken: TakenOver | None,
    earlier: Sequence[Mode],
) -> Mode:
    tensors, is_step = [variables[i] for i in large], taken is not None
    target: Target = Weights(wire.layout, tensors)
    if not is_step or any(v.dtype != tf.float32 for v in tensors):
        target = Total(wire.layout, wire.transport.device)
    if not isinstance(taken, LocalStep):
        return Gradients(residual, target, is_step)
    others = [mode.steps for mode in earlier if isinstance(mode, OwnSteps)]
    place = wire.layout, variables, large
    steps = LocalSteps(*place, taken, wire.workers, others)
    return OwnSteps(residual, target, steps, tensors)


def describe(taken: TakenOver | None) -> str:
    """Return what must be alike on all workers, given what `accumulated` returned."""
    if isinstance(taken, dgc.Momentum):
        return f"momentum={taken.factor}, nesterov={taken.nesterov}"
    return "gradients" if taken is None else "steps of the optimizer"


def refuse_late(residual: Residual, taken_over: TakenOver | None) -> None:
    """Raise ValueError where momentum comes for which there is no velocity."""
    momentum = momentum_in(taken_over)
    if momentum is not None and momentum.factor and residual.u is None:
        raise ValueError(
            "The momentum of an optimizer must not be 0 at first and then change. "
            f"Received: momentum={momentum.factor}"
        )
