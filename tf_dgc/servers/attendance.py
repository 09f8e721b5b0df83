"""Attendance of workers in the rounds of steps that they take together.

Axis: W workers. All variables that workers share are on server 0.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.servers.holders import Holders
from tf_dgc.servers.members import Members
from tf_dgc.servers.quorum import Rule

OUTSIDE, INSIDE, LEFT, COMES = range(4)  # a worker, since its process began
_TOLD = "entries", "places", "stops"


class Attendance:
    """Attendance of workers: in which round each is, and whether it takes part.

    Attributes:
        entries: shape [W], int64: the round of each worker.
        places: shape [W], int64: `OUTSIDE`, `INSIDE`, `LEFT` or `COMES`.
        stops: shape [W], int64: the round that a worker has stopped, plus 1.
        round: shape [], int64: of this worker.
        holders: of the places, whose word counts.
        subject: of what is told of waits.
    """

    def __init__(self, make: Callable[[str], Any], members: Members, rule: Rule | None):
        """Make the variables, and begin outside.

        Args:
            make: takes the name of a variable on the servers.
            members: of the job.
            rule: how many a round waits for, and how long.
        """
        self._rule, self._members = rule or Rule(), members
        self.subject = "A round" if rule else "A synchronous step"
        self.entries, self.places, self.stops = map(make, _TOLD)
        self.holders = Holders(make, members)
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.constant(0, tf.int64)
            self.round = tf.Variable(zero, trainable=False, synchronization=own)
            self._is_inside = tf.Variable(False, trainable=False, synchronization=own)

    @property
    def told(self) -> list[Any]:
        """Return all that workers tell; who sees a round sees its place."""
        return [self.places, self.stops, self.entries]

    def begin(self) -> None:
        """Give first values: nobody has told anything."""
        for variable in self.told:
            variable.assign(tf.zeros(variable.shape, tf.int64))
        self.holders.begin()

    def join(self) -> None:
        """Take the place of this worker; what a former process told there is void."""
        for variable in self.told:
            self._members.put(variable, 0)
        self.holders.join()

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
        number = self._next_round()
        self.round.assign(number)
        # Who sees the round, which all read first, sees that this worker comes.
        self._members.put(self.places, COMES)
        self._members.put(self.entries, number)
        wait = self._members.meetings.wait_for_others
        wait(self.entries, number, self.subject, *self._rule)
        self._members.put(self.places, INSIDE)
        return np.bool_(True)

    def _next_round(self) -> int:
        """Return the round under way, if it is a new one; else that to come."""
        others = self.holders.others()
        rounds, places = (
            each.read_value().numpy() for each in (self.entries, self.places)
        )
        under_way = rounds[others & np.isin(places, (INSIDE, COMES))]
        done = rounds[others & (places == LEFT)]
        found = under_way.min() if under_way.size else max([0, *done]) + 1
        return max(int(self.round) + 1, int(found))

    @property
    def takes_part(self) -> bool:
        """Tell whether steps of others wait for this worker's gradient."""
        return bool(self._is_inside)

    def leave(self, stops: bool = False) -> None:
        """Hold nobody back, eagerly; the next step begins anew.

        Args:
            stops: whether the others are to end this round, too.
        """
        if not self.takes_part:
            return
        if stops:
            self._members.put(self.stops, self.round + 1)
        self._is_inside.assign(False)
        self._members.put(self.places, LEFT)

    def now(self, living: tf.Tensor, own_round: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Return what there is to know of rounds, on the device of the servers.

        Rounds, places, the round that this worker is in, or has missed, and whether
        somebody has stopped that.

        Args:
            living: workers that live: shape [W], bool.
            own_round: of this worker, on the device of the servers.
        """
        rounds = self.entries.read_value()
        with tf.control_dependencies([rounds]):
            places = self.places.read_value()
        with tf.control_dependencies([places]):  # who has left had stopped before
            stops = self.stops.read_value()
        later = living & (places == INSIDE) & (rounds > own_round)
        missed = tf.reduce_min(tf.where(later, rounds, rounds.dtype.max))
        of = tf.where(tf.reduce_any(later), missed, own_round)
        return rounds, places, of, tf.reduce_any(stops == of + 1)

    def follow(self, round_of_others: tf.Tensor) -> tf.Tensor:
        """Be in the round of those that have gone on without this worker."""

        def follow() -> tf.Tensor:
            self.round.assign(round_of_others)
            self._members.put(self.entries, round_of_others)
            return tf.constant(True)

        behind = round_of_others != self.round.read_value()
        return tf.cond(behind, follow, lambda: tf.constant(True))

    def stopped(self) -> np.ndarray:
        """Tell who has stopped this worker's round, eagerly: shape [W], bool."""
        stops: np.ndarray = self.stops.read_value().numpy()
        return stops == int(self.round) + 1

    def inside(self) -> np.ndarray:
        """Tell which workers are in this one's round, eagerly: shape [W], bool."""
        places, rounds = (
            variable.read_value().numpy() for variable in (self.places, self.entries)
        )
        return np.isin(places, (INSIDE, COMES)) & (rounds == int(self.round))

    def others_inside(self) -> np.ndarray:
        """Tell which other workers take steps, eagerly: shape [W], bool."""
        inside: np.ndarray = self.places.read_value().numpy() == INSIDE
        return inside & self.holders.others()
