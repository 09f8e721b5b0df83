"""State of a round in flight, from its departure to its landing.

Axis: N workers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import averaging, values
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.rounds import Training
from tf_dgc.transports import sums

NONE = -1  # no round is in flight
_QUIET = averaging.RoundHeader(*[0.0] * len(averaging.RoundHeader._fields))


class FlightState:
    """Variables of a round in flight.

    Attributes:
        age: steps since departure, or NONE: shape [], int64.
        flying: number of the exchange of the owner that has a round in flight, or NONE:
            shape [], int64; one of all exchanges of an owner.
        told: header of this worker's.
        headers: of all workers.
        applies: 1 where somebody had moved, as a round without is no step: shape [],
            int64.
        loss: mean of all workers; shape [], float64.
        traffic: of this worker, see `sums.traffic_of`.
        departed: parameters at departure.
        changes: that all have agreed on.
    """

    def __init__(self, training: Training, sibling: "FlightState | None") -> None:
        """Create the variables, outside of any graph.

        Args:
            training: what takes part.
            sibling: of the same owner, if there is one.
        """
        place = training.place
        with tf.init_scope(), tf.device("CPU:0"):
            unknown = tf.constant(np.nan, tf.float64)
            none = tf.constant(NONE, tf.int64)
            self.age = own_variable(none, "averaging_age")
            flying = own_variable(none, "averaging_flying")
            self.flying: tf.Variable = sibling.flying if sibling else flying
            own = averaging.write(_quiet())
            self.told = own_variable(own, "averaging_told")
            headers = tf.tile(own[tf.newaxis], [place.transport.size, 1])
            self.headers = own_variable(headers, "averaging_headers")
            self.applies = own_variable(tf.zeros([], tf.int64), "averaging_applies")
            self.loss = own_variable(unknown, "averaging_flight_loss")
            self.traffic = own_variable(sums.no_traffic(), "averaging_traffic")
        with tf.init_scope(), tf.device(place.transport.device):
            self.departed, self.changes = [], []
            for v in training.variables:
                zeros = tf.zeros(v.shape, v.dtype)
                self.departed.append(own_variable(zeros, "averaging_departed"))
                change = own_variable(values.widened(zeros), "averaging_change")
                self.changes.append(change)

    def put_aside(
        self, told: tf.Tensor, variables: Sequence[Any], number: int
    ) -> list[Any]:
        """Begin a flight: put aside what the round needs, as steps change the rest.

        Args:
            told: header of this worker's.
            variables: the parameters.
            number: of the exchange.

        Returns:
            What the round comes after.
        """
        put = [self.told.assign(told, read_value=False)]
        for departed, variable in zip(self.departed, variables, strict=True):
            put.append(departed.assign(variable, read_value=False))
        self.age.assign(0)
        self.flying.assign(number)
        return put

    def saved(self) -> Mapping[str, tf.Variable]:
        """Return what is saved of it, by name."""
        found = {
            "flight age": self.age,
            "flight applies": self.applies,
            "flight loss": self.loss,
        }
        for name, variables in (
            ("flight departed", self.departed),
            ("flight change", self.changes),
        ):
            found |= {f"{name} {i}": v for i, v in enumerate(variables)}
        return found

    def loaded(self, number: int) -> bool:
        """Go on, eagerly, from what was loaded; tell whether a round is in flight.

        Args:
            number: of the exchange.
        """
        own = averaging.write(_quiet())
        self.headers.assign(tf.broadcast_to(own, self.headers.shape))
        self.traffic.assign(sums.no_traffic())
        flies = int(self.age) >= 0
        self.flying.assign(number if flies else NONE)
        return flies


def _quiet() -> averaging.RoundHeader:
    """Return a header of which nobody minds anything."""
    return _QUIET._replace(loss=float("nan"), rate=float("nan"))
