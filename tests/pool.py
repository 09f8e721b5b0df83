"""Jobs of several workers that live as long as the tests, and run one after another.

    pool.run("collective", 2, "features", "found", strategy="dense", name="sgd")

calls `features.found(strategy="dense", name="sgd")` on two workers that run_local.py
has started, and returns the value of each. To start TensorFlow and Keras anew for every
case would take longer than most cases do.

A job begins when it is first needed, and ends with this process, however that ends.
Before each call Keras is as it was in the beginning (see `worker.py`), and the workers
meet in a collective: where they cannot, another job takes the place of theirs.
"""

import atexit
import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from typing import Any

import launch

_START_SECONDS = 200.0
_PREPARE_SECONDS = 60.0
# From the error of one worker until those are given up that wait for it.
_OTHERS_SECONDS = 20.0
_END_SECONDS = 10.0
_MOST_WORKERS = 6  # at a time: those of Horovod keep looking for work
_TAIL = 4000  # characters of what a worker printed


class WorkerError(Exception):
    """What went wrong on a worker, the first of them to tell.

    Attributes:
        rank: of the worker.
        type: name of the exception's type; "Ended" of a worker that is no more,
            "TimeoutError" of one that was too late.
        message: the exception's text.
        traceback: of that worker, as text; "" where it could not tell.
        errors: of all workers, by rank: type, message and traceback.
    """

    def __init__(self, case: str, errors: dict[int, dict[str, str]], rest: str) -> None:
        self.rank, first = next(iter(errors.items()))
        self.type, self.message = first["type"], first["message"]
        self.traceback, self.errors = first["traceback"], errors
        told = [f"{rank}: {each['type']}" for rank, each in errors.items()]
        text = self.traceback or self.message
        super().__init__(f"{case}\n{text}\nby rank: {', '.join(told)}\n{rest}")


def run(
    launcher: str,
    workers: int,
    module: str,
    function: str,
    *,
    timeout: float = 120,
    **arguments: Any,
) -> list[Any]:
    """Call a function on all workers of a job, each of which takes part.

    Args:
        launcher: "collective", "horovod" or "hybrid"; "local" for one worker. It is
            also the name of the transport, which is there when the function runs.
        workers: how many.
        module: one that can be imported in tests/.
        function: its name. It returns what JSON can hold, or arrays.
        timeout: seconds from the call until the job is given up.
        arguments: of the function; what JSON can hold.

    Returns:
        The values, in the order of rank.

    Raises:
        WorkerError: it raised an exception on some worker, or did not end.
        unittest.SkipTest: Horovod is needed and is not there.
    """
    if launcher in ("horovod", "hybrid"):
        launch.skip_without_horovod()
    settings = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    case = f"{module}.{function}({settings}) on {workers} workers, {launcher}"
    command = {"module": module, "function": function, "arguments": arguments}
    return _job(launcher, workers).run(case, command, timeout)


def close() -> None:
    """End all jobs."""
    while _jobs:
        _jobs.popitem()[1].end()


_jobs: "dict[tuple[str, int], _Job]" = {}  # that used last comes last
_choosing = threading.Lock()  # several threads may each use a job of their own
atexit.register(close)


def _job(launcher: str, workers: int) -> "_Job":
    """Return a job that can be used: the one there is, or another."""
    with _choosing:
        return _chosen(launcher, workers)


def _chosen(launcher: str, workers: int) -> "_Job":
    key = launcher, workers
    if (job := _jobs.pop(key, None)) and not job.obstacle():
        _jobs[key] = job
        return job
    if job:
        job.end()
    while _jobs and sum(count for _, count in _jobs) + workers > _MOST_WORKERS:
        _jobs.pop(next(iter(_jobs))).end()
    job = _jobs[key] = _Job(launcher, workers)
    if obstacle := job.obstacle():
        raise RuntimeError(
            f"{workers} new workers, {launcher}, are of no use: {obstacle}"
        )
    return job


class _Job:
    """The workers of one job, and a connection to each."""

    def __init__(self, launcher: str, workers: int) -> None:
        self._workers = workers
        self._folder = tempfile.TemporaryDirectory(prefix="tf_dgc-pool-")
        self._is_new, self._broken = True, False
        self._connections: dict[int, socket.socket] = {}
        self._pids: list[int] = []
        script = str(launch.ROOT / "tests" / "worker.py")
        command = [script, self._folder.name, launcher]
        with (
            socket.socket(socket.AF_UNIX) as listener,
            self._path("launcher").open("wb") as log,
        ):
            listener.bind(str(self._path("socket")))
            listener.listen(workers)
            self._process = subprocess.Popen(
                launch.launched(*command, workers=workers, launcher=launcher),
                cwd=launch.ROOT,
                env=launch.worker_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                self._accept(listener)
            except BaseException:
                self.end()
                raise

    def _path(self, name: str) -> pathlib.Path:
        return pathlib.Path(self._folder.name, name)

    def _accept(self, listener: socket.socket) -> None:
        """Wait for all workers."""
        deadline = time.monotonic() + _START_SECONDS
        listener.settimeout(0.5)
        while len(self._connections) < self._workers:
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._path("launcher").read_text(errors="replace")
                raise RuntimeError(f"{self._workers} workers did not start:\n{log}")
            with contextlib.suppress(TimeoutError):
                connection = listener.accept()[0]
                connection.settimeout(None)
                with connection.makefile("rb") as lines:
                    told = json.loads(lines.readline())
                self._connections[told["rank"]] = connection
                self._pids.append(told["pid"])

    def obstacle(self) -> str:
        """Prepare the workers for a call; say why this cannot be done, or ""."""
        if self._broken:
            return "they have ended"
        command = {"module": "", "function": "", "arguments": {}}
        seconds = _START_SECONDS if self._is_new else _PREPARE_SECONDS
        self._is_new = False
        for rank, answer in self._ask(command, seconds).items():
            if error := answer.get("error"):
                return f"rank {rank}: {error['traceback'] or error['message']}"
            if answer["value"] != self._workers:
                return f"rank {rank} counts {answer['value']}"
        return ""

    def run(self, case: str, command: dict[str, Any], timeout: float) -> list[Any]:
        """Let all workers do something; see `pool.run`."""
        ranks = range(self._workers)
        before = [self._path(str(rank)).stat().st_size for rank in ranks]
        answers = self._ask(command, timeout)
        errors = {
            rank: each["error"] for rank, each in answers.items() if "error" in each
        }
        if errors:
            printed = "".join(map(self._printed, ranks, before))
            if self._broken:
                self.end()
            raise WorkerError(case, errors, printed)
        return [answers[rank]["value"] for rank in ranks]

    def _printed(self, rank: int, before: int) -> str:
        with self._path(str(rank)).open("rb") as output:
            output.seek(before)
            text = output.read().decode(errors="replace")
        return f"Rank {rank} printed:\n{text[-_TAIL:]}\n" if text else ""

    def _ask(self, command: dict[str, Any], timeout: float) -> dict[int, Any]:
        """Return what each worker answers, the first first."""
        try:
            answers = self._exchange(command, timeout)
        except BaseException:  # such as Ctrl-C: nobody knows what they do now
            self.end()
            raise
        late = [rank for rank in self._connections if rank not in answers]
        if late:
            self._kill(signal.SIGUSR1)  # they print where they are
            time.sleep(1.0)
            text = f"no answer within {timeout:g} s, or since another failed"
            error = {"type": "TimeoutError", "message": text, "traceback": ""}
            answers |= {rank: {"error": error} for rank in late}
        ended = any(each.get("error") == _ENDED for each in answers.values())
        self._broken = bool(late) or ended
        return answers

    def _exchange(self, command: dict[str, Any], timeout: float) -> dict[int, Any]:
        text = json.dumps(command).encode() + b"\n"
        for connection in self._connections.values():
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(text)
        deadline = time.monotonic() + timeout
        received = dict.fromkeys(self._connections, b"")
        answers: dict[int, Any] = {}
        while missing := {
            connection: rank
            for rank, connection in self._connections.items()
            if rank not in answers
        }:
            seconds = deadline - time.monotonic()
            ready, _, _ = select.select(list(missing), [], [], max(seconds, 0.0))
            if not ready:
                break
            for connection in ready:
                rank, chunk = missing[connection], _received(connection)
                received[rank] += chunk
                if not chunk:
                    answers[rank] = {"error": _ENDED}
                elif chunk.endswith(b"\n"):
                    answers[rank] = json.loads(received[rank])
                if "error" in answers.get(rank, {}):
                    deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
        return answers

    def end(self) -> None:
        """End all processes of the job."""
        for connection in self._connections.values():
            connection.close()  # the workers take it for their end
        self._connections = {}
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._broken = True
        if self._process.returncode is None:
            self._kill(signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def _kill(self, signum: int) -> None:
        """Send a signal to the workers."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


_ENDED = {"type": "Ended", "message": "the worker has ended", "traceback": ""}


def _received(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        return connection.recv(1 << 16)
    return b""
