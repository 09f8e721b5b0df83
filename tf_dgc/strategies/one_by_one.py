"""Steps of N workers that one process takes, one after the other.

Where a worker needs a sum over all, it is not known before each has been there: all
take the step once for their parts of the sum, leave no trace, and take it again. A step
in which workers meet M times is taken M + 1 times.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, values
from tf_dgc.strategies import slicing
from tf_dgc.strategies.conditions import OwnNumbers
from tf_dgc.strategies.share import Share
from tf_dgc.strategies.step_warnings import WarningsInTurn
from tf_dgc.transports.base import Transport, default_device
from tf_dgc.transports.mesh import Mesh


class Seat(Transport):
    """The worker whose turn it is, among N in this process.

    Attributes:
        rank: of this worker: an integer, or a tensor of shape [].
        asked: what this worker adds to the first sum that nobody knows yet.
    """

    name = "loopback"
    alone = True
    rank: Any

    def __init__(self, workers: int) -> None:
        """Let rank 0 begin."""
        self.rank, self.size, self.device = 0, workers, default_device()
        self.asked: list[tf.Tensor] = []
        self._rows: Any = None  # of the batch of all workers
        self._sums: list[list[tf.Tensor]] = []
        self._meetings = 0

    def begin(self, rows: Any) -> None:
        """Begin with a batch of so many rows: no sum is known."""
        self._rows, self._sums = rows, []

    def take(self, rank: Any) -> None:
        """Let a worker take the step from its beginning."""
        self.rank, self._meetings, self.asked = rank, 0, []

    def learn(self, parts: Sequence[tf.Tensor]) -> None:
        """Note what all workers add to the first unknown sum: shapes [N, *S]."""
        self._sums.append([tf.reduce_sum(part, axis=0) for part in parts])

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return the sums, or what this worker has where they are not known yet."""
        meeting, self._meetings = self._meetings, self._meetings + 1
        if meeting < len(self._sums):
            # Of the graph that asks, where what is made of them is followed back.
            return [tf.identity(each) for each in self._sums[meeting]]
        if meeting == len(self._sums):
            self.asked = list(tensors)
        return [tf.identity(each) for each in tensors]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the rows of each worker, which are known: shape [N], float32.

        Raises:
            ValueError: a worker asks for something else.
        """
        if name != "row_weights":
            raise ValueError(
                "A simulated worker cannot gather from the others within its forward "
                f"and backward pass. Received: a tensor of shape {tensor.shape}"
            )
        start, stop = slicing.bounds(
            tf.cast(self._rows, tf.int32), tf.range(self.size), self.size
        )
        return tf.cast(stop - start, tf.float32)


class ShareInTurn(Share):
    """Part of the step of the worker whose turn it is."""

    _warnings, _conditions = WarningsInTurn, OwnNumbers

    def __init__(self, seat: Seat, whole: bool) -> None:
        """Create the variables, outside of any graph.

        Args:
            seat: of the worker.
            whole: whether gradients are sent whole, and their sum is clipped.
        """
        super().__init__(Mesh.of(seat), clips_sum=whole, local=False)
        self._seat, self._sends_whole = seat, whole

    def of_all(self, model: keras.Model, logs: Any) -> Any:
        """Return the logs of a step from those of each worker.

        Args:
            model: whose step it was.
            logs: of tensors of shape [N, *S].

        Returns:
            What metrics have when the last worker has been there; of other numbers the
            mean by rows.
        """
        by_metrics = self.logs.given_by_metrics(model)

        def of_all(name: str | None, stacked: tf.Tensor) -> tf.Tensor:
            if name in by_metrics or not stacked.dtype.is_floating:
                return stacked[-1]
            shares = tf.cast(self.rows.shares(), stacked.dtype)
            return tf.tensordot(shares, stacked, 1)

        if not isinstance(logs, Mapping):
            return tf.nest.map_structure(functools.partial(of_all, None), logs)
        return {
            name: tf.nest.map_structure(functools.partial(of_all, name), stacked)
            for name, stacked in logs.items()
        }

    @contextlib.contextmanager
    def captured(
        self, optimizer: keras.optimizers.Optimizer
    ) -> Iterator[list[tuple[tf.Tensor, list[tuple[Any, Any]]]]]:
        """Keep what gradients count, and pairs with variables; apply nothing."""
        applied: list[tuple[tf.Tensor, list[tuple[Any, Any]]]] = []

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            if trainable_variables is None:
                trainable_variables = _host.keras.variables_of(optimizer)
            own = self.applied.applied(grads, trainable_variables)
            pairs = zip(own, trainable_variables, strict=True)
            applied.append(self._weighed([(g, v) for g, v in pairs if g is not None]))

        kept = vars(optimizer).get("apply")
        optimizer.apply = apply
        try:
            yield applied
        finally:
            del optimizer.apply
            if kept is not None:
                optimizer.apply = kept

    def _weighed(
        self, pairs: list[tuple[Any, Any]]
    ) -> tuple[tf.Tensor, list[tuple[Any, Any]]]:
        """Return what compressed gradients of a worker count, and them.

        Where nothing is compressed they are multiplied by it here.
        """
        variables = [v for _, v in pairs]
        factor, scale = self.weights.factor(variables), tf.ones([])
        if self._sends_whole:
            factor, scale = scale, factor
        elif self.step.is_by_rows(variables):
            # The exchange takes a gradient for a part of that of all rows.
            factor, scale = self._seat.size * factor, scale / self._seat.size
        return factor, [
            (values.scaled(tf.convert_to_tensor(g), scale), v) for g, v in pairs
        ]
