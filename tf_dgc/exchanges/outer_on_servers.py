"""Exchange of an outer optimizer on servers, where changes of workers meet in rounds.

See `served_rounds.py`. Axis: T variables.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.compression import arena
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.base import Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.modes import Combining
from tf_dgc.exchanges.moved import JobServers, Trained
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.served_messages import ServedMessages, form_of
from tf_dgc.exchanges.server_copies import CopyVersion, ServerExtras
from tf_dgc.exchanges.synchronous import ServedTogether
from tf_dgc.exchanges.together import Pieces, Together, completed
from tf_dgc.servers.quorum import Rule
from tf_dgc.transports import sums


class Compressing(NamedTuple):
    """Compression of the changes of one optimizer."""

    config: DGCConfig
    combining: Combining
    rate: float | None  # of an outer step of plain SGD; None where it is another one


class Offer(NamedTuple):
    """Changes of a worker for a round, beside those of its parameters."""

    weight: tf.Tensor  # of its changes in the mean: shape [], float32
    extra_changes: Sequence[tf.Tensor]  # of variables that nobody trains
    words: tf.Tensor | None  # of the message in the place of large changes

    def beside(self, whole: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return what goes to the servers, with changes that go whole."""
        found = [*whole, *self.extra_changes]
        return found if self.words is None else [*found, self.words]


class OuterOnServers(ServedTogether):
    """Exchange of an outer optimizer, whose gradients are changes of parameters.

    Attributes:
        compressing: of the changes; None sends all of them.
        large: the indices of variables whose changes go in messages.
        layout: of their arena.
        extras: variables that nobody trains.
        offer: of this worker to the round that comes.
        landed: shape [], bool; whether this worker's last change was in a round.
        anchors: of each variable, what this worker has fetched last.
    """

    offer: Offer

    def __init__(
        self,
        place: Place,
        job: JobServers,
        trained: Trained,
        compressing: Compressing | None,
    ) -> None:
        """Take how changes are compressed; see the base class."""
        self.compressing = compressing
        self.large = [] if compressing is None else _large(place, compressing.config)
        super().__init__(place, job, trained)

    def _meet(self) -> Together:
        job = self._job
        self._small = [i for i in range(len(self.variables)) if i not in self.large]
        self.layout = arena.build(
            [(self.variables[i].name, self.variables[i].shape) for i in self.large]
        )
        self.extras: ServerExtras = ServerExtras(self._moved.others)
        self._slots = slots = self._moved.slots
        self.anchors: Sequence[Any] = ()
        with tf.init_scope(), tf.device("CPU:0"):
            self.landed = own_variable(tf.constant(False), "round_landed")
        args = self.name, job.servers, job.members
        self._messages: ServedMessages | None = None
        if self.large and self.compressing is not None:
            form = form_of(self.layout, self.compressing.config)
            self._messages = ServedMessages(*args, form, self.compressing.combining)
        twins: list[Any] = [job.twins.of(variable) for variable in self.variables]
        extras = self.extras.shared
        given = [*[twins[i] for i in self._small], *extras]
        rule = Rule(job.settings.quorum, job.settings.grace)
        together = Together(*args, given, 0, rule, self._messages)
        changed = [*twins, *extras, *slots, self.version]
        together.keep(self.name, job.servers, changed)
        self._copy = CopyVersion(together.turns, self.version)
        return together

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Return changes, which are counted as they go."""
        found = super().gradients(local, taken_over, part)
        sent = self.offer.beside([self._local[i] for i in self._small])
        elements = sum(each.shape.num_elements() for each in sent)
        return found._replace(traffic=sums.traffic_of(_bytes(sent), elements, 0))

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
            self.extras.subtract(means[count:])
            self.version.assign_add(1)

        sent = self.offer.beside([self._local[i] for i in self._small])
        with tf.control_dependencies(self.rate.tell()):
            landed, _ = self._together.push(sent, apply, self.offer.weight)
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
            state = self._copy.of_servers()
        # Nobody has begun the round after the next one, which has the same places.
        fits = self._copy.is_one_behind(state, step)

        def replay() -> None:
            for i, part in zip(
                self.large, arena.unflatten(self.layout, mean), strict=True
            ):
                assign = _host.shared.bypassed(self.variables[i], "assign")
                assign(self.anchors[i] - rate * part)
            whole = [self.variables[i] for i in self._small]
            self._job.twins.pull(whole)
            self.extras.pull()
            for known in (self._copy.base, self.known, self._fetched):
                known.assign(state[1])
            received = size + _bytes([*whole, *self.extras.own])
            self._job.totals.add(pulls=1, received=received)

        tf.cond(fits, replay, self.fetch)

    def fetch(self) -> None:
        """Let this worker's copy be what is on the servers."""
        if self._messages is None:
            super().fetch()
            return
        before = self._copy.of_servers()
        with tf.control_dependencies([before]):
            after = completed(super().fetch)
        with tf.control_dependencies(after):
            now = self._copy.of_servers()
        self._copy.note(before, now)

    def _pull(self) -> tf.Tensor:
        size = super()._pull()
        self.extras.pull()
        return size + _bytes(self.extras.own)

    def give(self) -> None:
        """Let the servers have this worker's parameters, as those that it loaded."""
        self._job.twins.give()
        if self._messages is not None:
            self.version.assign_add(1)  # so that nobody takes a round for all there is
        self.extras.give()

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


def _large(place: Place, config: DGCConfig) -> list[int]:
    """Return the indices of variables whose changes go in messages."""
    return [
        i
        for i, v in enumerate(place.variables)
        if v.dtype == tf.float32
        and arena.is_compressed(v.shape.as_list(), v.dtype, config.min_elements)
    ]


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
