"""Devices and numbers of a strategy of one replica in each process."""

from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports import Transport


class OneDevice(tf.compat.v1.distribute.StrategyExtended):
    """One replica on one device of this worker: answers who and where it is."""

    def __init__(self, strategy: tf.distribute.Strategy, transport: Transport) -> None:
        super().__init__(strategy)
        self._transport = transport
        self._device = _host.distribute.resolve_device(transport.device)
        self._default_device = None
        self.experimental_enable_get_next_as_optional = False

    def _in_multi_worker_mode(self) -> bool:
        # True would lead Keras into branches that only fit TensorFlow's own strategy.
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self._transport.rank

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._transport.size

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
        return self._transport.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Tell whether this worker is the one that writes summaries."""
        return self._transport.rank == 0

    @property
    def _global_batch_size(self) -> bool:
        return True
