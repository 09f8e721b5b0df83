"""Conditions and numbers of a step, which all workers have alike.

A condition that is built by `tf.cond`, or asked by an `if` of Python in an eager step,
is decided by the rows of all workers; so are numbers that a step keeps. Of a number
that Python has, as `float(loss)`, nobody knows what becomes of it: at the end of an
eager step workers compare how many times optimizers were applied.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.current import Current
from tf_dgc.strategies.cuts import NotKnown
from tf_dgc.strategies.known import CONSTANT, NUMBER
from tf_dgc.strategies.uses import AtOnce
from tf_dgc.transports import handshake
from tf_dgc.transports.mesh import Mesh


class Conditions:
    """Conditions that a step builds, or asks for."""

    def __init__(
        self,
        mesh: Mesh,
        current: Current,
        at_once: AtOnce,
        local: bool,
        sums: bool,
    ) -> None:
        """Take the step that runs.

        Args:
            mesh: of the workers.
            current: the step.
            at_once: follows what the step makes of its gradients.
            local: whether a step is this worker's alone.
            sums: whether gradients of each step are exchanged.
        """
        self._mesh, self._current, self._at_once = mesh, current, at_once
        self._local, self._sums = local, sums

    def _of_all(self, value: Any) -> Any:
        """Return a number, or a condition, of the rows of all; None where unknown."""
        losses = self._current.step.losses
        if losses is None or self._local or not isinstance(value, tf.Tensor):
            return value
        kind = losses.reading.of(value).kind
        if kind == CONSTANT:
            return value
        if kind == NUMBER:
            with contextlib.suppress(NotKnown):
                whole = losses.again(value)
                losses.reading.note_same(whole)
                return whole
        return None

    @contextlib.contextmanager
    def decided(self, condition: Any) -> Iterator[Any]:
        """Decide as one process does while a condition, and what it guards, is built.

        All workers call this.

        Args:
            condition: shape [], bool.

        Yields:
            The condition, of the rows of all workers where it is of sums over rows.
        """
        whole = self._of_all(condition)
        if whole is not None:
            yield whole
            return
        step = self._current.step
        step.undecided.append(_host.operations.own_line())
        try:
            yield condition
        finally:
            step.undecided.pop()

    def truth(self, condition: tf.Tensor) -> tf.Tensor:
        """Return a condition that Python asks for in a step, eagerly.

        All workers call this.

        Args:
            condition: shape [].

        Returns:
            The condition, of the rows of all workers where it is of sums over rows.
        """
        if not self._current.step.trains:
            return condition
        whole = self._of_all(condition)
        if whole is None:
            self._current.step.own_conditions.append(_host.operations.own_line())
        return condition if whole is None else whole

    def compare(self) -> None:
        """Compare with other workers at the end of an eager step; all call this.

        Raises:
            ValueError: workers have applied optimizers differently often.
        """
        step = self._current.step
        eager = tf.executing_eagerly() and self._mesh.together.size > 1
        if not (self._sums and eager) or step.model is None:
            return
        own = tf.constant(len(step.applied), tf.int64)
        counts = self._mesh.together.all_gather(own, "applied").numpy().tolist()
        if len(set(counts)) == 1:
            return
        record = {"applied": step.applied, "conditions": step.own_conditions}
        records = handshake.tell(self._mesh.together, "optimizers", record)
        applied, conditions = (
            sorted({line for each in records for line in each[key] if line})
            for key in ("applied", "conditions")
        )
        where = f" at {', '.join(applied)}" * bool(applied)
        why = f", as that at {', '.join(conditions)}" * bool(conditions)
        raise ValueError(
            f"The training step of {step.model.name!r} applies an optimizer{where} as "
            f"often as each worker decides by its own rows: by rank {counts} times in "
            f"this step. A Python condition decides it{why}. Decide by a tensor, as "
            "`if loss < limit:`, which is of the rows of all workers where it is made "
            "of sums, means or extremes of rows; `float(loss)` and `loss.numpy()` are "
            "of this worker's"
        )

    def written(self, variable: Any, value: Any) -> Any:
        """Return a number that a step writes to a variable, as one process has it.

        All workers call this, in a step.

        Args:
            variable: of TensorFlow.
            value: that is assigned, added or subtracted.
        """
        step = self._current.step
        losses, model = step.losses, step.model
        if not (step.trains and self._sums) or losses is None or model is None:
            return value
        if not isinstance(value, tf.Tensor) or step.in_branch():
            return value
        if step.kept is None:
            step.kept = {id(each) for each in _host.keras.kept_by_users(model)}
        if id(variable) not in step.kept:
            return value
        if losses.reading.of(value).kind != NUMBER or self._at_once.uses(value):
            return value
        whole = self._of_all(value)
        return value if whole is None else whole

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


class OwnNumbers(Conditions):
    """Conditions where each worker keeps numbers, and decides in Python, by itself."""

    def compare(self) -> None:
        """Compare nothing: no worker waits for another."""

    def written(self, variable: Any, value: Any) -> Any:
        """Return a number as it is."""
        return value
