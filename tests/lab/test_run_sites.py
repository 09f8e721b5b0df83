"""Hosts of tf-dgc-run are sites: two names of this machine, reached by a real sshd."""

import subprocess
import sys
import tempfile
import unittest

import launch
import pytest
import sshd

SCRIPT = str(launch.ROOT / "tests" / "jobs" / "site_jobs.py")


@pytest.mark.processes
@pytest.mark.timeout(400)
class RunSitesTest(unittest.TestCase):
    def test_workers_of_a_host_step_together_and_hosts_average(self) -> None:
        sshd.program()
        daemon = sshd.Sshd(self.enterContext(tempfile.TemporaryDirectory()))
        process = daemon.start()
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        hosts = ["--hosts", "127.0.0.1:2,127.0.0.2:2", "--ssh", daemon.client]
        done = subprocess.run(
            [sys.executable, "-m", "tf_dgc.run", *hosts, SCRIPT],
            env=launch.worker_environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        found = launch.results(done)
        steps = [each.pop("steps") for each in found]
        self.assertEqual(steps[0], steps[1])
        self.assertEqual(steps[2], steps[3])
        self.assertNotEqual(steps[0], steps[2])
        self.assertEqual([each["sites"] for each in found], [2] * 4)
        self.assertEqual(len({each["crc"] for each in found}), 1)


if __name__ == "__main__":
    unittest.main()
