"""Period of averaging: its length, and notes of its steps.

Axis: K numbers by which batches are compared.
"""

import math
from collections.abc import Callable, Mapping

import tensorflow as tf

from tf_dgc import averaging
from tf_dgc.config import ADAPTIVE, AveragingConfig
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.parts import Ballot, Part


class PeriodLength:
    """Local steps between two rounds; of all workers, chosen anew where that adapts.

    Attributes:
        steps: shape [], int64.
        loss: shape [], float64, that an adaptive period follows; of all exchanges.
    """

    def __init__(self, config: AveragingConfig, loss: tf.Variable) -> None:
        """Create the variables, outside of any graph.

        Args:
            config: the settings.
            loss: see above.
        """
        self._config, self.loss = config, loss
        first = config.max_period if isinstance(config.period, str) else config.period
        with tf.init_scope(), tf.device("CPU:0"):
            steps = tf.constant(first, tf.int64)
            self.steps = own_variable(steps, "averaging_period")
            unknown = tf.constant(math.nan, tf.float64)
            self._first_loss = own_variable(unknown, "averaging_first_loss")

    def adapt(self, loss: Callable[[], tf.Tensor]) -> None:
        """Choose the next period, where it adapts, by the mean loss in the last one."""
        if self._config.period != ADAPTIVE:
            return
        found = loss()
        known = tf.math.is_finite(self._first_loss)
        first = self._first_loss.assign(tf.where(known, self._first_loss, found))
        least, most = self._config.min_period, self._config.max_period
        steps = averaging.next_period(self.steps, found, first, least, most)
        self.steps.assign(steps)

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """The length, and the losses that it follows."""
        return {
            "period": self.steps,
            "first_loss": self._first_loss,
            "loss": self.loss,
        }

    def loaded(self) -> None:
        """Keep to the settings, where another length was loaded."""
        config = self._config
        least, most = config.min_period, config.max_period
        if not isinstance(config.period, str):
            least = most = config.period
        self.steps.assign(tf.clip_by_value(self.steps, least, most))


class PeriodNotes:
    """Notes of the steps of a period, which workers compare in the next round.

    Attributes:
        rate: shape [], float64, learning rate of the last step.
        read: shape [K], float64, numbers of the batches in this period.
        components: shape [K], string: what these numbers are of.
    """

    def __init__(self) -> None:
        """Create the variables, outside of any graph."""
        self._ballot: Ballot | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            unknown = tf.constant(math.nan, tf.float64)
            self.rate = own_variable(unknown, "averaging_rate")
            none = tf.zeros([len(averaging.READ)], tf.float64)
            self.read = own_variable(none, "averaging_read")
            names = tf.constant([""] * len(averaging.READ))
            self.components = own_variable(names, "averaging_components")

    def note(self, part: Part, position: tf.Variable) -> None:
        """Note what a step reads, and the votes of all workers.

        The numbers of what is read are added up in a way that tells orders apart.

        Args:
            part: of the step.
            position: number of the step in its period: shape [], int64.
        """
        self.rate.assign(tf.cast(part.rate, tf.float64))
        self._ballot = part.ballot
        if part.witness is None:
            return
        with tf.device("CPU:0"):
            place = 1.0 + tf.cast(position, tf.float64)
            self.read.assign_add(tf.cast(part.witness, tf.float64) / place)
            self.components.assign(part.components)

    def told(self, header: averaging.RoundHeader) -> averaging.RoundHeader:
        """Return a header with this worker's vote."""
        if self._ballot is None:
            return header
        return header._replace(stops=self._ballot.own.read_value())

    def hear(self, headers: averaging.RoundHeader) -> None:
        """Take in the votes of all workers."""
        if self._ballot is not None:
            self._ballot.last.assign(tf.cast(headers.stops, tf.float32))

    def begin(self) -> None:
        """Begin a period."""
        self.read.assign(tf.zeros_like(self.read))
