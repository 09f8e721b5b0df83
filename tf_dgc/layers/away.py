"""Outputs of a split layer that have stayed where they were computed.

Axes: N workers, M rows of the worker that has most, m of this one, W columns of a part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.bands import Band
from tf_dgc.layers.movement import Movement

_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lt le gt ge eq ne"
_UNARY = "neg abs invert getitem len iter bool"


class Where(NamedTuple):
    """Position of parts of outputs in the whole.

    Attributes:
        moves: between the workers.
        own: which units.
        rows: m, shape [].
        form: shape of the outputs without the last axis: a tensor.
    """

    moves: Movement
    own: Band
    rows: tf.Tensor
    form: tf.Tensor


class Away:
    """Outputs of a layer: parts for a layer that needs parts, a tensor for others.

    The outputs come home where somebody reads them, which all workers do together.
    """

    def __init__(
        self,
        parts: tf.Tensor,
        place: Where,
        shape: tf.TensorShape,
        home: Callable[[], tf.Tensor],
    ) -> None:
        """Keep what was computed.

        Args:
            parts: shape [N, M, W].
            place: what they are of.
            shape: of the layer's outputs.
            home: returns these; all workers call it.
        """
        self.parts, self.place, self.shape = parts, place, shape
        self.dtype = parts.dtype
        self._home = home
        self._found: tuple[Any, Any] = None, None

    def home(self) -> tf.Tensor:
        """Return the outputs of the layer, once for each graph."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if self._found[1] is None or self._found[0] is not graph:
            self._found = graph, self._home()
        return self._found[1]

    def __getattr__(self, name: str) -> Any:
        """Return what a tensor has; what is of none of them brings nothing home."""
        if name.startswith("_") or (not hasattr(tf.Tensor, name) and name != "numpy"):
            raise AttributeError(name)
        return getattr(self.home(), name)

    __hash__ = object.__hash__


def _convert(away: Away, dtype: Any = None, *_: Any, **__: Any) -> Any:
    found = away.home()
    return found if dtype in (None, found.dtype) else tf.cast(found, dtype)


def _at_home(other: Any) -> Any:
    return other.home() if isinstance(other, Away) else other


def _called(name: str) -> Callable[..., Any]:
    return lambda away, *args: getattr(away.home(), name)(*map(_at_home, args))


tf.register_tensor_conversion_function(Away, _convert)
for _name in _UNARY.split():
    setattr(Away, f"__{_name}__", _called(f"__{_name}__"))
for _name in _BINARY.split():
    setattr(Away, f"__{_name}__", _called(f"__{_name}__"))
    if hasattr(tf.Tensor, f"__r{_name}__"):
        setattr(Away, f"__r{_name}__", _called(f"__r{_name}__"))
