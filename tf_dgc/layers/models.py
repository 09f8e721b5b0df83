"""Models whose large dense layers are split, and back.

Axes: N workers, I inputs, U units, W columns or rows of a part.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.layers import ways
from tf_dgc.layers.dense import SplitDense
from tf_dgc.transports import Transport


def split_dense(model: keras.Model, min_elements: int = 2**20) -> keras.Model:
    """Return a copy of a model with its large dense layers split over the workers.

    All workers call this, in the scope of their strategy. The copy has the same weights
    and is not compiled.

    Args:
        model: sequential or functional, built; models within it may be, too.
        min_elements: a kernel of at least so many elements is split.

    Returns:
        A model of the same class, with the same names of layers.

    Raises:
        TypeError: the model is neither sequential nor functional, or of a class that
            Keras cannot clone, or `min_elements` is no integer.
        ValueError: it is not built, `min_elements` is less than 1, or a layer cannot be
            split; names it.
    """
    if isinstance(min_elements, bool) or not isinstance(min_elements, int):
        raise TypeError(
            "`min_elements` must be an integer. "
            f"Received: min_elements={min_elements!r}"
        )
    if min_elements < 1:
        raise ValueError(
            f"`min_elements` must be 1 or more. Received: min_elements={min_elements!r}"
        )

    def is_large(layer: Any) -> bool:
        plain = type(layer) is keras.layers.Dense and layer.built
        return plain and int(np.prod(layer.kernel.shape)) >= min_elements

    strategy = tf.distribute.get_strategy()
    workers = strategy.num_replicas_in_sync
    found = ways.chosen(model, is_large, workers)

    def made(layer: Any) -> Any:
        config = layer.get_config()
        if not is_large(layer):
            return type(layer).from_config(config)
        return SplitDense.from_config({**_checked(config), "by": found[id(layer)]})

    def copy(new: Any, old: Any) -> None:
        if isinstance(new, SplitDense):
            new.load_own_variables(_whole_of(old))
        else:
            _assign(new.variables, old.variables)

    return _cloned(model, made, copy)


def joined(model: keras.Model) -> keras.Model:
    """Return an ordinary Keras model of one with split layers; all workers call this.

    It has `keras.layers.Dense` in their place, all weights, and where the model is
    compiled the state of the optimizer; it is saved by one worker, or by all, and loads
    without this package.

    Args:
        model: sequential or functional, built.

    Returns:
        A model of the same class, with the same names of layers. In the scope of a
        strategy it is of that.

    Raises:
        TypeError: the model is neither sequential nor functional.
        ValueError: it is not built.
    """

    def made(layer: Any) -> Any:
        config = layer.get_config()
        if not isinstance(layer, SplitDense):
            return type(layer).from_config(config)
        del config["by"]
        return keras.layers.Dense.from_config(config)

    def copy(new: Any, old: Any) -> None:
        _assign(new.variables, old.variables)

    whole = _cloned(model, made, copy)
    if getattr(model, "compiled", False) and model.optimizer is not None:
        _compile_alike(whole, model)
    return whole


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    """Refuse what Dense has and a split one cannot have."""
    if config.get("lora_rank") or _is_quantized(config):
        raise ValueError(
            f"The layer {config['name']!r} cannot be split: it has LoRA or is "
            "quantized. Received: "
            f"lora_rank={config.get('lora_rank')!r}, dtype={config.get('dtype')!r}"
        )
    return config


def _is_quantized(config: dict[str, Any]) -> bool:
    policy = keras.dtype_policies.get(config["dtype"])
    return getattr(policy, "quantization_mode", None) is not None


def _cloned(
    model: keras.Model,
    made: Callable[[Any], Any],
    copy: Callable[[Any, Any], None],
) -> keras.Model:
    """Clone a model layer by layer, models within it, too.

    Args:
        model: sequential or functional.
        made: returns the clone of a layer, not built.
        copy: sets the variables of a clone, given it and the layer.
    """
    if not isinstance(model, keras.Sequential) and not _is_functional(model):
        raise TypeError(
            "`model` must be sequential or functional: layers within others cannot be "
            "replaced; use `tf_dgc.layers.SplitDense` there. "
            f"Received: model of type {type(model).__name__}"
        )
    if not model.built:
        raise ValueError(
            "`model` must be built first, as by a `keras.Input`. "
            f"Received: model={model.name!r}"
        )
    clones: dict[int, tuple[Any, Any]] = {}  # and the layers, by their ids

    def clone(layer: Any) -> Any:
        if isinstance(layer, keras.Sequential) or _is_functional(layer):
            return _structure(layer, clone)
        if id(layer) not in clones:  # one may be in several models
            clones[id(layer)] = made(layer), layer
        return clones[id(layer)][0]

    found = _structure(model, clone)
    for new, old in clones.values():
        copy(new, old)
        if isinstance(new, keras.layers.Normalization):
            new.finalize_state()
    _restore_trainable(found, model)
    return found


def _structure(model: keras.Model, clone: Callable[[Any], Any]) -> keras.Model:
    """Return a model of clones of layers, not compiled."""
    compiled, model.compiled = model.compiled, False
    try:
        found = keras.models.clone_model(model, clone_function=clone)
    finally:
        model.compiled = compiled
    if type(found) is not type(model):
        raise TypeError(
            "`model` must be of a class that Keras can clone, or its own `train_step` "
            "and what else it has would be lost; use `tf_dgc.layers.SplitDense` in it. "
            f"Received: model {model.name!r} of type {type(model).__name__}, of which "
            f"`keras.models.clone_model` makes {type(found).__name__}"
        )
    return found


def _restore_trainable(new: keras.Model, old: keras.Model) -> None:
    """Let layers and variables be as frozen as those they were made of."""
    layers = (_host.keras.layers_within(model) for model in (new, old))
    for one, other in zip(*layers, strict=True):
        one.trainable = other.trainable
    for one, other in zip(new.variables, old.variables, strict=True):
        one.trainable = other.trainable


def _is_functional(model: Any) -> bool:
    return isinstance(model, keras.Model) and hasattr(model, "operations")


def _whole_of(layer: keras.layers.Dense) -> dict[str, Any]:
    found = {"0": np.asarray(layer.kernel)}
    if layer.bias is not None:
        found["1"] = np.asarray(layer.bias)
    return found


def _assign(new: Any, old: Any) -> None:
    """Set variables to others, parts of which are joined on all workers."""
    for one, other in zip(new, old, strict=True):
        one.assign(whole_value(other))


def whole_value(variable: Any) -> Any:
    """Return the value of a Keras variable, or the whole one that it is a part of.

    All workers call this.

    Returns:
        shape [I, U] of a part [I, W] or [W, U].
    """
    own = bands.of(variable)
    value = tf.convert_to_tensor(variable.value)
    if own is None or not own.is_split:
        return value
    transport: Transport = variable.value._distribute_strategy.transport
    return own.join(list(transport.all_gather(value, "split.join").numpy()))


def _compile_alike(whole: keras.Model, model: keras.Model) -> None:
    """Compile a model as another one was, with the state of its optimizer."""
    optimizer = model.optimizer
    own = type(optimizer).from_config(optimizer.get_config())
    try:
        whole.compile_from_config(model.get_compile_config())
    except (TypeError, ValueError):  # of functions that Keras does not know by name
        whole.compile(loss=model.loss)
    whole.optimizer = own
    trained = _host.keras.variables_of(_host.keras.inner_optimizers(optimizer)[-1])
    if optimizer.built:
        place = {id(variable): i for i, variable in enumerate(model.variables)}
        own.build([whole.variables[place[id(v)]] for v in trained])
        _assign(own.variables, optimizer.variables)
