"""A real sshd for a test, with keys of its own; nothing of the machine's is touched."""

import functools
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import time
import unittest

from tf_dgc.launcher.workers import free_ports

_CONFIG = """
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""


@functools.cache
def program() -> str:
    """Return the path of sshd, or skip the test where it is not installed."""
    path = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if not path or not shutil.which("ssh"):
        raise unittest.SkipTest("sshd is not installed (package openssh-server)")
    return path


class Sshd:
    """What is needed to run sshd, and to reach it."""

    def __init__(self, folder: str) -> None:
        """Make keys and settings in a folder."""
        self.folder = pathlib.Path(folder)
        (self.port,) = free_ports(1)
        for name in ("host", "key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
            subprocess.run([*make, self.folder / name], check=True)
        config = _CONFIG.format(port=self.port, folder=folder)
        (self.folder / "config").write_text(config)
        if not os.geteuid():
            pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # sshd of root wants it

    @property
    def server(self) -> list[str]:
        """The command that runs it."""
        return [program(), "-D", "-e", "-f", str(self.folder / "config")]

    @property
    def client(self) -> str:
        """The command line that reaches it, less the host."""
        options = {
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": str(self.folder / "known"),
            "IdentitiesOnly": "yes",
            "LogLevel": "ERROR",
        }
        own = [part for k, v in options.items() for part in ("-o", f"{k}={v}")]
        ssh = shutil.which("ssh") or "ssh"
        key = str(self.folder / "key")
        return shlex.join([ssh, "-F", "none", "-p", str(self.port), "-i", key, *own])

    def start(self) -> "subprocess.Popen[bytes]":
        """Run it on this machine, until it answers."""
        process = subprocess.Popen(
            self.server, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return process
            except OSError:
                time.sleep(0.05)
        process.kill()
        raise TimeoutError("sshd does not answer")
