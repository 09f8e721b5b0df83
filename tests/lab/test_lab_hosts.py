"""Several workers on each of two hosts of the laboratory: what goes between these."""

import subprocess
import sys
import tempfile
import unittest
from typing import Any

import launch
import netlab
import pytest
from test_netlab import needs_lab

SCRIPT = str(launch.ROOT / "tests" / "jobs" / "traffic.py")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
class HostsTest(unittest.TestCase):
    def found(self, lab: netlab.Laboratory, hosts: str, *options: str) -> list[Any]:
        command = [sys.executable, "-m", "tf_dgc.run", "--hosts", hosts]
        # The first ssh in PATH is the laboratory's.
        environment = {
            k: v for k, v in launch.worker_environment().items() if k != "PATH"
        }
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            status = lab.run(
                [*command, SCRIPT, *options],
                environment=environment,
                timeout=180,
                stdout=out,
                stderr=errors,
            )
            texts = []
            for file in (out, errors):
                file.seek(0)
                texts.append(file.read().decode())
        done = subprocess.CompletedProcess(command, status, *texts)
        return launch.results(done)

    @needs_lab
    def test_a_host_of_two_sends_what_a_worker_that_is_alone_there_does(self) -> None:
        with netlab.Laboratory(2, "100mbit") as lab:
            one = self.found(lab, "host1:1,host2:1")
            two = self.found(lab, "host1:2,host2:2", "hosts")
            flat = self.found(lab, "host1:2,host2:2")
        alone, together, each = (sum(found[0]["seen"]) for found in (one, two, flat))
        counted = two[0]["sent"] + two[0]["received"]
        # TCP's headers, and what workers tell each other of being there.
        self.assertLess(counted, together)
        self.assertLess(together, 1.15 * counted)
        self.assertLess(together, 1.1 * alone)
        self.assertGreater(each, 1.8 * alone)


if __name__ == "__main__":
    unittest.main()
