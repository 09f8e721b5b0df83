"""Products of a split layer: what a worker computes with its part of the kernel.

Axes: N workers, M rows of the worker that has most, m of this one, W columns of a part,
I inputs, U units.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc.bands import Band
from tf_dgc.layers import logits, ways
from tf_dgc.layers.away import Away, Where
from tf_dgc.layers.movement import Movement, product


class Products:
    """Products of a layer's inputs with this worker's part of its kernel."""

    def __init__(
        self, layer: Any, strategy: Any, own: Band, movement: Movement
    ) -> None:
        """Take the layer.

        Args:
            layer: a `SplitDense`.
            strategy: of it.
            own: which columns, or rows, this worker has.
            movement: of rows and units between the workers.
        """
        self._layer, self._strategy = layer, strategy
        self._own, self._movement = own, movement

    def by_rows(self, inputs: Any) -> tf.Tensor:
        """Compute the units of this worker's rows, by some of the inputs."""
        own = self._own
        if isinstance(inputs, Away) and inputs.place.own.width == own.width:
            parts = tf.cast(inputs.parts, self._layer.compute_dtype)
            _, _, rows, form = inputs.place
        else:
            x = tf.cast(tf.convert_to_tensor(inputs), self._layer.compute_dtype)
            flat, rows, form = self._padded(x)
            beyond = own.workers * own.width - own.length
            flat = tf.pad(flat, [[0, 0], [0, beyond]])
            flat = tf.reshape(flat, [-1, own.workers, own.width])
            parts = self._movement.exchanged(tf.transpose(flat, [1, 0, 2]), "x")
        sums = self._movement.scattered(self._product(parts), "y")[:rows]
        return self._finished(sums, form, inputs.shape[:-1], self._bias())

    def by_columns(self, inputs: tf.Tensor) -> Any:
        """Compute some of the units, for the rows of all workers."""
        own = self._own
        x = tf.cast(inputs, self._layer.compute_dtype)
        flat, rows, form = self._padded(x)
        parts = self._product(self._movement.gathered(flat, "x"))
        bias = self._bias()

        def home() -> tf.Tensor:
            found = tf.transpose(self._movement.exchanged(parts, "y"), [1, 0, 2])
            found = tf.reshape(found, [-1, own.workers * own.width])
            own_rows = found[:rows, : self._layer.units]
            return self._finished(own_rows, form, x.shape[:-1], bias)

        model = self._strategy.inner.share.step.model
        ends = logits.is_last(self._layer, model)
        if not ends and not ways.feeds_rows(self._layer, model):
            return home()
        place = Where(self._movement, own, rows, form)
        away = parts
        if bias is not None:
            shared = self._movement.shared(tf.cast(bias, parts.dtype), own.width)
            away += shared[:, tf.newaxis]
        shape = x.shape[:-1].concatenate(self._layer.units)
        if not ends:
            away = (
                away if self._layer.activation is None else self._layer.activation(away)
            )
            # Where there are no units, none of an activation, either.
            beyond = [[0, 0], [0, 0], [0, own.width - own.used]]
            away = tf.pad(away[:, :, : own.used], beyond)
            return Away(away, place, shape, home)
        found = logits.Logits(away, place, shape, home)
        found.probabilities = self._layer.activation is keras.activations.softmax
        return found

    def _padded(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the rows of [..., I] as [M, I], how many there are, and their form."""
        flat = tf.reshape(x, [-1, x.shape[-1]])
        rows = tf.shape(flat, tf.int64)[0]
        flat = tf.pad(flat, [[0, self._movement.most(rows) - rows], [0, 0]])
        return flat, rows, tf.shape(x)[:-1]

    def _product(self, parts: tf.Tensor) -> tf.Tensor:
        kernel = tf.cast(self._layer._kernel.value, parts.dtype)
        return product(parts, kernel, self._strategy.inner.share.weights.factors)

    def _bias(self) -> tf.Tensor | None:
        # Metrics read the outputs when the step has changed the bias.
        return None if self._layer.bias is None else tf.identity(self._layer.bias.value)

    def _finished(
        self, flat: tf.Tensor, form: tf.Tensor, shape: Any, bias: tf.Tensor | None
    ) -> tf.Tensor:
        """Return outputs, [..., U], of sums of this worker's rows, [m, U]."""
        y = tf.reshape(flat, tf.concat([form, [self._layer.units]], 0))
        y = tf.ensure_shape(y, [*shape, self._layer.units])
        if self._strategy.inner.share is not None:
            self._strategy.inner.share.step.note_rows(y)
        y = y if bias is None else keras.ops.add(y, bias)
        return y if self._layer.activation is None else self._layer.activation(y)
