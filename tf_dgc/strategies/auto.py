"""The strategy that chooses itself, by what it measures."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _host, bands, optimizers
from tf_dgc.config import AutoConfig, AveragingConfig, DGCConfig
from tf_dgc.exchanges import EachStep
from tf_dgc.exchanges.records import Record
from tf_dgc.prediction import calibration, choices, costs
from tf_dgc.prediction.choices import Choice, Situation
from tf_dgc.prediction.costs import Measured
from tf_dgc.strategies import fits
from tf_dgc.strategies.averaging import ParameterAveragingStrategy
from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.transports import Transport, handshake, resolve
from tf_dgc.transports.mesh import Mesh

_logger = logging.getLogger("tf_dgc")


class AutoStrategy(BaseStrategy):
    """Dense training, Deep Gradient Compression or averaging: what is fastest here.

    Before the first step of the first `fit` the workers measure the latency and
    bandwidth of their collectives, and what compression takes on this machine. By the
    model of `tf_dgc.advise` the chief chooses, and all take its choice. It is logged,
    saved with the state, and taken over from there where a job is started again.

    Averaging changes training the most and is chosen where `allow` has it only. DGC is
    left out where it would clip each worker's own gradient, accumulate other than the
    optimizer's own steps, or meet a `train_step` of the model's own. One worker trains
    densely.

    Example:
        strategy = tf_dgc.AutoStrategy()
        with strategy.scope():
            model = ...
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(dataset_of_global_batches)
    """

    def __init__(
        self,
        allow: Sequence[str] = AutoConfig.allow,
        *,
        dgc: DGCConfig | Mapping[str, Any] | None = None,
        averaging: AveragingConfig | Mapping[str, Any] | None = None,
        transport: str | Transport = "auto",
    ) -> None:
        """Find the other workers; call this before any other TensorFlow operation.

        Args:
            allow: what may be chosen: "dense", "dgc", "averaging".
            dgc: settings of DGC; by default a budget of 1/50 of the bytes, with a
                warm-up, where `fit` knows its number of steps, else `DGCConfig()`.
            averaging: settings of averaging; by default `AveragingConfig()`.
            transport: see `tf_dgc.transports.resolve`.

        Raises:
            ValueError, TypeError: a setting is wrong, or workers differ in one.
            TimeoutError: a worker did not come; names it.
            RuntimeError, ImportError: see `transports.resolve`.
        """
        settings: Any = {"allow": allow, "dgc": dgc, "averaging": averaging}
        self._wanted = AutoConfig(**settings)
        self._choice: Choice | None = None
        super().__init__(Mesh.over(resolve(transport)), None, EachStep(None))
        handshake.agree(self._transport, "settings", self._wanted.get_config())

    @property
    def choice(self) -> Choice | None:
        """Strategy that was chosen, its settings and why; None before."""
        return self._choice

    # When it is chosen: as late as can be, so that what was restored counts.

    def expect_fit(self, model: keras.Model) -> None:
        """Choose before a step by itself, as of `train_on_batch`."""
        super().expect_fit(model)
        run = fits.current()
        if run is None or run.what != "fit":
            self._choose_for(model)

    def compare_variables(self) -> None:
        """Choose before the first step of a `fit`."""
        if self._to_compare is not None and tf.executing_eagerly():
            self._choose_for(self._to_compare)
        super().compare_variables()

    def exchange_and_update(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Choose in a loop of the user's own, whose steps are known only now."""
        if self._choice is None and self._transport.size > 1:
            variables = [v for g, v in pairs if g is not None]
            in_model = self.share is not None and self.share.model is not None
            with tf.init_scope():
                why = _refusal([optimizer], variables, self._wanted.dgc)
                self._choose(variables, [], None, why or _OWN_STEP * in_model, True)
        args = optimizer, pairs, learning_rate, update
        super().exchange_and_update(*args)

    def _choose_for(self, model: keras.Model) -> None:
        """Choose for a model that is built."""
        variables = model.trainable_variables
        if self._choice is not None or self._transport.size == 1 or not variables:
            return
        known = _host.keras.optimizers_of(model)
        why = _refusal(known, variables, self._wanted.dgc)
        if not _host.keras.is_of_keras(model.train_step):
            why = why or _OWN_STEP
        weights = [v.value for v in model.non_trainable_weights]
        statistics = [v for v in weights if v.dtype.is_floating and not v.trainable]
        self._choose(variables, statistics, _steps_of(model), why)

    def _choose(
        self,
        variables: Sequence[Any],
        statistics: Sequence[Any],
        steps: int | None,
        why_not_dgc: str,
        in_step: bool = False,
    ) -> None:
        """Measure and choose; all workers call this.

        Args:
            variables: that are trained.
            statistics: that averaging averages, too.
            steps: of the training, where known.
            why_not_dgc: see `Situation`.
            in_step: whether a step has begun, which must be one of all workers.
        """
        wanted, size = self._wanted, self._transport.size
        whole = [v for v in variables if bands.of(v) is None]
        if in_step or len(whole) < len(variables):
            left = [name for name in wanted.allow if name != "averaging"]
            wanted = AutoConfig(allow=tuple(left) or ("dense",), dgc=wanted.dgc)
        config = wanted.dgc or DGCConfig()
        tensors = costs.tensors_of(whole, config, statistics)
        network = calibration.network(self._transport)

        def measure(config: DGCConfig) -> Measured:
            device = self._transport.device
            return calibration.machine(tensors.layout, config, device, size)

        kind = type(self._transport)
        has_owners = kind.all_to_all is not Transport.all_to_all
        situation = Situation(tensors, size, steps, why_not_dgc, has_owners)
        own = choices.choose(wanted, situation, network, measure)
        self._take(choices.of_chief(self._transport, own))
        if self.is_chief:
            _logger.info("AutoStrategy takes %s: %s", own.strategy, own.reason)

    def _take(self, choice: Choice) -> None:
        """Become what was chosen.

        Raises:
            ValueError: another choice was made, and trained with.
        """
        before, self._choice = self._choice, choice
        if before is not None and before[:2] == choice[:2]:
            return
        if not self._ledger.untouched:
            self._choice = before
            raise ValueError(
                "A state must be restored before the first step where AutoStrategy "
                f"has saved it. Received: a state of {choice.strategy!r}, in a "
                f"training with {before.strategy if before else 'dense'!r}"
            )
        if isinstance(self, _Averages):
            self.__class__ = AutoStrategy
        if choice.strategy == "dgc":
            config = DGCConfig.from_config(choice.config)
            self._decide(config, EachStep(config))
        elif choice.strategy == "averaging":
            self.__class__ = _Averages
            averages: Any = self
            averages.begin(self._wanted.averaging or AveragingConfig())
        else:
            self._decide(None, EachStep(None))

    # State.

    def own_state(self, model: keras.Model) -> list[Record]:
        """Return what `save_state` writes of this worker; see the base class."""
        chosen = [] if self._choice is None else self._choice.record()
        return super().own_state(model) + chosen

    def restore_state(self, path: Any, model: keras.Model | None = None) -> None:
        """Take over what `save_state` wrote, the choice first; see the base class."""
        found = choices.saved(self._transport, path)
        if found is not None:
            self._take(found)
        super().restore_state(path, model)


class _Averages(AutoStrategy, ParameterAveragingStrategy):
    """An AutoStrategy that has chosen to average."""

    def begin(self, config: AveragingConfig) -> None:
        """Begin to average."""
        self._decide(config, self._averages(config))


_OWN_STEP = "the model's train_step is its own, and may look at gradients"


def _refusal(
    known: Sequence[Any], variables: Sequence[Any], config: DGCConfig | None
) -> str:
    """Return why DGC would not do for optimizers what they do; "" where it would."""
    config = config or DGCConfig()
    parts = [v for v in variables if bands.of(v) is not None]
    for optimizer in known:
        if warnings := optimizers.warnings_about(optimizer, 2, config):
            return warnings[0]
        try:
            optimizers.refuse_whole_tensors(optimizer, variables, config)
            optimizers.refuse_parts(optimizer, parts, config)
        except ValueError as error:
            return str(error)
    return ""


def _steps_of(model: keras.Model) -> int | None:
    """Return the steps of the `fit` that runs, where it knows them."""
    run = fits.current()
    if run is None or run.what != "fit":
        return None
    params = getattr(getattr(model, "history", None), "params", None) or {}
    epochs, steps = params.get("epochs"), params.get("steps")
    return int(epochs * steps) if epochs and steps else None
