"""The moment before TensorFlow starts, or asks which strategy is the current one."""

from collections.abc import Callable
from typing import Any

from tf_dgc._host import probe

with probe.imports():
    from tensorflow.python.distribute import distribute_lib
    from tensorflow.python.eager import context
    from tensorflow.python.ops import variables


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    return [
        (context, "Context"),
        (getattr(context, "Context", None), "ensure_initialized"),
        (distribute_lib, "_get_per_thread_mode"),
        (variables, "VariableMetaclass"),
    ]


probe.check(wanted())


class _Pending:
    """Work that is to be done at that moment; None once it is."""

    prepare: Callable[[], bool] | None = None
    restore: Callable[[], None] = staticmethod(lambda: None)


def before_first_use(prepare: Callable[[], bool]) -> None:
    """Let a function run at that moment.

    tensorflow/python/eager/context.py: Context.ensure_initialized, before all
    operations; python/distribute/distribute_lib.py: _get_per_thread_mode;
    python/ops/variables.py: VariableMetaclass.__call__, before a variable looks who
    creates it.

    Args:
        prepare: tells whether it is done; until then it is called again.
    """
    _Pending.restore()
    start, mode, make = (
        context.Context.ensure_initialized,
        distribute_lib._get_per_thread_mode,
        variables.VariableMetaclass.__call__,
    )

    def ensure_initialized(self: Any) -> None:
        prepare_now()
        start(self)

    def get_per_thread_mode() -> Any:
        prepare_now()
        return mode()

    def make_variable(cls: Any, *args: Any, **kwargs: Any) -> Any:
        prepare_now()
        return make(cls, *args, **kwargs)

    def restore() -> None:
        # Who has replaced them since goes on with what does nothing more.
        if context.Context.ensure_initialized is ensure_initialized:
            context.Context.ensure_initialized = start
        if distribute_lib._get_per_thread_mode is get_per_thread_mode:
            distribute_lib._get_per_thread_mode = mode
        if variables.VariableMetaclass.__call__ is make_variable:
            variables.VariableMetaclass.__call__ = make

    _Pending.prepare = staticmethod(prepare)
    _Pending.restore = staticmethod(restore)
    context.Context.ensure_initialized = ensure_initialized
    distribute_lib._get_per_thread_mode = get_per_thread_mode
    variables.VariableMetaclass.__call__ = make_variable


def prepare_now() -> None:
    """Run what is to run before the first use, where there is any."""
    if _Pending.prepare is not None and _Pending.prepare():
        _Pending.prepare = None
        _Pending.restore()
