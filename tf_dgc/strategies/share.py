"""Share of this worker in the step that runs: its rows, and what its gradients count.

Axis: N workers, or those of a site, where a step is theirs. What a step is, is known in
`current.py`; of its ideas each has a room:

    rows            how many rows this worker has, and of the rows of all which share
    backward        gradients of a loss, computed so that those of all can become one
    early           gradients that are exchanged where they are computed
    applied_gradients   gradients that optimizers apply, so that they can become one
    weights         what a gradient counts in the exchange
    conditions      conditions that all workers decide alike
    means           numbers in metrics and logs
    step_warnings   what one process may compute otherwise

A worker without rows computes with a row of an earlier batch, which counts nothing.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import drawn_rows, slicing
from tf_dgc.strategies.applied_gradients import AppliedGradients
from tf_dgc.strategies.backward import Backward
from tf_dgc.strategies.conditions import Conditions
from tf_dgc.strategies.current import Current, Step
from tf_dgc.strategies.cuts import NotKnown
from tf_dgc.strategies.earlier_rows import EarlierRows
from tf_dgc.strategies.early import Early
from tf_dgc.strategies.logs import Logs
from tf_dgc.strategies.losses import Losses
from tf_dgc.strategies.means import StepMeans
from tf_dgc.strategies.readings import Reading
from tf_dgc.strategies.rows import Rows, SmallSteps
from tf_dgc.strategies.step_warnings import StepWarnings
from tf_dgc.strategies.uses import AtOnce
from tf_dgc.strategies.weights import GradientWeights
from tf_dgc.transports.mesh import Mesh


class Share:
    """Share of this worker in the step that runs; there is one per strategy.

    Attributes:
        clips_sum: whether optimizers clip what was exchanged, not what a worker brings
            to the exchange.
        rows: of this worker.
        small_steps: of training, in which this worker has had rows.
        early: gradients that are exchanged before they are applied.
        applied: gradients that optimizers apply.
        weights: of gradients.
        backward: gradients of losses.
        conditions: that all workers decide alike.
        means: numbers in metrics and logs.
        logs: of steps.
        warnings: warnings.
    """

    _rows, _early, _weights = Rows, Early, GradientWeights
    _means, _warnings, _conditions = StepMeans, StepWarnings, Conditions
    _logs = Logs

    def __init__(
        self, mesh: Mesh, clips_sum: bool, local: bool, averages: bool = False
    ) -> None:
        """Create the variables, outside of any graph.

        Args:
            mesh: of the workers.
            clips_sum: whether optimizers clip what was exchanged.
            local: whether a step is this worker's alone.
            averages: whether all but the first steps are, of which weights are
                averaged.
        """
        self._mesh, self._current = mesh, Current()
        self.warnings = self._warnings(mesh)
        self.rows = self._rows(mesh, self._current)
        self.small_steps, self._earlier = SmallSteps(), EarlierRows()
        self.logs = self._logs(mesh)
        self._followed: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self.decide(clips_sum, local, averages)

    def decide(self, clips_sum: bool, local: bool, averages: bool) -> None:
        """Begin without gradients, before the first step; arguments as of the class."""
        self._local, self.clips_sum = local, clips_sum
        mesh, current, sums = self._mesh, self._current, not (local or averages)
        warnings, rows = self.warnings, self.rows
        self._at_once = at_once = AtOnce(
            clips_sum and sums,
            warnings.say if sums else lambda _: None,
            lambda: current.step.in_branch(),
        )
        self.early = early = self._early(
            mesh, current, rows, warnings, at_once, sums, clips_sum
        )
        args = mesh, current, rows, early, at_once, local
        self.applied = applied = AppliedGradients(*args)
        self.weights = self._weights(mesh, current, rows, self.small_steps, local)
        self.backward = Backward(
            mesh, current, rows, early, applied, warnings, at_once, local
        )
        self.conditions = self._conditions(mesh, current, at_once, local, sums)
        self.means = self._means(mesh, current, rows, local)

    @property
    def step(self) -> Step:
        """The step that runs; without a model, where none does."""
        return self._current.step

    def run(
        self, model: keras.Model, method: Any, args: Any, step: Callable[[Any], Any]
    ) -> Any:
        """Run a step of a model.

        Args:
            model: of the user.
            method: of the model, which the step calls.
            args: of the step; tensors or arrays with rows along the first axis, or
                anything.
            step: takes such arguments.

        Returns:
            What the step returns.
        """
        args = slicing.as_tensors(args)
        count = slicing.row_count(args)
        may_be_empty = count is not None and not (isinstance(count, int) and count)
        name = _host.keras.step_named(model, method)
        trains = name == "train_step" and not self._local
        own = name == "train_step" and not _host.keras.is_of_keras(method)

        def read(args: Any) -> Any:
            with self._at_once.followed(model) if own else contextlib.nullcontext():
                result = self._read(args, step)
            if own and trains:
                self.conditions.compare()
            return result

        alone = self._local and name == "train_step"
        with self._current.entered(Step(model, may_be_empty, trains, alone)):
            self.rows.begin(count)
            if self._local or name == "train_step":
                self.small_steps.note(~self.rows.empty)
            return self.logs.noted(
                model, name == "test_step", lambda: self._run(model, args, read, trains)
            )

    def _run(
        self, model: keras.Model, args: Any, read: Callable[[Any], Any], trains: bool
    ) -> Any:
        """Run a step, with a row more where there is none, and follow its rows."""
        if self.step.may_be_empty:
            result, _, flow = run_with_a_row(model, args, read, self._earlier)
        elif not trains or (tf.executing_eagerly() and model in self._followed):
            return read(args)
        else:
            with _host.flow.Flow([args]) as flow:
                result = read(args)
        if trains:
            self._followed.add(model)
            self.warnings.kept_rows(model, flow)
        return result

    def _read(self, args: Any, step: Callable[[Any], Any]) -> Any:
        """Run a step, so that its losses can be read."""
        over, replicas = self.rows.over, self._mesh.replicas
        reading = Reading(*slicing.tensors_of(args), replicas)
        own = self._mesh.everybody, self.step.alone, self.warnings.say
        drawn = drawn_rows.of_step(reading, self.rows, *own)
        total = functools.partial(_total, self.rows, self._current, self._local)
        self.step.losses = Losses(reading, over.size, total, over.rank, replicas)
        with _host.operations.recorded() as writes, drawn.entered():
            logs = step(args)
            self._at_once.look_at_results(logs)
            self.warnings.what_does_not_add_up(self.step, writes)
            if not isinstance(logs, Mapping):
                return logs
            return {name: self.means.in_logs(value) for name, value in logs.items()}

    def run_own(self, args: Any, step: Callable[[Any], Any]) -> Any:
        """Run a step of a script that is no model's, in a loop of its own."""
        everybody, say = self._mesh.everybody, self.warnings.say
        return drawn_rows.run_own(args, step, everybody, self._local, say)

    def note_meeting(self, tensor: Any) -> None:
        """Note that workers meet in the forward pass, and get the same tensor."""
        self.step.note_meeting(tensor)


def _total(
    rows: Rows, current: Current, local: bool, numbers: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Return sums over the rows of all workers; where a step is of some, about.

    Args:
        rows: of this worker.
        current: the step that runs.
        local: whether it is this worker's alone: all count as this one.
        numbers: of this worker.

    Raises:
        NotKnown: in a branch, where workers cannot meet.
    """
    if local:
        return [rows.over.size * each for each in numbers]
    if current.step.in_branch():
        raise NotKnown(_host.operations.own_line())
    found = rows.over.all_reduce(rows.counted(numbers), "loss_sums")
    return found if rows.others == 1.0 else [rows.others * each for each in found]


def run_with_a_row(
    model: keras.Model,
    args: Any,
    step: Callable[[Any], Any],
    earlier: EarlierRows | None = None,
) -> tuple[Any, tf.Tensor, _host.flow.Flow]:
    """Run a step with a row more where there is none, which leaves no trace.

    Variables to which the step wrote what depends on the row have the values of before;
    what follows the weights, or counts steps, does so as on other workers.

    Returns:
        What the step returns, how many rows there were, shape [] and int32, and what
        became of them.
    """
    kept = _host.keras.changed_by_steps(model)
    before = [variable.read_value() for variable in kept]
    filled, count = slicing.at_least_one_row(args, earlier)
    with _host.flow.Flow([filled]) as flow:
        result = step(filled)
    # Eagerly, numbers may have gone through Python, where nothing follows them.
    sure = _host.keras.metric_variables(model) if tf.executing_eagerly() else []
    own = {id(v) for v in sure} | {id(v) for v in kept if flow.wrote(v)}
    changed = [p for p in zip(kept, before, strict=True) if id(p[0]) in own]

    def put_back() -> None:
        for variable, value in changed:
            variable.assign(value)

    tf.cond(count == 0, put_back, lambda: None)
    return result, count, flow


def share_of(strategy: Any) -> Any:
    """Return the `Share` of a strategy: None of others, and where one worker trains."""
    return getattr(getattr(strategy, "inner", None), "share", None)
