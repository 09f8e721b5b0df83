"""Scripts of tests, and examples, start in forks of a process with TensorFlow in it.

To import it, and Keras, takes longer than most of these scripts. Python runs
`lean/sitecustomize.py` when it starts, and that `hand_over`: what would run the script
asks a process of `server` for a fork that does, passes on what it is told by signals,
and ends as the fork ends. Where this cannot be, the script runs as ever.
"""

import atexit
import contextlib
import fcntl
import gc
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from typing import Any

VARIABLE = "TF_DGC_TEST_FORKS"  # the socket of the server
_TESTS = pathlib.Path(__file__).resolve().parent
_EXAMPLES = _TESTS.parent / "examples"
_PASSED_ON = {
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1),
    signal.SIGCONT,  # a script may stop itself
}


def hand_over() -> None:
    """Let a fork run this process's script; return where that cannot be."""
    told, arguments = os.environ.get(VARIABLE, ""), sys.orig_argv[1:]
    network, _, path = told.partition(" ")
    if not arguments or not _begins(arguments[0]) or network != _network():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    with contextlib.suppress(OSError, ValueError):
        _wait(path, arguments)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


def _begins(script: str) -> bool:
    """Tell whether it is one that forks run."""
    folders = pathlib.Path(script).resolve().parents
    return script.endswith(".py") and (_TESTS in folders or _EXAMPLES in folders)


def _network() -> str:
    """Return the network namespace, which forks have in common with their server."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _wait(path: str, arguments: list[str]) -> None:
    """Ask for a fork, and end as it ends.

    Raises:
        OSError: there is no server.
        ValueError: it does not answer.
    """
    told = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "path": sys.path,
        "folder": os.getcwd(),
    }
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    end, _ = os.pipe()  # closed when this process ends, however it does
    socket.send_fds(server, [b"+"], [0, 1, 2, end])
    os.close(end)
    server.sendall(json.dumps(told).encode() + b"\n")
    with server.makefile() as lines:
        pid = int(lines.readline())

        def pass_on(number: int, frame: Any) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code = int(lines.readline() or -signal.SIGKILL)
    if code < 0:
        with contextlib.suppress(OSError):  # nobody can set that of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def server(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Start a server; return the environment of those who are to use it.

    It ends when this process does.

    Args:
        environment: of the server.
    """
    if not _network() or not hasattr(fcntl, "F_SETSIG"):
        return {}  # all scripts run as ever
    folder = tempfile.TemporaryDirectory(prefix="tf_dgc-forks-")
    path = os.path.join(folder.name, "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            env={**environment} | {"OPENBLAS_NUM_THREADS": "1"},  # no thread yet
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )

    def end() -> None:
        process.kill()
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    return {VARIABLE: f"{_network()} {path}"}


class _Fork(types.SimpleNamespace):
    """What a fork is to run."""

    arguments: list[str]
    environment: dict[str, str]
    path: list[str]
    folder: str


def _serve(listener: socket.socket) -> _Fork:
    """Fork for all who ask, until stdin ends; return in the forks."""
    import keras  # noqa: F401

    import tf_dgc

    with contextlib.suppress(ImportError):
        import horovod.tensorflow  # noqa: F401
    for name in tf_dgc.__all__:
        getattr(tf_dgc, name)
    gc.freeze()
    ended, wake = os.pipe()
    for end in (ended, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, ended, 0], [], [])[0]
        if 0 in ready:
            os._exit(0)  # those who wait for the forks end, too, and with them these
        if ended in ready:
            os.read(ended, 4096)
            for pid in list(running):
                if (found := os.waitpid(pid, os.WNOHANG))[0]:
                    code = os.waitstatus_to_exitcode(found[1])
                    with running.pop(pid) as asker, contextlib.suppress(OSError):
                        asker.sendall(b"%d\n" % code)
        if listener in ready:
            asker = listener.accept()[0]
            if not (pid := os.fork()):
                for other in (listener, *running.values()):
                    other.close()
                os.close(ended)
                signal.set_wakeup_fd(-1)
                os.close(wake)
                return _begun(asker)
            running[pid] = asker
            with contextlib.suppress(OSError):
                asker.sendall(b"%d\n" % pid)


def _begun(asker: socket.socket) -> _Fork:
    """Become, in a fork, what the process that asks for it is."""
    import numpy as np

    files = socket.recv_fds(asker, 1, 4)[1]
    with asker.makefile() as lines:
        told = _Fork(**json.loads(lines.readline()))
    asker.close()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    # When the process that asks ends, the kernel ends this one.
    fcntl.fcntl(files[3], fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(files[3], fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(files[3], fcntl.F_GETFL)
    fcntl.fcntl(files[3], fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([files[3]], [], [], 0)[0]:
        os._exit(1)  # it has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(told.folder)
    os.environ.clear()
    os.environ.update(told.environment)
    sys.argv = told.arguments
    own = pathlib.Path(sys.argv[0]).parent.resolve()
    paths = [str(own), *told.path]
    if own == _EXAMPLES:  # which need nothing of tests
        paths = [each for each in paths if not each.startswith(str(_TESTS))]
    sys.path[:] = paths
    for stream in (sys.stdout, sys.stderr):
        assert hasattr(stream, "reconfigure")
        stream.reconfigure(line_buffering=True)
    np.random.seed()
    return told


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _serve(_listener)
    _main = sys.modules["__main__"] = types.ModuleType("__main__")
    _main.__file__ = sys.argv[0]
    _code = compile(pathlib.Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec")
    exec(_code, vars(_main))
