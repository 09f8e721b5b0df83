"""Tests of the verdict on a cluster, of facts that are made up: each fault is named."""

import dataclasses
import json
import unittest
from typing import Any

from tf_dgc.check import verdict
from tf_dgc.check.facts import Facts
from tf_dgc.check.links import Link
from tf_dgc.check.verdict import CheckedCluster

VERSIONS = {"tf_dgc": "1", "Python": "3.12.1", "tensorflow": "2.21", "keras": "3.15"}
NAMES = ("a", "b", "c", "d")
RESOLVED = {name: [f"10.0.0.{i}"] for i, name in enumerate(NAMES, 1)}


def facts(rank: int, **changes: Any) -> Facts:
    name = NAMES[rank]
    good = {
        "rank": rank,
        "address": f"{name}:2222",
        "host": name,
        "machine": name,
        "versions": VERSIONS,
        "memory": 2**34,
        "disk": 2**36,
        "folder": "/backups",
        "resolved": RESOLVED,
    }
    return Facts(**(good | changes))


def cluster(
    changes: dict[int, dict[str, Any]] | None = None,
    links: dict[tuple[int, int], dict[str, Any]] | None = None,
    **others: Any,
) -> CheckedCluster:
    """Return four workers on four hosts, with what differs from a sound cluster."""
    changes, links = changes or {}, links or {}
    ways = [
        Link(i, j, **{"latency": 1e-4, "bandwidth": 1e9, **links.get((i, j), {})})
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    known = {"links": ways, "together": [w for w in ways if w.target == w.source + 1]}
    every = [facts(rank, **changes.get(rank, {})) for rank in range(4)]
    return CheckedCluster([f.address for f in every], every, **(known | others))


class VerdictTest(unittest.TestCase):
    def told(self, found: CheckedCluster) -> tuple[bool, str]:
        """Return whether the only finding is fatal, and its text."""
        (finding,) = verdict.findings(found)
        return finding.fatal, finding.text

    def test_a_sound_cluster(self) -> None:
        found = cluster()
        self.assertEqual(verdict.findings(found), [])
        told = verdict.text(found, [])
        self.assertTrue(told.endswith("These 4 workers can train together."), told)
        self.assertIn("network, all at once: 1 Gbit/s to 1 Gbit/s, 0.10", told)

    def test_a_wrong_version(self) -> None:
        versions = VERSIONS | {"tensorflow": "2.18"}
        fatal, text = self.told(cluster({2: {"versions": versions}}))
        self.assertTrue(fatal)
        differs = "tensorflow differs: 2.21 on workers 0, 1, 3; 2.18 on worker 2."
        self.assertIn(differs, text)
        fatal, text = self.told(cluster({2: {"versions": VERSIONS | {"Python": "3"}}}))
        self.assertFalse(fatal)
        self.assertIn("Python differs", text)

    def test_a_name_that_means_the_machine_itself(self) -> None:
        resolved = RESOLVED | {"b": ["127.0.1.1"]}
        fatal, text = self.told(cluster({1: {"resolved": resolved}}))
        self.assertTrue(fatal)
        told = "Host name 'b' means the machine itself (127.0.1.1) on worker 1, while"
        self.assertIn(told, text)
        alone = {rank: {"machine": "a", "resolved": resolved} for rank in range(4)}
        self.assertEqual(verdict.findings(cluster(alone)), [])

    def test_a_name_that_is_not_known(self) -> None:
        fatal, text = self.told(cluster({3: {"resolved": RESOLVED | {"b": []}}}))
        self.assertTrue(fatal)
        self.assertIn("Host name 'b' is not known on worker 3.", text)

    def test_a_closed_port(self) -> None:
        closed = {"latency": None, "bandwidth": None, "error": "Connection refused"}
        found = cluster(links={(0, 2): closed, (1, 2): closed})
        fatal, text = self.told(found)
        self.assertTrue(fatal)
        told = "Workers 0, 1 cannot reach worker 2 at c:2222: Connection refused."
        self.assertIn(told, text)
        told = verdict.text(found, verdict.findings(found))
        self.assertTrue(told.endswith("cannot train together: 1 thing(s) wrong."))

    def test_a_worker_that_did_not_come(self) -> None:
        whole = cluster()
        fatal, text = self.told(dataclasses.replace(whole, facts=whole.facts[:3]))
        self.assertTrue(fatal)
        self.assertIn("Worker 3 (d:2222) did not come", text)

    def test_a_wrong_clock(self) -> None:
        fatal, text = self.told(cluster(clocks={1: 0.1, 2: -12.0}))
        self.assertFalse(fatal)
        told = "The clock of worker 2 is 12.0 s behind that of worker 0"
        self.assertIn(told, text)

    def test_a_slow_link(self) -> None:
        fatal, text = self.told(cluster(links={(1, 3): {"bandwidth": 1e8}}))
        self.assertFalse(fatal)
        told = "from worker 1 to worker 3 is slow: 100 Mbit/s, while the median is 1 G"
        self.assertIn(told, text)
        _, text = self.told(cluster(links={(1, 3): {"latency": 0.02}}))
        self.assertIn("is slow: 20.0 ms, while the median is 0.1 ms", text)

    def test_workers_of_one_host_that_share_gpus(self) -> None:
        gpus = ["0, H100, GPU-1", "1, H100, GPU-2"]
        shared = {rank: {"gpus": gpus, "machine": "a"} for rank in range(4)}
        fatal, text = self.told(cluster(shared))
        self.assertFalse(fatal)
        self.assertIn("Workers 0, 1, 2, 3 share 2 GPU(s) of a", text)
        own = {r: {**each, "visible": str(r)} for r, each in shared.items()}
        self.assertEqual(verdict.findings(cluster(own)), [])

    def test_only_some_have_gpus(self) -> None:
        _, text = self.told(cluster({1: {"gpus": ["0, H100, GPU-1"]}}))
        self.assertIn("There are GPUs only for worker 1", text)

    def test_room_for_backups(self) -> None:
        fatal, text = self.told(cluster({2: {"disk": 2**20}}))
        self.assertFalse(fatal)
        self.assertIn("0.0 GB are free in /backups on worker 2", text)
        self.assertTrue(self.told(cluster({2: {"disk": 0}}))[0])
        fatal, text = self.told(cluster({2: {"obstacle": "/ cannot be written"}}))
        self.assertTrue(fatal)
        self.assertIn("Backups cannot be written in /backups on worker 2: / c", text)

    def test_json_has_everything(self) -> None:
        found = cluster({2: {"disk": 2**20}}, clocks={1: 0.5})
        record = verdict.as_json(found, verdict.findings(found))
        self.assertEqual(json.loads(json.dumps(record)), record)
        self.assertTrue(record["ok"])
        self.assertEqual(Facts.of(record["facts"][1]).resolved, RESOLVED)
        self.assertEqual(record["clocks"], {"1": 0.5})

    def test_figures_for_the_adviser(self) -> None:
        found = cluster(links={(1, 2): {"bandwidth": 5e8}})
        self.assertEqual((found.bandwidth, found.latency), (5e8, 1e-4))


if __name__ == "__main__":
    unittest.main()
