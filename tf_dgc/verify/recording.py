"""Recording of the first steps of the first `fit` of a script.

The batches are seen where Keras hands them to `strategy.run`, the gradients where an
optimizer applies them, weights and logs at the end of each batch.
"""

import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.callbacks import BackupState
from tf_dgc.optimizers import is_plain_sgd
from tf_dgc.values import without_repetition
from tf_dgc.verify import quiet
from tf_dgc.verify.records import (
    RecordedRun,
    RecordedSample,
    RecordedStep,
    sample_of,
    save,
)
from tf_dgc.verify.step_notes import StepNotes

# Callbacks that write files which the script may still need.
_WRITERS = (
    BackupState,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)
_CLIPS = ("clip by global norm", "clip by norm", "clip by value")


class Enough(BaseException):
    """All steps are recorded: the script need not go on."""


class Recorder(keras.callbacks.Callback):
    """Recorder of the first `fit` of a script, in one process."""

    def __init__(self, path: pathlib.Path, steps: int) -> None:
        """Prepare a record.

        Args:
            path: of the files to write; see `records.save`.
            steps: how many to record, at most an epoch's.
        """
        super().__init__()
        self._path, self._count = path, steps
        lists = ("clips", "draws", "left_out", "rows")
        self._notes: dict[str, Any] = {name: [] for name in lists}
        self._steps: list[RecordedStep] = []
        self._step = StepNotes()
        self._initial: dict[str, RecordedSample] | None = None

    def install(self) -> None:
        """Let the next `fit` of this process be recorded, and end the script."""
        _host.patches.wrap("fit", self._fit)
        _host.patches.wrap("update step", self._note_gradients)
        for name in _CLIPS:
            _host.patches.wrap(name, self._note_line)

    def _fit(
        self,
        original: Callable[..., Any],
        model: keras.Model,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given["shuffle"] = False
        given["verbose"] = 0
        given["validation_data"] = None
        given["callbacks"] = [*self._kept(given["callbacks"]), self]
        model.jit_compile = False
        model.steps_per_execution = 1
        quiet.without_dropout(model)
        self._notes["batch_norms"] = quiet.synchronize_statistics(model)
        strategy = model.distribute_strategy
        run = strategy.run
        strategy.run = self._watching(run, model)
        try:
            return original(*bound.args, **bound.kwargs)
        finally:
            strategy.run = run

    def _kept(self, callbacks: Any) -> list[Any]:
        given = callbacks or []
        given = getattr(given, "callbacks", given)
        given = list(given) if isinstance(given, Sequence) else [given]
        writers = [each for each in given if isinstance(each, _WRITERS)]
        self._notes["left_out"] = [type(each).__name__ for each in writers]
        return [each for each in given if not isinstance(each, _WRITERS)]

    # Inside of the step.

    def _watching(
        self, run: Callable[..., Any], model: keras.Model
    ) -> Callable[..., Any]:
        def watched(
            fn: Any, args: Any = (), kwargs: Any = None, options: Any = None
        ) -> Any:
            own = _host.keras.model_of(fn) is model
            trains = own and _host.keras.step_named(model, fn) == "train_step"
            if trains:
                self._step.note_rows(args[0])
            result = run(fn, args, kwargs, options)
            if trains and not tf.executing_eagerly():
                graph = tf.compat.v1.get_default_graph()
                kinds = {operation.type for operation in graph.get_operations()}
                self._notes["draws"] = sorted(filter(_draws, kinds))
            return result

        return watched

    def _note_gradients(
        self,
        original: Callable[..., Any],
        optimizer: Any,
        distribution: Any,
        pairs: Any,
        learning_rate: Any,
    ) -> Any:
        if self.model is None:  # in a loop of the script's own
            return original(optimizer, distribution, pairs, learning_rate)
        used = [(g, v) for g, v in pairs if g is not None]
        paths = {id(v.value): _name_of(v) for v in self.model.variables}
        names = _unique([paths.get(id(v), _name_of(v)) for _, v in used])
        self._step.note_gradients(names, [g for g, _ in used])
        if not tf.distribute.has_strategy():  # as several workers do
            rows = [_name_of(v) for g, v in used if isinstance(g, tf.IndexedSlices)]
            self._notes["rows"] = [] if is_plain_sgd(optimizer) else rows
            pairs = [(without_repetition(g), v) for g, v in pairs]
        return original(optimizer, distribution, pairs, learning_rate)

    def _note_line(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        line = _line_of_user()
        if line and line not in self._notes["clips"]:
            self._notes["clips"].append(line)
        return clip(*args, **kwargs)

    # Between the steps.

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the first weights."""
        if self._initial is None:
            self._initial = _weights_of(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note a step; end after the last.

        Raises:
            Enough: all steps are recorded.
        """
        merged = _host.keras.epoch_logs(self.model, dict(logs or {}))
        numbers = {k: float(np.mean(v)) for k, v in merged.items()}
        self._steps.append(self._step.ended(_weights_of(self.model), numbers))
        if len(self._steps) == self._count:
            self._end()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End, where an epoch has fewer steps.

        Raises:
            Enough: always.
        """
        self._end()

    def _end(self) -> None:
        model = self.model
        self._notes["trainable"] = list(_weights_of(model, trainable=True))
        self._notes["asked"] = self._count
        save(self._path, RecordedRun(self._notes, self._initial or {}, self._steps))
        raise Enough("all steps are recorded")


def _weights_of(
    model: keras.Model, trainable: bool = False
) -> dict[str, RecordedSample]:
    variables = model.trainable_variables if trainable else model.variables
    kept = [v for v in variables if v.dtype not in ("string", "resource")]
    names = _unique([_name_of(v) for v in kept])
    return {
        name: sample_of(keras.ops.convert_to_numpy(v))
        for name, v in zip(names, kept, strict=True)
    }


def _name_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name).removesuffix(":0")


def _unique(names: Sequence[str]) -> list[str]:
    """Return names of which those that come again are numbered."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def _line_of_user() -> str:
    """Return the innermost line of the script's own code, as "FILE:LINE"."""
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    folder = str(pathlib.Path(main).resolve().parent)
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(folder) and "site-packages" not in frame.filename:
            return f"{pathlib.Path(frame.filename).name}:{frame.lineno}"
    return ""


def _draws(operation: str) -> bool:
    """Tell whether an operation draws random numbers."""
    return "Random" in operation or "Multinomial" in operation
