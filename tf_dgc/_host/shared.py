"""Private names of TensorFlow around variables that other tasks hold.

Public functions make no variable of a chosen `shared_name` where operations run
eagerly, and no variable object around a handle.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc._host import probe, tensorflow

with probe.imports():
    from tensorflow.python.eager import tape
    from tensorflow.python.ops import handle_data_util, resource_variable_ops


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    base = getattr(resource_variable_ops, "BaseResourceVariable", None)
    return [
        (tape, "variable_accessed"),
        (handle_data_util, "create_handle_data"),
        (handle_data_util, "set_handle_data"),
        (resource_variable_ops, "BaseResourceVariable"),
        (base, "_handle"),
        (base, "_shape"),
        (base, "_unique_id"),
        (base, "_distribute_strategy"),
    ]


probe.check(wanted())

_Change = Callable[..., Any]
# Attribute of graphs that know variables by name, with their handles; see `seldom`.
_NAMED = "tf_dgc_handles"


class Piece(NamedTuple):
    """Some rows of a variable, or all of it, and who holds them."""

    device: str
    start: int  # rows along the first axis
    stop: int


class Cursor:
    """Choice of the piece of a variable, and of what goes with it, that is meant now.

    Attributes:
        at: number of the piece; None for all of them.
        rows: of the piece, shape [K], those that are meant; None for all.
    """

    def __init__(self) -> None:
        self.at: int | None = None
        self.rows: Any = None

    def over(self, count: int) -> Iterator[int]:
        """Go through the pieces."""
        try:
            for self.at in range(count):
                yield self.at
        finally:
            self.at = None

    @contextlib.contextmanager
    def only(self, rows: Any) -> Iterator[None]:
        """Mean these rows of the piece."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None


class SharedVariable(resource_variable_ops.BaseResourceVariable):
    """A variable that servers hold, in pieces of rows, and all clients know by name.

    Nothing deletes it when this process ends. While its cursor stands at a piece, it is
    this piece: handle, shape and all. Else it is read and assigned as a whole.
    tensorflow/python/ops/resource_variable_ops.py: BaseResourceVariable.

    Attributes:
        pieces: in the order of rows.
        cursor: shared with others of the same pieces.
        whole: shape of all of it.
        writes: tells whether this client may change it while no piece is meant; what
            it may not is left alone.
    """

    def __init__(
        self,
        name: str,
        container: str,
        dtype: Any,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        cursor: Cursor | None = None,
        unique_id: str | None = None,
        watched: bool = False,
    ) -> None:
        """Make handles; the variable may be there, or not.

        Args:
            name: the same in all clients.
            container: of all that belongs to a job.
            dtype: of the elements.
            shape: of the whole.
            pieces: in the order of rows; one for a scalar.
            cursor: shared with others of the same pieces.
            unique_id: by which Keras finds what an optimizer keeps of it.
            watched: whether tapes are to watch it.
        """
        dtype = tf.as_dtype(dtype)
        self.pieces, self.cursor = list(pieces), cursor or Cursor()
        self.whole = tf.TensorShape(shape)
        self.writes: Callable[[], bool] = lambda: True
        self._handles = _handles(name, container, dtype, self.whole, self.pieces)
        super().__init__(
            trainable=watched,
            shape=self.whole,
            dtype=dtype,
            handle=self._handles[0].eager,
            handle_name=name,
            unique_id=unique_id or name,
            name=name,
        )

    def handle_of(self, at: int) -> Any:
        """Return the handle of a piece."""
        return self._handles[at].now()

    @property
    def _handle(self) -> Any:
        return self._handles[self.cursor.at or 0].now()

    @_handle.setter
    def _handle(self, value: Any) -> None:
        pass

    @property
    def _shape(self) -> tf.TensorShape:
        at, rows = self.cursor.at, self.cursor.rows
        if rows is not None:
            return tf.TensorShape([rows.shape[0], *self.whole[1:]])
        if at is None or len(self.pieces) == 1:
            return self.whole
        return _shape_of(self.pieces[at], self.whole)

    @_shape.setter
    def _shape(self, value: Any) -> None:
        pass

    @property
    def _split(self) -> bool:
        """Tell whether more than one piece is meant."""
        return self.cursor.at is None and len(self.pieces) > 1

    @property
    def initialized(self) -> bool:
        """Tell whether all of it has a value, asked of the servers."""
        return all(
            bool(tf.raw_ops.VarIsInitializedOp(resource=handle.eager))
            for handle in self._handles
        )

    def value(self) -> tf.Tensor:
        """Return the value."""
        return self._read(super().value)

    def read_value(self) -> tf.Tensor:
        """Return the value, read now."""
        return self._read(super().read_value)

    def _read(self, read: Callable[[], tf.Tensor]) -> tf.Tensor:
        if self.cursor.rows is not None:
            return self.sparse_read(self.cursor.rows)
        if not self._split:
            return read()
        return tf.concat([read() for _ in self.cursor.over(len(self.pieces))], 0)

    def _each(
        self, change: _Change, scatter: _Change, value: Any, **kwargs: Any
    ) -> Any:
        if self.cursor.at is None and not self.writes():
            return self
        if self.cursor.rows is not None:
            value = tf.convert_to_tensor(value, self.dtype)
            return scatter(tf.IndexedSlices(value, self.cursor.rows))
        if not self._split:
            return change(value, **kwargs)
        value = tf.convert_to_tensor(value, self.dtype)
        for at in self.cursor.over(len(self.pieces)):
            change(value[self.pieces[at].start : self.pieces[at].stop], **kwargs)
        return self

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the value."""
        return self._each(super().assign, self.scatter_update, value, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Add to it."""
        return self._each(super().assign_add, self.scatter_add, delta, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Subtract from it."""
        return self._each(super().assign_sub, self.scatter_sub, delta, **kwargs)

    def scatter_add(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Add to rows."""
        return _scattered(self, tf.raw_ops.ResourceScatterNdAdd, sparse_delta)

    def scatter_sub(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Subtract from rows."""
        return _scattered(self, tf.raw_ops.ResourceScatterNdSub, sparse_delta)

    def scatter_update(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace rows."""
        return _scattered(self, tf.raw_ops.ResourceScatterNdUpdate, sparse_delta)

    def _serialize_to_tensors(self) -> Any:
        raise NotImplementedError("Keras saves the value instead")

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        raise NotImplementedError("Keras assigns the value instead")


def _shape_of(piece: Piece, whole: tf.TensorShape) -> tf.TensorShape:
    """Return the shape of one of several pieces."""
    return tf.TensorShape([piece.stop - piece.start, *whole[1:]])


def _handles(
    name: str,
    container: str,
    dtype: tf.DType,
    whole: tf.TensorShape,
    pieces: Sequence[Piece],
) -> list["Handle"]:
    """Return the handles of pieces; arguments as of `SharedVariable`."""
    if len(pieces) == 1:
        return [Handle(name, container, dtype, whole, pieces[0].device)]
    return [
        Handle(f"{name}.{i}", container, dtype, _shape_of(piece, whole), piece.device)
        for i, piece in enumerate(pieces)
    ]


def _scattered(
    variable: SharedVariable, operation: Callable[..., Any], slices: Any
) -> SharedVariable:
    """Change rows under the variable's lock.

    ResourceScatterSub and its kin share it: of two clients that change a row in the
    same instant one change is lost.
    """
    if tf.executing_eagerly() and variable.shape.rank > 1:
        operation = _traced(operation, (variable.dtype, *variable.shape))
    operation(
        ref=variable.handle,
        indices=slices.indices[:, tf.newaxis],
        updates=tf.cast(slices.values, variable.dtype),
    )
    return variable


class Table(SharedVariable):
    """A table that no worker holds: rows are read and changed where they are.

    While no piece is meant it has a handle without a value, by which tapes know it.
    """

    def __init__(
        self, *args: Any, strategy: Any, writes: Callable[[], bool], **kwargs: Any
    ) -> None:
        """Make handles.

        Args:
            *args: of `SharedVariable`.
            strategy: in whose scope it is made.
            writes: tells whether this worker's assignments count.
            **kwargs: of `SharedVariable`.
        """
        super().__init__(*args, **kwargs)
        self.writes = writes
        self._distribute_strategy = strategy
        self._anchor = Handle(
            f"{self.name}.anchor", "", self.dtype, self.whole, "/device:CPU:0"
        )

    @property
    def _handle(self) -> Any:
        at = self.cursor.at
        return self._anchor.eager if at is None else self._handles[at].now()

    @_handle.setter
    def _handle(self, value: Any) -> None:
        pass

    def _refuse_whole(self) -> None:
        if self.cursor.at is None:
            raise ValueError(
                f"The table {self.name!r} of shape {tuple(self.whole)} lives on the "
                "servers only, and must not be read as a whole. Read rows of it, by "
                "its layer, or by `strategy.read_rows(layer.embeddings, start, stop)`; "
                "or set a larger `DownpourConfig(table_bytes=...)`"
            )

    def value(self) -> tf.Tensor:
        """Return the value of a piece, or of rows."""
        self._refuse_whole()
        return super().value()

    def read_value(self) -> tf.Tensor:
        """Return the value of a piece, or of rows, read now."""
        self._refuse_whole()
        return super().read_value()

    def accessed(self) -> None:
        """Let tapes watch it. tensorflow/python/eager/tape.py: variable_accessed."""
        tape.variable_accessed(self)


def take_number(counter: SharedVariable) -> tf.Tensor:
    """Add 1 to a counter; return what it was: each number goes to one client only.

    Args:
        counter: shape [], int64.

    Returns:
        Shape [], int64; on the server.
    """
    number = _traced(_number, ()) if tf.executing_eagerly() else _number
    return number(resource=counter.handle)


def _number(resource: Any) -> tf.Tensor:
    limit = tf.int64.max
    return tf.raw_ops.ResourceCountUpTo(resource=resource, limit=limit, T=tf.int64)


@functools.cache
def _traced(operation: Callable[..., Any], form: tuple[Any, ...]) -> Callable[..., Any]:
    """Return an operation that knows of what shape a variable is, as it does in graphs.

    Eagerly, shape inference takes what is on a server for a scalar. There is one for
    each form of a variable, as TensorFlow warns of functions that are traced often.
    """

    def traced(**inputs: Any) -> Any:
        found = operation(**inputs)
        return found if tf.is_tensor(found) else None

    function: Callable[..., Any] = tf.function(traced, autograph=False)
    return function


class Handle:
    """Handle of a variable that is somewhere, by name.

    Attributes:
        eager: with what shape inference knows of the variable.
    """

    def __init__(
        self,
        name: str,
        container: str,
        dtype: tf.DType,
        shape: tf.TensorShape,
        device: str,
    ) -> None:
        """Make the handle; arguments as of `SharedVariable`, of one piece."""
        self._key = f"{container}/{name}"

        def make() -> Any:
            with tf.device(device):
                handle = tf.raw_ops.VarHandleOp(
                    dtype=dtype, shape=shape, shared_name=name, container=container
                )
            data = handle_data_util.create_handle_data(shape, dtype)
            handle_data_util.set_handle_data(handle, data)
            return handle

        self._make = make
        with tf.init_scope():
            self.eager = make()

    def now(self) -> Any:
        """Return what operations take that are made now.

        tensorflow/python/ops/handle_data_util.py: create_handle_data, set_handle_data.
        """
        graph = _knowing_names()
        if graph is None:
            return self.eager
        # One of a graph, by which operations on the variable keep their order.
        found = getattr(graph, _NAMED)
        if self._key not in found:
            with graph.as_default(), tf.control_dependencies(None):
                found[self._key] = self._make()
        return found[self._key]


def _knowing_names() -> Any:
    """Return the graph around what is traced that knows variables by name, or None."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and not hasattr(graph, _NAMED):
        graph = getattr(graph, "outer_graph", None)
    return graph


def seldom(due: tf.Tensor, do: Callable[[], None]) -> tf.Tensor:
    """Do something with variables on servers, if it is due: not in most steps.

    A graph has the operations of all its branches, and servers are told of each in a
    branch that is not taken that it is not run; of hundreds that takes longer than a
    step. So it does where handles of variables come in from outside. Here a branch is a
    function of its own, which knows variables on servers by name.

    Args:
        due: shape [], bool.
        do: takes nothing, returns nothing.

    Returns:
        What comes after it, shape [], bool. By itself only that is in order which is
        done with the same variables of this process: those of servers are not seen.
    """

    def run() -> tf.Tensor:
        do()
        return tf.constant(True)

    within = tf.executing_eagerly() or _knowing_names() is not None
    function = run if within else _knowing(run)
    done: tf.Tensor = tf.cond(due, function, lambda: tf.constant(False))
    return done


def _knowing(
    function: Callable[..., Any], signature: Sequence[tf.TensorSpec] = ()
) -> Callable[..., Any]:
    """Trace a function that knows variables on servers by name."""

    def traced(*args: tf.Tensor) -> Any:
        setattr(tf.compat.v1.get_default_graph(), _NAMED, {})
        return function(*args)

    return tensorflow.not_inlined(traced, signature)


def traced_once(
    do: Callable[..., None], *signature: tf.TensorSpec
) -> Callable[..., None]:
    """Return a function that is traced where it is first called, and not again.

    So it takes no longer eagerly than in a step that has called it before. What it does
    must be the same in both.

    Args:
        do: takes tensors.
        *signature: of these.
    """
    traced = functools.cache(lambda: _knowing(do, signature))
    return lambda *args: traced()(*args)


def bypassed(variable: Any, method: str) -> Callable[..., Any]:
    """Return a variable's method as its class has it, whatever stands before it."""
    found = getattr(type(variable), method)
    return lambda *args, **kwargs: found(variable, *args, **kwargs)


def identity_of(variable: Any) -> str:
    """Return by what Keras knows a variable. BaseResourceVariable._unique_id."""
    return str(variable._unique_id)
