"""The end of `evaluate` and `predict` on all workers at once, whichever asks for it.

A callback sets `model.stop_evaluating` or `model.stop_predicting`, maybe on one worker
only. Where a callback of some worker may, all vote after each batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import fits, stopping
from tf_dgc.strategies.own_batches import OwnBatches
from tf_dgc.transports.mesh import Mesh

_FLAGS = {"evaluate": "stop_evaluating", "predict": "stop_predicting"}


class EarlyEnds:
    """Lets the workers of a strategy end a run after the same batch."""

    def __init__(self, mesh: Mesh, own_batches: OwnBatches) -> None:
        """Watch all runs.

        Args:
            mesh: of the workers.
            own_batches: tells which data are a worker's own.
        """
        self._mesh, self._own_batches = mesh, own_batches
        self._voted: fits.Run | None = None  # in which there are votes

    def begin(self, run: fits.Run, callbacks: Sequence[Any]) -> None:
        """Ask whether a callback of any worker may end a run; all workers call this."""
        if self._own_batches.is_alone:
            return
        may_end = any(
            stopping.names(function.__code__, _FLAGS[run.what])
            for callback in callbacks
            for _, function in stopping.functions_of(callback)
        )
        self._voted = run if self._any(may_end) else None

    def after_batch(self, run: fits.Run) -> None:
        """Let a run go on, or end, as the workers vote."""
        if run is self._voted:
            flag = _FLAGS[run.what]
            setattr(run.model, flag, self._any(getattr(run.model, flag)))

    def _any(self, own: bool) -> bool:
        votes = self._mesh.everybody.all_gather(tf.constant(float(own)), "ends")
        return bool(tf.reduce_any(votes > 0))


def _now() -> tuple[EarlyEnds, fits.Run] | None:
    """Return the run of this thread, where several workers take part in it."""
    run = fits.current()
    if run is None or run.what not in _FLAGS:
        return None
    found = fits.inner_of(_host.keras.strategy_of(run.model), "early_ends")
    return (found, run) if isinstance(found, EarlyEnds) else None


def begin(original: Callable[..., None], callbacks: Any, logs: Any = None) -> None:
    """Ask whether a callback of any worker may end a run."""
    original(callbacks, logs)
    if (found := _now()) is not None:
        found[0].begin(found[1], callbacks.callbacks)


def end_batch(
    original: Callable[..., None], callbacks: Any, batch: int, logs: Any = None
) -> None:
    """Vote after a batch whether a run goes on."""
    original(callbacks, batch, logs)
    if (found := _now()) is not None:
        found[0].after_batch(found[1])
