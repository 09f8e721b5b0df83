"""Batch normalization with the statistics of all workers' batches."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc.horovod.core import started
from tf_dgc.transports.base import Transport


@keras.saving.register_keras_serializable("tf_dgc")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Normalizes in training by mean and variance of the batches of all workers.

    Each worker's part counts by its size. For models without a strategy; with one, use
    `keras.layers.BatchNormalization(synchronized=True)`.
    """

    def __init__(
        self, *args: Any, over: Transport | None = None, **options: Any
    ) -> None:
        """Take the arguments of Keras's layer.

        Args:
            args: of it.
            over: a transport other than Horovod's.
            options: of it.
        """
        super().__init__(*args, **options)
        self._over = over

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance over the workers, shape [channels] each."""
        mean, variance = super()._moments(inputs, mask)
        rows = tf.size(inputs) / tf.size(mean)  # elements of a channel
        if mask is not None:
            shown = tf.reduce_sum(tf.cast(mask, rows.dtype))
            rows *= tf.math.divide_no_nan(shown, tf.cast(tf.size(mask), rows.dtype))
        rows = tf.cast(rows, mean.dtype)
        # Of no rows there is no mean.
        squares = tf.math.multiply_no_nan(variance + mean**2, rows)
        own = tf.stack([tf.math.multiply_no_nan(mean, rows), squares])
        own = tf.concat([tf.reshape(own, [-1]), rows[tf.newaxis]], axis=0)
        summed = _summed(self._over or started(False), own, f"moments.{self.name}")
        mean, square = tf.unstack(tf.reshape(summed[:-1] / summed[-1], [2, -1]))
        return mean, square - mean**2


def _summed(found: Transport, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Sum over the workers; the gradient is that of the sum of all their losses."""

    @tf.custom_gradient
    def total(own: tf.Tensor) -> Any:
        (summed,) = found.all_reduce([own], name)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            (back,) = found.all_reduce([upstream], f"{name}.gradient")
            return back

        return summed, gradient

    return total(tensor)
