"""Logs of steps, which are to be the same on all workers at the end of an epoch.

What a metric gave within a step is of this worker's rows, and is read again, of those
of all; anything else is averaged.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.transports import handshake
from tf_dgc.transports.mesh import Mesh

# For a name in logs, which metric of the model gave it, and by what key.
_Origins = dict[str, tuple[int, str | None]]


class Logs:
    """Logs of models' steps; there is one per strategy."""

    def __init__(self, mesh: Mesh) -> None:
        """Begin with nothing.

        Args:
            mesh: of the workers.
        """
        self._mesh = mesh
        self._origins: weakref.WeakKeyDictionary[keras.Model, dict[bool, _Origins]] = (
            weakref.WeakKeyDictionary()
        )

    def noted(self, model: keras.Model, testing: bool, step: Callable[[], Any]) -> Any:
        """Run a step, and note what in the logs that it returns metrics gave.

        Args:
            model: whose step it is.
            testing: whether for `evaluate`.
            step: takes nothing.
        """
        with _noting(model.metrics) as found:
            logs = step()
        if isinstance(logs, Mapping):
            flat = _flat(logs)
            origins = {k: found[id(v)][1] for k, v in flat.items() if id(v) in found}
            self._origins.setdefault(model, {})[testing] = origins
        return logs

    def given_by_metrics(self, model: keras.Model) -> set[str]:
        """Return the names in the logs of a model's training step that metrics gave."""
        return set(self._origins.get(model, {}).get(False, {}))

    def agree(
        self,
        logs: Mapping[str, Any],
        rows: float,
        model: keras.Model | None = None,
        testing: bool = False,
    ) -> dict[str, Any]:
        """Return the same logs of a step on all workers, which call this.

        Args:
            logs: of the last step of this worker.
            rows: that it had in this step.
            model: whose step it was, if one's.
            testing: whether for `evaluate`.

        Returns:
            What metrics gave, of all workers. Of the rest the mean by rows, over those
            that have some, of what is a number; the chief's of what is not, or this
            worker's own where it cannot be told.
        """
        flat = _flat(logs)
        origins = self._origins.get(model, {}).get(testing, {}) if model else {}
        origins = {name: origins[name] for name in flat if name in origins}
        own = {k: _as_json(v) for k, v in flat.items() if k not in origins}
        record = {"rows": rows if flat else 0.0, "logs": own, "metrics": origins}
        found = handshake.tell(self._mesh.everybody, "logs", record)
        told: dict[str, Any] = next(
            (each["metrics"] for each in found if each["metrics"]), {}
        )
        results = _results(model, told)
        names = [*flat, *results, *(name for each in found for name in each["logs"])]
        return {
            name: results[name]
            if name in results
            else _agreed(name, flat.get(name), found)
            for name in dict.fromkeys(names)
        }


class OwnLogs(Logs):
    """Logs of steps of which each worker has its own."""

    def agree(
        self,
        logs: Mapping[str, Any],
        rows: float,
        model: keras.Model | None = None,
        testing: bool = False,
    ) -> dict[str, Any]:
        """Return the logs of this worker."""
        return dict(logs)


@contextlib.contextmanager
def _noting(
    metrics: Sequence[keras.Metric],
) -> Iterator[dict[int, tuple[Any, tuple[int, str | None]]]]:
    """Note what metrics give: by identity, the tensor, the metric's place and a key."""
    found: dict[int, tuple[Any, tuple[int, str | None]]] = {}

    def noting(place: int, result: Callable[[], Any]) -> Callable[[], Any]:
        def noted() -> Any:
            given = result()
            parts = given if isinstance(given, Mapping) else {None: given}
            for key, part in parts.items():
                found[id(part)] = part, (place, key)
            return given

        return noted

    places = {id(metric): place for place, metric in enumerate(metrics)}
    own = {id(each): each for each in metrics}.values()
    watched = [each for each in own if "result" not in vars(each)]
    for metric in watched:
        # Keras would look at what is set for something to track.
        noted = noting(places[id(metric)], metric.result)
        object.__setattr__(metric, "result", noted)
    try:
        yield found
    finally:
        for metric in watched:
            object.__delattr__(metric, "result")


def _results(
    model: keras.Model | None, origins: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Read metrics of all workers, which call this, each once and in one order."""
    if model is None or not origins:
        return {}
    metrics = model.metrics
    given = {
        place: metrics[place].result()
        for place in sorted({int(place) for place, _ in origins.values()})
    }
    return {
        name: given[place] if key is None else given[place][key]
        for name, (place, key) in origins.items()
    }


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs without logs in them, as Keras gives them to callbacks."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found.update(_flat(value) if isinstance(value, Mapping) else {name: value})
    return found


def _as_json(value: Any) -> Any:
    """Return a number, or list of numbers, or text; None of what is nothing such."""
    if isinstance(value, str):
        return value
    if tf.is_tensor(value) and value.dtype == tf.bfloat16:
        value = tf.cast(value, tf.float32)  # which NumPy does not know
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    if array.dtype.kind not in "fiub":
        return None
    return array.tolist()


def _agreed(name: str, own: Any, found: list[dict[str, Any]]) -> Any:
    """Return what all take for a value that each has told, or None."""
    told = [each["logs"].get(name) for each in found]
    if all(value == told[0] for value in told) and own is not None:
        # Keras does not make a number of a tensor of bfloat16, for callbacks.
        return float(told[0]) if isinstance(told[0], int | float) else own
    rows = np.array([float(each["rows"]) for each in found])
    counts = [
        (value, n)
        for value, n in zip(told, rows, strict=True)
        if value is not None and not isinstance(value, str) and n > 0
    ]
    try:
        values = np.array([value for value, _ in counts], np.float64)
        mean = np.average(values, axis=0, weights=[n for _, n in counts])
    except (TypeError, ValueError, ZeroDivisionError):
        return next((value for value in told if value is not None), own)
    return float(mean) if mean.ndim == 0 else mean
