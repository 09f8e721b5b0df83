"""The strategy that chooses itself, by what it measures."""

from collections.abc import Mapping, Sequence
from typing import Any

from tf_dgc.config import AutoConfig, AveragingConfig, DGCConfig
from tf_dgc.exchanges import EachStep
from tf_dgc.prediction.choices import Choice
from tf_dgc.strategies.auto_inner import AutoInner, AveragingAutoInner
from tf_dgc.strategies.averaging import ParameterAveragingStrategy
from tf_dgc.strategies.base import BaseStrategy
from tf_dgc.transports import Transport, handshake, resolve
from tf_dgc.transports.mesh import Mesh


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

    _inner_class = AutoInner
    inner: AutoInner

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
                warm-up, where `fit` knows its number of steps, else those of
                `DGCConfig()`; in both with `hierarchical="auto"`.
            averaging: settings of averaging; by default `AveragingConfig()`.
            transport: see `tf_dgc.transports.resolve`.

        Raises:
            ValueError, TypeError: a setting is wrong, or workers differ in one.
            TimeoutError: a worker did not come; names it.
            RuntimeError, ImportError: see `transports.resolve`.
        """
        settings: Any = {"allow": allow, "dgc": dgc, "averaging": averaging}
        wanted = AutoConfig(**settings)
        super().__init__(Mesh.over(resolve(transport)), None, EachStep(None))
        handshake.agree(self.transport, "settings", wanted.get_config())
        self.inner.choose_by(wanted, self._become)

    @property
    def choice(self) -> Choice | None:
        """Strategy that was chosen, its settings and why; None before."""
        return self.inner.choice

    def _become(self, averages: bool) -> None:
        self.__class__ = _Averages if averages else AutoStrategy


class _Averages(AutoStrategy, ParameterAveragingStrategy):
    """An AutoStrategy that has chosen to average."""

    _inner_class = AveragingAutoInner
    inner: AveragingAutoInner
