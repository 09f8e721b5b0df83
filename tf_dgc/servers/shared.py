"""Variables on the servers, and what a worker has of them.

Axis: M servers. A mirror is a worker's own variable of a model; its twin, on the
servers, is what is trained.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tf_dgc import _host
from tf_dgc._host.shared import Cursor, Piece, SharedVariable, Table
from tf_dgc.servers import shards
from tf_dgc.servers.shards import Shard

CONTAINER = "tf_dgc"


class Servers:
    """The servers of a job, as one of its workers sees them.

    Attributes:
        addresses: "host:port" of each, M.
        devices: where they hold variables, M.
        load: elements of twins that each holds.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        """Take the addresses; this process is connected to them."""
        self.addresses = list(addresses)
        self.devices = [
            f"/job:ps/replica:0/task:{j}/device:CPU:0" for j in range(len(addresses))
        ]
        self.load = [0] * len(addresses)

    def variable(
        self,
        name: str,
        dtype: Any,
        shape: Sequence[int] = (),
        server: int = 0,
    ) -> SharedVariable:
        """Return a variable on one server, which may have a value or not."""
        return self.sharded(name, dtype, shape, [Shard(server, 0, 0)])

    def sharded(
        self,
        name: str,
        dtype: Any,
        shape: Sequence[int],
        found: Sequence[Shard],
        cursor: Cursor | None = None,
        unique_id: str | None = None,
    ) -> SharedVariable:
        """Return a variable in shards; see `SharedVariable`."""
        pieces = [Piece(self.devices[s.server], s.start, s.stop) for s in found]
        args = name, CONTAINER, dtype, shape, pieces, cursor, unique_id
        return SharedVariable(*args)

    def copy_of(self, name: str, variable: SharedVariable) -> SharedVariable:
        """Return another variable, in pieces as one that there is."""
        args = name, CONTAINER, variable.dtype, variable.whole.as_list()
        return SharedVariable(*args, variable.pieces, variable.cursor)


class Pair(NamedTuple):
    """A worker's own variable, and what is trained in its place."""

    mirror: Any
    twin: SharedVariable


class Marked(Protocol):
    """Interface of what must know when server variables are assigned.

    Attributes:
        twins: of which.
    """

    twins: list[SharedVariable]

    def mark(self) -> None:
        """Take note that all of them may have changed."""


class Twins:
    """All that a worker trains on the servers.

    Attributes:
        changed: shape [], bool; whether mirrors were assigned, outside of training,
            since they were last like their twins.
        assigned: shape [], int64; how often they were.
        stamped: those of twins that stamp what changes.
    """

    def __init__(self, servers: Servers) -> None:
        """Begin without any."""
        self._servers = servers
        self._pairs: dict[int, Pair] = {}
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            self.changed = tf.Variable(False, trainable=False, synchronization=own)
            self.assigned = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, synchronization=own
            )
        self.stamped: list[Marked] = []
        self._pull: Callable[[], None] | None = None

    def of(self, mirror: Any) -> SharedVariable | None:
        """Return the twin of a variable, if it has one."""
        pair = self._pairs.get(id(mirror))
        return None if pair is None else pair.twin

    def add(
        self, prefix: str, mirrors: Sequence[Any], whole: Sequence[bool]
    ) -> list[Pair]:
        """Make twins of those mirrors that have none.

        Args:
            prefix: of their names.
            mirrors: T.
            whole: which must not be cut, of length T.

        Returns:
            The new ones.

        Raises:
            ValueError: one is cut that must not be.
        """
        for mirror in mirrors:
            if isinstance(mirror, Table):
                self._pairs[id(mirror)] = Pair(mirror, mirror)
        known = zip(mirrors, whole, strict=True)
        cut = [m.name for m, w in known if w and self._is_cut(m)]
        if cut:
            raise ValueError(
                "What was trained before is cut into pieces on the servers, and an "
                "optimizer that looks at whole tensors, or a constraint, needs whole "
                f"ones. Received: {cut}"
            )
        new = [i for i, mirror in enumerate(mirrors) if id(mirror) not in self._pairs]
        shapes = [mirrors[i].shape.as_list() for i in new]
        servers = self._servers
        plan = shards.plan(
            shapes, [whole[i] for i in new], len(servers.devices), servers.load
        )
        found = []
        for i, shape, own in zip(new, shapes, plan, strict=True):
            mirror = mirrors[i]
            for shard in own:
                servers.load[shard.server] += mirror.shape.num_elements() // len(own)
            args = f"{prefix}.{i}", mirror.dtype, shape, own, Cursor()
            twin = servers.sharded(*args, unique_id=_host.shared.identity_of(mirror))
            found.append(Pair(mirror, twin))
            self._pairs[id(mirror)] = found[-1]
        self._pull = None
        return found

    def _is_cut(self, mirror: Any) -> bool:
        twin = self.of(mirror)
        return twin is not None and len(twin.pieces) > 1

    def like(self, name: str, twin: SharedVariable, variable: Any) -> SharedVariable:
        """Return a variable that stands beside a twin, cut as that where it can be."""
        args = name, CONTAINER, variable.dtype, variable.shape.as_list()
        if variable.shape == tf.TensorShape(twin.whole):
            return SharedVariable(*args, twin.pieces, twin.cursor)
        return SharedVariable(*args, twin.pieces[:1])

    def pull(self, mirrors: Sequence[Any] | None = None) -> None:
        """Let mirrors have the values of their twins; by default all of them."""
        if mirrors is None and tf.executing_eagerly():
            if self._pull is None:
                self._pull = tf.function(self._pull_all, autograph=False)
            self._pull()
        else:
            self._copy(self._chosen(mirrors))
        self.changed.assign(False)

    def _pull_all(self) -> None:
        self._copy(self._chosen(None))

    def _chosen(self, mirrors: Sequence[Any] | None) -> list[Pair]:
        if mirrors is None:
            return list(self._pairs.values())
        return [self._pairs[id(mirror)] for mirror in mirrors]

    @staticmethod
    def _copy(pairs: Sequence[Pair]) -> None:
        for mirror, twin in _own(pairs):
            _host.shared.bypassed(mirror, "assign")(twin.read_value())

    def give(self) -> None:
        """Let the servers have the values of the mirrors."""
        for mirror, twin in _own(self._pairs.values()):
            twin.assign(mirror.read_value())
        for each in self.stamped:
            each.mark()
        self.changed.assign(False)

    def note(self) -> None:
        """Take note that a mirror was assigned, outside of training."""
        self.changed.assign(True)
        self.assigned.assign_add(1)

    def mark(self, twin: SharedVariable) -> None:
        """Take note that a twin was assigned, in a step."""
        for each in self.stamped_of([twin]):
            each.mark()

    def stamped_of(self, twins: Sequence[SharedVariable]) -> list[Marked]:
        """Return those that have some of these twins."""
        known = {id(twin) for twin in twins}
        return [s for s in self.stamped if known & {id(own) for own in s.twins}]


def _own(pairs: Iterable[Pair]) -> list[Pair]:
    """Return those of which this worker has a copy."""
    return [pair for pair in pairs if pair.mirror is not pair.twin]
