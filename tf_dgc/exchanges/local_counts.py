"""Counts of local steps on several workers, which averaging on servers goes on from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.exchanges.handover import Handover
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.moved import JobServers
from tf_dgc.exchanges.outer_on_servers import OuterOnServers
from tf_dgc.exchanges.rates import Rate
from tf_dgc.exchanges.step_counts import FirstStep
from tf_dgc.servers import chief_records


class LocalOptimizer(NamedTuple):
    """Record of an optimizer of local steps, before its first one."""

    outer: OuterOnServers  # the exchange of its outer optimizer
    step: Callable[[list[tf.Tensor]], None]  # takes the outer optimizer's step
    steps: tf.Variable  # counts local steps
    per_step: int  # by how much one counts there
    slots: Sequence[tf.Variable]  # what else the optimizer keeps of its training
    rate: Any  # variable of the learning rate; None where it is computed
    settings: Mapping[str, Any]  # of the optimizer, which all must have alike


class CommonCount:
    """Local steps of the worker that has most, and the chief's rate, on the servers.

    Attributes:
        rate: of the optimizer.
        handover: of what else it keeps.
    """

    def __init__(self, name: str, make: JobServers, local: LocalOptimizer) -> None:
        """Make the variables; let the chief give first values.

        Args:
            name: prefix of their names.
            make: of exchanges in the job.
            local: the optimizer.

        Raises:
            ValueError: the chief's optimizer has other settings.
            TimeoutError: the chief did not come.
        """
        servers, members = make.servers, make.members
        self._own, self._per_step = local.steps, local.per_step
        self._succession = members.succession
        self._steps = servers.variable(f"{name}.local_steps", tf.int64)
        self._first = FirstStep(name, servers, members)
        with tf.init_scope(), tf.device("CPU:0"):
            self._base = own_variable(tf.zeros([], tf.int64), "round_first")
        self.rate = Rate(name, servers, members, local.rate)
        self.handover = Handover(name, servers, members, make.totals, local.slots)
        settings = dict(local.settings)

        def begin() -> None:
            self._steps.assign(self._applied())
            self._first.begin()
            self.rate.begin()
            self.handover.begin()

        variable = servers.variable(f"{name}.record", tf.string)
        there = members.records.share(
            "optimizer", variable, {"settings": settings}, begin
        )
        index = members.index
        chief_records.compare("optimizers", there["settings"], settings, index)
        self.rate.join()
        self._first.join()
        self._base.assign(self._applied())

    def _now(self, uncounted: Any = 0) -> tf.Tensor:
        with tf.device("CPU:0"):
            return tf.cast(self._own.read_value(), tf.int64) + uncounted

    def _applied(self, uncounted: Any = 0) -> tf.Tensor:
        """Return the steps whose gradients have been applied, and not added up only."""
        now = self._now(uncounted)
        return now - now % self._per_step

    def tell(self, uncounted: Any) -> None:
        """Let the others know how many steps this worker has taken.

        Args:
            uncounted: steps that the optimizer has not counted yet.
        """
        steps = self._applied(uncounted) - self._first.now.read_value()
        self._steps.assign(tf.maximum(self._steps.read_value(), steps))

    @property
    def missed(self) -> int:
        """Number of steps that others took, if this worker goes on, and took none."""
        if int(self._own) or self._succession.passes:
            return 0
        return int(self._steps.read_value())

    def heed(self, taken: tf.Tensor, uncounted: Any = 0) -> None:
        """Take note of what a script has assigned to the optimizer's counter.

        Args:
            taken: local steps since the last `take`, shape [], int64.
            uncounted: steps that the optimizer has not counted yet.
        """
        ahead = self._now(uncounted) - self._base.read_value() - taken * self._per_step
        added_up = (ahead >= 0) & (ahead < self._per_step)
        self._first.add(tf.where(added_up, tf.zeros([], tf.int64), ahead))

    def take(self, uncounted: Any) -> None:
        """Go on from the steps of all, and with the chief's rate."""
        self.rate.take()
        self._first.meet()
        own = self._own
        newest = self._steps.read_value() + self._first.now.read_value() - uncounted
        own.assign(tf.maximum(own.read_value(), tf.cast(newest, own.dtype)))
        self._base.assign(self._applied(uncounted))
