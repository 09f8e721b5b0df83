"""Gradients go to servers, parameters come from there; workers do not meet.

Downpour SGD. Of a worker's steps t = 1, 2, ...:

    a <- a + g                  gradient at x, the worker's own copy of the parameters
    every n_push:   rate / max(1, tau) for the optimizer's step of w by a;  a <- 0
    every n_fetch:  x <- w           else, of SGD: x <- x - rate * g

w, and all that the optimizer keeps, are on the servers, where the step is computed. tau
is the staleness: how many pushes of all workers came between the fetch of x and this
one; without its own where x has taken these as well.

Axes: T variables, M servers, W workers.

References:
    Dean et al.: Large Scale Distributed Deep Networks, NIPS 2012, algorithm 7.1 of the
    supplement. Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD for Distributed Deep
    Learning, IJCAI 2016 (rate / tau).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc import _host, values
from tf_dgc._host.shared import Table
from tf_dgc.compression import dgc
from tf_dgc.config import DownpourConfig
from tf_dgc.exchanges.base import Place, TakenOver, Update, momentum_in
from tf_dgc.exchanges.figures import TensorStats
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.pushed import Pushed
from tf_dgc.exchanges.rates import Rate
from tf_dgc.exchanges.selecting import Chosen
from tf_dgc.exchanges.served import Served
from tf_dgc.exchanges.together import Pieces, Together
from tf_dgc.servers import chief_records
from tf_dgc.servers.clocks import Clocks
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers, Twins
from tf_dgc.servers.turns import Turns


class ServerStats(NamedTuple):
    """Traffic of a worker with the servers, since it began.

    Attributes:
        pushes: of this worker; shape [], int64.
        pulls: fetches of this worker; shape [], int64.
        staleness: sum over its pushes; shape [], float64.
        sent_bytes: gradients; shape [], int64.
        received_bytes: parameters; shape [], int64.
        all_pushes: pushes of all workers, as far as it knows; of steps, where they are
            taken together; shape [], int64.
        dropped: its gradients that came too late for a step; shape [], int64.
    """

    pushes: tf.Tensor
    pulls: tf.Tensor
    staleness: tf.Tensor
    sent_bytes: tf.Tensor
    received_bytes: tf.Tensor
    all_pushes: tf.Tensor
    dropped: tf.Tensor


class KeptSlot(NamedTuple):
    """Slots of an optimizer, to be moved to the servers.

    Attributes:
        beside: the trained variable that it belongs to; None of what belongs to all.
        value: the variable that there is.
        move: takes the variable on the servers that is to stand for it.
    """

    beside: Any
    value: Any
    move: Callable[[Any], None]


class Trained(NamedTuple):
    """Record of an optimizer, and of what it trains, before its first step."""

    kept: Sequence[KeptSlot]
    whole: Sequence[bool]  # which of the T variables must not be cut
    others: Sequence[Any]  # variables of layers, trained by others or by nobody
    steps: tf.Variable  # counts steps, which schedules and corrections follow
    per_push: int  # by how much a push counts there
    overwritten: bool  # whether each push changes all there is
    runs: Callable[[], bool]  # whether a step is run or traced
    rate: Any  # variable of the learning rate; None where it is computed
    settings: Mapping[str, Any]  # of the optimizer, which all must have alike


class Downpouring:
    """Makes exchanges with servers, for a `Ledger`.

    Attributes:
        settings: of the user.
        config: of the optimizer that is on the servers.
        twins: of all that is trained.
        totals: what this worker did with the servers.
        last: called where steps are taken together, and too few workers are left.
    """

    lockstep = False

    def __init__(
        self, config: DownpourConfig, servers: Servers, members: Members
    ) -> None:
        """Take the settings, and the servers of the job."""
        self.settings, self.config = config, config.on_servers
        self.servers, self.members = servers, members
        self.twins = Twins(servers)
        self.totals = Totals()
        self.versions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.rates: weakref.WeakKeyDictionary[Any, Rate] = weakref.WeakKeyDictionary()
        self._expected: Trained | None = None
        self.last: Callable[[], None] = lambda: None

    def expect(self, trained: Trained) -> None:
        """Tell what the next exchange is to know."""
        self._expected = trained

    def __call__(self, place: Place, taken_over: TakenOver | None) -> "Downpour":
        """Make an exchange: its variables move to the servers, or are there."""
        trained, self._expected = self._expected, None
        if trained is None:
            raise RuntimeError("What is trained must be told of first")
        return self._opened(place, trained, momentum_in(taken_over))

    def _opened(
        self, place: Place, trained: Trained, momentum: dgc.Momentum | None
    ) -> "Downpour":
        return Downpour(place, self, trained, momentum)


class Totals:
    """Counts, since this worker began."""

    def __init__(self) -> None:
        """Create the variables, zero, outside of any graph."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = own_variable(tf.zeros([6], tf.int64), "downpour_counts")
            self._stale = own_variable(tf.zeros([], tf.float64), "downpour_staleness")

    def add(
        self,
        pushes: Any = 0,
        pulls: Any = 0,
        sent: Any = 0,
        received: Any = 0,
        stale: Any = None,
        dropped: Any = 0,
    ) -> None:
        """Add to them."""
        with tf.device("CPU:0"):
            added = pushes, pulls, sent, received, 0, dropped
            self._counts.assign_add(tf.stack([tf.cast(v, tf.int64) for v in added]))
            if stale is not None:
                self._stale.assign_add(stale)

    def know(self, version: tf.Tensor) -> None:
        """Note how many pushes there were of all workers."""
        with tf.device("CPU:0"):
            now = self._counts.read_value()
            self._counts.assign(tf.concat([now[:4], [version], now[5:]], 0))

    def stats(self) -> ServerStats:
        """Return them."""
        pushes, pulls, *counts = tf.unstack(self._counts, 6)
        return ServerStats(pushes, pulls, self._stale.read_value(), *counts)


class Downpour(Served):
    """One worker's gradients and parameters, of one optimizer's variables.

    Attributes:
        version: shape [], int64, on server 0: number of pushes, of all workers.
        known: shape [], int64: the last that this worker has seen of it.
        rate: the chief's learning rate, which counts for all.
        clocks: how far workers are; None without a bound of staleness.
        together: where gradients meet; None where workers do not wait for each other.
    """

    def __init__(
        self,
        place: Place,
        make: Downpouring,
        trained: Trained,
        momentum: dgc.Momentum | None,
    ) -> None:
        """Move the variables to the servers, or take over what is there.

        Raises:
            ValueError: what the chief trains is something else.
            TimeoutError: the chief did not come.
        """
        super().__init__(place)
        self._make, self.config = make, make.config
        self._servers, self._members, self.twins = (
            make.servers,
            make.members,
            make.twins,
        )
        self._steps, self._per_push = trained.steps, trained.per_push
        zero = tf.zeros([], tf.int64)
        with tf.init_scope(), tf.device("CPU:0"):
            names = "steps", "fetched", "known", "unseen"
            self._taken, self._fetched, self.known, self._own = (
                own_variable(zero, f"downpour_{name}") for name in names
            )
        self._sums: list[tf.Variable] = []
        if self.config.push_period > 1:
            with tf.init_scope():
                self._sums = [
                    own_variable(tf.zeros(v.shape, v.dtype), "downpour_sum")
                    for v in self.variables
                ]
        bound = self.config.max_staleness
        self.clocks = (
            None
            if bound is None
            else Clocks(self.name, self._servers, self._members, bound)
        )
        self._pushed: Pushed | None = None
        if self.config.compression is not None:
            args = self.variables, momentum, self.config.compression
            device, always = self.transport.device, trained.overwritten
            earlier = [o._pushed for o in place.siblings if o._pushed is not None]
            self._pushed = Pushed(*args, device, always, earlier)
        self._chosen: Chosen | None = None
        self.together: Together | None = None
        self._fetch: Callable[[], None] | None = None
        self._settled = 0
        self._local: list[Any] = []
        self._part: Part | None = None  # of them
        self._rate: Any = None
        with tf.init_scope():
            self._open(trained)

    # The servers' state.

    def _open(self, trained: Trained) -> None:
        """Move all to the servers: of the chief first, the others then have these."""
        servers, name = self._servers, self.name
        pairs = self.twins.add(name, self.variables, trained.whole)
        if self._pushed is not None:
            self._pushed.open(name, servers, self._members, self.twins)
        version = self._make.versions.get(self.owner())
        fresh = version is None
        if version is None:
            version = servers.variable(f"{name}.version", tf.int64)
        self.version = version
        self._make.versions[self.owner()] = self.version
        if fresh:
            args = name, servers, self._members, trained.rate
            self._make.rates[self.owner()] = Rate(*args)
        self.rate = self._make.rates[self.owner()]
        moved = [
            (kept, self._beside(f"{name}.kept.{i}", kept))
            for i, kept in enumerate(trained.kept)
        ]
        others = [
            (
                variable,
                servers.variable(
                    f"{name}.other.{i}", variable.dtype, variable.shape.as_list()
                ),
            )
            for i, variable in enumerate(trained.others)
        ]
        if self.config.synchronous:
            slots = [shared for _, shared in moved]
            self.together = self._meet(slots, others)

        def begin() -> None:
            for mirror, twin in pairs:
                twin.assign(mirror.read_value())
            for kept, shared in moved:
                if shared is kept.value:
                    continue  # of a table; drawn where it is
                shared.assign(kept.value.read_value())
            for variable, shared in others:
                shared.assign(variable.read_value())
            if fresh:
                pushes = tf.cast(self._steps, tf.int64) // self._per_push
                self.version.assign(pushes)
                self.rate.begin()
            if self.clocks is not None:
                self.clocks.begin()
            if self._pushed is not None:
                self._pushed.begin()
            if self.together is not None:
                self.together.begin()
            ready = [twin for _, twin in pairs] + [shared for _, shared in moved]
            # Operations on one server keep their order; so all is there.
            if not all(each.initialized for each in ready):
                raise RuntimeError("The servers have lost what they were given")

        record: dict[str, Any] = {
            f"variable {i}": form for i, form in enumerate(self.forms)
        }
        kept_forms = values.forms([kept.value for kept in trained.kept])
        record |= {f"kept {i}": form for i, form in enumerate(kept_forms)}
        settings = dict(trained.settings)
        record["settings"] = settings
        record["shards"] = [[list(piece) for piece in twin.pieces] for _, twin in pairs]
        variable = servers.variable(f"{name}.record", tf.string)
        there = self._members.share("variables", variable, record, begin)
        index = self._members.index
        chief_records.compare("optimizers", there.pop("settings"), settings, index)
        del record["settings"]
        chief_records.compare("trained variables", there, record, index)
        self.rate.join()
        succession = self._members.succession
        for kept, shared in moved:
            if shared is not kept.value:  # a table knows by itself
                shared.writes = lambda: trained.runs() or succession.counts
            kept.move(shared)
        for own, shared in others:
            _host.shared.bypassed(own, "assign")(shared.read_value())
        self._others = [] if not self._members.is_chief else others
        self.known.assign(self.version.read_value())
        self._fetched.assign(self.known)
        self._count()
        if self.together is not None:
            self.together.turns.join()
        self._pull() if self._pushed else self.twins.pull([m for m, _ in pairs])

    def _meet(self, slots: Sequence[Any], others: Sequence[Any]) -> Together:
        """Return where gradients meet; `others` are pairs of what nobody trains."""
        twins: Any = [self.twins.of(variable) for variable in self.variables]
        backups = self.config.backup_workers
        return Together(self.name, self._servers, self._members, twins, backups)

    def _beside(self, name: str, kept: KeptSlot) -> Any:
        twin = None if kept.beside is None else self.twins.of(kept.beside)
        if isinstance(kept.value, Table):
            return kept.value
        if twin is not None:
            return self.twins.like(name, twin, kept.value)
        shape = kept.value.shape.as_list()
        return self._servers.variable(name, kept.value.dtype, shape)

    def _tell_others(self) -> None:
        """Let workers to come have the chief's variables that nobody trains."""
        for own, shared in self._others:
            if not own.trainable:
                shared.assign(own.read_value())

    # A step.

    def _is_due(self, period: int, ahead: int) -> tf.Tensor:
        return (self._taken.read_value() + ahead) % period == 0

    @property
    def turns(self) -> Turns | None:
        """Turns of steps that all workers take together; None of others."""
        return None if self.together is None else self.together.turns

    @property
    def pushes_now(self) -> tf.Tensor:
        """Tell whether the step that has begun ends with a push: shape [], bool."""
        return self._is_due(self.config.push_period, 1)

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return what is to be pushed: this worker's gradients, or their sum."""
        momentum = momentum_in(taken_over)
        if self._pushed is not None:
            return self._selected(self._pushed, local, momentum)
        if self.together is not None:
            local = [tf.convert_to_tensor(gradient) for gradient in local]
        self._local, self._part = local, part
        self._rate = None if momentum is None else momentum.learning_rate
        flags = [False] * len(local)
        if not self._sums:
            return Update(local, flags, None, _traffic(_cost(local)))
        sums, due = self._added_up(local)
        sent = tf.where(due, _cost(sums), tf.zeros([2], tf.int64))
        return Update(sums, flags, due, _traffic(sent))

    def _added_up(self, local: Sequence[Any]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Add gradients up; return the sums, and whether they are to be pushed."""
        for total, gradient in zip(self._sums, local, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(gradient)
            else:
                total.assign_add(gradient)
        return [total.read_value() for total in self._sums], self.pushes_now

    def _selected(
        self, pushed: Pushed, local: list[Any], momentum: dgc.Momentum | None
    ) -> Update:
        """Return the steps that go whole; what is selected of others is noted."""
        sums, due = (local, None) if not self._sums else self._added_up(local)

        steps, self._chosen = pushed.select(sums, momentum, due)
        self._local = [step for step in steps if step is not None]
        sent = _cost(self._local) + pushed.cost(self._chosen)
        if due is not None:
            sent = tf.where(due, sent, tf.zeros([2], tf.int64))
        return Update(steps, [True] * len(steps), due, _traffic(sent))

    def push(self, update: Callable[..., None]) -> None:
        """Count a push, and do it.

        Args:
            update: takes what its learning rate is to be multiplied by: shape [],
                float32; and, where a step is taken together, the gradients that it is
                of; changes what is on the servers.
        """
        told = self.rate.tell()
        if self.together is not None:
            with tf.control_dependencies(told):
                self._push_together(self.together, update)
            return
        with tf.device(self.version.device):
            number = tf.identity(self.version.assign_add(1, read_value=True))
        with tf.device("CPU:0"):
            before = tf.identity(number) - 1
            stale = before - self._fetched.read_value() - self._seen_own()
            self.known.assign(tf.identity(number))
            self._own.assign_add(1)
            factor = tf.ones([])
            if self.config.staleness_rate:
                factor /= tf.maximum(tf.cast(stale, tf.float32), 1.0)
        if self._pushed is None or self._chosen is None:
            sent = _cost(self._sums or self._local)[0]
        else:
            self._pushed.push(self._chosen, factor)
            sent = _cost(self._local)[0] + self._pushed.cost(self._chosen)[0]
        update(factor)
        stale = tf.cast(stale, tf.float64)
        self._make.totals.add(pushes=1, sent=sent, stale=stale)
        for total in self._sums:
            total.assign(tf.zeros(total.shape, total.dtype))

    def _push_together(self, together: Together, update: Callable[..., None]) -> None:
        def apply(means: list[Pieces]) -> None:
            update(tf.ones([]), means)
            self.version.assign_add(1)

        part = self._part
        counts = (tf.ones([]), 1) if part is None else (part.weight, part.whole)
        in_time, over = together.push(self._local, apply, *counts)
        with tf.device("CPU:0"):
            told = tf.cond(
                over,
                lambda: tf.numpy_function(self._end, [], tf.bool, stateful=True),
                lambda: tf.constant(False),
            )
            pushes = tf.cast(in_time, tf.int64)
            size = pushes * _cost(self._local)[0]
            with tf.control_dependencies([told]):
                totals = self._make.totals
                totals.add(pushes=pushes, sent=size, dropped=1 - pushes)

    def _end(self) -> Any:
        self._make.last()
        return np.bool_(True)

    def _seen_own(self) -> tf.Tensor:
        """Return how many of its own pushes this worker's copy has taken as well."""
        if self.config.fetch_period > 1 and self._rate is not None:
            return self._own.read_value()
        return tf.zeros([], tf.int64)

    def parameters(self) -> None:
        """Fetch what the servers have, where it is time."""
        self._taken.assign_add(1)
        if self.clocks is not None:
            self.clocks.step()
            self.clocks.wait()
        if self.config.fetch_period == 1:
            self.fetch()
        else:
            due = self._is_due(self.config.fetch_period, 0)
            tf.cond(due, self.fetch, self._step_alone)
        self._follow()

    def _follow(self) -> None:
        # What corrections and schedules follow is the number of all pushes. The
        # optimizer itself adds one.
        count = self.known.read_value() * self._per_push - 1
        self._steps.assign(tf.cast(count, self._steps.dtype))
        self._make.totals.know(self.known.read_value())

    def settle(self, always: bool = False) -> None:
        """Fetch, eagerly, where there were steps since the last time, or always."""
        if self._fetch is None:
            self._fetch = tf.function(self.fetch, autograph=False)
        taken = int(self._taken)
        if always or taken != self._settled:
            self._fetch()
            self._settled = taken
            self._make.totals.know(self.known.read_value())
            self._count()
            self._tell_others()

    def _count(self) -> None:
        """Count all pushes, and what the optimizer has added up since the last."""
        steps = self._steps.read_value()
        known = tf.cast(self.known.read_value(), steps.dtype)
        self._steps.assign(known * self._per_push + steps % self._per_push)

    def fetch(self) -> None:
        """Let this worker's copy be what is on the servers."""
        with tf.device(self.version.device):
            version = tf.identity(self.version.read_value())
        first = [version]
        if self.together is not None:
            first.append(self.together.turns.follow())
        with tf.control_dependencies(first):
            size = self._pull()
            self.rate.take()
            self._fetched.assign(version)
            self.known.assign(version)
            self._own.assign(tf.zeros([], tf.int64))
            self._make.totals.add(pulls=1, received=size)

    def _pull(self) -> tf.Tensor:
        """Fetch, whole or what has changed; return bytes, shape [], int64."""
        if self._pushed is None:
            self.twins.pull(self.variables)
            return _size(self.variables)
        size = self._pushed.pull()
        self.twins.pull(self._pushed.whole)
        return size + _size(self._pushed.whole)

    def _step_alone(self) -> None:
        """Take SGD's step, in this worker's copy only."""
        if self._rate is None:
            return
        for variable, gradient in zip(self.variables, self._local, strict=True):
            if isinstance(variable, Table):
                continue  # of which this worker has no copy
            step = values.scaled(gradient, self._rate)
            if isinstance(step, tf.IndexedSlices):
                variable.scatter_sub(step)
            else:
                _host.shared.bypassed(variable, "assign_sub")(step)

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """Residuals of compression; all else is on the servers."""
        return {} if self._pushed is None else self._pushed.state

    @property
    def steps(self) -> int:
        """Number of pushes that were selected; 0 without compression."""
        return 0 if self._pushed is None else int(self._pushed.residual.step)

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved; what has been pushed since is not kept back."""
        if not self._members.succession.repeats:
            super().load(arrays, steps)
        if self._pushed is not None:
            self._pushed.loaded(steps)

    def flush(self, variables: Sequence[Any], apply: Any) -> None:
        """Push what compression keeps back of variables, and fetch.

        But for gradients since the last push, where the period is longer than 1.
        """
        if self._pushed is not None and self._pushed.flush(variables):
            self._make.totals.add(sent=4 * self._pushed.layout.elements)
            self.settle(always=True)

    def kept(self) -> list[tf.Tensor]:
        """Return what compression keeps back."""
        return [] if self._pushed is None else self._pushed.kept()

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        return [] if self._pushed is None else self._pushed.tensor_stats(reset)


def _size(variables: Sequence[Any]) -> tf.Tensor:
    """Return the bytes of copies, shape [], int64."""
    own = [v for v in variables if not isinstance(v, Table)]
    size = sum(v.shape.num_elements() * v.dtype.size for v in own)
    return tf.constant(size, tf.int64)


def _traffic(sent: tf.Tensor) -> tf.Tensor:
    """Return `sums.traffic_of` bytes and elements, shape [2], of a push.

    What is fetched does not come with a step's gradients: `ServerStats` has it.
    """
    return tf.concat([sent, tf.zeros([1], tf.int64)], axis=0)


def _cost(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the bytes and the elements of gradients: shape [2], int64."""
    size, elements = tf.zeros([], tf.int64), tf.zeros([], tf.int64)
    for gradient in gradients:
        sparse = isinstance(gradient, tf.IndexedSlices)
        found = gradient.values if sparse else gradient
        count = tf.size(found, tf.int64)
        elements += count
        size += count * found.dtype.size
        if sparse:
            size += tf.size(gradient.indices, tf.int64) * gradient.indices.dtype.size
    return tf.stack([size, elements])
