"""The transport of a worker that is alone."""

import os
import threading
from collections.abc import Sequence

import tensorflow as tf

from tf_dgc.transports import base


class LocalTransport(base.Transport):
    """One worker: sums and gathers are the tensors themselves."""

    name = "local"

    def __init__(self) -> None:
        if os.environ.get("TF_DGC_LOCAL"):
            base.claim_gpu(0, 1)
        self.rank = 0
        self.size = 1
        self.device = base.default_device()

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return the tensors."""
        return [tf.identity(tensor) for tensor in tensors]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensor with a first axis of length 1."""
        return tensor[tf.newaxis]

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensor, of shape [1, *S]."""
        return tf.identity(tensor)

    def aside(self, thread: threading.Thread) -> base.Transport:
        """Return this."""
        return self

    def group(
        self, parts: Sequence[Sequence[int]], apart: bool = False
    ) -> base.Transport:
        """Return this, whatever groups there are."""
        return self
