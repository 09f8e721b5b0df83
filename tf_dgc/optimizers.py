"""Facts about a Keras optimizer, and the model it trains, that an exchange needs."""

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.compression import arena, dgc
from tf_dgc.config import AveragingConfig, DGCConfig, DownpourConfig
from tf_dgc.exchanges.base import LocalStep
from tf_dgc.transports import Transport
from tf_dgc.values import first_nonfinite, without_repetition

# What optimizers are, as far as they were asked, by the question.
_answers: dict[Callable[..., bool], weakref.WeakKeyDictionary[Any, bool]] = {}

_logger = logging.getLogger("tf_dgc")
_warned_of_rows: weakref.WeakSet[Any] = weakref.WeakSet()


def momentum_of(
    optimizer: keras.optimizers.Optimizer,
    learning_rate: Any,
    variables: Sequence[Any] = (),
) -> dgc.Momentum | None:
    """Return the step of SGD, which the exchange can take over; None of others.

    Args:
        optimizer: of the user.
        learning_rate: shape [].
        variables: whose momentum so far is taken over, too.
    """
    if not is_plain_sgd(optimizer):
        return None
    factor, nesterov = float(optimizer.momentum or 0.0), bool(optimizer.nesterov)
    slots = _host.keras.momentums_of(optimizer, variables)
    return dgc.Momentum(factor, nesterov, learning_rate, slots)


def taken_over_of(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    learning_rate: Any,
    update: Callable[[list[Any], Any], None],
) -> dgc.Momentum | LocalStep:
    """Return what an exchange may take over of an optimizer's step.

    Args:
        optimizer: of the user.
        variables: that it updates.
        learning_rate: shape [].
        update: the optimizer's own of a list of pairs (gradient, variable) at a rate.
    """
    momentum = momentum_of(optimizer, learning_rate, variables)
    if momentum is not None:
        return momentum

    def take(gradients: list[Any]) -> None:
        own = [without_repetition(gradient) for gradient in gradients]
        update(list(zip(own, variables, strict=True)), learning_rate)

    slots = [v for v in _host.keras.slots_of(optimizer) if bands.of(v) is None]
    accumulates = functools.partial(steps_by_gradients, optimizer)
    return LocalStep(learning_rate, take, slots, accumulates)


@contextlib.contextmanager
def suspended_momentum(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Trace an update of SGD without its momentum; its settings stay the user's."""
    momentum, optimizer.momentum = optimizer.momentum, 0.0
    try:
        yield
    finally:
        optimizer.momentum = momentum


@tf.autograph.experimental.do_not_convert
def check_function(function: Any) -> None:
    """Refuse a step, or an optimizer's update, that is not of Keras 3.

    Raises:
        ValueError: it is of tf_keras, or of another optimizer of TensorFlow's.
    """
    if module := _host.keras.foreign_module(function):
        raise ValueError(
            "Models and optimizers must be those of Keras 3; others would train past "
            f"the exchange. Received: what {module} defines. Use `keras` in the place "
            "of `tf_keras` and `tf.keras`, and unset TF_USE_LEGACY_KERAS."
        )


def check_model(model: keras.Model, strategy: Any) -> None:
    """Refuse a model that a strategy cannot train.

    Args:
        model: of the user.
        strategy: a BaseStrategy.

    Raises:
        ValueError: it is compiled for XLA, or was compiled outside the scope.
    """
    workers = strategy.transport.size
    if model.jit_compile is True and (workers > 1 or strategy.config is not None):
        raise ValueError(
            "`jit_compile` must not be True: XLA cannot compile the exchange, and only "
            "DenseStrategy on one worker has none. Received: jit_compile=True, "
            f"{workers} worker(s). Use `model.compile(..., jit_compile=False)`."
        )
    for optimizer in _host.keras.inner_optimizers(getattr(model, "optimizer", None)):
        if optimizer is not None and _host.keras.strategy_of(optimizer) is not strategy:
            raise ValueError(
                f"The optimizer {optimizer.name!r} was made outside the scope of this "
                "strategy and would train each worker by itself. Build and compile "
                "the model inside `with strategy.scope():`."
            )


def leave_out_whole_steps(
    optimizer: keras.optimizers.Optimizer,
    transport: Transport,
    weigh: Callable[..., contextlib.AbstractContextManager[Any]] | None = None,
) -> None:
    """Let `optimizer.apply` do nothing at all where some worker's gradient is bad.

    The exchange votes, too, but Keras decays weights before it, and constrains and
    averages them and counts the step after it.

    Args:
        optimizer: as it is being made, too. One that scales the loss is left as it is:
            it looks for overflow by itself, and the one within does not see it.
        transport: to the other workers.
        weigh: takes gradients, variables and an optimizer, and returns a context with
            gradients as they count, in which they are applied.
    """
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales or "apply" in vars(optimizer):
        return
    reference, original = weakref.ref(optimizer), type(optimizer).apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        own: Any = reference()
        if not own.built and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            with keras.name_scope(own.name, caller=own):
                own.build(trainable_variables)
        with contextlib.ExitStack() as stack:
            if weigh is not None:  # what is computed without rows counts nothing
                variables = trainable_variables or _host.keras.variables_of(own)
                weighed = weigh(list(grads), variables, own)
                grads = stack.enter_context(weighed)
            bad = first_nonfinite([g for g in grads if g is not None])
            found = [tf.cast(bad > 0, tf.int32)]
            (votes,) = transport.all_reduce(found, "whole_step")
            tf.cond(
                votes == 0,
                lambda: original(own, grads, trainable_variables),
                lambda: None,
            )

    optimizer.apply = apply


def refuse_whole_tensors(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    config: DGCConfig | AveragingConfig | DownpourConfig | None,
) -> None:
    """Refuse an optimizer that a sparse gradient would lead astray.

    Args:
        optimizer: of the user.
        variables: that it trains.
        config: of the exchange.

    Raises:
        ValueError: it factors or normalises whole tensors, and some are compressed.
    """
    if not isinstance(config, DGCConfig):
        return
    least = config.min_elements
    compressed = any(
        arena.is_compressed(v.shape.as_list(), v.dtype, least) for v in variables
    )
    if compressed and not is_elementwise(optimizer):
        raise ValueError(
            "Deep Gradient Compression needs an optimizer that works element by "
            "element, as most of a gradient is zero. Received: "
            f"optimizer {optimizer.name!r}, {type(optimizer).__name__}, of which an "
            "element's step depends on the gradients of others. Use DenseStrategy or "
            "ParameterAveragingStrategy, or an optimizer such as SGD, Adam or Lion."
        )


def refuse_parts(
    optimizer: keras.optimizers.Optimizer,
    parts: Sequence[Any],
    config: DGCConfig | AveragingConfig | DownpourConfig | None,
) -> None:
    """Refuse what looks at more of a gradient than a worker has of split layers.

    Args:
        optimizer: of the user.
        parts: variables that are parts, of which no other worker has the same.
        config: of the exchange.

    Raises:
        ValueError: the optimizer looks at whole tensors, or norms are of what each
            worker has by itself.
    """
    if not parts:
        return
    rule = "The parts of split layers are trained where they are: "
    if not is_elementwise(optimizer):
        raise ValueError(
            f"{rule}the optimizer must work element by element. Received: "
            f"{optimizer.name!r}, {type(optimizer).__name__}. Use another one, or "
            "`keras.layers.Dense`"
        )
    if not isinstance(config, DGCConfig):
        return
    names = ("clipnorm", "global_clipnorm")
    found = [f"{n}={v}" for n in names if (v := getattr(optimizer, n, None))]
    if config.clip_norm is not None:
        found.append(f"DGCConfig(clip_norm={config.clip_norm})")
    if found:
        raise ValueError(
            f"{rule}no worker has their norm under DGCStrategy, where gradients are "
            f"clipped before the exchange. Received: {', '.join(found)}. Leave it out, "
            "or use DenseStrategy or `clipvalue`"
        )


def refuse_unselected(
    optimizer: keras.optimizers.Optimizer, config: DownpourConfig, tables: Sequence[str]
) -> None:
    """Refuse what servers cannot do with the largest elements alone.

    Args:
        optimizer: of the user.
        config: of the exchange.
        tables: names of variables that live on the servers only.

    Raises:
        ValueError: with `compression` the optimizer is not SGD, or its momentum would
            have to be on the servers.
    """
    if config.compression is None:
        return
    momentum = momentum_of(optimizer, 1.0)
    if momentum is None:
        raise ValueError(
            "DownpourConfig(compression=...) needs keras.optimizers.SGD, whose steps "
            "can be accumulated. Received: "
            f"optimizer {optimizer.name!r}, {type(optimizer).__name__}. Use SGD, or "
            "compression=None"
        )
    if momentum.factor and not config.compression.momentum_correction:
        raise ValueError(
            "DownpourConfig(compression=...) has no momentum on the servers: "
            "`momentum_correction` must be True, or the optimizer without momentum. "
            f"Received: momentum_correction=False, momentum={momentum.factor:g}"
        )
    if momentum.factor and tables:
        raise ValueError(
            "With DownpourConfig(compression=..., table_bytes=...) SGD must be without "
            "momentum, which no worker could keep for a table that lives on the "
            f"servers only. Received: momentum={momentum.factor:g}, tables {tables}"
        )


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether each element's step depends on its own gradient alone.

    A copy of the optimizer is tried out on a small matrix, so that this holds for
    those of the user as well. One that cannot be copied is believed to be.
    """
    return is_plain_sgd(optimizer) or _asked(_is_elementwise, optimizer, True)


def steps_by_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether the steps of an optimizer depend on gradients alone.

    So that they can be accumulated, and applied where the weights are by then: they do
    where nothing reads the weights. What cannot be traced is believed not to.
    """
    return _asked(_steps_by_gradients, optimizer, False)


def normalizes_steps(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether steps are about as long, however large gradients are.

    Those of Adam and its kin, Lion, Adagrad, RMSprop and Muon are, not those of SGD.
    What cannot be tried out is believed not to be.
    """
    return not is_plain_sgd(optimizer) and _asked(_normalizes, optimizer, False)


def _asked(
    question: Callable[..., bool], optimizer: keras.optimizers.Optimizer, fallback: bool
) -> bool:
    """Return what a question about copies of an optimizer finds, asked once."""
    answers = _answers.setdefault(question, weakref.WeakKeyDictionary())
    if optimizer not in answers:
        found: list[bool] = []

        def ask() -> None:
            try:
                found.append(question(optimizer))
            except Exception:  # whatever an optimizer of the user's own raises
                found.append(fallback)

        # A thread has no strategy and no graph.
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        answers[optimizer] = found[0]
    return answers[optimizer]


def _is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    first, again, other = (_steps_of(optimizer, size) for size in (1.0, 1.0, 0.0))
    own = [float(weights[-1, 0, 0]) for weights in (first, again, other)]
    return own[0] != own[1] or own[0] == own[2]


def _normalizes(optimizer: keras.optimizers.Optimizer) -> bool:
    small, large = (
        np.linalg.norm(weights[-1] - weights[0])
        for weights in (_steps_of(optimizer, size, size) for size in (1.0, 100.0))
    )
    return bool(large < 10 * small)


def _steps_by_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    copy = _copy_of(optimizer)
    variable = keras.Variable(tf.ones([8, 8]), name="kernel").value
    copy.build([variable])

    @tf.function(autograph=False)
    def step(gradient: tf.Tensor) -> None:
        copy.update_step(gradient, variable, tf.constant(0.1))

    graph = step.get_concrete_function(tf.TensorSpec([8, 8])).graph
    handles = [inner for outer, inner in graph.captures if outer is variable.handle]
    users = {user.type for handle in handles for user in handle.consumers()}
    # A function within it, as of a condition, would be another user.
    return bool(users) and users <= {"AssignSubVariableOp", "AssignAddVariableOp"}


def _copy_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    config = _host.keras.config_without_rate(optimizer)
    if config.get("gradient_accumulation_steps"):
        # Of steps that are put together `iterations` is no variable.
        config["gradient_accumulation_steps"] = None
    return type(optimizer).from_config(config)


def _steps_of(
    optimizer: keras.optimizers.Optimizer, others: float, first: float = 0.5
) -> np.ndarray:
    """Try a copy of an optimizer out.

    Args:
        optimizer: of the user.
        others: by what the gradients are multiplied, but for the first.
        first: the first of them.

    Returns:
        The weights before and after two steps, shape [3, 8, 8].
    """
    copy = _copy_of(optimizer)
    begin = np.arange(1, 65, dtype=np.float32).reshape(8, 8) / 64
    variable = keras.Variable(begin, dtype="float32", name="kernel")
    copy.build([variable])
    gradient = others * np.cos(begin)
    gradient[0, 0] = first
    update, rate = _host.keras.update_step_of(copy), tf.constant(0.1)
    found = [variable.numpy()]
    for _ in range(2):
        update([tf.constant(gradient)], [variable], rate)
        copy.iterations.assign_add(1)
        found.append(variable.numpy())
    return np.stack(found)


def is_rowwise(optimizer: Any) -> bool:
    """Tell whether rows without a gradient, and what is kept of them, stay as they are.

    So that it is enough to look at those that have one.
    """
    kind = type(optimizer)
    if kind is keras.optimizers.SGD:
        return not optimizer.momentum
    return kind is keras.optimizers.Adagrad


def check_outsider(model: keras.Model, on_purpose: bool) -> str:
    """Return a warning of a model that is of no strategy, where there is one.

    Args:
        model: of the user, about to be trained, where there are several workers.
        on_purpose: whether the model may have been made outside on purpose.

    Raises:
        ValueError: it may not.
    """
    told = (
        f"The model {model.name!r} was made outside the scope of the strategy, so each "
        "worker trains it by itself"
    )
    remedy = "build and compile it inside `with strategy.scope():`"
    if threading.current_thread() is not threading.main_thread():
        remedy += ", in the same thread"
    if not on_purpose:
        raise ValueError(f"{told}: {remedy}.")
    return f"{told}. Where that is not meant, {remedy}."


def check_metrics_outside(model: keras.Model) -> None:
    """Refuse metrics of a strategy in a model of none: to read them, workers meet.

    Args:
        model: of the user, made outside the scope.

    Raises:
        ValueError: it has such metrics; names them.
    """
    names = {
        metric.name
        for metric in _host.keras.metrics_given(model)
        if any(_host.distribute.is_metric_variable(v.value) for v in metric.variables)
    }
    if names:
        raise ValueError(
            f"The model {model.name!r} was made outside the scope of the strategy, but "
            "its metrics inside it, where all workers would have to meet for them. "
            f"Received: metrics {', '.join(sorted(names))}. Make others for this model."
        )


def clipping_of(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Say how Keras clips gradients for an optimizer; empty where it does not."""
    return [
        f"{name}={getattr(optimizer, name)}"
        for name in ("clipnorm", "global_clipnorm", "clipvalue")
        if getattr(optimizer, name, None) is not None
    ]


def warnings_about(
    optimizer: keras.optimizers.Optimizer,
    workers: int,
    config: DGCConfig | AveragingConfig | DownpourConfig | None,
) -> list[str]:
    """Say which settings of an optimizer mean something else on several workers.

    Args:
        optimizer: of the user.
        workers: N.
        config: of the strategy.
    """
    found = []
    clips = clipping_of(optimizer)
    if clips and workers > 1 and isinstance(config, DGCConfig):
        found.append(
            f"{optimizer.name}: Keras clips each worker's own gradient "
            f"({', '.join(clips)}), before the exchange; DGCConfig(clip_norm=...) "
            "clips as the paper does"
        )
    corrects = isinstance(config, DGCConfig) and config.momentum_correction
    if corrects and not (is_plain_sgd(optimizer) or steps_by_gradients(optimizer)):
        found.append(
            f"{optimizer.name}: its gradients are accumulated, and not its own steps, "
            "as these do not depend on gradients alone"
        )
    return found


def lost_momentum(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    config: DGCConfig | AveragingConfig | DownpourConfig | None,
) -> list[str]:
    """Say that SGD goes on without momentum, where it has trained before.

    Args:
        optimizer: of the user, whose exchange begins.
        variables: that it trains, of static shapes.
        config: of the strategy.
    """
    if not isinstance(config, DGCConfig) or not config.momentum_correction:
        return []
    if not is_plain_sgd(optimizer) or not optimizer.momentum:
        return []
    least = config.min_elements
    compressed = [v for v in variables if arena.is_compressed(v.shape, v.dtype, least)]
    with tf.init_scope():
        steps = int(_host.keras.plain(optimizer.iterations).read_value())
        slots = _host.keras.momentums_of(optimizer, compressed)
        if not slots or not steps or any(tf.math.count_nonzero(v) for v in slots):
            return []
    return [
        f"{optimizer.name} has taken {steps} steps before, and goes on without their "
        "momentum: a velocity under compression is each worker's own, and is in no "
        "saved model. BackupState and `save_state` keep it"
    ]


def warn_of_repeated_rows(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
) -> None:
    """Warn once that rows are added up before an optimizer that is not linear.

    Args:
        optimizer: of the user.
        gradients: of all workers; rows of IndexedSlices repeat.
        variables: that they are of.
    """
    names = [
        v.path if isinstance(v, keras.Variable) else v.name
        for g, v in zip(gradients, variables, strict=True)
        if isinstance(g, tf.IndexedSlices)
    ]
    if not names or is_plain_sgd(optimizer) or optimizer in _warned_of_rows:
        return
    _warned_of_rows.add(optimizer)
    _logger.warning(
        "%s: Keras without a strategy squares the gradient of an embedding row by row, "
        "and adds up rows of the same word only then. Here they are added up first, as "
        "the optimizer's formula says, so weights differ a little from those of plain "
        "Keras: %s",
        optimizer.name,
        ", ".join(names),
    )


def is_plain_sgd(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether an update is that of SGD, which is linear in the gradient."""
    return type(optimizer).update_step is keras.optimizers.SGD.update_step
