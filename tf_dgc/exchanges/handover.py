"""State of a local optimizer, from a worker that trains to one that begins late.

Who begins late counts steps from where the others are, as schedules do. An optimizer
that corrects for how few steps its averages are of, as Adam does, takes empty ones for
settled then, and steps several times too far. So it asks; who takes the outer step of
the next round for all leaves what its own optimizer keeps on the servers.

Axis: K variables of the optimizer, its slots.
"""

import logging
import time
from collections.abc import Sequence

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.exchanges.server_traffic import Totals, size
from tf_dgc.servers.attendance import Attendance
from tf_dgc.servers.members import Members
from tf_dgc.servers.shared import Servers

_logger = logging.getLogger("tf_dgc")

_POLL_SECONDS = 0.1


class Handover:
    """Slots of one optimizer, on the servers when somebody has asked for them."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        members: Members,
        totals: Totals,
        slots: Sequence[tf.Variable],
    ) -> None:
        """Make the variables, without values.

        Args:
            name: prefix of their names.
            servers: of the job.
            members: its workers.
            totals: of this worker's traffic.
            slots: K, its own.
        """
        self._members, self._totals, self._slots = members, totals, list(slots)
        count = len(servers.devices)
        self._shared = [
            servers.variable(
                f"{name}.slot.{i}", slot.dtype, slot.shape.as_list(), i % count
            )
            for i, slot in enumerate(self._slots)
        ]
        # Each is a number of questions: asked; whose answer was begun; and is there.
        self._asked, self._begun, self._given = (
            servers.variable(f"{name}.slots_{word}", tf.int64)
            for word in ("asked", "begun", "given")
        )
        self._device = servers.devices[0]

    def begin(self) -> None:
        """Give first values: nobody has asked."""
        for variable in (self._asked, self._begun, self._given):
            variable.assign(tf.zeros([], tf.int64))

    def answer(self) -> None:
        """Leave this worker's slots on the servers, if one has asked for them."""
        with tf.device(self._device):
            asked, given = self._asked.read_value(), self._given.read_value()
        with tf.device("CPU:0"):
            asked, given = tf.identity(asked), tf.identity(given)
        _host.shared.seldom(asked > given, lambda: self._give(asked))

    def _give(self, number: tf.Tensor) -> None:
        with tf.device(self._device):
            self._begun.assign(number)
            begun = [self._begun.read_value()]
        there = []
        for slot, shared in zip(self._slots, self._shared, strict=True):
            value = slot.read_value()
            with tf.control_dependencies(begun), tf.device(shared.device):
                shared.assign(value)
                there.append(tf.size(shared.read_value()))
        with tf.control_dependencies(there), tf.device(self._device):
            self._given.assign(number)
        self._totals.add(sent=size(self._slots))

    def take(self, step: int, attendance: Attendance, timeout: float) -> None:
        """Take over, eagerly, the slots of one that trains, after its next round.

        Args:
            step: from which on this worker counts.
            attendance: of those that train.
            timeout: seconds to wait.
        """
        if not self._slots:
            return
        number = int(_host.shared.take_number(self._asked)) + 1
        end = time.monotonic() + timeout
        while int(self._given.read_value()) < number or not self._copied():
            if time.monotonic() > end or not attendance.others_inside().any():
                _logger.warning(
                    "Worker %d begins at step %d of the others, with an optimizer that "
                    "knows nothing of these: no round was held from which it could "
                    "take over what theirs keep",
                    self._members.index,
                    step,
                )
                return
            self._members.meetings.moves.wait()
            time.sleep(_POLL_SECONDS)

    def _copied(self) -> bool:
        """Copy what is there, unless somebody changes it meanwhile; tell which."""
        before = int(self._given.read_value())
        values = [shared.read_value() for shared in self._shared]
        self._totals.add(received=size(self._slots))
        if int(self._begun.read_value()) != before:
            return False
        for slot, value in zip(self._slots, values, strict=True):
            slot.assign(value)
        return True
