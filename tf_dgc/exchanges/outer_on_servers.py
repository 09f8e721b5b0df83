"""Exchange of an outer optimizer on servers, where changes of workers meet in rounds.

See `served_rounds.py`. Axis: T variables.
"""

import math
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
from tf_dgc.exchanges.served_messages import Message, ServedMessages, form_of
from tf_dgc.exchanges.server_copies import CopyVersion, ServerExtras
from tf_dgc.exchanges.server_traffic import cost, size, traffic
from tf_dgc.exchanges.synchronous import ServedTogether
from tf_dgc.exchanges.together import Pieces, Together, completed
from tf_dgc.servers.quorum import Rule


class Compressing(NamedTuple):
    """Compression of the changes of one optimizer."""

    config: DGCConfig
    combining: Combining
    rate: float | None  # of an outer step of plain SGD; None where it is another one


class Offer(NamedTuple):
    """Changes of a worker for a round."""

    weight: tf.Tensor  # in the mean: shape [], float32
    changes: list[tf.Tensor]  # of its parameters
    extra_changes: Sequence[tf.Tensor]  # of variables that nobody trains
    message: Message | None  # in the place of large changes

    def beside(self, whole: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return what goes to the servers, with changes that go whole."""
        found = [*whole, *self.extra_changes]
        return found if self.message is None else [*found, self.message.words]


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
        then: what who has taken a step for all does when the others go on.
    """

    offer: Offer
    then: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        place: Place,
        job: JobServers,
        trained: Trained,
        compressing: Compressing | None,
    ) -> None:
        """Take how changes are compressed; see the base class."""
        self.compressing = compressing
        least = math.inf if compressing is None else compressing.config.min_elements
        self._division = arena.divide(place.variables, least, [tf.float32])
        self.large, self._small, self.layout = self._division
        super().__init__(place, job, trained)

    def _meet(self) -> Together:
        job = self._job
        self.extras: ServerExtras = ServerExtras(self._moved.others)
        self.anchors: Sequence[Any] = ()
        with tf.init_scope(), tf.device("CPU:0"):
            self.landed = own_variable(tf.constant(False), "round_landed")
        args = self.name, job.servers, job.members
        self._messages: ServedMessages | None = None
        if self.large and self.compressing is not None:
            form = form_of(self.layout, self.compressing.config)
            self._messages = ServedMessages(*args, form, self.compressing.combining)
        twins: list[Any] = [job.twins.of(variable) for variable in self.variables]
        given = [*[twins[i] for i in self._small], *self.extras.shared]
        rule = Rule(job.settings.quorum, job.settings.grace)
        together = Together(*args, given, 0, rule, self._messages)
        changed = [*twins, *self.extras.shared, *self._moved.slots, self.version]
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
        return found._replace(traffic=traffic(cost(sent)))

    def push(self, update: Callable[..., None]) -> None:
        """Give this worker's changes, and take the step if that is its turn."""

        def apply(means: list[Pieces]) -> None:
            large = list[Pieces]()
            if self._messages is not None:
                *means, total = means
                twins = [self._job.twins.of(self.variables[i]) for i in self.large]
                large = _cut(total.parts[0], self.layout, twins)
            small, extras = means[: len(self._small)], means[len(self._small) :]
            update(tf.ones([]), self._division.merged(large, small))
            self.extras.subtract(extras)
            self._moved.common.give()
            self.version.assign_add(1)

        sent = self.offer.beside([self._local[i] for i in self._small])
        with tf.control_dependencies(self.rate.tell()):
            weight, then = self.offer.weight, self.then
            landed, _ = self._together.push(sent, apply, weight, then=then)
        self.landed.assign(landed)
        with tf.control_dependencies([landed]):
            self._moved.common.take()
        self._job.totals.add(pushes=tf.cast(landed, tf.int64), sent=cost(sent)[0])

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
        mean, came = messages.fetch(step)
        with tf.control_dependencies([mean]):
            state = self._copy.of_servers()
        # Nobody has begun the round after the next one, which has the same places.
        fits = self._copy.is_one_behind(state, step)

        def replay() -> None:
            parts = arena.unflatten(self.layout, mean)
            for i, part in zip(self.large, parts, strict=True):
                assign = _host.shared.bypassed(self.variables[i], "assign")
                assign(self.anchors[i] - rate * part)
            whole = [self.variables[i] for i in self._small]
            self._job.twins.pull(whole)
            self.extras.pull()
            for known in (self._copy.base, self.known, self._fetched):
                known.assign(state[1])
            received = came + size([*whole, *self.extras.own])
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
        received = super()._pull()
        self.extras.pull()
        return received + size(self.extras.own)

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
        return {f"outer {i}": value for i, value in enumerate(self._moved.slots)}

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved, unless the servers have something newer."""
        if self._job.members.succession.counts:
            Exchange.load(self, arrays, steps)


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
