"""What the exchange must know of a Keras optimizer, and of the model it trains."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, dgc
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.synchronizers import Exchanged


def momentum_of(
    optimizer: keras.optimizers.Optimizer, learning_rate: Any
) -> dgc.Momentum | None:
    """Return the step of SGD, which the exchange can take over; None of others."""
    if not _is_plain_sgd(optimizer):
        return None
    factor, nesterov = float(optimizer.momentum or 0.0), bool(optimizer.nesterov)
    return dgc.Momentum(factor, nesterov, learning_rate)


@contextlib.contextmanager
def suspended_momentum(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Trace an update of SGD without its momentum; its settings stay the user's."""
    momentum, optimizer.momentum = optimizer.momentum, 0.0
    try:
        yield
    finally:
        optimizer.momentum = momentum


def update(
    optimizer: keras.optimizers.Optimizer,
    exchanged: Exchanged,
    variables: Sequence[Any],
    learning_rate: Any,
    apply: Callable[[list[Any], Any], None],
) -> None:
    """Update variables; those whose step was taken over, by what is in their gradient.

    Args:
        optimizer: of the user.
        exchanged: the gradients.
        variables: what they belong to.
        learning_rate: for those whose step was not taken over.
        apply: the optimizer's own update of a list of pairs (gradient, variable) at a
            learning rate.
    """
    triples = zip(exchanged.gradients, variables, exchanged.compressed, strict=True)
    # None was applied in the exchange.
    flagged = [((g, v), taken) for g, v, taken in triples if g is not None]
    if plain := [pair for pair, taken in flagged if not taken]:
        apply(plain, learning_rate)
    if taken_over := [pair for pair, taken in flagged if taken]:
        with suspended_momentum(optimizer):
            apply(taken_over, tf.ones_like(learning_rate))


def check_model(model: keras.Model, strategy: Any) -> None:
    """Refuse a model that a strategy cannot train.

    Args:
        model: of the user.
        strategy: a BaseStrategy.

    Raises:
        ValueError: it is compiled for XLA, or was compiled outside the scope.
    """
    workers = strategy.num_replicas_in_sync
    if model.jit_compile is True and (workers > 1 or strategy.config is not None):
        raise ValueError(
            "`jit_compile` must not be True: XLA cannot compile the exchange, and only "
            "DenseStrategy on one worker has none. Received: jit_compile=True, "
            f"{workers} worker(s). Use `model.compile(..., jit_compile=False)`."
        )
    for optimizer in _host.inner_optimizers(getattr(model, "optimizer", None)):
        if optimizer is not None and _host.strategy_of(optimizer) is not strategy:
            raise ValueError(
                f"The optimizer {optimizer.name!r} was made outside the scope of this "
                "strategy and would train each worker by itself. Build and compile "
                "the model inside `with strategy.scope():`."
            )


def warnings_about(
    optimizer: keras.optimizers.Optimizer,
    workers: int,
    config: DGCConfig | AveragingConfig | None,
) -> list[str]:
    """Say which settings of an optimizer mean something else on several workers.

    Args:
        optimizer: of the user.
        workers: N.
        config: of the strategy.
    """
    if isinstance(config, AveragingConfig):
        advice = f"divide by {workers} what is to clip a local step"
    else:
        advice = "DGCConfig(clip_norm=...) clips as the paper does"
    found = []
    clips = [
        f"{name}={getattr(optimizer, name)}"
        for name in ("clipnorm", "global_clipnorm", "clipvalue")
        if getattr(optimizer, name, None) is not None
    ]
    if clips and workers > 1:
        found.append(
            f"{optimizer.name}: Keras clips each worker's own gradient "
            f"({', '.join(clips)}), before the exchange and after division by the "
            f"number of workers; {advice}"
        )
    corrects = isinstance(config, DGCConfig) and config.momentum_correction
    if corrects and not _is_plain_sgd(optimizer):
        found.append(
            f"{optimizer.name}: its gradients are accumulated without momentum "
            "correction, which only keras.optimizers.SGD allows"
        )
    return found


def _is_plain_sgd(optimizer: keras.optimizers.Optimizer) -> bool:
    return type(optimizer).update_step is keras.optimizers.SGD.update_step
