"""Parts of matrices: which columns a worker holds, and which variables are such parts.

Axes: N workers, U columns of the whole (units of a layer), W = ceil(U / N) columns of a
part. Columns of a part beyond U are zero, and stay so.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_MARK = "_tf_dgc_columns"


class Columns(NamedTuple):
    """The columns [rank W, (rank + 1) W) of a matrix."""

    rank: int
    workers: int  # N
    units: int  # U

    @property
    def width(self) -> int:
        """W, the same on all workers."""
        return -(-self.units // self.workers)

    @property
    def start(self) -> int:
        """Number of the first column."""
        return self.rank * self.width

    def cut(self, whole: Any) -> np.ndarray:
        """Return the own columns, [..., W], of an array [..., U]."""
        own = np.asarray(whole)[..., self.start : self.start + self.width]
        missing = self.width - own.shape[-1]
        return np.pad(own, [(0, 0)] * (own.ndim - 1) + [(0, missing)])

    def join(self, parts: Sequence[Any]) -> np.ndarray:
        """Return the array [..., U] of the parts [..., W] of all workers, by rank."""
        whole = np.concatenate([np.asarray(part) for part in parts], axis=-1)
        return whole[..., : self.units]


def mark(variable: Any, own: Columns) -> None:
    """Note that a tf.Variable is a part."""
    setattr(variable, _MARK, own)


def of(variable: Any) -> Columns | None:
    """Return which columns a tf.Variable or Keras variable has; None of a whole one."""
    found: Columns | None = getattr(variable, _MARK, None)
    if found is None and hasattr(variable, "constraint"):
        inner = getattr(variable, "_value", None)
        found = getattr(inner, _MARK, None)
    return found


def is_split(variable: Any) -> bool:
    """Tell whether other workers have other columns of a variable."""
    own = of(variable)
    return own is not None and own.workers > 1


_drawn: contextvars.ContextVar[list[Columns] | None] = contextvars.ContextVar(
    "tf_dgc_drawn", default=None
)


@contextlib.contextmanager
def noticing() -> Iterator[list[Columns]]:
    """Yield a list of what is noted by `note` meanwhile."""
    found: list[Columns] = []
    token = _drawn.set(found)
    try:
        yield found
    finally:
        _drawn.reset(token)


def note(own: Columns) -> None:
    """Tell whoever makes a variable now that its first value is a part."""
    if (found := _drawn.get()) is not None:
        found.append(own)


_whole_state: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tf_dgc_parts_elsewhere", default=False
)


@contextlib.contextmanager
def kept_elsewhere() -> Iterator[None]:
    """Let files of weights leave parts out, as `save_state` holds them."""
    token = _whole_state.set(True)
    try:
        yield
    finally:
        _whole_state.reset(token)


def are_kept_elsewhere() -> bool:
    """Tell whether this is within `kept_elsewhere`."""
    return _whole_state.get()


def refuse_to_save(variables: Sequence[Any], what: str) -> None:
    """Raise ValueError where a file would hold one worker's columns only.

    Args:
        variables: that are to be saved.
        what: the name of what they are of.
    """
    own = next((of(v) for v in variables if is_split(v)), None)
    if own is not None and not are_kept_elsewhere():
        raise ValueError(
            f"{what} has split layers, of which this worker has the columns of one of "
            f"{own.workers} workers only. Save `tf_dgc.joined(model)`, which all "
            "workers call, or use `tf_dgc.callbacks.BackupState`"
        )
