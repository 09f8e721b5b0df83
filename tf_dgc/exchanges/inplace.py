"""Variables of a worker, and pure functions that XLA compiles to change them in place.

TensorFlow's own operations would make copies, and its scattering takes six times as
long.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tf_dgc import _host

_MOST_COMPILED = 256
_T = TypeVar("_T")


class Form(NamedTuple):
    """Type and shape that a compiled function knows of a tensor or a variable."""

    is_variable: bool
    shape: tf.TensorShape
    dtype: tf.DType


class Compiled(NamedTuple):
    """A function for certain forms of arguments, and what XLA made of it."""

    name: str
    changes: bool  # variables
    returns: bool  # something
    tensors: list[Form]  # its arguments that are tensors or variables
    pure: Callable[..., Any]  # takes the values of these
    run: Callable[..., Any]  # takes tensors and handles of variables, and changes these
    call: Callable[..., Any]  # the same, compiled


_compiled: dict[Any, Compiled] = {}


def compiled() -> list[Compiled]:
    """Return what is compiled at present."""
    return list(_compiled.values())


def own_variable(value: tf.Tensor, name: str) -> tf.Variable:
    """Create a variable of the worker's own, where the value is.

    It has no strategy, and tf.function does not see that it is created.
    """

    def create() -> tf.Variable:
        with tf.device(value.device):
            return tf.Variable(value, trainable=False, name=name)

    return unseen(create)


def unseen(create: Callable[[], _T]) -> _T:
    """Return what a function creates in a thread, with variables of its own.

    tf.function traces all of a step twice where it sees that a variable is created,
    outside of its graph, too.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(create).result()


@functools.lru_cache(maxsize=_MOST_COMPILED)
def _bound(function: Callable[..., Any], named: tuple[tuple[str, Any], ...]) -> Any:
    return functools.update_wrapper(
        functools.partial(function, **dict(named)), function
    )


def bound(function: Callable[..., _T], **named: Any) -> Callable[..., _T]:
    """Return a function with some arguments, the same one for the same arguments.

    Args:
        function: pure.
        named: arguments by name, hashable; no tensors.
    """
    found: Callable[..., _T] = _bound(function, tuple(named.items()))
    return found


def update(
    device: str, function: Callable[..., Any], variables: Any, *args: Any
) -> None:
    """Do `variables <- function(variables, *args)`.

    Args:
        device: where the variables are.
        function: pure; takes values of the variables, returns new ones in their order.
        variables: a structure of tf.Variable and None.
        args: see `call`.
    """
    _run(device, function, (variables, *args), changes=True, returns=False)


def change(
    device: str, function: Callable[..., Any], variables: Any, *args: Any
) -> Any:
    """Do `variables, found <- function(variables, *args)`; return what was found.

    Args:
        device: where the variables are.
        function: as in `update`, and returns something else, too.
        variables: as in `update`.
        args: see `call`.
    """
    return _run(device, function, (variables, *args), changes=True, returns=True)


def call(device: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`.

    It is compiled once for all tensors and variables of the same shapes and types.

    Args:
        device: where to run it.
        function: pure, and not made anew for each call.
        args: structures of tensors, of tf.Variable, whose values the function takes,
            of None, and of numbers, for each of which it is compiled anew.
    """
    return _run(device, function, args, changes=False, returns=True)


def _form(part: Any) -> Any:
    """Return the form of an argument, or what is no tensor itself."""
    if isinstance(part, tf.Variable) or tf.is_tensor(part):
        return Form(isinstance(part, tf.Variable), part.shape, part.dtype)
    return part


def _run(
    device: str, function: Callable[..., Any], args: Any, changes: bool, returns: bool
) -> Any:
    flat = tf.nest.flatten(args)
    forms = [_form(part) for part in flat]
    structure = tf.nest.map_structure(lambda _: None, args)
    key = (device, function, changes, returns, str(forms), str(structure))
    if key not in _compiled:
        while len(_compiled) >= _MOST_COMPILED:
            del _compiled[next(iter(_compiled))]
        with tf.init_scope(), tf.device(device):
            _compiled[key] = _compile(function, forms, structure, changes, returns)
    given = [
        part.handle if form.is_variable else part
        for form, part in zip(forms, flat, strict=True)
        if isinstance(form, Form)
    ]
    with tf.device(device):
        return _compiled[key].call(*given)


def _compile(
    function: Callable[..., Any],
    forms: list[Any],
    structure: Any,
    changes: bool,
    returns: bool,
) -> Compiled:
    """Compile a function of the tensors and handles among some arguments.

    It knows handles rather than variables, as it outlives them.
    """
    of_tensors = [form for form in forms if isinstance(form, Form)]

    def pure(*values: tf.Tensor) -> Any:
        left = iter(values)
        own = [next(left) if isinstance(form, Form) else form for form in forms]
        return function(*tf.nest.pack_sequence_as(structure, own))

    def run(*given: tf.Tensor) -> Any:
        pairs = list(zip(given, of_tensors, strict=True))
        found = pure(*[_read(t, f) if f.is_variable else t for t, f in pairs])
        if not changes:
            return found
        found, rest = found if returns else (found, None)
        handles = [handle for handle, form in pairs if form.is_variable]
        new = [value for value in tf.nest.flatten(found) if value is not None]
        for handle, value in zip(handles, new, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return rest

    specs = [
        tf.TensorSpec([], tf.resource) if f.is_variable else tf.TensorSpec(*f[1:])
        for f in of_tensors
    ]
    # A concrete one: it is compiled even where functions are to run eagerly.
    call = tf.function(run, autograph=False, jit_compile=True)
    with _host.tensorflow.without_debugging():
        call = call.get_concrete_function(*specs)
    name = getattr(function, "__name__", str(function))
    return Compiled(name, changes, returns, of_tensors, pure, run, call)


def _read(handle: tf.Tensor, form: Form) -> tf.Tensor:
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=form.dtype)
    return tf.ensure_shape(value, form.shape)
