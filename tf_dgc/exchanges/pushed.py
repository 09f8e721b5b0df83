"""What a worker selects for the servers, and what it keeps back.

The step of dgc.py, of one worker by itself: N is 1 there, and what it sends goes to
the servers. Tensors that are not compressed have their velocity here as well, and go
whole in each push, so that no momentum is left to the servers.

Axes: P arena elements, K slots of a stage, C <= K selected elements.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc._host.shared import Table
from tf_dgc.compression import arena, dgc, halves, message, selection, warmup
from tf_dgc.config import DGCConfig
from tf_dgc.exchanges import inplace
from tf_dgc.exchanges.base import take_velocity
from tf_dgc.exchanges.figures import Coverage, TensorStats
from tf_dgc.exchanges.inplace import own_variable
from tf_dgc.servers.shared import Servers, Twins
from tf_dgc.servers.stamps import ALL, Stamped, Workers


class Chosen(NamedTuple):
    """What is to be pushed of the arena."""

    everything: tf.Tensor  # shape [], bool: values are all of the arena
    positions: tf.Tensor  # shape [C], int64, ascending
    values: tf.Tensor  # shape [C], of `value_dtype`
    whole: tf.Tensor  # shape [P], float32, where everything goes; else [0]
    scale: tf.Tensor  # shape [], float32, which values are to be multiplied by


class Pushed:
    """The velocity and the residual of a worker's tensors, and their way to servers.

    Attributes:
        layout: of the arena of compressed tensors.
        velocity: u, shape [P], float32; None where no momentum is corrected.
        residual: v, of the same shape.
        dense_velocity: u of the other tensors, end to end; None as above.
        step: shape [], int64, number of pushes that were selected.
        stamped: the tensors on the servers; None where there are none to compress.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        momentum: dgc.Momentum | None,
        config: DGCConfig,
        device: str,
        always: bool,
    ) -> None:
        """Create the variables, all zero, outside of any graph.

        Args:
            variables: that are trained.
            momentum: of the optimizer.
            config: the settings.
            device: of this worker, where its state is.
            always: whether all of it changes on the servers in each push.
        """
        self.variables, self.config, self._device = list(variables), config, device
        self._always = always
        shapes = [v.shape.as_list() for v in variables]
        tables = [i for i, v in enumerate(variables) if isinstance(v, Table)]
        self._large = [
            i
            for i, v in enumerate(variables)
            if i not in tables
            and v.dtype == tf.float32
            and arena.is_compressed(shapes[i], v.dtype, config.min_elements)
        ]
        others = [i for i in range(len(shapes)) if i not in tables + self._large]
        self._small, self._tables = others, tables
        self.layout, self._dense_layout = (
            arena.build([(variables[i].name, shapes[i]) for i in own])
            for own in (self._large, others)
        )
        # u and v are then steps of SGD, not gradients.
        self._corrects = config.momentum_correction and momentum is not None
        with_velocity = bool(self._corrects and momentum and momentum.factor)
        layouts = self.layout, self._dense_layout
        with tf.init_scope(), tf.device(device):
            zeros = [tf.zeros([each.size]) for each in layouts]
            self.residual = own_variable(zeros[0], "dgc_residual")
            self.velocity, self.dense_velocity = (
                own_variable(zero, "dgc_velocity") if with_velocity else None
                for zero in zeros
            )
            self._begun: list[Any] = [None, None]
            if self._corrects and momentum is not None:
                owns = self._large, others
                self._begun = [take_velocity(momentum, own) for own in owns]
        with tf.init_scope(), tf.device("CPU:0"):
            self.step = own_variable(tf.zeros([], tf.int64), "dgc_step")
            self._rate = own_variable(tf.zeros([]), "dgc_rate")  # of the last step
        self._coverage = Coverage(self.layout, device)
        self._stages = warmup.stages(config)
        self._slots = [self._slots_at(stage.sparsity) for stage in self._stages]
        self.stamped: Stamped | None = None

    def _slots_at(self, sparsity: float) -> int:
        """Return K of a stage; 0 where all of the arena costs less."""
        slots = sum(selection.slots_per_segment(self.layout, sparsity))
        size = tf.as_dtype(self.config.value_dtype).size
        sparse = slots * (2 + size) + 4 * halves.rooms(self.layout.size)
        return slots if sparsity and sparse < 4 * self.layout.elements else 0

    # On the servers.

    def open(self, name: str, servers: Servers, workers: Workers, twins: Twins) -> None:
        """Make handles of what is on the servers."""
        large = [self.variables[i] for i in self._large]
        if large:
            found: list[Any] = [twins.of(variable) for variable in large]
            rivals: list[Any] = twins.stamped_of(found)
            args = name, servers, workers, self.layout, found, rivals
            self.stamped = Stamped(*args)
            self.stamped.always.assign(self._always)
            self._twins = twins
            with tf.init_scope(), tf.device("CPU:0"):
                parts = len(self.stamped.parts)
                since = tf.fill([parts, 2], tf.constant(ALL, tf.int64))
                self._since = own_variable(since, "downpour_since")
                self._assigned = own_variable(tf.zeros([], tf.int64), "downpour_seen")
            twins.stamped.append(self.stamped)

    def begin(self) -> None:
        """Give first values to what is on the servers; the chief does.

        It is the chief who goes on with the momentum of a model that was loaded.
        """
        if self.stamped is not None:
            self.stamped.begin()
        velocities = self.velocity, self.dense_velocity
        layouts = self.layout, self._dense_layout
        for velocity, layout, begun in zip(
            velocities, layouts, self._begun, strict=True
        ):
            if velocity is not None and begun is not None:
                velocity.assign(arena.flatten(layout, begun))

    # Up.

    def select(
        self,
        local: Sequence[Any],
        momentum: dgc.Momentum | None,
        wanted: tf.Tensor | None = None,
    ) -> tuple[list[Any], Chosen]:
        """Accumulate gradients; select what is to be pushed, and take it out.

        Args:
            local: this worker's gradients.
            momentum: of the optimizer, with its learning rate.
            wanted: shape [], bool: where False nothing is done, and what is returned
                does not count; None is True.

        Returns:
            For each variable the step that goes whole, or None, and the rest. There is
            one that goes whole, if only of no rows: with it the optimizer is called.
        """
        if wanted is None:
            return self._select(local, momentum)
        whole = self._small or [0]  # a period of pushes leaves no place for tables

        def select() -> Any:
            steps, chosen = self._select(local, momentum)
            return [steps[i] for i in whole], tuple(chosen)

        def skip() -> Any:
            small = [self.variables[i] for i in self._small]
            none: list[Any] = [tf.zeros(v.shape, v.dtype) for v in small]
            none = none or [_no_rows(self.variables[0])]
            dtype = tf.as_dtype(self.config.value_dtype)
            nothing = (
                tf.constant(False),
                tf.zeros([0], tf.int64),
                tf.zeros([0], dtype),
                tf.zeros([0]),
                tf.ones([]),
            )
            return none, nothing

        given, chosen = tf.cond(wanted, select, skip)
        steps: list[Any] = [None] * len(self.variables)
        for i, step in zip(whole, given, strict=True):
            steps[i] = step
        return steps, Chosen(*chosen)

    def _select(
        self, local: Sequence[Any], momentum: dgc.Momentum | None
    ) -> tuple[list[Any], Chosen]:
        rate = tf.cast(momentum.learning_rate if momentum else 0.0, tf.float32)
        gradients = self._clipped(local, rate)
        corrected = None
        if momentum is not None and self._corrects:
            corrected = momentum._replace(learning_rate=rate, slots=())
        self._correct_rate(rate)
        found: list[Any] = [None] * len(gradients)
        small = arena.flatten(self._dense_layout, [gradients[i] for i in self._small])
        steps = self._dense_steps(small, corrected, rate)
        for i, own in zip(self._small, steps, strict=True):
            found[i] = tf.cast(own, self.variables[i].dtype)
        for i in self._tables:
            found[i] = values.scaled(gradients[i], rate)
        large = arena.flatten(self.layout, [gradients[i] for i in self._large])
        state = dgc.State(self.velocity, self.residual)
        inplace.update(self._device, dgc.accumulate, state, large, corrected)
        if not (self._small or self._tables):
            found[0] = _no_rows(self.variables[0])
        chosen = self._chosen()
        if corrected is None:
            chosen = chosen._replace(scale=rate * chosen.scale)
        return found, chosen

    def _clipped(self, local: Sequence[Any], rate: tf.Tensor) -> list[Any]:
        dense = [
            g if i in self._tables else tf.convert_to_tensor(g)
            for i, g in enumerate(local)
        ]
        names = [*(v.name for v in self.variables), "the learning rate"]
        bad = values.first_nonfinite(dense, [rate])

        def told() -> list[Any]:
            return [
                "A gradient holds NaN or infinity; this worker stops, nothing of it "
                "was pushed. Step and variable:",
                self.step.read_value(),
                tf.gather(tf.constant(["", *names]), bad),
            ]

        with tf.control_dependencies([values.require(bad == 0, told)]):
            if self.config.clip_norm is None:
                return [values.copied(g) for g in dense]
            scale = dgc.clip_scale(dense, self.config.clip_norm, 1)
            return [values.scaled(g, scale) for g in dense]

    def _correct_rate(self, rate: tf.Tensor) -> None:
        """Let v fall with the learning rate; this is the last one from now on."""
        with tf.device("CPU:0"):  # which chooses what is done
            last = self._rate.read_value()
            fallen = dgc.fall(rate, last)
            self._rate.assign(tf.where(rate > 0, rate, last), read_value=False)
            falls = fallen < 1.0

        def scale() -> None:
            self.residual.assign(fallen * self.residual, read_value=False)

        if self.config.rate_correction and self._corrects:
            tf.cond(falls, scale, lambda: None)

    def _dense_steps(
        self, gradient: tf.Tensor, momentum: dgc.Momentum | None, rate: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return the steps of the tensors that go whole."""
        velocity = self.dense_velocity
        before = None if velocity is None else velocity.read_value()
        state = dgc.State(before, tf.zeros_like(gradient))
        after, step = dgc.accumulate(state, gradient, momentum)
        if velocity is not None:
            velocity.assign(after)
        if momentum is None:
            step = rate * step
        return arena.unflatten(self._dense_layout, step)

    def _chosen(self) -> Chosen:
        """Select at the present stage, and keep the rest."""
        step = self.step.read_value()
        self.step.assign_add(1, read_value=False)
        sparse = [i for i, slots in enumerate(self._slots) if slots]
        dense = [i for i in range(len(self._slots)) if i not in sparse]
        groups = [each for each in (sparse, dense) if each]
        branches = [
            functools.partial(self._some if each is sparse else self._all, each, step)
            for each in groups
        ]
        if len(groups) == 1:
            return branches[0]()
        which = [int(i in dense) for i in range(len(self._slots))]
        with tf.device("CPU:0"):
            group = tf.constant(which)[warmup.stage_index(step, self._stages)]
        return Chosen(*values.one_of(branches, group))

    def _all(self, _: Sequence[int], step: tf.Tensor) -> Chosen:
        whole = tf.identity(self.residual.read_value())
        with tf.control_dependencies([whole]):
            self.residual.assign(tf.zeros_like(whole), read_value=False)
        self._coverage.record_all()
        none = tf.zeros([0], tf.as_dtype(self.config.value_dtype))
        nowhere = tf.zeros([0], tf.int64)
        return Chosen(tf.constant(True), nowhere, none, whole, tf.ones([]))

    def _some(self, stages: Sequence[int], step: tf.Tensor) -> Chosen:
        number = None
        if len(stages) > 1:
            number = warmup.stage_index(step, [self._stages[i] for i in stages])
        plans = [
            selection.plan(
                self.layout, self._stages[i].sparsity, self.config.sample_fraction
            )
            for i in stages
        ]
        plan = selection.one_of(plans, number)
        residual = self.residual.read_value()
        peaks = inplace.call(self._device, selection.peaks, self.residual)
        found = dgc.select(residual, peaks, self.layout, plan, self.config, step)
        sent = message.decoded(found.values, found.exponent)
        take = [
            functools.partial(self._take_out, self._slots[i], found.positions, sent)
            for i in stages
        ]
        with tf.control_dependencies([values.one_of(take, number)]):
            positions = tf.identity(found.positions)
        scale = message.power_of_two(-found.exponent)
        nothing = tf.zeros([0])
        return Chosen(tf.constant(False), positions, found.values, nothing, scale)

    def _take_out(self, slots: int, positions: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
        """Take what is sent out of u and v: sent + kept = accumulated."""
        unused = [[0, slots - tf.size(positions)]]
        size = tf.constant(self.layout.size, tf.int64)
        where = tf.pad(positions, unused, constant_values=size)
        where, sent = (
            tf.ensure_shape(each, [slots]) for each in (where, tf.pad(sent, unused))
        )
        velocity = self.velocity if self.config.momentum_masking else None
        state = dgc.State(velocity, self.residual)
        inplace.update(self._device, dgc.keep, state, where[:, tf.newaxis], sent)
        self._coverage.record(where)
        return tf.size(positions)

    def cost(self, chosen: Chosen) -> tf.Tensor:
        """Return the bytes and elements of a push of the arena: shape [2], int64."""
        if self.stamped is None:
            return tf.zeros([2], tf.int64)
        count = tf.size(chosen.positions, tf.int64)
        rooms = sum(halves.rooms(part.size) for part in self.stamped.parts)
        some = count * (2 + chosen.values.dtype.size) + 4 * rooms
        elements = tf.constant(self.layout.elements, tf.int64)
        return tf.where(
            chosen.everything,
            tf.stack([4 * elements, elements]),
            tf.stack([some, count]),
        )

    def push(self, chosen: Chosen, factor: tf.Tensor) -> None:
        """Push what was selected.

        Args:
            chosen: of `select`.
            factor: what the learning rate is multiplied by, shape [], float32.
        """
        stamped = self.stamped
        if stamped is None:
            return
        scale = factor * chosen.scale

        def some() -> None:
            stamped.push(chosen.positions, chosen.values, scale)

        def everything() -> None:
            whole = tf.ensure_shape(chosen.whole, [self.layout.size])
            stamped.push_all(whole, scale)

        if all(self._slots):
            some()
        elif not any(self._slots):
            everything()
        else:
            tf.cond(chosen.everything, everything, some)

    # Down.

    def pull(self) -> tf.Tensor:
        """Fetch what has changed since the last time; return bytes, shape [], int64."""
        if self.stamped is None:
            return tf.zeros([], tf.int64)
        with tf.device("CPU:0"):
            assigned = tf.identity(self._twins.assigned.read_value())
            afresh = assigned != self._assigned.read_value()
            since = tf.where(afresh, tf.constant(ALL, tf.int64), self._since)
        mirrors = [self.variables[i] for i in self._large]
        times, size = self.stamped.pull(mirrors, since)
        with tf.device("CPU:0"):
            self._since.assign(times)
            self._assigned.assign(assigned)
        return size

    @property
    def whole(self) -> list[Any]:
        """The variables that are fetched whole."""
        return [self.variables[i] for i in sorted(self._small + self._tables)]

    # What is kept back.

    @property
    def state(self) -> Mapping[str, tf.Variable]:
        """The residual and, where momentum is corrected, velocities."""
        unit = "steps" if self._corrects else "gradients"
        found = {f"residual of {unit}": self.residual, "learning rate": self._rate}
        if self.velocity is not None and self.dense_velocity is not None:
            found[f"velocity of {unit}"] = self.velocity
            found["velocity of what goes whole"] = self.dense_velocity
        return found

    def flush(self, variables: Sequence[Any]) -> bool:
        """Push, eagerly, all that is kept back of variables; tell whether there is."""
        known = {id(variable) for variable in variables}
        wanted = [id(self.variables[i]) in known for i in self._large]
        if self.stamped is None or not any(wanted):
            return False
        mask = arena.mask(self.layout, wanted)
        own = self.residual.read_value()
        nothing = tf.zeros_like(own)
        factor = tf.ones([]) if self._corrects else self._rate.read_value()
        self.stamped.push_all(tf.where(mask, own, nothing), factor)
        self.residual.assign(tf.where(mask, nothing, own))
        self.stamped.wait()
        return True

    def kept(self) -> list[tf.Tensor]:
        """Return the residual."""
        return [self.residual.read_value()]

    def tensor_stats(self, reset: bool) -> list[TensorStats]:
        """Return this worker's figures of each compressed tensor, eagerly."""
        found = self._coverage.stats()
        if reset:
            self._coverage.reset()
        return found


def _no_rows(variable: Any) -> tf.IndexedSlices:
    shape = variable.shape.as_list()
    nothing = tf.zeros([0, *shape[1:]], variable.dtype)
    rows = tf.zeros([0], tf.int64)
    return tf.IndexedSlices(nothing, rows, tf.constant(shape, tf.int64))
