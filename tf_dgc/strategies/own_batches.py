"""Batches that are this worker's own: what a model gives for them, it gives alone.

Keras calls functions that are traced once, in `predict` and `evaluate`, whose batches
are those of all workers, and in `predict_on_batch` and `test_on_batch`, whose are not.
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
        _host.hooks.wrap("predict on batch", _alone)
        _host.hooks.wrap("test on batch", _alone)

    @property
    def alone(self) -> tf.Tensor:
        """Whether the others have nothing to do with it: shape [], bool."""
        with tf.device("CPU:0"):
            return self._alone.read_value()

    def predict(self, args: Any, step: Callable[[Any], Any]) -> Any:
        """Return the outputs of a step, of all workers or of this one.

        Args:
            args: of the step: tensors or arrays with rows along the first axis, maybe
                none.
            step: takes such arguments.
        """
        args, count = slicing.at_least_one_row(slicing.as_tensors(args))
        alone = self.alone

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


def _alone(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    own = getattr(_host.keras.strategy_of(model), "own_batches", None)
    if own is None:
        return original(model, *args, **kwargs)
    return own.call(lambda: original(model, *args, **kwargs))
