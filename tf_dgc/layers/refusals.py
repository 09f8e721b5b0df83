"""Refusals of what a split layer cannot have, and of places where there is none."""

import sys
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.config import AveragingConfig, DownpourConfig
from tf_dgc.layers import trials, ways
from tf_dgc.layers.away import Away
from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.transports import Transport, handshake
from tf_dgc.transports.horovod import import_horovod


def refuse(layer: Any, strategy: BaseStrategy) -> None:
    """Refuse a layer that several workers cannot have parts of.

    Raises:
        ValueError: names what it has.
    """

    def raise_for(rule: str, received: str) -> None:
        raise ValueError(
            f"The split layer {layer.name!r} {rule} Received: {received}. Use "
            "`keras.layers.Dense` there"
        )

    if isinstance(strategy.config, AveragingConfig | DownpourConfig):
        raise_for(
            "needs workers that meet in each step: DenseStrategy or DGCStrategy.",
            type(strategy).__name__,
        )
    if layer.quantization_mode or layer.lora_rank:
        raise_for(
            "can have neither quantization nor LoRA.",
            f"quantization_mode={layer.quantization_mode!r}, "
            f"lora_rank={layer.lora_rank!r}",
        )
    axis, given = ways.WAYS[layer.by], layer.kernel_constraint
    if given is not None and not trials.keeps_to(given, axis):
        raise_for(
            f"must have a `kernel_constraint` that looks at single {layer.by}.",
            f"kernel_constraint={given!r}",
        )
    given = layer.kernel_regularizer
    if given is not None and not trials.sums_over(given, axis):
        raise_for(
            f"must have a `kernel_regularizer` that is a sum over {layer.by}.",
            f"kernel_regularizer={given!r}",
        )


def refuse_later(layer: Any, what: str) -> None:
    """Raise ValueError where a layer is split, and is to be changed."""
    if layer.is_split:
        raise ValueError(
            f"The split layer {layer.name!r} can have no {what}. Use "
            "`tf_dgc.joined(model)` first"
        )


def compare(layer: Any, over: Transport, shape: tuple[int, int]) -> None:
    """Refuse a layer that is another one elsewhere; all workers call this.

    Args:
        layer: that is being built.
        over: to the other workers.
        shape: of the whole kernel.

    Raises:
        ValueError: names what differs, and the ranks.
    """
    kind = type(layer.kernel_initializer).__name__
    form = {"inputs": shape[0], "units": shape[1], "kernel_initializer": kind}
    form["by"] = layer.by
    handshake.agree(over, f"split layer {layer.name!r}", form)


def refuse_inputs(layer: Any, inputs: Any) -> None:
    """Raise TypeError for sparse or ragged ones."""
    if not isinstance(inputs, tf.Tensor | tf.Variable | keras.Variable | Away):
        raise TypeError(
            f"`inputs` of the split layer {layer.name!r} must be a dense tensor. "
            f"Received: inputs of type {type(inputs).__name__}"
        )


def splits(layer: Any, strategy: Any) -> bool:
    """Tell whether a strategy is one of workers, each of which computes its rows.

    Raises:
        ValueError: its workers do not meet, or several have no strategy.
    """
    if isinstance(getattr(strategy, "config", None), DownpourConfig):
        refuse(layer, strategy)  # which has a transport of one worker
    if not isinstance(strategy, BaseStrategy):
        _refuse_horovod(layer.name)
        return False
    size = strategy.transport.size
    alone = size == 1 and isinstance(strategy.config, AveragingConfig)
    return strategy.mesh.replicas == size and not alone


def _refuse_horovod(name: str) -> None:
    """Raise ValueError in a job of Horovod without a strategy."""
    if "horovod.tensorflow" not in sys.modules:
        return
    hvd = import_horovod()
    if hvd.is_initialized() and hvd.size() > 1:
        raise ValueError(
            f"The split layer {name!r} must be made in the scope of a DenseStrategy or "
            "DGCStrategy, where there are several workers; elastic jobs have none. "
            "Received: no strategy"
        )
