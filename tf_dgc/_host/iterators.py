"""Iterators of tf.data that do more than read. DATA as in `datasets.py`."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dgc._host import probe

with probe.imports():
    from tensorflow.python.data.ops import iterator_ops


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    owned = getattr(iterator_ops, "OwnedIterator", None)
    return [
        (iterator_ops, "IteratorSpec"),
        (iterator_ops, "OwnedIterator"),
        (owned, "_element_spec"),
        (owned, "_flat_output_shapes"),
        (owned, "_next_internal"),
    ]


probe.check(wanted())


class LevelIterator(iterator_ops.OwnedIterator):
    """Leaves it to a meeting what the next element is.

    DATA/ops/iterator_ops.py: OwnedIterator, which has no public way to do so, and
    which functions take as an argument.
    """

    _element_spec: Any
    _flat_output_shapes: Any

    def __init__(self, meeting: "Meeting", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meeting = meeting
        self._element_spec = tf.nest.map_structure(_of_any_rows, self._element_spec)
        self._flat_output_shapes = [
            tf.TensorShape([None, *shape[1:]]) if shape.rank else shape
            for shape in self._flat_output_shapes
        ]

    def get_next_as_optional(self) -> Any:
        """Return what is agreed upon."""
        own = super().get_next_as_optional()
        return self._meeting.function(own, self._element_spec)

    def _next_internal(self) -> Any:
        optional = self.get_next_as_optional()
        # Without a next element there is none of this worker's own: it ends the data.
        return tf.cond(optional.has_value(), optional.get_value, super()._next_internal)

    @property
    def _type_spec(self) -> Any:
        return _LevelSpec(self._element_spec, self._meeting.key)


class _LevelSpec(iterator_ops.IteratorSpec):
    """Of a LevelIterator; functions are traced anew for each meeting."""

    __slots__ = ["_key"]

    def __init__(self, element_spec: Any, key: int) -> None:
        super().__init__(element_spec)
        self._key = key

    @property
    def value_type(self) -> type:
        return LevelIterator

    def _serialize(self) -> Any:
        return self._element_spec, self._key

    def _from_components(self, components: Any) -> Any:
        spec = self._element_spec
        return LevelIterator(
            _meetings[self._key], components=components, element_spec=spec
        )


class Meeting:
    """Agreement of the workers on whether there is a next element.

    Attributes:
        function: gets tf.experimental.Optional of the worker's own next element, and
            the spec of elements of any number of rows; returns that of the next.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        """Make one; the iterators that use it need it as long as they live."""
        self.function = function
        self.key = next(_keys)
        _meetings[self.key] = self


class MarkedIterator(iterator_ops.OwnedIterator):
    """Reads pairs of an element and its mark; returns the element, keeps the mark.

    DATA/ops/iterator_ops.py: OwnedIterator, as above.
    """

    _element_spec: Any

    def __init__(self, marks: "Marks", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._marks, self._of_pairs = marks, False

    @property
    def element_spec(self) -> Any:
        """Of elements without their marks."""
        return self._element_spec if self._of_pairs else self._element_spec[0]

    def get_next_as_optional(self) -> Any:
        """Return the next element, if there is one."""
        self._of_pairs = True  # the base class asks for the spec of what it reads
        try:
            pair = super().get_next_as_optional()
        finally:
            self._of_pairs = False

        def element() -> Any:
            found, mark = pair.get_value()
            self._marks.keep(mark)
            return tf.experimental.Optional.from_value(found)

        def nothing() -> Any:
            return tf.experimental.Optional.empty(self.element_spec)

        return tf.cond(pair.has_value(), element, nothing)

    def _next_internal(self) -> Any:
        element, mark = super()._next_internal()
        self._marks.keep(mark)
        return element

    @property
    def _type_spec(self) -> Any:
        return _MarkedSpec(self._element_spec, self._marks.key)


class _MarkedSpec(iterator_ops.IteratorSpec):
    """Of a MarkedIterator; of pairs of element and mark."""

    __slots__ = ["_key"]

    def __init__(self, element_spec: Any, key: int) -> None:
        super().__init__(element_spec)
        self._key = key

    @property
    def value_type(self) -> type:
        return MarkedIterator

    def _serialize(self) -> Any:
        return self._element_spec, self._key

    def _from_components(self, components: Any) -> Any:
        return MarkedIterator(
            _marks[self._key], components=components, element_spec=self._element_spec
        )


class Marks:
    """Marks of what iterators read.

    Attributes:
        keep: gets the mark of each element that is read, eagerly or in a graph.
    """

    def __init__(self, keep: Callable[[tf.Tensor], None]) -> None:
        """Make one; the iterators that use it need it as long as they live."""
        self.keep = keep
        self.key = next(_keys)
        _marks[self.key] = self


_keys = itertools.count()
_marks: weakref.WeakValueDictionary[int, Marks] = weakref.WeakValueDictionary()
_meetings: weakref.WeakValueDictionary[int, Meeting] = weakref.WeakValueDictionary()


def _of_any_rows(spec: Any) -> Any:
    """Return the spec of a tensor of any kind, with any number of rows."""
    if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec):
        return spec
    if not spec.shape.rank:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)
