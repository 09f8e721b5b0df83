"""Studies of Optuna that all workers ask alike."""

import builtins
import importlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_dgc.search import chief
from tf_dgc.transports.base import Transport
from tf_dgc.transports.local import LocalTransport

_FROZEN = "frozen trial"


def create_study(**kwargs: Any) -> "Study":
    """Create a study of Optuna whose trials are trained by all workers.

    The chief has the study and decides; the other workers get what it has decided.
    Call this after the strategy is made, on all workers.

    Example:
        study = tf_dgc.search.create_study(direction="maximize")
        for _ in range(20):
            trial = study.ask()
            rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
            study.tell(trial, train(rate))

    Args:
        **kwargs: of `optuna.create_study`.

    Returns:
        A study with the methods of Optuna's: `ask`, `tell`, `optimize`, `best_params`
        and so on. All workers call them in the same order.
    """
    strategy = tf.distribute.get_strategy()
    transport = getattr(strategy, "transport", None) or LocalTransport()
    return Study(transport, kwargs)


class _OfChief:
    """An object of the chief, whose methods all workers call.

    Each gets what the method has returned there, or the error that it has raised.
    """

    def __init__(self, transport: Transport, make: Callable[[], Any]) -> None:
        self._transport = transport
        self._object: Any = None
        self._of_chief(lambda: self._set(make))

    def _set(self, make: Callable[[], Any]) -> None:
        self._object = make()

    def _of_chief(self, call: Callable[[], Any]) -> Any:
        """Return on all workers what a function returns on the chief."""
        outcome: list[Any] = []
        if self._transport.rank == 0:
            try:
                outcome = [None, _dumped(call())]
            except Exception as error:  # raised on all workers, below
                outcome = [type(error).__name__, str(error)]
        kind, text = chief.told(self._transport, outcome)
        if kind:
            raise _error_of(kind)(text)
        return json.loads(text, object_hook=_loaded)

    def __getattr__(self, name: str) -> Any:
        """Return a property of the chief's object, or call its method there."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        own = self._object
        if self._of_chief(lambda: callable(getattr(own, name))):
            return lambda *args, **kwargs: self._of_chief(
                lambda: getattr(own, name)(*args, **kwargs)
            )
        return self._of_chief(lambda: getattr(own, name))


class Trial(_OfChief):
    """A trial of a study, which suggests the chief's values to all workers."""


class Study(_OfChief):
    """A study of the chief; see `create_study`."""

    def __init__(self, transport: Transport, settings: dict[str, Any]) -> None:
        """Make the study on the chief.

        Args:
            transport: between the workers.
            settings: of `optuna.create_study`.
        """
        super().__init__(transport, lambda: _optuna().create_study(**settings))

    def ask(self, *args: Any, **kwargs: Any) -> Trial:
        """Return the next trial."""
        return Trial(self._transport, lambda: self._object.ask(*args, **kwargs))

    def tell(
        self, trial: Trial, values: Any = None, state: Any = None, **kwargs: Any
    ) -> Any:
        """Report the result of a trial: that of the chief."""
        own = trial._object
        return self._of_chief(lambda: self._object.tell(own, values, state, **kwargs))

    def optimize(
        self,
        func: Callable[[Trial], Any],
        n_trials: int,
        callbacks: Iterable[Callable[["Study", Any], None]] = (),
    ) -> None:
        """Train trials, one after the other.

        Args:
            func: takes a trial, and returns what is to be optimized. All workers run
                it.
            n_trials: how many.
            callbacks: called with this study and the trial as it has ended.
        """
        for _ in range(n_trials):
            trial = self.ask()
            try:
                frozen = self.tell(trial, func(trial))
            except _optuna().TrialPruned:
                frozen = self.tell(trial, state=_optuna().trial.TrialState.PRUNED)
            for callback in callbacks:
                callback(self, frozen)


def _optuna() -> Any:
    return importlib.import_module("optuna")


def _error_of(name: str) -> Any:
    """Return the class of an error of Python or Optuna, by its name."""
    for place in (builtins, _optuna().exceptions):
        kind = getattr(place, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind
    return RuntimeError


def _dumped(value: Any) -> str:
    """Return a value as JSON, in which trials that have ended may stand."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    optuna = _optuna()
    if isinstance(value, optuna.trial.FrozenTrial):
        to_json = optuna.distributions.distribution_to_json
        return {
            _FROZEN: value.number,
            "state": int(value.state),
            "values": value.values,
            "params": value.params,
            "distributions": {k: to_json(v) for k, v in value.distributions.items()},
            "user_attrs": value.user_attrs,
            "intermediate_values": list(value.intermediate_values.items()),
        }
    if hasattr(value, "item"):  # a scalar of NumPy
        return value.item()
    raise TypeError(
        "Workers tell each other numbers, texts, and trials that have ended. Received "
        f"from the study: {value!r}"
    )


def _loaded(record: dict[str, Any]) -> Any:
    if _FROZEN not in record:
        return record
    optuna = _optuna()
    of_json = optuna.distributions.json_to_distribution
    frozen = optuna.trial.create_trial(
        state=optuna.trial.TrialState(record["state"]),
        values=record["values"],
        params=record["params"],
        distributions={k: of_json(v) for k, v in record["distributions"].items()},
        user_attrs=record["user_attrs"],
        intermediate_values=dict(record["intermediate_values"]),
    )
    frozen.number = record[_FROZEN]
    return frozen
