"""Local steps, and rounds on servers in which the changes of workers meet.

Of a worker k, which has fetched a from the servers and taken n_k local steps to w_k:

    g <- sum n_k (a_k - w_k) / sum n_k   of those that have come to the round
    w <- the outer optimizer's step by g, on the servers
    a_k, w_k <- w                        of those; others go on with a_k and w_k

Where changes are compressed, messages meet: see `served_messages`. If the outer step is
that of plain SGD, those who have a fetch the messages of the round, not w.

A round is held when a quorum has come, or a time after the first: see `servers/turns`.
Who comes later is in the next one, with all its steps; who dies is missing; who joins
fetches w.

Axes: T variables, W workers.

References:
    Douillard et al.: DiLoCo, 2023, https://arxiv.org/abs/2311.08105. Decoupled DiLoCo,
    https://arxiv.org/abs/2604.21428 (quorum and grace).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host, values
from tf_dgc.compression import arena
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.anchors import Anchor
from tf_dgc.exchanges.base import Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.downpour import Downpouring
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.modes import Combining
from tf_dgc.exchanges.moved import Trained
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.rates import Rate
from tf_dgc.exchanges.served import Served
from tf_dgc.exchanges.served_messages import (
    ServedMessages,
    UnsentChanges,
    form_of,
)
from tf_dgc.exchanges.synchronous import ServedTogether
from tf_dgc.exchanges.together import Pieces, Together, completed
from tf_dgc.servers import chief_records
from tf_dgc.servers.quorum import Rule
from tf_dgc.transports import sums


class LocalOptimizer(NamedTuple):
    """Record of an optimizer of local steps, before its first one."""

    outer: "OuterOnServers"  # the exchange of its outer optimizer
    step: Callable[[list[tf.Tensor]], None]  # takes the outer optimizer's step
    steps: tf.Variable  # counts local steps
    rate: Any  # variable of the learning rate; None where it is computed
    settings: Mapping[str, Any]  # of the optimizer, which all must have alike


class Compressing(NamedTuple):
    """Compression of the changes of one optimizer."""

    config: DGCConfig
    combining: Combining
    rate: float | None  # of an outer step of plain SGD; None where it is another one


class RoundsOnServers(Downpouring):
    """Makes the exchanges of local steps, and of outer optimizers.

    Attributes:
        compressing: of the changes of the next optimizer; None sends all of them.
    """

    _local: LocalOptimizer | None = None
    compressing: Compressing | None = None

    def expect_local(self, local: LocalOptimizer) -> None:
        """Tell what the next exchange is to know: it is one of local steps."""
        self._local = local

    def __call__(self, place: Place, taken_over: TakenOver | None) -> Any:
        """Make an exchange: of an outer optimizer, or of local steps."""
        local, self._local = self._local, None
        if local is not None:
            return LocalRounds(place, self, local)
        return super().__call__(place, taken_over)

    def _opened(
        self, place: Place, trained: Trained, taken_over: TakenOver | None
    ) -> Served:
        return OuterOnServers(place, self, trained)


class OuterOnServers(ServedTogether):
    """Exchange of an outer optimizer, whose gradients are changes of parameters.

    Attributes:
        compressing: of the changes; None sends all of them.
        large: the indices of variables whose changes go in messages.
        layout: of their arena.
        extras: pairs of a variable that nobody trains, such as a moving mean, and what
            the servers have of it: the mean of what workers have.
        landed: shape [], bool; whether this worker's last change was in a round.
        anchors: of each variable, what this worker has fetched last.
    """

    _job: RoundsOnServers

    def _meet(self) -> Together:
        job, others = self._job, self._moved.others
        self.compressing, self.large = job.compressing, list[int]()
        if self.compressing is not None:
            least = self.compressing.config.min_elements
            self.large = [
                i
                for i, v in enumerate(self.variables)
                if v.dtype == tf.float32
                and arena.is_compressed(v.shape.as_list(), v.dtype, least)
            ]
        self._small = [i for i in range(len(self.variables)) if i not in self.large]
        self.layout = arena.build(
            [(self.variables[i].name, self.variables[i].shape) for i in self.large]
        )
        self.extras = [(own, shared) for own, shared in others if not own.trainable]
        self._slots = slots = self._moved.slots
        self.anchors: Sequence[Any] = ()
        with tf.init_scope(), tf.device("CPU:0"):
            self.landed = own_variable(tf.constant(False), "round_landed")
            # Version of which the copy is, bit for bit; -1 where it may be of two.
            self._base = own_variable(tf.constant(-1, tf.int64), "round_base")
        self._offered: Any = None
        args = self.name, job.servers, job.members
        self._messages: ServedMessages | None = None
        if self.large and self.compressing is not None:
            form = form_of(self.layout, self.compressing.config)
            self._messages = ServedMessages(*args, form, self.compressing.combining)
        twins: list[Any] = [job.twins.of(variable) for variable in self.variables]
        extras: list[Any] = [shared for _, shared in self.extras]
        given = [*[twins[i] for i in self._small], *extras]
        rule = Rule(job.settings.quorum, job.settings.grace)
        together = Together(*args, given, 0, rule, self._messages)
        changed = [*twins, *extras, *slots, self.version]
        together.keep(self.name, job.servers, changed)
        return together

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return changes, which are counted as they go."""
        found = super().gradients(local, taken_over, part)
        sent = self._sent()
        elements = sum(each.shape.num_elements() for each in sent)
        return found._replace(traffic=sums.traffic_of(_bytes(sent), elements, 0))

    def offer(
        self,
        weight: tf.Tensor,
        extra_changes: Sequence[tf.Tensor],
        words: tf.Tensor | None,
    ) -> None:
        """Note what goes to the round with the changes of parameters.

        Args:
            weight: of this worker's changes in the mean: shape [], float32.
            extra_changes: of the extras.
            words: of the message in the place of large changes.
        """
        self._offered = weight, extra_changes, words

    def _sent(self) -> list[tf.Tensor]:
        """Return what goes to the servers."""
        _, extras, words = self._offered
        found = [*[self._local[i] for i in self._small], *extras]
        return found if words is None else [*found, words]

    def push(self, update: Callable[..., None]) -> None:
        """Give this worker's changes, and take the step if that is its turn."""
        count = len(self._small)

        def apply(means: list[Pieces]) -> None:
            by_variable = dict(zip(self._small, means, strict=False))
            if self._messages is not None:
                *means, total = means
                twins = [self._job.twins.of(self.variables[i]) for i in self.large]
                parts = _cut(total.parts[0], self.layout, twins)
                by_variable |= dict(zip(self.large, parts, strict=True))
            update(tf.ones([]), [by_variable[i] for i in range(len(by_variable))])
            for (_, shared), mean in zip(self.extras, means[count:], strict=True):
                with tf.device(shared.device):
                    shared.assign_sub(tf.identity(mean.joined()))
            self.version.assign_add(1)

        sent = self._sent()
        with tf.control_dependencies(self.rate.tell()):
            landed, _ = self._together.push(sent, apply, self._offered[0])
        self.landed.assign(landed)
        self._job.totals.add(pushes=tf.cast(landed, tf.int64), sent=_bytes(sent))

    # Fetching.

    def parameters(self) -> None:
        """Fetch what the servers have, where this worker's change is in it."""
        tf.cond(self.landed.read_value(), self._land, lambda: None)
        self._follow()

    def _land(self) -> None:
        compressing, messages = self.compressing, self._messages
        if messages is None or compressing is None or compressing.rate is None:
            self.fetch()
            return
        step, rate = self._together.turns.own.read_value(), compressing.rate
        mean, size = messages.fetch(step)
        with tf.control_dependencies([mean]):
            state = self._state_of_servers()
        # Nobody has begun the round after the next one, which has the same places.
        fits = (state[0] == step + 1) & (state[1] == self._base.read_value() + 1)

        def replay() -> None:
            for i, part in zip(
                self.large, arena.unflatten(self.layout, mean), strict=True
            ):
                assign = _host.shared.bypassed(self.variables[i], "assign")
                assign(self.anchors[i] - rate * part)
            whole = [self.variables[i] for i in self._small]
            self._job.twins.pull(whole)
            self._pull_extras()
            self._base.assign(state[1])
            for known in (self.known, self._fetched):
                known.assign(state[1])
            received = size + _bytes([*whole, *[own for own, _ in self.extras]])
            self._job.totals.add(pulls=1, received=received)

        tf.cond(fits, replay, self.fetch)

    def _state_of_servers(self) -> tf.Tensor:
        """Return the round to come, the version, whether one is being applied."""
        number, applied = self._together.turns.state()
        with tf.device(self.version.device):
            found = [number, self.version.read_value(), tf.cast(applied, tf.int64)]
            state = tf.stack(found)
        with tf.device("CPU:0"):
            return tf.identity(state)

    def fetch(self) -> None:
        """Let this worker's copy be what is on the servers."""
        if self._messages is None:
            super().fetch()
            return
        before = self._state_of_servers()
        with tf.control_dependencies([before]):
            after = completed(super().fetch)
        with tf.control_dependencies(after):
            now = self._state_of_servers()
        quiet = tf.reduce_all(now[:2] == before[:2]) & (now[2] == 0)
        self._base.assign(tf.where(quiet, now[1], -1))

    def _pull(self) -> tf.Tensor:
        size = super()._pull()
        self._pull_extras()
        return size + _bytes([own for own, _ in self.extras])

    def _pull_extras(self) -> None:
        for own, shared in self.extras:
            _host.shared.bypassed(own, "assign")(shared.read_value())

    def give(self) -> None:
        """Let the servers have this worker's parameters, as those that it loaded."""
        self._job.twins.give()
        if self._messages is not None:
            self.version.assign_add(1)  # so that nobody takes a round for all there is
        for own, shared in self.extras:
            shared.assign(own.read_value())

    def settle(self, always: bool = False) -> None:
        """Leave it to the local steps."""

    @property
    def state(self) -> Mapping[str, Any]:
        """Slots of the outer optimizer, on the servers."""
        return {f"outer {i}": value for i, value in enumerate(self._slots)}

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved, unless the servers have something newer."""
        if self._job.members.succession.counts:
            Exchange.load(self, arrays, steps)


class LocalRounds(Exchange):
    """Local steps of an optimizer, and when the change goes to the servers.

    Attributes:
        position: shape [], int64; local steps since this worker has fetched.
        outer: exchange of the outer optimizer.
    """

    lockstep = False

    def __init__(
        self, place: Place, make: RoundsOnServers, local: LocalOptimizer
    ) -> None:
        """Create the variables, outside of any graph.

        Raises:
            ValueError: the chief's optimizer has other settings.
            TimeoutError: the chief did not come.
        """
        super().__init__(place)
        self.outer, self._local = local.outer, local
        self._members, self._twins = make.members, make.twins
        self._period = int(make.settings.local_steps or 1)
        self._own = [*self.variables, *[own for own, _ in self.outer.extras]]
        self._anchor = Anchor(self._own, None, self.transport.device, [])
        self.outer.anchors = self._anchor.values
        self._kept: UnsentChanges | None = None
        compressing = self.outer.compressing
        if self.outer.large and compressing is not None:
            decay = compressing.combining.decay
            args = self.outer.layout, compressing.config, decay
            self._kept = UnsentChanges(*args, self.transport.device)
        with tf.init_scope(), tf.device("CPU:0"):
            self.position = own_variable(tf.zeros([], tf.int64), "round_position")
        with tf.init_scope():
            self._open(make)
        self._functions: dict[str, Any] = {}

    def _open(self, make: RoundsOnServers) -> None:
        name, servers = self.name, make.servers
        self._steps = servers.variable(f"{name}.local_steps", tf.int64)
        self._rate = Rate(name, servers, self._members, self._local.rate)
        settings = dict(self._local.settings)

        def begin() -> None:
            self._steps.assign(tf.cast(self._local.steps, tf.int64))
            self._rate.begin()

        variable = servers.variable(f"{name}.record", tf.string)
        record = {"settings": settings}
        there = self._members.share("optimizer", variable, record, begin)
        index = self._members.index
        chief_records.compare("optimizers", there["settings"], settings, index)
        self._rate.join()
        self._begin_period()

    # A step.

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return the gradients of a local step: this worker's own."""
        return Update(local, [False] * len(local), None, sums.no_traffic())

    def begin_step(self) -> None:
        """Begin anew where this worker's parameters were assigned, as by a script.

        Those of the chief go to the servers; others take what these have.
        """
        tf.cond(self._twins.changed.read_value(), self._begin_anew, lambda: None)

    def _begin_anew(self) -> None:
        if self._members.is_chief:
            counts = self._members.succession.counts_now.read_value()
            tf.cond(counts, self.outer.give, lambda: None)
        self.outer.fetch()
        self._begin_period()

    def parameters(self) -> None:
        """Count a local step, and hold a round where it is time."""
        with tf.device("CPU:0"):
            due = self.position.assign_add(1, read_value=True) >= self._period
        # The optimizer itself counts this step later.
        tf.cond(due, functools.partial(self._hold, 1), lambda: None)

    def _hold(self, uncounted: int = 0) -> None:
        """Bring the change to the servers; fetch what has become of it.

        Args:
            uncounted: steps that the optimizer has not counted yet.
        """
        told = self._rate.tell()
        own = [variable.read_value() for variable in self._own]
        bad = values.first_nonfinite(own)
        names = [variable.name for variable in self._own]
        finite = values.require(bad == 0, lambda: _no_number(bad, names))
        with tf.control_dependencies([*told, finite]):
            changes = self._anchor.changes(own)
            weight = tf.cast(self.position, tf.float32)
        count, message = len(self.variables), None
        if self._kept is not None:
            message = self._kept.message([changes[i] for i in self.outer.large])
        words = None if message is None else message.words
        self.outer.offer(weight, changes[count:], words)
        steps = tf.cast(self._local.steps.read_value(), tf.int64)
        newest = tf.maximum(self._steps.read_value(), steps + uncounted)
        self._steps.assign(newest)
        self._local.step(changes[:count])

        def begin() -> None:
            if self._kept is not None and message is not None:
                self._kept.commit(message.left)
            self._begin_period(uncounted)

        tf.cond(self.outer.landed.read_value(), begin, lambda: None)

    def _begin_period(self, uncounted: int = 0) -> None:
        """Begin at what was fetched; count steps from those of all."""
        self._anchor.drop()
        self.position.assign(0)
        self._rate.take()
        steps = self._local.steps
        newest = tf.cast(self._steps.read_value() - uncounted, steps.dtype)
        steps.assign(tf.maximum(steps.read_value(), newest))

    # Outside of steps.

    def settle(self, always: bool = False) -> None:
        """Hold a round, eagerly, of steps since the last one; or fetch, if `always`.

        A change that comes too late for a round goes to the next one.
        """
        while int(self.position):
            self._run("hold", self._hold)
            always = False
        if always:
            self.fetch()

    def fetch(self) -> None:
        """Begin, eagerly, at what the servers have now."""
        self._run("fetch", self.outer.fetch)
        self._run("begin", self._begin_period)

    def come(self) -> None:
        """Begin a `fit` with the others, eagerly: with what the chief has loaded."""
        if bool(self._twins.changed) and self._members.succession.counts:
            self.outer.give()
        self._twins.changed.assign(False)
        self._rate.tell()
        if (turns := self.outer.turns) is not None:
            turns.attendance.enter()
        self.fetch()

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """Residual of compression."""
        return {} if self._kept is None else {"residual": self._kept.v}

    @property
    def steps(self) -> int:
        """Number of messages of this worker that were in a round."""
        return 0 if self._kept is None else int(self._kept.sent)

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved; what was sent since is not kept back."""
        if self._members.succession.repeats:
            return
        super().load(arrays, steps)
        if self._kept is not None:
            self._kept.sent.assign(steps)

    def flush(self, variables: Sequence[Any], apply: Any) -> None:
        """Refuse it.

        Raises:
            ValueError: something is kept back.
        """
        if self._kept is not None and bool(tf.reduce_any(self._kept.v != 0)):
            raise ValueError(
                "`flush` must not be called with DownpourConfig(local_steps=..., "
                "compression=...): what a worker has not sent goes in later rounds"
            )

    def kept(self) -> list[tf.Tensor]:
        """Return the residual."""
        return [] if self._kept is None else [self._kept.v.read_value()]

    def _run(self, name: str, do: Callable[[], None]) -> None:
        if name not in self._functions:
            self._functions[name] = tf.function(do, autograph=False)
        self._functions[name]()


def _cut(total: tf.Tensor, layout: Layout, twins: Sequence[Any]) -> list[Pieces]:
    """Return the tensors of an arena, in pieces where those of twins are."""
    with tf.device(total.device):
        tensors = arena.unflatten(layout, total)
    found = []
    for tensor, twin in zip(tensors, twins, strict=True):
        parts = []
        for device, start, stop in twin.pieces:
            with tf.device(total.device):
                part = tensor if len(twin.pieces) == 1 else tensor[start:stop]
            with tf.device(device):
                parts.append(tf.identity(part))
        found.append(Pieces(parts))
    return found


def _bytes(tensors: Sequence[Any]) -> int:
    """Return the bytes of tensors of static shapes."""
    return sum(each.shape.num_elements() * each.dtype.size for each in tensors)


def _no_number(bad: tf.Tensor, names: Sequence[str]) -> list[Any]:
    return [
        "A variable of this worker holds NaN or infinity after local steps; it stops, "
        "the others go on without what it has changed. Variable:",
        tf.gather(tf.constant(["", *names]), bad),
    ]
