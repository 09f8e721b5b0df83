"""Variables of an optimizer on the servers: moved there by the chief, found by others.

Axes: T trained variables.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host, values
from tf_dgc._host.shared import Table
from tf_dgc.config import DownpourConfig
from tf_dgc.exchanges.base import Exchange
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.rates import Rate
from tf_dgc.exchanges.server_traffic import Totals
from tf_dgc.exchanges.step_counts import PushCount
from tf_dgc.servers import chief_records
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers, Twins
from tf_dgc.servers.succession import Succession


class KeptSlot(NamedTuple):
    """Slot of an optimizer, to be moved to the servers.

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


class JobServers:
    """Servers of a job, as the exchanges of its workers see them.

    Attributes:
        settings: of the user.
        config: of the optimizer that is on the servers.
        servers: where variables are.
        members: workers of the job.
        twins: of all that is trained.
        totals: what this worker did with the servers.
        versions: number of pushes, a variable on a server, by optimizer.
        rates: learning rates, by optimizer.
        counts: of steps, by optimizer.
        last: called where steps are taken together, and too few workers are left.
    """

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
        self.counts: weakref.WeakKeyDictionary[Any, PushCount] = (
            weakref.WeakKeyDictionary()
        )
        self.last: Callable[[], None] = lambda: None


class CommonSlots:
    """Slots of an optimizer that it changes by itself before each step, as Nadam does.

    All workers do so before a step that one takes for all: each has its own, and begins
    a step with what the last one had.
    """

    def __init__(
        self, succession: Succession, pairs: Sequence[tuple[Any, Any]]
    ) -> None:
        """Take them.

        Args:
            succession: whether what this worker assigns counts.
            pairs: of a worker's variable, and that of the servers.
        """
        self._succession, self._pairs = succession, list(pairs)
        with tf.init_scope(), tf.device("CPU:0"):
            self._known = [own_variable(own.read_value(), "known") for own, _ in pairs]

    def has(self, variable: Any) -> bool:
        """Tell whether a variable is one of them."""
        return any(own is variable for own, _ in self._pairs)

    def give(self) -> None:
        """Let the servers have this worker's, which has taken the step."""
        for own, shared in self._pairs:
            value = own.read_value()
            with tf.device(shared.device):
                shared.assign(value)

    def take(self) -> None:
        """Let this worker's be those of the last step."""
        for (own, shared), known in zip(self._pairs, self._known, strict=True):
            value = shared.read_value()
            for variable in (own, known):
                _host.shared.bypassed(variable, "assign")(value)

    def heed(self) -> None:
        """Give, eagerly, what the chief's script has assigned."""
        if not self._succession.counts:
            return
        for (own, shared), known in zip(self._pairs, self._known, strict=True):
            if bool(tf.reduce_any(own != known)):
                shared.assign(own.read_value())


class MovedVariables:
    """Variables of an optimizer on the servers, with what the optimizer keeps of them.

    Attributes:
        version: shape [], int64, on server 0: number of pushes, of all workers.
        rate: the chief's learning rate, which counts for all.
        count: of the optimizer's steps.
        common: what the optimizer keeps of no variable in particular, where steps are
            taken together: all workers change their own before each step.
        others: pairs of a variable that the optimizer does not train, and what the
            servers have of it.
    """

    def __init__(self, job: JobServers, exchange: Exchange, trained: Trained) -> None:
        """Make the variables on the servers, without values.

        Args:
            job: its servers.
            exchange: that they are of.
            trained: the optimizer, and what it trains.
        """
        self._job, self._trained, self._name = job, trained, exchange.name
        self._forms = exchange.forms
        self._pairs = job.twins.add(exchange.name, exchange.variables, trained.whole)
        owner = exchange.owner()
        self._fresh = owner not in job.versions
        if self._fresh:
            server, name = job.servers, exchange.name
            job.versions[owner] = server.variable(f"{name}.version", tf.int64)
            job.rates[owner] = Rate(name, server, job.members, trained.rate)
            steps = trained.steps, trained.per_push
            job.counts[owner] = PushCount(name, server, job.members, *steps)
        self.version, self.rate = job.versions[owner], job.rates[owner]
        self.count = job.counts[owner]
        self._kept = [
            (slot, self._beside(f"{self._name}.kept.{i}", slot))
            for i, slot in enumerate(trained.kept)
        ]
        self.common = CommonSlots(
            job.members.succession,
            [
                (slot.value, shared)
                for slot, shared in self._kept
                if slot.beside is None and job.config.synchronous
            ],
        )
        self.others = [
            (own, self._like(f"{self._name}.other.{i}", own))
            for i, own in enumerate(trained.others)
        ]

    @property
    def slots(self) -> list[Any]:
        """Slots of the optimizer, on the servers."""
        return [shared for _, shared in self._kept]

    @property
    def mirrors(self) -> list[Any]:
        """Variables of this worker that stand for those on the servers."""
        return [mirror for mirror, _ in self._pairs]

    def _like(self, name: str, own: Any) -> Any:
        return self._job.servers.variable(name, own.dtype, own.shape.as_list())

    def _beside(self, name: str, slot: KeptSlot) -> Any:
        twin = None if slot.beside is None else self._job.twins.of(slot.beside)
        if isinstance(slot.value, Table):
            return slot.value
        if twin is not None:
            return self._job.twins.like(name, twin, slot.value)
        return self._like(name, slot.value)

    def open(self, begin: Callable[[], None]) -> None:
        """Give first values, where this is the chief; else wait for them.

        Args:
            begin: gives first values to what else the exchange has on the servers.

        Raises:
            ValueError: what the chief trains is something else.
            TimeoutError: the chief did not come.
        """
        job, name, settings = self._job, self._name, dict(self._trained.settings)
        kept_forms = values.forms([slot.value for slot, _ in self._kept])
        record: dict[str, Any] = {
            f"variable {i}": form for i, form in enumerate(self._forms)
        }
        record |= {f"kept {i}": form for i, form in enumerate(kept_forms)}
        record["settings"] = settings
        pieces = [twin.pieces for _, twin in self._pairs]
        record["shards"] = [[list(piece) for piece in each] for each in pieces]
        variable = job.servers.variable(f"{name}.record", tf.string)
        there = job.members.records.share(
            "variables", variable, record, lambda: self._begin(begin)
        )
        index = job.members.index
        chief_records.compare("optimizers", there.pop("settings"), settings, index)
        del record["settings"]
        chief_records.compare("trained variables", there, record, index)
        self._join()

    def _begin(self, begin: Callable[[], None]) -> None:
        """Give first values; the chief does."""
        for mirror, twin in self._pairs:
            twin.assign(mirror.read_value())
        for slot, shared in self._kept:
            if shared is not slot.value:  # a table is drawn where it is
                shared.assign(slot.value.read_value())
        for own, shared in self.others:
            shared.assign(own.read_value())
        if self._fresh:
            self.version.assign(self.count.pushes)
            self.rate.begin()
            self.count.first.begin()
        begin()
        ready = [twin for _, twin in self._pairs] + [shared for _, shared in self._kept]
        # Operations on one server keep their order; so all is there.
        if not all(each.initialized for each in ready):
            raise RuntimeError("The servers have lost what they were given")

    def _join(self) -> None:
        """Let what is on the servers stand for what this worker has."""
        self.rate.join()
        if self._fresh:
            self.count.join(self.version.read_value())
        succession = self._job.members.succession
        for slot, shared in self._kept:
            if self.common.has(slot.value):
                continue
            if shared is not slot.value:  # a table knows by itself
                shared.writes = lambda: self._trained.runs() or succession.counts
            slot.move(shared)
        self.common.take()
        for own, shared in self.others:
            _host.shared.bypassed(own, "assign")(shared.read_value())

    def tell_others(self) -> None:
        """Let workers to come have the chief's variables that nobody trains."""
        if self._job.members.is_chief:
            for own, shared in self.others:
                if not own.trainable:
                    shared.assign(own.read_value())
