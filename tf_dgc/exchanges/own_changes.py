"""Changes of a worker's copy in local steps, and what it offers of them to rounds.

See `served_rounds.py`. Axis: P arena elements.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import values
from tf_dgc.exchanges.anchors import Anchor
from tf_dgc.exchanges.outer_on_servers import Offer, OuterOnServers
from tf_dgc.exchanges.served_messages import UnsentChanges


class OwnChanges:
    """Changes of this worker since it has fetched, and what it keeps back of them."""

    def __init__(
        self, variables: Sequence[Any], outer: OuterOnServers, device: str
    ) -> None:
        """Create the variables, outside of any graph.

        Args:
            variables: that local steps train.
            outer: exchange of their outer optimizer.
            device: of this worker.
        """
        self._outer, self._trained = outer, len(variables)
        self._variables = [*variables, *outer.extras.own]
        self._anchor = Anchor(self._variables, None, device, [])
        outer.anchors = self._anchor.values
        self._unsent: UnsentChanges | None = None
        compressing = outer.compressing
        if outer.large and compressing is not None:
            args = outer.layout, compressing.config, compressing.combining.decay
            self._unsent = UnsentChanges(*args, device)

    def begin(self) -> None:
        """Begin at the variables as they are."""
        self._anchor.drop()

    def offer(self, steps: tf.Tensor, after: Sequence[Any]) -> Offer:
        """Return what goes to the next round.

        Args:
            steps: of the changes, shape [], int64.
            after: operations that come before.

        Raises:
            tf.errors.InvalidArgumentError: a variable holds NaN or infinity.
        """
        own = [variable.read_value() for variable in self._variables]
        bad = values.first_nonfinite(own)
        names = [variable.name for variable in self._variables]
        finite = values.require(bad == 0, lambda: _no_number(bad, names))
        with tf.control_dependencies([*after, finite]):
            changes = self._anchor.changes(own)
            weight = tf.cast(steps, tf.float32)
        trained, extras = changes[: self._trained], changes[self._trained :]
        message = None
        if self._unsent is not None:
            message = self._unsent.message([trained[i] for i in self._outer.large])
        return Offer(weight, trained, extras, message)

    def commit(self, offer: Offer) -> None:
        """Keep back what is left of an offer that was in a round."""
        if self._unsent is not None and offer.message is not None:
            self._unsent.commit(offer.message.left)

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """Residual of compression."""
        return {} if self._unsent is None else {"residual": self._unsent.v}

    @property
    def sent(self) -> int:
        """Number of messages of this worker that were in a round."""
        return 0 if self._unsent is None else int(self._unsent.sent)

    def loaded(self, sent: int) -> None:
        """Go on, eagerly, from a state that was loaded, after so many messages."""
        if self._unsent is not None:
            self._unsent.sent.assign(sent)

    def refuse_flush(self) -> None:
        """Raise ValueError where something is kept back."""
        if self._unsent is not None and bool(tf.reduce_any(self._unsent.v != 0)):
            raise ValueError(
                "`flush` must not be called with DownpourConfig(local_steps=..., "
                "compression=...): what a worker has not sent goes in later rounds"
            )


def _no_number(bad: tf.Tensor, names: Sequence[str]) -> list[Any]:
    return [
        "A variable of this worker holds NaN or infinity after local steps; it stops, "
        "the others go on without what it has changed. Variable:",
        tf.gather(tf.constant(["", *names]), bad),
    ]
