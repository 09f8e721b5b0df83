"""Sums of selections by owners: what a worker receives does not grow with N.

Each worker selects as ever, and sends to the owner of each region of the arena what is
there. The owner adds it up and passes the largest sums on to all; what it does not pass
on, it adds to the next sum. With v and z of each worker, applied + sum of v + sum of z
is what was accumulated.

    1  S_k   what worker k selects; of each owner's part the K1 largest
    2        all-to-all: N messages of K1 slots;  v[sent] -= sent,  u[sent] = 0
    3        r = z + sum of what all sent, by rank;  G = the K2 largest of r
             z = r - sent[G]
    4        all-gather: a message of K2 slots;  weights[G] -= sent[G] on all

Axes: N workers, W of them in this process: one, but in a simulation; P arena elements,
R elements of a region, K1 and K2 message slots.

References:
    Li, Hoefler: Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
    2022, https://arxiv.org/abs/2201.07598 (there what is not passed on is not sent)
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import arena, dgc, message, regions, selection, warmup
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.owned import OwnedRegion
from tf_dgc.exchanges.owner_messages import Forms, OwnerMessages, in_slots
from tf_dgc.transports import sums
from tf_dgc.transports.sums import Cost, Exchanged, Kept, Sparse, Wire

ROOM = 1.25  # of what goes to an owner on average
VERDICT_BYTES = 4  # that an owner adds to its message


class OwnerSum(sums.SparseSum):
    """The largest elements, in messages to their owners; the largest sums to all."""

    def __init__(self, wire: Wire, stages: Mapping[int, warmup.Stage]) -> None:
        """Create the residual of the owners, outside of any graph."""
        super().__init__(wire, stages)
        self._messages = OwnerMessages(wire)
        self.slots = [wire.transport.size * form.slots for form in self._forms]
        self.owned: OwnedRegion = OwnedRegion(wire)

    @staticmethod
    def form(layout: Layout, sparsity: float, config: DGCConfig, workers: int) -> Forms:
        """Return the forms of the messages."""
        total = sum(selection.slots_per_segment(layout, sparsity))
        size = regions.size_of(layout.size, workers)
        begins = [segment.offset for segment in layout.segments]
        room = min(math.ceil(ROOM * total / workers), total, size)
        most = workers * room
        if config.growth < workers:
            most = math.ceil(config.growth * total / workers)
        parts, passed = (
            message.make_format(slots, size, config.value_dtype, begins)
            for slots in (room, min(most, size))
        )
        return Forms(parts, passed, min(total, workers * room))

    @staticmethod
    def cost(form: Forms, layout: Layout, workers: int) -> Cost:
        """Return that of an all-to-all by pairs, and of N messages in a ring."""
        last = form.sums.bytes + VERDICT_BYTES
        passed = workers * (form.parts.bytes + last)
        return Cost(
            workers * form.parts.bytes + last, passed, 2 * (workers - 1), workers
        )

    def __call__(
        self, kept: Kept, step: tf.Tensor, stage: tf.Tensor | None
    ) -> Exchanged:
        """Sum by owners; see the base class."""
        split = functools.partial(self.split, step=step, stage=stage)
        own = self.wire.workers.each(split, kept.read(), kept.peaks())
        through = [
            functools.partial(self.through, i, step, *own)
            for i in range(len(self._forms))
        ]
        return Exchanged(*values.one_of(through, stage))

    # What a worker sends.

    def split(
        self,
        residual: tf.Tensor,
        peaks: tf.Tensor,
        step: tf.Tensor,
        stage: tf.Tensor | None,
    ) -> Any:
        """Select; write a message to each owner, and tell what is in them."""
        layout, config = self.wire.layout, self.wire.config
        plans = [
            selection.plan(layout, each.sparsity, config.sample_fraction)
            for each in self._stages
        ]
        plan = selection.one_of(plans, stage)
        chosen = dgc.select(residual, peaks, layout, plan, config, step)
        found = tf.gather(residual, chosen.positions)
        write = [
            functools.partial(self._messages.parts, form, chosen, tf.abs(found), step)
            for form in self._forms
        ]
        return values.one_of(write, stage)

    # What an owner makes of it.

    def through(
        self,
        number: int,
        step: tf.Tensor,
        messages: tf.Tensor,
        positions: tf.Tensor,
        sent: tf.Tensor,
    ) -> tuple[Any, ...]:
        """Send what `split` returned, at one of the stages; see `Exchanged`."""
        wire, workers, form = self.wire, self.wire.transport.size, self._forms[number]
        name, axis = f"{wire.name}.{self.numbers[number]}", wire.workers.axis
        own = tf.bitcast(messages, tf.int32)
        own.set_shape([*axis, workers, form.parts.words])
        received = wire.transport.all_to_all(own, f"{name}.parts")
        found, verdict = self._messages.received(form, received, step)
        region, peaks = self.owned.added(found)
        choose = functools.partial(self._choose, form=form, step=step)
        args = region, peaks, verdict, self.owned.ranks
        told, where, passed = wire.workers.each(choose, *args)
        told = tf.bitcast(told, tf.int32)
        told.set_shape([*axis, form.sums.words + 1])
        gathered = wire.transport.all_gather(told, f"{name}.message")
        contents = self._messages.passed_on(form, gathered)
        args = contents.positions, contents.values, workers, wire.layout.size
        total = Sparse(*regions.merged(*args))
        with tf.control_dependencies([*total]):
            self.owned.keep_rest(region, Sparse(where, passed))
        used = [
            tf.reshape(tf.ensure_shape(each, [*axis, form.sent]), [-1, form.sent])
            for each in (positions, sent)
        ]
        cost = self.cost(form, wire.layout, workers)
        count = tf.math.count_nonzero(used[0][0] < wire.layout.size)
        traffic = sums.traffic_of(cost.sent, count, cost.received)
        return total, Sparse(*used), traffic

    def _choose(
        self,
        region: tf.Tensor,
        peaks: tf.Tensor,
        verdict: tf.Tensor,
        owner: tf.Tensor,
        form: Forms,
        step: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Choose what an owner passes on; write it, and the verdict."""
        layout, kind = self.wire.layout, self.wire.config.value_dtype
        workers, slots = self.wire.transport.size, form.slots
        positions, found = regions.reselect(region, peaks, slots, step)
        places = regions.to_arena(positions, owner, workers, layout.size)
        chosen = dgc.encoded(places, found, layout, kind)
        words = message.pack(
            form.sums,
            positions,
            *chosen[1:],
            checksum=arena.checksum(layout),
            step=step,
        )
        last = tf.cast(verdict, tf.int32)[tf.newaxis]
        # As float32, which TensorFlow joins where it is.
        both = [tf.bitcast(part, tf.float32) for part in (words, last)]
        sent = dgc.decoded(chosen, layout, kind)
        all_of_it = tf.range(tf.size(positions, tf.int64), dtype=tf.int64)
        filled = in_slots(slots, positions, sent, all_of_it, region.shape[0])
        return tf.concat(both, axis=0), *filled
