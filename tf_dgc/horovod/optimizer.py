"""A Keras optimizer that applies the mean of all workers' gradients."""

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc.config import DGCConfig
from tf_dgc.horovod import core
from tf_dgc.horovod.core import Exchange
from tf_dgc.state import StepStats
from tf_dgc.transports.base import Transport

_logger = logging.getLogger("tf_dgc")
_exchanges: weakref.WeakKeyDictionary[Any, Exchange] = weakref.WeakKeyDictionary()


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    config: DGCConfig | None = None,
    *,
    backward_passes_per_step: int = 1,
    hierarchical: bool = False,
    over: Transport | None = None,
) -> keras.optimizers.Optimizer:
    """Let an optimizer apply the mean of all workers' gradients.

    It stays the object that it is: of the same class, settings and saved form, so that
    a model saved with it loads without this package. For `compile` and `fit`, or
    `optimizer.apply` in a loop of one's own, without a strategy.

    Args:
        optimizer: any of Keras. The momentum of `keras.optimizers.SGD` is corrected as
            in `DGCStrategy`.
        config: of Deep Gradient Compression; None exchanges everything.
        backward_passes_per_step: gradients that are averaged locally before they are
            exchanged; sets `gradient_accumulation_steps` of the optimizer.
        hierarchical: sum densely within a node, and exchange between nodes only.
        over: a transport other than Horovod's.

    Returns:
        The optimizer.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the optimizer is distributed already, was made in the scope of a
            strategy, or accumulates by itself where `backward_passes_per_step` is
            not 1; or nodes with `hierarchical` differ in size. Settings that differ
            between workers are refused in the first exchange.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`optimizer` must be one of Keras. Received: optimizer={optimizer!r}"
        )
    inner = _host.inner_optimizers(optimizer)[-1]
    if inner in _exchanges:
        raise ValueError(f"The optimizer {inner.name!r} is distributed already")
    made_in = _host.strategy_of(inner)
    if made_in is not None and made_in.num_replicas_in_sync > 1:
        raise ValueError(
            f"The optimizer {inner.name!r} was made in the scope of {made_in!r}, which "
            "synchronises by itself"
        )
    if backward_passes_per_step != 1:
        _accumulate(inner, backward_passes_per_step)
    exchange = _exchanges[inner] = Exchange(over or core.started(hierarchical), config)
    for warning in optimizers.warnings_about(inner, 1, config):
        _logger.warning(warning)
    original = _host.update_step_of(inner)

    def update_step(
        gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any
    ) -> None:
        values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        momentum = optimizers.momentum_of(inner, learning_rate)
        found = exchange(inner, gradients, values, momentum, subtract=True)

        def update(pairs: list[Any], rate: Any) -> None:
            # Keras gives them to a function whose arguments must be of one graph.
            own = [_identity(gradient) for gradient, _ in pairs]
            original(own, [v for _, v in pairs], rate)

        def apply() -> None:
            optimizers.update(inner, found, variables, learning_rate, update)

        if found.apply is None:
            apply()
        else:
            tf.cond(found.apply, apply, lambda: None)

    _host.set_update_step(inner, update_step)
    agree_on_overflow(optimizer)
    return optimizer


def _identity(gradient: Any) -> Any:
    return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


def _accumulate(optimizer: Any, steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            "`backward_passes_per_step` must be an integer of at least 1. Received: "
            f"backward_passes_per_step={steps!r}"
        )
    if optimizer.gradient_accumulation_steps or optimizer.built:
        raise ValueError(
            "`backward_passes_per_step` must be given before the optimizer is built, "
            "and in place of its gradient_accumulation_steps. Received: "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}"
        )
    optimizer.gradient_accumulation_steps = steps


def agree_on_overflow(optimizer: Any) -> None:
    """Let loss scaling find overflow on all workers where one has it.

    `Model.compile` wraps an optimizer for mixed precision after it was distributed;
    `callbacks.BroadcastVariables` calls this for it.

    Args:
        optimizer: a LossScaleOptimizer around one that is distributed; others are left
            as they are.
    """
    *outer, inner = _host.inner_optimizers(optimizer)
    if inner not in _exchanges:
        return
    found = _exchanges[inner].everybody

    def check_finite(original: Callable[[Any], Any], gradients: Any) -> Any:
        own = tf.cast(original(gradients), tf.int32)
        (finite,) = found.all_reduce([own], "finite")
        return tf.equal(finite, found.size)

    for scaling in outer:
        if "check_finite" not in vars(scaling):
            agreed = functools.partial(check_finite, scaling.check_finite)
            scaling.check_finite = agreed


def stats(optimizer: keras.optimizers.Optimizer, total: bool = False) -> StepStats:
    """Return what this worker sent for a distributed optimizer; see `StepStats`.

    Raises:
        KeyError: the optimizer is not distributed.
    """
    inner = _host.inner_optimizers(optimizer)[-1]
    return _exchanges[inner].synchronizer.stats(total)
