"""Parameters are averaged in rounds, after local steps.

Axes: N workers.
"""

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import averaging, dgc
from tf_dgc.config import AveragingConfig
from tf_dgc.state import AveragingState, RoundStats, TensorStats
from tf_dgc.synchronizers import saving
from tf_dgc.synchronizers.base import Account, Exchanged, Synchronizer
from tf_dgc.synchronizers.rounds import Companions, Period, Rounds
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport

_PARAMETER, _AVERAGED = "parameter", "averaged"  # names of saved arrays begin so


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
        self.rounds = Rounds(transport, config, step_outer)
        # When all last met, or when it was restored.
        self._settled: weakref.WeakKeyDictionary[Account, Mark] = (
            weakref.WeakKeyDictionary()
        )
        self._resumed: weakref.WeakSet[Account] = weakref.WeakSet()
        self._last: Account | None = None  # that was opened
        self._eager = False  # whether the step that is taken runs eagerly

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
        subtract: bool = False,
    ) -> Exchanged:
        """Return the gradients of a local step, or their sum; see the base class."""
        self._eager = tf.executing_eagerly()
        return super().exchange(owner, gradients, variables, momentum, subtract)

    def _exchange(
        self,
        account: Account,
        gradients: list[Any],
        momentum: dgc.Momentum | None,
        subtract: bool,
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
        period = self.periods[account]
        state, first = period.state, self.config.synchronous_steps
        local = state.steps >= first
        if state.anchor and first:
            # The last of them leads to where the first period begins.
            last = state.steps == first - 1
            tf.cond(last, lambda: state.drop_anchor(account.variables), lambda: None)
        position = state.position.assign_add(tf.cast(local, tf.int64))
        state.unsettled.assign_add(1)
        state.steps.assign_add(1)

        def hold_round() -> None:
            headers = self.rounds.meet(account, state, done=False)
            self._average(account, period, headers, parameters=True)

        tf.cond(local & (position >= state.period), hold_round, lambda: None)

    # Rounds.

    def _before_step(self, account: Account, variables: Sequence[Any]) -> None:
        return  # replicas are the same after rounds only

    def _average(
        self,
        account: Account,
        period: Period,
        headers: averaging.Header,
        parameters: bool,
    ) -> None:
        self.rounds.average(account, period, headers, parameters)
        if parameters:
            agreed = [*account.variables, *period.averaged]
            self._compare(account, agreed, tf.reduce_max(headers.moved))

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
            period = self.periods[account]
            state = period.state
            if self._settled[account].statistics != marks[account].statistics:
                # By forward passes that took no step, too.
                state.unsettled.assign(tf.maximum(state.unsettled, 1))
            together = False
            while not together:
                headers = self.rounds.meet(account, state, done=True)
                moved = bool(tf.reduce_any(headers.moved > 0))
                if moved or tf.reduce_any(headers.unsettled > 0):
                    self._average(account, period, headers, parameters=moved)
                together = bool(tf.reduce_all(headers.done > 0))
                averaged += [account.owner()] * moved
            self._settled[account] = self._mark_of(account)
            self._resumed.discard(account)
        for account in accounts:
            if account not in waiting:  # weights may have been loaded
                self.periods[account].state.drop_anchor(account.variables)
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

    # State.

    def _prepare(self, account: Account, momentum: dgc.Momentum | None) -> None:
        companions = self._companions_of(account.owner())
        self.rounds.inner._prepare(account, None)
        period = self.config.period
        state = AveragingState(
            self.config.max_period if isinstance(period, str) else period,
            account.variables if self.rounds.anchored else [],
            self.transport.device,
        )
        period_of = self.periods[account] = Period(state, companions)
        forms = {
            f"averaged {i}": f"{v.dtype.name} {v.shape}"
            for i, v in enumerate(period_of.averaged)
        }
        handshake.agree(self.transport, "averaged variables", forms)
        state.drop_anchor(account.variables)
        # Of statistics that are none: they may have changed already.
        self._settled[account] = Mark(0, -1)

    def _arrays_of(self, account: Account) -> dict[str, tf.Variable]:
        state, companions = self.periods[account]
        found = self.rounds.inner._arrays_of(account) | state.arrays()
        found["loss"] = self.rounds.loss
        for name, variables in (
            (_PARAMETER, account.variables),
            (_AVERAGED, self.periods[account].averaged),
            ("own", companions.own),
        ):
            found |= {f"{name} {i}": v for i, v in enumerate(variables)}
        return found

    def _step_of(self, account: Account) -> int:
        return self.rounds.inner._step_of(account)

    def _load_step(self, account: Account, step: int) -> None:
        self.rounds.inner._load_step(account, step)

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
        for owner, exchanged, owned in self.rounds.inner.flush(variables):
            self.rounds.step(owner, exchanged.gradients, owned)

    # Figures.

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        return self.rounds.inner.residual_norm()

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor."""
        return self.rounds.inner.tensor_stats(reset)

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
