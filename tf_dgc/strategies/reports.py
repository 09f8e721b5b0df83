"""Output of training, which the chief prints, and no other worker.

Keras prints its progress bar, and what `verbose` asks for, on the chief only. There
stands, too, how much the workers have sent, and that the first step takes long.
"""

import contextvars
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tf_dgc import _host
from tf_dgc.strategies import fits

_LONG_SECONDS = 1.0  # of a first step
_COMPILES = "compiling the first step ..."
_ERASE = "\r\x1b[K"
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


class Report:
    """Figures of a `fit`, for a line at its end."""

    def __init__(self, strategy: Any, model: keras.Model, verbose: int) -> None:
        """Begin to count.

        Args:
            strategy: of this package.
            model: that is to be trained.
            verbose: as `fit` has it, not 0.
        """
        self._strategy = strategy
        self._before = self._strategy.stats(total=True)
        self._batches = self._last = 0
        self._lock, self._over, self._shown = threading.Lock(), False, False
        self._new = getattr(model, "train_function", None) is None and verbose == 1
        self._timer = threading.Timer(_LONG_SECONDS, self._tell_that_it_compiles)
        self._timer.daemon = True

    def first_step_begins(self) -> None:
        """Say after a while that it is compiled."""
        if self._new and sys.stdout.isatty():
            self._new = False
            self._timer.start()

    def _tell_that_it_compiles(self) -> None:
        with self._lock:
            if not self._over:
                self._shown = True
                _host.keras.say(_COMPILES, line_break=False)

    def first_step_is_over(self) -> None:
        """Take back that the first step is compiled."""
        if self._over:
            return
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown:
                _host.keras.say(_ERASE, line_break=False)

    def count(self, batch: int) -> None:
        """Take note that a batch of an epoch, from 0 on, has ended."""
        self.first_step_is_over()
        self._batches += batch - (self._last if batch > self._last else -1)
        self._last = batch

    def tell(self) -> None:
        """Print what was sent, if anything was."""
        after = self._strategy.stats(total=True)
        sent = int(after.sent_bytes - self._before.sent_bytes)
        dense = int(after.dense_bytes - self._before.dense_bytes)
        if self._batches > 0 and sent > 0:
            _host.keras.say(line(sent / self._batches, dense / self._batches))


def line(sent: float, dense: float) -> str:
    """Return a line on the bytes of a step, beside those of dense training."""
    text = f"tf_dgc: {_bytes(sent)} a step and worker"
    if sent >= 0.9 * dense:
        return text
    factor = dense / sent
    return f"{text} instead of {_bytes(dense)} dense (1/{factor:.{factor < 10:d}f})"


def _bytes(number: float) -> str:
    for unit, name in _UNITS:
        if number >= 0.9995 * unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:.0f} bytes"


_report: contextvars.ContextVar[Report | None] = contextvars.ContextVar(
    "tf_dgc_report", default=None
)


def print_on_chief(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Leave printing to the chief."""
    run = fits.current()
    if run is None or getattr(_host.keras.strategy_of(run.model), "is_chief", True):
        original(*args, **kwargs)


def fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Report a `fit` of several workers on the chief."""
    strategy: Any = _host.keras.strategy_of(model)
    given = inspect.signature(original).bind_partial(model, *args, **kwargs).arguments
    verbose = given.get("verbose", "auto")
    several = fits.is_own(strategy) and strategy.transport.size > 1
    if not (several and strategy.is_chief and verbose):
        return original(model, *args, **kwargs)
    report = Report(strategy, model, 1 if verbose == "auto" else verbose)
    token = _report.set(report)
    try:
        history = original(model, *args, **kwargs)
    finally:
        _report.reset(token)
        report.first_step_is_over()
    report.tell()
    return history


def steps(original: Callable[..., Iterator[Any]], epoch: Any) -> Iterator[Any]:
    """Note that a first step begins."""
    if (report := _report.get()) is not None:
        report.first_step_begins()
    yield from original(epoch)


def end_batch(
    original: Callable[..., None], callbacks: Any, batch: int, logs: Any = None
) -> None:
    """Count a batch in the report."""
    if (report := _report.get()) is not None:
        report.count(batch)
    original(callbacks, batch, logs)
