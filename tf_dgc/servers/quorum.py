"""Quorum of a step in which nothing is dropped: when it is taken, and of whom it was.

A worker that is stopped for longer than `liveness` while it applies a step is replaced
as a dead one is; a fence keeps it from writing when it wakes.

Axis: W workers. All variables are on server 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host, values
from tf_dgc.servers.members import Members

_TORN = -1


class Fence:
    """Fence around what workers change for all: who was replaced may change no more.

    It has a number, which each replacement counts up; a worker notes it before it draws
    a lot, and may write while it is the same.
    """

    def __init__(self, make: Callable[..., Any], device: str) -> None:
        """Make the variables.

        Args:
            make: takes name, type and shape of a variable on server 0.
            device: of server 0.
        """
        self._device, self._number = device, make("fence")
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.constant(0, tf.int64)
            self._noted = tf.Variable(zero, trainable=False, synchronization=own)

    def begin(self) -> None:
        """Give the first value: nobody was replaced."""
        self._number.assign(tf.zeros([], tf.int64))

    def note(self) -> tf.Tensor:
        """Note the number, before this worker draws a lot; return it."""
        with tf.device(self._device):
            number = self._number.read_value()
        with tf.device("CPU:0"):
            self._noted.assign(number)
            return self._noted.read_value()

    def replace(self) -> tf.Tensor:
        """Keep out who had the turn before, for this worker; return the number."""
        with tf.device(self._device):
            number = _host.shared.take_number(self._number)
        with tf.device("CPU:0"):
            self._noted.assign(tf.identity(number) + 1)
            return self._noted.read_value()

    def is_open(self) -> tf.Tensor:
        """Tell whether this worker may write: shape [], bool; on server 0."""
        noted = self._noted.read_value()
        with tf.device(self._device):
            return self._number.read_value() == tf.identity(noted)

    def require_open(self) -> tf.Tensor:
        """Require that this worker may write."""
        with tf.device(self._device):
            return values.require(self.is_open(), _replaced)

    def guard(self, end: Callable[[], None]) -> None:
        """End what this worker writes, if it may; else tell all that it has, and raise.

        Args:
            end: lets all go on.
        """

        def go_on() -> tf.Tensor:
            end()
            return tf.constant(True)

        def tear() -> tf.Tensor:
            with tf.device(self._device):
                self._number.assign(tf.constant(_TORN, tf.int64))
                torn = self._number.read_value()
            with tf.control_dependencies([torn]), tf.device("CPU:0"):
                return values.require(tf.constant(False), _replaced)

        with tf.device("CPU:0"):
            is_open = tf.identity(self.is_open())
        tf.cond(is_open, go_on, tear)

    def require_whole(self, told: Callable[[], list[Any]]) -> tf.Tensor:
        """Require that nobody has written that was replaced.

        Args:
            told: returns what the error says.
        """
        with tf.device(self._device):
            number = self._number.read_value()
        with tf.device("CPU:0"):
            return values.require(tf.identity(number) >= 0, told)


def _replaced() -> list[Any]:
    return [
        "This worker was not heard of for longer than `liveness` while it took a step "
        "for all, and another one has taken it: this worker ends"
    ]


class Rule(NamedTuple):
    """Rule of when a step is taken where who comes late counts in the next one."""

    quorum: int | None = None  # workers that make a step; None is all that take part
    grace: float | None = None  # seconds from the first of them; None sets no end


class Quorum:
    """Workers that make a step, and a mark for each whose gradient was in one.

    Attributes:
        rule: when a step is taken.
        fence: around what who applies a step changes.
    """

    def __init__(
        self, rule: Rule, make: Callable[..., Any], members: Members, device: str
    ) -> None:
        """Make the variables.

        Args:
            rule: when a step is taken.
            make: takes name, type and shape of a variable on server 0.
            members: of the job.
            device: of server 0.
        """
        self.rule, self._members, self._device = rule, members, device
        each = [members.workers]
        self._times = make("times", tf.float64, each)  # of arrival
        self._counted = make("counted", shape=each)  # in this step, plus 1
        self.fence = Fence(make, device)

    def begin(self) -> None:
        """Give first values: nobody has come."""
        for variable in (self._times, self._counted):
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        self.fence.begin()

    def arrive(self) -> list[tf.Tensor]:
        """Note the time at which this worker arrives; return what comes after it."""
        with tf.device(self._device):
            self._members.put(self._times, tf.timestamp())
            return [self._times.read_value()]

    def is_ready(self, arrived: tf.Tensor, needed: tf.Tensor) -> tf.Tensor:
        """Tell whether a step is to be taken: shape [], bool; on server 0.

        Args:
            arrived: whose gradients are there, shape [W], bool.
            needed: how many take part, shape [], int64.
        """
        quorum, grace = self.rule
        if quorum is not None:
            needed = tf.minimum(needed, quorum)
        ready = tf.math.count_nonzero(arrived) >= needed
        if grace is not None:
            times = self._times.read_value()
            first = tf.reduce_min(tf.where(arrived, times, times.dtype.max))
            ready |= tf.timestamp() - first > grace
        return ready

    def note(self, workers: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Note whose gradients a step is of.

        Args:
            workers: shape [K], int64.
            step: its number, shape [], int64.

        Returns:
            What comes after that.
        """
        with tf.device(self._device):
            before = self._counted.read_value()
            marks = tf.fill(tf.shape(workers), tf.identity(step) + 1)
            places = tf.identity(workers)[:, tf.newaxis]
            self._counted.assign(tf.tensor_scatter_nd_update(before, places, marks))
            noted: tf.Tensor = self._counted.read_value()
            return noted

    def has(self, step: tf.Tensor) -> tf.Tensor:
        """Tell whether this worker's gradient was in a step: shape [], bool."""
        with tf.device(self._device):
            mark = self._counted.read_value()[self._members.index]
        with tf.device("CPU:0"):
            return tf.identity(mark) == step + 1

    def inherit(self, appliers: Any, step: tf.Tensor) -> tf.Tensor:
        """Apply a step in the place of a worker that has died; return True.

        Args:
            appliers: of steps, a variable of shape [W].
            step: its number, shape [], int64.
        """
        with tf.device(self._device):
            dead = (appliers.read_value() == step + 1) & ~self._members.living()
            named = tf.where(dead)[:, 0]
        with tf.device("CPU:0"):
            expelled = tf.numpy_function(
                self._members.expel, [named], tf.bool, stateful=True
            )
        with tf.control_dependencies([expelled]):
            replaced = self.fence.replace()
        with tf.control_dependencies([replaced]), tf.device(self._device):
            self._members.put(appliers, step + 1)
        return tf.constant(True)
