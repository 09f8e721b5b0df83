"""Mesh of the workers: all, those who send messages, those of one node."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.transports import base, grid
from tf_dgc.transports.horovod import HorovodTransport


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

    @classmethod
    def of(cls, transport: base.Transport) -> "Mesh":
        """Return that of workers that each compute a gradient."""
        if isinstance(transport, HierarchicalTransport):
            return cls(transport.everybody, transport, transport.everybody.size)
        return cls(transport, transport, transport.size)

    @classmethod
    def over(cls, transport: base.Transport) -> "Mesh":
        """Return the same, over a grid where it pays; all workers call this."""
        if isinstance(transport, HierarchicalTransport):
            return cls.of(transport)
        return cls.of(grid.chosen(transport))

    def within_nodes(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum what the workers of a node hold, where they have one voice together."""
        if isinstance(self.voices, HierarchicalTransport):
            return self.voices.reduce(tensors, name)
        return list(tensors)


class HierarchicalTransport(base.Transport):
    """A transport among nodes, in each of which all workers hold the same tensors.

    `rank` is the number of the node, `size` their number. The first worker of each node
    exchanges with those of other nodes, and passes the result on to its own. `reduce`
    makes tensors the same within a node.

    Attributes:
        everybody: the transport among all workers.
    """

    name = "hierarchical"

    def __init__(self, everybody: HorovodTransport) -> None:
        """Make a process set of each node, and one of their first workers.

        Args:
            everybody: of workers on several nodes.

        Raises:
            ValueError: the nodes have different numbers of workers, or process sets
                cannot be added.
        """
        import horovod.tensorflow as hvd

        if not hvd.is_homogeneous():
            raise ValueError(
                "hierarchical=True needs as many workers on each node. Received: "
                f"{hvd.local_size()} workers on the node of rank {hvd.rank()}, "
                f"{hvd.size()} in all"
            )
        self.everybody = everybody
        self.rank, self.size = hvd.cross_rank(), hvd.cross_size()
        self.device = everybody.device
        node = everybody.all_gather(tf.constant(self.rank), "nodes").numpy().tolist()
        if set(node) != set(range(self.size)):
            raise ValueError(
                f"Each worker must be on one of {self.size} nodes. Received: {node}"
            )
        members = [
            [rank for rank, own in enumerate(node) if own == each]
            for each in range(self.size)
        ]
        firsts = [ranks[0] for ranks in members]
        self._within, between = everybody.group(members), everybody.group([firsts])
        self._between = between if everybody.rank in firsts else None
        with tf.init_scope(), tf.device(self.device):
            zero = tf.zeros([], tf.int64)
            self._zero = tf.Variable(zero, trainable=False, name="tf_dgc_zero")

    def reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum tensors over the workers of this node; see `all_reduce`."""
        return self._within.all_reduce(tensors, f"{name}.node")

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum tensors, which all workers of a node hold, over the nodes."""
        if self._between is not None:
            tensors = self._between.all_reduce(tensors, name)
        return self._pass_on(tensors, name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor, which all workers of a node hold, from each node."""
        if self._between is None:
            gathered = tf.tile(
                tensor[tf.newaxis], [self.size] + [1] * tensor.shape.rank
            )
        else:
            gathered = self._between.all_gather(tensor, name)
        return self._pass_on([gathered], name)[0]

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Send each node a row of a tensor, which all workers of a node hold."""
        if self._between is not None:
            tensor = self._between.all_to_all(tensor, name)
        return self._pass_on([tensor], name)[0]

    def _pass_on(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Give the first worker's tensors to all workers of the node.

        What the others hold counts as zeros, but it is used: an operation of Horovod
        whose result nobody uses is left out of a graph, while others wait for it.
        """
        words = [base.to_words(tensor) for tensor in tensors]
        first = tf.cast(self._between is not None, tf.int64)
        share = first + self._zero.read_value()
        summed = self._within.all_reduce(
            [share * word for word in words], f"{name}.node"
        )
        return [base.from_words(*pair) for pair in zip(summed, tensors, strict=True)]
