"""What the exchange must know of a Keras optimizer, and of the model it trains."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tf_dgc import _host, dgc


def momentum_of(optimizer: keras.optimizers.Optimizer) -> dgc.Momentum | None:
    """Return the momentum that the exchange can take over, if there is any."""
    if _is_plain_sgd(optimizer) and optimizer.momentum:
        return dgc.Momentum(float(optimizer.momentum), bool(optimizer.nesterov))
    return None


@contextlib.contextmanager
def suspended_momentum(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Trace an update of SGD without its momentum; its settings stay the user's."""
    momentum, optimizer.momentum = optimizer.momentum, 0.0
    try:
        yield
    finally:
        optimizer.momentum = momentum


def check_model(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Refuse a model that a strategy cannot train.

    Raises:
        ValueError: it is compiled for XLA, or was compiled outside the scope.
    """
    workers = strategy.num_replicas_in_sync
    if model.jit_compile is True and workers > 1:
        raise ValueError(
            "`jit_compile` must not be True with several workers: XLA cannot compile "
            f"their exchange. Received: jit_compile=True, {workers} workers. Use "
            "`model.compile(..., jit_compile=False)`."
        )
    for optimizer in _host.inner_optimizers(getattr(model, "optimizer", None)):
        if optimizer is not None and _host.strategy_of(optimizer) is not strategy:
            raise ValueError(
                f"The optimizer {optimizer.name!r} was made outside the scope of this "
                "strategy and would train each worker by itself. Build and compile "
                "the model inside `with strategy.scope():`."
            )


def warnings_about(
    optimizer: keras.optimizers.Optimizer, workers: int, corrects: bool
) -> list[str]:
    """Say which settings of an optimizer mean something else on several workers.

    Args:
        optimizer: of the user.
        workers: N.
        corrects: whether momentum correction is asked for.
    """
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
            "number of workers; DGCConfig(clip_norm=...) clips as the paper does"
        )
    if corrects and not _is_plain_sgd(optimizer):
        found.append(
            f"{optimizer.name}: its gradients are accumulated without momentum "
            "correction, which only keras.optimizers.SGD allows"
        )
    return found


def _is_plain_sgd(optimizer: keras.optimizers.Optimizer) -> bool:
    return type(optimizer).update_step is keras.optimizers.SGD.update_step
