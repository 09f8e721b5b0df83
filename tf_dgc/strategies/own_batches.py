"""Batches that are this worker's own: what a model predicts of them, it predicts alone.

Keras calls one function, traced once, in `predict`, whose batches are those of all
workers, and in `predict_on_batch`, whose are not.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import slicing
from tf_dgc.transports import Transport


class OwnBatches:
    """Whether a batch is this worker's own; there is one per strategy."""

    def __init__(self, transport: Transport) -> None:
        """Create the variable, outside of any graph.

        Args:
            transport: of the strategy.
        """
        self._transport = transport
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            self._alone = tf.Variable(False, trainable=False, synchronization=own)
        _host.hooks.wrap("predict on batch", _predict_on_batch)

    def predict(self, args: Any, step: Callable[[Any], Any]) -> Any:
        """Return the outputs of a step, of all workers or of this one.

        Args:
            args: of the step: tensors or arrays with rows along the first axis, maybe
                none.
            step: takes such arguments.
        """
        args, count = slicing.at_least_one_row(slicing.as_tensors(args))
        with tf.device("CPU:0"):
            alone = self._alone.read_value()

        def outputs_of(rows: tf.Tensor) -> tf.Tensor:
            own = rows[:count]
            return tf.cond(
                alone,
                lambda: own,
                lambda: self._transport.all_gather_ragged(own, "predict"),
            )

        return tf.nest.map_structure(outputs_of, step(args))

    def call(self, function: Callable[[], Any]) -> Any:
        """Call what takes a batch of this worker's own; not collective."""
        self._alone.assign(True)
        try:
            return function()
        finally:
            self._alone.assign(False)


def _predict_on_batch(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    own = getattr(_host.keras.strategy_of(model), "own_batches", None)
    if own is None:
        return original(model, *args, **kwargs)
    return own.call(lambda: original(model, *args, **kwargs))
