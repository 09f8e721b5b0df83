"""Measure what a worker takes on this machine, with the real strategies.

Axes: P arena elements.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.compression.arena import Layout
from tf_dgc.config import AveragingConfig, DGCConfig
from tf_dgc.lab.splitting import split_of
from tf_dgc.prediction.calibration import Messages
from tf_dgc.prediction.costs import Measured, Tensors, tensors_of
from tf_dgc.strategies import (
    BaseStrategy,
    DenseStrategy,
    DGCStrategy,
    ParameterAveragingStrategy,
)
from tf_dgc.transports.base import default_device

_MESSAGES = 8  # over which reading and adding is measured
_WARMUP = 2  # steps that are not timed


class ModelError(ValueError):
    """A model that cannot be measured; the message says why."""


def synthetic_batch(model: keras.Model, rows: int) -> tuple[Any, Any]:
    """Return random inputs and targets of the shapes of a model's inputs and outputs.

    Integer inputs are 0. Targets are classes where a loss is a sparse cross-entropy.

    Raises:
        ModelError: the model has no known shapes.
    """
    found = getattr(model, "inputs", None)
    if not model.built or not found:
        raise ModelError(
            "The model must be built, Functional or Sequential with a keras.Input. "
            f"Received: {model.name!r}, built={model.built}"
        )
    inputs = getattr(model, "input", found[0])  # Sequential models have a list only
    outputs = getattr(model, "output", model.outputs[0])
    for tensor in tf.nest.flatten(inputs):
        if None in tensor.shape[1:]:
            raise ModelError(
                "Inputs must have known shapes but for the batch. "
                f"Received: {tensor.name!r} of shape {tensor.shape}"
            )
    losses = model.loss
    if not isinstance(losses, dict | list | tuple):
        losses = tf.nest.map_structure(lambda _: model.loss, outputs)

    def values(tensor: Any) -> tf.Tensor:
        shape, dtype = [rows, *tensor.shape[1:]], tf.as_dtype(tensor.dtype)
        if dtype.is_floating:
            return tf.cast(tf.random.normal(shape), dtype)
        return tf.zeros(shape, dtype)

    def targets(tensor: Any, loss: Any) -> tf.Tensor:
        name = loss if isinstance(loss, str) else getattr(loss, "name", None)
        if "sparse" in str(name or getattr(loss, "__name__", "")):
            shape = [rows, *tensor.shape[1:-1]]
            return tf.random.uniform(shape, 0, tensor.shape[-1], tf.int32)
        return tf.random.uniform([rows, *tensor.shape[1:]])

    return (
        tf.nest.map_structure(values, inputs),
        tf.nest.map_structure(targets, outputs, losses),
    )


def _go_on() -> None:
    """Meet nobody."""


class _Clock(keras.callbacks.Callback):
    """Notes when steps end."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self.ends: list[float] = []
        self._meet = meet

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Wait for others."""
        self._meet()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Wait for the step's results, and note the time."""
        tf.nest.map_structure(float, logs)
        self.ends.append(time.perf_counter())


def _median(ends: Sequence[float]) -> float:
    """Return the median time between two of them."""
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def measure_step(
    make: Callable[[], keras.Model],
    strategy: BaseStrategy,
    rows: int,
    steps: int,
    meet: Callable[[], None] = _go_on,
) -> tuple[float, keras.Model]:
    """Train a model for some steps.

    Args:
        make: returns a model; called in the strategy's scope.
        strategy: of one worker.
        rows: of a batch.
        steps: number of timed ones.
        meet: called before each of them.

    Returns:
        The seconds of the median step, and the model.

    Raises:
        ModelError: `make` returns no model, or one that is not built.
    """
    with strategy.scope():
        model = make()
        if not isinstance(model, keras.Model):
            raise ModelError(
                f"The function must return a keras.Model. Received: {model!r}"
            )
        if not model.compiled:
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.jit_compile = False  # as on several workers
    model.steps_per_execution = 1
    batch, clock = synthetic_batch(model, rows), _Clock(meet)
    data = tf.data.Dataset.from_tensors(batch).repeat(_WARMUP + steps)
    model.fit(data, verbose=0, shuffle=False, callbacks=[clock])
    return _median(clock.ends[_WARMUP - 1 :]), model


def measure_message(
    layout: Layout, config: DGCConfig, repeats: int, meet: Callable[[], None] = _go_on
) -> float:
    """Measure the seconds that it takes to read one message more, and to add it."""
    if not layout.size or config.sparsity == 0:
        return 0.0
    own = Messages(layout, config, default_device())
    messages = tf.stack([own.write(i) for i in range(_MESSAGES + 1)])

    def median(messages: tf.Tensor) -> float:
        ends = []
        for _ in range(_WARMUP + repeats):
            meet()
            own.read(messages).numpy()
            ends.append(time.perf_counter())
        return _median(ends[_WARMUP - 1 :])

    more = median(messages) - median(messages[:1])
    return max(0.0, more) / _MESSAGES


def measure(
    make: Callable[[], keras.Model],
    config: DGCConfig,
    rows: int,
    steps: int,
    meet: Callable[[], None] = _go_on,
) -> tuple[Measured, Tensors]:
    """Measure a model with each strategy, on one worker.

    Args:
        make: returns a new model, built.
        config: of DGC.
        rows: of a worker's batch.
        steps: number of steps to time.
        meet: called before each of them: where workers that share this machine are
            measured at once, what keeps them in step, as training does.

    Raises:
        ModelError: as `measure_step` does.
    """
    dense_stage = dataclasses.replace(config, sparsity=0.0)
    every_step = AveragingConfig(period=1)
    step, model = measure_step(
        make, DenseStrategy(transport="local"), rows, steps, meet
    )
    compressed, uncompressed, with_round = (
        measure_step(make, strategy, rows, steps, meet)[0]
        for strategy in (
            DGCStrategy(config, transport="local"),
            DGCStrategy(dense_stage, transport="local"),
            ParameterAveragingStrategy(every_step, transport="local"),
        )
    )
    weights = [v.value for v in model.non_trainable_weights]
    moving = [v for v in weights if v.dtype.is_floating and not v.trainable]
    moving += _host.keras.averages_of(model.optimizer)
    tensors = tensors_of(model.trainable_variables, config, moving)
    tensors = tensors._replace(split=split_of(model, rows))
    message = measure_message(tensors.layout, config, steps, meet)
    held = max(0.0, with_round - step)
    return Measured(step, compressed, uncompressed, message, held), tensors
