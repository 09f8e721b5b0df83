"""Private names of Keras's optimizers, models, data adapters and callbacks.

KB is keras/src/backend.
"""

import collections
import contextlib
import functools
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._host import distribute, probe

with probe.imports():
    from keras.src.backend.common import global_state, masking
    from keras.src.models import functional
    from keras.src.random import seed_generator
    from keras.src.saving import saving_lib
    from keras.src.trainers.data_adapters import (
        array_data_adapter,
        generator_data_adapter,
        py_dataset_adapter,
    )
    from keras.src.utils import io_utils
    from tensorflow.python.ops import resource_variable_ops


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    arrays = getattr(array_data_adapter, "ArrayDataAdapter", None)
    generator = getattr(generator_data_adapter, "GeneratorDataAdapter", None)
    py_dataset = getattr(py_dataset_adapter, "PyDatasetAdapter", None)
    variable = getattr(resource_variable_ops, "BaseResourceVariable", None)
    graph = getattr(functional, "Functional", None)
    return [
        (array_data_adapter, "ArrayDataAdapter"),
        (arrays, "_shuffle"),
        (generator_data_adapter, "GeneratorDataAdapter"),
        (generator, "_first_batches"),
        (py_dataset_adapter, "PyDatasetAdapter"),
        (py_dataset, "_standardize_batch"),
        (global_state, "get_global_attribute"),
        (io_utils, "print_msg"),
        (seed_generator, "global_seed_generator"),
        (saving_lib, "H5IOStore"),
        (saving_lib, "_save_state"),
        (resource_variable_ops, "BaseResourceVariable"),
        (variable, "_distribute_strategy"),
        (keras.name_scope, "caller"),
        (keras.Layer, "_layers"),
        (keras.Layer, "_allow_non_tensor_positional_args"),
        (keras.Model, "_compile_loss"),
        (keras.Model, "_compile_metrics"),
        (keras.Model, "_flatten_layers"),
        (keras.Model, "_get_metrics_result_or_logs"),
        (keras.Model, "_initial_epoch"),
        (functional, "Functional"),
        (graph, "_nodes_by_depth"),
        (masking, "get_keras_mask"),
        (masking, "set_keras_mask"),
        (keras.callbacks.ModelCheckpoint, "_batches_seen_since_last_saving"),
        (keras.callbacks.ModelCheckpoint, "_last_batch_seen"),
        (keras.callbacks.SwapEMAWeights, "_ema_weights_in_model"),
        (keras.callbacks.TensorBoard, "_writers"),
        # Where it is, metrics are summed over workers when they are read, and `fit`
        # hands bound methods to `Strategy.run`.
        (keras.Variable, "synchronization"),
        # What `horovod/normalization.py` replaces: keras/src/layers/normalization.
        (keras.layers.BatchNormalization, "_moments"),
        (keras.optimizers.Optimizer, "_backend_update_step"),
        (keras.optimizers.Optimizer, "_distributed_tf_update_step"),
        (keras.optimizers.Optimizer, "_distribution_strategy"),
        (keras.optimizers.Optimizer, "_accumulated_gradients"),
        (keras.optimizers.Optimizer, "_iterations"),
        (keras.optimizers.Optimizer, "_learning_rate"),
        (keras.optimizers.Optimizer, "_model_variables_moving_average"),
        (keras.optimizers.Optimizer, "_overwrite_model_variables_with_average_value"),
        (keras.optimizers.Optimizer, "_trainable_variables"),
        (keras.optimizers.Optimizer, "_update_model_variables_moving_average"),
        (keras.Variable, "_initialize"),
        (keras.Variable, "_value"),
    ]


probe.check(wanted())


def say(text: str, line_break: bool = True) -> None:
    """Print a text where Keras prints its progress bar.

    keras/src/utils/io_utils.py: print_msg.
    """
    io_utils.print_msg(text, line_break=line_break)


def calling_optimizer() -> keras.optimizers.Optimizer | None:
    """Return the optimizer in whose name scope this is called, if any.

    KB/common/name_scope.py: the stack under "name_scope_stack"; its entries' `caller`.
    An optimizer's all_reduce looks like anyone's else.
    """
    stack = global_state.get_global_attribute("name_scope_stack")
    caller = stack[-1].caller if stack else None
    return caller if isinstance(caller, keras.optimizers.Optimizer) else None


def foreign_module(function: Any) -> str:
    """Name the module of a step or update that is not of this Keras; "" of others.

    tf_keras, TensorFlow's copy of Keras 2 (tensorflow/python/keras) and its optimizers
    of V1 know nothing of `keras.optimizers.Optimizer`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "python_function", function)
    owner = getattr(function, "__self__", None)
    classes = () if owner is None else type(owner).__mro__
    for each in (*classes, function):
        module = getattr(each, "__module__", None) or ""
        if module.startswith(("tf_keras.", "tensorflow.python.keras.")):
            return module
        if each is tf.compat.v1.train.Optimizer:
            return module
    return ""


def model_of(step: Any) -> keras.Model | None:
    """Return the model of which this is a method, maybe one made a tf.function."""
    for function in (step, getattr(step, "python_function", None), _method_in(step)):
        owner = getattr(function, "__self__", None)
        # tensorflow/.../polymorphic_function/function_type_utils.py: a weak reference.
        owner = getattr(owner, "weakrefself_target__", lambda owner=owner: owner)()
        if isinstance(owner, keras.Model):
            return owner
    return None


def function_of(step: Any) -> Any:
    """Return the function of a method, maybe one made a tf.function."""
    step = _method_in(step) or getattr(step, "python_function", step)
    return getattr(step, "__func__", step)


def step_named(model: keras.Model, method: Any) -> str:
    """Return the name by which a model has a method, whatever a decorator calls it."""
    function = function_of(method)
    for name in ("train_step", "test_step", "predict_step"):
        if function_of(getattr(model, name, None)) is function:
            return name
    return str(getattr(function, "__name__", ""))


def is_in_fit() -> bool:
    """Tell whether Keras's trainer runs this, in KB/tensorflow/trainer.py."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "keras.src.backend.tensorflow.trainer":
            return True
        frame = frame.f_back
    return False


def is_of_keras(step: Any) -> bool:
    """Tell whether a method of a model is Keras's own, and not its user's."""
    return str(getattr(function_of(step), "__module__", "")).startswith("keras.")


def _method_in(step: Any) -> Any:
    """Return the method in a tf.function that decorates it in a class, or None.

    tensorflow/.../polymorphic_function.py: class_method_to_instance_method.
    """
    return getattr(getattr(step, "python_function", None), "__wrapped__", None)


def has_no_call(model: keras.Model) -> bool:
    """Tell whether a model is trained by its own `train_step` alone."""
    return type(model).call is keras.Model.call


def has_step_of_keras(model: keras.Model) -> bool:
    """Tell whether Keras itself computes a model's training loss and applies it."""
    own = type(model)
    return (
        own.train_step is keras.Model.train_step
        and own.compute_loss is keras.Model.compute_loss
    )


def has_steps_of_keras(model: keras.Model) -> bool:
    """Tell whether Keras itself trains and evaluates a model."""
    evaluates = type(model).test_step is keras.Model.test_step
    return evaluates and has_step_of_keras(model)


def take_any_inputs(layer: keras.Layer) -> None:
    """Let a layer be called with what is no tensor.

    keras/src/layers/layer.py: Layer._allow_non_tensor_positional_args.
    """
    layer._allow_non_tensor_positional_args = True


@contextlib.contextmanager
def built_without_targets(model: keras.Model) -> Iterator[None]:
    """Let Keras build a model, not what it was compiled with, which needs targets.

    keras/src/trainers/trainer.py: Trainer._compile_loss and _compile_metrics, which are
    built in the first step else.
    """
    names = ("_compile_loss", "_compile_metrics")
    kept = {name: vars(model)[name] for name in names if name in vars(model)}
    vars(model).update(dict.fromkeys(kept))
    try:
        yield
    finally:
        vars(model).update(kept)


def layers_within(model: keras.Model) -> list[keras.Layer]:
    """Return a model, its layers and theirs, each before what it holds.

    keras/src/layers/layer.py: Layer._flatten_layers.
    """
    return list(model._flatten_layers(include_self=True, recursive=True))


def epoch_logs(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs that an epoch has which ends with a step; on all workers.

    keras/src/trainers/trainer.py: Trainer._get_metrics_result_or_logs.

    Args:
        model: of the user.
        logs: of the step, as `on_train_batch_end` has them.
    """
    return dict(model._get_metrics_result_or_logs(logs))


def links_of(model: keras.Model) -> list[tuple[Any, Any]]:
    """Return which operation of a model hands its output to which; to None, outside.

    An operation that is called more often, or has several outputs, is there more often.
    keras/src/ops/function.py: Function._nodes_by_depth.

    Returns:
        Nothing of a model that is no graph of layers, or has a `call` of its own.
    """
    graph = model
    if isinstance(model, keras.Sequential):
        graph = getattr(model, "_functional", None)
        plain = type(model).call is keras.Sequential.call
    else:
        plain = type(model).call is functional.Functional.call
    if not plain or not isinstance(graph, functional.Functional):
        return []
    nodes = [node for each in graph._nodes_by_depth.values() for node in each]
    givers = {id(t): node.operation for node in nodes for t in node.outputs}
    found = [(givers[id(t)], n.operation) for n in nodes for t in n.input_tensors]
    return found + [(givers[id(tensor)], None) for tensor in graph.outputs]


def copy_mask(source: Any, target: Any) -> None:
    """Give to a tensor the mask that Keras has noted for another one.

    KB/common/masking.py.
    """
    mask = masking.get_keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(target, mask)


def is_function_of_user(metric: keras.Metric) -> bool:
    """Tell whether a metric is the mean of a function that is not of Keras.

    keras/src/metrics/reduction_metrics.py: MeanMetricWrapper._fn.
    """
    function = getattr(metric, "_fn", None)
    module = getattr(function, "__module__", None) or "keras"
    return module.partition(".")[0] != "keras"


def strategy_of(thing: Any) -> tf.distribute.Strategy | None:
    """Return the strategy of an optimizer, a variable, a model or an epoch.

    KB/tensorflow/optimizer.py: TFOptimizer._distribution_strategy, and
    tensorflow/python/ops/resource_variable_ops.py: _distribute_strategy.
    """
    for name in ("_distribution_strategy", "_distribute_strategy"):
        if hasattr(thing, name):
            return getattr(thing, name)
    return None


def inner_optimizers(optimizer: Any) -> Sequence[Any]:
    """Return the optimizer and those it wraps, as LossScaleOptimizer does."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer] if inner is None else [optimizer, *inner_optimizers(inner)]


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return the optimizers of a model, each once, in the same order on every worker.

    Those it was compiled with or has as attributes, in containers, in layers and models
    within it, or in other optimizers, as LossScaleOptimizer and MultiOptimizer.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = collections.deque([getattr(model, "optimizer", None), model])
    while waiting:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, keras.optimizers.Optimizer):
            found[id(each)] = each
            waiting.append(getattr(each, "inner_optimizer", None))
            waiting.extend(getattr(each, "optimizers", []))
        elif isinstance(each, keras.Layer):
            waiting.extend(vars(each).values())
        elif isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple)):
            waiting.extend(each)
    return list(found.values())


def update_variables(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    pairs: Sequence[tuple[Any, Any]],
    learning_rate: Any,
) -> None:
    """Run an optimizer's update of (gradient, variable) pairs, and no more of a step.

    KB/tensorflow/optimizer.py: TFOptimizer._distributed_tf_update_step, inside the name
    scope that marks the optimizer as the caller.
    """
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer._distributed_tf_update_step(strategy, pairs, learning_rate)


def variables_of(optimizer: keras.optimizers.Optimizer) -> Sequence[Any]:
    """Return what an optimizer was built for.

    keras/src/optimizers/base_optimizer.py: BaseOptimizer._trainable_variables.
    """
    return optimizer._trainable_variables


def update_step_of(optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
    """Return what updates variables by gradients at a learning rate.

    KB/tensorflow/optimizer.py: TFOptimizer._backend_update_step.
    """
    return optimizer._backend_update_step


def set_update_step(
    optimizer: keras.optimizers.Optimizer, update_step: Callable[..., None]
) -> None:
    """Put something in the place of `update_step_of`, of this one optimizer."""
    optimizer._backend_update_step = update_step


def config_without_rate(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return an optimizer's settings but for its rate, which may be no such setting.

    A schedule of the user's own, or a function, may have no saved form.
    keras/src/optimizers/base_optimizer.py: BaseOptimizer._learning_rate.
    """
    held = vars(optimizer)
    rate = held.get("_learning_rate")
    held["_learning_rate"] = 0.0
    try:
        return optimizer.get_config()
    finally:
        held["_learning_rate"] = rate


def averages_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the averages of weights that an optimizer keeps with `use_ema`.

    keras/src/optimizers/base_optimizer.py:
    BaseOptimizer._model_variables_moving_average.
    """
    return [v.value for v in getattr(optimizer, "_model_variables_moving_average", [])]


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return what else an optimizer keeps, of floating point; not the learning rate.

    keras/src/optimizers/base_optimizer.py: BaseOptimizer._learning_rate.
    """
    others = [
        *getattr(optimizer, "_model_variables_moving_average", []),
        getattr(optimizer, "_learning_rate", None),
    ]
    known = {id(other) for other in others}
    found = [v.value for v in optimizer.variables if id(v) not in known]
    return [v for v in found if v.dtype.is_floating]


def momentums_of(
    optimizer: keras.optimizers.SGD, variables: Sequence[Any]
) -> Sequence[Any]:
    """Return what SGD keeps of each variable; nothing where it keeps nothing.

    keras/src/optimizers/sgd.py: SGD.momentums, in the order of _trainable_variables.
    """
    slots = [
        getattr(slot, "value", None) for slot in getattr(optimizer, "momentums", [])
    ]
    kept = {
        id(form): slot
        for own, slot in zip(variables_of(optimizer), slots, strict=False)
        for form in (own, own.value)
    }
    found = tuple(kept.get(id(variable)) for variable in variables)
    return () if any(slot is None for slot in found) else found


def added_up_by(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the sums of a worker's own gradients that an optimizer has not applied.

    keras/src/optimizers/base_optimizer.py: BaseOptimizer._accumulated_gradients.
    """
    return list(getattr(optimizer, "_accumulated_gradients", []))


def movable_slots_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return what an optimizer keeps of its training, wherever that is.

    Not its counter of steps, its learning rate, and the gradients that a worker adds up
    by itself. keras/src/optimizers/base_optimizer.py: BaseOptimizer._iterations and
    _learning_rate.
    """
    own = [
        optimizer._iterations,
        getattr(optimizer, "_learning_rate", None),
        *added_up_by(optimizer),
    ]
    known = {id(each) for each in own}
    return [v for v in optimizer.variables if id(v) not in known]


def mover_of(variable: keras.Variable) -> Callable[[Any], None]:
    """Return what lets another variable of TensorFlow stand for a variable of Keras.

    KB/tensorflow/core.py: Variable._value.
    """

    def move(value: Any) -> None:
        variable._value = value

    return move


def make_again(variable: keras.Variable, value: Any) -> None:
    """Let a variable of Keras make another one of TensorFlow, with another value.

    KB/tensorflow/core.py: Variable._initialize.
    """
    variable._initialize(value)


def plain(variable: Any) -> Any:
    """Return TensorFlow's variable of one of Keras, without reading it.

    KB/tensorflow/core.py: Variable._value.
    """
    return getattr(variable, "_value", variable)


def step_counter_of(optimizer: keras.optimizers.Optimizer) -> tuple[tf.Variable, int]:
    """Return what counts an optimizer's steps, and by how much one push counts.

    keras/src/optimizers/base_optimizer.py: BaseOptimizer._iterations, which is not the
    public `iterations` where gradients are accumulated.
    """
    return optimizer._iterations.value, optimizer.gradient_accumulation_steps or 1


def update_average(
    optimizer: keras.optimizers.Optimizer, index: int, variable: Any
) -> None:
    """Let an optimizer's average of a variable follow it, as Keras does.

    keras/src/optimizers/base_optimizer.py:
    BaseOptimizer._update_model_variables_moving_average.
    """
    # Its value knows of pieces; what Keras has around it does not.
    average = optimizer._model_variables_moving_average[index].value
    later = tf.cast(tf.not_equal(optimizer.iterations, 0), variable.dtype)
    momentum = later * optimizer.ema_momentum
    average.assign(momentum * average + (1 - momentum) * variable)


def take_averages(
    optimizer: keras.optimizers.Optimizer, elsewhere: Callable[[], bool]
) -> None:
    """Leave an optimizer's averages of variables alone where something else has them.

    Args:
        optimizer: of the user.
        elsewhere: tells whether, when a step asks for them.
    """
    for name in (
        "_update_model_variables_moving_average",
        "_overwrite_model_variables_with_average_value",
    ):
        original = getattr(type(optimizer), name)

        def method(variables: Any, original: Any = original) -> None:
            if not elsewhere():
                original(optimizer, variables)

        setattr(optimizer, name, method)


def follows_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tell whether a learning rate goes by an optimizer's iterations.

    keras/src/optimizers/base_optimizer.py: BaseOptimizer._learning_rate.
    """
    kind = keras.optimizers.schedules.LearningRateSchedule
    return isinstance(getattr(optimizer, "_learning_rate", None), kind)


def rate_of(optimizer: keras.optimizers.Optimizer) -> Any | None:
    """Return the variable of an optimizer's rate; None where it is computed.

    keras/src/optimizers/base_optimizer.py: BaseOptimizer._learning_rate.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    return rate.value if isinstance(rate, keras.Variable) else None


def global_seed_state() -> Any:
    """Return the state of the generator that Keras uses where a layer names none.

    keras/src/random/seed_generator.py: global_seed_generator.
    """
    return seed_generator.global_seed_generator().state


def initial_epoch(model: keras.Model) -> int | None:
    """Return what `set_initial_epoch` or BackupAndRestore has set."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Let `fit`, which has begun, start at an epoch; as BackupAndRestore does.

    keras/src/trainers/trainer.py: Trainer._initial_epoch.
    """
    model._initial_epoch = epoch


def weights_file(model: keras.Model) -> bytes:
    """Return what `model.save_weights` writes to a file, made in memory.

    HDF5 does not survive a full disk: it raises what tells nothing of it, or crashes
    later. keras/src/saving/saving_lib.py: H5IOStore, _save_state, as in
    save_weights_only.
    """
    octets = io.BytesIO()
    store = saving_lib.H5IOStore(octets, mode="w")
    saving_lib._save_state(
        model,
        weights_store=store,
        assets_store=None,
        inner_path="",
        visited_saveables=set(),
    )
    store.close()
    return octets.getvalue()


# By class of callbacks.
_REMEMBERED = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch"),
    "ModelCheckpoint": (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
}


def remembered_by(callback: Any) -> list[str]:
    """Return the attributes in which a callback remembers what it has seen.

    Numbers, or None. keras/src/callbacks: model_checkpoint.py
    ModelCheckpoint._batches_seen_since_last_saving and _last_batch_seen,
    swap_ema_weights.py SwapEMAWeights._ema_weights_in_model.
    """
    return [
        name
        for kind, names in _REMEMBERED.items()
        if isinstance(callback, getattr(keras.callbacks, kind))
        for name in names
        if hasattr(callback, name)
    ]


def silence_tensorboard(callback: keras.callbacks.TensorBoard) -> None:
    """Let what asks a callback for its writers write nothing.

    keras/src/callbacks/tensorboard.py: TensorBoard._writers.
    """
    noop = tf.summary.create_noop_writer()
    callback._writers = {"train": noop, "val": noop}


_SEEDS = "seed_generator_state"  # the name of what random generators keep


def changed_by_steps(model: keras.Model) -> list[Any]:
    """Return what a step may change beside what is trained, of this worker.

    Variables of metrics, of layers, and those of TensorFlow that are attributes;
    without the states of random generators, and statistics of the rows of all workers.
    """
    shared = {
        id(variable): plain(variable)
        for layer in layers_within(model)
        if getattr(layer, "synchronized", False) is True
        for variable in layer.non_trainable_variables
    }
    found = [v for v in model.non_trainable_variables if v.name != _SEEDS]
    found = [v for v in found if id(v) not in shared]
    values = [*map(component_of, found), *metric_variables(model)]
    known = {id(value) for value in values}
    known |= {id(plain(v)) for v in model.trainable_variables}
    known |= {id(value) for value in shared.values()}
    plain_ones = _held(model, tf.Variable, keras.Layer)
    return values + [v for v in plain_ones if id(v) not in known]


def random_states(model: keras.Model) -> list[Any]:
    """Return what a model's random generators keep, and Keras's own where it has one.

    keras/src/random/seed_generator.py: global_seed_generator.
    """
    own = [plain(v) for v in model.non_trainable_variables if v.name == _SEEDS]
    generator = global_state.get_global_attribute("global_seed_generator")
    return own if generator is None else [*own, plain(generator.state)]


def metrics_within(model: keras.Model) -> list[keras.Metric]:
    """Return a model's metrics, and those within them, as in what `compile` is given.

    keras/src/metrics/metric.py: Metric._metrics; CompileMetrics has `metrics`.
    """
    found: list[keras.Metric] = []
    waiting = list(model.metrics)
    while waiting:
        metric = waiting.pop(0)
        found.append(metric)
        within = getattr(metric, "metrics", None) or getattr(metric, "_metrics", [])
        waiting.extend(each for each in within if each not in found)
    return found


def metrics_given(model: keras.Model) -> list[keras.Metric]:
    """Return a model's metrics, and those `compile` was given, maybe not built yet.

    keras/src/trainers/compile_utils.py: CompileMetrics.
    """
    compiled = getattr(model, "_compile_metrics", None)
    names = ("_user_metrics", "_user_weighted_metrics")
    given = keras.tree.flatten([getattr(compiled, name, None) for name in names])
    return metrics_within(model) + [m for m in given if isinstance(m, keras.Metric)]


def metric_variables(model: keras.Model) -> list[Any]:
    """Return the variables of a model's metrics, of this worker."""
    return [component_of(v) for v in model.metrics_variables if v.name != _SEEDS]


def component_of(variable: Any) -> Any:
    """Return what this worker has of a variable, as one of TensorFlow, or a tensor."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return (distribute.components_of(value) or (value,))[0]


def _held(owner: Any, wanted: type, through: type) -> list[Any]:
    """Return the attributes of a kind, in containers and objects of another, too."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = collections.deque([owner])
    while waiting:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, wanted):
            found[id(each)] = each
        elif isinstance(each, through):
            waiting.extend(vars(each).values())
        elif isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple)):
            waiting.extend(each)
    return list(found.values())


def variables_of_users(model: keras.Model) -> list[keras.Variable]:
    """Return the weights that are not trained, but for those of Keras's own layers."""
    own = [
        id(v)
        for layer in layers_within(model)
        if type(layer).__module__.startswith("keras.") and not layer._layers
        for v in layer.variables
    ]
    found = [v for v in model.non_trainable_variables if v.name != _SEEDS]
    return [v for v in found if id(v) not in own]


def kept_by_users(model: keras.Model) -> list[Any]:
    """Return variables of TensorFlow that only a user's own code writes to in a step.

    The learning rates of optimizers, too.
    """
    known = {id(component_of(v)) for v in model.non_trainable_variables}
    known |= {id(v) for v in metric_variables(model)}
    others = [v for v in changed_by_steps(model) if id(v) not in known]
    rates = [getattr(each, "_learning_rate", None) for each in optimizers_of(model)]
    rates = [each for each in rates if isinstance(each, keras.Variable)]
    return [*map(component_of, [*variables_of_users(model), *rates]), *others]


def shuffles(adapter: Any) -> bool:
    """Tell whether Keras shuffles these arrays. ArrayDataAdapter._shuffle."""
    return bool(adapter._shuffle)


def distributed_dataset_of(epoch_iterator: Any) -> Any:
    """Return what an iterator of epochs reads; None where there is no such thing.

    KB/tensorflow/trainer.py: TFEpochIterator._distributed_dataset.
    """
    return getattr(epoch_iterator, "_distributed_dataset", None)


def keeps_first_batches(epoch_iterator: Any) -> bool:
    """Tell whether Keras has read batches of Python code, and gives them once more.

    keras/src/trainers/data_adapters: GeneratorDataAdapter._first_batches.
    """
    adapter = epoch_iterator.data_adapter
    return isinstance(adapter, generator_data_adapter.GeneratorDataAdapter)


def first_batches_of(epoch_iterator: Any) -> tf.data.Dataset | None:
    """Return the first batches of Python code, which may give each only once.

    keras/src/trainers/data_adapters: GeneratorDataAdapter._first_batches and
    PyDatasetAdapter._standardize_batch.

    Returns:
        A dataset; None where there is no Python code to ask.
    """
    adapter = epoch_iterator.data_adapter
    generator = generator_data_adapter.GeneratorDataAdapter
    if isinstance(adapter, generator):
        batches = adapter._first_batches
    elif isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        batches = [adapter._standardize_batch(adapter.py_dataset[0])]
    else:
        return None
    return generator(iter(batches)).get_tf_dataset()
