"""What workers do in a round of averaging.

Axes: N workers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import averaging, dgc
from tf_dgc.config import ADAPTIVE, AveragingConfig
from tf_dgc.state import AveragingState
from tf_dgc.synchronizers.base import Account, Synchronizer
from tf_dgc.synchronizers.compressed import DeepGradientCompression
from tf_dgc.synchronizers.dense import Dense
from tf_dgc.transports.base import Transport

_HEADER_BYTES = 8 * len(averaging.Header._fields)


class Companions(NamedTuple):
    """Variables that belong to an owner's training, beside those it trains."""

    statistics: Sequence[Any]  # that forward passes change; averaged in each round
    averaged: Sequence[Any]  # averaged, too, of the optimizer
    own: Sequence[Any]  # each worker's; saved with its state


class Period(NamedTuple):
    """What is kept of an account."""

    state: AveragingState
    companions: Companions

    @property
    def averaged(self) -> list[Any]:
        """What is averaged beside the parameters."""
        return [*self.companions.statistics, *self.companions.averaged]


class Rounds:
    """Rounds in which the workers agree on parameters.

    Attributes:
        inner: exchanges changes of parameters, where they have an anchor.
        anchored: whether they have: changes are compressed, or outer steps.
        loss: shape [], float64, that an adaptive period follows.
    """

    def __init__(
        self,
        transport: Transport,
        config: AveragingConfig,
        step_outer: Callable[[Any, list[Any], Sequence[Any]], None] | None,
    ) -> None:
        """Prepare; arguments as of `ParameterAveraging`."""
        self.transport, self.config = transport, config
        compression = config.compression
        self.inner: Synchronizer = (
            DeepGradientCompression(transport, compression)
            if compression
            else Dense(transport)
        )
        self.anchored = bool(step_outer or compression)
        self._step_outer = step_outer
        with tf.init_scope(), tf.device("CPU:0"):
            self.loss = tf.Variable(float("nan"), dtype=tf.float64, trainable=False)

    def meet(
        self, account: Account, state: AveragingState, done: bool
    ) -> averaging.Header:
        """Exchange headers; raise where the workers cannot go on together."""
        header = averaging.Header(
            account.number,
            state.rounds,
            state.position,
            state.unsettled,
            done,
            dgc.first_nonfinite(account.variables),
            self.loss,
        )
        gathered = self.transport.all_gather(
            averaging.write(header), f"{account.name}.round"
        )
        headers = averaging.read(gathered)
        names = [v.name for v in account.variables]
        with tf.control_dependencies(_refuse(headers, state.steps, names)):
            return averaging.Header(*[tf.identity(field) for field in headers])

    def average(
        self,
        account: Account,
        period: Period,
        headers: averaging.Header,
        parameters: bool,
    ) -> None:
        """Average statistics and, if told so, parameters; the next period begins."""
        state, averaged = period.state, period.averaged
        parts = averaging.shares(
            averaged, state.unsettled, averaging.count(headers.unsettled)
        )
        own, moved = [], averaging.count(headers.moved)
        size: Any = _HEADER_BYTES
        elements: Any = 0
        if parameters:
            own = [variable.read_value() for variable in account.variables]
        if parameters and self.anchored:
            anchor = [a.read_value() for a in state.anchor]
            gradients = averaging.shares(
                averaging.outer_gradients(anchor, own), state.position, moved
            )
            exchanged, size, elements = self.inner._exchange(
                account, gradients, None, False
            )
            size += _HEADER_BYTES
            for variable, agreed in zip(account.variables, anchor, strict=True):
                variable.assign(agreed)

            def step() -> None:
                self.step(account.owner(), exchanged.gradients, account.variables)

            if exchanged.apply is None:
                step()
            else:
                tf.cond(exchanged.apply, step, lambda: None)
        elif parameters:
            averaged = [*account.variables, *averaged]
            parts = [*averaging.shares(own, state.position, moved), *parts]
        reduced = self.transport.all_reduce(parts, f"{account.name}.average")
        for variable, mean in zip(averaged, reduced, strict=True):
            variable.assign(mean)
        counts = [v.shape.num_elements() for v in averaged]
        size += sum(n * v.dtype.size for n, v in zip(counts, averaged, strict=True))
        figures = tf.cast([size, 0, elements + sum(counts), 0], tf.int64)
        account.counters.add(figures)
        if parameters:
            state.drop_anchor(account.variables)
            state.distance.assign(averaging.distance(own, account.variables))
            self._adapt(state, headers)
            state.rounds.assign_add(1)
        state.position.assign(0)
        state.unsettled.assign(0)

    def step(self, owner: Any, gradients: list[Any], variables: Sequence[Any]) -> None:
        """Step an owner's variables along gradients."""
        if self._step_outer is not None:
            self._step_outer(owner, gradients, variables)
            return
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(tf.cast(gradient, variable.dtype))

    def _adapt(self, state: AveragingState, headers: averaging.Header) -> None:
        if self.config.period != ADAPTIVE:
            return
        loss = averaging.mean_loss(headers)
        known = tf.math.is_finite(state.first_loss)
        first = state.first_loss.assign(tf.where(known, state.first_loss, loss))
        least, most = self.config.min_period, self.config.max_period
        period = averaging.next_period(state.period, loss, first, least, most)
        state.period.assign(period)


def _refuse(headers: averaging.Header, step: Any, names: list[str]) -> list[Any]:
    """Raise InvalidArgumentError where workers differ, or one has numbers no more."""
    damaged = averaging.damaged(headers, len(names))
    bad = tf.clip_by_value(tf.cast(headers.nonfinite, tf.int32), 0, len(names))
    rank = tf.argmax(tf.cast(bad > 0, tf.int32))
    name = tf.gather(tf.constant(["", *names]), bad[rank])
    return [
        tf.debugging.Assert(
            ~tf.reduce_any(damaged),
            ["What a worker tells of its round is damaged. Ranks:", tf.where(damaged)],
        ),
        tf.debugging.Assert(
            tf.reduce_all(headers.account == headers.account[0])
            & tf.reduce_all(headers.round == headers.round[0]),
            [
                "The workers are not in the same round of the same optimizer. Numbers "
                "of optimizers and of rounds, by rank:",
                headers.account,
                headers.round,
            ],
            summarize=-1,
        ),
        tf.debugging.Assert(
            tf.reduce_all(bad == 0),
            [
                "A variable holds NaN or infinity; all workers stop, it was not "
                "averaged. Rank, step and variable:",
                rank,
                step.read_value(),
                name,
            ],
        ),
    ]
