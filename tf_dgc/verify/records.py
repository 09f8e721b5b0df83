"""Figures of the first steps of a `fit`, as one process has them. Pure NumPy.

Axes: n rows of a batch on one worker, S steps.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Of larger tensors so many elements are kept, evenly spread, beside their norm.
MOST_ELEMENTS = 200_000


class RecordedSample(NamedTuple):
    """Elements of one tensor.

    Attributes:
        elements: shape [at most MOST_ELEMENTS], of all of them, evenly spread.
        norm: Euclidean norm of the whole tensor.
        shape: of the tensor.
    """

    elements: np.ndarray
    norm: float
    shape: tuple[int, ...]


def sample_of(tensor: Any) -> RecordedSample:
    """Return the sample of an array of numbers of any shape."""
    array = np.asarray(tensor)
    flat = array.ravel()
    if flat.size > MOST_ELEMENTS:
        flat = flat[np.linspace(0, flat.size - 1, MOST_ELEMENTS).astype(np.int64)]
    elements = flat.astype(np.float64)
    norm = float(np.linalg.norm(array.astype(np.float64).ravel()))
    return RecordedSample(elements, norm, array.shape)


class RecordedStep(NamedTuple):
    """One step of training.

    Attributes:
        rows: a digest of each row of this worker, by component of the batch.
        shown: the first numbers of each component, for people.
        gradients: as the optimizer applies them, by name of the variable.
        weights: variables of the model after the step, by name.
        logs: as `fit` has them after the step.
    """

    rows: Mapping[str, list[str]]
    shown: Mapping[str, list[float]]
    gradients: Mapping[str, RecordedSample]
    weights: Mapping[str, RecordedSample]
    logs: Mapping[str, float]


class RecordedRun(NamedTuple):
    """Record of one worker's run.

    Attributes:
        notes: what was found of the script: `batch_norms`, a number of layers; `clips`,
            lines in which a step clips gradients; `draws`, operations of the step
            that draw random numbers; `left_out`, callbacks that were left out; `rows`,
            variables whose gradients' rows were added up; `trainable`, names of
            variables.
        initial: variables of the model before the first step, by name.
        steps: [S].
    """

    notes: Mapping[str, Any]
    initial: Mapping[str, RecordedSample]
    steps: Sequence[RecordedStep]


def save(path: pathlib.Path, run: RecordedRun) -> None:
    """Write a run to two files, `path` with .json and with .npz."""
    arrays: dict[str, np.ndarray] = {}

    def plain(samples: Mapping[str, RecordedSample]) -> list[Any]:
        entries = []
        for name, sample in samples.items():
            key = f"a{len(arrays)}"
            arrays[key] = sample.elements
            entries.append([name, key, sample.norm, list(sample.shape)])
        return entries

    steps = [
        {
            "rows": dict(step.rows),
            "shown": dict(step.shown),
            "gradients": plain(step.gradients),
            "weights": plain(step.weights),
            "logs": dict(step.logs),
        }
        for step in run.steps
    ]
    document = {
        "notes": dict(run.notes),
        "initial": plain(run.initial),
        "steps": steps,
    }
    np.savez(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
    path.with_suffix(".json").write_text(json.dumps(document))


def load(path: pathlib.Path) -> RecordedRun:
    """Invert `save`.

    Raises:
        FileNotFoundError: no `fit` was recorded.
    """
    document = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz")) as arrays:

        def samples(entries: list[Any]) -> dict[str, RecordedSample]:
            return {
                name: RecordedSample(arrays[key], norm, tuple(shape))
                for name, key, norm, shape in entries
            }

        steps = [
            RecordedStep(
                rows=step["rows"],
                shown=step["shown"],
                gradients=samples(step["gradients"]),
                weights=samples(step["weights"]),
                logs=step["logs"],
            )
            for step in document["steps"]
        ]
        return RecordedRun(document["notes"], samples(document["initial"]), steps)
