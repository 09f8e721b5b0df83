"""Gradients go to servers, parameters come from there; workers do not meet.

Downpour SGD. Of a worker's steps t = 1, 2, ...:

    a <- a + g                  gradient at x, the worker's own copy of the parameters
    every n_push:   rate / max(1, tau) for the optimizer's step of w by a;  a <- 0
    every n_fetch:  x <- w           else, of SGD: x <- x - rate * g

w, and all that the optimizer keeps, are on the servers, where the step is computed. tau
is the staleness: how many pushes of all workers came between the fetch of x and this
one; without its own where x has taken these as well.

Axes: T variables, M servers, W workers.

References:
    Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012, algorithm 7.1 of the
    supplement. Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD for Distributed Deep
    Learning, IJCAI 2016 (rate / tau).
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host, values
from tf_dgc._host.shared import Table
from tf_dgc.compression import dgc
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.base import Place, TakenOver, Update, momentum_in
from tf_dgc.exchanges.figures import TensorStats
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.moved import JobServers, Trained
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.pushed import Pushed
from tf_dgc.exchanges.served import Served
from tf_dgc.exchanges.server_traffic import cost, size, traffic
from tf_dgc.exchanges.stage_selection import Chosen
from tf_dgc.exchanges.synchronous import ServedTogether


class Pushes(Served):
    """Exchange of a worker that pushes at its own pace."""

    def __init__(self, place: Place, job: JobServers, trained: Trained) -> None:
        """Make the sums of gradients from one push to the next; see the base class."""
        self._sums: list[tf.Variable] = []
        with tf.init_scope():
            with tf.device("CPU:0"):
                zero = tf.zeros([], tf.int64)
                self._own = own_variable(zero, "downpour_unseen")
            if job.config.push_period > 1:
                self._sums = [
                    own_variable(tf.zeros(v.shape, v.dtype), "downpour_sum")
                    for v in place.variables
                ]
        super().__init__(place, job, trained)

    def _added_up(self, local: Sequence[Any]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Add gradients up; return the sums, and whether they are to be pushed."""
        for total, gradient in zip(self._sums, local, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(gradient)
            else:
                total.assign_add(gradient)
        return [total.read_value() for total in self._sums], self.pushes_now

    def push(self, update: Callable[..., None]) -> None:
        """Push, by what is stale of it; see the base class."""
        self.rate.tell()
        with tf.device(self.version.device):
            number = tf.identity(self.version.assign_add(1, read_value=True))
        with tf.device("CPU:0"):
            before = tf.identity(number) - 1
            stale = before - self._fetched.read_value() - self._seen_own()
            self.known.assign(tf.identity(number))
            self._own.assign_add(1)
            factor = tf.ones([])
            if self.config.staleness_rate:
                factor /= tf.maximum(tf.cast(stale, tf.float32), 1.0)
        sent = self._send(factor)
        update(factor)
        stale = tf.cast(stale, tf.float64)
        self._job.totals.add(pushes=1, sent=sent, stale=stale)
        for total in self._sums:
            total.assign(tf.zeros(total.shape, total.dtype))

    @abc.abstractmethod
    def _send(self, factor: tf.Tensor) -> tf.Tensor:
        """Send what `update` does not; return the bytes of all: shape [], int64.

        Args:
            factor: by which the learning rate is multiplied: shape [], float32.
        """

    def _seen_own(self) -> tf.Tensor:
        """Return how many of its own pushes this worker's copy has taken as well."""
        return tf.zeros([], tf.int64)

    def _note_fetch(self) -> None:
        """Forget its own pushes: the copy has those of all."""
        self._own.assign(tf.zeros([], tf.int64))


class ServedWhole(Pushes):
    """Exchange of a worker that pushes gradients as they are."""

    _rate: Any = None  # of SGD's steps of this worker's own

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return what is to be pushed: this worker's gradients, or their sum."""
        momentum = momentum_in(taken_over)
        self._local = local
        self._rate = None if momentum is None else momentum.learning_rate
        flags = [False] * len(local)
        if not self._sums:
            return Update(local, flags, None, traffic(cost(local)))
        sums, due = self._added_up(local)
        sent = tf.where(due, cost(sums), tf.zeros([2], tf.int64))
        return Update(sums, flags, due, traffic(sent))

    def _send(self, factor: tf.Tensor) -> tf.Tensor:
        return cost(self._sums or self._local)[0]

    def _seen_own(self) -> tf.Tensor:
        if self.config.fetch_period > 1 and self._rate is not None:
            return self._own.read_value()
        return super()._seen_own()

    def _step_alone(self) -> None:
        """Take SGD's step, in this worker's copy only."""
        if self._rate is None:
            return
        for variable, gradient in zip(self.variables, self._local, strict=True):
            if isinstance(variable, Table):
                continue  # of which this worker has no copy
            step = values.scaled(gradient, self._rate)
            if isinstance(step, tf.IndexedSlices):
                variable.scatter_sub(step)
            else:
                _host.shared.bypassed(variable, "assign_sub")(step)


class ServedLargest(Pushes):
    """Exchange of a worker that pushes the largest elements, and keeps back the rest.

    Attributes:
        pushed: what it keeps back, and the way of the rest.
    """

    pushed: Pushed

    def __init__(
        self,
        place: Place,
        job: JobServers,
        trained: Trained,
        momentum: dgc.Momentum | None,
        config: DGCConfig,
    ) -> None:
        """Make the residual, all zero; see the base class.

        Args:
            place: of the exchange.
            job: its servers.
            trained: the optimizer, and what it trains.
            momentum: of SGD, which the exchange takes over.
            config: of compression.
        """
        same = [each for each in place.siblings if isinstance(each, ServedLargest)]
        args = place.variables, momentum, config, place.transport.device
        earlier: list[Pushed] = [each.pushed for each in same]
        self.pushed = Pushed(*args, trained.overwritten, earlier)
        self._chosen: Chosen | None = None
        super().__init__(place, job, trained)

    def _place_beside(self) -> None:
        job = self._job
        self.pushed.open(self.name, job.servers, job.members, job.twins)

    def _begin(self) -> None:
        super()._begin()
        self.pushed.begin()

    def _join(self) -> None:
        self._pull()

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return the steps that go whole; what is selected of others is noted."""
        sums, due = (local, None) if not self._sums else self._added_up(local)

        steps, self._chosen = self.pushed.select(sums, momentum_in(taken_over), due)
        self._local = [step for step in steps if step is not None]
        sent = cost(self._local) + self.pushed.cost(self._chosen)
        if due is not None:
            sent = tf.where(due, sent, tf.zeros([2], tf.int64))
        return Update(steps, [True] * len(steps), due, traffic(sent))

    def _send(self, factor: tf.Tensor) -> tf.Tensor:
        if self._chosen is None:
            raise RuntimeError("A push must come after `gradients`")
        self.pushed.push(self._chosen, factor)
        return cost(self._local)[0] + self.pushed.cost(self._chosen)[0]

    def _pull(self) -> tf.Tensor:
        received = self.pushed.pull()
        self._job.twins.pull(self.pushed.whole)
        return received + size(self.pushed.whole)

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """Residuals of compression; all else is on the servers."""
        return self.pushed.state

    @property
    def steps(self) -> int:
        """Number of pushes that were selected."""
        return int(self.pushed.residual.step)

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved; what has been pushed since is not kept back."""
        if not self._job.members.succession.repeats:
            super().load(arrays, steps)
        self.pushed.loaded(steps)

    def flush(self, variables: Sequence[Any], apply: Any) -> None:
        """Push what compression keeps back of variables, and fetch.

        But for gradients since the last push, where the period is longer than 1.
        """
        if self.pushed.flush(variables):
            self._job.totals.add(sent=4 * self.pushed.layout.elements)
            self.settle(always=True)

    def kept(self) -> list[tf.Tensor]:
        """Return what compression keeps back."""
        return [self.pushed.residual.read()]

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        return self.pushed.residual.coverage.stats(reset)


class Downpouring(JobServers):
    """Makes exchanges with servers, for a `Ledger`."""

    lockstep = False
    _expected: Trained | None = None

    def expect(self, trained: Trained) -> None:
        """Tell what the next exchange is to know."""
        self._expected = trained

    def __call__(self, place: Place, taken_over: TakenOver | None) -> Served:
        """Make an exchange: its variables move to the servers, or are there."""
        trained, self._expected = self._expected, None
        if trained is None:
            raise RuntimeError("What is trained must be told of first")
        return self._opened(place, trained, taken_over)

    def _opened(
        self, place: Place, trained: Trained, taken_over: TakenOver | None
    ) -> Served:
        config = self.config
        if config.synchronous:
            return ServedTogether(place, self, trained)
        if isinstance(config.compression, DGCConfig):
            momentum = momentum_in(taken_over)
            return ServedLargest(place, self, trained, momentum, config.compression)
        return ServedWhole(place, self, trained)
