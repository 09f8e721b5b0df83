"""The largest elements are exchanged, the rest is kept for later.

Axes: P arena elements, N workers.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import dgc, packing, schedules, sparsify
from tf_dgc import layout as layout_lib
from tf_dgc.config import DGCConfig
from tf_dgc.state import ArenaState
from tf_dgc.synchronizers.base import Account, Exchanged, Synchronizer
from tf_dgc.transports.base import Transport


class Arena(NamedTuple):
    """The compressed tensors among an owner's variables."""

    indices: list[int]
    layout: layout_lib.Layout
    state: ArenaState


class DeepGradientCompression(Synchronizer):
    """Deep Gradient Compression of the large tensors, the small ones dense."""

    def __init__(self, transport: Transport, config: DGCConfig) -> None:
        super().__init__(transport)
        self.config = config
        self.arenas: weakref.WeakKeyDictionary[Account, Arena] = (
            weakref.WeakKeyDictionary()
        )

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        kept = [self.arenas[account].state.residual for account in self.accounts()]
        return tf.linalg.global_norm(kept) if kept else tf.zeros([])

    def _make_arena(self, variables: Sequence[Any], with_velocity: bool) -> Arena:
        shapes = [v.shape.as_list() for v in variables]
        indices = [
            i
            for i, v in enumerate(variables)
            if layout_lib.is_compressed(shapes[i], v.dtype, self.config.min_elements)
        ]
        layout = layout_lib.build([(variables[i].name, shapes[i]) for i in indices])
        state = ArenaState(layout, with_velocity, self.transport.device)
        return Arena(indices, layout, state)

    def _exchange(
        self,
        account: Account,
        gradients: list[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None,
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        if not self.config.momentum_correction:
            momentum = None
        if account not in self.arenas:
            self.arenas[account] = self._make_arena(variables, momentum is not None)
        arena = self.arenas[account]
        nonfinite = dgc.first_nonfinite(gradients)
        if self.config.clip_norm is not None:
            gradients = dgc.clip(gradients, self.config.clip_norm, self.transport.size)
        summed, flags, size, elements = self._compress(
            arena, gradients, nonfinite, momentum, account.name
        )
        ok = tf.reduce_all(flags == 0)
        if self.config.nonfinite == "raise":
            names = [v.name for v in variables]
            with tf.control_dependencies([_refuse(flags, arena.state.step, names)]):
                ok = tf.identity(ok)
        result: list[Any] = [None] * len(gradients)
        for i, gradient in zip(
            arena.indices, layout_lib.unflatten(arena.layout, summed), strict=True
        ):
            result[i] = tf.cast(gradient, gradients[i].dtype)
        rest = [i for i in range(len(gradients)) if i not in arena.indices]
        reduced, dense_size, dense_elements = self._sum_dense(
            [gradients[i] for i in rest], account.name
        )
        for i, gradient in zip(rest, reduced, strict=True):
            result[i] = gradient
        corrected = [momentum is not None and i not in rest for i in range(len(result))]
        exchanged = Exchanged(result, corrected, ok)
        return exchanged, size + dense_size, elements + dense_elements

    def _compress(
        self,
        arena: Arena,
        gradients: list[Any],
        nonfinite: tf.Tensor,
        momentum: dgc.Momentum | None,
        name: str,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the summed arena [P], flags of all workers [N], bytes and elements.

        Where a flag is set, no state changes.
        """
        stages = schedules.stages(self.config)
        step = arena.state.step.read_value()
        gradient = layout_lib.flatten(
            arena.layout, [tf.convert_to_tensor(gradients[i]) for i in arena.indices]
        )
        state = dgc.accumulate(arena.state.read(), gradient, momentum)
        branches: list[Callable[[], Any]] = [
            functools.partial(
                self._stage, stage, arena.layout, state, step, nonfinite, f"{name}.{i}"
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
        layout: layout_lib.Layout,
        state: dgc.State,
        step: tf.Tensor,
        nonfinite: tf.Tensor,
        name: str,
    ) -> tuple[tf.Tensor, tf.Tensor, dgc.State, tf.Tensor, tf.Tensor]:
        """One step at one sparsity: select, send, sum, keep."""
        config, workers = self.config, self.transport.size
        form = dgc.message_format(layout, stage.sparsity, config, workers)
        if form.slots:
            selection = dgc.select(state, layout, stage.sparsity, config, step)
        else:
            selection = dgc.Selection(
                tf.zeros([0], tf.int64), tf.zeros([0], form.value_dtype)
            )
        checksum = layout_lib.checksum(layout)
        message = packing.pack(
            form, *selection, checksum=checksum, step=step, nonfinite=nonfinite
        )
        messages = self.transport.all_gather(message, f"{name}.message")
        received = [packing.unpack(form, messages[rank]) for rank in range(workers)]
        with tf.control_dependencies([_refuse_strangers([h for h, _, _ in received])]):
            flags = tf.stack([header.nonfinite for header, _, _ in received])
        if form.slots or not layout.size:
            summed = sparsify.scatter_sum(
                [positions for _, positions, _ in received],
                [tf.cast(values, tf.float32) for _, _, values in received],
                layout.size,
            )
            after = dgc.keep(state, selection, config.momentum_masking)
            elements, size = tf.size(selection.positions, tf.int64), form.bytes
        else:
            (summed,) = self.transport.all_reduce([state.residual], f"{name}.arena")
            # A stage that only runs dense because that is cheaper keeps its momentum.
            masking = config.momentum_masking and stage.sparsity == 0
            after = dgc.keep_nothing(state, masking)
            elements = tf.constant(layout.elements, tf.int64)
            size = form.bytes + 4 * layout.size
        return flags, summed, after, tf.constant(size, tf.int64), elements


def _refuse_strangers(headers: list[packing.Header]) -> Any:
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
