"""Components of a dataset's elements that have the rows of the batch, or have not.

An element is (x, y, others ...) as in Keras, or x alone. The rows of a batch are those
of its targets y, or where there are none, of its inputs. Scalars, and tensors of
another number of rows, as negatives that all rows share, go to all workers whole. Where
it cannot be told which of them have the rows, as of graphs that are merged into one,
the element is refused.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import slicing
from tf_dgc.strategies.slicing import INPUTS, OTHERS, TARGETS, Component
from tf_dgc.values import require

_ROWS, _WHOLE, _OPEN = range(3)  # kinds; open until its number of rows is seen
_ADVICE = (
    "An element must be (x, y, ...) in which y, and at least one tensor of x, have a "
    "row for each of the batch. Graphs that are merged into one, or tokens of all "
    "sequences in one tensor, cannot be divided: give ragged or padded tensors, with a "
    "row for each graph or sequence, and merge them in the model; or let each worker "
    "make its own batches, by `strategy.distribute_datasets_from_function`. A tensor "
    "that all rows share goes to all workers whole where its shape has its number of "
    "rows (`tf.ensure_shape`), and the others have None"
)


class Memory(NamedTuple):
    """Memory of the batches before: see `ElementLayout`."""

    first: tf.Variable  # rows of the first batch; shape [], int64, 0 before it
    alike: tf.Variable  # shape [divisible], bool: had as many rows as the batch
    other: tf.Variable  # likewise, or another number


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
        own = tf.VariableSynchronization.NONE
        with tf.init_scope(), tf.device("CPU:0"):
            return Memory(
                *(
                    tf.Variable(value, trainable=False, synchronization=own)
                    for value in (
                        tf.zeros([], tf.int64),
                        *[tf.zeros([len(self._divisible)], tf.bool)] * 2,
                    )
                )
            )

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
        by_rows = self._by_rows(tf.stack(numbers), count, memory)
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

    @property
    def _divisible(self) -> list[int]:
        """The indices of components that may have the rows of the batch."""
        return [i for i, kind in enumerate(self._kinds) if kind != _WHOLE]

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
                f"{_ADVICE}. Received: elements {self._spec}"
            )
        self._kinds = [_WHOLE if kind == _OPEN else kind for kind in self._kinds]

    # By what is in a batch.

    def _by_rows(
        self, numbers: tf.Tensor, count: tf.Tensor, memory: Memory | None
    ) -> tf.Tensor:
        """Tell which components have the rows of the batch, shape [divisible], bool.

        Args:
            numbers: of rows that they have, shape [divisible].
            count: of rows of the batch, shape [].
            memory: of the dataset.

        Raises:
            tf.errors.InvalidArgumentError: that cannot be told.
        """
        equal = numbers == count
        if len(self._divisible) == 1:
            return equal
        used = [self._components[i] for i in self._divisible]
        names = ", ".join(c.name for c in used)

        def told() -> list[Any]:
            text = "The tensors of a batch have other numbers of rows. "
            return [f"{text}{_ADVICE}. Numbers of rows of {names}:", numbers]

        first = None if memory is None else memory.first.read_value()
        require(self._fits(equal, count, first), told, summarize=-1)
        if memory is None or first is None:
            return equal
        alike, other = memory.alike.read_value(), memory.other.read_value()
        # Nodes of graphs are now more, now less than those of the first batch.
        steady = tf.reduce_all(equal) | (first == 0) | (count <= first)

        def told_later() -> list[Any]:
            text = (
                "A tensor has had as many rows as batches before, and has not now, or "
                "batches grow: whether it is to be divided cannot be told. "
            )
            return [f"{text}{_ADVICE}. Numbers of rows of {names}:", numbers]

        changed = tf.reduce_any(alike & ~other & ~equal)
        require(steady & ~changed, told_later, summarize=-1)
        memory.first.assign(tf.where(first == 0, count, first))
        memory.alike.assign(alike | equal)
        memory.other.assign(other | ~equal)
        return equal & ~other

    def _fits(
        self, equal: tf.Tensor, count: tf.Tensor, first: tf.Tensor | None
    ) -> tf.Tensor:
        """Tell whether numbers of rows leave no doubt: shape [], bool."""
        used = [self._components[i] for i in self._divisible]
        must = [self._kinds[i] == _ROWS for i in self._divisible]
        fits = tf.reduce_all(equal | ~tf.constant(must))
        inputs = [c.group == INPUTS for c in used]
        if any(inputs):
            fits &= tf.reduce_any(equal & tf.constant(inputs))
        targets = any(c.group == TARGETS for c in self._tensors())
        if self._batch is None:
            # Targets and inputs have as many rows; what follows them might have others.
            others = [targets and c.group == OTHERS for c in used]
            return fits & tf.reduce_all(equal | tf.constant(others))
        if targets:
            return fits & (tf.reduce_all(equal) | (count <= self._batch))
        whole = [tf.equal(n, self._batch) for n in (count, first) if n is not None]
        return fits & (tf.reduce_all(equal) | tf.reduce_any(tf.stack(whole)))


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Return the most rows that `Dataset.batch` gives to what a dataset maps."""
    while (found := _host.datasets.batch_of(dataset)) is None:
        sources = _host.tensorflow.inputs_of(dataset)
        follows = _host.tensorflow.maps(dataset) or _host.tensorflow.chooses(dataset)
        if len(sources) != 1 or not follows:
            return None
        (dataset,) = sources
    return found[0]
