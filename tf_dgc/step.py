"""A step of a Keras optimizer that all workers take together: once, for all callers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers, values
from tf_dgc.exchanges import Part, Update
from tf_dgc.exchanges.base import TakenOver
from tf_dgc.transports.base import Transport


class Own(NamedTuple):
    """Parts of weights that only this worker trains."""

    transport: Transport
    gradients: list[tf.Tensor]
    variables: list[Any]

    def norms(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the Euclidean norms of gradients of which these are parts."""
        squares = [tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for g in gradients]
        return [tf.sqrt(s) for s in self.transport.all_reduce(squares, "split.norms")]

    def refuse_nonfinite(self) -> None:
        """Raise InvalidArgumentError, on all workers, where one has no numbers."""
        bad = values.first_nonfinite(self.gradients)
        found = self.transport.all_gather(bad, "split.finite")
        names = [each.name for each in self.variables]

        def told() -> list[Any]:
            rank = values.first_true(found > 0)
            return [
                "A gradient of a split layer holds NaN or inf; all workers stop, the "
                "step was not applied. Rank, and variable:",
                rank,
                tf.gather(tf.constant(names), found[rank] - 1),
            ]

        values.require(tf.reduce_all(found == 0), told)


class Synchronous(Protocol):
    """Interface of a `Ledger`, or of what makes means of its sums."""

    def gradients(
        self,
        owner: object,
        local: Sequence[Any],
        variables: Sequence[Any],
        taken_over: TakenOver | None = None,
        part: Part | None = None,
    ) -> Update:
        """Exchange gradients, before the owner's step; see `Ledger.gradients`."""

    def parameters(self, owner: object, variables: Sequence[Any]) -> None:
        """Exchange parameters, after it; see `Ledger.parameters`."""


def synchronised(
    ledger: Synchronous,
    optimizer: keras.optimizers.Optimizer,
    pairs: Sequence[tuple[Any, Any]],
    learning_rate: Any,
    update: Callable[[list[Any], Any], None],
    part: Part | None = None,
    clips: bool = False,
    own: Own | None = None,
) -> None:
    """Take a step of an optimizer that all workers take together.

    What is taken over, exchange, vote, update, after: whoever the caller is.

    Args:
        ledger: of the exchanges.
        optimizer: of the user.
        pairs: of this worker's gradient, or None, and what it belongs to.
        learning_rate: shape [].
        update: the optimizer's own update of a list of pairs (gradient, variable) at a
            learning rate.
        part: what this worker's gradients count; None where those of all count alike.
        clips: whether the optimizer is to clip what was exchanged.
        own: pairs that no other worker has, of parts of weights.
    """
    used = [(g, v) for g, v in pairs if g is not None]
    variables = [v for _, v in used]
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    taken_over = optimizers.taken_over_of(optimizer, variables, learning_rate, update)
    local = [g for g, _ in used]
    found = ledger.gradients(optimizer, local, plain, taken_over, part)
    if own is not None:
        variables = [*variables, *own.variables]
        found = found._replace(
            gradients=[*found.gradients, *own.gradients],
            finished=[*found.finished, *[False] * len(own.gradients)],
        )
    args = optimizer, found, variables, learning_rate, update, clips, own
    if found.applies is None:
        apply(*args)
    else:
        tf.cond(found.applies, lambda: apply(*args), lambda: None)
    ledger.parameters(optimizer, plain)


def clipped(
    optimizer: keras.optimizers.Optimizer, gradients: list[Any], own: Own | None
) -> list[Any]:
    """Return gradients as Keras clips them for an optimizer.

    Args:
        optimizer: of the user.
        gradients: of all workers.
        own: what the last of them are; it is the norm of the whole that counts.
    """
    by_norm = any(getattr(optimizer, n, None) for n in ("clipnorm", "global_clipnorm"))
    if own is None or not by_norm:
        return _host.applying.clipped(optimizer, gradients)
    first = len(gradients) - len(own.gradients)
    parts = gradients[first:]
    norms = own.norms(parts)
    found = _host.applying.clipped(optimizer, [*gradients[:first], *norms])
    scales = [
        tf.math.divide_no_nan(after, before)
        for after, before in zip(found[first:], norms, strict=True)
    ]
    scaled = [values.scaled(g, s) for g, s in zip(parts, scales, strict=True)]
    return [*found[:first], *scaled]


def apply(
    optimizer: keras.optimizers.Optimizer,
    found: Update,
    variables: Sequence[Any],
    learning_rate: Any,
    update: Callable[[list[Any], Any], None],
    clips: bool = False,
    own: Own | None = None,
) -> None:
    """Update variables; those whose step is finished, by what is in their gradient.

    Args:
        optimizer: of the user.
        found: what an exchange made of the gradients.
        variables: what they belong to.
        learning_rate: for those whose step is not finished.
        update: see `synchronised`.
        clips: whether to clip first, as the optimizer says.
        own: what the last of the gradients are, if no other worker has them.
    """
    gradients = found.gradients
    if clips:
        gradients = clipped(optimizer, gradients, own)
    optimizers.warn_of_repeated_rows(optimizer, gradients, variables)
    gradients = [values.without_repetition(gradient) for gradient in gradients]
    triples = zip(gradients, variables, found.finished, strict=True)
    # None was applied in the exchange.
    flagged = [((g, v), finished) for g, v, finished in triples if g is not None]
    if plain := [pair for pair, finished in flagged if not finished]:
        update(plain, learning_rate)
    if taken_over := [pair for pair, finished in flagged if finished]:
        with optimizers.suspended_momentum(optimizer):
            update(taken_over, tf.ones_like(learning_rate))
