"""Steps that workers take together on servers, and this worker's part in them."""

from collections.abc import Callable

import numpy as np

from tf_dgc.exchanges.ledger import Ledger
from tf_dgc.exchanges.served import served
from tf_dgc.servers.turns import Turns
from tf_dgc.strategies.served_share import OverServers


class CommonSteps:
    """Steps of all workers: of what they train, and of sums of their losses.

    Attributes:
        sums: of losses, where steps are of all.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Take the exchanges."""
        self._ledger = ledger
        self.sums: OverServers | None = None

    def turns(self) -> list[Turns]:
        """Return the turns of all of them."""
        return [*([] if self.sums is None else self.sums.turns), *self._trained()]

    def _trained(self) -> list[Turns]:
        found = [exchange.turns for exchange in served(self._ledger.exchanges())]
        return [turns for turns in found if turns is not None]

    def leave(self, stops: bool = False) -> None:
        """Hold nobody back who still trains; or let a callback end what all train."""
        for exchange in served(self._ledger.exchanges()):
            if exchange.clocks is not None:
                exchange.clocks.leave()
        for turns in self._trained():
            turns.attendance.leave(stops)
        for turns in self.turns():
            turns.attendance.leave()

    def meet(self, barrier: Callable[[], None]) -> None:
        """Hold nobody back, and wait for all workers: the next step begins anew."""
        self.leave()
        barrier()

    def told_of_end(self) -> str:
        """Say why a worker computes nothing further for the others."""
        stopped = {
            k for t in self._trained() for k in np.flatnonzero(t.attendance.stopped())
        }
        if not stopped:
            return "The others have ended: what this worker computes further is dropped"
        return (
            f"A callback has stopped `fit` on workers {sorted(map(int, stopped))}: it "
            "ends on the others after the same step"
        )
