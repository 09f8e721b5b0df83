"""Runs of models: under which strategy, and in which thread.

A strategy that was set holds for all threads that build and train models, and for one
training at a time: steps of two threads would meet other workers in any order.
"""

import contextlib
import multiprocessing.dummy
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import _host
from tf_dgc.strategies.share import share_of


class Run(NamedTuple):
    """A call of `fit`, `evaluate` or `predict`."""

    what: str
    model: keras.Model
    thread: threading.Thread
    several: bool  # whether several workers take part
    epochs: int = 1  # of a `fit`
    sizes: Sequence[int] = ()  # of the sources of its data, as far as they are known


_DIFFERS = re.compile(
    "Dimensions must be equal|[Ss]hapes? (?:of all inputs )?must match|"
    "Incompatible shapes|required broadcastable shapes|incompatible shapes"
)
_BY_CONSTANT = (
    "A step sees the rows of its own worker, a part of the batch. Where the script has "
    "the number of rows as a constant, as in `tf.ones((32, 1))`, write "
    "`tf.shape(x)[0]`; see docs/how-to/steps-of-your-own.md"
)
_own: weakref.WeakSet[Any] = weakref.WeakSet()  # strategies of this package
_running: list[Run] = []
_entering = threading.Lock()


def note(strategy: Any) -> None:
    """Note a strategy of this package, as it is made."""
    _own.add(strategy)


def inner_of(strategy: Any, name: str) -> Any:
    """Return an attribute of a strategy's `inner`; None where it has none."""
    return getattr(getattr(strategy, "inner", None), name, None)


def is_own(strategy: Any) -> bool:
    """Tell whether a strategy is one of this package."""
    return strategy in _own


def current() -> Run | None:
    """Return what this thread runs, the innermost where one runs within another."""
    thread = threading.current_thread()
    return next((e for e in reversed(_running) if e.thread is thread), None)


def may_be_outside() -> bool:
    """Tell whether a model of no strategy may have been made so on purpose.

    Not where a strategy was set for the whole process, nor in a thread that has left
    the scope of another thread behind.
    """
    if _host.scopes.strategy_of_process() is not None:
        return False
    in_main = threading.current_thread() is threading.main_thread()
    return in_main or not _host.scopes.is_open_elsewhere()


def set_strategy(original: Callable[[Any], None], strategy: Any) -> None:
    """Let threads to come begin with a strategy that is set for the process."""
    original(strategy)
    own = strategy if is_own(strategy) else None
    _host.scopes.set_for_process(own, _takes_strategy)


def _takes_strategy() -> bool:
    """Tell whether this thread may build models: it does not read data for a `fit`.

    Threads that are started while a model is trained, those of TensorFlow, and the
    pools of `multiprocessing.dummy` by which Keras reads data, make variables of their
    own, which no other worker makes at the same time.
    """
    return not (_running or _reads_data(threading.current_thread()))


def _reads_data(thread: threading.Thread) -> bool:
    """Tell whether TensorFlow, or a pool of Keras, reads data in a thread."""
    of_pool = isinstance(thread, multiprocessing.dummy.DummyProcess)
    # Python's name of the threads that others have started.
    return of_pool or thread.name.startswith("Dummy-")


def fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Note a `fit`."""
    given = kwargs.get("epochs", args[3] if len(args) > 3 else 1)
    epochs = given - kwargs.get("initial_epoch", 0)
    sizes = _sizes_of(kwargs.get("x", args[0] if args else None))
    with _noted("fit", model, epochs, sizes):
        return original(model, *args, **kwargs)


def _sizes_of(given: Any) -> list[int]:
    """Return how many rows, or elements, the sources of data have.

    Args:
        given: arrays or tensors in any structure, or a dataset; nothing is known of
            anything else, and of sources that end somewhere.
    """
    if _host.distribute.is_distributed(given):
        return []
    if isinstance(given, tf.data.Dataset):
        if sources := _host.tensorflow.inputs_of(given):
            return [size for each in sources for size in _sizes_of(each)]
        size = int(given.cardinality())
        return [size] if size >= 0 else []
    try:
        flat = tf.nest.flatten(given, expand_composites=True)
    except (TypeError, ValueError):
        return []
    arrays = [part for part in flat if hasattr(part, "__array__")]
    shapes = [tuple(getattr(part, "shape", ())) for part in arrays[:1]]
    return [int(shape[0]) for shape in shapes if shape]


def evaluate(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Note an `evaluate`."""
    with _noted("evaluate", model):
        return original(model, *args, **kwargs)


def predict(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Note a `predict`."""
    with _noted("predict", model):
        return original(model, *args, **kwargs)


@contextlib.contextmanager
def _noted(
    what: str, model: keras.Model, epochs: int = 1, sizes: Sequence[int] = ()
) -> Iterator[None]:
    """Note a run; refuse one beside that of another thread.

    Raises:
        RuntimeError: a model of several workers is run in another thread.
    """
    strategy: Any = _host.keras.strategy_of(model)
    if not is_own(strategy):
        yield
        return
    strategy.extended.ran = True  # it may have nothing to do, as after a restart
    several = share_of(strategy) is not None
    run = Run(what, model, threading.current_thread(), several, epochs, sizes)
    with _entering:
        others = [each for each in _running if each.thread is not run.thread]
        # Workers of a transport between threads are apart.
        others = [each for each in others if _rank_of(each.model) == _rank_of(model)]
        if several and any(each.several for each in others):
            _refuse(run, others[0])
        _running.append(run)
    try:
        yield
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        workers = getattr(strategy, "num_replicas_in_sync", 1) if several else 1
        if _may_count_by_constant(str(error), workers):
            error.add_note(_BY_CONSTANT)
        raise
    except SystemExit as error:
        if several and not error.code:
            _refuse_to_leave(run, strategy, error)
        raise
    finally:
        _running.remove(run)


def _may_count_by_constant(text: str, workers: int) -> bool:
    """Tell whether shapes in an error differ as a worker's rows and those of all do."""
    if workers == 1 or not _DIFFERS.search(text):
        return False
    sizes = {int(size) for size in re.findall(r"\b\d+\b", _DIFFERS.split(text)[-1])}
    return any(size and size * workers in sizes for size in sizes)


def _refuse_to_leave(run: Run, strategy: Any, error: SystemExit) -> None:
    """Make a failure of an end without one, where others are still in the run.

    Raises:
        RuntimeError: not all workers leave it at this point.
    """
    if not strategy.transport.all_leave():
        line = _host.operations.line_in(error)
        raise RuntimeError(
            f"Worker {strategy.rank} has left `{run.what}` by `sys.exit`"
            f"{f', at {line},' * bool(line)} while others are still in it, and wait "
            "for this one. To end training on all workers set `model.stop_training`, "
            "which one of them may do; or let all call `sys.exit` after the same batch"
        ) from None


def _rank_of(model: keras.Model) -> Any:
    return getattr(_host.keras.strategy_of(model), "rank", None)


def _refuse(run: Run, other: Run) -> None:
    advice = "Train one after the other, as with ThreadPoolExecutor(max_workers=1)"
    if _reads_data(run.thread):
        advice = (
            f"Where data are made of predictions, as by a generator, call the model "
            f"itself, `model(x)`, or call `{run.what}` before `{other.what}`"
        )
    raise RuntimeError(
        "Several workers train one model at a time: in which order threads come, no "
        f"other worker knows. Received: `{run.what}` of {run.model.name!r} in thread "
        f"{run.thread.name!r}, while thread {other.thread.name!r} is in `{other.what}` "
        f"of {other.model.name!r}. {advice}"
    )
