"""Optimizers that apply what was exchanged, and gradients that they clip then."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._host import keras as host
from tf_dgc._host import patches

# They clip what was exchanged, without a strategy.
_clip_sums: weakref.WeakSet[Any] = weakref.WeakSet()


def clip_sums(optimizer: keras.optimizers.Optimizer) -> None:
    """Let Keras leave gradients of an optimizer to `clipped`."""
    patches.wrap("clip", leave_to_the_exchange)
    _clip_sums.add(optimizer)


def clipped(optimizer: keras.optimizers.Optimizer, gradients: list[Any]) -> list[Any]:
    """Return gradients as Keras clips them for an optimizer."""
    clip = patches.original("clip")
    return gradients if clip is None else list(clip(optimizer, gradients))


# Their gradients are the same on all workers, not those of this one's rows.
_as_they_are: weakref.WeakSet[Any] = weakref.WeakSet()


def apply_as_they_are(optimizer: keras.optimizers.Optimizer) -> None:
    """Let an optimizer apply gradients without asking for their sum over replicas.

    KB/tensorflow/optimizer.py: TFOptimizer._backend_update_step, which reduces and then
    calls _distributed_tf_update_step in the cross-replica context.
    """

    def update_step(
        gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any
    ) -> None:
        plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        pairs = list(zip(gradients, plain, strict=True))
        tf.distribute.get_replica_context().merge_call(
            optimizer._distributed_tf_update_step, args=(pairs, learning_rate)
        )

    host.set_update_step(optimizer, update_step)
    _as_they_are.add(optimizer)


def applies_as_they_are(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether an optimizer was given to `apply_as_they_are`."""
    return optimizer in _as_they_are


def leave_to_the_exchange(
    original: Callable[..., Any], optimizer: Any, grads: Any
) -> Any:
    """Leave gradients as they are where an optimizer clips what was exchanged."""
    return grads if optimizer in _clip_sums else original(optimizer, grads)
