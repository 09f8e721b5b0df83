"""Components of a dataset's elements that have the rows of the batch, or have not.

An element is (x, y, others ...) as in Keras, or x alone. The rows of a batch are those
of its targets y, or where there are none, of its inputs. Scalars, and tensors of
another number of rows, as negatives that all rows share, go to all workers whole. Where
it cannot be told which of them have the rows, as of graphs that are merged into one,
the element is refused.
"""

from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import slicing
from tf_dgc.strategies.batch_rows import ADVICE, BatchRows, Memory
from tf_dgc.strategies.slicing import INPUTS, OTHERS, TARGETS, Component

_ROWS, _WHOLE, _OPEN = range(3)  # kinds; open until its number of rows is seen


class ElementLayout:
    """Layout of an element: which components have the rows of the batch."""

    def __init__(self, spec: Any, size: int, batch: int | None = None) -> None:
        """Decide what shapes tell.

        Args:
            spec: of elements: anything with shapes, in any structure; a tuple is
                (x, y, ...).
            size: N.
            batch: the most rows that a batch has, if that is known.

        Raises:
            ValueError: no tensor can have the rows of a batch, or their numbers of rows
                do not fit.
        """
        self._spec, self._size, self._batch = spec, size, batch
        self._components = slicing.components_of(spec)
        anchor = slicing.anchor_of(self._components)
        scalars = [c for c in self._components if c.rank == 0 and c.group == TARGETS]
        if anchor is None or scalars or self._components[anchor].group == OTHERS:
            raise ValueError(
                f"The dataset must be batched, to be split over {size} workers: call "
                f"`dataset.batch(global_batch_size)`. Received: elements {spec}"
            )
        self._anchor = anchor
        self._dynamic = any(c.rows is None for c in self._tensors())
        self._kinds = [self._kind(i) for i in range(len(self._components))]
        if not self._dynamic:
            self._refuse_by_shape()
        divisible = [(i, kind) for i, kind in enumerate(self._kinds) if kind != _WHOLE]
        # The indices of components that may have the rows of the batch.
        self._divisible = [i for i, _ in divisible]
        self._batches = BatchRows(
            [self._components[i] for i in self._divisible],
            [kind == _ROWS for _, kind in divisible],
            any(c.group == TARGETS for c in self._tensors()),
            batch,
        )

    @property
    def divides_all(self) -> bool:
        """Tell whether, by their shapes, all components have the batch's rows."""
        return all(
            kind == _ROWS
            for kind, c in zip(self._kinds, self._components, strict=True)
            if c.rank != -1
        )

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of those that go to all workers whole, by their shapes."""
        return tuple(
            c.name
            for kind, c in zip(self._kinds, self._components, strict=True)
            if kind == _WHOLE and c.has_rows
        )

    def memory(self) -> Memory | None:
        """Return variables for what is seen of batches; None where nothing is open."""
        if _OPEN not in self._kinds or not self._dynamic:
            return None
        return self._batches.memory()

    def rows_of(self, element: Any, rank: Any, memory: Memory | None = None) -> Any:
        """Return one worker's part of an element, in the structure of the spec.

        Args:
            element: flat or not: of tensors, None among them.
            rank: an integer, or a tensor of shape [] and any integer type.
            memory: of the dataset.
        """
        flat = tf.nest.flatten(element)
        numbers = [tf.cast(slicing.rows_in(flat[i]), tf.int64) for i in self._divisible]
        count = numbers[self._divisible.index(self._anchor)]
        start, stop = slicing.bounds(count, rank, self._size)
        by_rows = self._batches.by_rows(tf.stack(numbers), count, memory)
        for place, i in enumerate(self._divisible):
            if self._kinds[i] == _ROWS:
                flat[i] = slicing.sliced(flat[i], start, stop, self._size)
            else:
                first = tf.where(by_rows[place], start, tf.zeros_like(start))
                last = tf.where(by_rows[place], stop, numbers[place])
                flat[i] = slicing.sliced(flat[i], first, last, None)
        return tf.nest.pack_sequence_as(self._spec, flat)

    # By shapes.

    def _tensors(self) -> list[Component]:
        return [c for c in self._components if c.has_rows]

    def _kind(self, index: int) -> int:
        component, anchor = self._components[index], self._anchor
        if not component.has_rows:
            return _WHOLE
        if index == anchor:
            return _ROWS
        group = [c for c in self._tensors() if c.group == component.group]
        fixed = component.rows is not None and self._dynamic
        if fixed and (component.group == OTHERS or any(c.rows is None for c in group)):
            return _WHOLE
        if component.group == TARGETS or (
            component.group == INPUTS and len(group) == 1
        ):
            return _ROWS
        if self._dynamic:
            return _OPEN
        return _ROWS if component.rows == self._components[anchor].rows else _OPEN

    def _refuse_by_shape(self) -> None:
        anchor = self._components[self._anchor]
        inputs = [c.rows for c in self._tensors() if c.group == INPUTS]
        wrong = [
            c
            for c, kind in zip(self._components, self._kinds, strict=True)
            if kind == _ROWS and c.rows != anchor.rows
        ]
        is_open = _OPEN in self._kinds
        sure = anchor.group == TARGETS
        if self._batch is not None:
            sure = anchor.rows == self._batch
        if wrong or anchor.rows not in inputs or (is_open and not sure):
            raise ValueError(
                "The tensors of a dataset's elements have other numbers of rows. "
                f"{ADVICE}. Received: elements {self._spec}"
            )
        self._kinds = [_WHOLE if kind == _OPEN else kind for kind in self._kinds]


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Return the most rows that `Dataset.batch` gives to what a dataset maps."""
    while (found := _host.datasets.batch_of(dataset)) is None:
        sources = _host.tensorflow.inputs_of(dataset)
        follows = _host.tensorflow.maps(dataset) or _host.tensorflow.chooses(dataset)
        if len(sources) != 1 or not follows:
            return None
        (dataset,) = sources
    return found[0]
