"""An optimizer on parameter servers: what of it moves there, and what is done there.

A twin is what of a worker's variable is on the servers, and is trained.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc.config import DownpourConfig
from tf_dgc.exchanges.moved import KeptSlot, Trained
from tf_dgc.servers.shared import Twins
from tf_dgc.strategies import pieces
from tf_dgc.strategies.served import DownpourExtended


def moved(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    config: DownpourConfig,
    extended: DownpourExtended,
    twins: Twins,
) -> Trained:
    """Return what moves to the servers with an optimizer's variables.

    Args:
        optimizer: of the user.
        variables: that it trains.
        config: of the exchange.
        extended: knows what was made in the scope.
        twins: of other optimizers, too.
    """
    wrapped = {id(v.value): v for v in _host.keras.variables_of(optimizer)}
    elementwise = optimizers.is_elementwise(optimizer)
    whole = [
        not elementwise or getattr(wrapped.get(id(v)), "constraint", None) is not None
        for v in variables
    ]
    mine = {id(v) for v in variables}
    kept = []
    # With compression momentum is each worker's own.
    compressed = config.compression is not None
    own = getattr(optimizer, "momentums", []) if compressed else []
    for slot in _host.keras.movable_slots_of(optimizer):
        if any(slot is each for each in own):
            continue
        beside = extended.slots.get(_host.shared.identity_of(slot.value))
        if beside is None or id(beside) in mine:
            kept.append(KeptSlot(beside, slot.value, _host.keras.mover_of(slot)))
    layers = [reference() for reference in extended.layer_variables]
    others = [v for v in layers if v is not None and id(v) not in mine]
    others = [v for v in others if twins.of(v) is None]
    steps, per_push = _host.keras.step_counter_of(optimizer)
    overwritten = bool(_overwritten_by(optimizer))
    return Trained(
        kept,
        whole,
        others,
        steps,
        per_push,
        overwritten,
        runs=lambda: extended.running,
        rate=_host.keras.rate_of(optimizer),
        settings=settings_of(optimizer),
    )


def settings_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return what all workers must have alike of an optimizer, as JSON can hold it.

    Not its rate, where that is a number: callbacks change it, and the chief's counts.
    """
    try:
        config = dict(optimizer.get_config())
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return {}  # of a class that does not tell
    if not isinstance(config.get("learning_rate"), Mapping):
        config.pop("learning_rate", None)
    found: dict[str, Any] = _plain(config)
    return found


def _plain(value: Any) -> Any:
    """Return numbers, texts, and what is made of these; names may be drawn."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k != "name"}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None


def warnings_about(
    optimizer: keras.optimizers.Optimizer, config: DownpourConfig, workers: int
) -> list[str]:
    """Return what a user should know of an optimizer on servers."""
    if config.compression is not None:
        if not (found := _overwritten_by(optimizer)):
            return []
        return [
            f"{optimizer.name}: {', '.join(found)} changes all elements on the servers "
            "in each push, so that what is fetched is not compressed"
        ]
    alone = workers == 1 and config.fetch_period == 1
    momentum = optimizers.momentum_of(optimizer, 1.0)
    if alone or config.synchronous or config.max_staleness == 0:
        return []
    if momentum is None or not momentum.factor:
        return []
    return [
        f"{optimizer.name}: momentum={momentum.factor:g} on the servers and gradients "
        "that come late: the largest learning rate that is stable is many times "
        "smaller than on one worker. Use momentum=0, Adagrad or Adam, or a rate by the "
        "table in docs/how-it-works/servers.md"
    ]


def _overwritten_by(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Say what changes all elements in each push."""
    names = ["weight_decay"]
    names += ["ema_overwrite_frequency"] if optimizer.use_ema else []
    found = [f"{n}={v}" for n in names if (v := getattr(optimizer, n, None))]
    if any(v.constraint is not None for v in _host.keras.variables_of(optimizer)):
        found.append("constraints")
    return found


def of_all(
    optimizer: keras.optimizers.Optimizer, pairs: list[Any], means: list[Any]
) -> list[Any]:
    """Return pairs with what all workers computed in the place of gradients."""
    if optimizers.clipping_of(optimizer):
        means = _host.applying.clipped(optimizer, [mean.joined() for mean in means])
    return list(zip(means, [variable for _, variable in pairs], strict=True))


def finish(optimizer: keras.optimizers.Optimizer, twins: Twins) -> None:
    """Average, overwrite and constrain, after an update, as Keras does."""
    found = [
        (i, variable, twin)
        for i, variable in enumerate(_host.keras.variables_of(optimizer))
        if (twin := twins.of(variable.value)) is not None
    ]
    if optimizer.use_ema:
        for i, _, twin in found:
            update = functools.partial(_host.keras.update_average, optimizer, i)
            pieces.change(twin, update)
        _overwrite(optimizer, [(i, twin) for i, _, twin in found])
    for _, variable, twin in found:
        if variable.constraint is not None:
            constrain = functools.partial(_constrain, variable.constraint)
            pieces.change(twin, constrain)


def _overwrite(
    optimizer: keras.optimizers.Optimizer, twins: Sequence[tuple[int, Any]]
) -> None:
    """Replace what is trained by its average, where it is time."""
    period = optimizer.ema_overwrite_frequency
    if not period:
        return
    averages = _host.keras.averages_of(optimizer)

    def overwrite() -> None:
        for i, twin in twins:
            pieces.change(twin, functools.partial(_assign, averages[i]))

    tf.cond((optimizer.iterations + 1) % period == 0, overwrite, lambda: None)


def _constrain(constraint: Any, twin: Any) -> None:
    twin.assign(constraint(tf.convert_to_tensor(twin)))


def _assign(value: Any, twin: Any) -> None:
    twin.assign(value)
