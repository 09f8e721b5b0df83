"""Steps that workers take together without a meeting: one of them takes each for all.

Of step t each worker puts its gradient on the servers, and then says that it has
arrived. Once enough have, those that wait draw lots on server 0; who draws the first
one applies the mean to what is trained, and counts the step. Who comes later finds it
counted, and drops its gradient.

Who stops a round ends it for all after the same step: where a callback of one worker
ends `fit`, the others end theirs.

By a `Rule` a step waits for a quorum, or for a time after its first gradient, and what
comes later counts in the next one: a worker learns by a mark whether its own was in the
step. Nobody is stopped then. Who applies a step has kept a copy of all that it changes;
should it die, the first of those that wait begins once more, from there. Should it wake
after that, a fence keeps it from writing; if it has written, all stop.

Workers that train at the same time do so in a round: by its number those that are in
another `fit`, or wait for the next one, hold nobody back. It is not counted by visits:
who has taken another's place, or was not heard of for a time, is in that of the others.

Axis: W workers. All variables are on server 0.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import _host, values
from tf_dgc.servers.arrivals import Arrivals
from tf_dgc.servers.attendance import COMES, INSIDE, OUTSIDE, Attendance
from tf_dgc.servers.members import Members
from tf_dgc.servers.quorum import Fence, Quorum, Rule
from tf_dgc.servers.shared import Servers

_LOTS = 2**20  # of a step; each worker draws one at most
# What a worker that waits looks at.
NOW, READY, OVER, FREE, STUCK, ROUND, HEIR = range(7)


class Lots:
    """Lots that workers draw: who draws the first one of a step applies it.

    Attributes:
        drawn: shape [], int64: how many were drawn, in steps of `_LOTS`.
        appliers: shape [W], int64: the step that a worker applies, plus 1.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        members: Members,
        fence: Fence | None,
        device: str,
    ) -> None:
        """Make the variables.

        Args:
            make: takes name, type and shape of a variable on server 0.
            members: of the job.
            fence: if an applier is replaced, else None.
            device: of server 0.
        """
        self.drawn = make("lots")
        self.appliers = make("appliers", shape=[members.workers])
        self._members, self._fence, self._device = members, fence, device

    def begin(self, step: tf.Tensor) -> tf.Tensor:
        """Begin the lots of a step."""
        self.drawn.assign(step * _LOTS)
        return self.drawn.read_value()

    def draw(self, own: tf.Tensor) -> tf.Tensor:
        """Draw a lot; return whether it is the first of this worker's step.

        Args:
            own: the number of the step.
        """
        with tf.device(self._device):
            self._members.put(self.appliers, own + 1)
            noted = [self.appliers.read_value()]
        if self._fence is not None:
            noted.append(self._fence.note())
        with tf.control_dependencies(noted), tf.device(self._device):
            lot = _host.shared.take_number(self.drawn)
        with tf.device("CPU:0"):
            lot = tf.identity(lot)
            step, first = lot // _LOTS, lot % _LOTS == 0
            wins = first & (step == own)
            applies = tf.where(wins, own + 1, tf.zeros([], tf.int64))
        with tf.device(self._device):
            self._members.put(self.appliers, applies)
        # The first lot of a later step is given back: others draw again.
        later = first & (step != own)
        tf.cond(later, lambda: self._give_back(step), lambda: None)
        return wins

    def _give_back(self, step: tf.Tensor) -> None:
        with tf.device(self._device):
            self.drawn.assign(step * _LOTS)


class Turns:
    """Election of the worker that applies a step, and of the gradients in it.

    Attributes:
        own: shape [], int64: the step for which this worker computes a gradient.
        attendance: of workers in rounds.
        arrivals: of their gradients.
        quorum: that makes a step; None where what comes late is dropped.
    """

    def __init__(
        self,
        name: str,
        servers: Servers,
        members: Members,
        backup_workers: int,
        rule: Rule | None = None,
    ) -> None:
        """Make the variables.

        Args:
            name: prefix of theirs.
            servers: of the job.
            members: its workers.
            backup_workers: of how many a step does not wait.
            rule: of steps in which nothing is dropped.
        """
        self._members, self._backups = members, backup_workers
        self._device = servers.devices[0]

        def make(name_of: str, dtype: Any = tf.int64, shape: Any = ()) -> Any:
            return servers.variable(f"{name}.turn_{name_of}", dtype, shape)

        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.constant(0, tf.int64)
            self.own = tf.Variable(zero, trainable=False, synchronization=own)
        self._step = make("step")
        own_make = functools.partial(make, shape=[members.workers])
        self.attendance = Attendance(own_make, members, rule)
        place = make, members, self._device
        self.quorum = None if rule is None else Quorum(rule, *place)
        parties = members, self.attendance, self.quorum
        self.arrivals = Arrivals(make, *parties, self.own, self._device)
        fence = None if self.quorum is None else self.quorum.fence
        self._lots = Lots(make, members, fence, self._device)

    def begin(self) -> None:
        """Give first values: no step is taken."""
        lots = self._lots.drawn, self._lots.appliers
        for variable in (self._step, *lots):
            variable.assign(tf.zeros(variable.shape, tf.int64))
        self.attendance.begin()
        self.arrivals.begin()
        if self.quorum is not None:
            self.quorum.begin()

    def join(self) -> None:
        """Begin, eagerly, where others may have; what a former process said is void."""
        self._members.put(self._lots.appliers, 0)
        self.arrivals.withdraw()
        self.attendance.join()
        self.own.assign(self._step.read_value())

    # A step.

    def is_open(self) -> tf.Tensor:
        """Tell whether this worker's step is still to be taken: shape [], bool."""
        look = self.look()
        with tf.device("CPU:0"):
            followed = self.attendance.follow(look[ROUND])
            with tf.control_dependencies([followed]):
                return look[NOW] == self.own.read_value()

    def look(self) -> tf.Tensor:
        """Return `NOW`, the step that is to be taken, and what else there is to know.

        Of the step of this worker's gradient: whether enough have arrived; whether
        fewer than that take part, or one has stopped; whether no lot is drawn; whether
        who drew the first is dead; the round that this worker is in, or has missed; and
        who is to apply it in the place of one that is dead. Shape [7], int64.
        """
        own, own_round = self.own.read_value(), self.attendance.round.read_value()
        whole = [] if self.quorum is None else [self.quorum.fence.require_whole(_torn)]
        with tf.device(self._device):
            own, own_round = tf.identity(own), tf.identity(own_round)
            lots = self._lots.drawn.read_value()
            living = self.attendance.holders.living()
            rounds, places, own_round, stopped = self.attendance.now(living, own_round)
            with tf.control_dependencies([stopped]):  # by who saw its last step taken
                now = self._step.read_value()
            takes_part = (places == INSIDE) | (places == COMES)
            inside = living & takes_part & (rounds == own_round)
            arrived = self.arrivals.of(own) & (rounds == own_round)
            known = living & (places != OUTSIDE)
            needed, over = _needed(inside, known, self._backups)
            ready = tf.math.count_nonzero(arrived) >= needed
            if self.quorum is not None:
                ready = self.quorum.is_ready(arrived, needed)
            else:
                over, ready = over | stopped, ready & ~stopped
            applies = living & (self._lots.appliers.read_value() == own + 1)
            found = [
                now,
                ready,
                over,
                lots == own * _LOTS,
                (lots > own * _LOTS) & ~tf.reduce_any(applies) & (now == own),
                own_round,
                _first(living & arrived),
            ]
            look = tf.stack([tf.cast(each, tf.int64) for each in found])
        with tf.control_dependencies(whole), tf.device("CPU:0"):
            return tf.identity(look)

    def wait(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Wait until the step of this worker's gradient is taken; see `StepWait`."""
        return StepWait(self, self._members, self._lots).wait()

    def state(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the step that is to be taken, and whether a worker has begun that.

        Shape [], int64, and shape [], bool; on server 0.
        """
        with tf.device(self._device):
            now = self._step.read_value()
            with tf.control_dependencies([now]):
                return now, self._lots.drawn.read_value() > now * _LOTS

    def count(self) -> None:
        """Count the step: all go on."""
        own = self.own.read_value()
        with tf.device(self._device):
            ready = self._lots.begin(own + 1)
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


class StepWait:
    """Wait of a worker whose gradient is on the servers."""

    def __init__(self, turns: Turns, members: Members, lots: Lots) -> None:
        """Take what tells how far the step is."""
        self._turns, self._members, self._lots = turns, members, lots

    def wait(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Wait until the step of this worker's gradient is taken, or is to be.

        Returns:
            Whether this worker is to apply it, and whether it never will be, as too few
            take part, or one has stopped: each of shape [], bool.

        Raises:
            tf.errors.InvalidArgumentError: the worker that was to apply it is dead, and
                there is no rule.
        """
        own, never = self._turns.own.read_value(), tf.constant(np.inf, tf.float64)

        def wins(look: tf.Tensor) -> tf.Tensor:
            ready = (look[READY] > 0) & (
                look[ROUND] == self._turns.attendance.round.read_value()
            )
            free = ready & (look[FREE] > 0)
            draw = functools.partial(self._lots.draw, own)
            return tf.cond(free, draw, lambda: tf.constant(False))

        def goes_on(look: tf.Tensor, won: tf.Tensor, since: tf.Tensor) -> tf.Tensor:
            return (look[NOW] == own) & (look[OVER] == 0) & ~won

        def sleep(look: tf.Tensor, won: tf.Tensor, since: tf.Tensor) -> list[tf.Tensor]:
            with tf.device("CPU:0"):
                now = tf.timestamp()
                # From the first look on that has seen it: this worker may be slow.
                since = tf.where(look[STUCK] > 0, tf.minimum(since, now), never)
                lasts = now - since < self._members.liveness
                required = [] if self._turns.quorum else [values.require(lasts, _torn)]
                with tf.control_dependencies(required):
                    slept = tf.numpy_function(
                        self._nap, [began], tf.bool, stateful=True
                    )
            with tf.control_dependencies([slept]):
                look = self._turns.look()
            if self._turns.quorum is None:
                return [look, wins(look), since]
            inherits = ~lasts & (look[STUCK] > 0) & (look[HEIR] == self._members.index)
            quorum, appliers = self._turns.quorum, self._lots.appliers
            inherit = functools.partial(quorum.inherit, appliers, own)
            return [look, tf.cond(inherits, inherit, lambda: wins(look)), since]

        with tf.device("CPU:0"):
            look, began = self._turns.look(), tf.timestamp()
            first = [look, wins(look), never]
            look, won, _ = tf.while_loop(goes_on, sleep, first, parallel_iterations=1)
            over = (look[OVER] > 0) & (look[NOW] == own) & ~won
        tf.cond(over, self._turns.arrivals.withdraw, lambda: None)
        return won, over

    def _nap(self, began: Any) -> Any:
        late, subject = self._turns.arrivals.late, self._turns.attendance.subject
        return self._members.meetings.naps.nap(began, late, subject)


def _needed(
    inside: tf.Tensor, known: tf.Tensor, backups: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return how many gradients make a step, and whether fewer workers take part.

    Args:
        inside: who takes part, shape [W], bool.
        known: who has taken part, and lives: shape [W], bool.
        backups: of how many workers a step does not wait.

    Returns:
        Shape [], int64, and shape [], bool.
    """
    present = tf.math.count_nonzero(inside)
    if not backups:
        return present, tf.constant(False)
    needed = tf.maximum(tf.math.count_nonzero(known) - backups, 1)
    return needed, present < needed


def _first(workers: tf.Tensor) -> tf.Tensor:
    """Return the first of some workers, W of none; shape [], int64.

    Args:
        workers: which they are, shape [W], bool.
    """
    nobody = tf.constant([workers.shape[0]], tf.int64)
    return tf.reduce_min(tf.concat([tf.where(workers)[:, 0], nobody], 0))


def _torn() -> list[Any]:
    return [
        "A worker has died while it applied a step for all, or was not heard of for "
        "`liveness`: what the servers hold may be a part of it. All workers stop. "
        "Start the job again: with tf_dgc.callbacks.BackupState it continues from its "
        "last backup"
    ]
