"""Use that a step makes of its gradients before they are exchanged.

Gradients of workers become one where an optimizer applies them. A step that has scaled
them by numbers of all workers, or added some up, does what one process does. Of
anything else, as a norm, a sign, or weights that are moved without an optimizer, a
worker has what its own rows make of it. Such a step is traced again, and its gradients
are exchanged where they are computed.
"""

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands
from tf_dgc.strategies.known import CONSTANT
from tf_dgc.strategies.readings import Reading

# Operations of which a sum over workers may be taken before or after.
_LINEAR = frozenset(
    """AddN AddV2 BroadcastTo Cast ConcatV2 ExpandDims GatherV2 Identity IdentityN Mean
    Mul Neg Pack RealDiv Reshape Slice Split SplitV Squeeze StridedSlice Sub Sum
    Transpose Unpack""".split()
)
LINEAR = "linear"
OTHER = "other"  # something else, of gradients and of what all workers have
LOCAL = "local"  # also of what a worker has by itself
_SUMS = frozenset(("AddN", "AddV2", "ConcatV2", "Pack", "Sub"))


class TraceAgain(BaseException):
    """Raised out of a trace that is to be made once more; nothing has run of it."""


_may_trace_again: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tf_dgc_may_trace_again", default=False
)


def may_trace_again() -> bool:
    """Tell whether `TraceAgain` is caught here."""
    return _may_trace_again.get() and not tf.executing_eagerly()


def traced_again(
    function: Callable[..., Any], make: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a function that is made anew where its trace is to be made once more.

    Args:
        function: a `tf.function`, or one that runs eagerly.
        make: returns another one of the same kind.
    """
    made = [function]

    def call(*args: Any, **kwargs: Any) -> Any:
        while True:
            token = _may_trace_again.set(True)
            try:
                return made[0](*args, **kwargs)
            except TraceAgain:
                made[0] = make()
            finally:
                _may_trace_again.reset(token)

    return call


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class Uses:
    """Gradients of one worker in a step, and what depends on them.

    A gradient that was exchanged ends this: what is made of it all workers have alike.
    """

    def __init__(self) -> None:
        """Begin without gradients."""
        self._flow, self._graph = _host.flow.Flow([]), _graph()
        self._gradients: dict[int, Any] = {}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what is computed in this context."""
        with self._flow.aside():
            yield

    def add(self, gradients: Iterable[Any]) -> None:
        """Take gradients: tensors, of this worker."""
        found = {id(each): each for each in gradients}
        self._gradients |= found
        self._flow.add(found.values())

    def end_at(self, gradients: Iterable[Any]) -> None:
        """Take gradients, as tensors, for those of all workers."""
        self._flow.end_at(gradients)

    def reaches(self, value: Any) -> bool:
        """Tell whether a tensor, or something else, depends on gradients."""
        if not isinstance(value, tf.Tensor) or _graph() is not self._graph:
            return False  # in a branch or a loop it is not known
        eager = self._graph is None
        return (eager or value.graph is self._graph) and self._flow.reaches(value)

    def wrote(self, variable: Any) -> bool:
        """Tell whether what depends on gradients was written to a variable."""
        return self._flow.wrote(variable)

    def of(self, tensor: Any, is_same: Callable[[Any], bool]) -> str:
        """Return what is made of gradients: LINEAR, OTHER or LOCAL.

        Args:
            tensor: that is applied.
            is_same: tells whether another tensor is the same on all workers.
        """
        waiting, seen, found = [tensor], set[int](), LINEAR
        while waiting:
            each = waiting.pop()
            if id(each) in seen or id(each) in self._gradients:
                continue
            seen.add(id(each))
            operation = _host.operations.of(each)
            if operation is None:
                return OTHER
            inputs = list(operation.inputs)
            own = [other for other in inputs if self.reaches(other)]
            rest = [other for other in inputs if not self.reaches(other)]
            numbers = [t for t in rest if t.dtype.is_floating or t.dtype.is_bool]
            if not all(map(is_same, numbers)):
                return LOCAL
            product = len(own) == 1 and (own[0] is inputs[0] or operation.kind == "Mul")
            sums = operation.kind in _SUMS and not numbers
            if operation.kind not in _LINEAR or not (product or sums):
                found = OTHER
            waiting.extend(own)
        return found


class AtOnce:
    """Exchange of gradients where they are computed, of models whose steps need that.

    Where it cannot be had, the step is named.
    """

    def __init__(
        self, allowed: bool, say: Callable[[str], None], in_branch: Callable[[], bool]
    ) -> None:
        """Begin without models.

        Args:
            allowed: whether gradients of all workers may be had before they are
                applied: they are not compressed, and workers meet in each step.
            say: gives a warning.
            in_branch: tells whether what is traced may not run in each step.
        """
        self._allowed, self._say, self._in_branch = allowed, say, in_branch
        self._models: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._model: keras.Model | None = None  # whose own step runs
        self._uses = Uses()
        self._applies = False  # whether an optimizer does

    @contextlib.contextmanager
    def followed(self, model: keras.Model) -> Iterator[None]:
        """Follow a step that is a model's own."""
        self._model, self._uses, self._applies = model, Uses(), False
        if self._allowed and tf.executing_eagerly():
            self._models.add(model)  # nothing can be traced again
        try:
            with self._uses.followed():
                yield
        finally:
            self._model, self._uses = None, Uses()

    def takes(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Tell whether gradients that were computed now are to be exchanged now."""
        if self._model not in self._models or all(g is None for g in gradients):
            return False
        if any(bands.is_split(v) for v in variables) or self._in_branch():
            return False
        return not _host.tensorflow.is_recorded()  # no tape could go back through it

    def add(self, gradients: Iterable[Any]) -> None:
        """Take gradients, as tensors, that are exchanged where they are applied."""
        if self._model is not None:
            self._uses.add(gradients)

    def end_at(self, gradients: Iterable[Any]) -> None:
        """Take gradients, as tensors, that were exchanged."""
        self._uses.end_at(gradients)

    def uses(self, value: Any) -> bool:
        """Tell whether a tensor depends on gradients of this worker."""
        return self._uses.reaches(value)

    def look_at(self, losses: Iterable[Any]) -> None:
        """Look at losses of which further gradients are computed."""
        if any(map(self._uses.reaches, losses)):
            self._need("in what follows")

    def look_at_weights(self, variables: Iterable[Any]) -> None:
        """Look at weights at which further gradients are computed."""
        found = (v for v in variables if isinstance(v, tf.Variable))
        if self._model is not None and any(map(self._uses.wrote, found)):
            self._need("to move weights")

    def look_at_applied(self, gradients: Iterable[Any], reading: Reading) -> None:
        """Look at gradients, as tensors, that an optimizer is to apply.

        Args:
            gradients: the tensors.
            reading: of the step.
        """
        self._applies = True

        def is_same(tensor: Any) -> bool:
            return reading.of(tensor).kind == CONSTANT

        used = filter(self._uses.reaches, gradients)
        kinds = {self._uses.of(each, is_same) for each in used}
        if LOCAL in kinds:
            self._tell("before they are applied")
        elif OTHER in kinds:
            self._need("before they are applied")

    def look_at_results(self, logs: Any) -> None:
        """Look at what a step leaves: weights, metrics, sums of gradients and logs.

        Raises:
            ValueError: weights are moved without an optimizer, and gradients are
                exchanged only where one applies them.
        """
        model = self._model
        if model is None:
            return
        trained = [(v, _host.keras.plain(v)) for v in model.trainable_variables]
        moved = [v.path for v, plain in trained if self._uses.wrote(plain)]
        if moved and not (self._applies or self._allowed):
            raise ValueError(
                f"The training step of {model.name!r} moves {', '.join(moved)} by "
                "gradients without an optimizer, and they are exchanged where "
                "optimizers apply them: each worker would train by itself. Use "
                "`optimizer.apply`, or DenseStrategy"
            )
        kept = any(map(self._uses.wrote, _host.keras.changed_by_steps(model)))
        told = logs.values() if isinstance(logs, Mapping) else ()
        if moved:
            self._need("to move weights")
        elif kept or any(map(self._uses.reaches, told)):
            self._need("in metrics, logs or variables")

    def _need(self, where: str) -> None:
        """Trace the step again, with gradients of all workers; else name it."""
        model = self._model
        if model is None:
            return
        if self._allowed and model not in self._models and may_trace_again():
            self._models.add(model)
            raise TraceAgain("gradients are to be exchanged where they are computed")
        self._tell(where)

    def _tell(self, where: str) -> None:
        # What a step leaves is looked at when it has ended.
        line = "" if "variables" in where else _host.operations.own_line()
        self._say(
            f"A training step uses gradients{f', at {line},' * bool(line)} {where}: "
            "each worker does so with those of its own rows. Sums and multiples of "
            "them become those of one process where an optimizer applies them; all "
            "else may be something else there"
        )
