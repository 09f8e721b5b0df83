"""Everything is exchanged."""

from typing import Any

import tensorflow as tf

from tf_dgc import dgc
from tf_dgc.synchronizers.base import Account, Exchanged, Synchronizer


class Dense(Synchronizer):
    """Plain synchronous data parallelism."""

    def _exchange(
        self,
        account: Account,
        gradients: list[Any],
        momentum: dgc.Momentum | None,
        subtract: bool,
    ) -> tuple[Exchanged, tf.Tensor, tf.Tensor]:
        summed, size, elements = self._sum_dense(
            gradients, account.variables, account.name
        )
        return Exchanged(summed, [False] * len(summed), None), size, elements
