"""Gradients of the steps between rounds: of a worker, of its site, or of all."""

from typing import Any

import tensorflow as tf

from tf_dgc import values
from tf_dgc.exchanges.at_site import AtSite
from tf_dgc.exchanges.base import Place, TakenOver, Update
from tf_dgc.exchanges.dense import Dense
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.progress import PeriodProgress
from tf_dgc.transports import sums


class PeriodSteps:
    """Gradients of steps, of which the first ones are of all workers."""

    def __init__(
        self, place: Place, site: AtSite, progress: PeriodProgress, first: int
    ) -> None:
        """Take who computes gradients.

        Args:
            place: whose parameters.
            site: of this worker; empty where steps are a worker's own.
            progress: of this worker.
            first: number of steps of all workers, before local ones.
        """
        self._together = Dense(place._replace(transport=place.transport.everybody))
        self._place = place
        self._site, self._progress, self._first = site, progress, first

    def gradients(
        self, local: list[Any], taken_over: TakenOver | None, part: Part | None
    ) -> Update:
        """Return the gradients of a step; count what this worker has of it."""
        if part is not None:
            self._progress.notes.note(part, self._progress.position)
        first = self._first
        weight = tf.ones([]) if part is None else part.weight
        finished = [False] * len(local)

        def own() -> tuple[list[Any], tf.Tensor, Any]:
            if self._site:
                found = self._site.gradients(local, taken_over, part)
                finished[:] = found.finished
                return found.gradients, sums.no_traffic(), found.weight
            whole = self._place.transport.size if part is None else part.whole
            return [values.scaled(g, whole) for g in local], sums.no_traffic(), weight

        def together() -> tuple[list[Any], tf.Tensor, Any]:
            found = self._together.gradients(local, None, part)
            return found.gradients, found.traffic, weight

        with tf.device("CPU:0"):
            early = self._progress.taken < first
        gradients, traffic, moving = tf.cond(early, together, own) if first else own()
        self._progress.moves(weight > 0, early, moving)
        applies = None if part is None else early | (moving > 0)
        return Update(gradients, finished, applies, traffic)
