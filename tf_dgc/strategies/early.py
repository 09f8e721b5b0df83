"""Gradients that a step exchanges before an optimizer applies them."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host, bands, values
from tf_dgc.strategies.current import Current, parts_of
from tf_dgc.strategies.losses import BY_ROWS, DONE
from tf_dgc.strategies.rows import Rows
from tf_dgc.strategies.step_warnings import StepWarnings
from tf_dgc.strategies.uses import AtOnce
from tf_dgc.transports import sums
from tf_dgc.transports.mesh import Mesh


class Early:
    """Exchange of the gradients that a step looks at, as by their norm."""

    def __init__(
        self,
        mesh: Mesh,
        current: Current,
        rows: Rows,
        warnings: StepWarnings,
        at_once: AtOnce,
        sums: bool,
        clips_sum: bool,
    ) -> None:
        """Take what is known of a step.

        Args:
            mesh: of the workers.
            current: the step that runs.
            rows: of this worker.
            warnings: warnings.
            at_once: follows what a step makes of its gradients.
            sums: whether gradients of each step are exchanged.
            clips_sum: whether optimizers clip what was exchanged.
        """
        self._mesh, self._current = mesh, current
        self._rows, self._warnings, self._at_once = rows, warnings, at_once
        self._sums, self._clips_sum = sums, clips_sum

    def exchanged(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of all workers; they are not exchanged again.

        Raises:
            ValueError: they are not of this step.
        """
        if not self._sums:  # a step is this worker's alone
            return list(gradients)
        step = self._current.step
        variables = step.variables_of(gradients)
        if variables is None or any(bands.is_split(v) for v in variables):
            raise ValueError(
                "`gradients` must be those that `tape.gradient` has returned in this "
                "step, all of them, of layers that are not split. Received: "
                f"{len(gradients)} gradients"
            )
        parts = [part for gradient in gradients for part in parts_of(gradient)]
        if {id(part) for part in parts} <= step.exchanged_ids():
            return list(gradients)
        done = self._sum(gradients, variables)
        for own, total in zip(gradients, done, strict=True):
            pairs = zip(parts_of(own), parts_of(total), strict=True)
            step.early |= {id(one): other for one, other in pairs}
        self._at_once.end_at(part for g in done for part in parts_of(g))
        step.computed.append((done, variables))
        return done

    def _sum(self, gradients: Sequence[Any], variables: list[Any]) -> list[Any]:
        """Return the sums over workers of weighed gradients, which are done then."""
        step = self._current.step
        ways = [step.ways.get(id(variable), BY_ROWS) for variable in variables]
        weighed = []
        for gradient, variable, way in zip(gradients, variables, ways, strict=True):
            way = step.before.setdefault(id(variable), way)
            if gradient is not None and way == BY_ROWS:
                gradient = values.scaled(gradient, self._rows.own_share())
            elif gradient is not None and self._rows.others != 1.0:
                gradient = values.scaled(gradient, self._rows.others)
            weighed.append(gradient)
        given = [g for g in self._rows.counted(weighed) if g is not None]
        totals = iter(sums.dense(self._mesh.together, given, "early").gradients)
        step.ways |= {id(variable): DONE for variable in variables}
        return [None if g is None else next(totals) for g in gradients]

    def way_after_exchange(self, gradient: Any, before: str) -> str:
        """Return the way of a gradient whose variable has one of all workers, too.

        Args:
            gradient: made of this worker's gradients, or of those of all, by operations
                that are followed back.
            before: the way of this worker's.
        """
        step = self._current.step
        done = step.exchanged_ids()
        computed = [g for gradients, _ in step.computed for g in gradients]
        own = {id(part) for g in computed for part in parts_of(g)} | step.early.keys()
        waiting, seen, is_exchanged = parts_of(gradient), set[int](), gradient is None
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in done:
                is_exchanged = True
            elif id(tensor) in own:
                return before
            elif id(tensor) not in seen:
                seen.add(id(tensor))
                known = isinstance(tensor, tf.Tensor)
                operation = _host.operations.of(tensor) if known else None
                waiting.extend([] if operation is None else operation.inputs)
        # A mean by rows of what all workers have alike is the same again.
        return DONE if is_exchanged or before != BY_ROWS else BY_ROWS

    def clipping(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of all workers where a step clips its own."""
        step = self._current.step
        given = [
            tf.convert_to_tensor(g) if isinstance(g, tf.Variable) else g
            for g in gradients
        ]
        own = {id(g) for g in given if g is not None}
        whole = next((c for c, _ in step.computed if own & {id(g) for g in c}), None)
        several = len(given) > 1 and step.variables_of(given) is not None
        if not (self._sums and own) or (whole is None and not several):
            return given
        if not self._clips_sum:
            self._warnings.clipped_early()
            return given
        if own.isdisjoint(step.early):
            self.exchanged(given if whole is None else whole)
        return [step.early.get(id(g), g) for g in given]


class EarlyOnServers(Early):
    """Gradients that meet on servers, where they are applied."""

    def exchanged(self, gradients: Sequence[Any]) -> list[Any]:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "`strategy.exchange` must not be called with DownpourConfig, as gradients "
            "meet on the servers. Optimizers clip those of all: clipnorm, clipvalue"
        )
