"""Warnings of a step: what N workers may compute otherwise than one process.

Each is logged once, on the chief.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import added_up
from tf_dgc.strategies.current import Step
from tf_dgc.strategies.readings import Reading
from tf_dgc.transports.mesh import Mesh

_logger = logging.getLogger("tf_dgc")
_OWN_SUMS = (
    "each worker takes those of its own rows, where one process has those of all. "
    "Gather the rows before: tf.distribute.get_replica_context().all_gather(rows, 0)"
)


class StepWarnings:
    """Warnings that were logged."""

    def __init__(self, mesh: Mesh) -> None:
        """Begin with none.

        Args:
            mesh: of the workers.
        """
        self._mesh = mesh
        self._warnings: set[str] = set()
        self._has_met_nobody = False
        # Models whose metrics were looked at, eagerly.
        self._counted: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    @property
    def _speaks(self) -> bool:
        return bool(self._mesh.everybody.rank == 0)

    def say(self, warning: str) -> None:
        """Log a warning, once."""
        if warning not in self._warnings and self._speaks:
            self._warnings.add(warning)
            _logger.warning(warning)

    def unknown_loss(self, line: str) -> None:
        """Warn of a loss that is made of something else than sums over rows."""
        self.say(
            f"A loss{f' at {line}' * bool(line)} is made of something else than sums "
            "and means over rows: its gradient counts as that of a mean of each "
            "worker's rows, which one process may compute otherwise. Where rows meet "
            "rows, gather them before, in `train_step`: "
            "tf.distribute.get_replica_context().all_gather(rows, 0). Where a constant "
            "stands for the number of rows, write tf.shape(x)[0]; see "
            "docs/how-to/steps-of-your-own.md"
        )

    def doubtful_loss(self, line: str) -> None:
        """Warn of a loss whose divisor may mean one thing or another."""
        self.say(
            f"A loss{f' at {line}' * bool(line)} is a sum divided by a number that is "
            "both the rows of a batch and the elements of a worker's rows: it is taken "
            "for the rows. Where it is the elements, call `tf.reduce_mean`"
        )

    def clipped_early(self) -> None:
        """Warn of gradients that are clipped before they are compressed."""
        line = _host.operations.own_line()
        self.say(
            f"Gradients are clipped{f' at {line}' * bool(line)} before they are "
            "exchanged: each worker clips its own. DGCConfig(clip_norm=...) clips "
            "each worker's part, to norms that add up, as the paper does"
        )

    def batchwise(self, name: str) -> None:
        """Warn of a metric of batches, which is averaged."""
        self.say(
            f"The metric {name!r} gives one number for a batch: the workers' are "
            "averaged by their rows, which gives what one process computes of means, "
            "not of anything else. Let it return a number for each row, or derive it "
            "from keras.metrics.Metric"
        )

    def kept_rows(self, model: keras.Model, flow: _host.flow.Flow) -> None:
        """Name what a step keeps of this worker's rows, beside what is trained."""
        names = [
            variable.path
            for variable in _host.keras.variables_of_users(model)
            if flow.wrote(_host.keras.plain(variable))
        ]
        if names:
            self.say(
                f"The training step of {model.name!r} writes to {', '.join(names)} "
                "what it computes of its worker's rows: each worker has its own, and "
                "the chief's are saved. Where they are to be of all rows, gather what "
                "is written: tf.distribute.get_replica_context().all_gather(rows, 0)"
            )

    def moved_weights(self, variables: Sequence[Any], step: Step) -> None:
        """Name weights that a step has moved, but no optimizer, by its own rows."""
        flow = _host.flow.current()
        if flow is None:
            return
        plain = [(v, _host.keras.plain(v)) for v in variables]
        names = [
            getattr(v, "path", variable.name)
            for v, variable in plain
            if isinstance(variable, tf.Variable)
            and id(variable) not in step.updated
            and flow.wrote(variable)
        ]
        if names:
            self.say(
                f"The training step moves {', '.join(names)} by what it computes of "
                "its worker's rows, and takes a gradient there: each worker takes it "
                "at another place. Move the weights by gradients of all rows, which "
                "`tf.distribute.get_strategy().exchange(gradients)` returns"
            )

    def met_in_outputs(self) -> None:
        """Warn of predictions that depend on the other rows of a batch."""
        self.say(
            "An output in `predict` is made of sums or means over the rows of a batch: "
            f"{_OWN_SUMS}, or call `predict_on_batch` with whole batches"
        )

    def met_nobody(self) -> None:
        """Warn of a step that gathers, or reduces, what this worker has alone."""
        if self._has_met_nobody:
            return  # a gradient reduces what was gathered
        self._has_met_nobody, line = True, _host.operations.own_line()
        self.say(
            f"`all_gather` and `all_reduce` in a step{f', at {line},' * bool(line)} "
            "return what this worker has alone: beside servers workers do not meet "
            "there. One process has the rows of all; use DenseStrategy"
        )

    def what_does_not_add_up(
        self, step: Step, writes: Callable[[], list[_host.operations.Write]]
    ) -> None:
        """Name what metrics keep that is no sum over rows; once for each model."""
        model, losses = step.model, step.losses
        if model is None or losses is None or model in self._counted:
            return
        if tf.executing_eagerly():
            self._counted.add(model)
        for warning in _of_what_is_kept(model, step.trains, writes(), losses.reading):
            self.say(warning)


class WarningsInTurn(StepWarnings):
    """Warnings where each worker has its turn in one process: anyone's are logged."""

    @property
    def _speaks(self) -> bool:
        return True

    def kept_rows(self, model: keras.Model, flow: _host.flow.Flow) -> None:
        """Say nothing: what a step writes is of the rows of all in turn."""


class WarningsOnServers(StepWarnings):
    """Warnings of steps on servers, where metrics and buffers are each worker's own."""

    def kept_rows(self, model: keras.Model, flow: _host.flow.Flow) -> None:
        """Say nothing: variables that nobody trains are each worker's own here."""

    def what_does_not_add_up(
        self, step: Step, writes: Callable[[], list[_host.operations.Write]]
    ) -> None:
        """Say nothing: metrics are each worker's own."""


def _of_what_is_kept(
    model: keras.Model,
    trains: bool,
    writes: Sequence[_host.operations.Write],
    reading: Reading,
) -> Iterator[str]:
    """Return warnings of what a step adds to variables that nobody trains.

    Args:
        model: of which the step is.
        trains: whether workers meet in it to train.
        writes: of the step.
        reading: of it.
    """
    for name in added_up.counters(model, writes, reading):
        yield (
            f"The training step of {model.name!r} adds to {name!r} a number of "
            "Python that tells its worker's rows, as `x.shape[0]`: each worker "
            "counts its own. `tf.shape(x)[0]` becomes the number of all rows"
        )
    normalizes = any(
        isinstance(layer, keras.layers.BatchNormalization)
        for layer in _host.keras.layers_within(model)
    )
    if not (trains and normalizes):  # whose rows meet while they train
        names = added_up.of_met_rows(model, writes, reading)
        if names:
            yield (
                f"Metrics of {model.name!r} ({', '.join(names)}) are of outputs "
                f"made of sums or means over the rows of a batch: {_OWN_SUMS}"
            )
    for name, variable in added_up.others(model, writes, reading):
        yield (
            f"The metric {name!r} keeps in {variable!r} what does not add up over "
            "workers, as a maximum, a mean, a last value or a count of steps: one "
            "process computes otherwise. Keep sums over rows there, or tell how "
            "values of workers become one: `add_variable(aggregation='mean')`, or "
            "'only_first_replica', where all compute the same"
        )
