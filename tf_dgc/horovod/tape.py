"""A gradient tape whose gradients are means over all workers."""

from typing import Any, Self

import keras
import tensorflow as tf

from tf_dgc.config import DGCConfig
from tf_dgc.horovod import core
from tf_dgc.transports.base import Transport


class DistributedGradientTape:
    """A tape whose gradients are means over all workers.

    What is kept back belongs to the variables and the config, and lasts as long as the
    process: a new tape in each step goes on where the last one stopped. The momentum of
    an optimizer is not corrected; `DistributedOptimizer` does that.

    Example:
        with tf.GradientTape() as tape:
            loss = ...
        tape = tf_dgc.horovod.DistributedGradientTape(tape, config)
        gradients = tape.gradient(loss, model.trainable_variables)
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        config: DGCConfig | None = None,
        *,
        hierarchical: bool = False,
        over: Transport | None = None,
    ) -> None:
        """Wrap a tape.

        Args:
            tape: that has recorded, or will.
            config: of Deep Gradient Compression, the same in each step; None exchanges
                everything.
            hierarchical: sum densely within a node, and exchange between nodes only.
            over: a transport other than Horovod's.
        """
        self._tape = tape
        found = over or core.started(hierarchical)
        self._owner, self._exchange = core.exchange_of_tapes(config, found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the means of the workers' gradients; see `tf.GradientTape.gradient`.

        Raises:
            ValueError: the workers' variables differ.
            tf.errors.InvalidArgumentError: a gradient is not finite, and the config
                does not skip it.
        """
        local = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(sources)
        gradients = tf.nest.flatten(local)
        used = [i for i, g in enumerate(gradients) if g is not None]
        values = [flat[i] for i in used]
        values = [v.value if isinstance(v, keras.Variable) else v for v in values]
        found = self._exchange(self._owner, [gradients[i] for i in used], values)
        for i, gradient in zip(used, found.gradients, strict=True):
            gradients[i] = _zero_unless(found.apply, gradient)
        return tf.nest.pack_sequence_as(local, gradients)


def _zero_unless(applies: tf.Tensor | None, gradient: Any) -> Any:
    """Return zeros in a step that all workers leave out."""
    if applies is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = _zero_unless(applies, gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.where(applies, gradient, tf.zeros_like(gradient))
