"""The step of a model that runs, while it is traced or run eagerly.

What a step is, is known in one `Step`, which is entered and left: the model, the losses
and how they are read, and which gradients were computed, exchanged or applied so far.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.losses import BY_ROWS, DONE, SUMMED, Losses


class Step:
    """A step of a model; without a model, what runs outside of steps.

    Attributes:
        model: of the user.
        may_be_empty: whether this worker may have no rows in it.
        graph: in which it is traced; None where it runs eagerly.
        losses: of it, once its tensors are read.
        meets: whether workers meet in the forward pass.
        ways: how gradients become one, by variable.
        way: of the gradients that are computed now.
        computed: gradients that were computed together, and what they belong to.
        early: gradients of all workers, by this worker's.
        before: ways of those that were exchanged.
        updated: variables that optimizers have updated.
        undecided: lines of conditions that are built now.
        counts: of rows of each worker, by graph.
        shares: of each worker in the rows of all, by graph.
        trains: whether it is a training step in which workers meet.
        alone: whether it is one in which they do not.
        applied: lines at which optimizers were applied, eagerly.
        own_conditions: lines of conditions of Python that are this worker's.
        kept: identities of variables that only a user's own code writes to.
    """

    def __init__(
        self,
        model: keras.Model | None = None,
        may_be_empty: bool = False,
        trains: bool = False,
        alone: bool = False,
    ) -> None:
        """Begin a step."""
        self.trains, self.alone = trains, alone
        self.applied: list[str] = []
        self.own_conditions: list[str] = []
        self.kept: set[int] | None = None
        self.model, self.may_be_empty = model, may_be_empty
        self.graph = graph()
        self.losses: Losses | None = None
        self.meets = False
        self.ways: dict[int, str] = {}
        self.way = BY_ROWS
        self.computed: list[tuple[list[Any], list[Any]]] = []
        self.early: dict[int, Any] = {}
        self.before: dict[int, str] = {}
        self.updated: set[int] = set()
        self.undecided: list[str] = []
        self.counts: dict[Any, tf.Tensor] = {}
        self.shares: dict[Any, tf.Tensor] = {}

    def in_branch(self) -> bool:
        """Tell whether what is traced may not run in each step, as in a branch."""
        return graph() is not self.graph and _host.tensorflow.is_in_branch()

    def way_of(self, variable: Any) -> str:
        """Return how gradients of a variable become one."""
        return self.ways.get(id(_host.keras.plain(variable)), BY_ROWS)

    def is_by_rows(self, variables: Sequence[Any]) -> bool:
        """Tell whether the mean by rows of gradients, not their sum, is that of all."""
        return any(self.way_of(variable) == BY_ROWS for variable in variables)

    def is_done(self, variables: Sequence[Any]) -> bool:
        """Tell whether the gradients of variables are those of all workers."""
        return bool(variables) and all(self.way_of(v) == DONE for v in variables)

    def way_of_gradients(self, targets: Sequence[Any]) -> str | None:
        """Return the way of gradients of this worker whose gradients are computed.

        These are sums over rows, as the others are. None: they are something else.
        """
        ways = {
            id(gradient): self.way_of(variable)
            for gradients, variables in self.computed
            for gradient, variable in zip(gradients, variables, strict=True)
        }
        unique = {ways.get(id(each)) for each in targets}
        way = unique.pop() if len(unique) == 1 else None
        return way if way in (BY_ROWS, SUMMED) else None

    def variables_of(self, gradients: Sequence[Any]) -> list[Any] | None:
        """Return what gradients belong to, or what they were made of."""
        for computed, variables in reversed(self.computed):
            if len(computed) == len(gradients) and all(
                map(_alike, computed, gradients)
            ):
                return variables
        return None

    def exchanged_ids(self) -> set[int]:
        """Return the identities of gradients that are those of all workers."""
        return {id(gradient) for gradient in self.early.values()}

    # What is known of tensors.

    def note_asked(self) -> None:
        """Note that a script asks for N; it may divide by it."""
        if self.losses is not None and not _host.operations.called_by_library():
            self.losses.reading.asked = self.losses.reading.workers

    def note_meeting(self, tensor: Any) -> None:
        """Note that workers meet in the forward pass, and get the same tensor."""
        if self.losses is not None:
            self.meets = True
            self.losses.reading.note_same(tensor)

    def note_rows(self, tensor: Any) -> None:
        """Note what workers have computed together, of this one's rows."""
        if self.losses is not None:
            self.losses.reading.note_rows(tensor)
        if (flow := _host.flow.current()) is not None:
            flow.add([tensor])

    def note_moments(self, moments: Sequence[Any]) -> None:
        """Note what a layer normalizes by, which is each worker's own on purpose."""
        if self.losses is not None:
            for tensor in moments:
                self.losses.reading.note_same(tensor)


class Current:
    """The step that runs in a strategy.

    Attributes:
        step: one without a model, where none runs.
    """

    def __init__(self) -> None:
        """Begin outside of steps."""
        self.step = Step()

    @contextlib.contextmanager
    def entered(self, step: Step) -> Iterator[Step]:
        """Let a step run."""
        before, self.step = self.step, step
        try:
            yield step
        finally:
            self.step = before


def graph() -> Any:
    """Return the graph that is built; None where operations run eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def parts_of(gradient: Any) -> list[Any]:
    """Return a gradient, and the values of one that is sparse."""
    if gradient is None or isinstance(gradient, tf.Variable | keras.Variable):
        return []
    slices = isinstance(gradient, tf.IndexedSlices)
    return [gradient, gradient.values] if slices else [gradient]


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two gradients are of one kind and shape."""
    if one is None or other is None:
        return one is other
    kinds = [isinstance(each, tf.IndexedSlices) for each in (one, other)]
    return kinds[0] == kinds[1] and one.shape == other.shape
