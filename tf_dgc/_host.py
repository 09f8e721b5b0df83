"""Every private name of TensorFlow and Keras that this package touches.

Each function says where the name lives, since when it has been as it is used here, and
why no public name does. TFD is tensorflow/python/distribute, KB is
keras/src/backend. Seen in TensorFlow 2.18 to 2.21 and Keras 3.10 to 3.15.
"""

import contextlib
import dis
import inspect
import signal
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

_HINT = (
    "tf_dgc needs {name}, which this version does not have: TensorFlow {tf}, Keras "
    "{keras}. Install versions that its setup.cfg allows, or report this."
)

try:
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator
    from tensorflow.python.distribute import (
        device_util,
        distribute_lib,
        distribute_utils,
        input_lib,
        values,
    )
    from tensorflow.python.eager import context
    from tensorflow.python.ops import resource_variable_ops
except ImportError as error:
    raise ImportError(
        _HINT.format(name=error.name, tf=tf.__version__, keras=keras.__version__)
    ) from error


# Hooks of StrategyExtended that `extended.py` fills in, or calls.
_HOOKS = (
    "_batch_reduce_to",
    "_broadcast_to",
    "_call_for_each_replica",
    "_container_strategy",
    "_create_variable",
    "_default_device",
    "_distribute_datasets_from_function",
    "_experimental_distribute_dataset",
    "_experimental_distribute_values_from_function",
    "_gather_to_implementation",
    "_in_multi_worker_mode",
    "_local_results",
    "_num_replicas_in_sync",
    "_reduce_to",
    "_update",
    "_update_non_slot",
    "_validate_colocate_with_variable",
)


def wanted() -> list[tuple[Any, str]]:
    """Return every private name, with the object or class that must have it."""
    return [
        (context.context(), "_initialized"),
        (context.context(), "abort_collective_ops"),
        (context.context(), "configure_coordination_service"),
        (context.context(), "get_config_key_value"),
        (context.context(), "report_error_to_cluster"),
        (context.context(), "set_config_key_value"),
        (context, "coordination_config_pb2"),
        (context, "global_seed"),
        (device_util, "resolve"),
        (device_util, "get_host_for_device"),
        (distribute_lib, "UpdateContext"),
        (distribute_utils, "create_mirrored_variable"),
        (distribute_utils, "VARIABLE_CLASS_MAPPING"),
        (distribute_utils, "VARIABLE_POLICY_MAPPING"),
        (distribute_utils, "select_replica"),
        (distribute_utils, "value_container"),
        (global_state, "get_global_attribute"),
        (seed_generator, "global_seed_generator"),
        (input_lib, "DistributedDataset"),
        (input_lib, "InputWorkers"),
        (input_lib, "_create_distributed_tensor_spec"),
        (values, "SyncOnReadVariable"),
        (values, "DistributedValues"),
        (getattr(values, "DistributedValues", None), "_values"),
        (tf.__internal__, "FuncGraph"),
        *((tf.compat.v1.distribute.StrategyExtended, name) for name in _HOOKS),
        (resource_variable_ops, "BaseResourceVariable"),
        (
            getattr(resource_variable_ops, "BaseResourceVariable", None),
            "_distribute_strategy",
        ),
        (keras.name_scope, "caller"),
        (keras.Model, "_initial_epoch"),
        # Where it is, metrics are summed over workers when they are read, and `fit`
        # hands bound methods to `Strategy.run`.
        (keras.Variable, "synchronization"),
        (keras.optimizers.Optimizer, "_backend_update_step"),
        (keras.optimizers.Optimizer, "_distributed_tf_update_step"),
        (keras.optimizers.Optimizer, "_distribution_strategy"),
        (keras.optimizers.Optimizer, "_learning_rate"),
        (keras.optimizers.Optimizer, "_model_variables_moving_average"),
        (keras.optimizers.Optimizer, "_trainable_variables"),
    ]


def probe() -> None:
    """Check that every private name is where it is expected.

    Raises:
        ImportError: one has moved; names it and the installed versions.
    """
    for owner, name in wanted():
        if not hasattr(owner, name) and not setters_of(owner, name):
            place = getattr(owner, "__name__", type(owner).__name__)
            raise ImportError(
                _HINT.format(
                    name=f"{place}.{name}", tf=tf.__version__, keras=keras.__version__
                )
            )


def setters_of(owner: Any, name: str) -> list[tuple[type, str]]:
    """Return the methods of a class that set an attribute of its instances.

    To make an instance may start TensorFlow, which must not start before a strategy.
    """
    return [
        (each, method)
        for each in (owner.__mro__ if inspect.isclass(owner) else ())
        for method, function in vars(each).items()
        if inspect.isfunction(function)
        and _sets(inspect.unwrap(function).__code__, name)
    ]


def _sets(code: types.CodeType, name: str) -> bool:
    return name in code.co_names and any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for instruction in dis.get_instructions(code)
    )


probe()


def tensorflow_has_started() -> bool:
    """Tell whether this process has run an operation.

    tensorflow/python/eager/context.py: Context._initialized. The public functions
    that refuse a late call change what they set.
    """
    return bool(context.context()._initialized)


def configure_coordination(workers: int, timeout: float) -> None:
    """Bound the time that TensorFlow's coordination service waits for workers.

    tensorflow/python/eager/context.py: Context.configure_coordination_service.
    MultiWorkerMirroredStrategy leaves alone what is already configured, and by itself
    waits for an hour.
    """
    job = context.coordination_config_pb2.CoordinatedJob(
        name="worker", num_tasks=workers
    )
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(timeout * 1000),
        coordinated_jobs=[job],
    )


@contextlib.contextmanager
def kept_sigterm() -> Iterator[None]:
    """Leave alone what SIGTERM does, while TensorFlow's collectives are set up.

    tsl/distributed_runtime/preemption/preemption_notifier.cc catches the signal, to
    tell those who save before they are preempted. There are none here, and a process
    would never end by it. Outside of the main thread nothing can be done.
    """
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def report_failure(message: str) -> None:
    """Make the collectives of all workers fail with a message.

    tensorflow/python/eager/context.py: Context.report_error_to_cluster.

    Raises:
        tf.errors.OpError: TensorFlow's coordination service is gone.
    """
    code = tf.errors.AbortedError(None, None, message).error_code
    context.context().report_error_to_cluster(code, message)


def publish(key: str) -> None:
    """Set a key in TensorFlow's coordination service, for all workers to see.

    tensorflow/python/eager/context.py: Context.set_config_key_value.
    """
    context.context().set_config_key_value(key, "1")


def wait_for_key(key: str, timeout: float) -> None:
    """Wait until some worker has published a key.

    tensorflow/python/eager/context.py: Context.get_config_key_value.

    Raises:
        tf.errors.OpError: nobody has within `timeout` seconds, or the service is gone.
    """
    context.context().get_config_key_value(key, max(1, int(timeout * 1000)))


def global_seed() -> int | None:
    """Return what `tf.random.set_seed` was given, if it was called.

    tensorflow/python/eager/context.py: global_seed. Nothing public tells.
    """
    return context.global_seed()


def abort_collectives(message: str) -> None:
    """Make the collective that this process waits in, and all later ones, fail.

    tensorflow/python/eager/context.py: Context.abort_collective_ops, which
    MultiWorkerMirroredStrategy's own health check calls. Safe from any thread.
    """
    context.context().abort_collective_ops(
        tf.errors.DeadlineExceededError(None, None, message).error_code, message
    )


def resolve_device(device: str) -> str:
    """Complete a device name. TFD/device_util.py: resolve."""
    return device_util.resolve(device)


def host_of_device(device: str) -> str:
    """Name the CPU beside a device. TFD/device_util.py: get_host_for_device."""
    return device_util.get_host_for_device(device)


def create_on_read_variable(
    strategy: tf.distribute.Strategy, create: Callable[..., list[Any]], **kwargs: Any
) -> Any:
    """Make a variable that each worker updates and a read sums over the workers.

    TFD/distribute_utils.py: create_mirrored_variable. Keras metrics ask for it.
    """
    return distribute_utils.create_mirrored_variable(
        strategy,
        create,
        distribute_utils.VARIABLE_CLASS_MAPPING,
        distribute_utils.VARIABLE_POLICY_MAPPING,
        **kwargs,
    )


def is_metric_variable(value: Any) -> bool:
    """Tell whether a read of this sums over the workers. TFD/values.py."""
    return isinstance(value, values.SyncOnReadVariable)


def local_component(structure: Any) -> Any:
    """Unwrap distributed values. TFD/distribute_utils.py: select_replica."""
    return distribute_utils.select_replica(0, structure)


def value_container(value: Any) -> Any:
    """Find a component's container. TFD/distribute_utils.py: value_container."""
    return distribute_utils.value_container(value)


def update_context() -> Any:
    """Mark that a variable is being updated. TFD/distribute_lib.py: UpdateContext."""
    return distribute_lib.UpdateContext(0)


def distributed_dataset(
    strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, device: str
) -> Any:
    """Wrap this worker's share of the data so that Keras does not split it again.

    TFD/input_lib.py: DistributedDataset, with a ready component.
    """
    wrapped = _Share(
        input_lib.InputWorkers([(host_of_device(device), (device,))]),
        strategy,
        components=[dataset],
        element_spec=input_lib._create_distributed_tensor_spec(
            strategy, dataset.element_spec
        ),
        enable_get_next_as_optional=False,
    )
    wrapped.share = dataset
    return wrapped


class _Share(input_lib.DistributedDataset):
    """One worker's share, with tf.data's plain iterator.

    That of DistributedDataset, MultiDeviceIterator, crashes the process now and then
    when it is deleted while it fetches (TensorFlow 2.21: its thread goes on in
    DatasetBaseIterator::GetNext), as Keras does after every evaluation.
    """

    share: tf.data.Dataset

    def __iter__(self) -> Any:
        return iter(self.share)


def calling_optimizer() -> keras.optimizers.Optimizer | None:
    """Return the optimizer in whose name scope this is called, if any.

    KB/common/name_scope.py: the stack under "name_scope_stack"; its entries' `caller`.
    An optimizer's all_reduce looks like anyone's else.
    """
    stack = global_state.get_global_attribute("name_scope_stack")
    caller = stack[-1].caller if stack else None
    return caller if isinstance(caller, keras.optimizers.Optimizer) else None


def strategy_of(thing: Any) -> tf.distribute.Strategy | None:
    """Return the strategy in whose scope an optimizer or variable was made.

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
    """Return the optimizers that a model was compiled with, or has as attributes."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    outer = [each for each in found if isinstance(each, keras.optimizers.Optimizer)]
    return [each for optimizer in outer for each in inner_optimizers(optimizer)]


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


def global_seed_state() -> Any:
    """Return the state of the generator that Keras uses where a layer names none.

    keras/src/random/seed_generator.py: global_seed_generator.
    """
    return seed_generator.global_seed_generator().state


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Let `fit`, which has begun, start at an epoch; as BackupAndRestore does.

    keras/src/trainers/trainer.py: Trainer._initial_epoch.
    """
    model._initial_epoch = epoch


def components_of(value: Any) -> tuple[Any, ...] | None:
    """Return the components of a distributed value; None of anything else.

    TFD/values.py: DistributedValues._values.
    """
    is_distributed = isinstance(value, tf.distribute.DistributedValues)
    return tuple(value._values) if is_distributed else None


def outermost_function_graph() -> Any:
    """Return the graph of the function that is traced, not of a branch within it.

    tensorflow/python/framework/func_graph.py: FuncGraph, which tf.__internal__ exports.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    while type(graph) is not tf.__internal__.FuncGraph:
        graph = graph.outer_graph
    return graph
