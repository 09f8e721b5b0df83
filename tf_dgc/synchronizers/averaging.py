"""Parameters are averaged in rounds, after local steps.

Axes: N workers.
"""

import weakref
import zlib
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

_PARAMETER, _AVERAGED = "parameter", "averaged"  # names of saved arrays begin so
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


class Mark(NamedTuple):
    """What tells whether an account has changed."""

    steps: int
    statistics: int  # checksum


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
        # When all last met, or when it was restored.
        self._settled: weakref.WeakKeyDictionary[Account, Mark] = (
            weakref.WeakKeyDictionary()
        )
        self._resumed: weakref.WeakSet[Account] = weakref.WeakSet()
        self._last: Account | None = None  # that was opened
        self._eager = False  # whether the step that is taken runs eagerly
        with tf.init_scope(), tf.device("CPU:0"):
            self.loss = tf.Variable(float("nan"), dtype=tf.float64, trainable=False)

    # Steps.

    def _open(
        self, owner: object, variables: Sequence[Any], momentum: dgc.Momentum | None
    ) -> Account:
        account = super()._open(owner, variables, momentum)
        self._last = account
        restored = account in self._resumed
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

    def end_step(self, owner: object, variables: Sequence[Any]) -> None:
        """Count a step that has been applied, and hold a round where it is time.

        Args:
            owner: as in `exchange`.
            variables: as in `exchange`.
        """
        account = self._owners[owner][tuple(id(v) for v in variables)]
        state = self.periods[account].state
        first = self.config.synchronous_steps
        local = state.steps >= first
        if self._anchored and first:
            # The last of them leads to where the first period begins.
            last = state.steps == first - 1
            tf.cond(last, lambda: self._drop_anchor(account), lambda: None)
        position = state.position.assign_add(tf.cast(local, tf.int64))
        state.unsettled.assign_add(1)
        state.steps.assign_add(1)

        def hold_round() -> None:
            self._average(account, self._meet(account, done=False), parameters=True)

        tf.cond(local & (position >= state.period), hold_round, lambda: None)

    # Rounds.

    def settle(self, resumed: bool = False) -> list[Any]:
        """Hold a last round, eagerly, of what was trained since the last call.

        A worker that has come here takes part in the rounds of those that have not,
        with nothing to add, until all are here. All workers call this.

        Args:
            resumed: also of what was restored in the midst of a period, and not
                trained since.

        Returns:
            The owners whose parameters were averaged.
        """
        accounts = self.accounts()
        if len(accounts) > 1:
            accounts = self._accounts_of(None)  # that are left, on all workers alike
        waiting = [] if resumed else [a for a in accounts if self._is_resumed(a)]
        marks = {account: self._mark_of(account) for account in accounts}
        changed = [a for a in accounts if self._settled[a] != marks[a]]
        if not changed and self._last in accounts:
            changed = [self._last]  # where others may have trained
        averaged = []
        for account in changed:
            if account in waiting:
                continue
            state = self.periods[account].state
            if self._settled[account].statistics != marks[account].statistics:
                # By forward passes that took no step, too.
                state.unsettled.assign(tf.maximum(state.unsettled, 1))
            together = False
            while not together:
                headers = self._meet(account, done=True)
                moved = bool(tf.reduce_any(headers.moved > 0))
                if moved or tf.reduce_any(headers.unsettled > 0):
                    self._average(account, headers, parameters=moved)
                together = bool(tf.reduce_all(headers.done > 0))
                averaged += [account.owner()] * moved
            self._settled[account] = self._mark_of(account)
            self._resumed.discard(account)
        for account in accounts:
            if self._anchored and account not in waiting:
                self._drop_anchor(account)  # weights may have been loaded
        return averaged

    def _is_resumed(self, account: Account) -> bool:
        """Tell whether it was restored, and not trained since."""
        steps = int(self.periods[account].state.steps)
        return account in self._resumed and self._settled[account].steps == steps

    def _mark_of(self, account: Account) -> Mark:
        state, companions = self.periods[account]
        crc = 0
        for variable in companions.statistics:
            crc = zlib.crc32(variable.numpy().tobytes(), crc)
        return Mark(int(state.steps), crc)

    def _drop_anchor(self, account: Account) -> None:
        """Remember the parameters, which are the same on all workers now."""
        state = self.periods[account].state
        for anchor, variable in zip(state.anchor, account.variables, strict=True):
            anchor.assign(variable)

    def _meet(self, account: Account, done: bool) -> averaging.Header:
        """Exchange headers; raise where the workers cannot go on together."""
        state = self.periods[account].state
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

    def _average(
        self, account: Account, headers: averaging.Header, parameters: bool
    ) -> None:
        """Average statistics and, if told so, parameters; the next period begins."""
        state, averaged = self.periods[account].state, self.periods[account].averaged
        parts = averaging.shares(
            averaged, state.unsettled, averaging.count(headers.unsettled)
        )
        own, moved = [], averaging.count(headers.moved)
        size: Any = _HEADER_BYTES
        elements: Any = 0
        if parameters:
            own = [variable.read_value() for variable in account.variables]
        if parameters and self._anchored:
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
        if parameters and self._anchored:
            self._drop_anchor(account)
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
        self._inner._prepare(account, None)
        period = self.config.period
        state = AveragingState(
            self.config.max_period if isinstance(period, str) else period,
            account.variables if self._anchored else [],
            self.transport.device,
        )
        period_of = self.periods[account] = Period(state, companions)
        forms = {
            f"averaged {i}": f"{v.dtype.name} {v.shape}"
            for i, v in enumerate(period_of.averaged)
        }
        handshake.agree(self.transport, "averaged variables", forms)
        if self._anchored:
            self._drop_anchor(account)
        # Of statistics that are none: they may have changed already.
        self._settled[account] = Mark(0, -1)

    def _arrays_of(self, account: Account) -> dict[str, tf.Variable]:
        state, companions = self.periods[account]
        found = self._inner._arrays_of(account) | state.arrays() | {"loss": self.loss}
        for name, variables in (
            (_PARAMETER, account.variables),
            (_AVERAGED, self.periods[account].averaged),
            ("own", companions.own),
        ):
            found |= {f"{name} {i}": v for i, v in enumerate(variables)}
        return found

    def _step_of(self, account: Account) -> int:
        return self._inner._step_of(account)

    def _load_step(self, account: Account, step: int) -> None:
        self._inner._load_step(account, step)

    def _load(self, account: Account, record: saving.Record) -> None:
        # At the end of a period these are the model's own weights, which are its
        # user's to load.
        agreed = {
            _PARAMETER: not record.arrays["position"],
            _AVERAGED: not record.arrays["unsettled"],
        }
        left = {k: v for k, v in record.arrays.items() if not agreed.get(k.split()[0])}
        super()._load(account, record._replace(arrays=left))
        state, config = self.periods[account].state, self.config
        least, most = config.min_period, config.max_period
        if not isinstance(config.period, str):
            least = most = config.period
        state.period.assign(tf.clip_by_value(state.period, least, most))
        self._resumed.add(account)
        self._settled[account] = self._mark_of(account)

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
