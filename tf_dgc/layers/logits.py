"""The last layer at scale: softmax cross entropy over parts of the logits.

Axes: N workers, M rows of the worker that has most, m of this one, W columns of a part,
U classes.

Each worker has W logits of the rows of all. Of a row their maximum, the sum of their
exponentials and the label's logit are exchanged, instead of U logits; all of these come
home only where somebody reads them.

References:
    Shoeybi and others: Megatron-LM, 2019, https://arxiv.org/abs/1909.08053, section 3
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, values
from tf_dgc.layers.away import Away, Where

_SPARSE = "sparse_categorical_crossentropy"
_LEAST = -1e30  # a logit of no class: its exponential is 0, its difference a number


class Logits(Away):
    """Logits of a split last layer for a loss; `parts` with the bias, [N, M, W]."""

    probabilities = False  # whether the layer has softmax as its activation

    def fits_loss(self, loss: Any) -> bool:
        """Tell whether a loss is the cross entropy of these."""
        return _reads_logits(loss) is (not self.probabilities)

    def losses_by_row(self, y_true: Any) -> tf.Tensor:
        """Return the loss of each row; all workers call this."""
        return cross_entropy(self.parts, self.place, y_true)


def _reads_logits(loss: Any) -> bool | None:
    """Return `from_logits` of a sparse cross entropy of Keras; None of other losses."""
    function = getattr(keras.losses, _SPARSE)
    if loss is function or (isinstance(loss, str) and loss == _SPARSE):
        return False
    if type(loss) is not keras.losses.SparseCategoricalCrossentropy:
        return None
    config = loss.get_config()
    if config.get("ignore_class") is not None or config.get("axis", -1) != -1:
        return None
    return bool(config.get("from_logits", False))


def is_last(layer: keras.layers.Dense, model: keras.Model | None) -> bool:
    """Tell whether a step of Keras runs that takes a layer's outputs to such a loss.

    Args:
        layer: that is called.
        model: of which a step runs, if one does.
    """
    own: Any = type(model)
    if (
        model is None
        or not _host.keras.has_steps_of_keras(model)
        or own.compute_metrics is not keras.Model.compute_metrics
        or layer.activity_regularizer is not None
    ):
        return False
    outputs = getattr(model, "outputs", None) or []
    try:
        only = len(outputs) == 1 and outputs[0] is layer.output
    except (AttributeError, ValueError):  # used more than once, or by no model
        return False
    softmax = layer.activation is keras.activations.softmax
    linear = layer.activation in (None, keras.activations.linear)
    wanted = _reads_logits(getattr(model, "loss", None))
    return only and ((softmax and wanted is False) or (linear and wanted is True))


def cross_entropy(parts: tf.Tensor, place: Where, labels: Any) -> tf.Tensor:
    """Return the cross entropy of each of this worker's rows; all workers call this.

    Args:
        parts: shape [N, M, W].
        place: what they are of.
        labels: numbers of classes, of as many elements as there are rows.

    Returns:
        shape `place.form`, float32, or float64 of such parts.

    Raises:
        tf.errors.InvalidArgumentError: a label of some worker is none of the classes,
            on all workers.
    """
    moves, own, rows, form = place
    flat = tf.reshape(tf.cast(tf.convert_to_tensor(labels), tf.int64), [-1])
    missing = tf.shape(parts, tf.int64)[1] - rows
    every = moves.told(tf.pad(flat, [[0, missing]]), "labels")
    bad = (every < 0) | (every >= own.length)

    def told() -> list[Any]:
        rule = f"Labels must be in [0, {own.length}). Received: "
        return [rule, tf.boolean_mask(every, bad)]

    with tf.control_dependencies([values.require(~tf.reduce_any(bad), told)]):
        here = every - own.start
    wide = tf.float64 if parts.dtype == tf.float64 else tf.float32
    used = tf.range(own.start, own.start + own.width) < own.length
    z = tf.where(used, tf.cast(parts, wide), tf.constant(_LEAST, wide))

    @tf.custom_gradient
    def losses(z: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        hot = tf.one_hot(here, own.width, dtype=wide)
        peak = tf.reduce_max(z, -1)
        total = tf.reduce_sum(tf.exp(z - peak[..., tf.newaxis]), -1)
        found = moves.told(
            tf.stack([peak, total, tf.reduce_sum(hot * z, -1)]), "softmax"
        )
        top = tf.reduce_max(found[:, 0], 0)
        whole = tf.reduce_sum(found[:, 1] * tf.exp(found[:, 0] - top), 0)
        every_loss = tf.math.log(whole) + top - tf.reduce_sum(found[:, 2], 0)

        def grad(upstream: tf.Tensor) -> tf.Tensor:
            padded = tf.pad(upstream, [[0, missing]])
            factor = moves.told(padded, "dlosses")[..., tf.newaxis]
            logs = top + tf.math.log(whole)
            return (tf.exp(z - logs[..., tf.newaxis]) - hot) * factor

        return every_loss[own.rank][:rows], grad

    return tf.reshape(losses(z), form)
