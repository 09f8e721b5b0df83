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
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import arena, dgc, message, regions, selection, warmup
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.transports import gathering, sums
from tf_dgc.transports.sums import Cost, Exchanged, Kept, Sparse, Wire

ROOM = 1.25  # of what goes to an owner on average
VERDICT_BYTES = 4  # that an owner adds to its message
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


class OwnerSum(sums.SparseSum):
    """The largest elements, in messages to their owners; the largest sums to all."""

    def __init__(self, wire: Wire, stages: Mapping[int, warmup.Stage]) -> None:
        """Create what owners keep back, zero, outside of any graph."""
        super().__init__(wire, stages)
        size, workers = wire.layout.size, wire.transport.size
        self.slots = [workers * form.slots for form in self._forms]
        with tf.init_scope(), tf.device(wire.transport.device):
            zeros = tf.zeros([*wire.workers.axis, regions.size_of(size, workers)])
            self._kept = own_variable(zeros, "dgc_owned")

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
            functools.partial(self._parts, form, chosen, tf.abs(found), step)
            for form in self._forms
        ]
        return values.one_of(write, stage)

    def _parts(
        self,
        form: Forms,
        chosen: dgc.Selection,
        magnitudes: tf.Tensor,
        step: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        layout, workers = self.wire.layout, self.wire.transport.size
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
        sent = dgc.decoded(chosen, layout, self.wire.config.value_dtype)
        filled = _filled(form.sent, positions, sent, went, layout.size)
        return tf.bitcast(messages, tf.float32), *filled

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
        found, verdict = self._received(form, received, step)
        region, peaks = inplace.call(
            wire.transport.device, regions.summed, self._kept, *found
        )
        choose = functools.partial(self._choose, form=form, step=step)
        args = region, peaks, verdict, self._ranks()
        told, where, passed = wire.workers.each(choose, *args)
        told = tf.bitcast(told, tf.int32)
        told.set_shape([*axis, form.sums.words + 1])
        gathered = wire.transport.all_gather(told, f"{name}.message")
        contents = self._passed_on(form, gathered)
        args = contents.positions, contents.values, workers, wire.layout.size
        total = Sparse(*regions.merged(*args))
        with tf.control_dependencies([*total]):
            args = self._kept, region, where, passed
            inplace.update(wire.transport.device, regions.kept, *args)
        used = [
            tf.reshape(tf.ensure_shape(each, [*axis, form.sent]), [-1, form.sent])
            for each in (positions, sent)
        ]
        cost = self.cost(form, wire.layout, workers)
        count = tf.math.count_nonzero(used[0][0] < wire.layout.size)
        traffic = sums.traffic_of(cost.sent, count, cost.received)
        return total, Sparse(*used), traffic

    def _received(
        self, form: Forms, messages: tf.Tensor, step: tf.Tensor
    ) -> tuple[Sparse, tf.Tensor]:
        """Read the messages to owners, shape [*axis, N, words].

        Returns:
            What they hold, [*axis, N, K1], those that are damaged nothing; and a
            verdict of each owner: 0, or which rank's message is damaged, and how;
            shape [*axis], int64.
        """
        wire, workers = self.wire, self.wire.transport.size
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
        beyond = tf.reduce_any(places > self.wire.layout.size, axis=1)
        wrong = np.int64(_POSITIONS)
        return tf.where((faults == 0) & beyond, wrong, faults)

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
        filled = _filled(slots, positions, sent, all_of_it, region.shape[0])
        return tf.concat(both, axis=0), *filled

    def _passed_on(self, form: Forms, gathered: tf.Tensor) -> message.Contents:
        """Read the messages of owners, shape [N, words + 1].

        Raises:
            tf.errors.InvalidArgumentError: one is damaged, or one that an owner
                received, or they are not of this step; on all workers alike.
        """
        workers, size = self.wire.transport.size, self.wire.layout.size
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

    def _ranks(self) -> tf.Tensor:
        ranks = tf.constant(list(self.wire.workers.ranks), tf.int64)
        return tf.reshape(ranks, self.wire.workers.axis)

    # What owners keep back.

    def kept(self) -> tf.Tensor:
        """Return z, shape [*axis, R]."""
        return self._kept.read_value()

    def whole(self) -> tf.Tensor:
        """Return z in its place in arenas."""
        spread = functools.partial(regions.spread, **self._sizes())
        return self.wire.workers.each(spread, self._kept.read_value(), self._ranks())

    def keep(self, arena: tf.Tensor) -> tf.Tensor:
        """Keep back each owner's region of its arena; return the rest."""
        size, workers = self._sizes().values()

        def parted(own: tf.Tensor, rank: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            region = regions.part(own, rank, workers)
            return region, own - regions.spread(region, rank, workers, size)

        own, rest = self.wire.workers.each(parted, arena, self._ranks())
        self._kept.assign(own)
        return rest

    def scale(self, by: tf.Tensor) -> None:
        """Multiply z by numbers of the elements of the arena, shape [P]."""
        workers = self.wire.transport.size

        def scaled(region: tf.Tensor, rank: tf.Tensor) -> tf.Tensor:
            return region * regions.part(by, rank, workers)

        args = self._kept.read_value(), self._ranks()
        self._kept.assign(self.wire.workers.each(scaled, *args))

    def _sizes(self) -> dict[str, int]:
        return {
            "elements": self.wire.layout.size,
            "workers": self.wire.transport.size,
        }


def _filled(
    slots: int, positions: tf.Tensor, sent: tf.Tensor, which: tf.Tensor, unused: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return elements, and what was sent of them, in so many slots."""
    where = values.filled_up(tf.gather(positions, which), slots, unused)
    return where, values.filled_up(tf.gather(sent, which), slots)
