"""Conditions of a step, which all workers decide alike."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.current import Current
from tf_dgc.strategies.losses import NotKnown
from tf_dgc.strategies.readings import CONSTANT, NUMBER


class Decisions:
    """Conditions that a step builds."""

    def __init__(self, current: Current, local: bool, sums: bool) -> None:
        """Take the step that runs.

        Args:
            current: the step.
            local: whether a step is this worker's alone.
            sums: whether gradients of each step are exchanged.
        """
        self._current, self._local, self._sums = current, local, sums

    @contextlib.contextmanager
    def decided(self, condition: Any) -> Iterator[Any]:
        """Decide as one process does while a condition, and what it guards, is built.

        All workers call this.

        Args:
            condition: shape [], bool.

        Yields:
            The condition, of the rows of all workers where it is of sums over rows.
        """
        step = self._current.step
        losses, whole = step.losses, None
        if losses is None or self._local or not isinstance(condition, tf.Tensor):
            yield condition
            return
        kind = losses.reading.of(condition).kind
        if kind == CONSTANT:
            yield condition
            return
        if kind == NUMBER:
            with contextlib.suppress(NotKnown):
                whole = losses.again(condition)
                losses.reading.note_same(whole)
        if whole is not None:
            yield whole
            return
        step.undecided.append(_host.operations.own_line())
        try:
            yield condition
        finally:
            step.undecided.pop()

    def refuse_undecided(self) -> None:
        """Refuse an exchange where workers may decide otherwise whether to hold it.

        Raises:
            ValueError: a condition that is each worker's own guards it.
        """
        undecided = self._current.step.undecided
        if undecided and self._sums:
            line = undecided[-1]
            raise ValueError(
                f"The condition{f' at {line}' * bool(line)} decides whether an "
                "optimizer is applied, and each worker decides it by its own rows: "
                "some would wait for others. Decide by sums, means or extremes of "
                "rows, which are taken over those of all workers; or by what "
                "tf.distribute.get_replica_context().all_reduce(...) returns"
            )
