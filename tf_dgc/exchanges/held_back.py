"""Residuals of compressed tensors, of workers and of owners: saved, loaded, flushed.

Axis: P arena elements.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import tensorflow as tf

from tf_dgc.compression import arena
from tf_dgc.exchanges import applied, formats
from tf_dgc.exchanges.base import Apply, Update
from tf_dgc.exchanges.modes import Mode, OwnSteps
from tf_dgc.exchanges.residual import OWNED, Residual
from tf_dgc.transports.base import Transport
from tf_dgc.transports.sums import SparseSum


class HeldBack:
    """Residuals of one exchange: of this worker, and of what it owns."""

    def __init__(self, residual: Residual, mode: Mode, sums: Sequence[SparseSum]):
        """Take where they are.

        Args:
            residual: of this worker.
            mode: what is accumulated there.
            sums: of all stages, which may keep something back themselves.
        """
        self._residual, self._mode, self._sums = residual, mode, sums
        self._owned = [each.owned for each in sums if each.owned is not None]

    @property
    def scales(self) -> list[Callable[[tf.Tensor], None]]:
        """Functions that multiply what owners keep back; see `Owned.scale`."""
        return [owned.scale for owned in self._owned]

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """The residual, the velocity, and what optimizers keep of own steps."""
        found = dict(self._residual.state)
        if isinstance(self._mode, OwnSteps):
            found |= self._mode.steps.state
        return found

    @property
    def owed(self) -> Mapping[str, tf.Tensor]:
        """The residual of the owners, as arenas."""
        return {OWNED: self._owned[0].whole()} if self._owned else {}

    def kept(self) -> list[tf.Tensor]:
        """Return all of them."""
        return [self._residual.v, *(owned.read() for owned in self._owned)]

    def take(self, owned: tf.Tensor) -> None:
        """Take over, eagerly, the residual of owners: shape [P], or [] where alike."""
        left = tf.broadcast_to(owned, self._residual.v.shape)
        for each in self._owned:
            left = each.keep(left)
        self._residual.v.assign_add(left)

    def agree_on_slots(self, everybody: Transport) -> None:
        """Make what the optimizer keeps alike, where a step of all comes next."""
        if isinstance(self._mode, OwnSteps):
            step, config = self._residual.step.read_value(), self._residual.config
            number = formats.number_at(step, self._sums, config)
            if not any(self._sums[int(number or 0)].slots):
                self._mode.steps.agree(everybody)

    def flush(
        self, variables: Sequence[Any], apply: Apply, transport: Transport, name: str
    ) -> None:
        """Apply, eagerly, what all workers keep back of variables; clear it.

        Args:
            variables: of which.
            apply: takes an update, and the variables it is of.
            transport: to the others.
            name: of the collective.
        """
        residual, mode = self._residual, self._mode
        wanted = residual.arenas.owned_among(variables)
        if not any(wanted):
            return
        kept = residual.read()
        for owned in self.owed.values():
            kept += owned
        (summed,) = transport.all_reduce([kept], name)
        gradients = list(compress(arena.unflatten(residual.layout, summed), wanted))
        found = list(compress(residual.arenas.tensors, wanted))
        if mode.takes_small:
            applied.subtract_all(found, gradients)
            gradients = [None] * len(found)
        apply(Update(gradients, [mode.is_step] * len(found)), found)
        sent = arena.mask(residual.layout, wanted)
        residual.clear(sent)
        for each in self._owned:
            whole = each.whole()
            each.keep(tf.where(sent, tf.zeros_like(whole), whole))
