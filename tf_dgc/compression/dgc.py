"""The step of Deep Gradient Compression. Pure functions.

Axes: P arena elements, N workers, K message slots. The paper's letters: g gradient,
u velocity (local momentum), v residual (accumulated velocity), m momentum, lr learning
rate, lr' that of the step before. As in Keras, and other than in the paper, lr is
inside the velocity: what waits keeps the rate of its own step. Only where the rate
falls to half or less, as in schedules of steps, what waits goes on at the new one, the
paper's rule; u goes on as in Keras. At a constant rate the two are the same.

    v    <- v * lr / lr'                            where lr <= lr' / 2
    g    <- lr * clip(g, clip_norm * N**-0.5)
    u    <- m * u + g                     Nesterov: u <- m * (u + g)
    v    <- v + u                                   v <- v + u + g
    S    <- the elements of v over their tensor's threshold
    send    v[S]
    v[S] <- v[S] - sent,  u[S] <- 0       0 but for the rounding of the sent values

Where all of v is sent, u stays: it is synchronous SGD with momentum.

Of other optimizers what accumulates is their own step along the local gradient, as of
one worker, which leads from the weights w to w', with slots of this worker's own:

    v    <- v + (w - w') / N,  w' of N * clip(g, clip_norm * N**-0.5)

References:
    Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018, algorithms 1 to 4,
    https://arxiv.org/abs/1712.01887
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.compression import arena, coarse, message, selection
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.values import half_square, unless


class Momentum(NamedTuple):
    """SGD's step, which is taken over from the optimizer."""

    factor: float  # m, in [0, 1]
    nesterov: bool
    learning_rate: tf.Tensor | float = 1.0  # lr, shape []
    slots: Sequence[Any] = ()  # of each variable, what SGD has kept so far; or none


class ArenaState(NamedTuple):
    """State of a worker that is kept from step to step."""

    velocity: tf.Tensor | None  # u, shape [P], float32; None without momentum
    residual: tf.Tensor  # v, shape [P], float32


class Selection(NamedTuple):
    """Elements that a worker sends."""

    positions: tf.Tensor  # shape [C], int64, ascending, C <= K
    values: tf.Tensor  # shape [C], the message's value type: v[S] * 2**exponent
    exponent: tf.Tensor  # shape [], int32
    scales: tf.Tensor | None = None  # shape [T], bfloat16, where values are codes


def clip_scale(gradients: Sequence[Any], clip_norm: float, workers: int) -> tf.Tensor:
    """Return what clips local gradients, by the norm of all of them together.

    The exponent -1/2 belongs to gradients that are already divided by the number of
    workers, as Keras does with the loss: their sum is the mean gradient.

    Args:
        gradients: tensors or IndexedSlices.
        clip_norm: the norm allowed to the mean gradient.
        workers: N.

    Returns:
        The factor that brings their norm down to `clip_norm * N**-0.5`, or 1; shape [],
        float32.
    """
    if not gradients:
        return tf.ones([])
    # Dense, as the rows of IndexedSlices may repeat themselves.
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
    half = half_square(dense)

    def wide() -> tf.Tensor:
        # The squares of float32 do not overflow in float64.
        return tf.linalg.global_norm([tf.cast(part, tf.float64) for part in dense])

    norm = unless(
        tf.math.is_finite(half), wide, lambda: tf.sqrt(2.0 * tf.cast(half, tf.float64))
    )
    limit = tf.constant(clip_norm * workers**-0.5, tf.float64)
    return tf.cast(limit / tf.maximum(norm, limit), tf.float32)


def fall(rate: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    """Return by what v is multiplied at a learning rate, after another one.

    Args:
        rate: lr, shape [], float32.
        last: that of the step before; 0 where there was none.

    Returns:
        lr / last where that is 1/2 or less, but for a rate of 0, which may be a pause;
        else 1.
    """
    fell = (rate > 0) & (rate <= 0.5 * last)
    return tf.where(fell, tf.math.divide_no_nan(rate, last), tf.ones_like(rate))


def accumulate(
    state: ArenaState,
    gradient: tf.Tensor,
    momentum: Momentum | None,
    scale: tf.Tensor | float = 1.0,
) -> ArenaState:
    """Add a local gradient, with momentum correction where there is momentum.

    Args:
        state: u and v.
        gradient: g, shape [P], float32.
        momentum: None accumulates the gradient itself, without the learning rate.
        scale: of the gradient, as `clip_scale` returns it.

    Returns:
        The state with u and v as at the top of this module.
    """
    u, v = state
    gradient = tf.convert_to_tensor(scale)[..., tf.newaxis] * gradient
    if momentum is None:
        return ArenaState(u, v + gradient)
    gradient = tf.cast(momentum.learning_rate, tf.float32) * gradient
    if u is None:
        return ArenaState(u, v + gradient)
    if momentum.nesterov:
        u = momentum.factor * (u + gradient)
        return ArenaState(u, v + u + gradient)
    u = momentum.factor * u + gradient
    return ArenaState(u, v + u)


def keep(state: ArenaState, where: tf.Tensor, sent: tf.Tensor) -> ArenaState:
    """Take what was sent out of v, and clear u there: sent + kept = accumulated.

    Args:
        state: u and v; without u there is no momentum factor masking.
        where: indices of v, shape [K, 1], or [K, 2] for v of shape [N, P], without
            repetition. Those outside of v, of unused slots, count under XLA only, which
            leaves them out.
        sent: shape [K], float32.
    """
    u, v = state
    if u is not None:
        u = tf.tensor_scatter_nd_update(u, where, tf.zeros_like(sent))
    return ArenaState(u, tf.tensor_scatter_nd_sub(v, where, sent))


def select(
    residual: tf.Tensor,
    peaks: tf.Tensor,
    layout: Layout,
    plan: selection.Plan,
    config: DGCConfig,
    step: tf.Tensor,
) -> Selection:
    """Select what to send of the residual.

    Args:
        residual: v after `accumulate`.
        peaks: `selection.peaks` of it.
        layout: of the arena.
        plan: of the present stage.
        config: `value_dtype` counts.
        step: shape [], int64.

    Returns:
        The selection, its values rounded to `config.value_dtype` but never to infinity;
        float16 with the exponent that brings the largest near the end of its range,
        "sign" and "log4" as codes.
    """
    threshold = selection.thresholds(residual, peaks, layout, plan, step)
    positions, values = selection.select(
        residual, peaks, layout, threshold, plan.slots, step
    )
    return encoded(positions, values, layout, config.value_dtype)


def encoded(
    positions: tf.Tensor,
    values: tf.Tensor,
    layout: Layout,
    value_type: str,
    used: tf.Tensor | None = None,
) -> Selection:
    """Round elements of the arena to what a message holds.

    Args:
        positions: shape [C], int64, ascending.
        values: shape [C], float32.
        layout: of the arena.
        value_type: as in `DGCConfig`.
        used: see `coarse.encode`; values are 0 where it is False.
    """
    exponent = tf.zeros([], tf.int32)
    if value_type in coarse.BITS:
        begins = tuple(segment.offset for segment in layout.segments)
        tensors = coarse.tensors_of(begins, positions)
        bits = coarse.BITS[value_type]
        codes, scales = coarse.encode(bits, values, tensors, len(begins), used)
        return Selection(positions, codes, exponent, scales)
    value_dtype = tf.as_dtype(value_type)
    if value_dtype == tf.float16:
        largest = tf.maximum(tf.reduce_max(tf.abs(values)), selection.SMALLEST)
        binade = tf.cast(tf.floor(tf.math.log(largest) / math.log(2)), tf.int32)
        most = message.MAX_EXPONENT
        exponent = tf.clip_by_value(14 - binade, -most, most)
        values *= message.power_of_two(exponent)
    if value_dtype != tf.float32:
        values = coarse.rounded(values, value_dtype)
    return Selection(positions, values, exponent)


def decoded(chosen: Selection, layout: Layout, value_type: str) -> tf.Tensor:
    """Return what a selection's values stand for, shape [C], float32."""
    positions, values, exponent, scales = chosen
    if scales is None:
        return message.decoded(values, exponent)
    begins = tuple(segment.offset for segment in layout.segments)
    tensors = coarse.tensors_of(begins, positions)[tf.newaxis]
    bits = coarse.BITS[value_type]
    rows = values[tf.newaxis], tensors, scales[tf.newaxis]
    return coarse.decode(bits, *rows)[0]


def send(
    residual: tf.Tensor,
    peaks: tf.Tensor,
    *,
    form: message.Format,
    layout: Layout,
    sparsities: Sequence[float],
    config: DGCConfig,
    step: tf.Tensor,
    stage: tf.Tensor | None = None,
) -> tf.Tensor:
    """Write this worker's message of a step.

    Args:
        residual: v after `accumulate`.
        peaks: `selection.peaks` of it.
        form: of the message, at the present one of some stages.
        layout: of the arena.
        sparsities: of these stages.
        config: `sample_fraction` and `value_dtype` count.
        step: shape [], int64.
        stage: the number of the present one, shape [], int32; None where there is one.

    Returns:
        The message, shape [form.words], int32.
    """
    plans = [
        selection.plan(layout, sparsity, config.sample_fraction)
        for sparsity in sparsities
    ]
    plan = selection.one_of(plans, stage)
    chosen = select(residual, peaks, layout, plan, config, step)
    return _packed(form, layout, chosen, step)


def header(form: message.Format, layout: Layout, step: tf.Tensor) -> tf.Tensor:
    """Write a message of a form without slots, shape [form.words], int32."""
    nothing = tf.zeros([0], tf.int64), tf.zeros([0], form.value_dtype)
    return _packed(form, layout, Selection(*nothing, tf.zeros([], tf.int32)), step)


def _packed(
    form: message.Format, layout: Layout, chosen: Selection, step: tf.Tensor
) -> tf.Tensor:
    checksum = arena.checksum(layout)
    return message.pack(form, *chosen, checksum=checksum, step=step)
