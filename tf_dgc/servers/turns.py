"""Steps that workers take together without a meeting: one of them takes each for all.

Of step t each worker puts its gradient on the servers, and then says that it has
arrived. Once enough have, those that wait draw lots on server 0; who draws the first
one applies the mean to what is trained, and counts the step. Who comes later finds it
counted, and drops its gradient.

Axis: W workers. All variables are on server 0.
"""

import time
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc import values
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers

_LOTS = 2**20  # of a step; each worker draws one at most
_NAP_SECONDS = 0.003
OUTSIDE, INSIDE, LEFT = range(3)  # a worker, since its process began
NOW, READY, OVER, FREE, STUCK = range(5)  # what a worker that waits looks at


class Arrived(NamedTuple):
    """Of whom a step is."""

    workers: tf.Tensor  # shape [K], int64; ascending
    weights: tf.Tensor  # shape [K], float32; of each in the mean, with the sum 1


class Turns:
    """Whose turn it is to apply a step, and of which gradients.

    Attributes:
        own: shape [], int64: the step for which this worker computes a gradient.
    """

    def __init__(
        self, name: str, servers: Servers, members: Members, backup_workers: int
    ) -> None:
        """Make the variables.

        Args:
            name: prefix of theirs.
            servers: of the job.
            members: its workers.
            backup_workers: of how many a step does not wait.
        """
        self._members, self._backups = members, backup_workers
        self._device = servers.devices[0]

        def make(name_of: str, dtype: Any = tf.int64, shape: Any = ()) -> Any:
            return servers.variable(f"{name}.{name_of}", dtype, shape)

        each = [members.workers]
        self._step, self._lots = make("turn"), make("lots")
        # Steps are told by their number plus 1: 0 is none.
        self._arrived = make("turn_arrived", shape=each)
        self._weights = make("turn_weights", tf.float32, each)
        self._appliers = make("turn_appliers", shape=each)
        self._entries = make("turn_entries", shape=each)
        self._places = make("turn_places", shape=each)
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            self.own, self._duty = (
                tf.Variable(
                    tf.constant(value, tf.int64), trainable=False, synchronization=own
                )
                for value in (0, -1)
            )
            self._is_inside = tf.Variable(False, trainable=False, synchronization=own)
        self._entered = 0

    def begin(self) -> None:
        """Give first values: no step is taken."""
        for variable in (self._step, self._lots, self._arrived, self._appliers):
            variable.assign(tf.zeros(variable.shape, tf.int64))
        for variable in (self._entries, self._places):
            variable.assign(tf.zeros(variable.shape, tf.int64))
        self._weights.assign(tf.zeros(self._weights.shape))

    def join(self) -> None:
        """Begin, eagerly, where others may have; what a former process said is void."""
        for variable in (self._appliers, self._places, self._arrived):
            self._members.put(variable, 0)
        self.own.assign(self._step.read_value())

    # Who takes part.

    def enter(self) -> tf.Tensor:
        """Take part, if this worker does not: with all that are there, or will be.

        Returns:
            True: shape [], bool.
        """

        def enter() -> tf.Tensor:
            return tf.numpy_function(self._enter, [], tf.bool, stateful=True)

        inside = self._is_inside.read_value()
        with tf.device("CPU:0"):
            entered = tf.cond(inside, lambda: tf.constant(True), enter)
            self._is_inside.assign(entered)
            return entered

    def _enter(self) -> Any:
        self._entered += 1
        self._members.put(self._places, INSIDE)
        self._members.put(self._entries, self._entered)
        self._members.wait_for_others(
            self._entries, self._entered, "A synchronous step"
        )
        return np.bool_(True)

    @property
    def takes_part(self) -> bool:
        """Whether steps of others wait for this worker's gradient."""
        return bool(self._is_inside)

    def leave(self) -> None:
        """Hold nobody back, eagerly; the next step begins anew."""
        if not self.takes_part:
            return
        self._is_inside.assign(False)
        self._members.put(self._places, LEFT)
        if int(self._duty) >= int(self._step.read_value()):
            self._members.put(self._appliers, 0)
            self._lots.assign(self._duty.read_value() * _LOTS)  # others draw again
        self._duty.assign(-1)

    # A step.

    def is_open(self) -> tf.Tensor:
        """Return whether the step of this worker's gradient is still to be taken.

        Shape [], bool.
        """
        return self._look()[NOW] == self.own.read_value()

    def arrive(self, weight: tf.Tensor) -> None:
        """Say that this worker's gradient is on the servers.

        Args:
            weight: shape [], float32; what it counts in the mean.
        """
        with tf.device(self._device):
            self._members.put(self._weights, weight)
            weights = self._weights.read_value()
        with tf.control_dependencies([weights]), tf.device(self._device):
            self._members.put(self._arrived, self.own.read_value() + 1)

    def _look(self) -> tf.Tensor:
        """Return `NOW`, the step that is to be taken, and what else there is to know.

        Of the step of this worker's gradient: whether enough have arrived; whether
        fewer than that take part; whether no lot is drawn; whether who drew the first
        is dead. Shape [5], int64.
        """
        own = self.own.read_value()
        with tf.device(self._device):
            own = tf.identity(own)
            now, lots = self._step.read_value(), self._lots.read_value()
            living = self._members.living()
            places = self._places.read_value()
            inside = living & (places == INSIDE)
            arrived = self._arrived.read_value() == own + 1
            needed = tf.math.count_nonzero(inside)
            over = tf.constant(False)
            if self._backups:
                known = living & (places != OUTSIDE)
                count = tf.math.count_nonzero(known) - self._backups
                count = tf.maximum(count, 1)
                over, needed = needed < count, count
            applies = living & (self._appliers.read_value() == own + 1)
            found = [
                now,
                tf.math.count_nonzero(arrived) >= needed,
                over,
                lots == own * _LOTS,
                (lots > own * _LOTS) & ~tf.reduce_any(applies) & (now == own),
            ]
            look = tf.stack([tf.cast(each, tf.int64) for each in found])
        with tf.device("CPU:0"):
            return tf.identity(look)

    def wait(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Wait until the step of this worker's gradient is taken, or is to be.

        Returns:
            Whether this worker is to apply it, and whether it never will be, as too few
            take part: each of shape [], bool.

        Raises:
            tf.errors.InvalidArgumentError: the worker that was to apply it is dead.
        """
        own = self.own.read_value()

        def wins(look: tf.Tensor) -> tf.Tensor:
            ready = look[READY] > 0
            drawn = tf.cond(
                ready & (look[FREE] > 0), self._draw, lambda: tf.constant(False)
            )
            return drawn | (ready & (self._duty.read_value() == own))

        def goes_on(look: tf.Tensor, won: tf.Tensor, since: tf.Tensor) -> tf.Tensor:
            return (look[NOW] == own) & (look[OVER] == 0) & ~won

        def sleep(look: tf.Tensor, won: tf.Tensor, since: tf.Tensor) -> list[tf.Tensor]:
            with tf.device("CPU:0"):
                since = tf.where(look[STUCK] > 0, since, tf.timestamp())
                lasts = tf.timestamp() - since < self._members.liveness
                with tf.control_dependencies([values.require(lasts, _torn)]):
                    slept = tf.numpy_function(_nap, [], tf.bool, stateful=True)
            with tf.control_dependencies([slept]):
                look = self._look()
            return [look, wins(look), since]

        with tf.device("CPU:0"):
            look = self._look()
            first = [look, wins(look), tf.timestamp()]
            look, won, _ = tf.while_loop(goes_on, sleep, first, parallel_iterations=1)
            return won, (look[OVER] > 0) & (look[NOW] == own) & ~won

    def _draw(self) -> tf.Tensor:
        """Draw a lot; return whether it is the first of this worker's step."""
        own = self.own.read_value()
        with tf.device(self._device):
            self._members.put(self._appliers, own + 1)
            noted = self._appliers.read_value()
        with tf.control_dependencies([noted]), tf.device(self._device):
            lot = self._lots.take_number()
        with tf.device("CPU:0"):
            lot = tf.identity(lot)
            step, first = lot // _LOTS, lot % _LOTS == 0
            # The first lot of a later step is a duty for when that has come.
            self._duty.assign(tf.where(first, step, self._duty.read_value()))
            applies = tf.where(first, step + 1, tf.zeros([], tf.int64))
        with tf.device(self._device):
            self._members.put(self._appliers, applies)
        return first & (step == own)

    def arrived(self) -> Arrived:
        """Return whose gradients the step is the mean of."""
        own = self.own.read_value()
        with tf.device(self._device):
            found = tf.where(self._arrived.read_value() == tf.identity(own) + 1)[:, 0]
            weights = tf.gather(self._weights.read_value(), found)
            # Rows of one worker alone leave its gradient as it is.
            return Arrived(found, weights / tf.reduce_sum(weights))

    def count(self) -> None:
        """Count the step: all go on."""
        own = self.own.read_value()
        with tf.device(self._device):
            self._lots.assign((own + 1) * _LOTS)
            ready = self._lots.read_value()
        with tf.control_dependencies([ready]), tf.device(self._device):
            self._step.assign(own + 1)

    def follow(self) -> tf.Tensor:
        """Let the next gradient of this worker be for the step that is to be taken.

        Returns:
            Its number: shape [], int64.
        """
        with tf.device(self._device):
            now = tf.identity(self._step.read_value())
        with tf.device("CPU:0"):
            self.own.assign(now)
            return self.own.read_value()


def _nap() -> Any:
    time.sleep(_NAP_SECONDS)
    return np.bool_(True)


def _torn() -> list[Any]:
    return [
        "A worker has died while it applied a step for all: what the servers hold may "
        "be a part of it. All workers stop. Start the job again: with "
        "tf_dgc.callbacks.BackupState it continues from its last backup"
    ]
