"""Rounds of averaging: workers tell how far they are, and agree on parameters.

Axes: N workers.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host, averaging, values
from tf_dgc.exchanges import nodes
from tf_dgc.exchanges.anchors import Anchor
from tf_dgc.exchanges.base import Exchange, Place
from tf_dgc.exchanges.figures import Counters, counted
from tf_dgc.exchanges.parts import refuse_other_data
from tf_dgc.exchanges.progress import PeriodProgress
from tf_dgc.exchanges.replicas import Replicas
from tf_dgc.transports import sums
from tf_dgc.transports.base import Transport
from tf_dgc.transports.mesh import Sites

HEADER_BYTES = 8 * len(averaging.RoundHeader._fields)


class Companions(NamedTuple):
    """Variables that belong to an owner's training, beside those it trains."""

    statistics: Sequence[Any]  # that forward passes change; averaged in each round
    averaged: Sequence[Any]  # averaged, too, of the optimizer
    own: Sequence[Any]  # each worker's; saved with its state


class Training(NamedTuple):
    """Parties to rounds: an owner's parameters, and how far they are."""

    place: Place
    companions: Companions
    progress: PeriodProgress
    anchor: Anchor
    inner: Exchange  # of changes of parameters, where there is an anchor
    counters: Counters
    replicas: Replicas

    @property
    def variables(self) -> Sequence[Any]:
        """The parameters."""
        return self.place.variables

    @property
    def averaged(self) -> list[Any]:
        """Variables that are averaged beside them."""
        return [*self.companions.statistics, *self.companions.averaged]

    def header(self, done: bool) -> tf.Tensor:
        """Return what this worker tells at the start of a round."""
        nonfinite = values.first_nonfinite(self.variables)
        told = self.progress.header(self.place.number, nonfinite, done)
        return averaging.write(nodes.told_of_site(self.place.transport, told))

    def checked(self, headers: averaging.RoundHeader) -> averaging.RoundHeader:
        """Return what all tell, which fails where they cannot go on together."""
        names = [v.name for v in self.variables]
        refused = _refuse(headers, self.progress.taken, names)
        with tf.control_dependencies(refused):
            headers = averaging.RoundHeader(*[tf.identity(field) for field in headers])
        reads = averaging.reads(headers)
        alike = refuse_other_data(reads, self.progress.notes.components)
        with tf.control_dependencies([alike]):
            return averaging.RoundHeader(*[tf.identity(field) for field in headers])

    def parts(self, headers: averaging.RoundHeader) -> list[tf.Tensor]:
        """Return this worker's part of the mean of what is averaged, or its site's."""
        transport, count = self.place.transport, averaging.count(headers.unsettled)
        if isinstance(transport, Sites):
            count = tf.maximum(tf.reduce_sum(headers.unsettled), 1.0)
        own = averaging.shares(self.averaged, self.progress.unsettled, count)
        return nodes.of_site(transport, own)

    def assign_means(
        self, variables: Sequence[Any], parts: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Let variables be the sum of all workers' parts; return its traffic.

        The traffic is as of `sums.traffic_of`.
        """
        transport = self.place.transport
        reduced = transport.all_reduce(parts, f"{self.place.name}.average")
        for variable, mean in zip(variables, reduced, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))
        counts = [v.shape.num_elements() for v in variables]
        size = sum(n * part.dtype.size for n, part in zip(counts, parts, strict=True))
        return sums.traffic_of(size, sum(counts), sums.in_ring(size, transport.size))


def header_traffic(transport: Transport) -> tf.Tensor:
    """Return the traffic of the headers of a round, as of `sums.traffic_of`."""
    received = (transport.size - 1) * HEADER_BYTES
    return sums.traffic_of(HEADER_BYTES, 0, received)


class Rounds(abc.ABC):
    """Holds the rounds of a training, in steps and where workers meet outside."""

    @abc.abstractmethod
    def after_step(self, local: tf.Tensor) -> None:
        """Hold a round where it is time; `local` tells whether the step was own."""

    @abc.abstractmethod
    def settle(self) -> bool:
        """Hold last rounds, eagerly, until all workers are here, with all they have.

        A worker that has come here takes part in the rounds of those that have not,
        with nothing to add, until all are here.

        Returns:
            Whether parameters were averaged.
        """

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """State of this worker that is saved, by name."""
        return {}

    def forget(self) -> None:
        """Let go of what is under way, eagerly: something else is loaded."""
        return

    def loaded(self) -> None:
        """Go on from what was loaded."""
        return


class RoundsAtOnce(Rounds):
    """Rounds for which training waits."""

    def __init__(self, training: Training) -> None:
        """Take what takes part."""
        self._training = training

    def after_step(self, local: tf.Tensor) -> None:
        """Hold a round where it is time."""

        def hold() -> None:
            self._average(self._meet(done=False), parameters=True)

        due = self._training.progress.is_due(local)
        tf.cond(due, _host.tensorflow.outside_of_loops(hold), lambda: None)

    def settle(self) -> bool:
        """Hold last rounds; see the base class."""
        averaged = together = False
        while not together:
            headers = self._meet(done=True)
            moved = bool(tf.reduce_any(headers.moved > 0))
            if moved or tf.reduce_any(headers.unsettled > 0):
                self._average(headers, parameters=moved)
            together = bool(tf.reduce_all(headers.done > 0))
            averaged |= moved
        return averaged

    def _meet(self, done: bool) -> averaging.RoundHeader:
        """Exchange headers; raise where the workers cannot go on together.

        Args:
            done: whether this worker has come to the end of its data.
        """
        own = self._training
        gathered = own.place.transport.all_gather(
            own.header(done), f"{own.place.name}.round"
        )
        headers = own.checked(averaging.read(gathered))
        own.progress.notes.hear(headers)
        return headers

    def _average(self, headers: averaging.RoundHeader, parameters: bool) -> None:
        """Average statistics and, if told so, parameters; the next period begins."""
        own, progress = self._training, self._training.progress
        before = [v.read_value() for v in own.variables] if parameters else []
        parts, averaged = own.parts(headers), own.averaged
        traffic = header_traffic(own.place.transport)
        moved = averaging.divisor(headers, progress.rows)
        if parameters and own.anchor:
            changes = own.anchor.changes(before)
            shares = averaging.shares(changes, progress.moved, moved)
            update = own.inner.gradients(shares, None)
            own.anchor.step(update.gradients, update.applies)
            traffic += update.traffic
        elif parameters:
            parts = [*averaging.shares(before, progress.moved, moved), *parts]
            averaged = [*own.variables, *averaged]
        traffic += own.assign_means(averaged, parts)
        own.counters.add(counted(traffic))
        if parameters:
            own.anchor.drop()
            progress.distance.assign(averaging.distance(before, own.variables))
            progress.length.adapt(lambda: averaging.mean_loss(headers))
            progress.rounds.assign_add(1)
        progress.begin()
        progress.unsettled.assign(0)
        if parameters:
            agreed = [*own.variables, *own.averaged]
            own.replicas.compare(agreed, tf.reduce_max(headers.moved))


def agree(headers: averaging.RoundHeader, parameters: int) -> tf.Tensor:
    """Tell whether workers can go on together: shape [], bool.

    Args:
        headers: of all workers.
        parameters: how many a worker has.
    """
    parted, _ = averaging.other_rate(headers)
    return (
        ~tf.reduce_any(averaging.damaged(headers, parameters))
        & tf.reduce_all(headers.account == headers.account[0])
        & tf.reduce_all(headers.round == headers.round[0])
        & ~parted
        & tf.reduce_all(headers.nonfinite == 0)
    )


def _refuse(headers: averaging.RoundHeader, step: Any, names: list[str]) -> list[Any]:
    """Raise InvalidArgumentError where workers differ, or one has numbers no more."""
    damaged = averaging.damaged(headers, len(names))
    bad = tf.clip_by_value(tf.cast(headers.nonfinite, tf.int32), 0, len(names))
    parted, other = averaging.other_rate(headers)

    def strangers() -> list[Any]:
        return [
            "The workers are not in the same round of the same optimizer. Numbers of "
            "optimizers and of rounds, by rank:",
            headers.account,
            headers.round,
        ]

    def other_rate() -> list[Any]:
        rates = tf.cast(headers.rate, tf.float32)
        return [
            "The learning rate must be the same on all workers; all stop, parameters "
            "were not averaged. Callbacks, and steps that set it, must decide alike on "
            "all of them: by what all see, as the logs of epochs. Rank, its learning "
            "rate and those of all:",
            other,
            rates[other],
            rates,
        ]

    def no_number() -> list[Any]:
        rank = values.first_true(bad > 0)
        return [
            "A variable holds NaN or infinity; all workers stop, it was not averaged. "
            "Rank, step and variable:",
            rank,
            step.read_value(),
            tf.gather(tf.constant(["", *names]), bad[rank]),
        ]

    text = "What a worker tells of its round is damaged. Ranks:"
    alike = [
        tf.reduce_all(each == each[0]) for each in (headers.account, headers.round)
    ]
    return [
        values.require(~tf.reduce_any(damaged), lambda: [text, tf.where(damaged)]),
        values.require(tf.reduce_all(alike), strangers, summarize=-1),
        values.require(~parted, other_rate, summarize=-1),
        values.require(tf.reduce_all(bad == 0), no_number),
    ]
