"""Private names of tf.distribute. TFD is tensorflow/python/distribute."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc._host import iterators, probe

with probe.imports():
    from tensorflow.python.distribute import (
        device_util,
        distribute_lib,
        distribute_utils,
        input_lib,
        values,
    )

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
    """Return the private names, with the object or class that must have each."""
    on_read = getattr(values, "SyncOnReadVariable", None)
    return [
        (device_util, "get_host_for_device"),
        (device_util, "resolve"),
        (distribute_lib, "UpdateContext"),
        (distribute_utils, "VARIABLE_CLASS_MAPPING"),
        (distribute_utils, "VARIABLE_POLICY_MAPPING"),
        (distribute_utils, "create_mirrored_variable"),
        (distribute_utils, "select_replica"),
        (distribute_utils, "value_container"),
        (input_lib, "DistributedDataset"),
        (input_lib, "InputWorkers"),
        (input_lib, "_create_distributed_tensor_spec"),
        (values, "DistributedValues"),
        (values, "SyncOnReadVariable"),
        (on_read, "_aggregation"),
        (getattr(values, "DistributedValues", None), "_values"),
        *((tf.compat.v1.distribute.StrategyExtended, name) for name in _HOOKS),
    ]


probe.check(wanted())


def replica_rank() -> int:
    """Return the rank in whose replica this is run or traced; 0 outside of replicas."""
    replica = tf.distribute.get_replica_context()
    return getattr(getattr(replica, "strategy", None), "rank", 0)


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
        dict.fromkeys(distribute_utils.VARIABLE_CLASS_MAPPING, _OnRead),
        distribute_utils.VARIABLE_POLICY_MAPPING,
        **kwargs,
    )


class _OnRead(values.SyncOnReadVariable):
    """A variable that each worker updates; TFD/values.py: SyncOnReadVariable.

    Where the first replica's value is to be that of all, every worker has rank 0's.
    """

    def _get_cross_replica(self) -> Any:
        if self._aggregation != tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return super()._get_cross_replica()
        return self._distribute_strategy.extended.reductions.of_first(self)

    def value(self) -> Any:
        """Return the value, of all workers outside of their steps."""
        first = self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        outside = tf.distribute.in_cross_replica_context()
        return self._get_cross_replica() if first and outside else super().value()


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


def is_distributed(data: Any) -> bool:
    """Tell whether a dataset is shared out already, by its public class."""
    return isinstance(data, tf.distribute.DistributedDataset)


def distributed_dataset(
    strategy: tf.distribute.Strategy,
    dataset: tf.data.Dataset,
    device: str,
    meeting: iterators.Meeting | None = None,
    marks: iterators.Marks | None = None,
    pieces: int | None = 1,
) -> Any:
    """Wrap this worker's share of the data so that Keras does not split it again.

    TFD/input_lib.py: DistributedDataset, with a ready component.

    Args:
        strategy: of the worker.
        dataset: its share.
        device: where it computes.
        meeting: where the workers agree on the end of the data, if they do.
        marks: what keeps the marks, where the share is of pairs of element and mark.
        pieces: steps in which a batch of what was handed over is used up; None where
            that is not known.
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
    wrapped.share, wrapped.meeting, wrapped.marks = dataset, meeting, marks
    wrapped.pieces = pieces
    return wrapped


class _Share(input_lib.DistributedDataset):
    """One worker's share, with tf.data's plain iterator.

    That of DistributedDataset, MultiDeviceIterator, crashes the process now and then
    when it is deleted while it fetches (TensorFlow 2.21: its thread goes on in
    DatasetBaseIterator::GetNext), as Keras does after every evaluation.
    """

    share: tf.data.Dataset
    meeting: iterators.Meeting | None
    marks: iterators.Marks | None
    pieces: int | None

    @property
    def element_spec(self) -> Any:
        """Of elements without marks."""
        spec = super().element_spec
        return spec if self.marks is None else spec[0]

    def __iter__(self) -> Any:
        if self.marks is not None:
            return iterators.MarkedIterator(self.marks, self.share)
        if self.meeting is None:
            return iter(self.share)
        return iterators.LevelIterator(self.meeting, self.share)


def count_steps(
    original: Callable[..., None], epoch: Any, *args: Any, **kwargs: Any
) -> None:
    """Let an epoch have as many steps as its data: pieces of batches are one each.

    KB/tensorflow/trainer.py: TFEpochIterator._distributed_dataset, and _num_batches,
    which is that of what was handed over.
    """
    original(epoch, *args, **kwargs)
    own = vars(epoch)
    pieces = getattr(own["_distributed_dataset"], "pieces", 1)
    known = None not in (own["_num_batches"], pieces)
    own["_num_batches"] = own["_num_batches"] * pieces if known else None


def components_of(value: Any) -> tuple[Any, ...] | None:
    """Return the components of a distributed value; None of anything else.

    TFD/values.py: DistributedValues._values.
    """
    is_distributed = isinstance(value, tf.distribute.DistributedValues)
    return tuple(value._values) if is_distributed else None
