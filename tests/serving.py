"""Jobs of workers and parameter servers, for a test: each task a process of its own."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any, Self

import launch

from tf_dgc.launcher.workers import free_ports

SCRIPT = pathlib.Path(__file__).parent / "jobs" / "downpour.py"


class Task:
    """A process, and what it prints."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", prefix="tf_dgc-task-")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=launch.worker_environment() | environment,
            cwd=launch.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return pathlib.Path(self.log.name).read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Wait until it has printed something.

        Raises:
            AssertionError: it has not, in time or before its end.
        """
        deadline = time.monotonic() + timeout
        while text not in self.text:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"no {text!r} in:\n{self.text[-6000:]}")
            time.sleep(0.05)

    def end(self, timeout: float = 300) -> int:
        """Wait for its end; return its exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end of:\n{self.text[-6000:]}") from None

    def result(self, timeout: float = 300) -> dict[str, Any]:
        """Return the JSON object that it printed last."""
        if status := self.end(timeout):
            raise AssertionError(f"exit status {status}:\n{self.text[-6000:]}")
        return launch.by_rank(self.text)[0]

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill it, if it is still there."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.log.close()


class Job:
    """Servers, which are started at once, and workers, when they are asked for."""

    def __init__(
        self,
        workers: int,
        servers: int,
        script: pathlib.Path = SCRIPT,
        **environment: str,
    ) -> None:
        self._script = script
        ports = free_ports(workers + servers)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self._cluster = {"ps": addresses[:servers], "worker": addresses[servers:]}
        self.environment = environment
        self._used: set[int] = set()
        self.tasks: list[Task] = []
        self.servers = [self._start("ps", j, "serve") for j in range(servers)]

    def _start(self, kind: str, index: int, case: str, **arguments: Any) -> Task:
        cluster = {name: list(each) for name, each in self._cluster.items()}
        if kind == "worker" and index in self._used:  # on another machine, maybe
            cluster[kind][index] = f"127.0.0.1:{free_ports(1)[0]}"
        self._used |= {index} if kind == "worker" else set()
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        own = self.environment | {"TF_CONFIG": json.dumps(config)}
        command = [str(self._script), case, json.dumps(arguments)]
        self.tasks.append(Task(command, own | {"CUDA_VISIBLE_DEVICES": ""}))
        return self.tasks[-1]

    def worker(self, index: int, case: str, **arguments: Any) -> Task:
        """Start a worker, which calls a function of `jobs/downpour.py`."""
        return self._start("worker", index, case, **arguments)

    def result_of(self, task: Task) -> dict[str, Any]:
        """Return a worker's result; say of the servers, too, what went wrong."""
        try:
            return task.result()
        except AssertionError as error:
            told = "\n".join(
                f"server {j}, {each.process.poll()}: {each.text[-1500:]}"
                for j, each in enumerate(self.servers)
            )
            raise AssertionError(f"{error}\n{told}") from None

    def run(self, case: str, **arguments: Any) -> list[dict[str, Any]]:
        """Call a function on all workers; return what each gives."""
        workers = range(len(self._cluster["worker"]))
        tasks = [self.worker(index, case, **arguments) for index in workers]
        return [self.result_of(task) for task in tasks]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self.tasks:
            task.close()


def main(cases: dict[str, Any]) -> None:
    """Call the function that the command line names; print what it returns."""
    case, arguments = sys.argv[1], json.loads(sys.argv[2])
    found = cases[case](**arguments)
    print(f"done {os.getpid()}", file=sys.stderr)
    launch.say(found)
