"""Parts of matrices: which columns or rows a worker holds, which variables are such.

Axes: N workers, L columns, or rows, of the whole matrix, W = ceil(L / N) of a part.
What of a part is beyond L is zero, and stays so.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

ROWS, COLUMNS = 0, 1  # axes of a matrix
_MARK = "_tf_dgc_band"


class Band(NamedTuple):
    """The columns, or rows, [rank W, (rank + 1) W) of a matrix."""

    rank: int
    workers: int  # N
    length: int  # L
    axis: int = COLUMNS

    @property
    def width(self) -> int:
        """W, the same on all workers."""
        return -(-self.length // self.workers)

    @property
    def start(self) -> int:
        """Number of the first column or row."""
        return self.rank * self.width

    @property
    def used(self) -> int:
        """Number of columns, or rows, of the W that are of the whole."""
        return max(0, min(self.width, self.length - self.start))

    @property
    def is_split(self) -> bool:
        """Tell whether other workers have other parts."""
        return self.workers > 1

    def shape(self, part: Sequence[Any]) -> tuple[Any, Any]:
        """Return the shape of the whole matrix, of that of a part."""
        rows, columns = part
        return (self.length, columns) if self.axis == ROWS else (rows, self.length)

    def place(self, shape: tuple[int, int]) -> tuple[slice, slice]:
        """Return where the part is in the whole matrix of a shape."""
        own = slice(self.start, self.start + self.used)
        rows, columns = (slice(0, size) for size in shape)
        return (own, columns) if self.axis == ROWS else (rows, own)

    def cut(self, whole: Any) -> np.ndarray:
        """Return the own part of a matrix."""
        own = np.asarray(whole[self.place(whole.shape)])
        missing = [(0, 0), (0, 0)]
        missing[self.axis] = (0, self.width - own.shape[self.axis])
        return np.pad(own, missing)

    def join(self, parts: Sequence[Any]) -> np.ndarray:
        """Return the whole matrix of the parts of all workers, by rank."""
        whole = np.concatenate([np.asarray(part) for part in parts], axis=self.axis)
        return whole[: self.length] if self.axis == ROWS else whole[:, : self.length]


def mark(variable: Any, own: Band) -> None:
    """Note that a tf.Variable is a part."""
    setattr(variable, _MARK, own)


def of(variable: Any) -> Band | None:
    """Return what a tf.Variable or Keras variable is a part of; None of a whole one."""
    found: Band | None = getattr(variable, _MARK, None)
    if found is None and hasattr(variable, "constraint"):
        inner = getattr(variable, "_value", None)
        found = getattr(inner, _MARK, None)
    return found


def is_split(variable: Any) -> bool:
    """Tell whether other workers have other parts of what a variable is a part of."""
    own = of(variable)
    return own is not None and own.is_split


_drawn: contextvars.ContextVar[list[Band] | None] = contextvars.ContextVar(
    "tf_dgc_drawn", default=None
)


@contextlib.contextmanager
def noticing() -> Iterator[list[Band]]:
    """Yield a list of what is noted by `note` meanwhile."""
    found: list[Band] = []
    token = _drawn.set(found)
    try:
        yield found
    finally:
        _drawn.reset(token)


def note(own: Band) -> None:
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
    """Raise ValueError where a file would hold one worker's part only.

    Args:
        variables: that are to be saved.
        what: the name of what they are of.
    """
    own = next((of(v) for v in variables if is_split(v)), None)
    if own is not None and not are_kept_elsewhere():
        raise ValueError(
            f"{what} has split layers, of which this worker has the part of one of "
            f"{own.workers} workers only. Save `tf_dgc.joined(model)`, which all "
            "workers call, or use `tf_dgc.callbacks.BackupState`"
        )
