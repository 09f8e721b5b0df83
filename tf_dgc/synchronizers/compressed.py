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

from tf_dgc import dgc, packing, schedules, sparsify
from tf_dgc import layout as layout_lib
from tf_dgc.config import DGCConfig
from tf_dgc.state import ArenaState, Coverage, TensorStats
from tf_dgc.synchronizers.base import Account, Exchanged, Synchronizer
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
        self, account: Account, gradients: list[Any], momentum: dgc.Momentum | None
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

        def prepare(gradients: list[Any], state: dgc.State) -> Any:
            gradients = list(gradients)
            for i in arena.indices:
                gradients[i] = tf.convert_to_tensor(gradients[i])
            nonfinite = dgc.first_nonfinite(gradients, momentum)
            if config.clip_norm is not None:
                gradients = dgc.clip(gradients, config.clip_norm, self.transport.size)
            compressed = [gradients[i] for i in arena.indices]
            gradient = layout_lib.flatten(arena.layout, compressed)
            state = dgc.accumulate(state, gradient, momentum)
            return [gradients[i] for i in rest], nonfinite, state

        remaining, nonfinite, state = self._each(prepare, gradients, arena.state.read())
        summed, flags, size, elements = self._compress(
            arena, state, nonfinite, account.name
        )
        ok = tf.reduce_all(flags == 0)
        if config.nonfinite == "raise":
            names = [*(v.name for v in variables), "the learning rate"]
            with tf.control_dependencies([_refuse(flags, arena.state.step, names)]):
                ok = tf.identity(ok)
        result: list[Any] = [None] * len(gradients)
        for i, gradient in zip(
            arena.indices, layout_lib.unflatten(arena.layout, summed), strict=True
        ):
            result[i] = tf.cast(gradient, gradients[i].dtype)
        reduced, dense_size, dense_elements = self._sum_dense(
            remaining, [variables[i] for i in rest], account.name
        )
        for i, gradient in zip(rest, reduced, strict=True):
            result[i] = gradient
        corrected = [momentum is not None and i not in rest for i in range(len(result))]
        exchanged = Exchanged(result, corrected, ok)
        return exchanged, size + dense_size, elements + dense_elements

    def _each(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a pure function for every worker that this process is."""
        return fn(*args)

    def _compress(
        self, arena: Arena, state: dgc.State, nonfinite: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the summed arena [P], flags of all workers [N], bytes and elements.

        Where a flag is set, no state changes.
        """
        stages = schedules.stages(self.config)
        step = arena.state.step.read_value()
        branches: list[Callable[[], Any]] = [
            functools.partial(
                self._stage, stage, arena, state, step, nonfinite, f"{name}.{i}"
            )
            for i, stage in enumerate(stages)
        ]
        if len(branches) == 1:
            flags, summed, after, size, elements = branches[0]()
        else:
            index = schedules.stage_index(step, stages)
            flags, summed, after, size, elements = tf.switch_case(index, branches)
        finite = tf.reduce_all(flags == 0)
        tf.cond(finite, lambda: arena.state.advance(after), lambda: None)
        return summed, flags, size, elements

    def _stage(
        self,
        stage: schedules.Stage,
        arena: Arena,
        state: dgc.State,
        step: tf.Tensor,
        nonfinite: tf.Tensor,
        name: str,
    ) -> tuple[tf.Tensor, tf.Tensor, dgc.State, tf.Tensor, tf.Tensor]:
        """One step at one sparsity: select, send, sum, keep."""
        config, workers, layout = self.config, self.transport.size, arena.layout
        form = dgc.message_format(layout, stage.sparsity, config, workers)
        send = functools.partial(
            dgc.send,
            form=form,
            layout=layout,
            sparsity=stage.sparsity,
            config=config,
            step=step,
        )
        message, after = self._each(send, state, nonfinite)
        messages = self.transport.all_gather(message, f"{name}.message")
        received = [packing.unpack(form, messages[rank]) for rank in range(workers)]
        headers, positions, values = zip(*received, strict=True)
        with tf.control_dependencies([_refuse_strangers(headers)]):
            flags = tf.stack([header.nonfinite for header in headers])
        if form.slots or not layout.size:
            floats = [
                packing.decoded(part, header.exponent)
                for part, header in zip(values, headers, strict=True)
            ]
            summed = sparsify.scatter_sum(positions, floats, layout.size)
            elements = tf.cast(headers[self.transport.rank].count, tf.int64)
            arena.coverage.record(positions[self.transport.rank])
            size = form.bytes
        else:
            (summed,) = self.transport.all_reduce([state.residual], f"{name}.arena")
            elements = tf.constant(layout.elements, tf.int64)
            arena.coverage.record_all()
            size = form.bytes + 4 * layout.size
        return flags, summed, after, tf.constant(size, tf.int64), elements


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
    name = tf.gather(tf.constant(["", *names]), flags[rank])
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
