"""Holders of workers' places: whose word counts of what stands there.

Who has died leaves marks at its place. Another process may have the place by now, live,
and still be starting: what stands there is not its own, and nobody is to wait for it.

Axis: W workers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.servers.members import Members


class Holders:
    """Processes that have told what there is of each worker, by their numbers."""

    def __init__(self, make: Callable[[str], Any], members: Members):
        """Make the variable.

        Args:
            make: takes the name of a variable of shape [W] on server 0.
            members: of the job.
        """
        self._members, self._joined = members, make("joined")

    def begin(self) -> None:
        """Give first values: nobody has told anything."""
        self._joined.assign(tf.zeros(self._joined.shape, tf.int64))

    def join(self) -> None:
        """Tell that what there is of this worker is of this process."""
        self._members.put(self._joined, self._members.place.own)

    def living(self) -> tf.Tensor:
        """Tell whose word counts: shape [W], bool, on server 0."""
        living, ids = self._members.living(), self._members.place.ids
        with tf.device(living.device):
            return living & (self._joined.read_value() == ids.read_value())

    def others(self) -> np.ndarray:
        """Tell which other workers count, eagerly: shape [W], bool."""
        living: np.ndarray = self.living().numpy()
        return living & (np.arange(self._members.workers) != self._members.index)
