"""Parameters are averaged in rounds, after local steps.

Axes: N workers.
"""

import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host, averaging, values
from tf_dgc.config import ADAPTIVE, AveragingConfig
from tf_dgc.exchanges import applied, formats
from tf_dgc.exchanges.base import Apply, Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.compressed import Compressed
from tf_dgc.exchanges.dense import Dense
from tf_dgc.exchanges.figures import RoundStats, TensorStats, counted
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.ledger import Ledger
from tf_dgc.exchanges.modes import SUM, Combining
from tf_dgc.exchanges.parts import Ballot, Part, refuse_other_data
from tf_dgc.exchanges.residual import OWNED
from tf_dgc.transports import handshake, sums

_PARAMETER, _AVERAGED = "parameter", "averaged"  # names of saved arrays begin so
_HEADER_BYTES = 8 * len(averaging.Header._fields)


class Companions(NamedTuple):
    """Variables that belong to an owner's training, beside those it trains."""

    statistics: Sequence[Any]  # that forward passes change; averaged in each round
    averaged: Sequence[Any]  # averaged, too, of the optimizer
    own: Sequence[Any]  # each worker's; saved with its state


class Mark(NamedTuple):
    """Mark that tells whether something has changed."""

    steps: int
    statistics: int  # checksum


# Steps an owner's variables along gradients, as the outer optimizer does.
Outer = Callable[[list[Any], Sequence[Any]], None]


class Averaged(Exchange):
    """Local steps, and rounds in which the workers agree on parameters.

    `gradients` returns what to apply, and `parameters` must follow when it is.

    Attributes:
        period: shape [], int64, local steps between two rounds.
        rounds: shape [], int64, rounds done.
        position: shape [], int64, local steps since the last round, of all workers.
        moved: shape [], int64, those of them in which this worker had rows.
        unsettled: shape [], int64, steps with rows since statistics were averaged.
        taken: shape [], int64, steps done.
        distance: shape [], float32, of this worker's parameters from those agreed on,
            before the last round.
        loss: shape [], float64, that an adaptive period follows; of all exchanges.
    """

    lockstep = False

    def __init__(
        self,
        place: Place,
        config: AveragingConfig,
        inner: Exchange,
        companions: Companions,
        outer: Outer | None,
        loss: tf.Variable,
    ) -> None:
        """Create the variables, outside of any graph; compare forms over the workers.

        Args:
            place: whose parameters, and with whom.
            config: the settings.
            inner: exchanges changes of parameters, where these have an anchor: where
                changes are compressed, or are an outer optimizer's gradients.
            companions: what belongs to the owner.
            outer: the outer optimizer's step; None subtracts.
            loss: shape [], float64.
        """
        super().__init__(place)
        self.config, self.inner, self.companions = config, inner, companions
        self._outer, self.loss = outer, loss
        self._together = Dense(place)  # of synchronous steps
        self.averaged = [*companions.statistics, *companions.averaged]
        period = config.max_period if isinstance(config.period, str) else config.period
        with tf.init_scope(), tf.device("CPU:0"):
            zero = tf.zeros([], tf.int64)
            self.taken = own_variable(zero, "averaging_steps")
            self.position = own_variable(zero, "averaging_position")
            self.moved = own_variable(zero, "averaging_moved")
            self.unsettled = own_variable(zero, "averaging_unsettled")
            first = tf.constant(period, tf.int64)
            self.period = own_variable(first, "averaging_period")
            self.rounds = own_variable(zero, "averaging_rounds")
            unknown = tf.constant(math.nan, tf.float64)
            self._first_loss = own_variable(unknown, "averaging_first_loss")
            self._rate = own_variable(unknown, "averaging_rate")  # of the last step
            none = tf.zeros([len(averaging.READ)], tf.float64)
            self._read = own_variable(none, "averaging_read")  # in this period
            self._components = own_variable(
                tf.constant([""] * len(averaging.READ)), "averaging_components"
            )
            self.distance = own_variable(tf.zeros([]), "averaging_distance")
        self._make_anchors([each for each in place.siblings if each.meets(self)])
        forms = {
            f"{_AVERAGED} {i}": form
            for i, form in enumerate(values.forms(self.averaged))
        }
        handshake.agree(self.transport, "averaged variables", forms)
        # When all last met, or when it was restored.
        self._settled = Mark(0, -1)  # of statistics that are none: they may have moved
        self._resumed = False
        self._first = True  # no gradients yet
        self._ballot: Ballot | None = None

    def meets(self, other: "Averaged") -> bool:
        """Tell whether another exchange has some variable of this one."""
        known = {id(variable) for variable in self.variables}
        return any(id(variable) in known for variable in other.variables)

    def _make_anchors(self, earlier: Sequence["Averaged"]) -> None:
        """Make the parameters when the period began; none for plain averages.

        Args:
            earlier: exchanges of the same owner with variables in common, which have
                the anchors of these: they are what all agreed on when they last did.
        """
        anchored = self.variables if self._outer or self.config.compression else []
        known = {
            id(variable): anchor
            for each in earlier
            for variable, anchor in zip(each.variables, each._anchor, strict=False)
        }
        self._is_new = [id(v) not in known for v in anchored]
        with tf.init_scope(), tf.device(self.transport.device):
            for v in anchored:
                if id(v) not in known:
                    zeros = tf.zeros(v.shape, v.dtype)
                    known[id(v)] = own_variable(zeros, "averaging_anchor")
        self._anchor: list[tf.Variable] = [known[id(v)] for v in anchored]
        with tf.init_scope(), tf.device("CPU:0"):
            self._unanchored = own_variable(tf.constant(True), "averaging_unanchored")
            for each in earlier:  # synchronous steps are over, or go on
                self.taken.assign(tf.maximum(self.taken, each.taken))

    # Steps.

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return the gradients of a local step, or their sum in synchronous steps."""
        self._refuse_late_weights()
        if self._anchor:  # not before: a model may be built while its step is traced
            with tf.device("CPU:0"):
                first_time = tf.identity(self._unanchored.read_value())
            tf.cond(first_time, self._drop_first_anchor, lambda: None)
        if part is not None:
            self._rate.assign(tf.cast(part.rate, tf.float64))
            self._note_read(part)
            self._ballot = part.ballot
        first = self.config.synchronous_steps
        nothing = sums.no_traffic()

        def own() -> tuple[list[Any], tf.Tensor]:
            whole = self.transport.size if part is None else part.whole
            return [values.scaled(g, whole) for g in local], nothing

        def together() -> tuple[list[Any], tf.Tensor]:
            found = self._together.gradients(local, None, part)
            return found.gradients, found.traffic

        has_rows = tf.constant(True) if part is None else part.weight > 0
        with tf.device("CPU:0"):
            early = self.taken < first
        found, traffic = tf.cond(early, together, own) if first else own()
        # A worker without rows has not moved, and is left out of the mean.
        self.moved.assign_add(tf.cast(has_rows & ~early, tf.int64))
        self.unsettled.assign_add(tf.cast(has_rows, tf.int64))
        applies = None if part is None else has_rows | early
        return Update(found, [False] * len(found), applies, traffic)

    def _note_read(self, part: Part) -> None:
        """Add up the numbers of what is read, in a way that tells orders apart."""
        if part.witness is None:
            return
        with tf.device("CPU:0"):
            place = 1.0 + tf.cast(self.position, tf.float64)
            self._read.assign_add(tf.cast(part.witness, tf.float64) / place)
            self._components.assign(part.components)

    def parameters(self) -> None:
        """Count a step that has been applied, and hold a round where it is time."""
        first = self.config.synchronous_steps
        if self._anchor and first:
            # The last of them leads to where the first period begins.
            tf.cond(self._has_taken(first - 1), self._drop_anchor, lambda: None)
        with tf.device("CPU:0"):
            local = self.taken >= first
            position = self.position.assign_add(tf.cast(local, tf.int64))
            due = local & (position >= self.period)
        self.taken.assign_add(1)

        def hold() -> None:
            self.average(self.meet(done=False), parameters=True)

        tf.cond(due, _host.tensorflow.outside_of_loops(hold), lambda: None)

    def _has_taken(self, steps: int) -> tf.Tensor:
        """Tell whether so many steps were taken, on the host: it chooses what to do."""
        with tf.device("CPU:0"):
            return self.taken == steps

    # A round.

    def meet(self, done: bool) -> averaging.Header:
        """Exchange headers; raise where the workers cannot go on together.

        Args:
            done: whether this worker has come to the end of its data.
        """
        header = averaging.Header(
            self.number,
            self.rounds,
            self.moved,
            self.unsettled,
            done,
            values.first_nonfinite(self.variables),
            self.loss,
            self._rate,
            *tf.unstack(self._read.read_value()),
        )
        if self._ballot is not None:
            header = header._replace(stops=self._ballot.own.read_value())
        gathered = self.transport.all_gather(
            averaging.write(header), f"{self.name}.round"
        )
        headers = averaging.read(gathered)
        names = [v.name for v in self.variables]
        with tf.control_dependencies(_refuse(headers, self.taken, names)):
            headers = averaging.Header(*[tf.identity(field) for field in headers])
        alike = refuse_other_data(averaging.reads(headers), self._components)
        with tf.control_dependencies([alike]):
            headers = averaging.Header(*[tf.identity(field) for field in headers])
        if self._ballot is not None:
            self._ballot.last.assign(tf.cast(headers.stops, tf.float32))
        return headers

    def average(self, headers: averaging.Header, parameters: bool) -> None:
        """Average statistics and, if told so, parameters; the next period begins."""
        before = [v.read_value() for v in self.variables] if parameters else []
        parts = averaging.shares(
            self.averaged, self.unsettled, averaging.count(headers.unsettled)
        )
        averaged = list(self.averaged)
        traffic = sums.no_traffic()
        if parameters and self._anchor:
            traffic = self._step_from_anchor(before, averaging.count(headers.moved))
        elif parameters:
            moved = averaging.count(headers.moved)
            parts = [*averaging.shares(before, self.moved, moved), *parts]
            averaged = [*self.variables, *averaged]
        reduced = self.transport.all_reduce(parts, f"{self.name}.average")
        for variable, mean in zip(averaged, reduced, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))
        counts = [v.shape.num_elements() for v in averaged]
        size = sum(n * part.dtype.size for n, part in zip(counts, parts, strict=True))
        others = self.transport.size - 1
        received = others * _HEADER_BYTES + sums.in_ring(size, others + 1)
        traffic += sums.traffic_of(_HEADER_BYTES + size, sum(counts), received)
        self.counters.add(counted(traffic))
        if parameters:
            self._drop_anchor()
            self.distance.assign(averaging.distance(before, self.variables))
            self._adapt(headers)
            self.rounds.assign_add(1)
        for counter in (self.position, self.moved, self.unsettled):
            counter.assign(0)
        self._read.assign(tf.zeros_like(self._read))
        if parameters:
            agreed = [*self.variables, *self.averaged]
            self.replicas.compare(agreed, tf.reduce_max(headers.moved))

    def _step_from_anchor(
        self, own: Sequence[tf.Tensor], moved: tf.Tensor
    ) -> tf.Tensor:
        """Step from where the period began; return `sums.traffic_of` it."""
        anchor = [a.read_value() for a in self._anchor]
        local = averaging.outer_gradients(anchor, own)
        update = self.inner.gradients(averaging.shares(local, self.moved, moved), None)
        for variable, agreed in zip(self.variables, anchor, strict=True):
            variable.assign(agreed)

        def step() -> None:
            self._step(update.gradients, self.variables)

        if update.applies is None:
            step()
        else:
            tf.cond(update.applies, step, lambda: None)
        return update.traffic

    def _step(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        if self._outer is not None:
            self._outer(gradients, variables)
            return
        applied.subtract_all(variables, gradients)

    def _drop_first_anchor(self) -> None:
        """Remember the parameters that no exchange before has had."""
        anchored = zip(self._anchor, self.variables, self._is_new, strict=True)
        for anchor, parameter, is_new in anchored:
            if is_new:
                anchor.assign(parameter)
        self._unanchored.assign(False)

    def _drop_anchor(self) -> None:
        """Remember the parameters, where there is an anchor."""
        if self._anchor:
            for anchor, parameter in zip(self._anchor, self.variables, strict=True):
                anchor.assign(parameter)

    def _adapt(self, headers: averaging.Header) -> None:
        if self.config.period != ADAPTIVE:
            return
        loss = averaging.mean_loss(headers)
        known = tf.math.is_finite(self._first_loss)
        first = self._first_loss.assign(tf.where(known, self._first_loss, loss))
        least, most = self.config.min_period, self.config.max_period
        period = averaging.next_period(self.period, loss, first, least, most)
        self.period.assign(period)

    # Where workers meet outside of steps.

    @property
    def waits(self) -> bool:
        """Tell whether it was restored within a period, and not trained since."""
        return self._resumed and self._settled.steps == int(self.taken)

    def changed(self) -> bool:
        """Tell, eagerly, whether anything has moved since all last met."""
        return self._settled != self._mark()

    def settle(self) -> bool:
        """Hold a last round, eagerly, of what was trained since the last one.

        A worker that has come here takes part in the rounds of those that have not,
        with nothing to add, until all are here.

        Returns:
            Whether parameters were averaged.
        """
        if self._settled.statistics != self._mark().statistics:
            # By forward passes that took no step, too.
            self.unsettled.assign(tf.maximum(self.unsettled, 1))
        averaged = together = False
        while not together:
            headers = self.meet(done=True)
            moved = bool(tf.reduce_any(headers.moved > 0))
            if moved or tf.reduce_any(headers.unsettled > 0):
                self.average(headers, parameters=moved)
            together = bool(tf.reduce_all(headers.done > 0))
            averaged |= moved
        self._settled, self._resumed = self._mark(), False
        return averaged

    def begin_period(self) -> None:
        """Begin at the present parameters: they may have been loaded."""
        self._drop_anchor()

    def _mark(self) -> Mark:
        crc = 0
        for variable in self.companions.statistics:
            crc = zlib.crc32(variable.numpy().tobytes(), crc)
        return Mark(int(self.taken), crc)

    # State.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """Residuals of compression, the position in the period, and what is own."""
        found = dict(self.inner.state) | {
            "steps": self.taken,
            "position": self.position,
            "moved": self.moved,
            "unsettled": self.unsettled,
            "period": self.period,
            "rounds": self.rounds,
            "first_loss": self._first_loss,
            "distance": self.distance,
            **{f"anchor {i}": v for i, v in enumerate(self._anchor)},
            "loss": self.loss,
        }
        for name, variables in (
            (_PARAMETER, self.variables),
            (_AVERAGED, self.averaged),
            ("own", self.companions.own),
        ):
            found |= {f"{name} {i}": v for i, v in enumerate(variables)}
        return found

    @property
    def owed(self) -> Mapping[str, tf.Tensor]:
        """Residuals that compression keeps in the sums themselves."""
        return self.inner.owed

    @property
    def steps(self) -> int:
        """Number of rounds that count towards the schedule of compression."""
        return self.inner.steps

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved, but for what is the model's own by now."""
        # At the end of a period these are the model's own weights, which are its
        # user's to load.
        agreed = {
            _PARAMETER: not arrays["position"],
            _AVERAGED: not (arrays["position"] or arrays["unsettled"]),
        }
        left = {k: v for k, v in arrays.items() if not agreed.get(k.split()[0])}
        inner = {OWNED, *self.inner.state}
        self.inner.load({k: v for k, v in left.items() if k in inner}, steps)
        super().load({k: v for k, v in left.items() if k not in inner}, steps)
        config = self.config
        least, most = config.min_period, config.max_period
        if not isinstance(config.period, str):
            least = most = config.period
        self.period.assign(tf.clip_by_value(self.period, least, most))
        self._unanchored.assign(self.taken == 0)
        self._resumed, self._settled = True, self._mark()

    def flush(self, variables: Sequence[Any], apply: Apply) -> None:
        """Step, eagerly, along what compression keeps back; then clear it."""
        self.inner.flush(variables, lambda update, own: self._step(update[0], own))

    def kept(self) -> list[tf.Tensor]:
        """Return what compression keeps back."""
        return self.inner.kept()

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        return self.inner.tensor_stats(reset)

    def stats(self) -> RoundStats:
        """Return how it goes on."""
        fields = self.rounds, self.period, self.position, self.distance
        return RoundStats(*[field.read_value() for field in fields])

    def _refuse_late_weights(self) -> None:
        """Refuse what was restored when the step had its gradients already."""
        first, self._first = self._first, False
        late = first and self._resumed and tf.executing_eagerly()
        if late and int(self.position):
            raise ValueError(
                "What was saved in the midst of a period must be restored before a "
                "step computes its gradient. Received: `restore_state` before the "
                "first step of a model with run_eagerly=True. Train a step before it."
            )


def settle(ledger: Ledger, resumed: bool = False) -> list[Any]:
    """Hold a last round of all that was trained since the last call, eagerly.

    All workers call this.

    Args:
        ledger: whose exchanges are all `Averaged`.
        resumed: also of what was restored in the midst of a period, and not trained
            since.

    Returns:
        The owners whose parameters were averaged.
    """
    newest: Any = ledger.newest
    others: list[Any] = [each for each in ledger.exchanges() if each is not newest]
    if any(each.changed() for each in others):
        others = [each for each in ledger.left() if each is not newest]
    found = others if newest is None else [*others, newest]
    waiting = [] if resumed else [each for each in found if each.waits]
    changed = [each for each in found if each.changed()]
    if not changed and newest is not None:
        changed = [newest]  # where others may have trained
    averaged = [
        each.owner() for each in changed if each not in waiting and each.settle()
    ]
    averaged = [owner for owner in averaged if owner is not None]
    for each in found:
        if each not in waiting:
            each.begin_period()
    return averaged


class Averaging:
    """Makes the exchanges of parameter averaging, for a `Ledger`.

    Attributes:
        lockstep: whether it begins with synchronous steps.
        loss: shape [], float64, that an adaptive period follows.
    """

    def __init__(self, config: AveragingConfig) -> None:
        """Create the loss, outside of any graph."""
        self._config = config
        self.lockstep = config.synchronous_steps > 0
        self._expected: weakref.WeakKeyDictionary[
            Any, tuple[Companions, Outer | None, Combining]
        ] = weakref.WeakKeyDictionary()
        with tf.init_scope(), tf.device("CPU:0"):
            self.loss = tf.Variable(math.nan, dtype=tf.float64, trainable=False)

    def expect(
        self,
        owner: Any,
        companions: Companions,
        outer: Outer | None = None,
        combining: Combining = SUM,
    ) -> None:
        """Say what belongs to an owner, before its first exchange.

        Args:
            owner: of the exchange to come.
            companions: what is averaged, or saved, beside its parameters.
            outer: the outer optimizer's step; None subtracts.
            combining: of compressed changes.
        """
        self._expected[owner] = companions, outer, combining

    def __call__(self, place: Place, taken_over: TakenOver | None) -> Averaged:
        """Make an exchange; momentum stays the optimizer's own."""
        compression = self._config.compression
        companions, outer, combining = self._expected[place.owner()]
        inner: Exchange = Dense(place)
        if compression:
            siblings = [other.inner for other in place.siblings]
            beside = place._replace(siblings=siblings)
            inner = Compressed(beside, None, compression, combining=combining)
            args = inner.config, inner.layout, place.transport
            formats.tell_gathered(*args, self._config.combine)
        return Averaged(place, self._config, inner, companions, outer, self.loss)


def _refuse(headers: averaging.Header, step: Any, names: list[str]) -> list[Any]:
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
            "were not averaged. Callbacks must decide alike on all of them: by what "
            "all see, as the logs of epochs. Rank, its learning rate and those of all:",
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
