"""Pure functions that XLA compiles, to change large variables in place.

TensorFlow's own operations would make copies, and its scattering takes six times as
long.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

_MOST_COMPILED = 256
_compiled: dict[Any, Callable[..., Any]] = {}


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
    _run(device, function, (variables, *args), changes=True)


def call(device: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`.

    It is compiled once for all tensors and variables of the same shapes and types.

    Args:
        device: where to run it.
        function: pure, and not made anew for each call.
        args: structures of tensors, of tf.Variable, whose values the function takes,
            of None, and of numbers, for each of which it is compiled anew.
    """
    return _run(device, function, args, changes=False)


class _Form(NamedTuple):
    """What a compiled function knows of a tensor or a variable."""

    is_variable: bool
    shape: tf.TensorShape
    dtype: tf.DType


def _form(part: Any) -> Any:
    """Return the form of an argument, or what is no tensor itself."""
    if isinstance(part, tf.Variable) or tf.is_tensor(part):
        return _Form(isinstance(part, tf.Variable), part.shape, part.dtype)
    return part


def _run(device: str, function: Callable[..., Any], args: Any, changes: bool) -> Any:
    flat = tf.nest.flatten(args)
    forms = [_form(part) for part in flat]
    structure = tf.nest.map_structure(lambda _: None, args)
    key = (device, function, changes, str(forms), str(structure))
    if key not in _compiled:
        while len(_compiled) >= _MOST_COMPILED:
            del _compiled[next(iter(_compiled))]
        with tf.init_scope(), tf.device(device):
            _compiled[key] = _compile(function, forms, structure, changes)
    given = [
        part.handle if form.is_variable else part
        for form, part in zip(forms, flat, strict=True)
        if isinstance(form, _Form)
    ]
    with tf.device(device):
        return _compiled[key](*given)


def _compile(
    function: Callable[..., Any], forms: list[Any], structure: Any, changes: bool
) -> Callable[..., Any]:
    """Return a function of the tensors and handles among some arguments.

    It knows handles rather than variables, as it outlives them.
    """
    of_tensors = [form for form in forms if isinstance(form, _Form)]

    def run(*given: tf.Tensor) -> Any:
        values = [
            _read(part, form) if form.is_variable else part
            for part, form in zip(given, of_tensors, strict=True)
        ]
        left = iter(values)
        own = [next(left) if isinstance(form, _Form) else form for form in forms]
        found = function(*tf.nest.pack_sequence_as(structure, own))
        if not changes:
            return found
        handles = [h for h, f in zip(given, of_tensors, strict=True) if f.is_variable]
        new = [value for value in tf.nest.flatten(found) if value is not None]
        for handle, value in zip(handles, new, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return None

    specs = [
        tf.TensorSpec([], tf.resource) if f.is_variable else tf.TensorSpec(*f[1:])
        for f in of_tensors
    ]
    compiled = tf.function(run, autograph=False, jit_compile=True)
    # A concrete one: it is compiled even where functions are to run eagerly.
    return compiled.get_concrete_function(*specs)


def _read(handle: tf.Tensor, form: _Form) -> tf.Tensor:
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=form.dtype)
    return tf.ensure_shape(value, form.shape)
