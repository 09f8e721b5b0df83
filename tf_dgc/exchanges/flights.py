"""Rounds in flight: they are sent while the next period trains, and land in it.

Axes: N workers. w parameters of a worker, a the anchor.

    departure   d <- w, and the round begins, of a - d
    landing     a <- outer_optimizer(a, mean(a - d)),  w <- a + (w - d)

What was done since departure is kept, and is a part of the next round.

References:
    Douillard et al.: Streaming DiLoCo, 2025, https://arxiv.org/abs/2501.18512, where
    that is thrown away, or the half of it
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import averaging, values
from tf_dgc.exchanges import rounds
from tf_dgc.exchanges.channel import Arrival, Channel
from tf_dgc.exchanges.figures import counted
from tf_dgc.exchanges.flight_state import NONE, FlightState
from tf_dgc.exchanges.rounds import Rounds, Training
from tf_dgc.transports import sums


class RoundInFlight:
    """A round in flight: what the channel's thread does of it."""

    def __init__(self, training: Training, state: FlightState) -> None:
        """Take what takes part, and what was put aside at departure."""
        self._training, self._state = training, state

    def exchange(self) -> None:
        """Exchange headers, and changes where all can go on together."""
        own = self._training
        transport, told = own.place.transport, self._state.told.read_value()
        gathered = transport.all_gather(told, f"{own.place.name}.round")
        headers = averaging.read(gathered)
        header = averaging.RoundHeader(*tf.unstack(told))
        with tf.device("CPU:0"):
            sound = rounds.agree(headers, len(own.variables))
            moved = sound & tf.reduce_any(headers.moved > 0)
        traffic = tf.cond(
            moved, lambda: self._changes(header, headers), sums.no_traffic
        )
        self._state.headers.assign(gathered)
        loss = averaging.mean_loss(headers)
        none = tf.constant(np.nan, tf.float64)
        self._state.loss.assign(tf.where(moved, loss, none))
        self._state.applies.assign(tf.cast(moved, tf.int64))
        self._state.traffic.assign(traffic + rounds.header_traffic(transport))

    def _changes(
        self, header: averaging.RoundHeader, headers: averaging.RoundHeader
    ) -> tf.Tensor:
        own = self._training
        own.replicas.compare(own.anchor.values, tf.reduce_max(headers.moved))
        changes = own.anchor.changes([v.read_value() for v in self._state.departed])
        divisor = averaging.divisor(headers, header.rows)
        shares = averaging.shares(changes, header.moved, divisor)
        update = own.inner.gradients(shares, None)
        for change, found in zip(self._state.changes, update.gradients, strict=True):
            change.assign(found)
        return update.traffic


class Flights(Rounds):
    """Rounds that land some steps after they were sent, at most one at a time.

    Parameters alone are in them; statistics are averaged where workers meet.
    """

    _state: FlightState

    def __init__(
        self,
        training: Training,
        overlap: int,
        channel: Channel,
        siblings: Sequence["Flights"],
    ) -> None:
        """Create the variables, outside of any graph.

        Args:
            training: what takes part; its place has the transport of the channel.
            overlap: local steps from departure to landing.
            channel: what holds the rounds meanwhile.
            siblings: of the same owner.
        """
        self._training, self._overlap, self._channel = training, overlap, channel
        self._arrival = Arrival()
        self._state = FlightState(training, siblings[0]._state if siblings else None)
        self._fly = RoundInFlight(training, self._state).exchange
        self._fly_compiled = tf.function(self._fly, autograph=False)

    # Steps.

    def after_step(self, local: tf.Tensor) -> None:
        """Let the round in flight land, and one depart, where it is time."""
        with tf.device("CPU:0"):
            flies = self._state.age >= 0
            age = self._state.age.assign_add(tf.cast(flies, tf.int64))
            lands = flies & (age >= self._overlap)
        tf.cond(lands, self._land, lambda: None)
        due = self._training.progress.is_due(local)
        tf.cond(due, lambda: self._depart(done=False), lambda: None)

    def settle(self) -> bool:
        """Land; then hold last rounds, eagerly, at once; see the base class."""
        averaged = together = False
        if int(self._state.age) >= 0:
            averaged |= self._landed()
        while not together:
            self._depart(done=True)
            averaged |= self._landed()
            headers = averaging.read(self._state.headers.read_value())
            together = bool(tf.reduce_all(headers.done > 0))
        if tf.reduce_any(headers.unsettled > 0):
            self._settle_statistics(headers)
        return averaged

    def _landed(self) -> bool:
        self._land()
        return bool(self._state.applies > 0)

    def _settle_statistics(self, headers: averaging.RoundHeader) -> None:
        own = self._training
        self._channel.wait()
        traffic = own.assign_means(own.averaged, own.parts(headers))
        own.counters.add(counted(traffic))
        own.progress.unsettled.assign(0)

    # Departure: what the round needs is put aside, as the step changes the rest.

    def _depart(self, done: bool) -> None:
        own = self._training
        with tf.control_dependencies([self._refuse_another()]):
            told = own.header(done)
        put = self._state.put_aside(told, own.variables, own.place.number)
        own.progress.begin()
        if tf.executing_eagerly():
            self._arrival.expect(self._channel, self._fly)
            return
        with tf.control_dependencies(put), tf.device("CPU:0"):
            tf.numpy_function(self._begin, [], tf.bool)

    def _refuse_another(self) -> tf.Tensor:
        """Raise InvalidArgumentError where the owner has another round in flight."""
        number = self._training.place.number
        with tf.device("CPU:0"):
            flying = self._state.flying.read_value()
            free = (flying == NONE) | (flying == number)
        text = (
            "An optimizer trains other variables while a round of some is in flight. "
            "Set overlap=None where it trains now these, now those within an epoch"
        )
        return values.require(free, lambda: [text])

    def _begin(self) -> np.bool_:
        self._arrival.expect(self._channel, self._fly_compiled)
        return np.bool_(True)

    # Landing.

    def _land(self) -> None:
        """Wait for the round, and go on from what all have agreed on."""
        own, progress = self._training, self._training.progress
        came = self._arrival.take()
        with tf.control_dependencies([] if came is None else [came]):
            headers = averaging.read(self._state.headers.read_value())
            headers = own.checked(headers)
        with tf.control_dependencies([headers.moved]):
            applies = self._state.applies.read_value() > 0
            loss = self._state.loss.read_value()
            traffic = self._state.traffic.read_value()
            changes = [change.read_value() for change in self._state.changes]
        progress.notes.hear(headers)
        own.counters.add(counted(traffic))
        tf.cond(applies, lambda: self._go_on(changes), lambda: None)
        progress.length.adapt(lambda: loss)
        progress.rounds.assign_add(tf.cast(applies, tf.int64))
        self._state.age.assign(NONE)
        self._state.flying.assign(NONE)

    def _go_on(self, changes: list[Any]) -> None:
        own = self._training
        departed = [v.read_value() for v in self._state.departed]
        before = [v.read_value() for v in own.variables]
        own.anchor.step(changes)
        own.anchor.drop()
        own.progress.distance.assign(averaging.distance(departed, own.variables))
        for variable, since in zip(
            own.variables, averaging.outer_gradients(before, departed), strict=True
        ):
            agreed = values.widened(variable.read_value())
            variable.assign(tf.cast(agreed + since, variable.dtype))

    # State.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """A round in flight, as it lands: it is waited for, eagerly."""
        if tf.executing_eagerly():
            self._arrival.wait()
        return self._state.saved()

    def forget(self) -> None:
        """Let what is in flight go, eagerly: something else is loaded."""
        self._arrival.forget()
        self._state.age.assign(NONE)

    def loaded(self) -> None:
        """Let what was loaded land when it is time."""
        if self._state.loaded(self._training.place.number):
            self._arrival.put()
