"""The largest elements are exchanged, the rest is kept for later.

Axes: P arena elements, N workers.
"""

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import dgc, packing, schedules
from tf_dgc import layout as layout_lib
from tf_dgc.config import DGCConfig
from tf_dgc.state import ArenaState, Coverage, TensorStats
from tf_dgc.synchronizers.base import Account, ArenaSum, Exchanged, Synchronizer
from tf_dgc.transports.base import Transport

_logger = logging.getLogger("tf_dgc")


class Arena(NamedTuple):
    """The compressed tensors among an owner's variables."""

    indices: list[int]
    layout: layout_lib.Layout
    state: ArenaState
    coverage: Coverage
    corrects: bool  # u and v are steps of SGD, not gradients


class DeepGradientCompression(Synchronizer):
    """Deep Gradient Compression of the large tensors, the small ones dense."""

    def __init__(self, transport: Transport, config: DGCConfig) -> None:
        super().__init__(transport)
        self.config = config
        self.arenas: weakref.WeakKeyDictionary[Account, Arena] = (
            weakref.WeakKeyDictionary()
        )

    def _arrays_of(self, account: Account) -> dict[str, tf.Variable]:
        arena = self.arenas[account]
        unit = "steps" if arena.corrects else "gradients"
        return {f"{k} of {unit}": v for k, v in arena.state.arrays().items()}

    def _step_of(self, account: Account) -> int:
        return int(self.arenas[account].state.step)

    def _load_step(self, account: Account, step: int) -> None:
        self.arenas[account].state.step.assign(step)

    def flush(
        self, variables: Sequence[Any]
    ) -> Iterator[tuple[Any, Exchanged, Sequence[Any]]]:
        """Sum up the residuals of these variables on all workers, eagerly; clear them.

        Yields:
            As the base class says.

        Raises:
            ValueError: a restored state waits for its optimizer's first step.
        """
        self._refuse_unclaimed()
        gc.collect()  # owners that are gone, on all workers alike
        known = {id(variable) for variable in variables}
        for account, arena in self._by_number():
            indices, layout, state, _, corrects = arena
            if not indices or not known.issuperset(map(id, account.variables)):
                continue
            (summed,) = self.transport.all_reduce(
                [state.residual.read_value()], f"{account.name}.flush"
            )
            gradients = layout_lib.unflatten(layout, summed)
            exchanged = Exchanged(gradients, [corrects] * len(indices), None)
            yield account.owner(), exchanged, [account.variables[i] for i in indices]
            state.clear(self.config.momentum_masking)

    def tensor_stats(self, reset: bool = False) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        found = []
        for _, arena in self._by_number():
            found += arena.coverage.stats()
            if reset:
                arena.coverage.reset()
        return found

    def _by_number(self) -> list[tuple[Account, Arena]]:
        living = [item for item in self.arenas.items() if item[0].owner() is not None]
        return sorted(living, key=lambda item: item[0].number)

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        kept = [arena.state.residual for _, arena in self._by_number()]
        return tf.linalg.global_norm(kept) if kept else tf.zeros([])

    def _prepare(self, account: Account, momentum: dgc.Momentum | None) -> None:
        shapes = [v.shape.as_list() for v in account.variables]
        least = self.config.min_elements
        indices = [
            i
            for i, v in enumerate(account.variables)
            if layout_lib.is_compressed(shapes[i], v.dtype, least)
        ]
        layout = layout_lib.build(
            [(account.variables[i].name, shapes[i]) for i in indices]
        )
        device = self.transport.device
        corrects = self.config.momentum_correction and momentum is not None
        with_velocity = corrects and momentum is not None and momentum.factor != 0
        state = ArenaState(self._arena_shape(layout), with_velocity, device)
        coverage = Coverage(layout, device)
        self.arenas[account] = Arena(indices, layout, state, coverage, corrects)
        self._tell_dense_stages(layout)

    def _tell_dense_stages(self, layout: layout_lib.Layout) -> None:
        workers = self.transport.size
        dense = [
            f"{stage.sparsity:.2%}"
            for stage in schedules.stages(self.config)
            if stage.sparsity
            and layout.size
            and not dgc.message_format(
                layout, stage.sparsity, self.config, workers
            ).slots
        ]
        if dense and self.transport.rank == 0:
            _logger.warning(
                "Exchanged densely, as messages would cost more on %d workers: the "
                "stages of sparsity %s",
                workers,
                ", ".join(dense),
            )

    def _arena_shape(self, layout: layout_lib.Layout) -> list[int]:
        """Return the shape of u and v in this process."""
        return [layout.size]

    def _exchange(
        self,
        account: Account,
        gradients: list[Any],
        momentum: dgc.Momentum | None,
        subtract: bool,
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        config, variables = self.config, account.variables
        if not config.momentum_correction:
            momentum = None
        arena = self.arenas[account]
        if momentum is not None and momentum.factor and arena.state.velocity is None:
            raise ValueError(
                "The momentum of an optimizer must not be 0 at first and then change. "
                f"Received: momentum={momentum.factor}"
            )
        rest = [i for i in range(len(gradients)) if i not in arena.indices]

        def prepare(gradients: list[Any]) -> Any:
            gradients = list(gradients)
            for i in arena.indices:
                gradients[i] = tf.convert_to_tensor(gradients[i])
            others, scale = [gradients[i] for i in rest], tf.ones([])
            compressed = [gradients[i] for i in arena.indices]
            gradient = layout_lib.flatten(arena.layout, compressed)
            together = [gradient, *others]
            nonfinite = dgc.first_nonfinite(gradients, momentum, together)
            if config.clip_norm is not None:
                workers = self.transport.size
                scale = dgc.clip_scale(together, config.clip_norm, workers)
                others = [dgc.scaled(gradient, scale) for gradient in others]
            return others, nonfinite, gradient, scale

        others, nonfinite, gradient, scale = self._each(prepare, gradients)
        # Before any state changes all must know whether the step counts.
        flag = self._own_seat() * tf.cast(nonfinite, tf.float32)[..., tf.newaxis]
        (*reduced, flags), dense_size, dense_elements = self._sum_dense(
            [*others, flag],
            [*(variables[i] for i in rest), tf.zeros([self.transport.size])],
            account.name,
        )
        dense_elements -= self.transport.size
        ok = tf.reduce_all(flags == 0)
        if config.nonfinite == "raise":
            names = [*(v.name for v in variables), "the learning rate"]
            with tf.control_dependencies([_refuse(flags, arena.state.step, names)]):
                ok = tf.identity(ok)

        own = [variables[i] for i in arena.indices]
        subtract &= momentum is not None and all(v.dtype == tf.float32 for v in own)
        weights = own if subtract else None

        def compress() -> tuple[tf.Tensor, tf.Tensor]:
            peaks = arena.state.accumulate(gradient, scale, momentum)
            return self._compress(arena, peaks, weights, account.name)

        def nothing() -> tuple[tf.Tensor, tf.Tensor]:
            return tf.zeros([], tf.int64), tf.zeros([], tf.int64)

        size, elements = tf.cond(ok, compress, nothing)
        summed: list[Any] = [None] * len(gradients)
        for i, tensor in zip(rest, reduced, strict=True):
            summed[i] = tensor
        corrected = [momentum is not None and i not in rest for i in range(len(summed))]
        dtypes = [gradient.dtype for gradient in gradients]
        arena_sum = ArenaSum(arena.indices, dtypes, arena.layout, arena.state)
        exchanged = Exchanged(summed, corrected, ok, None if subtract else arena_sum)
        return exchanged, size + dense_size, elements + dense_elements

    def _each(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a pure function for every worker that this process is."""
        return fn(*args)

    def _own_ranks(self) -> Sequence[int]:
        """Return the ranks of the workers that this process is."""
        return [self.transport.rank]

    def _own_seat(self) -> tf.Tensor:
        """Return 1 in the places of these workers, shape [N]."""
        return tf.one_hot(self.transport.rank, self.transport.size)

    def _compress(
        self,
        arena: Arena,
        peaks: tf.Tensor,
        weights: Sequence[tf.Variable] | None,
        name: str,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sum over all workers; return the bytes and elements that this one sent."""
        stages = schedules.stages(self.config)
        step = arena.state.step.read_value()
        branches: list[Callable[[], Any]] = [
            functools.partial(
                self._stage, stage, arena, peaks, weights, step, f"{name}.{i}"
            )
            for i, stage in enumerate(stages)
        ]
        if len(branches) == 1:
            found = branches[0]()
        else:
            found = tf.switch_case(schedules.stage_index(step, stages), branches)
        arena.state.step.assign_add(1, read_value=False)
        return found

    def _stage(
        self,
        stage: schedules.Stage,
        arena: Arena,
        peaks: tf.Tensor,
        weights: Sequence[tf.Variable] | None,
        step: tf.Tensor,
        name: str,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """One step at one sparsity: select, send, keep; sum, or change the weights."""
        config, workers, layout = self.config, self.transport.size, arena.layout
        form = dgc.message_format(layout, stage.sparsity, config, workers)
        residual = arena.state.residual.read_value()
        send = functools.partial(
            dgc.send,
            form=form,
            layout=layout,
            sparsity=stage.sparsity,
            config=config,
            step=step,
        )
        message = self._each(send, residual, peaks)
        messages = self.transport.all_gather(message, f"{name}.message")
        counts, positions, values = receive(form, messages)
        if form.slots or not layout.size:
            for worker, rank in enumerate(self._own_ranks()):
                arena.state.keep(
                    worker, positions[rank], values[rank], config.momentum_masking
                )
            if weights is None:
                arena.state.sum_up(positions, values)
            else:
                arena.state.subtract(layout, weights, positions, values)
            elements = tf.cast(counts[self.transport.rank], tf.int64)
            arena.coverage.record(positions[self.transport.rank])
            size = form.bytes
        else:
            (summed,) = self.transport.all_reduce([residual], f"{name}.arena")
            with tf.control_dependencies([counts]):
                summed = tf.identity(summed)
            if weights is None:
                arena.state.total.assign(summed)
            else:
                arena.state.subtract_densely(layout, weights, summed)
            with tf.control_dependencies([summed]):
                # A stage that only runs dense because that is cheaper keeps momentum.
                arena.state.clear(config.momentum_masking and stage.sparsity == 0)
            elements = tf.constant(layout.elements, tf.int64)
            arena.coverage.record_all()
            size = form.bytes + 4 * layout.size
        return tf.constant(size, tf.int64), elements


def receive(
    form: packing.Format, messages: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Read the messages of all workers, shape [N, words].

    Returns:
        The number of elements of each, shape [N], int32; their positions, shape [N, K],
        int64, P for unused slots; and their values, shape [N, K], float32. They raise
        InvalidArgumentError where a message is damaged, or not of this step.
    """
    received = [packing.unpack(form, message) for message in tf.unstack(messages)]
    headers, positions, values = map(list, zip(*received, strict=True))
    floats = [
        packing.decoded(part, header.exponent)
        for part, header in zip(values, headers, strict=True)
    ]
    faults = packing.faults(form, messages, positions, floats)

    def stacked(parts: list[tf.Tensor], unused: Any) -> tf.Tensor:
        filled = [
            tf.pad(part, [[0, form.slots - tf.size(part)]], constant_values=unused)
            for part in parts
        ]
        return tf.ensure_shape(tf.stack(filled), [len(parts), form.slots])

    with tf.control_dependencies([_refuse_damaged(faults), _refuse_strangers(headers)]):
        counts = tf.stack([header.count for header in headers])
        return counts, stacked(positions, form.size), stacked(floats, 0.0)


def _refuse_damaged(faults: tf.Tensor) -> Any:
    """Raise InvalidArgumentError where a message is not one that can be sent."""
    rank = tf.argmax(tf.cast(faults > 0, tf.int32))
    what = tf.gather(tf.constant(packing.FAULTS), faults[rank])
    parts = ["The message of rank ", tf.strings.as_string(rank), " is damaged: ", what]
    return tf.debugging.Assert(tf.reduce_all(faults == 0), [tf.strings.join(parts)])


def _refuse_strangers(headers: Sequence[packing.Header]) -> Any:
    """Raise InvalidArgumentError where messages do not belong to the same step."""
    marks = tf.stack([[h.format, h.checksum, h.step] for h in headers])
    return tf.debugging.Assert(
        tf.reduce_all(marks == marks[0]),
        [
            "The workers are not in the same step of the same training. Message "
            "format, checksum of the layout and step, by rank:",
            marks,
        ],
        summarize=-1,
    )


def _refuse(flags: tf.Tensor, step: tf.Variable, names: list[str]) -> Any:
    """Raise InvalidArgumentError where a worker's gradient is not finite."""
    rank = tf.argmax(tf.cast(flags > 0, tf.int32))
    number = tf.clip_by_value(tf.cast(flags[rank], tf.int32), 0, len(names))
    name = tf.gather(tf.constant(["", *names]), number)
    return tf.debugging.Assert(
        tf.reduce_all(flags == 0),
        [
            "A gradient holds NaN or infinity; all workers stop, nothing of it was "
            "applied (DGCConfig(nonfinite='skip') leaves such steps out). Rank, step "
            "and variable:",
            rank,
            step.read_value(),
            name,
        ],
    )
