"""Gradients meet on servers, where one worker takes the step for all.

The synchronous parameter server. Of a step, with n_k rows of each of W workers:

    g_k <- gradient of worker k at x, its copy of the parameters
    w   <- the optimizer's step by sum n_k g_k / sum n_k, of those that have arrived
    x   <- w

Where a loss is a sum over rows, n_k is 1, and the mean is multiplied by W.

A step waits for all that take part, or for all but some: those that come later drop
their gradient; by a `Rule` it counts in the next step, and the step of a worker that
dies while it takes it is taken once more. See `servers/turns.py`.

References:
    Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting Distributed Synchronous SGD, 2016
    (backup workers).
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc._host.shared import Piece, SharedVariable
from tf_dgc.exchanges.served_messages import ServedMessages
from tf_dgc.servers.arrivals import Arrived
from tf_dgc.servers.members import Members
from tf_dgc.servers.quorum import Rule
from tf_dgc.servers.shared import Servers
from tf_dgc.servers.turns import Turns


class Pieces:
    """A tensor in pieces of rows, each where the variable's own piece is.

    Attributes:
        parts: in the order of rows.
    """

    def __init__(self, parts: Sequence[tf.Tensor]) -> None:
        """Take the pieces."""
        self.parts = list(parts)

    def joined(self) -> tf.Tensor:
        """Return all of it."""
        return self.parts[0] if len(self.parts) == 1 else tf.concat(self.parts, 0)


class GivenGradients:
    """The last gradients of all workers, each where the variable's own pieces are.

    Attributes:
        twins: T variables on the servers.
    """

    def __init__(
        self,
        name: str,
        servers: Servers,
        members: Members,
        twins: Sequence[SharedVariable],
    ) -> None:
        """Make the variables.

        Args:
            name: prefix of theirs.
            servers: of the job.
            members: its workers.
            twins: T variables on the servers.
        """
        self._own, self.twins = members.index, list(twins)

        def given(i: int, j: int, twin: SharedVariable, piece: Piece) -> SharedVariable:
            cut = len(twin.pieces) > 1
            first = [piece.stop - piece.start] if cut else []
            rest = twin.whole[1:] if cut else twin.whole
            shape = [members.workers, *first, *rest.as_list()]
            server = servers.devices.index(piece.device)
            return servers.variable(f"{name}.given.{i}.{j}", twin.dtype, shape, server)

        self._given = [
            [given(i, j, twin, piece) for j, piece in enumerate(twin.pieces)]
            for i, twin in enumerate(self.twins)
        ]

    def begin(self) -> None:
        """Give first values: no gradient is there."""
        for pieces in self._given:
            for piece in pieces:
                piece.assign(tf.zeros(piece.shape, piece.dtype))

    def give(self, local: Sequence[tf.Tensor]) -> None:
        """Put this worker's T gradients there."""
        own = tf.constant([self._own])
        for gradient, pieces, twin in zip(local, self._given, self.twins, strict=True):
            for piece, (_, start, stop) in zip(pieces, twin.pieces, strict=True):
                rows = gradient if len(pieces) == 1 else gradient[start:stop]
                piece.scatter_update(tf.IndexedSlices(rows[tf.newaxis], own))

    def means(self, arrived: Arrived, whole: float) -> list[Pieces]:
        """Return multiples of the means of gradients that have come, where they are."""

        def mean(piece: SharedVariable) -> tf.Tensor:
            with tf.device(piece.device):
                found = piece.sparse_read(tf.identity(arrived.workers))
                weights = tf.cast(whole * arrived.weights, found.dtype)
                axes = [-1, *[1] * (found.shape.rank - 1)]
                return tf.reduce_sum(found * tf.reshape(weights, axes), 0)

        return [Pieces([mean(piece) for piece in pieces]) for pieces in self._given]


class Together:
    """The gradients of all workers, of T variables, on the servers.

    Attributes:
        turns: whose it is to take a step.
    """

    def __init__(
        self,
        name: str,
        servers: Servers,
        members: Members,
        twins: Sequence[SharedVariable],
        backup_workers: int,
        rule: Rule | None = None,
        messages: ServedMessages | None = None,
    ) -> None:
        """Make the variables.

        Args:
            name: prefix of theirs.
            servers: of the job.
            members: its workers.
            twins: T, that are trained.
            backup_workers: of how many workers a step does not wait.
            rule: of steps in which nothing is dropped.
            messages: where there are any, after what is given of twins.
        """
        self._messages = messages
        self._members = members
        self._given = GivenGradients(name, servers, members, twins)
        self.turns = Turns(name, servers, members, backup_workers, rule)
        self._copies: Copies | None = None

    def keep(self, name: str, servers: Servers, changed: Sequence[Any]) -> None:
        """Keep copies of what a step changes, while it is taken.

        Args:
            name: prefix of the names of the copies.
            servers: of the job.
            changed: variables on the servers.
        """
        self._copies = Copies(name, servers, changed)

    def begin(self) -> None:
        """Give first values: no gradient is there."""
        self.turns.begin()
        for each in (self._copies, self._messages, self._given):
            if each is not None:
                each.begin()

    def push(
        self,
        local: Sequence[tf.Tensor],
        apply: Callable[[list[Pieces]], None],
        weight: tf.Tensor,
        whole: float = 1.0,
        then: Callable[[], None] = lambda: None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Give this worker's gradients, and take the step if that is its turn.

        Args:
            local: T gradients; and the words of a message, where there are messages.
            apply: takes the T means, and that of the messages; changes what is on the
                servers.
            weight: of this worker's gradients: shape [], float32.
            whole: by which means are multiplied: W makes sums of them, of all workers
                as far as those that came are like the others.
            then: what who takes the step does when, by a rule, the others go on.

        Returns:
            Whether they came in time, and whether too few workers take part for any
            step to come: each of shape [], bool. By a rule, whether they were in the
            step that was taken; if not, they are to be given again.
        """
        turns = self.turns
        with tf.control_dependencies(list(local)):
            entered = turns.attendance.enter()
        if turns.quorum is not None:  # whatever these are of, they count in what comes
            with tf.control_dependencies([entered]):
                entered = turns.follow()
        with tf.control_dependencies([entered]):
            in_time = turns.is_open()

        def give() -> tf.Tensor:
            with tf.control_dependencies(completed(lambda: self._give(local))):
                turns.arrivals.arrive(weight)
            return tf.constant(True)

        def take() -> None:
            kept = [] if self._copies is None else self._copies.keep(turns.own)
            with tf.control_dependencies(kept):
                arrived = turns.arrivals.now()
                means = self._means(arrived, whole)
            quorum, begins = turns.quorum, list[Any]()
            if quorum is not None:
                parts = [part for mean in means for part in mean.parts]
                with tf.control_dependencies(parts):
                    begins = [quorum.fence.require_open()]
            with tf.control_dependencies(begins):
                after = completed(lambda: apply(means))
            if quorum is None:
                with tf.control_dependencies(after):
                    turns.count()
                return
            with tf.control_dependencies(after):
                own = turns.own.read_value()
                noted = quorum.note(arrived.workers, own)
            with tf.control_dependencies([*after, noted]):
                counted = completed(lambda: quorum.fence.guard(turns.count))
            with tf.control_dependencies(counted):
                then()

        given = tf.cond(in_time, give, lambda: tf.constant(False))
        with tf.control_dependencies([given]):
            applies, over = turns.wait()
        tf.cond(applies, take, lambda: None)
        if turns.quorum is not None:
            in_time = turns.quorum.has(turns.own.read_value())
        return in_time, over

    def _give(self, local: Sequence[tf.Tensor]) -> None:
        if self._messages is not None:
            *local, words = local
            self._messages.give(words, self.turns.own.read_value())
        self._given.give(local)

    def _means(self, arrived: Arrived, whole: float) -> list[Pieces]:
        """Return multiples of the means of what counts, where they are."""
        found = self._given.means(arrived, whole)
        if self._messages is not None:
            total = self._messages.mean(arrived, self.turns.own.read_value())
            found.append(Pieces([total]))
        return found


class Copies:
    """Copies of what a step changes, by which it can be taken once more."""

    def __init__(self, name: str, servers: Servers, changed: Sequence[Any]) -> None:
        """Make the variables, each where the original is.

        Args:
            name: prefix of their names.
            servers: of the job.
            changed: the originals.
        """
        self._pairs = [
            (each, servers.copy_of(f"{name}.copy.{i}", each))
            for i, each in enumerate(changed)
        ]
        self._kept = servers.variable(f"{name}.copied", tf.int64)  # before which step

    def begin(self) -> None:
        """Give first values, which no step is of; the originals have theirs."""
        self._kept.assign(-1)
        for _, copy in self._pairs:
            copy.assign(tf.zeros(copy.whole, copy.dtype))

    def keep(self, step: tf.Variable) -> list[Any]:
        """Keep what there is before a step, or return to it if the step has begun.

        Args:
            step: its number, shape [], int64.

        Returns:
            What comes after that.
        """
        number = step.read_value()

        def keep() -> None:
            pairs = self._pairs
            with tf.control_dependencies(completed(lambda: _copy(pairs))):
                self._kept.assign(number)

        def give_back() -> None:
            _copy([(copy, original) for original, copy in self._pairs])

        def do() -> None:
            with tf.device("CPU:0"):
                begun = tf.identity(self._kept.read_value()) == number
            tf.cond(begun, give_back, keep)

        return completed(do)


def _copy(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Let variables have the values of others, each where it is."""
    for source, target in pairs:
        for at in source.cursor.over(len(source.pieces)):
            with tf.device(source.pieces[at].device):
                target.assign(source.read_value())


def completed(do: Callable[[], None]) -> list[Any]:
    """Do something, on whatever servers; return what comes after all of it.

    Operations on one variable keep their order by themselves, those on others do not.
    """
    if tf.executing_eagerly():
        do()
        with tf.experimental.async_scope():
            return []  # at whose end all servers have answered
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    do()
    found = graph.get_operations()[before:]
    return [tf.group(*[each for each in found if each.op_def.is_stateful])]
