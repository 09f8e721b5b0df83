"""A step of a Keras optimizer that all workers take together: once, for all callers."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers, values
from tf_dgc.compression import dgc
from tf_dgc.exchanges import Part, Update


class Synchronous(Protocol):
    """What exchanges gradients: a `Ledger`, or what makes means of its sums."""

    def gradients(
        self,
        owner: object,
        local: Sequence[Any],
        variables: Sequence[Any],
        momentum: dgc.Momentum | None = None,
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
) -> None:
    """Take a step of an optimizer that all workers take together.

    Momentum, exchange, vote, update, after: whoever the caller is.

    Args:
        ledger: of the exchanges.
        optimizer: of the user.
        pairs: of this worker's gradient, or None, and what it belongs to.
        learning_rate: shape [].
        update: the optimizer's own update of a list of pairs (gradient, variable) at a
            learning rate.
        part: what this worker's gradients count; None where those of all count alike.
        clips: whether the optimizer is to clip what was exchanged.
    """
    used = [(g, v) for g, v in pairs if g is not None]
    variables = [v for _, v in used]
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    momentum = optimizers.momentum_of(optimizer, learning_rate)
    local = [g for g, _ in used]
    found = ledger.gradients(optimizer, local, plain, momentum, part)
    args = optimizer, found, variables, learning_rate, update, clips
    if found.applies is None:
        apply(*args)
    else:
        tf.cond(found.applies, lambda: apply(*args), lambda: None)
    ledger.parameters(optimizer, plain)


def apply(
    optimizer: keras.optimizers.Optimizer,
    found: Update,
    variables: Sequence[Any],
    learning_rate: Any,
    update: Callable[[list[Any], Any], None],
    clips: bool = False,
) -> None:
    """Update variables; those whose step is finished, by what is in their gradient.

    Args:
        optimizer: of the user.
        found: what an exchange made of the gradients.
        variables: what they belong to.
        learning_rate: for those whose step is not finished.
        update: see `synchronised`.
        clips: whether to clip first, as the optimizer says.
    """
    gradients = found.gradients
    if clips:
        gradients = _host.hooks.clipped(optimizer, gradients)
    gradients = [values.without_repetition(gradient) for gradient in gradients]
    triples = zip(gradients, variables, found.finished, strict=True)
    # None was applied in the exchange.
    flagged = [((g, v), finished) for g, v, finished in triples if g is not None]
    if plain := [pair for pair, finished in flagged if not finished]:
        update(plain, learning_rate)
    if taken_over := [pair for pair, finished in flagged if finished]:
        with optimizers.suspended_momentum(optimizer):
            update(taken_over, tf.ones_like(learning_rate))
