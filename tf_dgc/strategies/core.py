"""Core of a strategy: what all that it does for the package stands on."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.config import AveragingConfig, DGCConfig, DownpourConfig
from tf_dgc.exchanges import Ledger, Make
from tf_dgc.strategies.share import Share
from tf_dgc.strategies.stopping import Stopping
from tf_dgc.transports import Transport
from tf_dgc.transports.mesh import Mesh

_logger = logging.getLogger("tf_dgc")


class Core:
    """Core of a strategy.

    Attributes:
        strategy: of the user.
        mesh: who takes part in what.
        config: the settings; None where the strategy has none.
        ledger: of exchanges.
        make: of exchanges.
        share: of a step, where there are several workers.
        stopping: of training, where there are several workers.
        restored: whether each worker has got what it had of its own, since a `fit`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        mesh: Mesh,
        config: DGCConfig | AveragingConfig | DownpourConfig | None,
        ledger: Ledger,
        make: Make,
    ) -> None:
        """Begin without what several workers have."""
        self.strategy, self.mesh, self.config = strategy, mesh, config
        self.ledger, self.make = ledger, make
        self.share: Share | None = None
        self.stopping: Stopping | None = None
        self.restored = False
        self._warned: set[str] = set()

    @property
    def transport(self) -> Transport:
        """Transport between all workers."""
        return self.mesh.everybody

    @property
    def extended(self) -> Any:
        """Implementation of tf.distribute of the strategy."""
        return self.strategy.extended

    def kinds_of_steps(self) -> tuple[bool, bool, bool]:
        """Return what `Share` asks of steps."""
        clips_sum = not isinstance(self.in_steps, DGCConfig)
        averages = isinstance(self.in_steps, AveragingConfig)
        return clips_sum, not self.ledger.lockstep, averages

    @property
    def in_steps(self) -> DGCConfig | AveragingConfig | DownpourConfig | None:
        """Settings of what workers exchange in each step; None for whole gradients."""
        if self.of_all:
            return self.config
        within = getattr(self.config, "within", None)
        return within if isinstance(within, DGCConfig) else None

    @property
    def over(self) -> Transport:
        """Transport between the workers of the training step that runs, or all."""
        trains = self.share is not None and self.share.step.trains
        return self.mesh.together if trains else self.transport

    @property
    def of_all(self) -> bool:
        """Tell whether workers that take a step together are all, and not a site's."""
        return self.mesh.together is self.transport

    def decide(
        self,
        config: DGCConfig | AveragingConfig | None,
        make: Make,
        voices: Transport | None = None,
    ) -> None:
        """Take other settings and exchanges, before the first step.

        Args:
            config: the settings; None for whole gradients.
            make: of exchanges.
            voices: between whom messages go; None for those of now.
        """
        self.config, self.make = config, make
        if voices is not None:
            self.mesh = self.mesh._replace(voices=voices)
        self.ledger.decide(self.mesh.voices, make)
        if self.share is not None:
            self.share.decide(*self.kinds_of_steps())

    @property
    def clips_sum(self) -> bool:
        """Tell whether optimizers clip what was exchanged."""
        return self.share is not None and self.share.clips_sum

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """Let variables be updated: by what was exchanged."""
        self.extended.exchanged = True
        try:
            yield
        finally:
            self.extended.exchanged = False

    def warn(self, warnings: Sequence[str]) -> None:
        """Give each warning once."""
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _logger.warning(warning)
