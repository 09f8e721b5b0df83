"""Losses of steps that workers take together on servers.

Where the gradient of a loss needs sums over the rows of all, the workers meet before
the backward pass: each sum is a small synchronous step of its own, of which the outcome
is not applied, but read by all.

Axis: W workers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges.together import Pieces, Together
from tf_dgc.servers import chief_records
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers
from tf_dgc.servers.turns import Turns
from tf_dgc.strategies.conditions import OwnNumbers
from tf_dgc.strategies.current import Current
from tf_dgc.strategies.early import EarlyOnServers
from tf_dgc.strategies.logs import OwnLogs
from tf_dgc.strategies.means import OwnMeans
from tf_dgc.strategies.rows import Rows
from tf_dgc.strategies.share import Share
from tf_dgc.strategies.step_warnings import WarningsOnServers
from tf_dgc.strategies.weights import WeightsOnServers
from tf_dgc.transports.base import Transport, default_device
from tf_dgc.transports.mesh import Mesh

_WIRE = tf.float64  # type in which sums are on the servers


class OverServers(Transport):
    """Sums over workers that meet on servers, in a step that all of them take.

    Of those that have died, or come too late, the rows count as those of the others.
    """

    name = "servers"

    def __init__(self, servers: Servers, members: Members) -> None:
        """Take the servers of the job, and its workers."""
        self.rank, self.size = members.index, members.workers
        self.device = default_device()
        self._servers, self._members = servers, members
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._meetings = 0  # in the step that runs

    def begin(self) -> None:
        """Begin a step: the next meeting is its first one."""
        self._meetings = 0

    @property
    def turns(self) -> list[Turns]:
        """Of all sums, in the order in which all workers have made them."""
        return [found.together.turns for found in self._sums.values()]

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sum tensors of static shapes over the workers."""
        flat = [tf.reshape(tf.cast(each, _WIRE), [-1]) for each in tensors]
        sizes = [each.shape.num_elements() for each in flat]
        if None in sizes:
            raise ValueError(
                "A loss is made of sums whose number is known only when a step runs, "
                "which DownpourConfig(synchronous=True) cannot exchange. Received: "
                f"sums of shapes {[each.shape for each in tensors]}"
            )
        summed = self._next(sum(sizes)).over_workers(tf.concat(flat, axis=0))
        return [
            tf.cast(tf.reshape(part, each.shape), each.dtype)
            for part, each in zip(tf.split(summed, sizes), tensors, strict=True)
        ]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Gather a tensor from each worker, as a sum."""
        seats = tf.one_hot(self.rank, self.size, dtype=tensor.dtype)
        seats = tf.reshape(seats, [-1, *[1] * tensor.shape.rank])
        return self.all_reduce([seats * tensor], name)[0]

    def holds_on_all(self, own: tf.Tensor, name: str) -> tf.Tensor:
        """Tell all workers whether something is true on each that has come."""
        # Sums are of means, and rounded: only 0 is one of zeros.
        (others,) = self.all_reduce([tf.cast(~own, _WIRE)], name)
        return others == 0

    def _next(self, elements: int) -> "_Sum":
        """Return where workers meet next in this step."""
        key = self._meetings, elements
        self._meetings += 1
        if key not in self._sums:
            with tf.init_scope():
                self._sums[key] = _Sum(key, self._servers, self._members)
        return self._sums[key]


class _Sum:
    """One sum of all workers, shape [K], on server 0."""

    def __init__(self, key: tuple[int, int], servers: Servers, of_job: Members) -> None:
        """Make the variables, or find those that the chief has made, eagerly."""
        name = "loss_sum." + ".".join(map(str, key))
        self._total = servers.variable(f"{name}.total", _WIRE, [key[1]])
        self.together = Together(name, servers, of_job, [self._total], 0)
        self._workers = float(of_job.workers)

        def begin() -> None:
            self._total.assign(tf.zeros(self._total.shape, _WIRE))
            self.together.begin()

        record = {"elements": key[1]}
        variable = servers.variable(f"{name}.record", tf.string)
        there = of_job.records.share("loss", variable, record, begin)
        chief_records.compare("losses", there, record, of_job.index)
        self.together.turns.join()

    def over_workers(self, own: tf.Tensor) -> tf.Tensor:
        """Add what this worker has, wait for the others, and return the sum."""

        def apply(sums: list[Pieces]) -> None:
            self._total.assign(sums[0].joined())

        self.together.push([own], apply, tf.ones([]), self._workers)
        followed = self.together.turns.follow()
        with tf.control_dependencies([followed]), tf.device(self._total.device):
            total = self._total.read_value()
        with tf.device("CPU:0"):
            return tf.identity(total)


class RowsOnServers(Rows):
    """Rows of a worker whose gradients count by them in a mean on servers."""

    def __init__(self, mesh: Mesh, current: Current) -> None:
        """Create the variables, outside of any graph."""
        super().__init__(mesh, current)
        self._usual.assign(1.0)

    def _agree_on_usual(self) -> None:
        """Weights are rows: nobody asks how many are usual."""


class ServedShare(Share):
    """Part of a worker in a step that all take together on servers.

    Its metrics are of its own rows.
    """

    _rows, _early, _weights = RowsOnServers, EarlyOnServers, WeightsOnServers
    _means, _warnings = OwnMeans, WarningsOnServers
    _conditions, _logs = OwnNumbers, OwnLogs

    def __init__(self, transport: OverServers) -> None:
        """Create the variables, outside of any graph."""
        super().__init__(Mesh.of(transport), clips_sum=False, local=False)
        self._meetings = transport

    def run(
        self, model: keras.Model, method: Any, args: Any, step: Callable[[Any], Any]
    ) -> Any:
        """Run a step of a model; one that does not train is this worker's alone."""
        if _host.keras.step_named(model, method) != "train_step":
            return step(args)
        self._meetings.begin()
        return super().run(model, method, args, step)

    def note_meeting(self, tensor: Any) -> None:
        """Tell that what a script gathers or reduces is of this worker alone."""
        self.warnings.met_nobody()
