"""Shapes of tensors that may have rows: what they tell where nothing else is known."""

from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import row_axes
from tf_dgc.strategies.known import (
    ALIKE,
    CONSTANT,
    COUNT,
    NUMBER,
    ROWS,
    SHAPE,
    THE_ROWS,
    UNKNOWN,
    Known,
    enters,
    row_count,
)

Operation = _host.operations.Operation

_PICKING = {"StridedSlice", "Slice", "GatherV2", "Split", "SplitV", "Unpack"}


class RowShapes:
    """Shapes in a step whose batch may have a known number of rows."""

    def __init__(self, facts: row_axes.AxisFacts) -> None:
        """Take the facts about the batch."""
        self._facts, self._static = facts, facts.static

    def may_count(self, tensor: Any) -> bool:
        """Tell whether a constant may be the number of rows, which shapes have told."""
        value = tf.get_static_value(tensor)
        if value is None or self._static in (None, 1):
            return False
        return bool((value != 0).all() and (value % self._static == 0).all())

    def counts(self, tensor: Any) -> bool:
        """Tell whether a constant is the number of rows, which shapes have told."""
        value = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
        return value is not None and self._static is not None and value == self._static

    def leaf(self, tensor: Any) -> Known:
        """Judge what nothing is known of: a constant, or an argument of a function."""
        if self._static is None:
            rows = tensor.dtype != tf.resource and self.has_rows(tensor)
            axis = self.by_shape(tensor)
            return Known(ROWS, id(tensor), axis) if rows else ALIKE
        name = "" if hasattr(tensor, "numpy") else tensor.op.name.rpartition("/")[2]
        if name.startswith("Shape") and self.is_shape(tensor):
            return Known(SHAPE)
        if name.startswith("Size") and self._is_size(tensor):
            return row_count(THE_ROWS)
        return Known(ROWS) if self._is_one_number_for_rows(tensor) else ALIKE

    def by_shape(self, tensor: Any) -> int | None:
        """Return the axis that may have rows, by the shape alone."""
        return row_axes.axis_by_shape(self._facts, tensor)

    def _is_size(self, tensor: Any) -> bool:
        """Tell whether `tf.size(rows)`, which shapes have told, may be this number."""
        value = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
        return value is not None and bool(value) and value % self._static == 0

    def _is_one_number_for_rows(self, tensor: Any) -> bool:
        """Tell whether this may be `tf.ones_like(rows)`, of shapes that are known."""
        rank = tensor.shape.rank or 0
        if rank <= (self._static == 1) or tensor.shape[0] != self._static:
            return False
        value = tf.get_static_value(tensor)
        return value is not None and bool((value == value.reshape([-1])[:1]).all())

    def is_shape(self, tensor: Any) -> bool:
        """Tell whether a vector of numbers, as Keras makes it, is the shape of rows."""
        if self._static is None or not tensor.dtype.is_integer:
            return False
        value = tf.get_static_value(tensor) if tensor.shape.rank == 1 else None
        return value is not None and value.size > 0 and value[0] == self._static

    def is_eager_shape(self, tensor: Any) -> bool:
        """Tell whether this is `tf.shape(rows)`, which is a constant eagerly."""
        made = hasattr(tensor, "numpy") and _host.operations.of(tensor) is None
        return made and self.is_shape(tensor)

    def has_rows(self, tensor: Any) -> bool:
        """Tell whether a tensor may have rows, by its shape alone."""
        shape = tensor.shape
        if shape.rank is None:
            return True
        if self._static is None:
            return any(size is None for size in shape)
        return bool(shape.rank and shape[0] and shape[0] % self._static == 0)

    # What is made of as many rows as there are.

    def range(self, tensor: Any, inputs: list[Known]) -> Known:
        """Judge a range of numbers, which may count rows."""
        kinds = {each.kind for each in inputs}
        if kinds <= {CONSTANT, NUMBER} and self.has_rows(tensor):
            extent = next((i.extent for i in inputs if i.origin == COUNT), id(tensor))
            return Known(ROWS, extent, picks=True)
        return ALIKE  # positions within rows

    def makes_rows(self, tensor: Any, sized: list[Known], values: list[Known]) -> bool:
        """Tell whether what is created has as many rows as there are.

        Args:
            tensor: that is created.
            sized: what is known of its sizes.
            values: of what becomes a value of it.
        """
        sizes = any(each.kind in (SHAPE, NUMBER, ROWS) for each in sized)
        own = any(each.kind in (ROWS, UNKNOWN) for each in values)
        has_rows = self.has_rows(tensor) or self.by_shape(tensor) is not None
        return sizes and not own and has_rows

    def created(self, tensor: Any, values: list[Known]) -> Known:
        """Judge what is created with as many rows as there are."""
        nested = any(e.kind == NUMBER and enters(e, "Fill") for e in values)
        return Known(ROWS, axis=self.by_shape(tensor), nested=nested)

    def of_shape(self, tensor: Any, operation: Operation, inputs: list[Known]) -> Known:
        """Judge what is computed of the dimensions of rows."""
        extent = next(each.extent for each in inputs if each.kind == SHAPE)
        if operation.kind in _PICKING and inputs[0].kind == SHAPE:
            if operation.kind in ("SplitV", "Unpack"):
                first = operation.output == 0
            else:
                begin = tf.get_static_value(operation.inputs[1])
                first = begin is not None and int(begin.reshape([-1])[0]) == 0
            if operation.kind == "StridedSlice":
                first = first or bool(operation.attributes("begin_mask") & 1)
            if not first:
                return ALIKE
        if tensor.shape.rank == 0:
            return row_count(extent)
        if tensor.shape.rank == 1 and tensor.dtype.is_integer:
            return Known(SHAPE, extent)
        return Known(ROWS, extent) if self.has_rows(tensor) else ALIKE
