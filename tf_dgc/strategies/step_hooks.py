"""Functions of Keras and TensorFlow that ask the step that runs.

What a loss means is known where its step runs, in `Share`; a model of another strategy,
or of one worker, has none, and nothing changes.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.share import share_of


def apply_own_gradients(
    original: Callable[..., Any], optimizer: Any, grads: Any, variables: Any
) -> Any:
    """Apply gradients that are zero where a worker has no rows."""
    share = share_of(_host.keras.strategy_of(optimizer))
    if share is not None and not _host.applying.applies_as_they_are(optimizer):
        grads = share.applied.applied(grads, variables, optimizer)
    return original(optimizer, grads, variables)


def leave_to_the_exchange(
    original: Callable[..., Any], optimizer: Any, grads: Any
) -> Any:
    """Leave gradients as they are where an optimizer clips those of all workers."""
    share = share_of(_host.keras.strategy_of(optimizer))
    later = share is not None and share.clips_sum
    if later and not _host.applying.applies_as_they_are(optimizer):
        return grads
    return original(optimizer, grads)


_evaluates = contextvars.ContextVar("tf_dgc_evaluates", default=False)


def note_evaluation(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note that `evaluate` runs: its logs are those of the whole."""
    token = _evaluates.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _evaluates.reset(token)


def agree_on_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Return the same logs of a last step on all workers."""
    found = original(model, logs)
    share = share_of(model.distribute_strategy)
    if share is None or found is not logs or not isinstance(logs, dict):
        return found
    return share.logs.agree(logs, share.rows.last(), model, _evaluates.get())


def leave_undivided(original: Callable[..., Any], value: Any) -> Any:
    """Keep Keras from dividing a loss by N in a step; note one that it divides."""
    share = share_of(tf.distribute.get_strategy())
    if share is None:
        return original(value)
    if share.means.leaves_undivided:
        return value
    divided = original(value)
    share.means.note_divided(divided)
    return divided


def keep_undivided(original: Callable[..., Any], value: Any) -> Any:
    """Keep Keras from multiplying by N what it has not divided."""
    share = share_of(tf.distribute.get_strategy())
    undivided = share is not None and share.means.leaves_undivided
    return value if undivided else original(value)


def weigh_losses(
    original: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Compute gradients of a loss that become one with those of other workers."""
    share = share_of(tf.distribute.get_strategy())
    args = tape, target, sources, output_gradients, unconnected_gradients
    return (
        original(*args) if share is None else share.backward.gradient(original, *args)
    )


def note_moments(original: Callable[..., Any], layer: Any, *args: Any) -> Any:
    """Note the moments by which a layer normalizes a batch."""
    moments = original(layer, *args)
    share = share_of(tf.distribute.get_strategy())
    if share is not None:
        share.step.note_moments(moments)
    return moments


def clip_those_of_all(
    original: Callable[..., Any], t_list: Any, *args: Any, **kwargs: Any
) -> Any:
    """Clip the gradients of all workers, where a step clips a list of its own."""
    share = share_of(tf.distribute.get_strategy())
    if share is not None and isinstance(t_list, list | tuple):
        t_list = share.early.clipping(t_list)
    return original(t_list, *args, **kwargs)


def decide_together(
    original: Callable[..., Any], pred: Any, *args: Any, **kw: Any
) -> Any:
    """Decide a condition of a script by the rows of all workers."""
    share = share_of(tf.distribute.get_strategy())
    if share is None or not _host.operations.is_of_user():
        return original(pred, *args, **kw)
    with share.conditions.decided(pred) as whole:
        return original(whole, *args, **kw)


def decide_at_once(original: Callable[..., bool], tensor: Any) -> bool:
    """Decide an `if` of Python in an eager step by the rows of all workers."""
    share = share_of(tf.distribute.get_strategy())
    outside = share is None or share.step.model is None
    if outside or not _host.operations.asks_for_user():
        return original(tensor)
    return original(share.conditions.truth(tensor))


def write_those_of_all(
    original: Callable[..., Any], variable: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Write numbers of the rows of all workers to what a script keeps."""
    share = share_of(tf.distribute.get_strategy())
    if share is not None and share.step.model is not None:
        value = share.conditions.written(variable, value)
    return original(variable, value, *args, **kwargs)


def clip_that_of_all(
    original: Callable[..., Any], t: Any, *args: Any, **kwargs: Any
) -> Any:
    """Clip the gradient of all workers, where a step clips one of its own."""
    share = share_of(tf.distribute.get_strategy())
    if share is not None:
        (t,) = share.early.clipping([t])
    return original(t, *args, **kwargs)


def weigh_scalar(
    original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Weigh a number of a step, for a mean over steps, by its rows."""
    share = share_of(tf.distribute.get_strategy())
    if share is None or not _are_numbers(values, sample_weight):
        return original(metric, values, sample_weight)
    if sample_weight is None and _host.keras.is_function_of_user(metric):
        share.warnings.batchwise(metric.name)
    return original(metric, *share.means.weighed(values, sample_weight))


def share_scalar(
    original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Part a number of a step among the workers, for a sum over steps."""
    share = share_of(tf.distribute.get_strategy())
    if share is None or not _are_numbers(values, sample_weight):
        return original(metric, values, sample_weight)
    if sample_weight is not None:
        values = tf.cast(values, metric.dtype) * tf.cast(sample_weight, metric.dtype)
    return original(metric, share.means.added(values))


def _are_numbers(*values: Any) -> bool:
    return all(tf.TensorShape(getattr(v, "shape", ())).rank == 0 for v in values)


class _OfRows(keras.losses.Loss):
    """Losses of rows that are there, to be weighted and reduced as by Keras."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred


def call_loss(
    original: Callable[..., Any],
    loss: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    """Let predictions compute a loss that fits them, as those of split layers do."""
    fits = getattr(type(y_pred), "fits_loss", None)
    if fits is None or not fits(y_pred, loss):
        return original(loss, y_true, y_pred, sample_weight)
    rows = y_pred.losses_by_row(y_true)
    if (share := share_of(tf.distribute.get_strategy())) is not None:
        share.step.note_rows(rows)
    _host.keras.copy_mask(y_pred, rows)
    alike = _OfRows(name=loss.name, reduction=loss.reduction, dtype=loss.dtype)
    return alike(y_true, rows, sample_weight)
