"""Every private name of TensorFlow and Keras that this package touches.

Each function says where the name lives, since when it has been as it is used here, and
why no public name does. TFD is tensorflow/python/distribute, KB is
keras/src/backend. Seen in TensorFlow 2.18 to 2.21 and Keras 3.5 to 3.15.
"""

from collections.abc import Callable, Sequence
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
except ImportError as error:
    raise ImportError(
        _HINT.format(name=error.name, tf=tf.__version__, keras=keras.__version__)
    ) from error


def probe() -> None:
    """Check that every private name is where it is expected.

    Raises:
        ImportError: one has moved; names it and the installed versions.
    """
    wanted: list[tuple[Any, str]] = [
        (context.context(), "_initialized"),
        (context.context(), "abort_collective_ops"),
        (context.context(), "configure_coordination_service"),
        (context.context(), "get_config_key_value"),
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
        (keras.optimizers.Optimizer, "_distributed_tf_update_step"),
        (keras.optimizers.Optimizer, "_backend_update_step"),
    ]
    for owner, name in wanted:
        if not hasattr(owner, name):
            place = getattr(owner, "__name__", type(owner).__name__)
            raise ImportError(
                _HINT.format(
                    name=f"{place}.{name}", tf=tf.__version__, keras=keras.__version__
                )
            )


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
    if not hasattr(model, "_initial_epoch"):
        name = "Model._initial_epoch"
        versions = {"tf": tf.__version__, "keras": keras.__version__}
        raise ImportError(_HINT.format(name=name, **versions))
    model._initial_epoch = epoch
