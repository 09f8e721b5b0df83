"""Processes that workers leave behind: known by a mark in their environment, and ended.

    python -I -S leftovers.py FAMILY

Children of a worker may outlive it, in sessions of their own; all inherit its
environment. Where the launcher itself is killed, a process that was started beside the
workers sees its stdin end, and ends them. Linux only: /proc tells environments.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time

_MARK = "TF_DGC_FAMILY"
_SECONDS = 5.0  # until what does not end by SIGKILL is left alone
_POLL_SECONDS = 0.02


class Family:
    """The workers of one run, and all that they start."""

    def __init__(self) -> None:
        """Start the process that ends them where this one is killed."""
        outer = os.environ.get(_MARK, "")
        self._name = secrets.token_hex(8)
        self._marks = f"{outer}/{self._name}" if outer else self._name
        self._heir: subprocess.Popen[bytes] | None = None
        if os.path.exists("/proc/self/environ") and sys.executable:
            with contextlib.suppress(OSError):  # else workers die by their parent's
                self._heir = subprocess.Popen(
                    [sys.executable, "-I", "-S", os.path.abspath(__file__), self._name],
                    cwd="/",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )

    def mark(self, task: int) -> dict[str, str]:
        """Return what stands in the environment of a worker."""
        return {_MARK: f"{self._marks}.{task}"}

    def end(self, task: int | None = None) -> None:
        """End what the workers have started, or one of them, and wait for it."""
        end(self._name if task is None else f"{self._name}.{task}")

    def close(self) -> None:
        """End what was to end the family."""
        if self._heir is not None:
            self._heir.kill()
            self._heir.communicate()


def end(name: str) -> None:
    """Send SIGKILL to all processes of a family, or of one of its workers."""
    deadline = time.monotonic() + _SECONDS
    while _signal_all(name) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _signal_all(name: str) -> int:
    """Return how many there were."""
    if not os.path.exists("/proc/self/environ"):
        return 0
    return sum(
        _signal(int(text), name) for text in os.listdir("/proc") if text.isdecimal()
    )


def _signal(pid: int, name: str) -> bool:
    """Tell whether a process belongs to the family; send it SIGKILL if so."""
    try:
        process = os.pidfd_open(pid)  # stays that process, whoever has its number later
    except OSError:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = _belongs(file.read(), name)
        if found:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return found
    except OSError:
        return False  # of another user, or it has ended
    finally:
        os.close(process)


def _belongs(environment: bytes, name: str) -> bool:
    """Tell whether what /proc tells of an environment has a mark of the family."""
    begin = f"{_MARK}=".encode()
    for line in environment.split(b"\0"):
        if line.startswith(begin):
            marks = line[len(begin) :].decode(errors="replace").split("/")
            return any(f"{mark}.".startswith(f"{name}.") for mark in marks)
    return False


def main() -> None:
    """Wait until stdin ends, then end a family."""
    while os.read(0, 4096):
        pass
    # A worker that was just being started may not have its environment yet.
    for _ in range(3):
        end(sys.argv[1])
        time.sleep(0.1)


if __name__ == "__main__":
    main()
