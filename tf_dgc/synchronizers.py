"""Exchange gradients: read state, call the pure step, call the transport, write state.

A synchronizer knows gradients, variables, state and a transport, and nothing of Keras
or Horovod. It has no mathematics of its own.

Axes: P arena elements, N workers.
"""

import abc
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import dgc, packing, schedules, sparsify
from tf_dgc import layout as layout_lib
from tf_dgc.config import DGCConfig
from tf_dgc.state import ArenaState, Counters, StepStats
from tf_dgc.transports import handshake
from tf_dgc.transports.base import Transport

_logger = logging.getLogger("tf_dgc")


class Exchanged(NamedTuple):
    """The result of one exchange."""

    gradients: list[Any]  # summed over the workers, each as it came in
    compressed: list[bool]  # per gradient: momentum is already in it
    apply: tf.Tensor | None  # shape [], bool: False where all skip; None is True


class Synchronizer(abc.ABC):
    """Exchanges the gradients of any number of optimizers over one transport.

    Keyed by `owner`: the first exchange of an owner compares its variables over all
    workers and creates its state, outside of the graph that is being traced.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._counters: dict[Hashable, Counters] = {}

    def exchange(
        self,
        owner: Hashable,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None = None,
    ) -> Exchanged:
        """Sum gradients over all workers, by whatever means.

        Args:
            owner: the optimizer, or what else these gradients belong to.
            gradients: tensors or IndexedSlices of static shape, none of them None.
            variables: what they belong to, of the same length: objects with a name,
                a shape and a dtype.
            momentum: what the caller leaves to the exchange.

        Returns:
            Gradients of the same shapes, the same bits on every worker.

        Raises:
            ValueError: the workers' variables differ.
        """
        key = (owner, tuple(v.name for v in variables))
        if key not in self._counters:
            with tf.init_scope():
                listed = {
                    f"variable {i}": f"{v.dtype.name} {v.shape}"
                    for i, v in enumerate(variables)
                }
                handshake.agree(self.transport, "trained variables", listed)
                self._counters[key] = Counters()
        name = f"optimizer{list(self._counters).index(key)}"
        elements = sum(v.shape.num_elements() for v in variables)
        size = sum(v.shape.num_elements() * v.dtype.size for v in variables)
        exchanged, sent_bytes, sent_elements = self._exchange(
            name, list(gradients), variables, momentum
        )
        self._counters[key].record(
            tf.stack([tf.cast(sent_bytes, tf.int64), size, sent_elements, elements])
        )
        return exchanged

    @abc.abstractmethod
    def _exchange(
        self,
        name: str,
        gradients: list[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None,
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        """Exchange; return also the bytes and elements that this worker sent."""

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        return tf.zeros([])

    def stats(self, total: bool = False) -> StepStats:
        """Return this worker's figures of the last step, or summed over all steps."""
        counted = [c.total if total else c.last for c in self._counters.values()]
        sent, dense, sent_elements, dense_elements = tf.unstack(
            sum(counted, tf.zeros([4], tf.int64)), 4
        )
        return StepStats(
            sent, dense, sent_elements, dense_elements, self.residual_norm()
        )

    def _sum_dense(self, gradients: list[Any], name: str) -> tuple[list[Any], Any, Any]:
        """Sum tensors in one fused reduction, IndexedSlices by gathering them."""
        dense = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor)]
        summed = list(gradients)
        reduced = self.transport.all_reduce(
            [gradients[i] for i in dense], f"{name}.dense"
        )
        for i, tensor in zip(dense, reduced, strict=True):
            summed[i] = tensor
        elements: Any = sum(gradients[i].shape.num_elements() for i in dense)
        size: Any = sum(
            gradients[i].shape.num_elements() * gradients[i].dtype.size for i in dense
        )
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                summed[i] = sum_slices(self.transport, gradient, f"{name}.slices{i}")
                count = tf.size(gradient.values, tf.int64)
                elements += count
                size += count * gradient.dtype.size
                size += (
                    tf.size(gradient.indices, tf.int64) * gradient.indices.dtype.size
                )
        return summed, tf.cast(size, tf.int64), tf.cast(elements, tf.int64)


def sum_slices(
    transport: Transport, slices: tf.IndexedSlices, name: str
) -> tf.IndexedSlices:
    """Sum IndexedSlices over all workers; repeated indices are merged.

    Args:
        transport: N workers.
        slices: values [C, ...] and indices [C]; C may differ between workers.
        name: of the collectives.

    Returns:
        IndexedSlices without repeated indices, the same on every worker.
    """
    values = transport.all_gather_ragged(slices.values, f"{name}.values")
    indices = transport.all_gather_ragged(slices.indices, f"{name}.indices")
    unique, position = tf.unique(indices)
    values = tf.math.unsorted_segment_sum(values, position, tf.size(unique))
    return tf.IndexedSlices(values, unique, slices.dense_shape)


class Dense(Synchronizer):
    """Plain synchronous data parallelism."""

    def _exchange(
        self,
        name: str,
        gradients: list[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None,
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        summed, size, elements = self._sum_dense(gradients, name)
        return Exchanged(summed, [False] * len(summed), None), size, elements


class _Arena(NamedTuple):
    name: str  # of the owner, for the collectives
    indices: list[int]  # of the compressed among all gradients
    layout: layout_lib.Layout
    state: ArenaState


class DeepGradientCompression(Synchronizer):
    """Deep Gradient Compression of the large tensors, the small ones dense."""

    def __init__(self, transport: Transport, config: DGCConfig) -> None:
        super().__init__(transport)
        self.config = config
        self._arenas: dict[str, _Arena] = {}

    def residual_norm(self) -> tf.Tensor:
        """Return the Euclidean norm of what is kept back, shape [], float32."""
        residuals = [arena.state.residual for arena in self._arenas.values()]
        return tf.linalg.global_norm(residuals) if residuals else tf.zeros([])

    def _arena(
        self, name: str, variables: Sequence[Any], with_velocity: bool
    ) -> _Arena:
        if name not in self._arenas:
            indices = [
                i
                for i, v in enumerate(variables)
                if layout_lib.is_compressed(
                    v.shape.as_list(), v.dtype, self.config.min_elements
                )
            ]
            layout = layout_lib.build(
                [(variables[i].name, variables[i].shape.as_list()) for i in indices]
            )
            state = ArenaState(layout, with_velocity, self.transport.device)
            self._arenas[name] = _Arena(name, indices, layout, state)
        return self._arenas[name]

    def _exchange(
        self,
        name: str,
        gradients: list[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None,
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        if not self.config.momentum_correction:
            momentum = None
        arena = self._arena(name, variables, momentum is not None)
        nonfinite = first_nonfinite(gradients)
        if self.config.clip_norm is not None:
            gradients = dgc.clip(gradients, self.config.clip_norm, self.transport.size)
        summed, ok, size, elements = self._compress(
            arena, gradients, nonfinite, momentum, [v.name for v in variables]
        )
        chosen = set(arena.indices)
        rest = [i for i in range(len(gradients)) if i not in chosen]
        reduced, dense_size, dense_elements = self._sum_dense(
            [gradients[i] for i in rest], name
        )
        result: list[Any] = [None] * len(gradients)
        for i, gradient in zip(rest, reduced, strict=True):
            result[i] = gradient
        for i, gradient in zip(
            arena.indices, layout_lib.unflatten(arena.layout, summed), strict=True
        ):
            result[i] = tf.cast(gradient, gradients[i].dtype)
        compressed = [i in chosen and momentum is not None for i in range(len(result))]
        exchanged = Exchanged(result, compressed, ok)
        return exchanged, size + dense_size, elements + dense_elements

    def _compress(
        self,
        arena: _Arena,
        gradients: list[Any],
        nonfinite: tf.Tensor,
        momentum: dgc.Momentum | None,
        names: list[str],
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the summed arena [P], whether to go on, bytes and elements sent."""
        stages = schedules.stages(self.config)
        step = arena.state.step.read_value()
        gradient = layout_lib.flatten(
            arena.layout, [tf.convert_to_tensor(gradients[i]) for i in arena.indices]
        )
        before = arena.state.read()
        state = dgc.accumulate(before, gradient, momentum)
        branches: list[Callable[[], Any]] = [
            functools.partial(self._stage, i, stage, arena, state, step, nonfinite)
            for i, stage in enumerate(stages)
        ]
        if len(branches) == 1:
            flags, summed, after, size, elements = branches[0]()
        else:
            index = schedules.stage_index(step, stages)
            flags, summed, after, size, elements = tf.switch_case(index, branches)
        ok = tf.reduce_all(flags == 0)
        if self.config.nonfinite == "raise":
            with tf.control_dependencies([_refuse_nonfinite(flags, step, names)]):
                ok = tf.identity(ok)
        tf.cond(ok, lambda: _write(arena.state, after), lambda: None)
        return summed, ok, size, elements

    def _stage(
        self,
        index: int,
        stage: schedules.Stage,
        arena: _Arena,
        state: dgc.State,
        step: tf.Tensor,
        nonfinite: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, dgc.State, tf.Tensor, tf.Tensor]:
        """One step at one sparsity: select, send, sum, keep."""
        layout, config = arena.layout, self.config
        form = message_format(layout, stage.sparsity, config, self.transport.size)
        selection = dgc.Selection(
            tf.zeros([0], tf.int64), tf.zeros([0], form.value_dtype)
        )
        if form.slots:
            selection = dgc.select(state, layout, stage.sparsity, config, step)
        checksum = layout_lib.checksum(layout)
        message = packing.pack(
            form, *selection, checksum=checksum, step=step, nonfinite=nonfinite
        )
        messages = self.transport.all_gather(message, f"{arena.name}.message{index}")
        received = [
            packing.unpack(form, messages[rank]) for rank in range(self.transport.size)
        ]
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
            (summed,) = self.transport.all_reduce(
                [state.residual], f"{arena.name}.arena{index}"
            )
            after = dgc.keep_nothing(state, config.momentum_masking)
            elements = tf.constant(layout.elements, tf.int64)
            size = form.bytes + 4 * layout.size
        return flags, summed, after, tf.constant(size, tf.int64), elements


def message_format(
    layout: layout_lib.Layout, sparsity: float, config: DGCConfig, workers: int
) -> packing.Format:
    """Choose the form of a stage's message.

    Where a worker would receive more than in a ring all-reduce of float32, 8 bytes per
    element, the message is a mere header and the arena is reduced densely.

    Args:
        layout: of the arena.
        sparsity: of the stage.
        config: `value_dtype` counts.
        workers: N.

    Returns:
        A format of no slots where dense is cheaper.
    """
    slots = sum(sparsify.slots_per_segment(layout, sparsity))
    form = packing.make_format(slots, layout.size, config.value_dtype)
    if sparsity == 0 or workers * form.bytes >= 8 * layout.elements:
        return packing.make_format(0, layout.size, config.value_dtype)
    return form


def first_nonfinite(gradients: Sequence[Any]) -> tf.Tensor:
    """Return 0, or the index + 1 of the first gradient that is not finite, int32."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    bad = tf.stack([tf.reduce_any(~tf.math.is_finite(v)) for v in values])
    first = tf.argmax(tf.cast(bad, tf.int32), output_type=tf.int32) + 1
    return tf.where(tf.reduce_any(bad), first, 0)


def _refuse_nonfinite(flags: tf.Tensor, step: tf.Tensor, names: list[str]) -> Any:
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
            step,
            name,
        ],
    )


def _write(state: ArenaState, after: dgc.State) -> None:
    state.write(after)
    state.step.assign_add(1)
