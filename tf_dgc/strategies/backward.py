"""Backward passes of losses, so that the gradients of all workers can become one."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.applied_gradients import AppliedGradients
from tf_dgc.strategies.current import Current, parts_of
from tf_dgc.strategies.cuts import NotKnown
from tf_dgc.strategies.early import Early
from tf_dgc.strategies.known import ROWS
from tf_dgc.strategies.losses import BY_ROWS, SUMMED, Losses
from tf_dgc.strategies.rows import Rows
from tf_dgc.strategies.step_warnings import StepWarnings
from tf_dgc.strategies.uses import AtOnce
from tf_dgc.transports.mesh import Mesh


class LossCounts:
    """Numbers that losses count in the gradients that a worker computes."""

    def __init__(
        self,
        mesh: Mesh,
        current: Current,
        rows: Rows,
        warnings: StepWarnings,
        local: bool,
    ) -> None:
        """Take what is known of a step; arguments as of `Backward`."""
        self._replicas, self._current = float(mesh.replicas), current
        self._rows, self._warnings, self._local = rows, warnings, local

    def of_rows(
        self, losses: Losses, targets: Sequence[Any], sources: Sequence[Any]
    ) -> list[tf.Tensor] | None:
        """Return what losses count whose gradients are taken to rows of the batch.

        So that a row has the gradient that it has in one process. None: as they are.
        """
        if self._local or self._current.step.in_branch():
            return None
        if not all(isinstance(each, tf.Tensor) for each in sources):
            return None
        rows = [losses.reading.of(each).kind == ROWS for each in sources]
        way = losses.way_of(targets) if all(rows) else None
        if way is None:
            return None
        scale = self._replicas ** -way[1]
        if way[0] == BY_ROWS:
            scale = scale * self._rows.share_of_all()
        return [tf.fill(tf.shape(t), tf.cast(scale, t.dtype)) for t in targets]

    def weighed(
        self, losses: Losses, targets: list[Any], given: Any
    ) -> tuple[str, list[Any], Any]:
        """Return the way of gradients, what they are of, and what that counts."""
        size = self._replicas
        way = losses.way_of(targets)
        if way is None:
            try:
                if given is not None:
                    raise NotKnown(_host.operations.own_line())
                whole = losses.whole(targets)
            except NotKnown as error:
                self._warnings.unknown_loss(error.line or _host.operations.own_line())
                way = BY_ROWS, 0
            else:
                if not self._local:
                    return SUMMED, whole.targets, whole.upstream
                return BY_ROWS, whole.targets, [size * each for each in whole.upstream]
        for line in losses.reading.doubts:
            self._warnings.doubtful_loss(line)
        kind, power = way
        scale: Any = size**-power
        if self._current.step.meets and not self._local:
            own = tf.where(self._rows.empty, 0.0, 1.0)
            if kind == BY_ROWS:
                own = self._rows.share_of_all()
            kind, scale = SUMMED, scale * own
        if isinstance(scale, float) and scale == 1.0:
            return kind, targets, given
        given = [None] * len(targets) if given is None else tf.nest.flatten(given)
        upstream = [
            tf.cast(scale, t.dtype) * (tf.ones_like(t) if g is None else g)
            for t, g in zip(targets, given, strict=True)
        ]
        return kind, targets, upstream


class Backward:
    """Gradients of the losses of a step."""

    def __init__(
        self,
        mesh: Mesh,
        current: Current,
        rows: Rows,
        early: Early,
        applied: AppliedGradients,
        warnings: StepWarnings,
        at_once: AtOnce,
        local: bool,
    ) -> None:
        """Take what is known of a step.

        Args:
            mesh: of the workers.
            current: the step that runs.
            rows: of this worker.
            early: gradients that are exchanged before they are applied.
            applied: gradients that optimizers apply.
            warnings: warnings.
            at_once: follows what a step makes of its gradients.
            local: whether a step is this worker's alone.
        """
        self._current, self._early, self._applied = current, early, applied
        self._warnings, self._at_once, self._local = warnings, at_once, local
        self._counts = LossCounts(mesh, current, rows, warnings, local)

    def gradient(
        self,
        original: Callable[..., Any],
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any,
        unconnected: Any,
    ) -> Any:
        """Compute gradients of a loss, so that those of all workers can become one.

        Args:
            original: `tf.GradientTape.gradient`.
            tape: of the user.
            target: see there, and for what follows.
            sources: what is trained, or anything.
            output_gradients: of the target.
            unconnected: what is returned where there is none.
        """
        flat, targets = tf.nest.flatten(sources), tf.nest.flatten(target)
        trained = [_host.keras.plain(v) for v in flat]
        trains = any(isinstance(each, tf.Variable) for each in trained)
        losses = self._current.step.losses
        given = output_gradients

        def compute(targets: Any, upstream: Any) -> Any:
            return original(tape, targets, sources, upstream, unconnected)

        if losses is None or not all(isinstance(each, tf.Tensor) for each in targets):
            return compute(target, given)
        if trains:
            return self._of_weights(compute, losses, targets, given, flat)
        if given is None:
            given = self._counts.of_rows(losses, targets, flat)
            if given is not None:
                return _noted(losses, compute(targets, given))
        return compute(target, given)

    def _of_weights(
        self,
        compute: Callable[[Any, Any], Any],
        losses: Losses,
        targets: list[Any],
        given: Any,
        variables: Sequence[Any],
    ) -> Any:
        """Return the gradients of losses with respect to what is trained.

        Args:
            compute: takes targets, and what each counts.
            losses: of the step.
            targets: of the tape.
            given: what each counts, as the script has it.
            variables: what is trained.
        """
        step = self._current.step
        trained = [_host.keras.plain(v) for v in variables]
        self._at_once.look_at_weights(trained)
        if not self._local:
            self._warnings.moved_weights(variables, step)
        linear = step.way_of_gradients(targets)  # as of products with a Hessian
        if linear is not None:
            way, upstream = linear, given
        else:
            self._at_once.look_at(targets)
            way, targets, upstream = self._counts.weighed(losses, targets, given)
        step.way = way  # for the backward passes of layers
        found = compute(targets, upstream)
        step.way = BY_ROWS
        ways = [step.ways.setdefault(id(v), way) for v in trained]
        ways = [
            step.before.get(id(v), way) for v, way in zip(trained, ways, strict=True)
        ]
        pairs = zip(tf.nest.flatten(found), ways, strict=True)
        gradients = [
            self._applied.converted(gradient, way, to) for gradient, to in pairs
        ]
        step.computed.append((gradients, trained))
        if self._at_once.takes(gradients, trained):
            gradients = self._early.exchanged(gradients)
        else:
            self._at_once.add(part for g in gradients for part in parts_of(g))
        return tf.nest.pack_sequence_as(found, gradients)


def _noted(losses: Losses, gradients: Any) -> Any:
    """Note gradients that are of rows."""
    for gradient in tf.nest.flatten(gradients):
        if isinstance(gradient, tf.Tensor):
            losses.reading.note_rows(gradient)
    return gradients
