"""Counts of steps that several workers push, and what an optimizer makes of them.

    iterations = steps that the servers count + first step

A script may assign `optimizer.iterations`, as `load_weights` does of a file with the
optimizer's state, or to begin a schedule once more. What the servers count goes on, and
the first step changes: of the worker at once, for all where the chief has done it.
"""

from typing import Any

import tensorflow as tf

from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers


class FirstStep:
    """Step of an optimizer before those that the servers count.

    Attributes:
        now: shape [], int64; of this worker.
    """

    def __init__(self, name: str, servers: Servers, members: Members) -> None:
        """Make the variables.

        Args:
            name: prefix of their names.
            servers: of the job.
            members: its workers.
        """
        self._members = members
        self._shared = servers.variable(f"{name}.first_step", tf.int64)
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.zeros([], tf.int64)
            self.now, self._told = (own_variable(zero, "first_step") for _ in range(2))

    def begin(self) -> None:
        """Give the first value; the chief does."""
        self._shared.assign(tf.zeros([], tf.int64))

    def join(self) -> None:
        """Take over, eagerly, what there is."""
        for variable in (self.now, self._told):
            variable.assign(self._shared.read_value())

    def add(self, steps: tf.Tensor) -> None:
        """Note by how many steps a script has set the counter on, or back."""
        with tf.device("CPU:0"):
            self.now.assign_add(steps)

    def meet(self) -> None:
        """Tell the others of the chief's; take the chief's where that has changed."""
        with tf.device(self._shared.device):
            told = self._shared.read_value()
        with tf.device("CPU:0"):
            told, now = tf.identity(told), self.now.read_value()
            if self._members.is_chief:
                counts = self._members.succession.counts_now.read_value()
                now = tf.where(counts, now, told)
                changed = now != told
                tf.cond(changed, lambda: self._tell(now), lambda: None)
            else:
                now = tf.where(told != self._told, told, now)
            self.now.assign(now)
            self._told.assign(told)

    def _tell(self, now: tf.Tensor) -> None:
        self._shared.assign(now)


class PushCount:
    """Count of an optimizer's steps that follows the pushes of all workers."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        members: Members,
        steps: tf.Variable,
        per_push: int,
    ) -> None:
        """Make the variables.

        Args:
            name: prefix of their names.
            servers: of the job.
            members: its workers.
            steps: the optimizer's counter.
            per_push: by how much a push counts there.
        """
        self._steps, self._per_push = steps, per_push
        self.first = FirstStep(name, servers, members)
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.zeros([], tf.int64)
            self._counted = own_variable(zero, "downpour_counted")

    @property
    def pushes(self) -> Any:
        """Pushes that the optimizer's own steps so far are of: shape [], int64."""
        return tf.cast(self._steps, tf.int64) // self._per_push

    def join(self, known: tf.Tensor) -> None:
        """Begin, eagerly, at what the servers have counted."""
        self.first.join()
        own = tf.cast(self._steps.read_value(), tf.int64)
        self._set(known, own % self._per_push)

    def follow(self, known: tf.Tensor) -> None:
        """Follow the pushes in a step, which the optimizer itself counts later.

        Args:
            known: pushes so far, shape [], int64.
        """
        with tf.device("CPU:0"):
            self.first.add(self._ahead() - (self._per_push - 1))
            self._set(known, -1)

    def settle(self, known: tf.Tensor) -> None:
        """Follow the pushes, eagerly, outside of steps; meet the chief's first step."""
        with tf.device("CPU:0"):
            ahead = self._ahead()
            added_up = (ahead >= 0) & (ahead < self._per_push)
            own = tf.where(added_up, ahead, 0)
            self.first.add(ahead - own)
            self.first.meet()
            self._set(known, own)

    def _ahead(self) -> Any:
        return tf.cast(self._steps.read_value(), tf.int64) - self._counted.read_value()

    def _set(self, known: tf.Tensor, own: Any) -> None:
        counted = known * self._per_push + self.first.now.read_value()
        self._counted.assign(counted)
        self._steps.assign(tf.cast(counted + own, self._steps.dtype))
