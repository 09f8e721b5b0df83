"""Facts about the tensors of a step: what its readers know of one."""

from typing import Any, NamedTuple

# What a tensor is, of this worker's rows.
CONSTANT = "constant"  # the same on all workers
ROWS = "rows"  # has a row, or several, of each row along an axis
ROW = "row"  # made of one row, as in a loop of Python over them; `extent` says of which
SHAPE = "shape"  # the dimensions of such
NUMBER = "number"  # computed of sums over rows
UNKNOWN = "unknown"

# Terms of numbers, each with the power of N that multiplies it.
MEAN, SUM, COUNT = "mean", "sum", "count"
LARGEST, SMALLEST = "largest", "smallest"
THE_ROWS = "the rows"  # extent: as many as the batch has, or a multiple
SPLITS = "splits"  # one more, of ragged tensors

# Operations that multiply or divide, that add, and that leave what they are given.
SCALE = {"Mul", "RealDiv", "DivNoNan", "Div"}
LINEAR = {"AddV2", "Add", "AddN", "Sub", "Pack"}
SAME = {
    *("Identity", "IdentityN", "Cast", "Reshape", "Squeeze", "ExpandDims"),
    *("EnsureShape", "StopGradient", "PreventGradient", "CheckNumerics", "Snapshot"),
    *("PlaceholderWithDefault", "Neg"),
}


class Known(NamedTuple):
    """Facts about a tensor.

    Attributes:
        kind: see above.
        extent: of rows: what their number depends on.
        axis: of rows; None where it is not known which.
        scales: of rows: numbers, shape [], by which all of them were multiplied, and
            whether they were divided instead.
        terms: of a number: pairs of a term and a power of N; None for others.
        origin: of a number that is made of rows: MEAN, SUM, COUNT, LARGEST or SMALLEST.
        nested: of rows, and of numbers that are made of them: whether numbers have gone
            into each row otherwise than by `scales`.
        picks: of rows: whether they may be positions of rows, in their order; of a
            number: whether it only counts rows, and is no float.
        copies: of rows: how many times.
    """

    kind: str
    extent: Any = THE_ROWS
    axis: int | None = 0
    scales: tuple[tuple[Any, bool], ...] = ()
    terms: frozenset[tuple[str, int]] | None = frozenset()
    origin: str = ""
    nested: bool = False
    picks: bool = False
    copies: int = 1


ALIKE, UNREAD = Known(CONSTANT), Known(UNKNOWN)


def row_count(extent: Any) -> Known:
    """Return what is known of a number of rows, of some extent."""
    term = COUNT if extent == THE_ROWS else SUM
    terms = frozenset({(term, 0)})
    return Known(NUMBER, extent, terms=terms, origin=COUNT, picks=True)


def enters(number: Known, kind: str) -> bool:
    """Tell whether a number makes values of rows that depend on other rows.

    What may be N counts only where it multiplies, or divides.
    """
    powers = bool(number.terms) and all(t == CONSTANT for t, _ in number.terms or ())
    return not number.picks and (kind in SCALE or not powers)
