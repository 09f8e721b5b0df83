"""Check a cluster before a training: `python -m tf_dgc.check`, or `tf-dgc-run --check`.

    tf-dgc-run --hosts a:2,b:2 --check
    srun --ntasks=4 python -m tf_dgc.check --backups /scratch/run

Each worker runs it. They tell worker 0 versions, names, memory, disk and GPUs, and
measure latency and bandwidth: of each pair by itself, and while all send. Worker 0
prints what is wrong, and a verdict. The exit status of all is 0 where they can train
together, and 1 where not. With `--model` follows the table of `tf_dgc.advise` for this
cluster.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence

from tf_dgc.check import verdict
from tf_dgc.check.facts import Facts, gather
from tf_dgc.check.meeting import HostMeeting, follow

WRONG = 1
_WAIT_SECONDS = 60.0
# So much longer others look for worker 0, which may have to tell of them.
_LATER_SECONDS = 60.0
_NOTICE_SECONDS = 10.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tf_dgc.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print everything as JSON")
    add("--backups", default=".", metavar="FOLDER", help="of backups (this one)")
    add("--wait", type=float, default=_WAIT_SECONDS, help="seconds for others (60)")
    add("--model", metavar="MODULE:FUNCTION", help="see tf_dgc.advise")
    return parser


def place() -> tuple[list[str], int]:
    """Return the addresses of all workers, and this worker's rank.

    By TF_CONFIG, which needs no TensorFlow here, or as a strategy finds them.
    """
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        order = [
            (j, i) for j in ("chief", "worker") for i in range(len(jobs.get(j, [])))
        ]
        if (own := (task.get("type"), task.get("index"))) in order:
            return [jobs[job][i] for job, i in order], order.index(own)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"TF_CONFIG must be as TensorFlow takes it: {error}") from None
    rendezvous = importlib.import_module("tf_dgc.transports.rendezvous")
    schedulers = importlib.import_module("tf_dgc.transports.schedulers")
    if size := int(os.environ.get("HOROVOD_SIZE") or 0):
        rank = int(os.environ["HOROVOD_RANK"])
        told = rendezvous.exchange_addresses(rank, size, "", _WAIT_SECONDS)
        return list(told), rank
    if found := schedulers.find():
        return list(found.addresses), int(found.rank)
    return [f"127.0.0.1:{_port()}"], 0


def _port() -> int:
    launcher = importlib.import_module("tf_dgc.launcher.workers")
    return int(launcher.free_ports(1)[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Check; return the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        addresses, rank = place()
    except (ValueError, RuntimeError, TimeoutError) as error:
        parser.error(str(error))
    facts = gather(rank, addresses, options.backups)
    try:
        if rank:
            return (
                0 if follow(facts, addresses, options.wait + _LATER_SECONDS) else WRONG
            )
        return _lead(facts, addresses, options)
    except OSError as error:
        mine = addresses[rank]
        reason = f"worker {rank} at {mine}, or worker 0 at {addresses[0]}: {error}\n"
        sys.stderr.write(f"There is no connection between {reason}")
        return WRONG


def _lead(facts: Facts, addresses: list[str], options: argparse.Namespace) -> int:
    meeting = HostMeeting(facts, addresses)
    try:
        meeting.wait(options.wait, _Notice())
        cluster = meeting.cluster()
    finally:
        meeting.end()
    found = verdict.findings(cluster)
    if options.json:
        record = verdict.as_json(cluster, found)
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        sys.stdout.write(verdict.text(cluster, found) + "\n")
    sys.stdout.flush()
    if options.model and not options.json and cluster.bandwidth:
        _advise(options.model, cluster, cluster.bandwidth)
    return WRONG if any(each.fatal for each in found) else 0


class _Notice:
    """Says now and then who is waited for."""

    def __init__(self) -> None:
        self._began, self._next = time.monotonic(), _NOTICE_SECONDS

    def __call__(self, missing: Sequence[int]) -> None:
        seconds = time.monotonic() - self._began
        if seconds > self._next:
            self._next = seconds + _NOTICE_SECONDS
            named = ", ".join(map(str, missing[:8]))
            sys.stderr.write(f"waiting for worker {named}, {seconds:.0f} s\n")


def _advise(model: str, cluster: verdict.CheckedCluster, bandwidth: float) -> None:
    """Print the table of the adviser for this cluster; in this process, alone."""
    for name in ("TF_CONFIG", "HOROVOD_SIZE", "HOROVOD_RANK"):
        os.environ.pop(name, None)
    sys.path.insert(0, os.getcwd())
    advise = importlib.import_module("tf_dgc.advise")
    size = str(len(cluster.addresses))
    network = ["--bandwidth", f"{bandwidth / 1e3:.0f}kbit"]
    network += ["--latency", f"{cluster.latency:.6f}"]
    sys.stdout.write("\n")
    advise.main(["--model", model, "--workers", size, *network])
