"""Devices, numbers and values of a strategy of one replica in each process."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports.mesh import Mesh


class OneDevice(tf.compat.v1.distribute.StrategyExtended):
    """One replica on one device of this worker: answers who and where it is."""

    def __init__(self, strategy: tf.distribute.Strategy, mesh: Mesh) -> None:
        super().__init__(strategy)
        self._mesh = mesh
        self._device = _host.distribute.resolve_device(mesh.everybody.device)
        self._default_device = None
        self.experimental_enable_get_next_as_optional = False

    def _in_multi_worker_mode(self) -> bool:
        # True would lead Keras into branches that only fit TensorFlow's own strategy.
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self._mesh.everybody.rank

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._mesh.everybody.size

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The one device of this worker."""
        return (self._device,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The one device of this worker."""
        return (self._device,)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Return the one device of this worker."""
        return (self._device,)

    @property
    def experimental_between_graph(self) -> bool:
        """True: every worker builds its own graph."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """True: every worker initialises its own variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Tell whether this worker is the one that saves."""
        return self._mesh.everybody.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Tell whether this worker is the one that writes summaries."""
        return self._mesh.everybody.rank == 0

    @property
    def _global_batch_size(self) -> bool:
        return True

    # Values.

    def _update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        group: bool,
    ) -> Any:
        with tf.device(self._device), _host.distribute.update_context():
            result = fn(
                *_host.distribute.local_component(args),
                **_host.distribute.local_component(kwargs),
            )
        return result if group else tf.nest.map_structure(self._local_results, result)

    def read_var(self, v: Any) -> tf.Tensor:
        """Return a variable's value."""
        return tf.identity(v)

    def value_container(self, value: Any) -> Any:
        """Return the distributed value that `value` is a part of, or itself."""
        return _host.distribute.value_container(value)

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return _host.distribute.components_of(value) or (value,)

    def _input_context(self) -> tf.distribute.InputContext:
        size = self._mesh.everybody.size
        return tf.distribute.InputContext(size, self._mesh.everybody.rank, size)

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        context = tf.distribute.experimental.ValueContext(
            self._mesh.everybody.rank, self._mesh.everybody.size
        )
        return value_fn(context)

    def _broadcast_to(self, tensor: tf.Tensor, destinations: Any) -> tf.Tensor:
        return tensor
