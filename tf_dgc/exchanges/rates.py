"""The learning rate of an optimizer whose steps several workers push.

One process has one rate. Callbacks of several workers look at logs of different rows,
and a worker that takes another's place has forgotten what its callbacks had decided. So
the chief's rate counts: it stands on server 0, where the others fetch it with the
parameters. A schedule needs none of this: it follows the number of all pushes.
"""

import logging
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers

_logger = logging.getLogger("tf_dgc")


class Rate:
    """The rate of one optimizer, as a worker has it and as the chief has told it."""

    def __init__(self, name: str, servers: Servers, members: Members, own: Any) -> None:
        """Make the variable.

        Args:
            name: prefix of its name.
            servers: of the job.
            members: its workers.
            own: the optimizer's variable; None where it follows a schedule.
        """
        self._members, self._own = members, own
        self._shared = servers.variable(f"{name}.rate", tf.float32)

    def begin(self) -> None:
        """Give its first value; the chief does."""
        if self._own is not None:
            self._shared.assign(tf.cast(self._own.read_value(), tf.float32))

    def join(self) -> None:
        """Take over, eagerly, what there is."""
        if self._own is None or self._members.succession.counts:
            return
        own, told = float(self._own), float(self._shared.read_value())
        if own != told and self._members.is_first:
            _logger.warning(
                "The learning rate of worker %d is %g, that of worker 0, the chief, "
                "%g: the chief's counts for all",
                self._members.index,
                own,
                told,
            )
        self._take()

    def tell(self) -> list[Any]:
        """Let the others know of the chief's; return what comes after that."""
        if self._own is None or not self._members.is_chief:
            return []
        self._shared.assign(tf.cast(self._own.read_value(), tf.float32))
        with tf.device(self._shared.device):
            return [self._shared.read_value()]

    def take(self) -> None:
        """Let this worker's be the chief's."""
        if self._own is not None and not self._members.is_chief:
            self._take()

    def now(self, own: tf.Tensor) -> tf.Tensor:
        """Return the chief's, and let this worker's be that, before a common step.

        Args:
            own: that of this worker's step, shape [].
        """
        if self._own is None:
            return own
        return tf.cast(self._take(), own.dtype)

    def _take(self) -> tf.Tensor:
        with tf.device(self._shared.device):
            told = self._shared.read_value()
        with tf.device("CPU:0"):
            told = tf.identity(told)
            assign = _host.shared.bypassed(self._own, "assign")
            assign(tf.cast(told, self._own.dtype), read_value=False)
        return told
