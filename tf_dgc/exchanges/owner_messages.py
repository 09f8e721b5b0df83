"""Messages of sums by owners: written, read, and checked.

Axes: N workers, W of them in this process; P arena elements, R elements of a region, K1
and K2 message slots. See `owner_sum.py`.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import arena, dgc, message, regions
from tf_dgc.transports import gathering, sums
from tf_dgc.transports.sums import Sparse, Wire

_HEADER, _POSITIONS = map(message.FAULTS.index, ("its header", "their positions"))


class Forms(NamedTuple):
    """The static forms of the messages of a stage."""

    parts: message.Format  # from a worker to an owner
    sums: message.Format  # from an owner to everybody
    sent: int  # elements that a worker sends at most

    @property
    def slots(self) -> int:
        """Number of elements that are passed on at most."""
        return self.sums.slots


class OwnerMessages:
    """Messages of workers to owners, and of owners to all."""

    def __init__(self, wire: Wire) -> None:
        """Take the workers, and the settings."""
        self._wire = wire

    def parts(
        self,
        form: Forms,
        chosen: dgc.Selection,
        magnitudes: tf.Tensor,
        step: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Write a message to each owner.

        Args:
            form: of the stage.
            chosen: what this worker has selected.
            magnitudes: of its elements, by which the largest go where room is short.
            step: shape [], int64.

        Returns:
            The messages, shape [N, words], as float32; and the positions and values of
            what is in them, in slots.
        """
        layout, workers = self._wire.layout, self._wire.transport.size
        positions, count = chosen.positions, tf.size(chosen.positions, tf.int64)
        slots = form.parts.slots
        picked = regions.split_by_owner(positions, magnitudes, workers, slots)
        one_more = tf.concat([positions, tf.zeros([1], tf.int64)], axis=0)
        counts = tf.reduce_sum(tf.cast(picked < count, tf.float32), axis=1)
        messages = message.pack_rows(
            form.parts,
            regions.to_region(tf.gather(one_more, picked), workers),
            tf.gather(tf.pad(chosen.values, [[0, 1]]), picked),
            tf.cast(counts, tf.int32),
            chosen.exponent,
            chosen.scales,
            arena.checksum(layout),
            step,
        )
        went = regions.chosen_by(picked, count)
        sent = dgc.decoded(chosen, layout, self._wire.config.value_dtype)
        filled = in_slots(form.sent, positions, sent, went, layout.size)
        return tf.bitcast(messages, tf.float32), *filled

    def received(
        self, form: Forms, messages: tf.Tensor, step: tf.Tensor
    ) -> tuple[Sparse, tf.Tensor]:
        """Read the messages to owners, shape [*axis, N, words].

        Returns:
            What they hold, [*axis, N, K1], those that are damaged nothing; and a
            verdict of each owner: 0, or which rank's message is damaged, and how;
            shape [*axis], int64.
        """
        wire, workers = self._wire, self._wire.transport.size
        bits, restore = gathering.unmoved(messages)
        rows = restore(tf.reshape(bits, [-1, form.parts.words]))
        owner = np.repeat(wire.workers.ranks, workers)[:, np.newaxis].astype(np.int64)
        place = functools.partial(
            regions.to_arena, owner=owner, workers=workers, elements=wire.layout.size
        )
        found, faults = sums.read(form.parts, rows, place)
        header, shape = found.header, [*wire.workers.axis, workers]
        strange = header.checksum != arena.checksum(wire.layout)
        strange |= header.step != tf.cast(step % 2**31, tf.int32)
        faults = self._with_padding(faults, place(found.positions))
        faults = tf.where((faults == 0) & strange, np.int64(_HEADER), faults)
        unused = tf.constant(form.parts.size, tf.int64)
        positions = tf.where(faults[:, tf.newaxis] > 0, unused, found.positions)
        faults = tf.reshape(faults, shape)
        rank = values.first_true(faults > 0, axis=-1)
        fault = tf.gather(faults, rank, batch_dims=len(shape) - 1)
        verdict = tf.where(fault > 0, rank * len(message.FAULTS) + fault, 0)
        parts = (tf.reshape(x, [*shape, -1]) for x in (positions, found.values))
        return Sparse(*parts), verdict

    def _with_padding(self, faults: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Add to faults those of positions that a region has, and the arena has not."""
        beyond = tf.reduce_any(places > self._wire.layout.size, axis=1)
        wrong = np.int64(_POSITIONS)
        return tf.where((faults == 0) & beyond, wrong, faults)

    def passed_on(self, form: Forms, gathered: tf.Tensor) -> message.Contents:
        """Read the messages of owners, shape [N, words + 1].

        Raises:
            tf.errors.InvalidArgumentError: one is damaged, or one that an owner
                received, or they are not of this step; on all workers alike.
        """
        workers, size = self._wire.transport.size, self._wire.layout.size
        bits, restore = gathering.unmoved(gathered)
        verdict = tf.cast(restore(bits[:, -1]), tf.int64)
        owner = np.arange(workers)[:, np.newaxis]
        place = functools.partial(
            regions.to_arena, owner=owner, workers=workers, elements=size
        )
        found, faults = sums.read(form.sums, restore(bits[:, :-1]), place)
        faults = self._with_padding(faults, place(found.positions))
        known = (verdict >= 0) & (verdict < workers * len(message.FAULTS))
        faults = tf.where((faults == 0) & ~known, np.int64(_HEADER), faults)
        with tf.control_dependencies([sums.require_sound(faults, found.header)]):
            verdict = tf.identity(verdict)

        def damaged() -> list[Any]:
            to = values.first_true(verdict > 0)
            rank, fault = (
                f(verdict[to], len(message.FAULTS))
                for f in (tf.math.floordiv, tf.math.mod)
            )
            rank, to = tf.strings.as_string(rank), tf.strings.as_string(to)
            what = tf.gather(tf.constant(message.FAULTS), fault)
            parts = "The message of rank ", rank, " to rank ", to, " is damaged: ", what
            return [tf.strings.join(parts)]

        sound = values.require(tf.reduce_all(verdict == 0), damaged)
        with tf.control_dependencies([sound]):
            return tf.nest.map_structure(tf.identity, found)


def in_slots(
    slots: int, positions: tf.Tensor, sent: tf.Tensor, which: tf.Tensor, unused: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return elements, and what was sent of them, in so many slots."""
    where = values.filled_up(tf.gather(positions, which), slots, unused)
    return where, values.filled_up(tf.gather(sent, which), slots)
