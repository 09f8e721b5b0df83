"""Batches that are this worker's own: what a model predicts of them, it predicts alone.

Keras calls one function, traced once, in `predict`, whose batches are those of all
workers, and in `predict_on_batch`, whose are not.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import slicing
from tf_dgc.strategies.drawn_rows import DrawnRows
from tf_dgc.strategies.earlier_rows import EarlierRows
from tf_dgc.strategies.fits import inner_of
from tf_dgc.strategies.readings import Reading
from tf_dgc.transports import Transport
from tf_dgc.values import require

_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


class OwnBatches:
    """Batches that are this worker's own; there is one per strategy.

    Attributes:
        is_alone: whether data are read that are this worker's own.
    """

    def __init__(
        self,
        transport: Transport,
        warn: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the variable, outside of any graph.

        Args:
            transport: of the strategy.
            warn: called where an output of a batch depends on sums over its rows.
            say: logs a warning.
        """
        self._warn, self._say = warn, say
        self._transport, self._earlier = transport, EarlierRows()
        self.is_alone = False
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            self._alone = tf.Variable(False, trainable=False, synchronization=own)

    def predict(self, args: Any, step: Callable[[Any], Any]) -> Any:
        """Return the outputs of a step, of all workers or of this one.

        Args:
            args: of the step: tensors or arrays with rows along the first axis, maybe
                none.
            step: takes such arguments. What it returns may have other numbers of rows
                than they, as of tokens or boxes: they are joined in the order of rank.
        """
        args = tf.nest.map_structure(_of_any_rows, slicing.as_tensors(args))
        any_rows = tf.is_tensor(slicing.row_count(args))
        args, count = slicing.at_least_one_row(args, self._earlier)
        with tf.device("CPU:0"):
            alone = self._alone.read_value()
        reading = Reading(*slicing.tensors_of(args), self._transport.size)
        drawn = self._drawn_rows(reading, alone, count)
        with contextlib.ExitStack() as stack:
            flow = stack.enter_context(_host.flow.Flow([args]))
            stack.enter_context(_host.operations.recorded())
            stack.enter_context(drawn.entered())
            outputs = step(args)

        def outputs_of(output: Any) -> Any:
            if not isinstance(output, _TENSORS):
                return output
            if isinstance(output, tf.Tensor) and not tf.executing_eagerly():
                if not flow.reaches(output):
                    return output  # the same on all
                fixed = output.shape.rank and output.shape[0] is not None
                if output.shape.rank == 0 or (fixed and any_rows):
                    return self._own_number(output, alone)
                if not self.is_alone and reading.of(output).nested:
                    self._warn()
            if output.shape.rank == 0:
                return output
            rows = tf.cast(slicing.rows_in(output), tf.int64)
            # Without rows all are of the row that stands there.
            last = tf.where(count == 0, tf.zeros_like(rows), rows)
            own = slicing.sliced(output, tf.zeros_like(rows), last, None)
            return tf.cond(
                alone,
                lambda: own,
                lambda: gathered_rows(self._transport, own, "predict"),
            )

        return tf.nest.map_structure(outputs_of, outputs)

    def _drawn_rows(
        self, reading: Reading, alone: tf.Tensor, count: tf.Tensor
    ) -> DrawnRows:
        """Return random numbers of the rows of a batch, which may be all this one's."""
        transport = self._transport

        def counts() -> tf.Tensor:
            own = tf.cast(count, tf.float32)
            return tf.cond(
                alone,
                lambda: own * tf.one_hot(transport.rank, transport.size),
                lambda: transport.all_gather(own, "predict.rows"),
            )

        gather = None if self.is_alone else transport.all_gather
        return DrawnRows(reading, transport.rank, counts, self._say, gather)

    def _own_number(self, output: tf.Tensor, alone: tf.Tensor) -> tf.Tensor:
        """Return what a model gives for a batch, where the batch is its worker's own.

        Raises:
            tf.errors.InvalidArgumentError: it is of all workers.
        """
        text = (
            "An output in `predict` has as many rows whatever its batch has, and "
            "depends on the rows: it would be of all rows of a batch, of which each "
            "worker has some. Give an output for each row, or use `predict_on_batch`. "
            "Shape of the output:"
        )
        sound = require(alone, lambda: [text, tf.shape(output)], summarize=-1)
        with tf.control_dependencies([sound]):
            return tf.identity(output)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call what takes a batch of this worker's own; not collective."""
        self._alone.assign(True)
        self.is_alone = True
        try:
            return function()
        finally:
            self._alone.assign(False)
            self.is_alone = False


def _of_any_rows(part: Any) -> Any:
    """Return a tensor of a graph whose number of rows is not known in it.

    Workers have different numbers of rows. What is made of a number that is known
    depends on nothing, as `tf.zeros([tf.shape(x)[0]])`, and would count as the same on
    all workers, on some of them.
    """
    if tf.executing_eagerly() or not isinstance(part, tf.Tensor) or not part.shape.rank:
        return part
    if part.dtype in (tf.resource, tf.variant):
        return part
    shape = [None, *part.shape[1:]]
    return tf.raw_ops.PlaceholderWithDefault(input=part, shape=shape)


def gathered_rows(transport: Transport, own: Any, name: str) -> Any:
    """Join the rows that workers have, of a tensor of any kind, in the order of rank.

    Args:
        transport: between them; all call this.
        own: of this worker, maybe none.
        name: as for `Transport.all_gather`.
    """
    if isinstance(own, tf.RaggedTensor):
        lengths = transport.all_gather_ragged(own.row_lengths(), f"{name}.lengths")
        values = gathered_rows(transport, own.values, name)
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    if isinstance(own, tf.SparseTensor):
        shapes = transport.all_gather(own.dense_shape, f"{name}.shapes")
        before = tf.reduce_sum(shapes[: transport.rank, :1])
        first, rest = own.indices[:, :1] + before, own.indices[:, 1:]
        places = tf.concat([first, rest], axis=1)
        shape = [tf.reduce_sum(shapes[:, :1], 0), tf.reduce_max(shapes[:, 1:], 0)]
        return tf.SparseTensor(
            transport.all_gather_ragged(places, f"{name}.places"),
            transport.all_gather_ragged(own.values, name),
            tf.concat(shape, axis=0),
        )
    return transport.all_gather_ragged(own, name)


def predict_on_batch(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Predict a batch of this worker's own."""
    own = inner_of(_host.keras.strategy_of(model), "own_batches")
    if own is None:
        return original(model, *args, **kwargs)
    return own.call(lambda: original(model, *args, **kwargs))
