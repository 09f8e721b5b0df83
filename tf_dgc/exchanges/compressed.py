"""The largest elements are exchanged, the rest is kept for later.

Axes: P arena elements, N workers, W of them in this process: one, but in a simulation.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import arena, dgc, message, selection, warmup
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import applied, formats, inplace
from tf_dgc.exchanges.base import (
    Apply,
    Exchange,
    LocalStep,
    Place,
    TakenOver,
    Update,
    momentum_in,
    take_velocity,
)
from tf_dgc.exchanges.figures import Coverage, TensorStats
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.exchanges.local_steps import LocalSteps
from tf_dgc.exchanges.parts import Part, weighed_sum
from tf_dgc.transports import handshake, sums
from tf_dgc.transports.base import Transport

_logger = logging.getLogger("tf_dgc")


class Workers(NamedTuple):
    """Which of the N workers a process is, and how it runs their pure functions."""

    ranks: Sequence[int]
    each: Callable[..., Any]  # each(fn, *args) is fn(*args), of each of them
    axis: list[int]  # the first axis of what there is one of each: [], or [W]
    # Of each one's gradient in the sum, shape [W]; None where all count alike, or a
    # `Part` tells.
    factors: Callable[[], tf.Tensor | None] = lambda: None

    def seats(self, workers: int) -> tf.Tensor:
        """Return 1 in the place of each: shape [*axis, N]."""
        seats = tf.one_hot(self.ranks, workers)
        return tf.reshape(seats, [*self.axis, workers])


def one(transport: Transport) -> Workers:
    """Return what a process is that is one worker."""
    return Workers([transport.rank], lambda fn, *args: fn(*args), [])


class Share(NamedTuple):
    """A worker's share of a step; of each worker, the first axis is W."""

    gradient: tf.Tensor  # of the arena, shape [P]
    scale: tf.Tensor  # what clips it, shape []
    factor: tf.Tensor  # of the clipped one in the sum, shape []; may be one for all W
    small: list[Any]  # gradients of the small tensors, summed; one for all W
    whole: int  # of the clipped one in the mean over this worker's rows


class Compressed(Exchange):
    """Deep Gradient Compression of the large tensors, the small ones dense.

    Attributes:
        layout: of the arena of compressed tensors.
        velocity: u, shape [P], float32; None where no momentum is corrected.
        residual: v, of the same shape; [N, P] where this process is N workers.
        step: shape [], int64, number of exchanges done.
    """

    def __init__(
        self,
        place: Place,
        taken_over: TakenOver | None,
        config: DGCConfig,
        workers: Callable[[Transport], Workers] = one,
    ) -> None:
        """Create the variables outside of any graph: zero, but for momentum so far.

        Args:
            place: whose gradients, and with whom.
            taken_over: what the optimizer leaves to the exchange in the first step.
            config: the settings.
            workers: which the process is.
        """
        super().__init__(place)
        self._workers = workers(self.transport)
        shapes = [v.shape.as_list() for v in self.variables]
        self._large = [
            i
            for i, v in enumerate(self.variables)
            if arena.is_compressed(shapes[i], v.dtype, config.min_elements)
        ]
        self._small = [i for i in range(len(shapes)) if i not in self._large]
        self.layout = arena.build(
            [(self.variables[i].name, shapes[i]) for i in self._large]
        )
        self.config = formats.within_budget(
            config, self.layout, self.variables, self._small, self.transport, self.name
        )
        # u and v are then steps of the optimizer, not gradients.
        taken_over = self._accumulated(taken_over)
        self._corrects = taken_over is not None
        self._steps: LocalSteps | None = None
        if isinstance(taken_over, LocalStep):
            place_of = self.layout, self.variables, self._large
            self._steps = LocalSteps(*place_of, taken_over, self._workers)
        shape = [*self._workers.axis, self.layout.size]
        self._device = self.transport.device
        with tf.init_scope(), tf.device(self._device):
            zeros = tf.zeros(shape)
            momentum = momentum_in(taken_over)
            self.velocity: tf.Variable | None = None
            if momentum is not None and momentum.factor:
                self.velocity = own_variable(zeros, "dgc_velocity")
                if (begun := take_velocity(momentum, self._large)) is not None:
                    # Each worker has its share of it.
                    own = arena.flatten(self.layout, begun) / self.transport.size
                    self.velocity.assign(tf.broadcast_to(own, shape))
            self.residual = own_variable(zeros, "dgc_residual")
        with tf.init_scope(), tf.device("CPU:0"):
            self.step = own_variable(tf.zeros([], tf.int64), "dgc_step")
            self._rate = own_variable(tf.zeros([]), "dgc_rate")  # of the last step
        self._coverage = Coverage(self.layout, self._device)
        self._stages = warmup.stages(self.config)
        self._agree(taken_over)
        formats.tell_dense_stages(self.config, self.layout, self.transport)
        formats.tell_dense_types(self.config, self.variables, self.transport)
        if self._large:
            text = "Compiling the exchange of %s: stages %d"
            _logger.info(text, self.name, len(self._stages))

    # The step: local -> wire -> local.

    def gradients(
        self,
        local: list[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Sum the small tensors, and what all select of the large ones."""
        taken_over = taken_over if self._corrects else None
        self._refuse_late(momentum_in(taken_over))
        whole = self.transport.size if part is None else part.whole
        stage = functools.partial(self._clipped, taken_over=taken_over, whole=whole)
        gradient, small, nonfinite, scale = self._workers.each(stage, local)

        # Wire 1. Before any state changes all must know whether the step counts.
        seats, factors = (
            self._workers.seats(self.transport.size),
            self._workers.factors(),
        )
        if factors is not None:
            small = self._workers.each(_all_scaled, small, factors)
        told = weighed_sum(self.transport, small, self.name, seats, nonfinite, part)
        ok = self._all_finite(told.nonfinite)

        large = [self.variables[i] for i in self._large]
        weights = (
            large
            if self._corrects and all(v.dtype == tf.float32 for v in large)
            else None  # the optimizer's to change
        )
        factor = told.factor if factors is None else factors
        share = Share(gradient, scale, factor, told.gradients, whole)

        def send() -> tf.Tensor:
            self._correct_rate(taken_over)
            return self._sum(share, taken_over, weights)

        sent = tf.cond(ok, send, lambda: tf.zeros([2], tf.int64))
        found: list[Any] = [None] * len(local)
        flags = [self._corrects and i in self._large for i in range(len(local))]
        if self._steps is not None:
            return Update(found, flags, ok, told.sent + sent)
        for i, tensor in zip(self._small, told.gradients, strict=True):
            found[i] = tensor
        if weights is None:
            parts = arena.unflatten(self.layout, self._total.read_value())
            for i, tensor in zip(self._large, parts, strict=True):
                found[i] = tf.cast(tensor, local[i].dtype)
        return Update(found, flags, ok, told.sent + sent)

    def _accumulate(self, share: Share, taken_over: TakenOver | None) -> None:
        """Add this worker's share of a step to v."""
        gradient, momentum = share.gradient, momentum_in(taken_over)
        scale = share.scale * share.factor
        if momentum is not None:
            rate = tf.cast(momentum.learning_rate, tf.float32)
            momentum = momentum._replace(learning_rate=rate, slots=())
        elif self._steps is not None and isinstance(taken_over, LocalStep):
            own = (share.whole * share.scale)[..., tf.newaxis] * gradient
            gradient = self._steps.along_own(taken_over, own, share.small)
            scale = share.factor / share.whole
        state = dgc.State(self.velocity, self.residual)
        args = gradient, momentum, scale
        inplace.update(self._device, dgc.accumulate, state, *args)

    def _correct_rate(self, taken_over: TakenOver | None) -> None:
        """Let v fall with the learning rate; this is the last one from now on."""
        if taken_over is None:
            return
        with tf.device("CPU:0"):  # which chooses what is done
            rate = tf.cast(taken_over.learning_rate, tf.float32)
            last = self._rate.read_value()
            fallen = dgc.fall(rate, last)
            self._rate.assign(tf.where(rate > 0, rate, last), read_value=False)
            falls = fallen < 1.0

        def scale() -> None:
            self.residual.assign(fallen * self.residual, read_value=False)

        if self.config.rate_correction:
            tf.cond(falls, scale, lambda: None)

    def _clipped(
        self, local: list[Any], taken_over: TakenOver | None, whole: int
    ) -> tuple[tf.Tensor, list[Any], tf.Tensor, tf.Tensor]:
        """Return the arena's gradient, the small ones, what is not finite, the scale.

        Pure. The scale, shape [], is still to be applied to the arena's.
        """
        large = [tf.convert_to_tensor(local[i]) for i in self._large]
        small = [local[i] for i in self._small]
        gradient, scale = arena.flatten(self.layout, large), tf.ones([])
        together = [gradient, *small]
        rate = []
        if taken_over is not None:
            rate = [tf.cast(taken_over.learning_rate, tf.float32)]
        nonfinite = values.first_nonfinite(local, rate, together)
        if self.config.clip_norm is not None:
            size = self.transport.size
            # It is the norm of what is divided by N that is clipped.
            norm = self.config.clip_norm * (size / whole)
            scale = dgc.clip_scale(together, norm, size)
            small = [values.scaled(part, scale) for part in small]
        return gradient, small, nonfinite, scale

    def _sum(
        self,
        share: Share,
        taken_over: TakenOver | None,
        weights: Sequence[tf.Variable] | None,
    ) -> tf.Tensor:
        """Sum at the present stage; return bytes and elements sent, shape [2]."""
        step, stages = self.step.read_value(), range(len(self._stages))
        # Those with messages share a graph; what is compiled is shared as well.
        sparse = [i for i in stages if self._form(i).slots]
        groups = [[i] for i in stages if i not in sparse] + ([sparse] if sparse else [])
        branches = [
            functools.partial(self._at, group, share, taken_over, weights, step)
            for group in groups
        ]
        group = None
        if len(groups) > 1:
            which = [k for i in stages for k, g in enumerate(groups) if i in g]
            with tf.device("CPU:0"):
                group = tf.constant(which)[warmup.stage_index(step, self._stages)]
        sent = values.one_of(branches, group)
        self.step.assign_add(1, read_value=False)
        return sent

    def _form(self, stage: int) -> message.Format:
        sparsity, workers = self._stages[stage].sparsity, self.transport.size
        return formats.message_format(self.layout, sparsity, self.config, workers)

    def _at(
        self,
        stages: Sequence[int],
        share: Share,
        taken_over: TakenOver | None,
        weights: Sequence[tf.Variable] | None,
        step: tf.Tensor,
    ) -> tf.Tensor:
        """Accumulate, select, exchange, keep the rest; add up, or change the weights.

        Args:
            stages: those that are done alike, one of which is the present one.
            share: of this worker.
            taken_over: what the optimizer leaves to the exchange.
            weights: that are changed here; None adds up.
            step: shape [], int64.
        """
        forms, number = [self._form(i) for i in stages], None
        if len(stages) > 1:
            begun = [self._stages[i] for i in stages]
            number = warmup.stage_index(step, begun)
        densely = not forms[0].slots and self.layout.size > 0
        if not densely or self._steps is None:
            self._accumulate(share, taken_over)
        peaks = inplace.call(self._device, selection.peaks, self.residual)
        write = functools.partial(
            dgc.send,
            forms=forms,
            layout=self.layout,
            sparsities=[self._stages[i].sparsity for i in stages],
            config=self.config,
            step=step,
            stage=number,
        )
        own = self._workers.each(write, self.residual.read_value(), peaks)

        # Wire 2.
        wires = [
            functools.partial(self._exchanged, form, own, f"{self.name}.{i}")
            for i, form in zip(stages, forms, strict=True)
        ]
        total, used, sent = values.one_of(wires, number)
        if densely:
            name = f"{self.name}.{stages[0]}.arena"
            with tf.control_dependencies([total.positions]):  # the headers were alike
                if self._steps is None:
                    self._sum_densely(weights, name)
                elif isinstance(taken_over, LocalStep):
                    self._step_densely(self._steps, taken_over, share, name)
            self._coverage.record_all()
            arena_sent = [4 * self.layout.size, self.layout.elements]
            return sent + tf.constant(arena_sent, tf.int64)

        self._keep(used)
        if weights is not None:
            slots = [form.slots for form in forms]
            applied.subtract(weights, self.layout, total, slots, number)
        else:
            inplace.update(self._device, selection.densify, self._total, *total)
            if self._steps is not None:
                parts = arena.unflatten(self.layout, self._total.read_value())
                applied.subtract_all([self.variables[i] for i in self._large], parts)
        self._coverage.record(used.positions[0])
        return sent

    def _exchanged(
        self, form: message.Format, own: tf.Tensor, name: str
    ) -> tuple[sums.Sparse, sums.Sparse, tf.Tensor]:
        """Return what `SparseSum` does, but bytes and elements sent, shape [2]."""
        own = tf.bitcast(own, tf.int32)  # one of this graph, left in place
        own.set_shape([*self._workers.axis, form.words])
        wire = sums.GatherSum(self.transport, form, self._workers.ranks)
        total, used, elements = wire(own, f"{name}.message")
        return total, used, tf.stack([tf.constant(form.bytes, tf.int64), elements])

    def _sum_densely(self, weights: Sequence[tf.Variable] | None, name: str) -> None:
        """Exchange all of the arena, in a stage where that costs less."""
        (total,) = self.transport.all_reduce([self.residual.read_value()], name)
        if weights is None:
            self._total.assign(total)
        else:
            for device, own in applied.by_device(weights).items():
                offsets = [self.layout.segments[i].offset for i in own]
                parts = [weights[i] for i in own]
                inplace.update(device, arena.subtract, parts, total, offsets)
        with tf.control_dependencies([total]):
            self._clear()

    def _step_densely(
        self, steps: LocalSteps, step: LocalStep, share: Share, name: str
    ) -> None:
        """Take the optimizer's step of everybody's gradient; nothing is kept."""
        own = (share.scale * share.factor)[..., tf.newaxis] * share.gradient
        (total,) = self.transport.all_reduce([own], name)
        steps.along(step, total, share.small)

    @functools.cached_property
    def _total(self) -> tf.Variable:
        """What all workers sent in the last step, where it was summed, shape [P]."""
        with tf.init_scope(), tf.device(self._device):
            return own_variable(tf.zeros([self.layout.size]), "dgc_total")

    def _keep(self, used: sums.Sparse) -> None:
        """Take what was used out of u and v: sent + kept = accumulated."""
        where = used.positions[..., tf.newaxis]
        if self._workers.axis:
            number = tf.range(self._workers.axis[0], dtype=tf.int64)
            number = number[:, tf.newaxis, tf.newaxis] + tf.zeros_like(where)
            where = tf.concat([number, where], axis=-1)
        where = tf.reshape(where, [-1, where.shape[-1]])
        velocity = self.velocity if self.config.momentum_masking else None
        state, sent = dgc.State(velocity, self.residual), tf.reshape(used.values, [-1])
        inplace.update(self._device, dgc.keep, state, where, sent)

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """The residual and, where momentum is corrected, the velocity."""
        unit = "steps" if self._corrects else "gradients"
        found = {f"residual of {unit}": self.residual}
        if self.velocity is not None:
            found[f"velocity of {unit}"] = self.velocity
        if self._corrects:
            found["learning rate"] = self._rate
        if self._steps is not None:
            found |= self._steps.state
        return found

    @property
    def own_slots(self) -> Sequence[Any]:
        """Slots of the optimizer, where its steps are this worker's own."""
        return () if self._steps is None else self._steps.slots

    @property
    def steps(self) -> int:
        """How many exchanges were done."""
        return int(self.step)

    def load(self, arrays: Mapping[str, Any], steps: int) -> None:
        """Take over what was saved."""
        super().load(arrays, steps)
        self.step.assign(steps)
        self._agree_on_slots()

    def _agree_on_slots(self) -> None:
        """Make what the optimizer keeps alike, where a step of all comes next."""
        stage = warmup.stage_index(self.step.read_value(), self._stages)
        if self._steps is not None and not self._form(int(stage)).slots:
            self._steps.agree(self.transport)

    def _clear(self, sent: tf.Tensor | None = None) -> None:
        """Take out of v what went densely.

        To the letter, momentum factor masking would clear u there, and leave SGD
        without momentum.

        Args:
            sent: marks it, shape [P], bool; by default all.
        """
        kept = tf.zeros_like(self.residual)
        if sent is not None:
            kept = tf.where(sent, kept, self.residual.read_value())
        self.residual.assign(kept)

    def flush(self, variables: Sequence[Any], apply: Apply) -> None:
        """Apply, eagerly, what all workers keep back of variables; clear it."""
        known = {id(variable) for variable in variables}
        wanted = [id(self.variables[i]) in known for i in self._large]
        if not any(wanted):
            return
        own = self.residual.read_value()
        (summed,) = self.transport.all_reduce([own], f"{self.name}.flush")
        gradients = list(compress(arena.unflatten(self.layout, summed), wanted))
        found = [self.variables[i] for i in compress(self._large, wanted)]
        if self._steps is not None:
            applied.subtract_all(found, gradients)
            gradients = [None] * len(found)
        apply(Update(gradients, [self._corrects] * len(found)), found)
        self._clear(arena.mask(self.layout, wanted))

    def kept(self) -> list[tf.Tensor]:
        """Return the residual; of several workers, one of the mean square."""
        return [self.residual / len(self._workers.ranks) ** 0.5]

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        found = self._coverage.stats()
        if reset:
            self._coverage.reset()
        return found

    # What is refused.

    def _accumulated(self, taken_over: TakenOver | None) -> TakenOver | None:
        """Return what is taken over; None where gradients are accumulated."""
        if not self.config.momentum_correction:
            return None
        if isinstance(taken_over, LocalStep):
            return taken_over if self._large and taken_over.accumulates() else None
        return taken_over

    def _agree(self, accumulated: TakenOver | None) -> None:
        """Compare what is accumulated over the workers; begin alike with it."""
        form = "gradients"
        if accumulated is not None:
            form = "steps of the optimizer"
        if (momentum := momentum_in(accumulated)) is not None:
            form = f"momentum={momentum.factor}, nesterov={momentum.nesterov}"
        with tf.init_scope():
            handshake.agree(self.transport, "optimizers", {"accumulated": form})
            self._agree_on_slots()

    def _refuse_late(self, momentum: dgc.Momentum | None) -> None:
        if momentum is not None and momentum.factor and self.velocity is None:
            raise ValueError(
                "The momentum of an optimizer must not be 0 at first and then change. "
                f"Received: momentum={momentum.factor}"
            )

    def _all_finite(self, votes: tf.Tensor) -> tf.Tensor:
        """Return whether all gradients are finite; raise where they must be.

        Args:
            votes: of each worker 0, or the number of what is not, from 1: shape [N].
        """
        with tf.device("CPU:0"):
            ok = tf.reduce_all(votes == 0)
            if self.config.nonfinite == "raise":
                names = [*(v.name for v in self.variables), "the learning rate"]
                with tf.control_dependencies([_refuse(votes, ok, self.step, names)]):
                    ok = tf.identity(ok)
        return ok


def _all_scaled(gradients: list[Any], factor: tf.Tensor) -> list[Any]:
    return [values.scaled(gradient, factor) for gradient in gradients]


def _refuse(
    votes: tf.Tensor, ok: tf.Tensor, step: tf.Variable, names: list[str]
) -> Any:
    """Raise InvalidArgumentError where a worker's gradient is not finite."""

    def told() -> list[Any]:
        rank = values.first_true(votes > 0)
        number = tf.clip_by_value(tf.cast(votes[rank], tf.int32), 0, len(names))
        name = tf.gather(tf.constant(["", *names]), number)
        return [
            "A gradient holds NaN or infinity; all workers stop, nothing of it was "
            "applied (DGCConfig(nonfinite='skip') leaves such steps out). Rank, step "
            "and variable:",
            rank,
            step.read_value(),
            name,
        ]

    return values.require(ok, told)
