"""Workers of a job as one of them sees them: where they are, and who answers."""

import re
from collections.abc import Iterable, Sequence

from tf_dgc.transports import rendezvous

# Of an exception, what is told to others.
TOLD_CHARACTERS = 1_000
# How the service on worker 0 names workers that are stopped or cut off.
_SILENT = re.compile(r"stopped sending heartbeats\):((?:\s*/job:\S+)+)")


class Peers:
    """Addresses of all workers.

    Attributes:
        rank: of this worker.
        others: ranks of the others.
    """

    def __init__(self, addresses: Sequence[str], rank: int) -> None:
        """Take them.

        Args:
            addresses: "host:port" of each worker.
            rank: of this one.
        """
        self._addresses, self.rank = list(addresses), rank
        self.others = [peer for peer in range(len(addresses)) if peer != rank]

    def named(self, ranks: Iterable[int]) -> str:
        """Return workers with their addresses."""
        return ", ".join(f"{rank} ({self._addresses[rank]})" for rank in ranks)

    def absent(self, ranks: Iterable[int]) -> str:
        """Say which workers are not in a collective; "" where there are none."""
        each = self.named(sorted(ranks))
        return f" Not in it: worker {each}." if each else ""

    def unreachable(self, among: Sequence[int] | None = None) -> list[int]:
        """Return the ranks of others that do not answer now.

        Args:
            among: the workers to look for, this one with them; None for all.
        """
        ranks = range(len(self._addresses)) if among is None else among
        addresses = [self._addresses[rank] for rank in ranks]
        found = rendezvous.unreachable(addresses, ranks.index(self.rank))
        return [ranks[i] for i in found]

    def missing(self, error: str = "", among: Sequence[int] | None = None) -> str:
        """Say which other workers do not answer now, or did not by an error's text.

        Args:
            error: the text.
            among: the workers to look for; None for all.
        """
        gone = set(self.unreachable(among))
        for tasks in _SILENT.findall(error):
            gone |= {int(task) for task in re.findall(r"/task:(\d+)", tasks)}
        if self.rank and "CoordinationService/" in error:
            gone.add(0)  # which has that service; TensorFlow does not say so
        each = self.named(sorted(gone))
        return f" No longer reachable: worker {each}." if gone else ""
