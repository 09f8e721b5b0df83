"""Exchanges with servers: what a worker pushes, and what it fetches."""

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.exchanges import server_traffic
from tf_dgc.exchanges.base import Exchange, Place
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.moved import JobServers, MovedVariables, Trained
from tf_dgc.servers.clocks import Clocks
from tf_dgc.servers.turns import Turns


class Served(Exchange):
    """Exchange whose parameters are on servers.

    A step is `gradients`, `push`, `parameters`: a kind says what it pushes and how.

    Attributes:
        version: shape [], int64, on server 0: number of pushes, of all workers.
        known: shape [], int64: the last that this worker has seen of it.
        rate: the chief's learning rate, which counts for all.
        clocks: how far workers are; None without a bound of staleness.
    """

    lockstep = False
    turns: Turns | None = None  # of steps that all workers take together

    def __init__(self, place: Place, job: JobServers, trained: Trained) -> None:
        """Move the variables to the servers, or take over what is there.

        Args:
            place: of the exchange.
            job: its servers.
            trained: the optimizer, and what it trains.

        Raises:
            ValueError: what the chief trains is something else.
            TimeoutError: the chief did not come.
        """
        super().__init__(place)
        self._job, self.config = job, job.config
        zero = tf.zeros([], tf.int64)
        with tf.init_scope(), tf.device("CPU:0"):
            names = "steps", "fetched", "known"
            self._taken, self._fetched, self.known = (
                own_variable(zero, f"downpour_{name}") for name in names
            )
        self.clocks: Clocks | None = None
        if (bound := self.config.max_staleness) is not None:
            self.clocks = Clocks(self.name, job.servers, job.members, bound)
        self._fetch: Callable[[], None] | None = None
        self._settled = 0
        self._local: Sequence[Any] = []  # what the step that runs pushes
        with tf.init_scope():
            self._moved = MovedVariables(job, self, trained)
            self.version, self.rate = self._moved.version, self._moved.rate
            self._place_beside()
            self._moved.open(self._begin)
            self.known.assign(self.version.read_value())
            self._fetched.assign(self.known)
            self._join()

    # Parts of a kind.

    def _place_beside(self) -> None:
        """Make what a kind has beside its variables on the servers."""

    def _begin(self) -> None:
        """Give first values to that; the chief does."""
        if self.clocks is not None:
            self.clocks.begin()

    def _join(self) -> None:
        """Fetch for the first time."""
        self._job.twins.pull(self._moved.mirrors)

    @abc.abstractmethod
    def push(self, update: Callable[..., None]) -> None:
        """Count a push of what `gradients` was given, and do it.

        Args:
            update: takes what its learning rate is to be multiplied by: shape [],
                float32; and, where a step is taken together, the gradients that it is
                of; changes what is on the servers.
        """

    def _pull(self) -> tf.Tensor:
        """Fetch, whole or what has changed; return bytes, shape [], int64."""
        self._job.twins.pull(self.variables)
        return server_traffic.size(self.variables)

    def _before_fetch(self) -> list[tf.Tensor]:
        """Return what a fetch comes after."""
        return []

    def _step_alone(self) -> None:
        """Take a step of this worker's own, in its copy only, between two fetches."""

    # Steps.

    @property
    def pushes_now(self) -> tf.Tensor:
        """Tell whether the step that has begun ends with a push: shape [], bool."""
        return self._is_due(self.config.push_period, 1)

    def _is_due(self, period: int, ahead: int) -> tf.Tensor:
        return (self._taken.read_value() + ahead) % period == 0

    def parameters(self) -> None:
        """Fetch what the servers have, where it is time."""
        self._taken.assign_add(1)
        if self.clocks is not None:
            self.clocks.step()
            self.clocks.wait()
        if self.config.fetch_period == 1:
            self.fetch()
        else:
            due = self._is_due(self.config.fetch_period, 0)
            tf.cond(due, self.fetch, self._step_alone)
        self._follow()

    def _follow(self) -> None:
        # What corrections and schedules follow is the number of all pushes.
        self._moved.count.follow(self.known.read_value())
        self._job.totals.know(self.known.read_value())

    def settle(self, always: bool = False) -> None:
        """Fetch, eagerly, where there were steps since the last time, or always."""
        if self._fetch is None:
            self._fetch = tf.function(self.fetch, autograph=False)
        taken = int(self._taken)
        if always or taken != self._settled:
            self._moved.common.heed()
            self._fetch()
            self._settled = taken
            self._job.totals.know(self.known.read_value())
            self._moved.count.settle(self.known.read_value())
            self._moved.tell_others()

    def fetch(self) -> None:
        """Let this worker's copy be what is on the servers."""
        with tf.device(self.version.device):
            version = tf.identity(self.version.read_value())
        with tf.control_dependencies([version, *self._before_fetch()]):
            size = self._pull()
            self.rate.take()
            self._fetched.assign(version)
            self.known.assign(version)
            self._note_fetch()
            self._job.totals.add(pulls=1, received=size)

    def _note_fetch(self) -> None:
        """Note that this worker's copy is what is on the servers."""


def served(exchanges: Iterable[Exchange]) -> list[Served]:
    """Return the exchanges that are with servers."""
    return [exchange for exchange in exchanges if isinstance(exchange, Served)]
