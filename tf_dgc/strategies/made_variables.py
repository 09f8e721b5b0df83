"""Variables that are made in the scope of a strategy."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.strategies import randomness
from tf_dgc.transports import handshake
from tf_dgc.transports.mesh import Mesh

# What tf.random.Generator calls its state.
_GENERATOR = "StateVar"


class MadeVariables:
    """Variables that a strategy has made, with the initial values of all workers."""

    def __init__(self, mesh: Mesh) -> None:
        """Begin with none.

        Args:
            mesh: of the workers.
        """
        self._mesh = mesh
        self._statistics: list[weakref.ref[Any]] = []
        self._parts: list[weakref.ref[Any]] = []

    def note_part(self, variable: Any, own: bands.Band) -> None:
        """Note a variable that is a part, where it has the shape of one."""
        if variable.shape.rank == 2 and variable.shape[own.axis] == own.width:
            bands.mark(variable, own)
            self._parts.append(weakref.ref(variable))
            weak = weakref.ref(variable)
            refuse = functools.partial(bands.refuse_to_save, what="The checkpoint")
            _host.tensorflow.hook_checkpoints(variable, lambda: refuse([weak()]))

    def note_statistic(self, variable: Any) -> None:
        """Note a variable of a layer that gradients do not train."""
        self._statistics.append(weakref.ref(variable))

    def parts(self) -> list[Any]:
        """Return the variables that are parts, in the order in which they were made."""
        gc.collect()  # models that are gone, on all workers alike
        found = [reference() for reference in self._parts]
        return [variable for variable in found if variable is not None]

    def statistics(self) -> list[Any]:
        """Return the variables of layers that gradients do not train, floating point.

        In the order in which they were made, in this strategy's scope.
        """
        gc.collect()  # models that are gone, on all workers alike
        found = [reference() for reference in self._statistics]
        return [variable for variable in found if variable is not None]

    def initial_value(self, kwargs: dict[str, Any]) -> Callable[[], tf.Tensor]:
        """Return what makes a value that is the same on all workers.

        Args:
            kwargs: by which the variable is made.
        """
        value, name = kwargs["initial_value"], kwargs.get("name")
        transport = self._mesh.everybody

        def initial_value() -> tf.Tensor:
            local = value() if callable(value) else value
            local = tf.convert_to_tensor(local, dtype=kwargs.get("dtype"))
            if local.dtype == tf.string:
                return local
            if tf.executing_eagerly():
                form = {"shape": local.shape.as_list(), "dtype": local.dtype.name}
                handshake.agree(transport, f"variable {name!r}", form)
            (shared,) = transport.broadcast([local], "variable")
            if name == _GENERATOR:
                return randomness.key_by(transport.rank, shared)
            return shared

        return initial_value
