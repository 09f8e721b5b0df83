"""Steps that all workers take together, on servers: see `together.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.exchanges.base import TakenOver, Update
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.served import Served
from tf_dgc.exchanges.server_traffic import cost, traffic
from tf_dgc.exchanges.together import Pieces, Together


class ServedTogether(Served):
    """Exchange whose steps are by the gradients of all workers."""

    _together: Together  # gradients, on the servers
    _part: Part | None = None  # what this worker's gradients count

    def _place_beside(self) -> None:
        self._together = self._meet()
        self.turns = self._together.turns

    def _meet(self) -> Together:
        """Return where gradients meet."""
        job = self._job
        twins: Any = [job.twins.of(variable) for variable in self.variables]
        args = self.name, job.servers, job.members, twins, self.config.backup_workers
        return Together(*args)

    def _begin(self) -> None:
        super()._begin()
        self._together.begin()

    def _join(self) -> None:
        self._together.turns.join()
        super()._join()

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return this worker's gradients, which are to be pushed."""
        local = [tf.convert_to_tensor(gradient) for gradient in local]
        self._local, self._part = local, part
        return Update(local, [False] * len(local), None, traffic(cost(local)))

    def push(self, update: Callable[..., None]) -> None:
        """Give this worker's gradients, and take the step if that is its turn."""

        def apply(means: list[Pieces]) -> None:
            update(tf.ones([]), means)
            self._moved.common.give()
            self.version.assign_add(1)

        part = self._part
        counts = (tf.ones([]), 1) if part is None else (part.weight, part.whole)
        with tf.control_dependencies(self.rate.tell()):
            in_time, over = self._together.push(list(self._local), apply, *counts)
            with tf.device("CPU:0"):
                told = tf.cond(
                    over,
                    lambda: tf.numpy_function(self._end, [], tf.bool, stateful=True),
                    lambda: tf.constant(False),
                )
                pushes = tf.cast(in_time, tf.int64)
                sent = pushes * cost(self._local)[0]
                with tf.control_dependencies([told]):
                    totals = self._job.totals
                    totals.add(pushes=pushes, sent=sent, dropped=1 - pushes)

    def _end(self) -> Any:
        self._job.last()
        return np.bool_(True)

    def _pull(self) -> tf.Tensor:
        received = super()._pull()
        self._moved.common.take()
        return received

    def _before_fetch(self) -> list[tf.Tensor]:
        """Follow the steps of the others."""
        return [self._together.turns.follow()]
