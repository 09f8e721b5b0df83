"""Models of this process, seen before Keras builds, compiles or trains them."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tf_dgc import _host, optimizers
from tf_dgc.strategies import fits
from tf_dgc.strategies.uses import traced_again

of_several: weakref.WeakSet[Any] = weakref.WeakSet()  # strategies of several workers


def expect_fit(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Note that a model, which is built by now, is to be trained."""
    strategy: Any = _host.keras.strategy_of(model)
    if not fits.is_own(strategy) or strategy not in of_several:
        return original(model, *args, **kwargs)
    strategy.inner.expect_fit(model)
    before = model.train_function
    result = original(model, *args, **kwargs)

    def make() -> Any:
        original(model, force=True)
        made, model.train_function = model.train_function, again
        return made

    if model.train_function is not before:
        again = traced_again(model.train_function, make)
        model.train_function = again
    return result


def compare_before_steps(
    original: Callable[..., Iterator[Any]], epoch: Any
) -> Iterator[Any]:
    """Compare variables before the first step of a `fit`."""
    strategy: Any = _host.keras.strategy_of(epoch)
    if fits.is_own(strategy):
        run = fits.current()
        if run is not None and run.what == "fit" and epoch.num_batches:
            strategy.inner.expect_steps(run.epochs * int(epoch.num_batches))
        strategy.inner.compare_variables()
    yield from original(epoch)


def tell_what_is_lost(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> None:
    """Warn where an optimizer is replaced that still keeps something back."""
    before = getattr(model, "optimizer", None)
    original(model, *args, **kwargs)
    strategy: Any = _host.keras.strategy_of(model)
    if fits.is_own(strategy) and model.optimizer is not before:
        strategy.inner.states.tell_what_is_lost(before)


def check_and_build(
    original: Callable[..., Any], model: keras.Model, **batches: Any
) -> Any:
    """Refuse what its strategy cannot train, and leave alone what has no `call`.

    Keras builds every model that is of a strategy, by calling it; those of none are
    built while their step is traced, as those must be that have no `call`.
    """
    strategy: Any = _host.keras.strategy_of(model)
    if fits.is_own(strategy):
        optimizers.check_model(model, strategy)
        if _host.keras.has_no_call(model):
            return None
    return original(model, **batches)


def refuse_outsider(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Refuse to train a model that was forgotten to be made in the scope."""
    if of_several and not fits.is_own(_host.keras.strategy_of(model)):
        used = any(strategy.extended.used for strategy in of_several)
        on_purpose = used and fits.may_be_outside()
        warning = optimizers.check_outsider(model, on_purpose)
        next(iter(of_several)).inner.core.warn([warning])
        optimizers.check_metrics_outside(model)
    return original(model, *args, **kwargs)
