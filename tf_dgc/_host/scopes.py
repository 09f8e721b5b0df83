"""Scopes of strategies that outlive TensorFlow's default graph.

TensorFlow keeps the current strategy in the default graph of a thread. A new graph
takes its place where that is reset, as by `keras.utils.clear_session`, and each thread
begins with one of its own. FW is tensorflow/python/framework.
"""

import atexit
import contextlib
import threading
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from tf_dgc._host import probe

with probe.imports():
    from tensorflow.python.framework import ops

# Methods that make the default graph of a thread when it is first asked for.
_MAKERS = ("get_default", "_GetGlobalDefaultGraph")


def wanted() -> list[tuple[Any, str]]:
    """Return the private names, with the object or class that must have each."""
    stack = getattr(ops, "_default_graph_stack", None)
    return [
        (ops, "_default_graph_stack"),
        (ops, "get_default_graph"),
        *((stack, name) for name in _MAKERS),
        (stack, "_global_default_graph"),
        (stack, "stack"),
        (tf.Graph, "_global_distribute_strategy_scope"),
    ]


probe.check(wanted())


class _Entered:
    """A scope that was entered: in the present default graph, or in those before."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._places: list[tuple[Any, Any]] = []  # graphs, each with a scope
        self.thread = threading.current_thread()

    @property
    def graph(self) -> Any:
        """The graph in which it was entered last."""
        return self._places[-1][0]

    def enter(self) -> Any:
        """Enter a new scope of TensorFlow in the default graph."""
        scope = self._make()
        result = scope.__enter__()
        self._places.append((ops.get_default_graph(), scope))
        return result

    def exit(self, *error: Any) -> None:
        """Exit the scopes, the last one first, each in its graph."""
        while self._places:
            graph, scope = self._places.pop()
            with _as_default(graph):
                scope.__exit__(*error)


def _as_default(graph: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a graph is the default one."""
    if ops.get_default_graph() is graph:
        return contextlib.nullcontext()
    return graph.as_default()


class Scope:
    """Context of a strategy that stays entered where the default graph is reset.

    It may be entered again, also while it is entered.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Prepare a scope that is not entered.

        Args:
            make: returns a new scope of TensorFlow.
        """
        self._make = make
        self._entered: list[_Entered] = []

    def __enter__(self) -> Any:
        """Enter the scope; return the strategy."""
        entered = _Entered(self._make)
        strategy = entered.enter()
        self._entered.append(entered)
        _of_thread.open.append(entered)
        _open.append(entered)
        return strategy

    def __exit__(self, *error: Any) -> None:
        """Exit the scope, in all graphs in which it was entered."""
        ops.get_default_graph()  # a new one follows first
        entered = self._entered.pop()
        _of_thread.open.remove(entered)
        _open.remove(entered)
        entered.exit(*error)


class _OfThread(threading.local):
    """The scopes that a thread has entered and not left, the outermost first."""

    def __init__(self) -> None:
        self.open: list[_Entered] = []


class _OfProcess:
    """The strategy that was set for all threads."""

    strategy: Any = None
    takes: Callable[[], bool] = staticmethod(lambda: False)


_of_thread = _OfThread()
_open: list[_Entered] = []  # of all threads
_set_in_thread = tf.distribute.experimental_set_strategy


def set_for_process(strategy: Any, takes: Callable[[], bool]) -> None:
    """Let threads to come begin with a strategy.

    Args:
        strategy: of this package; None sets nothing.
        takes: tells, in a thread that makes its first default graph, whether the thread
            begins with the strategy.
    """
    _OfProcess.strategy, _OfProcess.takes = strategy, staticmethod(takes)


def strategy_of_process() -> Any:
    """Return the strategy that was set for all threads, or None."""
    return _OfProcess.strategy


def is_open_elsewhere() -> bool:
    """Tell whether another thread is in a scope."""
    return len(_open) > len(_of_thread.open)


def get_default_graph(original: Callable[[Any], Any], stack: Any) -> Any:
    """Enter open scopes in each new default graph of a thread.

    FW/ops.py: _DefaultGraphStack.get_default and _GetGlobalDefaultGraph make the graph
    where `_global_default_graph` is None.
    """
    known = stack._global_default_graph
    found = original(stack)
    if known is None and stack._global_default_graph is not None:
        _follow(stack._global_default_graph, stack.stack)
    return found


def _follow(graph: Any, others: list[Any]) -> None:
    """Enter in a new default graph what is open in this thread, or set for all.

    Args:
        graph: that is the default one where no other is entered.
        others: graphs that are entered now, such as those of functions.

    FW/ops.py: Graph._global_distribute_strategy_scope is what
    `experimental_set_strategy` has entered.
    """
    entered = [each for each in _of_thread.open if each.graph not in others]
    with _as_default(graph):
        for each in entered:
            was_set = each.graph._global_distribute_strategy_scope
            each.enter()
            if was_set is not None:
                graph._global_distribute_strategy_scope = was_set
        if not entered and _OfProcess.strategy is not None and _OfProcess.takes():
            _leave_those_of([t for t in _threads() if not t.is_alive()])
            _set_in_thread(_OfProcess.strategy)


def _threads() -> set[threading.Thread]:
    return {each.thread for each in _open}


def _leave_those_of(threads: Collection[threading.Thread]) -> None:
    """Exit scopes in the place of threads that will not: of the ones that have ended.

    Of what TensorFlow keeps by thread nothing is left then, about which the generators
    in its scopes would complain when they are deleted.
    """
    for each in [entered for entered in _open if entered.thread in threads]:
        _open.remove(each)
        with contextlib.suppress(AttributeError, IndexError, RuntimeError):
            each.exit(None, None, None)


@atexit.register
def _leave_others() -> None:
    _leave_those_of(_threads() - {threading.current_thread()})
