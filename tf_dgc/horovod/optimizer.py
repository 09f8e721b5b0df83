"""A Keras optimizer that applies the mean of all workers' gradients."""

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers, step
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.figures import StepStats
from tf_dgc.horovod import core
from tf_dgc.horovod.core import Means
from tf_dgc.horovod.options import Options
from tf_dgc.transports.base import Transport
from tf_dgc.values import copied, divided

_logger = logging.getLogger("tf_dgc")
_exchanges: weakref.WeakKeyDictionary[Any, Means] = weakref.WeakKeyDictionary()


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    config: DGCConfig | None = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    hierarchical: bool | str = False,
    local_layers: Any = None,
    over: Transport | None = None,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Let an optimizer apply the mean of all workers' gradients.

    It stays the object that it is: of the same class, settings and saved form, so that
    a model saved with it loads without this package. For `compile` and `fit`, or
    `optimizer.apply` in a loop of one's own, without a strategy.

    Args:
        optimizer: any of Keras. The momentum of `keras.optimizers.SGD` is corrected as
            in `DGCStrategy`. Of LossScaleOptimizer and MultiOptimizer those inside are
            distributed.
        config: of Deep Gradient Compression; None exchanges everything.
        backward_passes_per_step: gradients that are added up locally before they are
            exchanged; sets `gradient_accumulation_steps` of the optimizer.
        average_aggregated_gradients: exchange their mean, as Keras by itself would.
        hierarchical: see `DGCConfig`, where it may stand as well.
        local_layers: a layer, or some, whose weights are each worker's own.
        over: a transport other than Horovod's.
        options: Horovod's other keyword arguments; see `options.Options`.

    Returns:
        The optimizer.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the optimizer is distributed already, was made in the scope of a
            strategy, or accumulates by itself where `backward_passes_per_step` is
            not 1; or an option cannot be had. Settings that differ between workers are
            refused in the first exchange, and so is `jit_compile`.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`optimizer` must be one of Keras. Received: optimizer={optimizer!r}"
        )
    asked = Options(**options)
    passes = 1 if average_aggregated_gradients else backward_passes_per_step
    config, terms = asked.resolve(config, passes)
    outer = _unscaled(optimizer)
    _refuse_unsuited(outer)
    if backward_passes_per_step != 1:
        _accumulate(outer, backward_passes_per_step)
    found = core.started(hierarchical, asked.process_set, config, over)
    exchange = _exchanges[outer] = Means(found, config, terms)
    local = LocalWeights(local_layers, asked.scale_local_gradients)
    for inner in _parts(outer):
        _install(inner, exchange, config, local)
    if _is_multi(outer):
        _install_when_built(outer, exchange, config, local)
    if config is not None and config.nonfinite == "skip":
        optimizers.leave_out_whole_steps(outer, exchange.everybody)
    agree_on_overflow(optimizer)
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    config: DGCConfig | None = None,
    *,
    local_layers: Any = None,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Distribute an optimizer but for some layers; see `DistributedOptimizer`."""
    return DistributedOptimizer(optimizer, config, local_layers=local_layers, **options)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    **options: Any,
) -> keras.Model:
    """Load a Keras model whose optimizer is to be distributed.

    Its slots are those that were saved. What Deep Gradient Compression keeps back is
    not among them.

    Args:
        filepath: as `keras.models.load_model` takes it.
        custom_optimizers: classes that were not registered with Keras.
        custom_objects: more of them, by name.
        compression: as in `DistributedOptimizer`.
        options: others of `DistributedOptimizer`, among them `config`.

    Returns:
        The model; compiled, if it was when it was saved.
    """
    known = {each.__name__: each for each in custom_optimizers or ()}
    known |= custom_objects or {}
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model


def is_distributed(optimizer: Any) -> bool:
    """Tell whether gradients are exchanged, by this front end or by a strategy."""
    inner = _unscaled(optimizer)
    if inner in _exchanges or _synchronises(inner):
        return True
    return _is_multi(inner) and all(part in _exchanges for part in _parts(inner))


def compresses(optimizer: Any) -> bool:
    """Tell whether the velocities of SGD are those of Deep Gradient Compression."""
    exchange = _exchanges.get(_unscaled(optimizer))
    return exchange is not None and exchange.compressed


def own_slots(optimizer: Any) -> list[Any]:
    """Return what an optimizer keeps of steps of this worker's own, by now."""
    parts = [] if optimizer is None else _parts(_unscaled(optimizer))
    return [
        slot
        for part in parts
        if part in _exchanges
        for each in _exchanges[part].ledger.exchanges()
        if each.owner() is part
        for slot in each.own_slots
    ]


def _unscaled(optimizer: Any) -> Any:
    """Return what a LossScaleOptimizer wraps, and anything else as it is."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def _is_multi(optimizer: Any) -> bool:
    kind = getattr(keras.optimizers, "MultiOptimizer", None)  # since Keras 3.15
    return kind is not None and isinstance(optimizer, kind)


def _parts(optimizer: Any) -> list[Any]:
    """Return the optimizers that update variables, as far as they are known."""
    return list(optimizer.optimizers) if _is_multi(optimizer) else [optimizer]


def _synchronises(optimizer: Any) -> bool:
    made_in = _host.keras.strategy_of(optimizer)
    return made_in is not None and made_in.num_replicas_in_sync > 1


def _refuse_unsuited(optimizer: Any) -> None:
    for each in {optimizer, *_parts(optimizer)}:
        if each in _exchanges:
            raise ValueError(f"The optimizer {each.name!r} is distributed already")
        if _synchronises(each):
            raise ValueError(
                f"The optimizer {each.name!r} was made in the scope of "
                f"{_host.keras.strategy_of(each)!r}, which synchronises by itself"
            )


class LocalWeights:
    """The weights that each worker has for itself."""

    def __init__(self, layers: Any, scale: bool) -> None:
        """Take a layer, some, or None; `scale` is Horovod's scale_local_gradients."""
        layers = [layers] if isinstance(layers, keras.Layer) else list(layers or ())
        for layer in layers:
            if not isinstance(layer, keras.Layer):
                raise TypeError(
                    "`local_layers` must be a layer of Keras, or some. Received: "
                    f"{layer!r}"
                )
        self._layers, self._scale = layers, scale
        self._sources: list[Any] = []

    def add(self, variable: Any) -> None:
        """Take one more."""
        self._sources.append(variable)

    def have(self, variable: Any) -> bool:
        """Tell whether a variable, of Keras or TensorFlow, is one of them."""
        found = [w for layer in self._layers for w in layer.trainable_weights]
        return any(_native(variable) is _native(w) for w in [*found, *self._sources])

    def share(self, gradient: Any, exchange: Means) -> Any:
        """Return what is applied of the gradient of one of them."""
        by = exchange.mesh.replicas if self._scale else 1
        return divided(exchange.added_up(gradient), by)


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _install(
    inner: Any, exchange: Means, config: DGCConfig | None, local: LocalWeights
) -> None:
    """Let an optimizer exchange in its update."""
    _exchanges[inner] = exchange
    for warning in optimizers.warnings_about(inner, exchange.everybody.size, config):
        _logger.warning(warning)
    clips = config is None
    if clips:  # what was exchanged, as Horovod does
        _host.applying.clip_sums(inner)
    original = _host.keras.update_step_of(inner)

    def update(pairs: list[Any], rate: Any) -> None:
        # Keras gives them to a function whose arguments must be of one graph.
        own = [copied(gradient) for gradient, _ in pairs]
        original(own, [v for _, v in pairs], rate)

    def update_step(
        gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any
    ) -> None:
        pairs = list(zip(gradients, variables, strict=True))
        shared = [(g, v) for g, v in pairs if not local.have(v)]
        values = [_native(v) for _, v in shared]
        optimizers.refuse_whole_tensors(inner, values, config)
        if exchange.ledger.begins_with(inner):
            for warning in optimizers.lost_momentum(inner, values, config):
                _logger.warning(warning)
        if shared:
            args = inner, shared, learning_rate, update
            step.synchronised(exchange, *args, clips=clips)
        kept = [(local.share(g, exchange), v) for g, v in pairs if local.have(v)]
        if kept and clips:
            own = _host.applying.clipped(inner, [g for g, _ in kept])
            kept = list(zip(own, [v for _, v in kept], strict=True))
        if kept and shared:
            # What an optimizer counts of a step as a whole, as Nadam, it has counted.
            native = [(copied(g), _native(v)) for g, v in kept]
            strategy = tf.distribute.get_strategy()
            _host.keras.update_variables(inner, strategy, native, learning_rate)
        elif kept:
            update(kept, learning_rate)

    _host.keras.set_update_step(inner, update_step)


def _install_when_built(
    multi: Any, exchange: Means, config: DGCConfig | None, local: LocalWeights
) -> None:
    """Find those that a MultiOptimizer learns of when it sees its variables."""
    original = multi.build

    def build(variables: Sequence[Any]) -> None:
        original(variables)
        for inner in _parts(multi):
            if inner not in _exchanges:
                _install(inner, exchange, config, local)

    multi.build = build


def _accumulate(optimizer: Any, steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            "`backward_passes_per_step` must be an integer of at least 1. Received: "
            f"backward_passes_per_step={steps!r}"
        )
    if _is_multi(optimizer):
        raise ValueError(
            "`backward_passes_per_step` must be 1 for a MultiOptimizer: give those in "
            "it gradient_accumulation_steps. Received: "
            f"backward_passes_per_step={steps}"
        )
    found = optimizer.gradient_accumulation_steps
    if found != steps and (found or optimizer.built):
        raise ValueError(
            "`backward_passes_per_step` must be given before the optimizer is built, "
            "and in place of its gradient_accumulation_steps. Received: "
            f"backward_passes_per_step={steps}, gradient_accumulation_steps={found}"
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
    inner = _unscaled(optimizer)
    if inner not in _exchanges:
        return
    found = _exchanges[inner].everybody

    def check_finite(original: Callable[[Any], Any], gradients: Any) -> Any:
        return found.holds_on_all(original(gradients), "finite")

    while optimizer is not inner:
        if "check_finite" not in vars(optimizer):
            agreed = functools.partial(check_finite, optimizer.check_finite)
            optimizer.check_finite = agreed
        optimizer = optimizer.inner_optimizer


def stats(optimizer: keras.optimizers.Optimizer, total: bool = False) -> StepStats:
    """Return what this worker sent for a distributed optimizer; see `StepStats`.

    Raises:
        KeyError: the optimizer is not distributed.
    """
    return _exchanges[_unscaled(optimizer)].ledger.stats(total)
