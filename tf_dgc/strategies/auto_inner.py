"""Inside of AutoStrategy: measures and chooses before the first step."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import _host, bands, optimizers
from tf_dgc.config import AutoConfig, AveragingConfig, DGCConfig
from tf_dgc.exchanges import Averaging, EachStep, nodes
from tf_dgc.exchanges.inplace import unseen
from tf_dgc.exchanges.records import Record
from tf_dgc.prediction import calibration, choices, costs
from tf_dgc.prediction.choices import Choice, Situation
from tf_dgc.prediction.costs import Measured
from tf_dgc.strategies import fits
from tf_dgc.strategies.averaging_inner import AveragingInner
from tf_dgc.strategies.core import Core
from tf_dgc.strategies.inner import Inner
from tf_dgc.transports import Transport
from tf_dgc.transports.mesh import HierarchicalTransport

_logger = logging.getLogger("tf_dgc")


class AutoInner(Inner):
    """Inside of a strategy that chooses itself, as late as can be.

    So what was restored before counts.

    Attributes:
        choice: strategy that was chosen, its settings and why; None before.
    """

    _wanted: AutoConfig
    _become: Callable[[bool], None]

    def __init__(self, core: Core) -> None:
        """Begin without a choice."""
        super().__init__(core)
        self.choice: Choice | None = None

    def choose_by(self, wanted: AutoConfig, become: Callable[[bool], None]) -> None:
        """Take the settings, before anything is chosen.

        Args:
            wanted: settings of the user.
            become: makes the strategy one that averages, or not.
        """
        self._wanted, self._become = wanted, become

    def expect_fit(self, model: keras.Model) -> None:
        """Choose before a step by itself, as of `train_on_batch`."""
        super().expect_fit(model)
        run = fits.current()
        if run is None or run.what != "fit":
            self._choose_for(model)

    def compare_variables(self) -> None:
        """Choose before the first step of a `fit`."""
        model = self.agreement.to_compare
        if model is not None and tf.executing_eagerly():
            self._choose_for(model)
        super().compare_variables()

    def exchange_and_update(
        self,
        optimizer: keras.optimizers.Optimizer,
        pairs: Sequence[tuple[Any, Any]],
        learning_rate: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Choose in a loop of the user's own, whose steps are known only now."""
        if self.choice is None and self.core.transport.size > 1:
            variables = [v for g, v in pairs if g is not None]
            in_model = self.share is not None and self.share.step.model is not None
            with tf.init_scope():
                why = _refusal([optimizer], variables, self._wanted.dgc)
                self._choose(variables, [], None, why or _OWN_STEP * in_model, True)
        args = optimizer, pairs, learning_rate, update
        super().exchange_and_update(*args)

    def _choose_for(self, model: keras.Model) -> None:
        """Choose for a model that is built."""
        variables, alone = model.trainable_variables, self.core.transport.size == 1
        if self.choice is not None or alone or not variables:
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
        wanted, transport = self._wanted, self.core.transport
        whole = [v for v in variables if bands.of(v) is None]
        if in_step or len(whole) < len(variables):
            left = [name for name in wanted.allow if name != "averaging"]
            wanted = AutoConfig(allow=tuple(left) or ("dense",), dgc=wanted.dgc)
        config = wanted.dgc or DGCConfig()
        tensors = costs.tensors_of(whole, config, statistics)
        network = calibration.network(transport)

        def measure(config: DGCConfig) -> Measured:
            device = transport.device
            return calibration.machine(tensors.layout, config, device, transport.size)

        kind = type(transport)
        has_owners = kind.all_to_all is not Transport.all_to_all
        situation = Situation(tensors, transport.size, steps, why_not_dgc, has_owners)
        own = choices.choose(wanted, situation, network, measure)
        if transport.rank == 0:
            _logger.info("AutoStrategy takes %s: %s", own.strategy, own.reason)
        self._take(choices.of_chief(transport, own))

    def _take(self, choice: Choice) -> None:
        """Become what was chosen; all workers call this.

        Raises:
            ValueError: another choice was made, and trained with.
        """
        before, self.choice = self.choice, choice
        if before is not None and before[:2] == choice[:2]:
            return
        core = self.core
        if not core.ledger.untouched:
            self.choice = before
            raise ValueError(
                "A state must be restored before the first step where AutoStrategy "
                f"has saved it. Received: a state of {choice.strategy!r}, in a "
                f"training with {before.strategy if before else 'dense'!r}"
            )
        averages = choice.strategy == "averaging"
        if averages:
            rounds = self._wanted.averaging or AveragingConfig()
            core.decide(rounds, unseen(lambda: Averaging(rounds)))
        elif choice.strategy == "dgc":
            config = DGCConfig.from_config(choice.config)
            args = core.mesh.voices, config.hierarchical, config
            voices = unseen(lambda: nodes.chosen(*args))
            by_nodes = isinstance(voices, HierarchicalTransport)
            config = dataclasses.replace(config, hierarchical=by_nodes)
            self.choice = choice._replace(config=config.get_config())
            core.decide(config, EachStep(config), voices)
        else:
            core.decide(None, EachStep(None))
        self.__class__ = AveragingAutoInner if averages else AutoInner
        if averages:
            cast(AveragingAutoInner, self).begin()
        self._become(averages)

    def own_state(self, model: keras.Model | None) -> list[Record]:
        """Return what `save_state` writes of this worker; see the base class."""
        chosen = [] if self.choice is None else self.choice.record()
        return super().own_state(model) + chosen

    def restore_state(self, path: Any, model: keras.Model | None) -> None:
        """Take over what `save_state` wrote, the choice first; see the base class."""
        saved = choices.saved(self.core.transport, path)
        if saved is not None:
            self._take(saved)
        super().restore_state(path, model)


class AveragingAutoInner(AutoInner, AveragingInner):
    """Inside of an AutoStrategy that has chosen to average."""


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
