"""Parameters are averaged in rounds, after local steps.

Axes: N workers.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import averaging, dgc
from tf_dgc.config import ADAPTIVE, AveragingConfig
from tf_dgc.state import AveragingState, RoundStats, TensorStats
from tf_dgc.synchronizers import saving
from tf_dgc.synchronizers.base import Account, Exchanged, Synchronizer
from tf_dgc.synchronizers.compressed import DeepGradientCompression
from tf_dgc.synchronizers.dense import Dense
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport

_HEADER_BYTES = 8 * len(averaging.Header._fields)


class Companions(NamedTuple):
    """Variables that belong to an owner's training, beside those it trains."""

    averaged: Sequence[Any]  # with the parameters, in each round
    own: Sequence[Any]  # each worker's; saved with its state


class Period(NamedTuple):
    """What is kept of an account."""

    state: AveragingState
    companions: Companions


class ParameterAveraging(Synchronizer):
    """Local steps, and rounds in which the workers agree on parameters.

    `exchange` returns gradients to apply, and `end_step` must follow when they are.
    """

    def __init__(
        self,
        transport: Transport,
        config: AveragingConfig,
        companions_of: Callable[[Any], Companions],
        step_outer: Callable[[Any, list[Any], Sequence[Any]], None] | None,
    ) -> None:
        """Wait for owners.

        Args:
            transport: to the other workers.
            config: the settings.
            companions_of: returns what belongs to an owner.
            step_outer: steps an owner's variables along gradients, as the outer
                optimizer does; None subtracts them.
        """
        super().__init__(transport)
        self.config = config
        self.periods: weakref.WeakKeyDictionary[Account, Period] = (
            weakref.WeakKeyDictionary()
        )
        self._companions_of = companions_of
        self._step_outer = step_outer
        compression = config.compression
        self._inner: Synchronizer = (
            DeepGradientCompression(transport, compression)
            if compression
            else Dense(transport)
        )
        self._anchored = bool(step_outer or compression)
        # Steps that were done when all last met, or when they were restored.
        self._settled: weakref.WeakKeyDictionary[Account, int] = (
            weakref.WeakKeyDictionary()
        )
        self._eager = False  # whether the step that is taken runs eagerly
        with tf.init_scope(), tf.device("CPU:0"):
            self.loss = tf.Variable(float("nan"), dtype=tf.float64, trainable=False)

    # Steps.

    def _open(
        self, owner: object, variables: Sequence[Any], momentum: dgc.Momentum | None
    ) -> Account:
        account = super()._open(owner, variables, momentum)
        restored = account in self._settled
        if restored and self._eager and int(self.periods[account].state.position):
            raise ValueError(
                "What was saved in the midst of a period must be restored before a "
                "step computes its gradient. Received: `restore_state` before the "
                "first step of a model with run_eagerly=True. Train a step before it."
            )
        return account

    def exchange(
        self,
        owner: object,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None = None,
    ) -> Exchanged:
        """Return the gradients of a local step, or their sum; see the base class."""
        self._eager = tf.executing_eagerly()
        return super().exchange(owner, gradients, variables, momentum)

    def _exchange(
        self, account: Account, gradients: list[Any], momentum: dgc.Momentum | None
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        state, first = self.periods[account].state, self.config.synchronous_steps
        if self._anchored:
            local = state.steps >= first
            tf.cond(local, lambda: self._drop_anchor(account), lambda: None)
        nothing = tf.zeros([], tf.int64)

        def own() -> tuple[list[Any], tf.Tensor, tf.Tensor]:
            strong = [_times(g, self.transport.size) for g in gradients]
            return strong, nothing, nothing

        if not first:
            found, size, elements = own()
        else:
            found, size, elements = tf.cond(
                state.steps < first,
                lambda: self._sum_dense(gradients, account.variables, account.name),
                own,
            )
        return Exchanged(found, [False] * len(found), None), size, elements

    def _drop_anchor(self, account: Account) -> None:
        """Where a period begins, remember the parameters."""
        state = self.periods[account].state

        def drop() -> None:
            for anchor, variable in zip(state.anchor, account.variables, strict=True):
                anchor.assign(variable)

        tf.cond(state.position == 0, drop, lambda: None)

    def end_step(self, owner: object, variables: Sequence[Any]) -> None:
        """Count a step that has been applied, and hold a round where it is time.

        Args:
            owner: as in `exchange`.
            variables: as in `exchange`.
        """
        account = self._owners[owner][tuple(id(v) for v in variables)]
        state = self.periods[account].state
        local = state.steps >= self.config.synchronous_steps
        position = state.position.assign_add(tf.cast(local, tf.int64))
        state.unsettled.assign_add(1)
        state.steps.assign_add(1)

        def hold_round() -> None:
            self._average(account, self._meet(account, done=False), parameters=True)

        tf.cond(local & (position >= state.period), hold_round, lambda: None)

    # Rounds.

    def settle(self) -> None:
        """Hold a last round, eagerly, of what was trained since the last call.

        A worker that has come here takes part in the rounds of those that have not,
        with nothing to add, until all are here. All workers call this.
        """
        for account in self.accounts():
            steps = int(self.periods[account].state.steps)
            together = self._settled.get(account, 0) == steps
            self._settled[account] = steps
            while not together:
                headers = self._meet(account, done=True)
                moved = bool(tf.reduce_any(headers.moved > 0))
                if moved or tf.reduce_any(headers.unsettled > 0):
                    self._average(account, headers, parameters=moved)
                together = bool(tf.reduce_all(headers.done > 0))

    def _meet(self, account: Account, done: bool) -> averaging.Header:
        """Exchange headers; raise where the workers cannot go on together."""
        state, companions = self.periods[account]
        averaged = [*account.variables, *companions.averaged]
        header = averaging.Header(
            state.rounds,
            state.position,
            state.unsettled,
            done,
            dgc.first_nonfinite(averaged),
            self.loss,
        )
        gathered = self.transport.all_gather(
            averaging.write(header), f"{account.name}.round"
        )
        headers = averaging.read(gathered)
        names = [v.name for v in averaged]
        with tf.control_dependencies(_refuse(headers, state.steps, names)):
            return averaging.Header(*[tf.identity(field) for field in headers])

    def _average(
        self, account: Account, headers: averaging.Header, parameters: bool
    ) -> None:
        """Average statistics and, if told so, parameters; the next period begins."""
        state, companions = self.periods[account]
        averaged = list(companions.averaged)
        parts = averaging.shares(
            averaged, state.unsettled, averaging.count(headers.unsettled)
        )
        own, moved = [], averaging.count(headers.moved)
        size: Any = _HEADER_BYTES
        elements: Any = 0
        if parameters:
            own = [variable.read_value() for variable in account.variables]
        if parameters and self._anchored:
            self._drop_anchor(account)
            anchor = [a.read_value() for a in state.anchor]
            gradients = averaging.shares(
                averaging.outer_gradients(anchor, own), state.position, moved
            )
            exchanged, size, elements = self._inner._exchange(account, gradients, None)
            size += _HEADER_BYTES
            for variable, agreed in zip(account.variables, anchor, strict=True):
                variable.assign(agreed)

            def step() -> None:
                self._step(account.owner(), exchanged.gradients, account.variables)

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
            state.distance.assign(averaging.distance(own, account.variables))
            self._adapt(state, headers)
            state.rounds.assign_add(1)
        state.position.assign(0)
        state.unsettled.assign(0)

    def _step(self, owner: Any, gradients: list[Any], variables: Sequence[Any]) -> None:
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

    # State.

    def _prepare(self, account: Account, momentum: dgc.Momentum | None) -> None:
        companions = self._companions_of(account.owner())
        forms = {
            f"averaged {i}": f"{v.dtype.name} {v.shape}"
            for i, v in enumerate(companions.averaged)
        }
        handshake.agree(self.transport, "averaged variables", forms)
        self._inner._prepare(account, None)
        period = self.config.period
        state = AveragingState(
            self.config.max_period if isinstance(period, str) else period,
            account.variables if self._anchored else [],
            self.transport.device,
        )
        self.periods[account] = Period(state, companions)

    def _arrays_of(self, account: Account) -> dict[str, tf.Variable]:
        state, companions = self.periods[account]
        found = self._inner._arrays_of(account) | state.arrays()
        for name, variables in (
            ("parameter", account.variables),
            ("averaged", companions.averaged),
            ("own", companions.own),
        ):
            found |= {f"{name} {i}": v for i, v in enumerate(variables)}
        return found

    def _step_of(self, account: Account) -> int:
        return self._inner._step_of(account)

    def _load_step(self, account: Account, step: int) -> None:
        self._inner._load_step(account, step)

    def _load(self, account: Account, record: saving.Record) -> None:
        super()._load(account, record)
        self._settled[account] = int(self.periods[account].state.steps)

    def release(self, variables: Sequence[Any]) -> None:
        """Apply what compression keeps back of these variables, eagerly; clear it.

        Raises:
            ValueError: a restored state waits for its optimizer's first step.
        """
        self._refuse_unclaimed()
        for owner, exchanged, owned in self._inner.flush(variables):
            self._step(owner, exchanged.gradients, owned)

    # Figures.

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        return self._inner.residual_norm()

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor."""
        return self._inner.tensor_stats(reset)

    def round_stats(self) -> RoundStats:
        """Return how it goes on; zeros before the first step."""
        accounts = self.accounts()
        if not accounts:
            zero = tf.zeros([], tf.int64)
            return RoundStats(zero, zero, zero, tf.zeros([]))
        state = self.periods[accounts[-1]].state
        fields = state.rounds, state.period, state.position, state.distance
        return RoundStats(*[field.read_value() for field in fields])


def _times(gradient: Any, factor: int) -> Any:
    if factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _refuse(headers: averaging.Header, step: Any, names: list[str]) -> list[Any]:
    """Raise InvalidArgumentError where workers differ, or one has numbers no more."""
    bad = tf.cast(headers.nonfinite, tf.int32)
    rank = tf.argmax(tf.cast(bad > 0, tf.int32))
    name = tf.gather(tf.constant(["", *names]), bad[rank])
    return [
        tf.debugging.Assert(
            tf.reduce_all(headers.round == headers.round[0]),
            ["The workers are not in the same round. Rounds, by rank:", headers.round],
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
