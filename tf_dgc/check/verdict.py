"""Verdict on a cluster, of the facts of all its workers. Pure functions."""

import dataclasses
import ipaddress
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tf_dgc.check.facts import Facts, host_of
from tf_dgc.check.links import Link

# These must be the same on all workers; of others it is said where they differ.
_SAME = ("tf_dgc", "tensorflow", "keras")
_SLOW = 3.0  # times less bandwidth, or more latency, than the median of links
_LATENCY = 0.001  # seconds; what is less is not slow
_CLOCK = 1.0  # seconds between clocks
_MEMORY = _DISK = 2**30
_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


@dataclasses.dataclass(frozen=True)
class CheckedCluster:
    """Everything that was found out.

    Attributes:
        addresses: of all workers.
        facts: of those that came.
        clocks: by rank, how many seconds its clock is before that of worker 0.
        links: each measured by itself.
        together: measured while all workers send to the next.
    """

    addresses: Sequence[str]
    facts: Sequence[Facts]
    clocks: Mapping[int, float] = dataclasses.field(default_factory=dict)
    links: Sequence[Link] = ()
    together: Sequence[Link] = ()

    @property
    def machines(self) -> dict[int, str]:
        """Machine of each worker that came."""
        return {each.rank: each.machine for each in self.facts}

    @property
    def bandwidth(self) -> float | None:
        """Least bandwidth of a worker while all send, in bits per second."""
        found = [link.bandwidth for link in self.together if link.bandwidth]
        return min(found, default=None)

    @property
    def latency(self) -> float:
        """Median latency of a message, in seconds."""
        found = [link.latency for link in self.links if link.latency is not None]
        return statistics.median(found) if found else 0.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes:
        fatal: whether workers would not start, or not train.
        text: a sentence, and what to do.
    """

    fatal: bool
    text: str


def findings(cluster: CheckedCluster) -> list[Finding]:
    """Return what is wrong with a cluster, the worst first."""
    looks: tuple[Callable[[CheckedCluster], Iterable[Finding]], ...] = (
        *(_missing, _names, _ports, _versions, _folders),
        *(_clocks, _memory, _gpus, _slow_links),
    )
    found = [each for look in looks for each in look(cluster)]
    return sorted(found, key=lambda each: not each.fatal)


def _missing(cluster: CheckedCluster) -> Iterable[Finding]:
    there = {each.rank for each in cluster.facts}
    for rank, address in enumerate(cluster.addresses):
        if rank not in there:
            text = (
                f"Worker {rank} ({address}) did not come: start it, and see that it "
                f"can reach worker 0 at {cluster.addresses[0]}."
            )
            yield Finding(True, text)


def _names(cluster: CheckedCluster) -> Iterable[Finding]:
    """Find names of hosts that mean another machine to each, or none."""
    several = len(set(cluster.machines.values())) > 1
    names = {host_of(address) for address in cluster.addresses}
    for name in sorted(names):
        known = {each.rank: each.resolved.get(name) for each in cluster.facts}
        unknown = [rank for rank, found in known.items() if found == []]
        loops = [r for r, found in known.items() if found and any(map(_loops, found))]
        if unknown:
            text = f"Host name {name!r} is not known on {_workers(unknown)}."
            yield Finding(True, f"{text} Add it to DNS or /etc/hosts there.")
        if several and loops:
            text = (
                f"Host name {name!r} means the machine itself ({_loop_of(known)}) on "
                f"{_workers(loops)}, while other hosts take part. Name it by its "
                "address on the network, or correct /etc/hosts there."
            )
            yield Finding(True, text)


def _loops(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _loop_of(known: Mapping[int, Sequence[str] | None]) -> str:
    every = [each for found in known.values() for each in found or ()]
    return next(each for each in every if _loops(each))


def _ports(cluster: CheckedCluster) -> Iterable[Finding]:
    closed: dict[tuple[int, str], list[int]] = {}
    for link in (*cluster.links, *cluster.together):
        sources = closed.setdefault((link.target, link.error), [])
        if link.error and link.source not in sources:
            sources.append(link.source)
    for (target, error), sources in closed.items():
        if sources:
            text = (
                f"{_workers(sources).capitalize()} cannot reach worker {target} at "
                f"{cluster.addresses[target]}: {error}. Open this port between the "
                "hosts."
            )
            yield Finding(True, text)


def _versions(cluster: CheckedCluster) -> Iterable[Finding]:
    names = {name for each in cluster.facts for name in each.versions}
    for name in sorted(names):
        found = _by_value(cluster, lambda each, n=name: each.versions.get(n, "none"))
        if len(found) > 1:
            told = "; ".join(f"{v} on {_workers(r)}" for v, r in found.items())
            text = f"{name} differs: {told}. Install the same everywhere."
            yield Finding(name in _SAME, text)
        elif name in _SAME and "none" in found:
            yield Finding(True, f"{name} is not installed.")
    found = _by_value(cluster, lambda each: each.horovod)
    if len(found) > 1:
        told = "; ".join(f"{v or 'none'} on {_workers(r)}" for v, r in found.items())
        yield Finding(False, f"What Horovod was built with differs: {told}.")


def _by_value(
    cluster: CheckedCluster, value: Callable[..., str]
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in cluster.facts:
        found.setdefault(value(each), []).append(each.rank)
    return found


def _clocks(cluster: CheckedCluster) -> Iterable[Finding]:
    for rank, seconds in cluster.clocks.items():
        if abs(seconds) > _CLOCK:
            way = "before" if seconds > 0 else "behind"
            text = (
                f"The clock of worker {rank} is {abs(seconds):.1f} s {way} that of "
                "worker 0: let NTP set it, or times of files and logs mislead."
            )
            yield Finding(False, text)


def _folders(cluster: CheckedCluster) -> Iterable[Finding]:
    for each in cluster.facts:
        where = f"in {each.folder} on worker {each.rank}"
        if each.obstacle:
            yield Finding(True, f"Backups cannot be written {where}: {each.obstacle}.")
        elif each.disk < _DISK:
            text = f"{_size(each.disk)} are free {where}: backups may not fit."
            yield Finding(not each.disk, text)


def _memory(cluster: CheckedCluster) -> Iterable[Finding]:
    for each in cluster.facts:
        if 0 < each.memory < _MEMORY:
            text = f"{_size(each.memory)} of memory are free on worker {each.rank}."
            yield Finding(False, text)


def _gpus(cluster: CheckedCluster) -> Iterable[Finding]:
    counts = _by_value(cluster, lambda each: str(bool(each.gpus)))
    if len(counts) > 1:
        some = _workers(counts["True"])
        text = f"There are GPUs only for {some}: the others set the pace."
        yield Finding(False, text)
    for machine in dict.fromkeys(cluster.machines.values()):
        there = [each for each in cluster.facts if each.machine == machine]
        shared = sum(each.visible == there[0].visible for each in there)
        seen = _visible(there[0])
        if 0 < seen < shared:
            ranks = [each.rank for each in there]
            text = f"{_workers(ranks).capitalize()} share {seen} GPU(s) of "
            text += f"{there[0].host}: start one worker for each GPU."
            yield Finding(False, text)


def _visible(facts: Facts) -> int:
    """Return the number of GPUs that a worker sees."""
    if facts.visible is None or not facts.gpus:
        return len(facts.gpus)
    parts = [part.strip() for part in facts.visible.split(",")]
    return len(list(itertools.takewhile(lambda part: part not in ("", "-1"), parts)))


def _slow_links(cluster: CheckedCluster) -> Iterable[Finding]:
    machines = cluster.machines
    measured = [
        (link, link.bandwidth, link.latency)
        for link in cluster.links
        if link.bandwidth is not None
        and link.latency is not None
        and machines.get(link.source) != machines.get(link.target)
    ]
    if len(measured) < 3:
        return
    bandwidth = statistics.median(b for _, b, _ in measured)
    latency = statistics.median(seconds for _, _, seconds in measured)
    for link, bits, seconds in measured:
        way = f"The link from worker {link.source} to worker {link.target} is slow: "
        if bits * _SLOW < bandwidth:
            text = f"{way}{rate(bits)}, while the median is {rate(bandwidth)}."
            yield Finding(False, text)
        elif seconds > max(_SLOW * latency, _LATENCY):
            text = f"{way}{1e3 * seconds:.1f} ms, while the median is "
            yield Finding(False, f"{text}{1e3 * latency:.1f} ms.")


def _workers(ranks: Sequence[int]) -> str:
    several = "s" * (len(ranks) > 1)
    more = ", ..." * (len(ranks) > 8)
    return f"worker{several} {', '.join(map(str, ranks[:8]))}{more}"


def _size(number: float) -> str:
    return f"{number / 1e9:.1f} GB"


def rate(bits: float) -> str:
    """Return bits per second, to be read."""
    for unit, name in _UNITS:
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits:.0f} bit/s"


def text(cluster: CheckedCluster, found: Sequence[Finding]) -> str:
    """Return the facts, what is wrong, and a verdict, as lines of text."""
    lines = []
    for each in cluster.facts:
        gpus = f"{_visible(each)} GPU(s)" if each.gpus else "no GPU"
        lines.append(
            f"worker {each.rank}  {each.address}  {each.host}  {gpus}, "
            f"{_size(each.memory)} memory, {_size(each.disk)} disk free"
        )
    if cluster.facts:
        versions = cluster.facts[0].versions
        lines.append(", ".join(f"{name} {v}" for name, v in versions.items()))
        if cluster.facts[0].horovod:
            lines[-1] += f" ({cluster.facts[0].horovod})"
    for title, links in (
        ("each pair by itself", cluster.links),
        ("all at once", cluster.together),
    ):
        if bits := [link.bandwidth for link in links if link.bandwidth]:
            waits = [1e3 * link.latency for link in links if link.latency]
            lines.append(
                f"network, {title}: {rate(min(bits))} to {rate(max(bits))}, "
                f"{min(waits):.2f} to {max(waits):.2f} ms"
            )
    lines += [f"{'WRONG' if one.fatal else 'note'}: {one.text}" for one in found]
    return "\n".join([*lines, verdict(cluster, found)])


def verdict(cluster: CheckedCluster, found: Sequence[Finding]) -> str:
    """Return a sentence."""
    count = len(cluster.addresses)
    wrong = sum(each.fatal for each in found)
    if wrong:
        return f"These {count} workers cannot train together: {wrong} thing(s) wrong."
    if found:
        return f"These {count} workers can train together; see {len(found)} note(s)."
    return f"These {count} workers can train together."


def as_json(cluster: CheckedCluster, found: Sequence[Finding]) -> dict[str, Any]:
    """Return everything, as values that JSON can hold."""
    record = dataclasses.asdict(cluster)
    record["findings"] = [dataclasses.asdict(each) for each in found]
    record["ok"] = not any(each.fatal for each in found)
    record["verdict"] = verdict(cluster, found)
    plain: dict[str, Any] = json.loads(json.dumps(record))
    return plain
