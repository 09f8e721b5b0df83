"""Calls of Horovod's operations, which meet those of other workers by their names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.transports.generation import Generation
from tf_dgc.transports.turnstile import Turnstile


def _start() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable([0], trainable=False, name="tf_dgc_start")


@dataclasses.dataclass(frozen=True, eq=False)
class NamedCalls:
    """Calls among some workers, by the same names eagerly and in a graph.

    Horovod matches operations by name, and those that run eagerly have none; those of
    functions that are inlined where they are called get another one. Its `elastic.run`
    knows its own errors by names that begin so.

    Attributes:
        device: where this worker computes.
        generation: of the workers.
        turnstile: which the calls pass.
        among: the workers, as an argument of operations; none of it is all of them.
        start: 0, shape [1].
    """

    device: str
    generation: Generation
    turnstile: Turnstile = dataclasses.field(default_factory=Turnstile)
    among: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: tf.Variable = dataclasses.field(default_factory=_start)
    _functions: dict[tuple[str, tf.DType], Callable[..., tf.Tensor]] = (
        dataclasses.field(default_factory=dict, init=False)
    )

    def call(
        self,
        operation: Callable[..., tf.Tensor],
        place: str,
        name: str,
        vector: tf.Tensor,
    ) -> tf.Tensor:
        """Make a collective of a vector.

        Args:
            operation: of Horovod.
            place: for the turnstile, by which workers say where they wait.
            name: of the operation.
            vector: of any length.
        """

        def traced(vector: tf.Tensor) -> tf.Tensor:
            vector = _flat(vector, self.start.read_value())
            with self.turnstile.entered(vector, place) as leave:
                options = {"name": name, "ignore_name_scope": True, **self.among}
                return leave(operation(vector, **options))

        key = name, vector.dtype
        with self.turnstile.at(place):
            if key not in self._functions:
                any_length = [tf.TensorSpec([None], vector.dtype)]
                with tf.init_scope(), tf.device(self.device):
                    function = _host.tensorflow.not_inlined(traced, any_length)
                self._functions[key] = function
            if tf.executing_eagerly():
                return self._functions[key](vector)
            with tf.control_dependencies([self.generation.require()]):
                return self._functions[key](vector)


def _flat(tensor: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """Return a tensor as a vector that no graph optimization takes for constant.

    Horovod's operations count as stateless: one of a constant would be run once, while
    the graph is optimized, and never again, whatever other workers do.

    Args:
        tensor: any shape.
        start: 0 in a variable, shape [1].
    """
    # The whole of it, and not copied; but only the variable knows.
    vector = tf.slice(tf.reshape(tensor, [-1]), start, [-1])
    vector.set_shape([tensor.shape.num_elements()])
    return vector
