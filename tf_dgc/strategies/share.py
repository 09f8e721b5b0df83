"""What the batch of a model's step is to this worker, and what its gradients count.

Axis: N workers. A loss is a mean of a worker's n rows, or what was divided or summed:

    sum of (n / sum of n) * g         a mean
    sum of (n / sum of n) * N * g     the loss was divided by N, by Keras or the user
    sum of g                          it was not a mean, but a sum of rows

Keras would divide its own means by N, so that plain sums would do if all had as many
rows. It is kept from that, so that what is added to them, or told by a metric, is what
one process computes; unless the step divides or adds up something itself.

Where a loss is divided by less than all rows, as with masks, n is what it is divided
by. A worker without rows computes with a row of zeros, which counts nothing.
"""

import collections
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.exchanges import Part
from tf_dgc.strategies import division, slicing
from tf_dgc.strategies.logs import Logs
from tf_dgc.transports import Transport

_logger = logging.getLogger("tf_dgc")


class Share:
    """What this worker has of the step that runs; there is one per strategy.

    Variables hold what differs from step to step, as functions that are traced once
    may be called in many steps.
    """

    def __init__(self, transport: Transport, clips_sum: bool, local: bool) -> None:
        """Create the variables, outside of any graph.

        Args:
            transport: of the strategy.
            clips_sum: whether optimizers clip what was exchanged, not what a worker
                brings to the exchange.
            local: whether a step is this worker's alone.
        """
        self._transport = transport
        self._local = local
        self.clips_sum = clips_sum
        own = tf.VariableSynchronization.NONE
        # What is done next depends on them.
        with tf.init_scope(), tf.device("CPU:0"):
            self._rows, self._counted, self._usual = (
                tf.Variable(value, trainable=False, synchronization=own)
                for value in (1.0, 1.0, 0.0)
            )
        self.logs = Logs(transport)
        self._model: keras.Model | None = None  # whose step runs
        self._leaves = self._left = False  # whether means of Keras are not divided
        self._by_keras: collections.deque[Any] = collections.deque(maxlen=8)
        self._may_be_empty = False
        self._divided = False  # whether anybody has asked for N in this step
        self._losses: list[str] = []  # kinds, in this step; see `note_loss`
        self._said: set[str] = set()
        self._factors: dict[Any, tf.Tensor] = {}  # of the step that runs
        self._small_steps = SmallSteps()
        self._followed: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    # Steps.

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
        rows = slicing.row_count(args)
        self._may_be_empty = rows is not None and not (isinstance(rows, int) and rows)
        self._model, self._divided, self._losses = model, False, []
        self._factors = {}
        function = _host.keras.function_of(method)
        self._leaves = not division.is_left_to_keras(model, function)
        self._left = False

        trains = function.__name__ == "train_step" and not self._local

        def run() -> Any:
            if self._may_be_empty:
                result, _, flow = run_with_a_row(model, args, step)
            elif not trains or (tf.executing_eagerly() and model in self._followed):
                return step(args)
            else:
                with _host.flow.Flow([args]) as flow:
                    result = step(args)
            if trains:
                self._followed.add(model)
                self._tell_what_parts(model, flow)
            return result

        try:
            self._rows.assign(1.0 if rows is None else tf.cast(rows, tf.float32))
            if self._local:
                self._small_steps.note(~self.empty)
            return self.logs.noted(model, function.__name__ == "test_step", run)
        finally:
            self._model, self._may_be_empty = None, False
            self._factors = {}

    @property
    def model(self) -> keras.Model | None:
        """The model of which a step runs, if one does."""
        return self._model

    @property
    def empty(self) -> tf.Tensor:
        """Whether this worker has no row in the step that runs: shape [], bool."""
        if not self._may_be_empty:
            return tf.constant(False)
        return self._rows.read_value() == 0.0

    def rows_in_step(self, value: Any) -> Any:
        """Return what a step computes by row; nothing where there are no rows.

        Args:
            value: a tensor, with rows along its first axis.
        """
        flow = _host.flow.current()
        if not self._may_be_empty or flow is None or not tf.is_tensor(value):
            return value
        if not value.shape.rank or not flow.reaches(value):
            return value
        return value[: tf.where(self.empty, 0, tf.shape(value)[0])]

    def own_gradients(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[Any]:
        """Return gradients that are zero where there were no rows to compute them.

        Those of parts are of the rows of all workers.
        """
        if not self._may_be_empty:
            return gradients
        empty = self.empty

        def or_zero(gradient: Any) -> Any:
            if isinstance(gradient, tf.IndexedSlices):
                values = or_zero(gradient.values)
                return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
            return tf.where(empty, tf.zeros_like(gradient), gradient)

        return [
            g if g is None or bands.is_split(v) else or_zero(g)
            for g, v in zip(gradients, variables, strict=True)
        ]

    def all_finite(
        self, found: tf.Tensor, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tf.Tensor:
        """Return whether gradients are finite, but for those that count nothing."""
        if not self._may_be_empty:
            return found
        parts = [
            tf.reduce_all(tf.math.is_finite(g))
            for g, v in zip(gradients, variables, strict=False)
            if g is not None and bands.is_split(v)
        ]
        return tf.logical_or(found, self.empty & tf.reduce_all(parts))

    # Parts of weights, of which no other worker has a gradient.

    def factors(self) -> tf.Tensor:
        """Return what the rows of each worker count in a mean over all.

        All workers call this, in a step. What is applied of gradients is multiplied by
        `Part.whole`, as elsewhere.

        Returns:
            shape [N], float32; 0 for a worker without rows.
        """

        def shares() -> tf.Tensor:
            found = self._transport.all_gather(self._weight(), "row_weights")
            return tf.math.divide_no_nan(found, tf.reduce_sum(found))

        if self._model is None:
            return shares()
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        key = (graph, self._sums_rows, *self._losses)
        if key not in self._factors:
            self._factors[key] = shares()
        return self._factors[key]

    def _weight(self) -> tf.Tensor:
        """Return what this worker's rows count; see `Part`."""
        if self._sums_rows:
            return tf.ones([])
        counted = self._counted if self._counts_own else self._rows
        return tf.where(self.empty, 0.0, counted.read_value())

    @property
    def _sums_rows(self) -> bool:
        """Whether gradients are of sums over rows, or not of a model's step."""
        if self._model is None:
            return True
        stock = self._divided or _host.keras.has_step_of_keras(self._model)
        return "sum" in self._losses or (stock and set(self._losses) == {"none"})

    @property
    def _counts_own(self) -> bool:
        return "own" in self._losses and len(self._losses) == 1

    # Losses.

    def note_division(self) -> None:
        """Note that somebody divides by N, in the step that runs."""
        self._divided = True
        self._refuse_what_is_left()

    def leave_undivided(self) -> bool:
        """Tell whether Keras is to leave a loss, which it asks for, as it is."""
        if not self._leaves or not self.undivided:
            return False
        self._left = True
        return True

    @property
    def undivided(self) -> bool:
        """Whether a step runs whose loss is a mean that nobody divides by N."""
        means = self._model is not None and "sum" not in self._losses
        return means and not self._divided

    def _refuse_what_is_left(self) -> None:
        if self._model is None or not self._left:
            return
        raise RuntimeError(
            "What a step divides by the number of workers, or adds up, must not come "
            "after a mean of Keras, which is divided only where the step is known to "
            f"do so. Received: a step of {self._model.name!r}. Read "
            "`strategy.num_replicas_in_sync` in its first line"
        )

    def note_loss(self, kind: str, counted: Callable[[], tf.Tensor]) -> None:
        """Note by what a loss is divided.

        Args:
            kind: "rows", "own" for something that `counted` returns, "sum" where it is
                a sum, "none" where it is one loss for each row.
            counted: returns a tensor of shape [].
        """
        if self._model is None:
            return
        self._losses.append(kind)
        if kind == "sum":
            self._refuse_what_is_left()
        if kind == "own":
            self._counted.assign(tf.cast(counted(), tf.float32))

    # Means in metrics.

    def note_divided(self, loss: Any) -> None:
        """Note a loss that Keras has divided by N."""
        self._by_keras.append(loss)

    def whole_of(self, value: Any) -> Any:
        """Return a number as one process has it, where Keras has divided it by N."""
        divided = any(value is each for each in self._by_keras)
        return value * self._transport.size if divided else value

    def weight_of_mean(self, given: Any) -> Any:
        """Return what one number of this worker's rows counts beside those of others.

        All workers call this in a step.

        Args:
            given: shape []: the rows of which the number is; None for a mean by steps.

        Returns:
            shape [], float32; or what is given where that is right.
        """
        if self._model is None or self._local or _host.tensorflow.is_in_branch():
            return given
        workers, rank = self._transport.size, self._transport.rank
        if given is None:
            return workers * self.factors()[rank]
        if not self._counts_own:
            return given
        rows = tf.where(self.empty, 0.0, tf.cast(given, tf.float32))
        told = tf.stack([rows, self._weight()])
        rows, weights = tf.unstack(
            self._transport.all_gather(told, "loss_weights"), 2, 1
        )
        share = tf.math.divide_no_nan(weights[rank], tf.reduce_sum(weights))
        return tf.reduce_sum(rows) * share

    def tell_batchwise(self, name: str) -> None:
        """Say that a metric of batches is averaged."""
        self._say(
            f"The metric {name!r} gives one number for a batch: the workers' are "
            "averaged by their rows, which gives what one process computes of means, "
            "not of anything else. Let it return a number for each row, or derive it "
            "from keras.metrics.Metric"
        )

    # The exchange.

    def part(self, optimizer: keras.optimizers.Optimizer, rate: Any) -> Part | None:
        """Return what the gradients that an optimizer applies now count.

        Args:
            optimizer: of the user.
            rate: its learning rate.
        """
        workers, one = self._transport.size, tf.ones([])
        rate = tf.cast(rate, tf.float32)
        if self._model is None or self._sums_rows:
            return Part(rate, one, workers)
        if not self._divided and not self._left:
            self._say_undivided(self._model)
        whole = workers if self._divided else 1
        if self._local:
            if _host.keras.follows_schedule(optimizer):  # by steps of its own
                rate = tf.constant(float("nan"))
            has_rows = ~self.empty
            if getattr(optimizer, "gradient_accumulation_steps", None):
                has_rows = self._small_steps.since_last(optimizer)
            return Part(rate, tf.where(has_rows, one, 0.0), whole)
        if getattr(optimizer, "gradient_accumulation_steps", None):
            return Part(rate, one, whole)
        if not self._counts_own and "own" in self._losses:
            self._say(
                "Losses that leave out rows, or what is masked, are weighted by rows "
                "where there are several of them in a step: shares in which other "
                "numbers count then differ from one worker's"
            )
        self._meet()
        with tf.device("CPU:0"):
            weight = self._weight() / self._usual.read_value()
        return Part(rate, weight, whole)

    def _meet(self) -> None:
        """Agree in the first step on what is usual, so that weights are about 1."""

        def gather() -> None:
            found = self._transport.all_gather(self._rows.read_value(), "usual_rows")
            self._usual.assign(tf.maximum(tf.reduce_max(found), 1.0))

        with tf.device("CPU:0"):
            unknown = self._usual == 0.0
        tf.cond(unknown, gather, lambda: None)

    def _say_undivided(self, model: keras.Model) -> None:
        self._say(
            f"The training step of {model.name!r} divides no loss by the number of "
            "workers: its gradients are averaged over them, by rows, as of means over "
            "the rows of each. Where that is not what is meant, read "
            "`strategy.num_replicas_in_sync` in the step and divide by it"
        )

    def _tell_what_parts(self, model: keras.Model, flow: _host.flow.Flow) -> None:
        """Name what a step keeps of this worker's rows, beside what is trained."""
        names = [
            variable.path
            for variable in _host.keras.variables_of_users(model)
            if flow.wrote(_host.keras.plain(variable))
        ]
        if names:
            self._say(
                f"The training step of {model.name!r} writes to {', '.join(names)} "
                "what it computes of its worker's rows: each worker has its own, and "
                "the chief's are saved. Where they are to be of all rows, gather what "
                "is written: tf.distribute.get_replica_context().all_gather(rows, 0)"
            )

    def _say(self, warning: str) -> None:
        if warning not in self._said and self._transport.rank == 0:
            self._said.add(warning)
            _logger.warning(warning)

    def agree_on_logs(
        self,
        logs: dict[str, Any],
        model: keras.Model | None = None,
        testing: bool = False,
    ) -> dict[str, Any]:
        """Return the same logs of a step on all workers; see `Logs.agree`."""
        return self.logs.agree(logs, float(self._rows), model, testing)


class SmallSteps:
    """Steps in which this worker had rows, between two that optimizers apply."""

    def __init__(self) -> None:
        """Create the counter, outside of any graph."""
        self._count = _counter()
        self._applied: weakref.WeakKeyDictionary[Any, tf.Variable] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, has_rows: tf.Tensor) -> None:
        """Count a step: `has_rows` has shape [], bool."""
        self._count.assign_add(tf.cast(has_rows, tf.int64))

    def since_last(self, optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
        """Tell whether there was such a step since an optimizer was last asked for.

        Args:
            optimizer: that accumulates gradients, and applies them now.

        Returns:
            shape [], bool.
        """
        if optimizer not in self._applied:
            self._applied[optimizer] = _counter()
        before = self._applied[optimizer]
        found = self._count > before.read_value()
        before.assign(self._count)
        return found


def _counter() -> tf.Variable:
    own = tf.VariableSynchronization.NONE
    with tf.init_scope(), tf.device("CPU:0"):
        zero = tf.zeros([], tf.int64)
        return tf.Variable(zero, trainable=False, synchronization=own)


def run_with_a_row(
    model: keras.Model, args: Any, step: Callable[[Any], Any]
) -> tuple[Any, tf.Tensor, _host.flow.Flow]:
    """Run a step with a row of zeros where there is none, which leaves no trace.

    Variables to which the step wrote what depends on the row have the values of before;
    what follows the weights, or counts steps, does so as on other workers.

    Returns:
        What the step returns, how many rows there were, shape [] and int32, and what
        became of them.
    """
    kept = _host.keras.changed_by_steps(model)
    before = [variable.read_value() for variable in kept]
    filled, count = slicing.at_least_one_row(args)
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
