"""The progress of a worker within its period, and what it tells the others of it.

Axes: N workers.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_dgc import averaging
from tf_dgc.config import AveragingConfig
from tf_dgc.exchanges.figures import RoundStats
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.periods import PeriodLength, PeriodNotes


class PeriodProgress:
    """Counts local steps and rounds.

    Attributes:
        length: of a period.
        notes: of its steps.
        rounds: shape [], int64, rounds done.
        position: shape [], int64, local steps since the last round, of all workers.
        moved: shape [], int64, those of them in which this worker had rows.
        unsettled: shape [], int64, steps with rows since statistics were averaged.
        taken: shape [], int64, steps done.
        distance: shape [], float32, of this worker's parameters from those agreed on,
            before the last round.
        rows: shape [], float64, of these local steps, of a site; 1 of a worker alone.
    """

    def __init__(
        self, config: AveragingConfig, loss: tf.Variable, of_site: bool = False
    ) -> None:
        """Create the variables, outside of any graph.

        Args:
            config: the settings.
            loss: shape [], float64.
            of_site: whether the steps are those of several workers.
        """
        self._of_site = of_site
        self._first = config.synchronous_steps
        self.length, self.notes = PeriodLength(config, loss), PeriodNotes()
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.zeros([], tf.int64)
            self.taken = own_variable(zero, "averaging_steps")
            self.position = own_variable(zero, "averaging_position")
            self.moved = own_variable(zero, "averaging_moved")
            self.unsettled = own_variable(zero, "averaging_unsettled")
            counted = tf.constant(0.0 if of_site else 1.0, tf.float64)
            self.rows = own_variable(counted, "averaging_rows")
            self.rounds = own_variable(zero, "averaging_rounds")
            self.distance = own_variable(tf.zeros([]), "averaging_distance")

    # Steps.

    def moves(self, has_rows: tf.Tensor, early: tf.Tensor, weight: tf.Tensor) -> None:
        """Count what this worker has of a step, which may be an early, synchronous one.

        A worker without rows has not moved, and is left out of the mean; one of a site
        moves as that does.

        Args:
            has_rows: whether this worker has any.
            early: whether the step is of all workers.
            weight: of all rows that it moves by: shape [].
        """
        if self._of_site:
            own = tf.where(early, tf.zeros_like(weight), weight)
            self.rows.assign_add(tf.cast(own, tf.float64))
        self.moved.assign_add(tf.cast((weight > 0) & ~early, tf.int64))
        self.unsettled.assign_add(tf.cast(has_rows, tf.int64))

    def step(self) -> tf.Tensor:
        """Count a step that has been applied; tell whether it was a local one."""
        with tf.device("CPU:0"):
            local = self.taken >= self._first
            self.position.assign_add(tf.cast(local, tf.int64))
        self.taken.assign_add(1)
        return local

    def unsettle(self) -> None:
        """Note that statistics have changed, in a step or not."""
        self.unsettled.assign(tf.maximum(self.unsettled, 1))

    def is_due(self, local: tf.Tensor) -> tf.Tensor:
        """Tell whether it is time for a round, given what `step` returned."""
        with tf.device("CPU:0"):
            return local & (self.position >= self.length.steps)

    def has_taken(self, steps: int) -> tf.Tensor:
        """Tell whether so many steps were taken, on the host: it chooses what to do."""
        with tf.device("CPU:0"):
            return self.taken == steps

    # Rounds.

    def header(
        self, account: int, nonfinite: tf.Tensor, done: bool
    ) -> averaging.RoundHeader:
        """Return what this worker tells at the start of a round.

        Args:
            account: whose parameters.
            nonfinite: of the parameters, see `averaging.RoundHeader`.
            done: whether it has come to the end of its data.
        """
        header = averaging.RoundHeader(
            account,
            self.rounds,
            self.moved,
            self.unsettled,
            done,
            nonfinite,
            self.length.loss,
            self.notes.rate,
            *tf.unstack(self.notes.read.read_value()),
        )
        return self.notes.told(header._replace(rows=self.rows))

    def begin(self) -> None:
        """Begin a period."""
        for counter in (self.position, self.moved):
            counter.assign(0)
        self.notes.begin()
        if self._of_site:
            self.rows.assign(0.0)

    # State.

    def follow(self, earlier: Sequence["PeriodProgress"]) -> None:
        """Begin where others of the owner are: synchronous steps are over, or go on."""
        with tf.init_scope():
            for each in earlier:
                self.taken.assign(tf.maximum(self.taken, each.taken))

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """Counters of the period."""
        found = {"rows": self.rows} if self._of_site else {}
        return found | {
            "steps": self.taken,
            "position": self.position,
            "moved": self.moved,
            "unsettled": self.unsettled,
            "rounds": self.rounds,
            "distance": self.distance,
            **self.length.state,
        }

    def stats(self) -> RoundStats:
        """Return how it goes on."""
        fields = self.rounds, self.length.steps, self.position, self.distance
        return RoundStats(*[field.read_value() for field in fields])
