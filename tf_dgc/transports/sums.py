"""Sums over the workers: of dense tensors, and of what each selects of an arena.

Axes: N workers, W of them in this process: one, but in a simulation; P arena elements,
K message slots.
"""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc import values
from tf_dgc.compression import dgc, message, selection, warmup
from tf_dgc.compression.arena import Layout
from tf_dgc.config import DGCConfig
from tf_dgc.transports.base import Transport


class Summed(NamedTuple):
    """Sums over the workers, and what they cost this one."""

    gradients: list[Any]
    votes: list[tf.Tensor]
    traffic: tf.Tensor  # see `traffic_of`


def traffic_of(sent: Any, elements: Any, received: Any) -> tf.Tensor:
    """Return what a worker counts of a step: shape [3], int64.

    Args:
        sent: bytes that it hands to the transport.
        elements: of gradients, that it sends.
        received: bytes that it receives from others.
    """
    with tf.device("CPU:0"):
        return tf.stack([tf.cast(x, tf.int64) for x in (sent, elements, received)])


def no_traffic() -> tf.Tensor:
    """Return that of nothing."""
    return traffic_of(0, 0, 0)


def in_ring(size: int, workers: int) -> int:
    """Return the bytes that each of N workers receives in a ring all-reduce."""
    return 2 * size * (workers - 1) // workers


def dense(
    transport: Transport,
    gradients: Sequence[Any],
    name: str,
    votes: Sequence[tf.Tensor] = (),
    repeats: bool = True,
) -> Summed:
    """Sum tensors in one fused reduction, IndexedSlices by what costs less.

    The rows of IndexedSlices are gathered. Where that costs more than to reduce all
    rows of the variable, these are reduced, if it makes no difference.

    Args:
        transport: to the other workers.
        gradients: of this worker, of static shapes.
        name: prefix of the names of the collectives.
        votes: tensors that are summed beside them; no elements of a gradient.
        repeats: whether indices repeat in the sum as in one process. That matters to
            Keras where it clips, which it does before it adds rows up.
    """
    tensors = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor)]
    own = [*(gradients[i] for i in tensors), *votes]
    reduced = transport.all_reduce(own, f"{name}.dense")
    # Where one process is several workers, what it hands over has an axis more.
    shapes = [
        after.shape if after.shape.is_fully_defined() else before.shape
        for before, after in zip(own, reduced, strict=True)
    ]
    counts = [shape.num_elements() for shape in shapes]
    size: Any = sum(n * t.dtype.size for n, t in zip(counts, own, strict=True))
    elements: Any = sum(counts[: len(tensors)])
    traffic = traffic_of(size, elements, in_ring(size, transport.size))
    summed = list(gradients)
    for i, tensor in zip(tensors, reduced, strict=False):
        summed[i] = tensor
    slices = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    if slices:
        rows = [gradients[i].values for i in slices]
        lengths = transport.lengths(rows, f"{name}.lengths")
    for column, i in enumerate(slices):
        args = transport, gradients[i], lengths[:, column], f"{name}.slices{i}"
        summed[i], cost = _sum_of_rows(*args, repeats)
        traffic += cost
    return Summed(summed, reduced[len(tensors) :], traffic)


def _sum_of_rows(
    transport: Transport,
    slices: tf.IndexedSlices,
    lengths: tf.Tensor,
    name: str,
    repeats: bool,
) -> tuple[tf.IndexedSlices, tf.Tensor]:
    """Sum IndexedSlices; return also this worker's traffic, see `traffic_of`.

    Args:
        transport: to the other workers.
        slices: of this worker.
        lengths: numbers of rows of all workers, shape [N], int64.
        name: prefix of the names of the collectives.
        repeats: see `dense`.
    """
    values, indices, shape = slices.values, slices.indices, slices.shape

    def gather() -> Any:
        found = transport.gather_slices(slices, name, lengths)
        elements = tf.size(values, tf.int64)
        own, every = (
            sum(tf.size(x, tf.int64) * x.dtype.size for x in (s.values, s.indices))
            for s in (slices, found)
        )
        traffic = traffic_of(own, elements, every - own)
        return (found.values, found.indices), traffic

    def reduce() -> Any:
        (total,) = transport.all_reduce([tf.convert_to_tensor(slices)], name)
        elements = shape.num_elements()
        size = elements * values.dtype.size
        traffic = traffic_of(size, elements, in_ring(size, transport.size))
        return (total, tf.range(shape[0], dtype=indices.dtype)), traffic

    if repeats or transport.size == 1 or not shape.is_fully_defined():
        found, traffic = gather()
    else:
        row = shape[1:].num_elements() * values.dtype.size
        with tf.device("CPU:0"):
            gathered = tf.reduce_max(lengths) * (row + indices.dtype.size)
            whole = tf.constant(2 * shape[0] * row, tf.int64)
            dearer = transport.size * gathered > whole
        found, traffic = tf.cond(dearer, reduce, gather)
    return tf.IndexedSlices(*found, slices.dense_shape), traffic


class Sparse(NamedTuple):
    """Elements of an arena; the positions of each row ascend."""

    positions: tf.Tensor  # shape [..., K], int64; P in unused slots
    values: tf.Tensor  # shape [..., K], float32; 0 in unused slots


class Workers(NamedTuple):
    """Workers of a process, among the N, and how it runs their pure functions."""

    ranks: Sequence[int]
    each: Callable[..., Any]  # each(fn, *args) is fn(*args), of each of them
    axis: list[int]  # the first axis of what there is one of each: [], or [W]
    # Of each one's gradient in the sum, shape [W]; None where all count alike, or a
    # `Part` tells.
    factors: Callable[[], tf.Tensor | None] = lambda: None

    def seats(self, workers: int) -> tf.Tensor:
        """Return 1 in the place of each: shape [*axis, N]."""
        seats = tf.one_hot(self.ranks, workers)
        return tf.reshape(seats, [*self.axis, workers])


def one(transport: Transport) -> Workers:
    """Return what a process is that is one worker."""
    return Workers([transport.rank], lambda fn, *args: fn(*args), [])


class Kept(abc.ABC):
    """Values of workers, to be summed: all of them, or some elements."""

    @abc.abstractmethod
    def read(self) -> tf.Tensor:
        """Return all of it, shape [*axis, P], float32."""

    @abc.abstractmethod
    def peaks(self) -> tf.Tensor:
        """Return `selection.peaks` of it."""


class Exchanged(NamedTuple):
    """The outcome of a sum."""

    total: Sparse | tf.Tensor  # to be added up, [N, K]; or the sum itself, shape [P]
    used: Sparse | None  # of each worker in this process, [W, K]; None: everything
    traffic: tf.Tensor  # of this worker, see `traffic_of`


class Cost(NamedTuple):
    """Cost of a sum to one of N workers."""

    sent: int  # bytes that it hands over
    passed: int  # bytes that pass it, its own included
    hops: int  # messages that wait for one another
    workers: int  # N

    @property
    def received(self) -> int:
        """Bytes that it receives from others."""
        return self.passed * (self.workers - 1) // self.workers

    def seconds(self, bandwidth: float, latency: float) -> float:
        """Return what it takes, given bytes in a second, and seconds of a message."""
        return self.received / bandwidth + self.hops * latency


class Wire(NamedTuple):
    """The workers between which an arena is summed, and the settings."""

    transport: Transport
    workers: Workers
    layout: Layout
    config: DGCConfig
    name: str  # prefix of the names of the collectives


class Owned(abc.ABC):
    """Residual of a sum, of which each worker holds its own elements of the arena."""

    @abc.abstractmethod
    def read(self) -> tf.Tensor:
        """Return it, of each worker in this process: shape [*axis, R]."""

    @abc.abstractmethod
    def whole(self) -> tf.Tensor:
        """Return it as an arena, [*axis, P]: to be saved, or summed over workers."""

    @abc.abstractmethod
    def keep(self, arena: tf.Tensor) -> tf.Tensor:
        """Keep back what is its own to keep of arenas, [*axis, P]; return the rest."""

    @abc.abstractmethod
    def scale(self, by: tf.Tensor) -> None:
        """Multiply what is kept back by numbers of its elements, shape [P]."""


class SparseSum(abc.ABC):
    """A way to sum an arena at some stages of the warm-up: it alone knows the wire.

    It selects, packs, sends and reads. What a worker keeps depends on what was used of
    its elements, not on what it sent. It lives as long as its exchange.

    Attributes:
        owned: what the sum keeps back itself; None where that is nothing.
        numbers: of its stages, in the list of all.
        slots: K of what is to be added up, at each; 0 where everything is sent.
    """

    owned: Owned | None = None

    def __init__(self, wire: Wire, stages: Mapping[int, warmup.Stage]) -> None:
        """Take the stages, by number."""
        self.wire = wire
        self.numbers, self._stages = list(stages), list(stages.values())
        args = wire.config, wire.transport.size
        self._forms = [
            self.form(wire.layout, each.sparsity, *args) for each in self._stages
        ]
        self.slots = [form.slots for form in self._forms]

    @staticmethod
    @abc.abstractmethod
    def form(layout: Layout, sparsity: float, config: DGCConfig, workers: int) -> Any:
        """Return the static form of what is sent at a sparsity."""

    @staticmethod
    @abc.abstractmethod
    def cost(form: Any, layout: Layout, workers: int) -> Cost:
        """Return the cost of one sum, given what `form` returned."""

    def stage_at(self, step: tf.Tensor) -> tf.Tensor | None:
        """Return which of its stages a step is at, shape [], int32; of one None."""
        if len(self._stages) == 1:
            return None
        return warmup.stage_index(step, self._stages)

    @abc.abstractmethod
    def __call__(
        self, kept: Kept, step: tf.Tensor, stage: tf.Tensor | None
    ) -> Exchanged:
        """Sum.

        Args:
            kept: of each worker in this process.
            step: shape [], int64.
            stage: what `stage_at` returned.

        Raises:
            tf.errors.InvalidArgumentError: a message is damaged, or not of this step.
        """


class GatherSum(SparseSum):
    """The largest elements, in a message from everybody to everybody."""

    @staticmethod
    def form(
        layout: Layout, sparsity: float, config: DGCConfig, workers: int
    ) -> message.Format:
        """Return the form of a message."""
        slots = sum(selection.slots_per_segment(layout, sparsity))
        begins = [segment.offset for segment in layout.segments]
        return message.make_format(slots, layout.size, config.value_dtype, begins)

    def __call__(
        self, kept: Kept, step: tf.Tensor, stage: tf.Tensor | None
    ) -> Exchanged:
        """Gather the messages; see the base class."""
        form = message.one_of(self._forms, stage)
        write = functools.partial(
            dgc.send,
            form=form,
            layout=self.wire.layout,
            sparsities=[each.sparsity for each in self._stages],
            config=self.wire.config,
            step=step,
            stage=stage,
        )
        own = self.wire.workers.each(write, kept.read(), kept.peaks())
        return Exchanged(*_gathered(self.wire, self.numbers[-1], form, own))

    @staticmethod
    def cost(form: message.Format, layout: Layout, workers: int) -> Cost:
        """Return that of N messages, in a ring."""
        return Cost(form.bytes, workers * form.bytes, workers - 1, workers)


class DenseSum(SparseSum):
    """All elements, in a reduction; after messages without any, which are compared."""

    @staticmethod
    def form(
        layout: Layout, sparsity: float, config: DGCConfig, workers: int
    ) -> message.Format:
        """Return the form of a message without elements."""
        return message.make_format(0, layout.size, config.value_dtype)

    def __call__(
        self, kept: Kept, step: tf.Tensor, stage: tf.Tensor | None
    ) -> Exchanged:
        """Reduce the arena; see the base class."""
        (form,), (number,), layout = self._forms, self.numbers, self.wire.layout
        write = functools.partial(dgc.header, form=form, layout=layout, step=step)
        tensor = kept.read()
        own = self.wire.workers.each(lambda _: write(), tensor)
        total, _, traffic = _gathered(self.wire, number, form, own)
        if not layout.size:
            return Exchanged(tf.zeros([0]), None, traffic)
        with tf.control_dependencies([total.positions]):  # the headers were alike
            name = f"{self.wire.name}.{number}.arena"
            (reduced,) = self.wire.transport.all_reduce([tensor], name)
        size = 4 * layout.size
        received = in_ring(size, self.wire.transport.size)
        more = traffic_of(size, layout.elements, received)
        with tf.device("CPU:0"):
            return Exchanged(reduced, None, traffic + more)

    @staticmethod
    def cost(form: message.Format, layout: Layout, workers: int) -> Cost:
        """Return that of a ring all-reduce of float32."""
        sent = form.bytes + 4 * layout.size
        return Cost(sent, 8 * layout.elements, 2 * (workers - 1), workers)


def _gathered(
    wire: Wire, number: int, form: message.Format, own: tf.Tensor
) -> tuple[Sparse, Sparse, tf.Tensor]:
    """Exchange messages, shape [*axis, words], int32; see `Exchanged`."""
    own = tf.bitcast(own, tf.int32)  # one of this graph, left in place
    if form.sizes is None:
        own.set_shape([*wire.workers.axis, form.words])
    messages = wire.transport.all_gather(own, f"{wire.name}.{number}.message")
    contents = receive(form, messages)
    total = Sparse(contents.positions, contents.values)
    first, count = wire.workers.ranks[0], len(wire.workers.ranks)
    used = Sparse(*[part[first : first + count] for part in total])
    with tf.device("CPU:0"):
        received = (wire.transport.size - 1) * form.bytes_now
    traffic = traffic_of(form.bytes_now, contents.header.count[first], received)
    return total, used, traffic


def receive(form: message.Format, messages: tf.Tensor) -> message.Contents:
    """Read the messages of all workers, shape [N, words].

    Raises:
        tf.errors.InvalidArgumentError: one is damaged, or not of this step.
    """
    found, faults = read(form, messages)
    with tf.control_dependencies([require_sound(faults, found.header)]):
        return tf.nest.map_structure(tf.identity, found)


def read(
    form: message.Format,
    messages: tf.Tensor,
    place: Callable[[tf.Tensor], tf.Tensor] = lambda positions: positions,
) -> tuple[message.Contents, tf.Tensor]:
    """Read messages, shape [N, words].

    Args:
        form: of each.
        messages: of all workers.
        place: of their positions in the arena that `form.begins` are of.

    Returns:
        What they hold, their values as `message.numbers`; and `message.faults`.
    """
    found = message.unpack(form, messages)
    places = place(found.positions)
    found = found._replace(values=message.numbers(form, found, places))
    return found, message.faults(form, messages, found)


def require_sound(faults: tf.Tensor, header: message.Header) -> tf.Tensor:
    """Raise InvalidArgumentError where messages are not those of one and the same step.

    Args:
        faults: as of `message.faults`, shape [N].
        header: each field of shape [N].
    """
    marks = marks_of(header)
    return require_that(is_sound(faults, marks), faults, marks)


def marks_of(header: message.Header) -> tf.Tensor:
    """Return what must be alike in the headers of N messages: shape [N, 3], int32."""
    return tf.stack([header.format, header.checksum, header.step], axis=1)


def is_sound(faults: tf.Tensor, marks: tf.Tensor) -> tf.Tensor:
    """Tell whether messages are whole, and of one and the same step: shape [], bool."""
    return tf.reduce_all(faults == 0) & tf.reduce_all(marks == marks[0])


def require_that(sound: tf.Tensor, faults: tf.Tensor, marks: tf.Tensor) -> tf.Tensor:
    """Raise InvalidArgumentError where messages are not sound: what `is_sound` says."""

    def damaged() -> tf.Tensor:
        rank = values.first_true(faults > 0)
        what = tf.gather(tf.constant(message.FAULTS), faults[rank])
        rank = tf.strings.as_string(rank)
        return tf.strings.join(["The message of rank ", rank, " is damaged: ", what])

    def told() -> list[Any]:
        strangers = (
            "The workers are not in the same step of the same training. Message "
            "format, checksum of the layout and step, by rank:"
        )
        whole = tf.reduce_all(faults == 0)
        return [tf.cond(whole, lambda: tf.constant(strangers), damaged), marks]

    return values.require(sound, told, summarize=-1)
