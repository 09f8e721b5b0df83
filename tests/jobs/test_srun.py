"""Workers that schedulers start find each other; also a real srun and mpirun."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

import launch
import netlab_rights
import pytest
import slurm

SCRIPT = str(launch.ROOT / "tests" / "jobs" / "peers.py")

Start = Callable[[int, list[str], dict[str, str]], "subprocess.Popen[bytes]"]


def outcomes(output: str) -> list[dict[str, Any]]:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda found: found["rank"])


@pytest.mark.processes
@pytest.mark.timeout(400)
class SchedulersTest(unittest.TestCase):
    def assert_trained_together(
        self, found: list[dict[str, Any]], transport: str = "collective"
    ) -> None:
        self.assertEqual([each["rank"] for each in found], [0, 1])
        for each in found:
            self.assertEqual((each["workers"], each["transport"]), (2, transport))
        self.assertEqual(found[0]["crc"], found[1]["crc"])

    def run_each(self, start: Start, *environments: dict[str, str]) -> None:
        """Start the script in each environment, as a scheduler would."""
        processes = []
        for i, told in enumerate(environments):
            environment = launch.worker_environment() | told
            processes.append(start(i, [sys.executable, SCRIPT], environment))
        output = ""
        for process in processes:
            out, err = process.communicate(timeout=200)
            self.assertEqual(process.returncode, 0, err.decode()[-4000:])
            output += out.decode()
        self.assert_trained_together(outcomes(output))

    @pytest.mark.slow
    def test_two_tasks_of_srun_on_two_hosts(self) -> None:
        netlab = netlab_rights.skip_without_laboratory()
        lab = self.enterContext(netlab.Laboratory(2, "1gbit"))
        told = {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "host[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_JOB_ID": "5",
            "SLURM_LOCALID": "0",
        }
        ranks = [{"SLURM_PROCID": r, "SLURM_NODEID": r} for r in ("0", "1")]
        self.run_each(lab.start, *[told | each for each in ranks])

    @pytest.mark.slow
    def test_two_pods_of_an_indexed_job(self) -> None:
        netlab = netlab_rights.skip_without_laboratory()
        lab = self.enterContext(netlab.Laboratory(2, "1gbit"))
        names = [
            f"{address} train-{i}.peers\n" for i, address in enumerate(lab.addresses)
        ]
        for host in range(2):
            hosts = pathlib.Path("/etc/netns", lab.namespace(host), "hosts")
            hosts.write_text(hosts.read_text() + "".join(names))
        told = {"TF_DGC_WORKERS": "2", "TF_DGC_SERVICE": "peers"}
        pods = [
            {"JOB_COMPLETION_INDEX": i, "HOSTNAME": f"train-{i}"} for i in ("0", "1")
        ]
        self.run_each(lab.start, *[told | each for each in pods])

    @pytest.mark.slow
    def test_two_processes_of_mpirun(self) -> None:
        ompi = "OMPI_COMM_WORLD"
        for size, rank, count in (
            (f"{ompi}_SIZE", f"{ompi}_RANK", f"{ompi}_LOCAL_SIZE"),
            ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
        ):
            told = [{size: "2", rank: r, count: "2"} for r in ("0", "1")]
            self.run_each(self.start_here, *told)

    def start_here(
        self, _: int, command: list[str], environment: dict[str, str]
    ) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.kill)
        return process

    def test_a_real_srun(self) -> None:
        slurm.check()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        cluster = self.enterContext(slurm.Slurm(folder))
        done = subprocess.run(
            ["srun", "-n", "2", "--overcommit", sys.executable, SCRIPT],
            env=launch.worker_environment() | cluster.environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        self.assert_trained_together(outcomes(done.stdout))

    @pytest.mark.slow
    def test_a_real_mpirun_with_a_horovod_that_has_mpi(self) -> None:
        if not shutil.which("mpirun"):
            self.skipTest("mpirun is not installed (package openmpi-bin)")
        has_mpi = "import horovod.tensorflow as h; raise SystemExit(not h.mpi_built())"
        if subprocess.run([sys.executable, "-c", has_mpi]).returncode:
            self.skipTest("HOROVOD_CPU_OPERATIONS=MPI scripts/install_horovod.sh")
        mpirun = "mpirun -np 2 --oversubscribe --allow-run-as-root".split()
        mpirun += "--mca btl_tcp_if_include lo".split()
        done = subprocess.run(
            [*mpirun, sys.executable, SCRIPT],
            env=launch.worker_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        self.assert_trained_together(outcomes(done.stdout), "horovod")


if __name__ == "__main__":
    unittest.main()
