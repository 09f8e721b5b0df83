"""Mesh of the workers: all, those who send messages, those of one node."""

import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.transports import base, grid, handshake


class Mesh(NamedTuple):
    """The groups of workers, each of which may be asked how many it is.

    Attributes:
        everybody: all workers: they agree on settings, share variables and files, and
            wait for each other.
        voices: between those whose messages are summed: each worker, one for each node,
            or each of the logical workers of one process.
        replicas: how many compute a gradient each, of rows of their own; a mean over
            the workers divides by it.
    """

    everybody: base.Transport
    voices: base.Transport
    replicas: int

    @property
    def together(self) -> base.Transport:
        """Transport between workers that take a step together: of a site, or all."""
        if isinstance(self.voices, Sites):
            return self.voices.within
        return self.everybody

    @classmethod
    def of(cls, transport: base.Transport) -> "Mesh":
        """Return that of workers that each compute a gradient."""
        return cls(transport.everybody, transport, transport.everybody.size)

    @classmethod
    def over(cls, transport: base.Transport) -> "Mesh":
        """Return the same, over a grid where it pays; all workers call this."""
        if isinstance(transport, HierarchicalTransport):
            return cls.of(transport)
        return cls.of(grid.chosen(transport))


def hosts_of(everybody: base.Transport) -> list[str]:
    """Return the names of all workers' hosts, by rank; all workers call this."""
    told = handshake.tell(everybody, "host", {"host": everybody.host})
    return [str(each.get("host")) for each in told]


class HierarchicalTransport(base.Transport):
    """A transport among nodes, in each of which all workers hold the same tensors.

    `rank` is the number of the node, `size` their number. The first worker of each node
    exchanges with those of other nodes, and passes the result on to its own. `reduce`
    makes tensors the same within a node.

    Attributes:
        hosts: name of each node.
        members: ranks of the workers of each node.
        speaks: whether this is the first worker of its node.
    """

    name = "hierarchical"

    def __init__(
        self, everybody: base.Transport, hosts: Sequence[str] | None = None
    ) -> None:
        """Make a group of each node, and one of their first workers.

        Args:
            everybody: of workers on several nodes.
            hosts: the node of each worker, by rank; by default its host.

        Raises:
            ValueError: there can be no groups.
        """
        names = hosts_of(everybody) if hosts is None else hosts
        self.hosts = list(dict.fromkeys(names))
        self.members = [
            [rank for rank, name in enumerate(names) if name == host]
            for host in self.hosts
        ]
        firsts = [ranks[0] for ranks in self.members]
        self._everybody, self.device = everybody, everybody.device
        self.rank = self.hosts.index(names[everybody.rank])
        self.size = len(self.hosts)
        self.speaks = everybody.rank in firsts
        self._within = everybody.group(self.members)
        self._between = everybody.group([firsts])
        with tf.init_scope(), tf.device(self.device):
            zero = tf.zeros([], tf.int64)
            self._zero = tf.Variable(zero, trainable=False, name="tf_dgc_zero")

    @property
    def everybody(self) -> base.Transport:
        """Transport between all workers."""
        return self._everybody

    def reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum tensors over the workers of this node; see `all_reduce`."""
        return self._within.all_reduce(tensors, f"{name}.node")

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum tensors, which all workers of a node hold, over the nodes."""
        return self._pass_on(self._between.all_reduce(tensors, name), name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor, which all workers of a node hold, from each node."""
        gathered = self._between.all_gather(tensor, name)
        if not self.speaks:
            gathered = tf.tile(gathered, [self.size] + [1] * tensor.shape.rank)
        return self._pass_on([gathered], name)[0]

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send each node a row of a tensor, which all workers of a node hold."""
        return self._pass_on([self._between.all_to_all(tensor, name)], name)[0]

    def _pass_on(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Give the first worker's tensors to all workers of the node.

        What the others hold counts as zeros, but it is used: an operation of Horovod
        whose result nobody uses is left out of a graph, while others wait for it.
        """
        words = [base.to_words(tensor) for tensor in tensors]
        share = tf.cast(self.speaks, tf.int64) + self._zero.read_value()
        summed = self._within.all_reduce(
            [share * word for word in words], f"{name}.node"
        )
        return [base.from_words(*pair) for pair in zip(summed, tensors, strict=True)]


class Sites(HierarchicalTransport):
    """A transport among sites, whose workers take their steps together.

    What a worker tells other sites, all of its own site have alike; but each has a
    gradient of its own, and what it keeps of that.
    """

    name = "sites"

    @functools.cached_property
    def within(self) -> base.Transport:
        """Transport between the workers of this site, for their steps.

        Sites may differ in how many collectives a step takes. All workers ask for it
        alike.
        """
        return self._everybody.group(self.members, apart=True)

    def aside(self, thread: threading.Thread) -> "Sites":
        """Return the same for collectives that a thread makes."""
        names = [""] * self._everybody.size
        for site, ranks in zip(self.hosts, self.members, strict=True):
            for rank in ranks:
                names[rank] = site
        return Sites(self._everybody.aside(thread), names)
