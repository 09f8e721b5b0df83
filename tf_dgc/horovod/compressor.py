"""Compression within Horovod's own functions."""

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.compression import arena
from tf_dgc.config import DGCConfig
from tf_dgc.horovod.core import Means, Owner, started
from tf_dgc.transports.base import Transport


class _Form(NamedTuple):
    """Stands for a variable that nobody tells of."""

    name: str
    shape: tf.TensorShape
    dtype: tf.DType


class DGCCompressor:
    """For Horovod's own functions, as `compression=` of its tape and allreduce.

    Keep one for the whole training: it holds what is kept back of each tensor. They are
    told apart by their order in a graph, so they must come in the same order, and of
    the same shapes, in each step. Outside of graphs, as in `hvd.allreduce(tensor,
    compression=...)`, each tensor needs a compressor of its own. The result is the
    mean, whatever `op` says. The other front ends send one message a step; this one
    sends one for each tensor.
    """

    def __init__(self, config: DGCConfig, *, over: Transport | None = None) -> None:
        """Wait for tensors.

        Args:
            config: of Deep Gradient Compression; `ratio` is of each tensor.
            over: a transport other than Horovod's.

        Raises:
            TypeError: `config` is not a DGCConfig.
            ValueError: it has `bytes_per_step`, which no tensor could share out.
        """
        if not isinstance(config, DGCConfig):
            raise TypeError(
                f"`config` must be a DGCConfig. Received: config={config!r}"
            )
        if config.bytes_per_step is not None:
            raise ValueError(
                "`config` must have a `sparsity` or a `ratio`, as each tensor is "
                "compressed by itself. Received: "
                f"bytes_per_step={config.bytes_per_step}"
            )
        self.config = config
        with tf.init_scope():
            self._exchange = Means(started(False, None, config, over), config)
        self._slots: list[tuple[Owner, _Form]] = []
        self._next: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Exchange a tensor; return what Horovod may reduce instead, and the mean.

        Raises:
            ValueError: the tensor has another shape than before at its place.
        """
        least = self.config.min_elements
        if not arena.is_compressed(tensor.shape.as_list(), tensor.dtype, least):
            return tensor, None
        place = self._place()
        if place == len(self._slots):
            form = _Form(f"tensor {place}", tensor.shape, tensor.dtype)
            self._slots.append((Owner(), form))
        owner, form = self._slots[place]
        if form[1:] != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"The tensor at place {place} must have shape {form.shape} and type "
                f"{form.dtype.name}, as before. Received: {tensor.shape}, "
                f"{tensor.dtype.name}. Outside of graphs each tensor needs a "
                "DGCCompressor of its own."
            )
        found = self._exchange.gradients(owner, [tensor], [form])
        (mean,) = found.gradients
        if found.applies is not None:
            mean = tf.where(found.applies, mean, tf.zeros_like(mean))
        return tf.zeros([1], tensor.dtype), mean

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: Any, mean: Any) -> Any:
        """Return the mean, once Horovod has reduced what it was given instead."""
        if mean is None:
            return tensor
        with tf.control_dependencies([tensor]):
            return tf.identity(mean)

    def _place(self) -> int:
        """Count the tensors of a step: those that are traced into one graph."""
        if tf.executing_eagerly():
            return 0
        graph = _host.tensorflow.outermost_function_graph()
        place = self._next.get(graph, 0)
        self._next[graph] = place + 1
        return place
