"""Sites: workers that are near one another, and far from those of other sites.

By TF_DGC_SITES, by the switches that Slurm knows, or else each host is one.
"""

import collections
import itertools
import logging
import os
import re
from collections.abc import Sequence

from tf_dgc.transports import base, handshake
from tf_dgc.transports.mesh import Sites

VARIABLE = "TF_DGC_SITES"
# Of a node: the switches above it, from the first on, and its name, with points.
_TOPOLOGY = "SLURM_TOPOLOGY_ADDR"
_RANKS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")

_logger = logging.getLogger("tf_dgc")


def among(everybody: base.Transport) -> base.Transport:
    """Return a transport among sites; of a worker that is alone, the same.

    All workers call this.

    Args:
        everybody: between workers.

    Raises:
        ValueError: TF_DGC_SITES is wrong, or the transport has no groups.
    """
    if everybody.alone:
        return everybody
    names = of_workers(everybody)
    if everybody.rank == 0:
        _tell(names)
    return Sites(everybody, names)


def of_workers(everybody: base.Transport) -> list[str]:
    """Return the name of each worker's site, by rank; all workers call this.

    Raises:
        ValueError: TF_DGC_SITES is wrong, or workers have different ones.
    """
    given = os.environ.get(VARIABLE, "")
    handshake.agree(everybody, "sites", {VARIABLE: given})
    own = {"host": everybody.host, "switches": os.environ.get(_TOPOLOGY, "")}
    told = handshake.tell(everybody, "site", own)
    hosts, switches = (
        [str(each.get(name, "")) for each in told] for name in ("host", "switches")
    )
    if given:
        return read(given, hosts)
    return by_switches(switches) if all(switches) else hosts


def read(text: str, hosts: Sequence[str]) -> list[str]:
    """Return the site of each worker, as TF_DGC_SITES tells it.

    Args:
        text: the site of each worker by rank, "a,a,b,b"; or what is on each site,
            parted by semicolons: hosts, or ranks, as "0-1,4;2-3".
        hosts: of all workers, by rank.

    Raises:
        ValueError: it is something else, or not of these workers.
    """

    def refuse(rule: str) -> ValueError:
        return ValueError(
            f"The environment variable {VARIABLE} must {rule}. Received: "
            f"{VARIABLE}={text!r}, {len(hosts)} workers, on {', '.join(hosts)}"
        )

    if ";" not in text:
        names = [name.strip() for name in text.split(",")]
        if len(names) != len(hosts) or not all(names):
            raise refuse(
                "name the site of each worker, as a,a,b,b, or what is on each site, as "
                "one,two;three or 0-1;2-3"
            )
        return names
    found: dict[int, str] = {}
    for site in text.split(";"):
        for entry in site.split(","):
            entry = entry.strip()
            ranks = _ranks_of(entry, hosts)
            if not ranks:
                raise refuse(f"have hosts or ranks of workers, and not {entry!r}")
            if twice := found.keys() & set(ranks):
                raise refuse(f"have worker {min(twice)} on one site only")
            found |= dict.fromkeys(ranks, site.strip())
    if left := sorted(set(range(len(hosts))) - found.keys()):
        raise refuse(f"have a site for each worker, and has none for {left}")
    return [found[rank] for rank in range(len(hosts))]


def _ranks_of(entry: str, hosts: Sequence[str]) -> list[int]:
    """Return the workers that are meant by a host or by ranks; empty if none is."""
    match = _RANKS.fullmatch(entry)
    if match is None:
        return [rank for rank, host in enumerate(hosts) if host == entry]
    first, last = int(match[1]), int(match[2] or match[1])
    return list(range(first, last + 1)) if last < len(hosts) else []


def by_switches(addresses: Sequence[str]) -> list[str]:
    """Return the site of each worker: the first of its switches that not all have.

    Args:
        addresses: switches and node, as "s0.s4.node7".
    """
    parts = [address.split(".") for address in addresses]
    for level in itertools.zip_longest(*parts, fillvalue=""):
        if len(set(level)) > 1:
            return list(level)
    return list(addresses)


def _tell(names: Sequence[str]) -> None:
    counts = collections.Counter(names)
    each = ", ".join(f"{count} at {site}" for site, count in counts.items())
    if len(counts) == 1:
        _logger.warning(
            "All %d workers are at one site, %s: they train together, and there is "
            "nobody to average with. %s=a,a,b,b names the site of each worker",
            len(names),
            names[0],
            VARIABLE,
        )
    elif len(counts) == len(names):
        _logger.warning(
            "Each of %d workers is at a site of its own, and trains by itself between "
            "rounds. %s=a,a,b,b names the site of each worker",
            len(names),
            VARIABLE,
        )
    else:
        _logger.info(
            "%d workers at %d sites (%s): they train together at each site, and sites "
            "average",
            len(names),
            len(counts),
            each,
        )
