"""Training and evaluation of models whose parameters are on servers."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.servers.members import Members
from tf_dgc.strategies import outside
from tf_dgc.strategies.following import PassedOver
from tf_dgc.strategies.served import DownpourExtended

# How TensorFlow names a server in its errors.
_SERVER = re.compile(r"/job:ps/replica:0/task:(\d+)")


def _is_served(strategy: Any) -> bool:
    return isinstance(getattr(strategy, "extended", None), DownpourExtended)


def apply(
    original: Callable[..., Any], optimizer: Any, grads: Any, variables: Any
) -> Any:
    """Prepare what an optimizer trains on the servers, then apply its gradients."""
    strategy: Any = _host.keras.strategy_of(optimizer)
    if _is_served(strategy):
        if not strategy.extended.running:
            raise outside.error(variables[0].name)
        strategy.inner.exchanging.prepare(
            optimizer, list(zip(grads, variables, strict=True))
        )
        strategy.extended.applying = True
    try:
        return original(optimizer, grads, variables)
    finally:
        if _is_served(strategy):
            strategy.extended.applying = False


def fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Train with all batches, as servers want them; name a server that fails."""
    strategy: Any = _host.keras.strategy_of(model)
    if not _is_served(strategy):
        return original(model, *args, **kwargs)
    bound = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs)
    arguments = dict(bound.arguments)
    del arguments["self"]
    callbacks = _listed(arguments.get("callbacks"))
    for each in callbacks:
        if isinstance(each, keras.callbacks.SwapEMAWeights):
            raise ValueError(
                "SwapEMAWeights must not be among the callbacks: the averages are on "
                "the servers, and other workers train while it has swapped them. "
                f"Received: {each!r}. The end of `fit` puts them into the model"
            )
    arguments = strategy.extended.shares.of_fit(arguments)
    members, following = strategy.inner.members, strategy.inner.following
    with strategy.inner.fitting(model, callbacks), named_errors(members):
        if members.succession.is_over:
            arguments["callbacks"] = [PassedOver(following), *callbacks]
        history = original(model, **arguments)
        following.tell_history(history.history)
        return history


def note_data(original: Callable[..., None], epoch: Any) -> None:
    """Note the data that a `fit` trains on."""
    original(epoch)
    strategy: Any = _host.keras.strategy_of(epoch)
    if _is_served(strategy) and not strategy.inner.fits.evaluating:
        strategy.inner.fits.data = _host.keras.distributed_dataset_of(epoch)


def _listed(callbacks: Any) -> list[Any]:
    """Return callbacks as a list, in whatever way `fit` got them."""
    callbacks = getattr(callbacks, "callbacks", callbacks) or []  # of a CallbackList
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def evaluate(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Evaluate or predict all batches by itself; name a server that fails."""
    strategy: Any = _host.keras.strategy_of(model)
    if not _is_served(strategy):
        return original(model, *args, **kwargs)
    args, kwargs = strategy.extended.shares.of_evaluation(args, kwargs)
    with strategy.inner.evaluating(), named_errors(strategy.inner.members):
        return original(model, *args, **kwargs)


@contextlib.contextmanager
def named_errors(members: Members) -> Iterator[None]:
    """Say which server has failed, where TensorFlow says it in its own way.

    Raises:
        tf.errors.OpError: a server has failed, or cannot be reached.
    """
    try:
        yield
    except tf.errors.OpError as error:
        number = _SERVER.search(error.message)
        if number is None or "Parameter server" in error.message:
            raise
        name = members.pulse.name_of(int(number[1]))
        text = (
            f"{name} has failed, or cannot be reached; what it held is lost. Start "
            "the job again: with tf_dgc.callbacks.BackupState it continues from "
            f"its last backup. TensorFlow says: {error.message}"
        )
        raise type(error)(error.node_def, error.op, text) from error
