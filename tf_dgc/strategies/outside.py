"""Optimizers that apply gradients outside of `strategy.run`, as loops of tutorials do.

There nothing is exchanged. Several workers are told how to write the loop; one worker
applies its gradients, as these are all there are.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import fits


def error(name: str) -> RuntimeError:
    """Return what is raised where nothing would be exchanged.

    Args:
        name: of a variable.
    """
    return RuntimeError(
        f"An optimizer applies this worker's own gradient to {name!r}, outside of "
        "`strategy.run`, so those of the other workers would be lost. With `strategy = "
        "tf.distribute.get_strategy()` share out the data before the loop, `dataset = "
        "strategy.experimental_distribute_dataset(dataset)`, and call the step in it "
        "by `strategy.run(train_step, args=(x, y))`. Where each worker is to train by "
        "itself, leave out `--strategy` of tf-dgc-run, or make the optimizer outside "
        "the scope of the strategy."
    )


def refuse_foreign(strategy: Any, variable: Any) -> None:
    """Raise ValueError where a variable is not of a strategy."""
    if _host.keras.strategy_of(variable) is not strategy:
        raise ValueError(
            f"The variable {variable.name!r} was made outside the scope of this "
            "strategy, and its optimizer inside. Build and compile the model "
            "inside `with strategy.scope():`."
        )


def apply(
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    """Refuse gradients that an optimizer applies outside of replicas."""
    strategy = _host.keras.strategy_of(optimizer)
    if strategy is None or not fits.is_own(strategy):
        return original(optimizer, grads, trainable_variables)
    context = tf.distribute.get_replica_context()
    if context is not None and context.strategy is strategy:
        return original(optimizer, grads, trainable_variables)
    if strategy.extended.several:
        variables = trainable_variables or _host.keras.variables_of(optimizer)
        for variable in variables if _host.keras.is_in_fit() else ():
            refuse_foreign(strategy, variable)
        first = next(iter(variables), optimizer)
        raise error(getattr(first, "path", first.name))
    return strategy.run(lambda: original(optimizer, grads, trainable_variables))
