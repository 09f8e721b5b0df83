"""Exchanges for tests: of one optimizer, or what stands for one."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import optimizers
from tf_dgc.compression.dgc import Momentum
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import EachStep, Ledger, Update
from tf_dgc.exchanges.base import LocalStep, TakenOver
from tf_dgc.transports.base import Transport


def compressing(transport: Transport, config: DGCConfig) -> Ledger:
    """Return a ledger of compressed exchanges."""
    return Ledger(transport, EachStep(config))


def only(ledger: Ledger) -> Any:
    """Return the one exchange that is open."""
    (exchange,) = ledger.exchanges()
    return exchange


def exchange(
    ledger: Ledger,
    owner: object,
    local: Sequence[Any],
    variables: Sequence[Any],
    momentum: TakenOver | None = None,
) -> Update:
    """Exchange; of finished steps return what was subtracted from the variables."""
    if isinstance(momentum, Momentum):
        for variable in variables:
            variable.assign(tf.zeros_like(variable))
    update = ledger.gradients(owner, local, variables, momentum)
    found = [
        -variable if gradient is None else gradient
        for gradient, variable in zip(update.gradients, variables, strict=True)
    ]
    return update._replace(gradients=found)


def flushed(
    ledger: Ledger, variables: Sequence[Any]
) -> list[tuple[Any, Update, Sequence[Any]]]:
    """Flush; return owners, updates and what these are of."""
    found: list[Any] = []
    ledger.flush(variables, lambda *each: found.append(each))
    return found


def built(
    optimizer: keras.optimizers.Optimizer,
    shapes: Sequence[Any],
    dtype: str = "float32",
) -> list[Any]:
    """Return variables of Keras, all zero, for which an optimizer is built."""
    variables = [
        keras.Variable(tf.zeros(shape), dtype=dtype, name=f"v{i}")
        for i, shape in enumerate(shapes)
    ]
    optimizer.build(variables)
    return variables


def local_step_of(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], rate: float
) -> LocalStep:
    """Return what an exchange takes over of an optimizer other than SGD."""

    def update(pairs: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        for gradient, variable in pairs:
            optimizer.update_step(gradient, variable, learning_rate)

    args = variables, tf.constant(rate), update
    found = optimizers.taken_over_of(optimizer, *args)
    assert isinstance(found, LocalStep)
    return found
