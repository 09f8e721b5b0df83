"""Steps of an optimizer along a worker's own gradients, taken to be accumulated.

Axes: P arena elements, W of N workers in this process: one, but in a simulation.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.compression import arena
from tf_dgc.compression.arena import Layout
from tf_dgc.exchanges.base import LocalStep
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports.base import Transport
from tf_dgc.transports.sums import Workers
from tf_dgc.values import widened


class LocalSteps:
    """Takes steps, and takes the large variables back; it is workers who agree on them.

    Attributes:
        slots: what the optimizer keeps of its variables, this worker's own; where this
            process is W workers, that of rank 0.
    """

    def __init__(
        self,
        layout: Layout,
        variables: Sequence[tf.Variable],
        large: Sequence[int],
        step: LocalStep,
        workers: Workers,
        earlier: Sequence["LocalSteps"] = (),
    ) -> None:
        """Create what several workers in one process need, outside of any graph.

        Args:
            layout: of the arena of the large variables.
            variables: of the optimizer.
            large: the indices of those in the arena.
            step: the first one.
            workers: which the process is.
            earlier: of the same optimizer, with slots in common.
        """
        self._layout, self._workers = layout, workers
        self._large = [variables[i] for i in large]
        self._places = list(large)
        # Those of rank 0 are of small variables, whose gradients are those of all.
        self.slots: Sequence[tf.Variable] = [v for v in step.slots if v.shape.rank]
        self._small = [v for i, v in enumerate(variables) if i not in large]
        self._small += [v for v in step.slots if not v.shape.rank]
        known = {
            id(slot): stack
            for other in earlier
            for slot, stack in zip(other.slots, other._stacks, strict=False)
        }
        self._stacks: list[tf.Variable] = []
        with tf.init_scope():
            for slot in self.slots if workers.axis else ():
                if (stack := known.get(id(slot))) is None:
                    stacked = tf.stack([slot.read_value()] * len(workers.ranks))
                    stack = own_variable(stacked, "dgc_slot")
                self._stacks.append(stack)

    @property
    def state(self) -> dict[str, tf.Variable]:
        """State that each worker has of its own, by name."""
        return {f"own {i}": v for i, v in enumerate(self._own)}

    @property
    def _own(self) -> Sequence[tf.Variable]:
        return self._stacks if self._workers.axis else self.slots

    def along_own(
        self, step: LocalStep, gradient: tf.Tensor, small: list[Any]
    ) -> tf.Tensor:
        """Return steps of the large variables; the small ones are changed.

        Args:
            step: of the optimizer.
            gradient: of each worker, the mean over its rows, shape [P], or [W, P].
            small: gradients of the small ones, the same on all workers.

        Returns:
            w - w', of the same shape as `gradient`, where a step leads from w to w'.
        """
        if not self._workers.axis:
            return self._taken(step, gradient, small)

        def take(own: tf.Tensor, slots: list[tf.Tensor]) -> tuple[Any, ...]:
            _assign(self.slots, slots)
            before = _values(self._small)
            taken = self._taken(step, own, small)
            found = taken, _values(self.slots), _values(self._small)
            _assign(self._small, before)
            return found

        steps, slots, others = self._workers.each(take, gradient, _values(self._stacks))
        _assign(self._stacks, slots)
        _assign(self.slots, [slot[0] for slot in slots])
        _assign(self._small, [other[0] for other in others])
        return steps

    def along(self, step: LocalStep, gradient: tf.Tensor, small: list[Any]) -> None:
        """Step along gradients that are the same on all workers, shape [P]."""
        step.take(self._together(gradient, small))
        ranks = self._workers.ranks
        stacked = [tf.stack([v] * len(ranks)) for v in _values(self.slots)]
        _assign(self._stacks, stacked if self._stacks else [])

    def agree(self, transport: Transport) -> None:
        """Take the mean of slots that differ, eagerly: steps are of all again."""
        own = _values(self._own)
        if self._are_alike(own, transport):
            return
        own = [v / transport.size for v in own]
        found = transport.all_reduce(own, "local_steps.slots")
        _assign(self.slots, found)
        stacked = [tf.stack([v] * len(self._workers.ranks)) for v in found]
        _assign(self._stacks, stacked if self._stacks else [])

    def _are_alike(self, slots: Sequence[tf.Tensor], transport: Transport) -> bool:
        arrays = [np.asarray(slot) for slot in slots]
        if self._workers.axis:
            return all((array == array[:1]).all() for array in arrays)
        crc = zlib.crc32(b"".join(array.tobytes() for array in arrays))
        found = transport.all_gather(tf.constant(crc, tf.int64), "local_steps.alike")
        return bool(tf.reduce_all(found == found[0]))

    def _taken(
        self, step: LocalStep, gradient: tf.Tensor, small: list[Any]
    ) -> tf.Tensor:
        before = _values(self._large)
        # From there steps are rounded least; they do not depend on the weights.
        _assign(self._large, [tf.zeros_like(value) for value in before])
        step.take(self._together(gradient, small))
        after = _values(self._large)
        _assign(self._large, before)
        return arena.flatten(self._layout, [-widened(value) for value in after])

    def _together(self, gradient: tf.Tensor, small: list[Any]) -> list[Any]:
        """Return the gradients of all variables, in their order."""
        parts = zip(self._large, arena.unflatten(self._layout, gradient), strict=True)
        large, rest = [tf.cast(part, v.dtype) for v, part in parts], iter(small)
        count = len(large) + len(small)
        found = {i: part for i, part in zip(self._places, large, strict=True)}
        return [found[i] if i in found else next(rest) for i in range(count)]


def _values(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.read_value() for variable in variables]


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value, read_value=False)
