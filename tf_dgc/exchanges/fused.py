"""A step on a GPU in three functions that XLA compiles, of which none waits.

    1  clip; copy all gradients into a few vectors
    2  accumulate, select, write the message
    3  read all messages, keep the rest, change the weights

Between them are the sum of what is dense and the exchange of messages. The host waits
three times: for whether the step counts, for its figures, and for whether the messages
are sound; where they are not, 3 changes nothing. On processors, where XLA sorts and
searches slowly, steps are taken as in `compressed`, and so they are of

* owners' sums, and stages at which all is sent;
* stages that send more than one of `_FEW` elements, as a warm-up begins with;
* several workers in one process, means over senders, and a residual that decays;
* weights on other devices than the arena.

Of small gradients of several types, or of rows (embeddings), 1 is done by single
operations. Messages are the same both ways, to the bit, where v is and no tensor is
crowded, see fixed.py; the same messages change weights alike, to the bit.

Axes: P arena elements, T tensors in the arena, N workers.
"""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.compression import arena, dgc, fixed, message, selection, warmup
from tf_dgc.compression.arena import BLOCK, Division, Layout
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.applied import Target
from tf_dgc.exchanges.local_gradients import Clipped, Clipping
from tf_dgc.exchanges.modes import Contribution, Mode
from tf_dgc.exchanges.residual import Residual, bare
from tf_dgc.transports import base, sums
from tf_dgc.transports.sums import Sparse, Wire

VARIABLE, SETTINGS = "TF_DGC_XLA", ("auto", "off")
_FEW = 16
_forced: list[bool] = []
_logger = logging.getLogger("tf_dgc")


@contextlib.contextmanager
def forced(whole: bool) -> Iterator[None]:
    """Let exchanges that are opened be compiled as a whole, or not; of the laboratory.

    Args:
        whole: whatever their device is, and how many elements they send.
    """
    _forced.append(whole)
    try:
        yield
    finally:
        _forced.pop()


def is_wanted(device: str) -> bool:
    """Tell whether steps on a device are compiled as a whole: on GPUs.

    Raises:
        ValueError: TF_DGC_XLA is wrong.
    """
    if base.setting(VARIABLE, SETTINGS) == "off":
        return False
    if _forced:
        return _forced[-1]
    return tf.DeviceSpec.from_string(device).device_type == "GPU"


class Front(Clipping):
    """Clips gradients, and copies them into two vectors: the arena, and what is small.

    Attributes:
        device: where they are.
    """

    def __init__(
        self, division: Division, variables: Sequence[Any], device: str
    ) -> None:
        """Take which variables are in the arena, all of them, and the device."""
        super().__init__(division)
        self.device = device
        large, small, layout = division
        self._alone = {i: variables[i] for i in small}
        which = {"large": tuple(large), "small": tuple(small)}
        self._clip = inplace.bound(_clipped, layout=layout, **which)
        shapes = tuple(variables[i].shape for i in small)
        self._parted = inplace.bound(_parted, shapes=shapes)

    def takes(self, local: Sequence[Any]) -> bool:
        """Tell whether it takes gradients: small ones are tensors of one type.

        Of several types their order in the sum would not be that of workers that take
        steps by single operations.
        """
        own = [local[i] for i in self._alone]
        return len({each.dtype for each in own}) < 2 and all(
            isinstance(gradient, tf.Tensor) and gradient.shape == variable.shape
            for gradient, variable in zip(own, self._alone.values(), strict=True)
        )

    def clipped(
        self,
        local: Sequence[Any],
        rate: Sequence[Any],
        clip_norm: float | None,
        workers: int,
        whole: int,
    ) -> Clipped:
        """Return what the base class does, small ones in one vector."""
        dense = [tf.convert_to_tensor(gradient) for gradient in local]
        rates = [tf.cast(each, tf.float32) for each in rate]
        args = dense, rates, clip_norm, workers, whole
        return Clipped(*inplace.call(self.device, self._clip, *args))

    def small(self, summed: Sequence[Any]) -> list[Any]:
        """Return small gradients by their vector, in the order of variables."""
        if not summed:
            return []
        return list(inplace.call(self.device, self._parted, *summed))


def _clipped(
    local: list[tf.Tensor],
    rates: list[tf.Tensor],
    clip_norm: float | None,
    workers: int,
    whole: int,
    *,
    layout: Layout,
    large: Sequence[int],
    small: Sequence[int],
) -> tuple[Any, ...]:
    """Clip; arguments as of `Front`, and the indices of large and of small tensors."""
    gradient = arena.flatten(layout, [local[i] for i in large])
    flat = [tf.reshape(local[i], [-1]) for i in small]
    vectors = [tf.concat(flat, axis=0)] if flat else []
    begins = [*(segment.offset for segment in layout.segments[1:]), layout.size]
    parts = [(gradient, large, begins)] if large else []
    sizes = [local[i].shape.num_elements() for i in small]
    parts += [(vector, small, _running(sizes)) for vector in vectors]
    none = len(local) + len(rates)
    bad = [_first_bad(*part, none) for part in parts]
    for i, rate in enumerate(rates):
        bad.append(tf.where(tf.math.is_finite(rate), none, len(local) + i))
    first = functools.reduce(tf.minimum, bad, tf.constant(none))
    nonfinite = tf.where(first < none, tf.cast(first + 1, tf.float32), 0.0)
    scale = tf.ones([])
    if clip_norm is not None and local:
        # Squares of float32 do not overflow in float64, which needs no second look.
        wide = [tf.cast(each, tf.float64) for each in (gradient, *vectors)]
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(each)) for each in wide]))
        allowed = clip_norm * (workers / whole) * workers**-0.5
        limit = tf.constant(allowed, tf.float64)
        scale = tf.cast(limit / tf.maximum(norm, limit), tf.float32)
        vectors = [each * tf.cast(scale, each.dtype) for each in vectors]
    return gradient, vectors, nonfinite, scale


def _running(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def _first_bad(
    vector: tf.Tensor, numbers: Sequence[int], ends: Sequence[int], none: int
) -> tf.Tensor:
    """Return the number of the first part of a vector that is not finite, int32.

    Args:
        vector: shape [n].
        numbers: of its parts.
        ends: of these in the vector.
        none: returned where all are finite.
    """
    size = vector.shape[0]
    if not size:
        return tf.constant(none)
    place = tf.where(tf.math.is_finite(vector), size, tf.range(size))
    place = tf.reduce_min(place)
    part = fixed.first_above(tf.constant(ends), place)
    return tf.gather(tf.constant([*numbers, none]), part)


def _parted(vector: tf.Tensor, *, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Return the parts of a vector, of some shapes."""
    parts = tf.split(vector, [shape.num_elements() for shape in shapes])
    return [tf.reshape(*each) for each in zip(parts, shapes, strict=True)]


class FusedArenas(NamedTuple):
    """Variables that 2 changes."""

    u: tf.Variable | None
    v: tf.Variable
    rates: tf.Variable | None  # None where v does not know of them


class Rest(NamedTuple):
    """Variables that 3 changes."""

    u: tf.Variable | None  # None where it is not masked
    v: tf.Variable
    sent: tf.Variable  # of `Coverage`
    counts: tf.Variable
    target: list[tf.Variable]


class FusedSum(sums.GatherSum):
    """The messages of one stage, and all that a step does besides."""

    def __init__(
        self,
        wire: Wire,
        number: int,
        stage: warmup.Stage,
        residual: Residual,
        mode: Mode,
        changed: list[tf.Variable],
    ) -> None:
        """Take a stage, the state, the mode, and the variables of its target."""
        super().__init__(wire, {number: stage})
        self._residual, self._mode, (self._form,) = residual, mode, self._forms
        self._changed, layout, config = changed, wire.layout, wire.config
        sample = stage.sparsity, config.sample_fraction
        with tf.init_scope(), tf.device(residual.device):
            self._known = fixed.tables(layout, selection.plan(layout, *sample))
        form = {"layout": layout, "form": self._form}
        self._send = inplace.bound(
            _sent,
            **form,
            sample=sample,
            value_type=config.value_dtype,
            falls=config.rate_correction,
        )
        rank, target = wire.workers.ranks[0], type(mode.target)
        self._take = inplace.bound(_taken, **form, rank=rank, target=target)

    def through(self, share: Contribution, step: tf.Tensor) -> tf.Tensor:
        """Take a step; return what `sums.traffic_of` does.

        Args:
            share: of this worker.
            step: shape [], int64.

        Raises:
            tf.errors.InvalidArgumentError: a message is damaged, or not of this step.
        """
        wire, residual, form = self.wire, self._residual, self._form
        state, device = FusedArenas(residual.u, residual.v, None), residual.device
        gradient, momentum, scale = self._mode.gain(share)
        rate = None
        if share.taken_over is not None:
            rate = tf.cast(share.taken_over.learning_rate, tf.float32)
            state = state._replace(rates=residual.arenas.rates)
        args = gradient, bare(momentum), scale, rate, self._known, step
        words = inplace.change(device, self._send, state, *args)
        own = tf.bitcast(words, tf.int32)  # one of this graph, left in place
        own.set_shape([form.words])
        name = f"{wire.name}.{self.numbers[0]}.message"
        messages = tf.bitcast(wire.transport.all_gather(own, name), tf.float32)
        masked = residual.u if residual.config.momentum_masking else None
        coverage = residual.coverage
        rest = Rest(masked, residual.v, coverage.sent, coverage.counts, self._changed)
        found = inplace.change(device, self._take, rest, messages)
        verdict, faults, marks = found
        with tf.device("CPU:0"):
            verdict = tf.identity(verdict)  # what the host waits for
            sound, count = verdict[0] > 0, verdict[1]
        with tf.control_dependencies([sums.require_that(sound, faults, marks)]):
            coverage.count()
            self._mode.settle()
            received = (wire.transport.size - 1) * form.bytes
            return sums.traffic_of(form.bytes, count, received)


def _sent(
    state: FusedArenas,
    gradient: tf.Tensor,
    momentum: dgc.Momentum | None,
    scale: tf.Tensor,
    rate: tf.Tensor | None,
    known: fixed.PlanTables,
    step: tf.Tensor,
    *,
    layout: Layout,
    form: message.Format,
    sample: tuple[float, float],
    value_type: str,
    falls: bool,
) -> tuple[FusedArenas, tf.Tensor]:
    """Accumulate, select, write; the message as float32, which GPUs leave in place."""
    u, v, rates = state
    if rates is not None and rate is not None:
        if falls:
            owner = tf.cast(known.owner, tf.int32)
            by = tf.gather(dgc.fall(rate, rates), owner)[:, tf.newaxis]
            v = tf.reshape(by * tf.reshape(v, [-1, BLOCK]), v.shape)
        rates = tf.where(rate > 0, rate, rates)
    u, v = dgc.accumulate(dgc.ArenaState(u, v), gradient, momentum, scale)
    plan = selection.plan(layout, *sample)
    words = fixed.send(v, layout, plan, known, form, value_type, step)
    return FusedArenas(u, v, rates), tf.bitcast(words, tf.float32)


def _taken(
    rest: Rest,
    messages: tf.Tensor,
    *,
    layout: Layout,
    form: message.Format,
    rank: int,
    target: type[Target],
) -> tuple[Rest, tuple[tf.Tensor, ...]]:
    """Read, keep, apply; where messages are not sound, nothing changes.

    Returns:
        The rest; whether they are sound, and how many elements the own one has, shape
        [2], int64; their faults, and what must be alike in them, int64.
    """
    found, faults = fixed.read(form, tf.bitcast(messages, tf.int32))
    marks = tf.cast(sums.marks_of(found.header), tf.int64)
    sound = sums.is_sound(faults, marks)
    total = Sparse(tf.where(sound, found.positions, layout.size), found.values)
    positions, values = total.positions[rank], total.values[rank]
    state = dgc.ArenaState(rest.u, rest.v)
    u, v = dgc.keep(state, positions[:, tf.newaxis], values)
    bounds = tf.constant([segment.offset for segment in layout.segments], tf.int64)
    ends = fixed.first_above(positions, tf.concat([bounds, [layout.size]], 0) - 1)
    counts = rest.counts + tf.cast(ends[1:] - ends[:-1], tf.int64)
    sent = selection.mark(rest.sent, positions)
    changed = target.taken(layout, rest.target, total)
    own = tf.cast(found.header.count[rank], tf.int64)
    verdict = tf.stack([tf.cast(sound, tf.int64), own])
    return Rest(u, v, sent, counts, changed), (verdict, faults, marks)


def tell(listed: Sequence[sums.SparseSum], wire: Wire) -> None:
    """Say that steps are compiled as a whole, and the way off."""
    whole = sum(isinstance(each, FusedSum) for each in listed)
    if whole and wire.transport.rank == 0:
        _logger.info(
            "XLA compiles the steps of %s as a whole at %d of its stages, each in its "
            "first step; %s=off takes them by single operations",
            wire.name,
            whole,
            VARIABLE,
        )


def covers(wire: Wire, stage: warmup.Stage, mode: Mode) -> bool:
    """Tell whether the steps of a stage can be compiled as a whole; see the top."""
    slots = sum(selection.slots_per_segment(wire.layout, stage.sparsity))
    few = slots * _FEW <= wire.layout.size or bool(_forced)
    return few and not wire.workers.axis and mode.decay == 1


def sums_by(
    wire: Wire, residual: Residual, mode: Mode
) -> Callable[[int, warmup.Stage], sums.SparseSum | None]:
    """Return what makes the sum of a stage that is compiled as a whole, or None."""
    changed = mode.target.fused(residual.v.device)

    def make(number: int, stage: warmup.Stage) -> sums.SparseSum | None:
        if changed is None or not covers(wire, stage, mode):
            return None
        return FusedSum(wire, number, stage, residual, mode, changed)

    return make
