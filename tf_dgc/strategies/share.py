"""What the batch of a model's step is to this worker, and what its gradients count.

Axis: N workers. The loss of a step is read in the operations by which it was computed,
see `losses.py`. Of a worker's n rows its gradient g counts in the exchange

    sum of (n / sum of n) * g         where the loss is a mean of rows
    sum of g                          where it is a sum, or anything else, of which the
                                      sums over all rows were exchanged before

Keras would divide its own means by N. It is kept from that in steps of models, so that
what is added to them, or told by a metric, is what one process computes. A worker
without rows computes with a row of zeros, which counts nothing.
"""

import collections
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands, values
from tf_dgc.exchanges import Part
from tf_dgc.strategies import added_up, replicas, slicing
from tf_dgc.strategies.logs import Logs
from tf_dgc.strategies.losses import BY_ROWS, DONE, SUMMED, Losses, NotKnown
from tf_dgc.strategies.readings import CONSTANT, NUMBER, ROWS, Reading
from tf_dgc.strategies.uses import AtOnce
from tf_dgc.transports import Transport, sums

_logger = logging.getLogger("tf_dgc")


class Share:
    """What this worker has of the step that runs; there is one per strategy.

    Variables hold what differs from step to step, as functions that are traced once
    may be called in many steps.
    """

    def __init__(
        self, transport: Transport, clips_sum: bool, local: bool, averages: bool = False
    ) -> None:
        """Create the variables, outside of any graph.

        Args:
            transport: of the strategy.
            clips_sum: whether optimizers clip what was exchanged, not what a worker
                brings to the exchange.
            local: whether a step is this worker's alone.
            averages: whether all but the first steps are, of which weights are
                averaged.
        """
        self._transport = transport
        self._local, self._sums = local, not (local or averages)
        self.clips_sum = clips_sum
        own = tf.VariableSynchronization.NONE
        # What is done next depends on them.
        with tf.init_scope(), tf.device("CPU:0"):
            self._rows, self._usual = (
                tf.Variable(value, trainable=False, synchronization=own)
                for value in (1.0, 0.0)
            )
        self.logs = Logs(transport)
        self._model: keras.Model | None = None  # whose step runs
        self._by_keras: collections.deque[Any] = collections.deque(maxlen=8)
        self._may_be_empty = False
        self._graph: Any = None  # in which the step is traced
        self._losses: Losses | None = None  # of the step that runs
        self._ways: dict[int, str] = {}  # by variable: how gradients become one
        self._way = BY_ROWS  # of the gradients that are computed now
        self._meets = False  # whether workers meet in the forward pass
        self._shares: dict[Any, tf.Tensor] = {}  # of the rows, by graph
        # Gradients that were computed together, and what they belong to.
        self._computed: list[tuple[list[Any], list[Any]]] = []
        self._early: dict[int, Any] = {}  # gradients of all, by this worker's
        self._before: dict[int, str] = {}  # ways of those that were exchanged
        self._updated: set[int] = set()  # variables that optimizers have updated
        self._undecided: list[str] = []  # lines of conditions that are built now
        self._said: set[str] = set()
        # Models whose metrics were looked at, eagerly.
        self._counted: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._at_once = AtOnce(
            clips_sum and self._sums,
            self._say if self._sums else lambda _: None,
            self._in_branch,
        )
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
        self._model, self._meets = model, False
        self._graph = _graph()
        self._forget()
        name = _host.keras.function_of(method).__name__

        trains = name == "train_step" and not self._local
        own = name == "train_step" and not _host.keras.is_of_keras(method)

        def read(args: Any) -> Any:
            with self._at_once.followed(model) if own else contextlib.nullcontext():
                return self._read(args, step)

        def run() -> Any:
            if self._may_be_empty:
                result, _, flow = run_with_a_row(model, args, read)
            elif not trains or (tf.executing_eagerly() and model in self._followed):
                return read(args)
            else:
                with _host.flow.Flow([args]) as flow:
                    result = read(args)
            if trains:
                self._followed.add(model)
                self._tell_what_parts(model, flow)
            return result

        try:
            self._rows.assign(1.0 if rows is None else tf.cast(rows, tf.float32))
            if self._local or name == "train_step":
                self._small_steps.note(~self.empty)
            return self.logs.noted(model, name == "test_step", run)
        finally:
            self._model, self._losses, self._may_be_empty = None, None, False
            self._forget()

    def _forget(self) -> None:
        """Forget what was known of a step."""
        self._ways, self._before, self._shares = {}, {}, {}
        self._computed, self._early, self._updated = [], {}, set()

    def _read(self, args: Any, step: Callable[[Any], Any]) -> Any:
        """Run a step, so that its losses can be read."""
        size = self._transport.size
        reading = Reading(*slicing.tensors_of(args), size)
        self._losses = Losses(reading, size, self._total, self._transport.rank)
        with _host.operations.recorded() as writes:
            logs = step(args)
            self._at_once.look_at_results(logs)
            self._tell_what_does_not_add_up(writes)
            if not isinstance(logs, Mapping):
                return logs
            return {name: self._told(value) for name, value in logs.items()}

    def _told(self, value: Any) -> Any:
        """Return a number of logs as one process has it, but for means of rows."""
        if not isinstance(value, tf.Tensor) or value.shape.rank != 0:
            return value
        if not value.dtype.is_floating or self._local:
            return value
        return self._whole(value)[0]

    def _total(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return sums over the rows of all workers; in a local step an estimate."""
        if self._local:
            return [self._transport.size * each for each in numbers]
        if self._in_branch():
            raise NotKnown(_host.operations.own_line())
        return self._transport.all_reduce(self.counted(numbers), "loss_sums")

    @property
    def model(self) -> keras.Model | None:
        """The model of which a step runs, if one does."""
        return self._model

    @property
    def steps_with_rows(self) -> int:
        """How many steps of training this worker has had rows in, eagerly."""
        return self._small_steps.count

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
        if self._model is None:
            return gradients
        if self._losses is not None:
            parts = [part for gradient in gradients for part in _parts_of(gradient)]
            self._at_once.look_at_applied(parts, self._losses.reading)
        self._updated |= {id(_host.keras.plain(v)) for v in variables}
        gradients = [self._undivided(gradient) for gradient in gradients]
        gradients = self._of_one_way(gradients, variables)
        if not self._may_be_empty:
            return gradients
        empty = self.empty

        def or_zero(gradient: Any) -> Any:
            if isinstance(gradient, tf.IndexedSlices):
                values = or_zero(gradient.values)
                return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
            return tf.where(empty, tf.zeros_like(gradient), gradient)

        return [
            g if g is None or bands.is_split(v) or self.is_done([v]) else or_zero(g)
            for g, v in zip(gradients, variables, strict=True)
        ]

    def _undivided(self, gradient: Any) -> Any:
        """Return a gradient that a step has divided by N as one process has it."""
        if gradient is None or self._losses is None:
            return gradient
        computed = {
            id(p) for all_, _ in self._computed for g in all_ for p in _parts_of(g)
        }
        part = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        guess = self._losses.reading.power_of
        power = replicas.power_between(part, computed, guess)
        return values.scaled(gradient, float(self._transport.size) ** -power)

    def _of_one_way(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[Any]:
        """Return gradients that become one with those of others in the same way."""
        keys = [id(_host.keras.plain(v)) for v in variables]
        for key, gradient in zip(keys, gradients, strict=True):
            if key in self._before:
                self._ways[key] = self._way_after_exchange(gradient, self._before[key])
        ways = [self._ways.get(key, BY_ROWS) for key in keys]
        if len(set(ways)) <= 1:
            return gradients
        self._ways |= dict.fromkeys(keys, SUMMED)
        return [
            self._converted(g, way, SUMMED)
            for g, way in zip(gradients, ways, strict=True)
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
        """Return what the rows of each worker count in the gradients of all.

        All workers call this, in a step. What is applied of gradients is multiplied by
        `Part.whole`, as elsewhere.

        Returns:
            shape [N], float32; 0 for a worker without rows.
        """
        if self._model is None or self._way == SUMMED:
            return tf.fill([self._transport.size], 1.0 / self._transport.size)
        return self._shares_of_rows()

    def _shares_of_rows(self) -> tf.Tensor:
        """Return the share of each worker in the rows of all: shape [N], float32."""
        graph = _graph()
        if graph not in self._shares:
            found = self._transport.all_gather(self._weight(), "row_weights")
            total = tf.reduce_sum(found)
            self._shares[graph] = tf.math.divide_no_nan(found, total)
        return self._shares[graph]

    def _own_share(self) -> tf.Tensor:
        """Return the share of this worker in the rows of all: shape [], float32."""
        return self._shares_of_rows()[self._transport.rank]

    def _in_branch(self) -> bool:
        """Tell whether what is traced may not run in each step, as in a branch."""
        return _graph() is not self._graph and _host.tensorflow.is_in_branch()

    def _weight(self) -> tf.Tensor:
        """Return what this worker's rows count; see `Part`."""
        return tf.where(self.empty, 0.0, self._rows.read_value())

    def note_asked(self) -> None:
        """Note that a script asks for N; it may divide by it in the step that runs."""
        if self._losses is not None and not _host.operations.called_by_library():
            self._losses.reading.asked = self._transport.size

    def counted(self, value: Any) -> Any:
        """Return what this worker adds to a sum over all: nothing without rows."""
        if not self._may_be_empty:
            return value
        empty = self.empty
        return tf.nest.map_structure(
            lambda each: tf.where(empty, tf.zeros_like(each), each),
            value,
            expand_composites=True,
        )

    def note_meeting(self, tensor: Any) -> None:
        """Note that workers meet in the forward pass, and get the same tensor."""
        if self._losses is not None:
            self._meets = True
            self._losses.reading.note_same(tensor)

    def note_rows(self, tensor: Any) -> None:
        """Note what workers have computed together, of this one's rows."""
        if self._losses is not None:
            self._losses.reading.note_rows(tensor)
        if (flow := _host.flow.current()) is not None:
            flow.add([tensor])

    def note_moments(self, moments: Sequence[Any]) -> None:
        """Note what a layer normalizes by, which is each worker's own on purpose."""
        if self._losses is not None:
            for tensor in moments:
                self._losses.reading.note_same(tensor)

    # Losses.

    @property
    def leaves_undivided(self) -> bool:
        """Whether Keras is to leave its losses as they are: in steps of models."""
        return self._model is not None

    def gradient(
        self,
        original: Callable[..., Any],
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any,
        unconnected: Any,
    ) -> Any:
        """Compute gradients of a loss, so that those of all workers can become one.

        Args:
            original: `tf.GradientTape.gradient`.
            tape: of the user.
            target: see there, and for what follows.
            sources: what is trained, or anything.
            output_gradients: of the target.
            unconnected: what is returned where there is none.
        """
        flat = tf.nest.flatten(sources)
        trained = [_host.keras.plain(v) for v in flat]
        trains = any(isinstance(each, tf.Variable) for each in trained)
        targets = tf.nest.flatten(target)
        simple = trains and all(isinstance(each, tf.Tensor) for each in targets)
        if self._losses is None or not simple:
            given = output_gradients
            if given is None and not trains:
                given = self._counts_of_rows(targets, flat)
                if given is not None and self._losses is not None:
                    found = original(tape, targets, sources, given, unconnected)
                    for gradient in tf.nest.flatten(found):
                        if isinstance(gradient, tf.Tensor):
                            self._losses.reading.note_rows(gradient)
                    return found
            return original(tape, target, sources, given, unconnected)
        self._at_once.look_at(targets)
        self._at_once.look_at_weights(trained)
        self._tell_what_moves(flat)
        way, targets, upstream = self._weighed(self._losses, targets, output_gradients)
        self._way = way  # for the backward passes of layers
        found = original(tape, targets, sources, upstream, unconnected)
        self._way = BY_ROWS
        ways = [self._ways.setdefault(id(v), way) for v in trained]
        ways = [
            self._before.get(id(v), way) for v, way in zip(trained, ways, strict=True)
        ]
        pairs = zip(tf.nest.flatten(found), ways, strict=True)
        gradients = [self._converted(gradient, way, to) for gradient, to in pairs]
        self._computed.append((gradients, trained))
        if self._at_once.takes(gradients, trained):
            gradients = self.exchanged(gradients)
        else:
            self._at_once.add(part for g in gradients for part in _parts_of(g))
        return tf.nest.pack_sequence_as(found, gradients)

    def _counts_of_rows(
        self, targets: Sequence[Any], sources: Sequence[Any]
    ) -> list[tf.Tensor] | None:
        """Return what losses count whose gradients are taken to rows of the batch.

        So that a row has the gradient that it has in one process. None: as they are.
        """
        losses, tensors = self._losses, [*targets, *sources]
        if losses is None or self._local or self._in_branch():
            return None
        if not all(isinstance(each, tf.Tensor) for each in tensors):
            return None
        rows = [losses.reading.of(each).kind == ROWS for each in sources]
        way = losses.way_of(targets) if all(rows) else None
        if way is None:
            return None
        scale = float(self._transport.size) ** -way[1]
        if way[0] == BY_ROWS:
            scale = scale * self._own_share()
        return [tf.fill(tf.shape(t), tf.cast(scale, t.dtype)) for t in targets]

    def _weighed(
        self, losses: Losses, targets: list[Any], given: Any
    ) -> tuple[str, list[Any], Any]:
        """Return the way of gradients, what they are of, and what that counts."""
        size = float(self._transport.size)
        way = losses.way_of(targets)
        if way is None:
            try:
                if given is not None:
                    raise NotKnown(_host.operations.own_line())
                whole = losses.whole(targets)
            except NotKnown as error:
                self._say_unknown(error.line or _host.operations.own_line())
                way = BY_ROWS, 0
            else:
                if not self._local:
                    return SUMMED, whole.targets, whole.upstream
                return BY_ROWS, whole.targets, [size * each for each in whole.upstream]
        for line in losses.reading.doubts:
            self._say_doubtful(line)
        kind, power = way
        scale: Any = size**-power
        if self._meets and not self._local:
            own = tf.where(self.empty, 0.0, 1.0)
            if kind == BY_ROWS:
                own = self._own_share()
            kind, scale = SUMMED, scale * own
        if isinstance(scale, float) and scale == 1.0:
            return kind, targets, given
        given = [None] * len(targets) if given is None else tf.nest.flatten(given)
        upstream = [
            tf.cast(scale, t.dtype) * (tf.ones_like(t) if g is None else g)
            for t, g in zip(targets, given, strict=True)
        ]
        return kind, targets, upstream

    def _converted(self, gradient: Any, way: str, to: str) -> Any:
        """Return a gradient that becomes one with those of others in another way."""
        if gradient is None or way == to or self._local:
            return gradient
        share = self._own_share()
        by = share if to == SUMMED else tf.math.divide_no_nan(1.0, share)
        return values.scaled(gradient, by)

    def _say_unknown(self, line: str) -> None:
        self._say(
            f"A loss{f' at {line}' * bool(line)} is made of something else than sums "
            "and means over rows: its gradient counts as that of a mean of each "
            "worker's rows, which one process may compute otherwise. Where rows meet "
            "rows, gather them before, in `train_step`: "
            "tf.distribute.get_replica_context().all_gather(rows, 0); see "
            "docs/how-to/steps-of-your-own.md"
        )

    def _say_doubtful(self, line: str) -> None:
        self._say(
            f"A loss{f' at {line}' * bool(line)} is a sum divided by a number that is "
            "both the rows of a batch and the elements of a worker's rows: it is taken "
            "for the rows. Where it is the elements, call `tf.reduce_mean`"
        )

    # Gradients that are exchanged before they are applied.

    def is_done(self, variables: Sequence[Any]) -> bool:
        """Tell whether the gradients of variables are those of all workers."""
        keys = [id(_host.keras.plain(v)) for v in variables]
        return bool(keys) and all(self._ways.get(key) == DONE for key in keys)

    def exchanged(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of all workers; they are not exchanged again.

        Raises:
            ValueError: they are not of this step.
        """
        if not self._sums:  # a step is this worker's alone
            return list(gradients)
        variables = self._variables_of(gradients)
        if variables is None or any(bands.is_split(v) for v in variables):
            raise ValueError(
                "`gradients` must be those that `tape.gradient` has returned in this "
                "step, all of them, of layers that are not split. Received: "
                f"{len(gradients)} gradients"
            )
        parts = [part for gradient in gradients for part in _parts_of(gradient)]
        if {id(part) for part in parts} <= self._exchanged_ids():
            return list(gradients)
        ways = [self._ways.get(id(variable), BY_ROWS) for variable in variables]
        weighed = []
        for gradient, variable, way in zip(gradients, variables, ways, strict=True):
            way = self._before.setdefault(id(variable), way)
            if gradient is not None and way == BY_ROWS:
                gradient = values.scaled(gradient, self._own_share())
            weighed.append(gradient)
        given = [g for g in self.counted(weighed) if g is not None]
        found = iter(sums.dense(self._transport, given, "early").gradients)
        self._ways |= {id(variable): DONE for variable in variables}
        done = [None if g is None else next(found) for g in gradients]
        for own, all_ in zip(gradients, done, strict=True):
            pairs = zip(_parts_of(own), _parts_of(all_), strict=True)
            self._early |= {id(one): other for one, other in pairs}
        self._at_once.end_at(part for g in done for part in _parts_of(g))
        self._computed.append((done, variables))
        return done

    def _exchanged_ids(self) -> set[int]:
        """Return the identities of gradients that are those of all workers."""
        return {id(gradient) for gradient in self._early.values()}

    def _way_after_exchange(self, gradient: Any, before: str) -> str:
        """Return the way of a gradient whose variable has one of all workers, too.

        Args:
            gradient: made of this worker's gradients, or of those of all, by operations
                that are followed back.
            before: the way of this worker's.
        """
        done = self._exchanged_ids()
        computed = [g for gradients, _ in self._computed for g in gradients]
        own = {id(part) for g in computed for part in _parts_of(g)} | self._early.keys()
        waiting, seen, is_exchanged = _parts_of(gradient), set[int](), gradient is None
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in done:
                is_exchanged = True
            elif id(tensor) in own:
                return before
            elif id(tensor) not in seen:
                seen.add(id(tensor))
                known = isinstance(tensor, tf.Tensor)
                operation = _host.operations.of(tensor) if known else None
                waiting.extend([] if operation is None else operation.inputs)
        # A mean by rows of what all workers have alike is the same again.
        return DONE if is_exchanged or before != BY_ROWS else BY_ROWS

    def _variables_of(self, gradients: Sequence[Any]) -> list[Any] | None:
        """Return what gradients belong to, or what they were made of, in this step."""

        def alike(one: Any, other: Any) -> bool:
            if one is None or other is None:
                return one is other
            kinds = [isinstance(each, tf.IndexedSlices) for each in (one, other)]
            return kinds[0] == kinds[1] and one.shape == other.shape

        for computed, variables in reversed(self._computed):
            if len(computed) == len(gradients) and all(map(alike, computed, gradients)):
                return variables
        return None

    def clipping(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of all workers where a step clips its own."""
        given = [
            tf.convert_to_tensor(g) if isinstance(g, tf.Variable) else g
            for g in gradients
        ]
        own = {id(g) for g in given if g is not None}
        whole = next((c for c, _ in self._computed if own & {id(g) for g in c}), None)
        several = len(given) > 1 and self._variables_of(given) is not None
        if not (self._sums and own) or (whole is None and not several):
            return given
        if not self.clips_sum:
            line = _host.operations.own_line()
            self._say(
                f"Gradients are clipped{f' at {line}' * bool(line)} before they are "
                "exchanged: each worker clips its own. DGCConfig(clip_norm=...) clips "
                "each worker's part, to norms that add up, as the paper does"
            )
            return given
        if own.isdisjoint(self._early):
            self.exchanged(given if whole is None else whole)
        return [self._early.get(id(g), g) for g in given]

    # Conditions.

    @contextlib.contextmanager
    def decided(self, condition: Any) -> Iterator[Any]:
        """Decide as one process does while a condition, and what it guards, is built.

        All workers call this.

        Args:
            condition: shape [], bool.

        Yields:
            The condition, of the rows of all workers where it is of sums over rows.
        """
        losses, whole = self._losses, None
        if losses is None or self._local or not isinstance(condition, tf.Tensor):
            yield condition
            return
        kind = losses.reading.of(condition).kind
        if kind == CONSTANT:
            yield condition
            return
        if kind == NUMBER:
            with contextlib.suppress(NotKnown):
                whole = losses.again(condition)
                losses.reading.note_same(whole)
        if whole is not None:
            yield whole
            return
        self._undecided.append(_host.operations.own_line())
        try:
            yield condition
        finally:
            self._undecided.pop()

    def refuse_undecided(self) -> None:
        """Refuse an exchange where workers may decide otherwise whether to hold it.

        Raises:
            ValueError: a condition that is each worker's own guards it.
        """
        if self._undecided and self._sums:
            line = self._undecided[-1]
            raise ValueError(
                f"The condition{f' at {line}' * bool(line)} decides whether an "
                "optimizer is applied, and each worker decides it by its own rows: "
                "some would wait for others. Decide by sums, means or extremes of "
                "rows, which are taken over those of all workers; or by what "
                "tf.distribute.get_replica_context().all_reduce(...) returns"
            )

    # Means in metrics.

    def note_divided(self, loss: Any) -> None:
        """Note a loss that Keras has divided by N."""
        self._by_keras.append(loss)

    def weighed_mean(self, value: Any, given: Any) -> tuple[Any, Any]:
        """Return a number for a mean over steps, and what it counts beside others'.

        All workers call this in a step.

        Args:
            value: shape []: of this worker.
            given: shape []: the rows of which it is; None for a mean by steps.

        Returns:
            The number as one process has it, or what this worker has of it, and its
            weight: shape [], or what is given where that is right.
        """
        workers = self._transport.size
        if self._model is None:
            divided = any(value is each for each in self._by_keras)
            return (value * workers if divided else value), given
        if self._local or self._in_branch():
            return value, given
        value, is_whole = self._whole(value)
        if given is None and not is_whole:
            given = workers * self._own_share()
        return value, given

    def _whole(self, value: Any) -> tuple[Any, bool]:
        """Return a number as one process has it, and whether it is of all rows."""
        losses = self._losses
        if not isinstance(value, tf.Tensor) or losses is None:
            return value, False
        way = losses.way_of([value])
        try:
            if way is None or way[0] == SUMMED:
                return losses.value([value]), True
        except NotKnown:
            return value, False
        scale = float(self._transport.size) ** -way[1]
        return (value * tf.cast(scale, value.dtype) if way[1] else value), False

    def tell_batchwise(self, name: str) -> None:
        """Say that a metric of batches is averaged."""
        self._say(
            f"The metric {name!r} gives one number for a batch: the workers' are "
            "averaged by their rows, which gives what one process computes of means, "
            "not of anything else. Let it return a number for each row, or derive it "
            "from keras.metrics.Metric"
        )

    # The exchange.

    def is_by_rows(self, variables: Sequence[Any]) -> bool:
        """Tell whether the mean by rows of gradients, not their sum, is that of all."""
        keys = [id(_host.keras.plain(v)) for v in variables]
        return any(self._ways.get(key, BY_ROWS) == BY_ROWS for key in keys)

    def factor(self, variables: Sequence[Any]) -> tf.Tensor:
        """Return what this worker's gradients of variables count in the sum of all.

        Shape [], float32.
        """
        if self.is_done(variables):
            return tf.fill([], 1.0 / self._transport.size)
        return self._own_share() if self.is_by_rows(variables) else tf.ones([])

    def part(
        self, optimizer: keras.optimizers.Optimizer, rate: Any, variables: Sequence[Any]
    ) -> Part:
        """Return what the gradients that an optimizer applies now count.

        Args:
            optimizer: of the user.
            rate: its learning rate.
            variables: that it trains.
        """
        workers, one = self._transport.size, tf.ones([])
        rate = tf.cast(rate, tf.float32)
        ways = {self._ways.get(id(_host.keras.plain(v)), BY_ROWS) for v in variables}
        if self._model is None or ways == {SUMMED}:
            return Part(rate, one, workers)
        if self._local:
            if _host.keras.follows_schedule(optimizer):  # by steps of its own
                rate = tf.constant(float("nan"))
            has_rows = ~self.empty
            if getattr(optimizer, "gradient_accumulation_steps", None):
                has_rows = self._small_steps.since_last(optimizer)
            return Part(rate, tf.where(has_rows, one, 0.0), 1)
        if getattr(optimizer, "gradient_accumulation_steps", None):
            return Part(rate, one, 1)
        self._meet()
        with tf.device("CPU:0"):
            weight = self._weight() / self._usual.read_value()
        return Part(rate, weight, 1)

    def _meet(self) -> None:
        """Agree in the first step on what is usual, so that weights are about 1."""

        def gather() -> None:
            found = self._transport.all_gather(self._rows.read_value(), "usual_rows")
            self._usual.assign(tf.maximum(tf.reduce_max(found), 1.0))

        before = [share for graph, share in self._shares.items() if graph is _graph()]
        with tf.device("CPU:0"), tf.control_dependencies(before):  # in one order
            unknown = self._usual == 0.0
        tf.cond(unknown, gather, lambda: None)

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

    def _tell_what_moves(self, variables: Sequence[Any]) -> None:
        """Name weights that a step has moved, but no optimizer, by its own rows."""
        flow = _host.flow.current()
        if flow is None or self._local:
            return
        plain = [(v, _host.keras.plain(v)) for v in variables]
        names = [
            getattr(v, "path", variable.name)
            for v, variable in plain
            if isinstance(variable, tf.Variable)
            and id(variable) not in self._updated
            and flow.wrote(variable)
        ]
        if names:
            self._say(
                f"The training step moves {', '.join(names)} by what it computes of "
                "its worker's rows, and takes a gradient there: each worker takes it "
                "at another place. Move the weights by gradients of all rows, which "
                "`tf.distribute.get_strategy().exchange(gradients)` returns"
            )

    def _tell_what_does_not_add_up(
        self, writes: Callable[[], list[_host.operations.Write]]
    ) -> None:
        """Name what metrics keep that is no sum over rows; once for each model."""
        model, losses = self._model, self._losses
        if model is None or losses is None or model in self._counted:
            return
        if tf.executing_eagerly():
            self._counted.add(model)
        for name, variable in added_up.others(model, writes(), losses.reading):
            self._say(
                f"The metric {name!r} keeps in {variable!r} what does not add up over "
                "workers, as a maximum, a mean, a last value or a count of steps: one "
                "process computes otherwise. Keep sums over rows there, or tell how "
                "values of workers become one: `add_variable(aggregation='mean')`, or "
                "'only_first_replica', where all compute the same"
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

    @property
    def count(self) -> int:
        """Number of them so far, eagerly."""
        return int(self._count.numpy())

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


def _graph() -> Any:
    """Return the graph that is built; None where operations run eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _parts_of(gradient: Any) -> list[Any]:
    """Return a gradient, and the values of one that is sparse."""
    if gradient is None or isinstance(gradient, tf.Variable | keras.Variable):
        return []
    slices = isinstance(gradient, tf.IndexedSlices)
    return [gradient, gradient.values] if slices else [gradient]


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


def share_of(strategy: Any) -> Any:
    """Return the `Share` of a strategy: None of others, and where one worker trains."""
    return getattr(strategy, "share", None)
