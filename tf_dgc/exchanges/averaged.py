"""Parameters are averaged in rounds, after local steps.

Axes: N workers, or sites, whose workers take their steps together.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.config import AveragingConfig
from tf_dgc.exchanges import formats
from tf_dgc.exchanges.anchors import Anchor, Outer
from tf_dgc.exchanges.at_site import AtSite, is_of_site
from tf_dgc.exchanges.base import Apply, Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.channel import Channel
from tf_dgc.exchanges.compressed import Compressed
from tf_dgc.exchanges.dense import Dense
from tf_dgc.exchanges.figures import TensorStats
from tf_dgc.exchanges.flights import Flights
from tf_dgc.exchanges.ledger import Ledger
from tf_dgc.exchanges.modes import SUM, Combining
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.period_steps import PeriodSteps
from tf_dgc.exchanges.progress import PeriodProgress
from tf_dgc.exchanges.replicas import Replicas
from tf_dgc.exchanges.residual import OWNED
from tf_dgc.exchanges.rounds import Companions, Rounds, RoundsAtOnce, Training
from tf_dgc.exchanges.settled import SettledMark
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport

_PARAMETER, _AVERAGED = "parameter", "averaged"  # names of saved arrays begin so


class Expected(NamedTuple):
    """Belongings of an owner, told before its first exchange."""

    companions: Companions  # what is averaged, or saved, beside its parameters
    outer: Outer | None = None  # the outer optimizer's step; None subtracts
    combining: Combining = SUM  # of compressed changes
    overlap: int = 0  # local steps from the departure of a round to its landing


class Averaged(Exchange):
    """Local steps, and rounds in which the workers agree on parameters.

    `gradients` returns what to apply, and `parameters` must follow when it is.

    Attributes:
        progress: of this worker within its period.
        anchor: parameters with which that began.
        rounds: in which workers agree.
        averaged: what is averaged beside the parameters.
        settled: when all last met.
    """

    lockstep = False
    anchor: Anchor

    def __init__(
        self,
        place: Place,
        config: AveragingConfig,
        expected: Expected,
        loss: tf.Variable,
        channel: Channel | None,
        taken_over: TakenOver | None = None,
    ) -> None:
        """Create the variables, outside of any graph; compare forms over the workers.

        Args:
            place: whose parameters, and with whom.
            config: the settings.
            expected: what belongs to the owner.
            loss: shape [], float64.
            channel: for rounds in flight; None holds them at once.
            taken_over: what the optimizer leaves to the exchange within a site.
        """
        super().__init__(place)
        self._config, self._companions = config, expected.companions
        sites = [each._site for each in place.siblings]
        self._site = AtSite(place, config, taken_over, sites)
        self.progress = PeriodProgress(config, loss, bool(self._site))
        args = self._site, self.progress, config.synchronous_steps
        self._steps = PeriodSteps(place, *args)
        replicas = self.replicas
        if channel is not None:
            channel.wait()  # it is to be free for what opening takes
            place = place._replace(transport=channel.transport)
            aside = place.transport.everybody, place.interval, f"{self.name}.anchor"
            replicas = Replicas(*aside)
        self._inner = _inner(place, config, expected.combining)
        self.anchor = _anchor(place, config, expected.outer, self.transport.device)
        self.progress.follow([each.progress for each in _earlier(place)])
        own = self.progress, self.anchor, self._inner, self.counters, replicas
        training = Training(place, expected.companions, *own)
        self.averaged = training.averaged
        self.rounds = _rounds(training, expected.overlap, channel)
        _agree(self.transport, self.averaged)
        self.settled = SettledMark(self.progress.taken, self._companions.statistics)

    @property
    def density(self) -> float | None:
        """Fraction of compressed elements that is sent in a round; None is all."""
        if not isinstance(self._inner, Compressed) or not self._inner.layout.elements:
            return None
        return 1.0 - float(self._inner.config.sparsity)

    # Steps.

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return the gradients of a local step, or their sum where it is of several."""
        self.settled.refuse_late()
        self.anchor.drop_first()
        return self._steps.gradients(local, taken_over, part)

    def parameters(self) -> None:
        """Count a step that has been applied, and hold a round where it is time."""
        first = self._config.synchronous_steps
        if self.anchor and first:
            # The last of them leads to where the first period begins.
            last = self.progress.has_taken(first - 1)
            tf.cond(last, self.anchor.drop, lambda: None)
        self.rounds.after_step(self.progress.step())

    # Where workers meet outside of steps.

    def settle(self) -> bool:
        """Hold last rounds, eagerly, of what was trained since the last one.

        Returns:
            Whether parameters were averaged.
        """
        if self.settled.statistics_changed():
            self.progress.unsettle()  # by forward passes that took no step, too
        averaged = self.rounds.settle()
        self.settled.set()
        return averaged

    # State.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """Residuals of compression, the position in the period, and what is own."""
        found = {**self._inner.state, **self.progress.state}
        found |= {**_numbered("anchor", self.anchor.values), **self.rounds.state}
        found |= {**self._site.state, **_numbered(_PARAMETER, self.variables)}
        found |= _numbered(_AVERAGED, self.averaged)
        return found | _numbered("own", self._companions.own)

    @property
    def owed(self) -> Mapping[str, tf.Tensor]:
        """Residuals that compression keeps in the sums themselves."""
        return self._inner.owed

    @property
    def steps(self) -> int:
        """Number of rounds that count towards the schedule of compression."""
        return self._inner.steps

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved, but for what is the model's own by now."""
        self.rounds.forget()
        within = bool(arrays["position"]) or arrays.get("flight age", -1) >= 0
        left = _without_weights(arrays, within)
        inner = {OWNED, *self._inner.state}
        self._site.load({k: left.pop(k) for k in list(left) if is_of_site(k)})
        self._inner.load({k: v for k, v in left.items() if k in inner}, steps)
        super().load({k: v for k, v in left.items() if k not in inner}, steps)
        self.progress.length.loaded()
        self.anchor.loaded(self.progress.taken)
        self.rounds.loaded()
        self.settled.set(resumed=True, within=within)

    def flush(self, variables: Sequence[Any], apply: Apply) -> None:
        """Step, eagerly, along what compression keeps back; then clear it."""
        self._site.flush(variables, apply)
        self._inner.flush(
            variables, lambda update, own: self.anchor.take(update[0], own)
        )

    def kept(self) -> list[tf.Tensor]:
        """Return what compression keeps back."""
        return self._inner.kept() + self._site.kept()

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        return self._inner.tensor_stats(reset) + self._site.tensor_stats(reset)


def _agree(transport: Transport, averaged: Sequence[Any]) -> None:
    """Raise ValueError where workers average variables of other forms."""
    forms = enumerate(values.forms(averaged))
    told = {f"{_AVERAGED} {i}": form for i, form in forms}
    handshake.agree(transport, "averaged variables", told)


def _earlier(place: Place) -> list[Averaged]:
    """Return exchanges of the owner that have some variable of a place."""
    own = {id(variable) for variable in place.variables}
    return [
        each for each in place.siblings if not own.isdisjoint(map(id, each.variables))
    ]


def _anchor(
    place: Place, config: AveragingConfig, outer: Outer | None, device: str
) -> Anchor:
    """Return where a period begins; none for plain averages that are held at once."""
    wanted = outer or config.compression or config.overlap
    variables = place.variables if wanted else []
    earlier = [each.anchor for each in _earlier(place)]
    return Anchor(variables, outer, device, earlier)


def _rounds(training: Training, overlap: int, channel: Channel | None) -> Rounds:
    """Return what holds the rounds of a training: in flight, if there is a channel."""
    if channel is None:
        return RoundsAtOnce(training)
    siblings = [each.rounds for each in training.place.siblings]
    return Flights(training, overlap, channel, siblings)


def _numbered(kind: str, variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by the names under which they are saved."""
    return {f"{kind} {i}": variable for i, variable in enumerate(variables)}


def _inner(place: Place, config: AveragingConfig, combining: Combining) -> Exchange:
    """Return what exchanges changes of parameters."""
    if not config.compression:
        return Dense(place)
    siblings = [other._inner for other in place.siblings]
    beside = place._replace(siblings=siblings)
    inner = Compressed(beside, None, config.compression, combining=combining)
    formats.tell_gathered(inner.config, inner.layout, place.transport, config.combine)
    return inner


def _without_weights(arrays: Mapping[str, Any], within: bool) -> dict[str, Any]:
    """Return what was saved but for what is the model's own by now.

    At the end of a period these are its weights, which are its user's to load.

    Args:
        arrays: that were saved.
        within: whether in the midst of a period.
    """
    agreed = {_PARAMETER: not within}
    agreed[_AVERAGED] = not (within or arrays["unsettled"])
    return {k: v for k, v in arrays.items() if not agreed.get(k.split()[0])}


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
    if any(each.settled.changed() for each in others):
        others = [each for each in ledger.left() if each is not newest]
    found = others if newest is None else [*others, newest]
    waiting = [] if resumed else [each for each in found if each.settled.waits]
    changed = [each for each in found if each.settled.changed()]
    if not changed and newest is not None:
        changed = [newest]  # where others may have trained
    averaged = [
        each.owner() for each in changed if each not in waiting and each.settle()
    ]
    averaged = [owner for owner in averaged if owner is not None]
    for each in found:
        if each not in waiting:
            each.anchor.drop()  # to begin there: parameters may have been loaded
    return averaged


class Averaging:
    """Makes the exchanges of parameter averaging, for a `Ledger`.

    Attributes:
        lockstep: whether some steps are of several workers.
        loss: shape [], float64, that an adaptive period follows.
    """

    def __init__(self, config: AveragingConfig) -> None:
        """Create the loss, outside of any graph."""
        self._config = config
        self.lockstep = config.synchronous_steps > 0 or config.within is not None
        self._expected: weakref.WeakKeyDictionary[Any, Expected] = (
            weakref.WeakKeyDictionary()
        )
        self._channel: Channel | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            self.loss = tf.Variable(math.nan, dtype=tf.float64, trainable=False)

    def expect(self, owner: Any, expected: Expected) -> None:
        """Say what belongs to an owner, before its first exchange."""
        self._expected[owner] = expected

    def __call__(self, place: Place, taken_over: TakenOver | None) -> Averaged:
        """Make an exchange; momentum is corrected where sites compress gradients."""
        expected = self._expected[place.owner()]
        channel = self._channel_of(place) if self._config.overlap else None
        args = place, self._config, expected, self.loss, channel
        return Averaged(*args, taken_over)

    def flights(self) -> list[tuple[float, float]]:
        """Return when rounds departed and came, in seconds, since the last time."""
        times = None if self._channel is None else self._channel.times
        return [times.popleft() for _ in range(len(times))] if times else []

    def _channel_of(self, place: Place) -> Channel:
        """Return what holds rounds in flight; a new one where a ledger begins anew."""
        if self._channel is None or not place.number:
            if self._channel is not None:
                self._channel.end()
            self._channel = Channel(place.transport)
        return self._channel
