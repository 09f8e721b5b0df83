"""Small tensors of a step, summed densely; with them all learn whether it counts.

Axis: N workers.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.exchanges import local_gradients
from tf_dgc.exchanges.base import TakenOver
from tf_dgc.exchanges.local_gradients import Clipping
from tf_dgc.exchanges.modes import Contribution
from tf_dgc.exchanges.parts import Part, weighed_sum
from tf_dgc.transports.sums import Wire


class FirstMeeting(NamedTuple):
    """Outcome of the first meeting of workers in a step."""

    share: Contribution  # of this worker, with the sums of the small tensors
    ok: tf.Tensor  # shape [], bool: whether the step counts
    traffic: tf.Tensor  # as of `sums.traffic_of`
    weight: tf.Tensor | None  # of all workers, as in `Update`


class SmallTensors:
    """Clips the gradients of a step, and sums those of the small tensors."""

    def __init__(
        self, wire: Wire, variables: Sequence[Any], fronts: Sequence[Clipping]
    ) -> None:
        """Take who meets, of which variables, and who clips.

        Args:
            wire: of the exchange.
            variables: all, large and small.
            fronts: of which the first that takes gradients clips them.
        """
        self._wire, self._fronts = wire, fronts
        self._names = [*(v.name for v in variables), "the learning rate"]

    def meet(
        self,
        local: list[Any],
        taken_over: TakenOver | None,
        part: Part | None,
        step: tf.Variable,
    ) -> FirstMeeting:
        """Sum the small tensors, and tell all whether the step counts.

        Args:
            local: gradients of all variables.
            taken_over: what the optimizer leaves to the exchange.
            part: what they count; None where those of all workers count alike.
            step: number of exchanges done, for errors.
        """
        transport, workers, _, config, name = self._wire
        whole = transport.size if part is None else part.whole
        front = next(each for each in self._fronts if each.takes(local))
        clip = functools.partial(
            front.clipped,
            rate=[] if taken_over is None else [taken_over.learning_rate],
            clip_norm=config.clip_norm,
            workers=transport.size,
            whole=whole,
        )
        gradient, small, nonfinite, scale = workers.each(clip, local)
        factors = workers.factors()
        if factors is not None:
            small = workers.each(_all_scaled, small, factors)
        seats = workers.seats(transport.size)
        args = transport, small, name, seats, nonfinite, part
        told = weighed_sum(*args, repeats=False)
        ok = local_gradients.all_finite(told.nonfinite, config, step, self._names)
        factor = told.factor if factors is None else factors
        summed = front.small(told.gradients)
        share = Contribution(gradient, scale, factor, summed, whole, taken_over)
        return FirstMeeting(share, ok, told.traffic, told.weight)


def _all_scaled(gradients: list[Any], factor: tf.Tensor) -> list[Any]:
    return [values.scaled(gradient, factor) for gradient in gradients]
