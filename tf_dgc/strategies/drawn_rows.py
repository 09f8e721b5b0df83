"""Random numbers of rows, where a script gives an operation its seed.

One process draws them for all rows of a batch at once. So a worker draws for the rows
of all, too, and takes those of its own. Operations without such a seed, and layers of
noise, draw a worker's own numbers; see `randomness.py`.

Axis: N workers.
"""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies import slicing
from tf_dgc.strategies.current import graph
from tf_dgc.strategies.known import COUNT, NUMBER, THE_ROWS, UNKNOWN
from tf_dgc.strategies.readings import Reading
from tf_dgc.strategies.rows import Rows
from tf_dgc.transports import Transport

# Arguments that may have a row for each row of what is drawn.
_BY_ROW = frozenset(
    "alpha counts lam logits maxvals means minvals probs stddevs".split()
)
_SEEDS = "stateless_random_uniform_full_int_v2"  # draws seeds of other operations, too
_current: contextvars.ContextVar["DrawnRows | None"] = contextvars.ContextVar(
    "tf_dgc_drawn_rows", default=None
)


class DrawnRows:
    """Random numbers of the rows of one step, while it is traced, or run eagerly."""

    def __init__(
        self,
        reading: Reading,
        rank: Any,
        counts: Callable[[], tf.Tensor],
        say: Callable[[str], None],
        gather: Callable[[tf.Tensor, str], tf.Tensor] | None = None,
    ) -> None:
        """Begin with a batch.

        Args:
            reading: of the tensors of the step.
            rank: of this worker.
            counts: returns how many rows each worker has, shape [N]; collective.
            say: logs a warning.
            gather: returns a tensor of each worker, stacked; None where they do not
                meet.
        """
        self._reading, self._rank, self._gather = reading, rank, gather
        self._counts, self._say, self._graph = counts, say, graph()
        self._own_seeds: dict[int, tf.Tensor] = {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let operations of this context draw so."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def note_own(self, seed: tf.Tensor) -> None:
        """Note a seed of which each worker has its own."""
        self._own_seeds[id(seed)] = seed

    def draws(self, seed: Any) -> bool:
        """Tell whether what is drawn now is of the step, by a seed that all have."""
        if graph() is None and self._graph is not None:
            return False  # lifted out of the step
        waiting, seen = [seed], dict[int, Any]()
        while waiting and self._own_seeds:
            tensor = waiting.pop()
            if not isinstance(tensor, tf.Tensor) or id(tensor) in seen:
                continue
            seen[id(tensor)] = tensor
            if id(tensor) in self._own_seeds:
                return False
            operation = _host.operations.of(tensor)
            if operation is not None and operation.kind == "Placeholder":
                waiting.append(_host.flow.outside(tensor.graph, tensor))
            elif operation is not None:
                waiting.extend(operation.inputs)
        return True

    def may_be_rows(self, drawn: tf.Tensor) -> bool:
        """Tell whether what was drawn may have rows, by its shape alone."""
        if tf.executing_eagerly() and self._gather is not None:
            return True  # on one worker it may, where on another it may not
        size = drawn.shape[0] if drawn.shape.rank else None
        static = self._reading.static
        return size is None or bool(static and size and size % static == 0)

    def note(self, rows: tf.Tensor) -> None:
        """Note what was drawn for the rows of this worker."""
        self._reading.note_rows(rows)
        if (flow := _host.flow.current()) is not None:
            flow.add([rows])

    def bounds(
        self, size: tf.Tensor, static: int | None, name: str
    ) -> tuple[Any, Any] | None:
        """Return where the rows of this worker begin, and how many all workers have.

        Args:
            size: first dimension of what is drawn, shape [], an integer type.
            static: the same, where shapes tell.
            name: of what draws.

        Returns:
            Both in that type, shape []; None where these are no rows of the batch.
        """
        if tf.executing_eagerly() and self._gather is not None:
            return self._eager_bounds(size, name, self._gather)
        if not self._is_of_rows(size, static, name):
            return None
        with contextlib.ExitStack() as stack:
            if self._graph not in (None, graph()):  # in a loop or a branch
                stack.enter_context(self._graph.as_default())
            counts = tf.cast(self._counts(), size.dtype)
            own, total = counts[self._rank], tf.reduce_sum(counts)
            before = tf.reduce_sum(counts[: self._rank])
        own = tf.maximum(own, 1)  # a row stands where there is none
        times = size // own
        fits, whole = tf.equal(times * own, size), tf.maximum(total * times, size)
        begin = tf.minimum(before * times, whole - size)
        return tf.where(fits, begin, tf.zeros_like(begin)), tf.where(fits, whole, size)

    def _eager_bounds(
        self, size: tf.Tensor, name: str, gather: Callable[[tf.Tensor, str], tf.Tensor]
    ) -> tuple[Any, Any] | None:
        """Return the same where no size is unknown.

        All workers call this: what one has a row for each of, another may not.
        """
        rows = self._counts().numpy()
        sizes = gather(tf.cast(size, tf.int64), "drawn_rows").numpy()
        there = rows > 0
        if len(set(sizes[there])) == 1:
            if len(set(rows[there])) > 1 or not self._is_of_rows(size, int(size), name):
                return None
        sizes *= there
        whole = max(sizes.sum(), int(size))
        begin = min(sizes[: self._rank].sum(), whole - int(size))
        return tf.constant(begin, size.dtype), tf.constant(whole, size.dtype)

    def _is_of_rows(self, size: tf.Tensor, value: int | None, name: str) -> bool:
        """Tell whether a number counts rows, as far as the step tells."""
        known, rows = self._reading.of(size), self._reading.static
        if known.origin == COUNT:
            if known.extent != THE_ROWS and graph() is self._graph:
                self._doubt("another number of rows than the batch has")
            return True
        if value is None:
            if known.kind in (UNKNOWN, NUMBER):
                self._doubt("a number of which nothing is known")
            return bool(known.kind == UNKNOWN)
        if rows is None or name == _SEEDS or value == 0 or value % rows:
            return False
        if value > rows == 1:  # of which any number is a multiple
            return False
        is_taken = value == rows > 1
        told = "the number of" if is_taken else "another number than that of"
        self._doubt(f"{value} rows, which is taken for {told} rows of this worker")
        return is_taken

    def _doubt(self, what: str) -> None:
        line = _host.operations.own_line()
        self._say(
            f"Random numbers with a seed{f' at {line}' * bool(line)} are drawn for "
            f"{what}: they may be others than those of one process. Draw them for each "
            "row of the batch, by `tf.shape(x)[0]`, and choose afterwards; draw what "
            "is no row before training"
        )


def of_step(
    reading: Reading,
    rows: Rows,
    everybody: Transport,
    alone: bool,
    say: Callable[[str], None],
) -> DrawnRows:
    """Return random numbers of the rows of a step of a model.

    Args:
        reading: of its tensors.
        rows: of it.
        everybody: transport between all workers.
        alone: whether workers do not meet in the step.
        say: logs a warning.
    """
    meets = rows.over is everybody and not alone
    counts = rows.counts if meets else rows.as_if_alike
    gather = everybody.all_gather if meets and not everybody.alone else None
    return DrawnRows(reading, everybody.rank, counts, say, gather)


def run_own(
    args: Any,
    step: Callable[[Any], Any],
    everybody: Transport,
    alone: bool,
    say: Callable[[str], None],
) -> Any:
    """Run a step of a loop of a script; see `of_step`."""
    if (count := slicing.row_count(args)) is None:
        return step(args)

    def counts() -> tf.Tensor:
        own = tf.cast(count, tf.float32)
        if alone:
            return tf.fill([everybody.size], own)
        return everybody.all_gather(own, "drawn_rows.counts")

    reading = Reading(*slicing.tensors_of(args), everybody.size)
    gather = None if alone else everybody.all_gather
    drawn = DrawnRows(reading, everybody.rank, counts, say, gather)
    with _host.operations.recorded(), drawn.entered():
        return step(args)


def note_own(seed: tf.Tensor) -> tf.Tensor:
    """Return a seed of which each worker has its own."""
    if (rows := _current.get()) is not None:
        rows.note_own(seed)
    return seed


def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draw what one process draws for the rows of this worker."""
    drawn, rows = original(*args, **kwargs), _current.get()
    if rows is None or drawn.shape.rank == 0:
        return drawn
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if rows.may_be_rows(drawn) and rows.draws(given.get("key", given.get("seed"))):
        with _apart():
            return _drawn_of_all(rows, original, given, drawn)
    return drawn


def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Initialize a variable, which has no rows of a batch."""
    with _apart():
        return original(*args, **kwargs)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Let operations of this context draw as they do elsewhere."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def _drawn_of_all(
    rows: DrawnRows, original: Callable[..., Any], given: dict[str, Any], drawn: Any
) -> tf.Tensor:
    """Return this worker's rows of what is drawn for all, or what was drawn."""
    by_logits = "logits" in given
    shape = tf.shape(given["logits"]) if by_logits else given["shape"]
    shape = tf.convert_to_tensor(shape)
    size, static = shape[0], drawn.shape[0] if drawn.shape.rank else None
    bounds = rows.bounds(size, static, original.__name__)
    if bounds is None:
        return drawn
    begin, whole = bounds
    arguments = {name: value for name, value in given.items() if name != "name"}
    if not by_logits:
        arguments["shape"] = tf.concat([[whole], shape[1:]], axis=0)
    for name in _BY_ROW & given.keys():
        value = tf.convert_to_tensor(given[name])
        if _has_row_for_each(value, drawn):
            arguments[name] = _widened(value, begin, whole)
    found = original(**arguments)[begin : begin + size]
    if not tf.executing_eagerly():
        found.set_shape(drawn.shape)
    rows.note(found)
    return found


def _has_row_for_each(values: tf.Tensor, drawn: tf.Tensor) -> bool:
    """Tell whether an argument has a row for each row of what is drawn of it."""
    alike = values.shape.rank == drawn.shape.rank
    return alike and not (values.shape[0] == 1 and drawn.shape[0] != 1)


def _widened(values: tf.Tensor, begin: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    """Return the rows of this worker in their place among those of all."""
    after = whole - begin - tf.shape(values, begin.dtype)[0]
    parts = tf.repeat(values[:1], begin, 0), values, tf.repeat(values[:1], after, 0)
    return tf.concat(parts, axis=0)
