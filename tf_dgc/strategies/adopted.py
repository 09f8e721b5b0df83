"""Metrics that were made outside of a strategy's scope, which would count by worker."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.fits import inner_of


def take_over(model: keras.Model, strategy: Any) -> None:
    """Let a model's metrics be counted on all workers, wherever they were made.

    Args:
        model: of the user, about to run a step.
        strategy: of the model, of several workers.
    """
    variables = [v for metric in model.metrics for v in metric.variables]
    for variable in filter(_is_foreign, variables):
        with tf.init_scope(), strategy.scope():
            counted = _host.keras.plain(variable).numpy()
            # What all workers have counted alike is summed when it is read.
            start = counted if strategy.is_chief else 0 * counted
            _host.keras.make_again(variable, start)


def _is_foreign(variable: Any) -> bool:
    value = _host.keras.plain(variable)
    is_metric = getattr(variable, "synchronization", None) == "on_read"
    made = isinstance(value, tf.Variable)
    return is_metric and made and not _host.distribute.is_metric_variable(value)


def assign(original: Any, variable: Any, value: Any) -> Any:
    """Refuse metrics that nobody took over."""
    strategy = tf.distribute.get_strategy()
    several = inner_of(strategy, "own_batches") is not None
    in_step = several and not tf.distribute.in_cross_replica_context()
    if in_step and _is_foreign(variable):
        raise ValueError(
            f"The variable {variable.path!r} of a metric was made outside the scope of "
            "this strategy, so each worker would count its own rows only. Make the "
            "metric inside `with strategy.scope():`"
        )
    return original(variable, value)
