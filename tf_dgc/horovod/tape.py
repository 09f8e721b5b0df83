"""A gradient tape whose gradients are means over all workers."""

from typing import Any, Self

import keras
import tensorflow as tf

from tf_dgc.config import DGCConfig
from tf_dgc.horovod import core
from tf_dgc.horovod.optimizer import LocalWeights
from tf_dgc.horovod.options import Options
from tf_dgc.transports.base import Transport
from tf_dgc.values import without_repetition, zero_unless


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
        hierarchical: bool | str = False,
        local_layers: Any = None,
        over: Transport | None = None,
        **options: Any,
    ) -> None:
        """Wrap a tape.

        Args:
            tape: that has recorded, or will.
            config: of Deep Gradient Compression, the same in each step; None exchanges
                everything.
            hierarchical: see `DGCConfig`, where it may stand as well.
            local_layers: a layer, or some, whose weights are each worker's own.
            over: a transport other than Horovod's.
            options: Horovod's other keyword arguments; see `options.Options`.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: an option cannot be had.
        """
        self._tape = tape
        asked = Options(**options)
        config, terms = asked.resolve(config)
        found = core.started(hierarchical, asked.process_set, config, over)
        self._local = LocalWeights(local_layers, asked.scale_local_gradients)
        self._owner, self._exchange = core.exchange_of_tapes(config, found, terms)

    def register_local_source(self, source: Any) -> None:
        """Let the gradient of a variable be each worker's own."""
        self._local.add(source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the means of the workers' gradients; see `tf.GradientTape.gradient`.

        Raises:
            ValueError: the workers' variables differ, or XLA is to compile this.
            tf.errors.InvalidArgumentError: a gradient is not finite, and the config
                does not skip it.
        """
        local = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(sources)
        gradients = tf.nest.flatten(local)
        used = [i for i, g in enumerate(gradients) if g is not None]
        for i in [i for i in used if self._local.have(flat[i])]:
            gradients[i] = self._local.share(gradients[i], self._exchange)
            used.remove(i)
        if not used:
            return tf.nest.pack_sequence_as(local, gradients)
        values = [flat[i] for i in used]
        values = [v.value if isinstance(v, keras.Variable) else v for v in values]
        own = [gradients[i] for i in used]
        found = self._exchange.gradients(self._owner, own, values)
        for i, gradient in zip(used, found.gradients, strict=True):
            gradients[i] = without_repetition(zero_unless(found.applies, gradient))
        return tf.nest.pack_sequence_as(local, gradients)


def PartialDistributedGradientTape(
    tape: tf.GradientTape,
    config: DGCConfig | None = None,
    *,
    local_layers: Any = None,
    **options: Any,
) -> DistributedGradientTape:
    """Wrap a tape, but for some layers; see `DistributedGradientTape`."""
    return DistributedGradientTape(tape, config, local_layers=local_layers, **options)
