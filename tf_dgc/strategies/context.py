"""The seam to Keras: where gradients are seen together with their variables.

An optimizer calls, in its replica context, `all_reduce(SUM, gradients)` and then
`merge_call(update, (gradients and variables, learning rate))`. The first is answered
with the local gradients, marked pending. The second brings the variables too: there
the strategy exchanges, and the update runs on the result.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, optimizers
from tf_dgc.strategies.share import share_of


class ReplicaContext(tf.distribute.ReplicaContext):
    """The seam: sees an optimizer's gradients together with their variables."""

    def __init__(self, strategy: Any) -> None:
        # Beside servers a worker is the only replica: it meets no other in a step.
        number = strategy.transport.rank
        super().__init__(strategy, replica_id_in_sync_group=number)
        self._pending: list[Any] = []

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Defer an optimizer's reduction to its merge_call; do any other."""
        if not isinstance(value, list) or _host.keras.calling_optimizer() is None:
            if (share := share_of(self.strategy)) is not None:
                value = share.rows.counted(value)
            return self._met(super().all_reduce(reduce_op, value, options))
        local = [
            tf.nest.map_structure(tf.identity, g, expand_composites=True) for g in value
        ]
        self._pending.extend(local)
        return local

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """Gather rows, in steps that have none without the row that stands for them."""
        share = share_of(self.strategy)
        if share is not None and isinstance(axis, int) and axis == 0:
            value = tf.nest.map_structure(share.rows.with_rows, value)
        return self._met(super().all_gather(value, axis, options))

    def _met(self, found: Any) -> Any:
        share = share_of(self.strategy)
        if share is not None:
            for tensor in tf.nest.flatten(found):
                share.note_meeting(tensor)
        return found

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Exchange pending gradients, then run `merge_fn` on the result."""
        optimizers.check_function(merge_fn)
        optimizer = getattr(merge_fn, "__self__", None)
        if not isinstance(optimizer, keras.optimizers.Optimizer) or not self._pending:
            return super().merge_call(merge_fn, args, kwargs)
        pairs, learning_rate = args
        known = {id(gradient) for gradient in self._pending}
        strange = [v.name for g, v in pairs if g is not None and id(g) not in known]
        if strange:
            raise RuntimeError(
                f"The optimizer {optimizer.name!r} changed gradients between their "
                f"reduction and their use, which cannot be followed: {strange}"
            )
        self._pending.clear()

        def update(pairs: list[Any], rate: Any) -> None:
            super(ReplicaContext, self).merge_call(merge_fn, (pairs, rate), kwargs)

        self.strategy.inner.exchange_and_update(optimizer, pairs, learning_rate, update)
        return None

    def refuse_pending(self) -> None:
        """Raise RuntimeError where a reduction was asked for and never used."""
        if self._pending:
            raise RuntimeError(
                f"An optimizer reduced {len(self._pending)} gradients and did not "
                "apply them: they were not exchanged between the workers. Use "
                "`optimizer.apply` or `apply_gradients` as Keras defines them."
            )
