"""A real Slurm of one node for a test, with ports, keys and files of its own."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time
import unittest

from tf_dgc.launcher.workers import free_ports

_PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd"}
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def check() -> None:
    """Skip the test where Slurm is not installed, or this is not root."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    for program, package in (_PROGRAMS | {"srun": "slurm-client"}).items():
        if not shutil.which(program, path=path):
            raise unittest.SkipTest(f"{program} is not installed (package {package})")
    if os.geteuid():
        raise unittest.SkipTest("Slurm's daemons need root")


class Slurm(contextlib.ExitStack):
    """The daemons; use it as a context manager."""

    def __init__(self, folder: str) -> None:
        """Write the settings into an empty folder."""
        super().__init__()
        self.folder = pathlib.Path(folder)
        self.host = socket.gethostname().partition(".")[0]
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "key").write_bytes(os.urandom(64))
        (self.folder / "key").chmod(0o600)
        config = _CONFIG.format(host=self.host, ports=free_ports(2), folder=folder)
        (self.folder / "slurm.conf").write_text(config)
        self.environment = {"SLURM_CONF": f"{folder}/slurm.conf"}

    def __enter__(self) -> "Slurm":
        """Start the daemons, and wait for the node."""
        files = {
            "key-file": "key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        own = [f"--{key}={self.folder / name}" for key, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *own)
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D")
        self._wait(self._idle, "the node")
        return self

    def _daemon(self, *command: str) -> None:
        path = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        with (self.folder / f"{command[0]}.out").open("wb") as output:
            process = subprocess.Popen(
                [path, *command[1:]],
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.callback(process.wait)
        self.callback(process.terminate)

    def _idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "-o", "%t"],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip() == "idle"

    def _wait(self, ready: object, what: str) -> None:
        deadline = time.monotonic() + 60
        while not ready():
            if time.monotonic() > deadline:
                told = [p.read_text() for p in self.folder.glob("*.out")]
                raise TimeoutError(f"{what} does not come: {told}")
            time.sleep(0.2)
