"""Parameter averaging: what happens in a round, after local steps. Pure functions.

Axes: N workers. w parameters of a worker; a the anchor, the parameters that all had
when the period began; H the period.

    H times   w <- optimizer(w, N * g)        g is divided by N, as Keras does
    plain     w <- mean(w)
    outer     g <- mean(a - w),  a <- outer_optimizer(a, g),  w <- a

The mean is over the workers that took a step since the last round. Where the workers of
a site take steps together, w is the site's, N the sites, and the mean is weighed by the
rows of these steps.

References:
    Stich: Local SGD Converges Fast and Communicates Little, ICLR 2019,
    https://arxiv.org/abs/1805.09767
    Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020
    (post-local SGD), https://arxiv.org/abs/1808.07217
    Douillard et al.: DiLoCo, 2023 (outer optimizer), https://arxiv.org/abs/2311.08105
    Wang, Joshi: Adaptive Communication Strategies to Achieve the Best Error-Runtime
    Trade-off in Local-Update SGD (AdaComm), MLSys 2019,
    https://arxiv.org/abs/1810.08313
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.values import first_true, widened


class RoundHeader(NamedTuple):
    """Header of a round: what a worker tells the others at its start, or all of them.

    Each of shape [], float64; of all workers, [N].
    """

    account: Any  # whose parameters
    round: Any  # number of the round
    moved: Any  # local steps since the last one
    unsettled: Any  # steps since statistics were averaged
    done: Any  # 1 where the worker has come to the end of its data
    nonfinite: Any  # 0, or the number of the first parameter that is not finite, from 1
    loss: Any  # what it saw last; NaN where it saw none
    rate: Any = math.nan  # learning rate of its last step; NaN where it may differ
    read0: Any = 0.0  # numbers of the batches of these local steps, added up
    read1: Any = 0.0
    read2: Any = 0.0
    read3: Any = 0.0
    stops: Any = 0.0  # 1 where the worker ends its training
    rows: Any = 1.0  # of these local steps, of a site; what its change counts


READ = "read0", "read1", "read2", "read3"  # fields of a header


def reads(headers: RoundHeader) -> tf.Tensor:
    """Return the numbers of batches of workers that took as many steps as most.

    Of others zeros are told as those of the first worker that took as many.

    Returns:
        shape [N, 4], float32.
    """
    found = tf.stack([getattr(headers, name) for name in READ], axis=1)
    moved = headers.moved
    most = moved == tf.reduce_max(moved)
    first = found[first_true(most)]
    return tf.cast(tf.where(most[:, tf.newaxis], found, first), tf.float32)


def write(header: RoundHeader) -> tf.Tensor:
    """Return a header as a tensor, shape [14], float64."""
    return tf.stack([tf.cast(field, tf.float64) for field in header])


def read(gathered: tf.Tensor) -> RoundHeader:
    """Return the headers of all workers, given in shape [N, 14]."""
    return RoundHeader(*tf.unstack(gathered, len(RoundHeader._fields), axis=1))


def damaged(headers: RoundHeader, parameters: int) -> tf.Tensor:
    """Tell which workers' headers no worker writes: shape [N], bool.

    Args:
        headers: of all workers.
        parameters: how many a worker has.
    """
    most = {"done": 1.0, "stops": 1.0, "nonfinite": float(parameters)}
    wrong = [
        ~((field >= 0.0) & (field <= most.get(name, 2.0**53)))
        | ((field % 1.0 != 0.0) & (name != "rows"))
        for name, field in headers._asdict().items()
        if name not in ("loss", "rate", *READ)  # which may be anything
    ]
    return tf.reduce_any(tf.stack(wrong), axis=0)


def count(moved: tf.Tensor) -> tf.Tensor:
    """Return over how many workers the mean is, at least 1: shape [], float64."""
    return tf.maximum(tf.reduce_sum(tf.cast(moved > 0, tf.float64)), 1.0)


def divisor(headers: RoundHeader, rows: Any) -> tf.Tensor:
    """Return by what a worker's change is divided, so that the sum is the mean.

    Args:
        headers: of all workers.
        rows: of this one, as its header tells them: shape [].

    Returns:
        shape [], float64: how many workers have moved, where all have as many rows.
    """
    rows = tf.cast(rows, tf.float64)
    total = tf.reduce_sum(tf.where(headers.moved > 0, headers.rows, 0.0))
    known = (total > 0) & (rows > 0)
    return tf.where(known, total / tf.where(known, rows, 1.0), 1.0)


def other_rate(headers: RoundHeader) -> tuple[tf.Tensor, tf.Tensor]:
    """Find who took steps at another learning rate than the first of those that did.

    Returns:
        Whether there is such a worker, shape [], bool; and its rank, shape [], int64.
    """
    known = (headers.moved > 0) & tf.math.is_finite(headers.rate)
    first = headers.rate[first_true(known)]
    other = known & (headers.rate != first)
    return tf.reduce_any(other), first_true(other)


def shares(
    values: Sequence[tf.Tensor], moved: tf.Tensor, divisor: tf.Tensor
) -> list[tf.Tensor]:
    """Return this worker's part of a mean.

    Args:
        values: of any float type.
        moved: local steps of this worker since the last round, shape [].
        divisor: shape [], float64.

    Returns:
        The values, divided, in float32 where they have 16 bits, of which a division
        would lose some; zero where the worker has not moved.
    """
    wide = [widened(value) for value in values]
    return [
        tf.where(moved > 0, value / tf.cast(divisor, value.dtype), tf.zeros_like(value))
        for value in wide
    ]


def outer_gradients(
    anchor: Sequence[tf.Tensor], own: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return a - w for each pair of tensors of the same shape and type, widened."""
    return [widened(a) - widened(w) for a, w in zip(anchor, own, strict=True)]


def distance(own: Sequence[tf.Tensor], agreed: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the Euclidean norm of the difference of all tensors: shape [], float32."""
    parts = [
        tf.cast(a, tf.float32) - tf.cast(b, tf.float32)
        for a, b in zip(own, agreed, strict=True)
    ]
    return tf.linalg.global_norm(parts) if parts else tf.zeros([])


def mean_loss(headers: RoundHeader) -> tf.Tensor:
    """Return the mean loss of the workers that have moved: shape [], float64."""
    seen = tf.where(headers.moved > 0, headers.loss, 0.0)
    return tf.reduce_sum(seen) / count(headers.moved)


def next_period(
    period: tf.Tensor, loss: tf.Tensor, first: tf.Tensor, least: int, most: int
) -> tf.Tensor:
    """Choose the period by the rule of AdaComm, ceil(sqrt(F / F0) * H0), bounded.

    It is long while the loss is high and steps are coarse, and shortens as the loss
    falls and the noise between the workers begins to count.

    Args:
        period: the present one, shape [], int64.
        loss: F, of the last period, shape [], float64.
        first: F0, of the first period, shape [], float64.
        least: floor of the period.
        most: H0, which is also its ceiling.

    Returns:
        shape [], int64; the present one where a loss is not finite.
    """
    wanted = tf.math.ceil(tf.sqrt(tf.maximum(loss / first, 0.0)) * most)
    bounded = tf.clip_by_value(wanted, float(least), float(most))
    return tf.where(tf.math.is_finite(wanted), tf.cast(bounded, tf.int64), period)
