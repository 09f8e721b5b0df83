"""Drawings of what training reported; needs the extra `plots` (matplotlib)."""

from collections.abc import Mapping, Sequence
from typing import Any

_DENSITY = "density/"


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "tf_dgc.plots needs matplotlib: pip install 'tf_dgc[plots]'"
        ) from error
    return pyplot


def _record_of(history: Any, wanted: str) -> Mapping[str, Sequence[float]]:
    """Return the dictionary of a History; `wanted` is a log it must have."""
    record = getattr(history, "history", history)
    if not isinstance(record, Mapping):
        raise TypeError(
            "`history` must be a History or its dictionary. Received: "
            f"history={history!r}"
        )
    if not any(name.startswith(wanted) for name in record):
        raise ValueError(
            f"`history` must have the log {wanted!r}, which `callbacks."
            f"CompressionStats` adds. Received: {sorted(record)}"
        )
    return record


def _label_ticks(axis: Any) -> None:
    """Label the ticks of a logarithmic axis by plain numbers."""
    from matplotlib import ticker

    axis.set_major_formatter(ticker.LogFormatter())
    axis.set_minor_formatter(ticker.LogFormatter(labelOnlyBase=False))


def loss_and_compression(history: Any, steps_per_epoch: int | None = None) -> Any:
    """Draw the losses and the compression ratio over the steps of training.

    Args:
        history: what `fit` returned, or its dictionary, with the logs of
            `CompressionStats`.
        steps_per_epoch: by default as `fit` knew it; else epochs are drawn.

    Returns:
        A matplotlib Figure; `figure.savefig(path)` writes it.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `history` is not one.
        ValueError: it has no compression ratios.
    """
    record = _record_of(history, "compression")
    steps = steps_per_epoch or (getattr(history, "params", None) or {}).get("steps")
    # A fit that was resumed does not begin at epoch 0.
    epochs = getattr(history, "epoch", None) or range(len(record["compression"]))
    ends = [(epoch + 1) * (steps or 1) for epoch in epochs]
    figure, left = _pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    right = left.twinx()
    for name in ("loss", "val_loss"):
        if name in record:
            left.plot(ends, record[name], marker=".", label=name)
    # An epoch's ratio is that of the steps before its end.
    ratios = record["compression"]
    right.step(ends, ratios, "k.:", where="pre", label="dense bytes / sent bytes")
    left.set(xlabel="step" if steps else "epoch", ylabel="loss")
    right.set(ylabel="compression", yscale="log")
    _label_ticks(right.yaxis)
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def sparsity_by_layer(history: Any, epoch: int = -1) -> Any:
    """Draw which share of each compressed tensor was not sent in a step, on average.

    Args:
        history: what `fit` returned, or its dictionary, with the logs of
            `CompressionStats(by_tensor=True)`.
        epoch: which one, as an index; the last by default.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `history` is not one.
        ValueError: it has no densities.
    """
    record = _record_of(history, _DENSITY)
    names = [name for name in record if name.startswith(_DENSITY)]
    sparsities = [1.0 - record[name][epoch] for name in names]
    figure, axis = _pyplot().subplots(figsize=(8, 1.5 + 0.25 * len(names)))
    axis.barh([name.removeprefix(_DENSITY) for name in names], sparsities)
    axis.invert_yaxis()
    lowest = min(sparsities)
    axis.set(xlabel="sparsity", xlim=(max(0.0, lowest - 0.1 * (1 - lowest)), 1.0))
    figure.tight_layout()
    return figure
