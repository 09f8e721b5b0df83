"""Exchanges: the way of gradients between their computation and their use.

One object is one optimizer's variables, and holds its own state.
"""

from collections.abc import Callable

from tf_dgc.config import DGCConfig
from tf_dgc.exchanges.averaged import Averaged, Averaging, Expected
from tf_dgc.exchanges.base import Exchange, Place, TakenOver, Update
from tf_dgc.exchanges.compressed import Compressed
from tf_dgc.exchanges.dense import Dense
from tf_dgc.exchanges.ledger import Ledger
from tf_dgc.exchanges.opened import Make
from tf_dgc.exchanges.parts import Part
from tf_dgc.exchanges.rounds import Companions
from tf_dgc.transports.base import Transport
from tf_dgc.transports.sums import Workers, one

__all__ = [
    "Averaged",
    "Averaging",
    "Companions",
    "Compressed",
    "Dense",
    "EachStep",
    "Exchange",
    "Expected",
    "Ledger",
    "Make",
    "Part",
    "Place",
    "Update",
]


class EachStep:
    """Makes exchanges of the gradients of each step, for a `Ledger`."""

    lockstep = True

    def __init__(
        self, config: DGCConfig | None, workers: Callable[[Transport], Workers] = one
    ) -> None:
        """Take settings: of compression, or None for dense exchanges.

        Args:
            config: the settings.
            workers: which of the workers a process is.
        """
        self._config, self._workers = config, workers

    def __call__(self, place: Place, taken_over: TakenOver | None) -> Exchange:
        """Make an exchange; momentum is corrected where it is compressed."""
        if self._config is None:
            return Dense(place)
        return Compressed(place, taken_over, self._config, self._workers)
