"""Weights of workers' gradients in their sum, gathered in the reduction itself.

Axis: N workers.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.transports import sums
from tf_dgc.transports.base import Transport
from tf_dgc.values import first_true, require, scaled

# Of each worker, in a model's step: what it found, rate, weight, four of the witness.
TOLD_BYTES = 28
_ROUNDING = 1e-5  # of numbers that may come from other processors


class Ballot(NamedTuple):
    """Votes on the end of training, which travel with the gradients of each step."""

    own: tf.Variable  # 1 where this worker ends its training, else 0; [], float32
    last: tf.Variable  # of all workers, in the last step; [N], float32

    @classmethod
    def of(cls, workers: int) -> "Ballot":
        """Create the votes of N workers, outside of any graph: nobody ends."""

        def votes(*shape: int) -> tf.Variable:
            return tf.Variable(
                tf.zeros(shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.NONE,
                shape=[None] * len(shape),  # of sites, where they vote
            )

        with tf.init_scope(), tf.device("CPU:0"):
            return cls(votes(), votes(workers))


class OfNode(NamedTuple):
    """Rows of what the workers of a node tell, which have one gradient together."""

    rows: tf.Tensor  # shape [workers, C], float32: see `row_of`; zero of other nodes
    first: int  # rank of the first of them


class Part(NamedTuple):
    """Weight of a worker's gradients g: the sum is of whole * w / (sum of w) * g."""

    rate: Any  # learning rate, the same on all workers: shape [], float32
    weight: Any  # w, of this worker, about 1: shape [], float32
    whole: int  # N where each g is divided by N already; else 1
    # Numbers of the batch of all workers: shape [K], float32, on the host.
    witness: tf.Tensor | None = None
    components: Any = None  # shape [K], string: names of what these are of
    ballot: Ballot | None = None
    of_node: OfNode | None = None  # where g is of several workers, who tell in there


WEIGHT = 2  # place of the weight in a row


class Told(NamedTuple):
    """Sums of dense gradients, and what workers told one another beside them."""

    gradients: list[Any]
    nonfinite: tf.Tensor  # of each worker; shape [N], float32, on the host
    factor: tf.Tensor  # of this worker's gradients; shape [], float32, on the host
    traffic: tf.Tensor  # see `sums.traffic_of`
    weight: tf.Tensor | None = None  # of all workers, added up; None: not known


_STOPS = 0.5


def weighed_sum(
    transport: Transport,
    gradients: list[Any],
    name: str,
    seats: tf.Tensor,
    nonfinite: Any,
    part: Part | None,
    repeats: bool = True,
) -> Told:
    """Sum dense gradients; in the same reduction each worker tells the others more.

    Args:
        transport: to the other workers.
        gradients: of this worker.
        name: prefix of the names of the collectives.
        seats: 1 in the place of each worker that this process is, shape [..., N].
        nonfinite: what each of these tells, shape [...], 0 for nothing.
        part: what the gradients count; None where those of all count alike.
        repeats: see `sums.dense`.

    Raises:
        tf.errors.InvalidArgumentError: learning rates differ, or the batches that
            workers have read; on all workers.
    """
    ballot = None if part is None else part.ballot
    if part is not None:
        gradients = all_scaled(gradients, part.weight)
    if part is None or part.of_node is None:
        vote = seated(row_of(nonfinite, part), seats)
    else:
        vote = _with_nonfinite(part.of_node, nonfinite)
    found = sums.dense(transport, gradients, name, [vote], repeats)
    with tf.device("CPU:0"):  # what is done next depends on them
        votes, witnesses = found.votes[0], None
        if part is not None and votes.shape[-1] > WEIGHT + 1:
            votes, witnesses = tf.split(votes, [WEIGHT + 1, -1], axis=-1)
        flags, *others = tf.unstack(votes, axis=-1)
        if ballot is not None:
            whole = tf.floor(flags)
            ballot.last.assign(tf.cast(flags > whole, tf.float32))
            flags = whole
        if part is None:
            return Told(found.gradients, flags, tf.ones([]), found.traffic)
        rates, weights = others
        sound = [_refuse_rates(rates, flags)]
        if witnesses is not None:
            sound.append(refuse_other_data(witnesses, part.components))
        with tf.control_dependencies(sound):
            total = tf.reduce_sum(weights)
        share = tf.math.divide_no_nan(tf.constant(float(part.whole)), total)
        factor = share * part.weight
    gradients = all_scaled(found.gradients, share)
    return Told(gradients, flags, factor, found.traffic, total)


def row_of(nonfinite: Any, part: Part | None) -> tf.Tensor:
    """Return what a worker tells: shape [..., C], float32.

    Args:
        nonfinite: as in `weighed_sum`.
        part: what its gradients count.

    Returns:
        What is not finite, with the vote on the end of training, learning rate, weight,
        and the witness; without a part only the first.
    """
    if part is not None and part.ballot is not None:
        # In the same number, which is whole without.
        stops = _STOPS * part.ballot.own.read_value()
        nonfinite = tf.cast(nonfinite, tf.float32) + stops
    own = [nonfinite] if part is None else [nonfinite, part.rate, part.weight]
    row = tf.stack([tf.cast(each, tf.float32) for each in own], axis=-1)
    if part is not None and part.witness is not None:
        row = tf.concat([row, part.witness], axis=0)
    return row


def seated(row: tf.Tensor, seats: tf.Tensor) -> tf.Tensor:
    """Return a row in its place among zeros: [..., C] and [..., N] give [..., N, C]."""
    # Not a product, in which what is not a number would take all seats.
    return tf.where(seats[..., tf.newaxis] > 0, row[..., tf.newaxis, :], 0.0)


def _with_nonfinite(node: OfNode, nonfinite: Any) -> tf.Tensor:
    """Let the first worker of a node tell what only their sum has not finite."""
    workers, columns = node.rows.shape
    known = tf.reduce_any(tf.floor(node.rows[:, 0]) != 0)
    more = tf.where(known, 0.0, tf.cast(nonfinite, tf.float32))
    place = tf.one_hot(node.first, workers)[:, tf.newaxis] * tf.one_hot(0, columns)
    return node.rows + more * place


def refuse_other_data(witnesses: tf.Tensor, components: Any) -> tf.Tensor:
    """Raise InvalidArgumentError where workers have not read the same batch.

    Args:
        witnesses: of all workers, shape [N, K]; finite, none of them negative. What
            differs by rounding is the same.
        components: shape [K], string: what they are of.
    """
    least, most = tf.reduce_min(witnesses, axis=0), tf.reduce_max(witnesses, axis=0)
    differs = most - least > _ROUNDING * most

    def told() -> list[Any]:
        first = first_true(differs)
        return [
            "The workers read different data; all stop, the step was not applied. All "
            "must read the same batches in the same order, of which each takes its "
            "rows. What files or rows are shuffled by before the strategy is made, and "
            "generators of NumPy (np.random.default_rng) at any time, need a seed; "
            "folders must be read in a sorted order. Where data are each worker's own, "
            "say so by AutoShardPolicy.OFF. Component of the elements that differs, "
            "and a number of its first rows, by rank:",
            tf.gather(components, first),
            witnesses[:, first],
        ]

    return require(~tf.reduce_any(differs), told, summarize=-1)


def all_scaled(gradients: list[Any], scale: tf.Tensor) -> list[Any]:
    """Return gradients multiplied by a scale, where that changes them."""
    dense = [g for g in gradients if isinstance(g, tf.Tensor)]
    if dense:
        with tf.device("CPU:0"):
            same = scale == 1.0
        dense = tf.cond(same, lambda: dense, lambda: [scaled(g, scale) for g in dense])
    found = iter(dense)
    return [
        next(found) if isinstance(g, tf.Tensor) else scaled(g, scale) for g in gradients
    ]


def _refuse_rates(rates: tf.Tensor, flags: tf.Tensor) -> Any:
    """Raise InvalidArgumentError where learning rates differ, shape [N]."""
    same = (rates == rates[0]) | (tf.math.is_nan(rates) & tf.math.is_nan(rates[0]))

    def told() -> list[Any]:
        rank = first_true(~same)
        return [
            "The learning rate must be the same on all workers; all stop, the step was "
            "not applied. Callbacks, and steps that set it, must decide alike on all "
            "of them: by what all see, as the logs of epochs, or sums and means of "
            "rows in a step. Rank, its learning rate and that of rank 0:",
            rank,
            rates[rank],
            rates[0],
        ]

    # What is not finite is told otherwise.
    return require(tf.reduce_all(same) | tf.reduce_any(flags != 0), told)
