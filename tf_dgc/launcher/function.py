"""Run a function on several workers, from a notebook or a script."""

import contextlib
import functools
import importlib
import linecache
import os
import pathlib
import pickle
import re
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tf_dgc.launcher import call, hosts, output, screen, settings, workers
from tf_dgc.launcher.apart import Group
from tf_dgc.launcher.job import PASSED_ON, Job

_GRACE_SECONDS = 5.0
_LEVEL = workers.QUIET
# A frame of code that cloudpickle has carried, which knows no file.
_CARRIED = re.compile(r'  File "<dynamic-code>", line (\d+), in (\w+)')


class _Cell(output.Stream):
    """The stream of `print` in this process: a notebook's cell, or the terminal."""

    def __init__(self) -> None:
        super().__init__(1, "stdout")

    def write(self, data: bytes) -> None:
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()

    def takes(self, seconds: float) -> bool:
        return True


class _FunctionView(screen.Chief):
    """Shows the chief's output in the cell; an error is raised, not shown."""

    def __init__(self) -> None:
        quiet = _LEVEL not in os.environ
        super().__init__(None, quiet=quiet, out=_Cell())

    def ended(self, worker: str) -> None:
        """Say nothing."""


class _RemoteTraceback(Exception):
    """Traceback of a worker, as text."""

    def __str__(self) -> str:
        return str(self.args[0])


def launch(
    function: Callable[..., Any],
    n: int | None = None,
    args: Sequence[Any] = (),
    strategy: str | None = "dgc",
    hosts: str | None = None,
    *,
    config: Any = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call a function on N workers, each a process of its own.

    The output of worker 0 is shown as it comes, and of the others what they warn of.
    An interrupt ends all.

    Args:
        function: builds and trains a model, say. It is carried by cloudpickle, with
            what it refers to; what this process has done before is not on the workers.
        n: number of workers; with `hosts` it may be left out.
        args: of the function, the same for all workers.
        strategy: "auto", "dense", "dgc" or "averaging", which is set before; None
            where the function makes its own.
        hosts: "a:2,b:2", to be reached by ssh, with the same Python; they must share
            this process's current folder.
        config: of the strategy: `DGCConfig(...)`, or a dictionary of its settings.
        environment: variables for all workers.

    Returns:
        What the function has returned on each worker, by rank.

    Another signal that ends this process, as SIGTERM, ends the workers before.

    Raises:
        ValueError, TypeError: an argument is wrong.
        ImportError: cloudpickle is not installed.
        RuntimeError: a worker ended without an error of Python's, as by `sys.exit(1)`,
            or cannot be started.
        KeyboardInterrupt: this process was interrupted.
        Exception: what the function has raised on a worker; on several, the first. Its
            cause has the rank, and the worker's traceback.
    """
    places = _places(n, hosts)
    count = sum(place.slots for place in places)
    text = _settings(strategy, config)
    if isinstance(args, str) or not isinstance(args, Iterable):
        raise TypeError(f"`args` must be a sequence, as (3,). Received: args={args!r}")
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError as error:
        error.add_note("tf_dgc.launch needs cloudpickle: pip install tf_dgc[launch]")
        raise
    shared = os.getcwd() if hosts else None
    with tempfile.TemporaryDirectory(prefix="tf-dgc-launch-", dir=shared) as name:
        folder = pathlib.Path(name)
        todo = _carried(cloudpickle, call.FunctionCall(function, tuple(args), text))
        (folder / call.CALL).write_bytes(pickle.dumps((list(sys.path), todo)))
        with _signals_kept():
            job = Job("tf_dgc.launch", None, _GRACE_SECONDS, view=_FunctionView())
            own = _environment(environment or {})
            status = job.run(_starter(job, places, folder, own))
            received = list(job.received)
        outcomes = _outcomes(folder, count)
    if signal.SIGINT in received:
        raise KeyboardInterrupt("tf_dgc.launch was interrupted")
    for number in received:  # for whoever had it before
        signal.raise_signal(number)
    if status or len(outcomes) < count:
        raise _failure(outcomes, status, function)
    return [outcomes[rank].value for rank in range(count)]


def _carried(cloudpickle: Any, what: call.FunctionCall) -> bytes:
    try:
        return bytes(cloudpickle.dumps(tuple(what)))
    except Exception as error:  # whatever a value's own code raises
        raise TypeError(
            "What tf_dgc.launch gives to workers, the function with what it refers to "
            "and its arguments, must be such that cloudpickle can carry it: make what "
            f"it cannot inside the function. Received: {error}"
        ) from error


def _places(n: int | None, text: str | None) -> list[hosts.Host]:
    if text is None:
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"`n` must be a number of workers. Received: n={n!r}")
        return [hosts.Host("localhost", "localhost", n)]
    places = hosts.read_hosts(text)
    count = sum(place.slots for place in places)
    if n not in (None, count):
        raise ValueError(
            "`n` must be left out with `hosts`, or be as many as these have. "
            f"Received: n={n}, hosts={text!r}"
        )
    return places


def _settings(strategy: str | None, config: Any) -> str:
    if strategy == "downpour":
        raise ValueError(
            "tf_dgc.launch starts no parameter servers: use tf-dgc-run --ps. "
            f"Received: strategy={strategy!r}"
        )
    known = [name for name in settings.STRATEGIES if name != "downpour"]
    if strategy not in (None, *known):
        rule = f"`strategy` must be None or one of {known}"
        raise ValueError(f"{rule}. Received: strategy={strategy!r}")
    if strategy is None:
        if config is not None:
            raise ValueError("`config` needs a `strategy`. Received: strategy=None")
        return ""
    get = getattr(config, "get_config", None)
    if get is None and not isinstance(config, Mapping | None):
        rule = "`config` must be settings of the strategy, or a dictionary of them"
        raise TypeError(f"{rule}. Received: config={config!r}")
    return settings.Settings(strategy, get() if get else dict(config or {})).text()


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return what workers get: they must find this package, and launch anew."""
    package = str(pathlib.Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    found = {"PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package}
    return found | {"TF_DGC_LAUNCH": os.urandom(8).hex()} | dict(given)


def _starter(
    job: Job,
    places: Sequence[hosts.Host],
    folder: pathlib.Path,
    environment: Mapping[str, str],
) -> Callable[[int], Group]:
    words = [*workers.of_module(call.__name__), str(folder)]
    tasks = workers.Tasks(sum(place.slots for place in places))

    def start(attempt: int) -> Group:
        if places[0].address == "localhost":
            return workers.start_here(words, tasks, environment, job.view)
        own = hosts.passed_on(os.environ) | dict(environment)
        ssh, command = hosts.Ssh(), workers.Command(words)
        how = own, ssh, lambda: job.received, tasks, job.view
        return hosts.Hosts(command, places, *how)

    return start


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Give signals back to who had them."""
    kept = {number: signal.getsignal(number) for number in (*PASSED_ON, signal.SIGCHLD)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)


def _outcomes(folder: pathlib.Path, count: int) -> dict[int, call.Outcome]:
    found = {}
    for rank in range(count):
        path = call.file_of(folder, rank)
        if path.exists():
            found[rank] = call.Outcome(*pickle.loads(path.read_bytes()))
    return found


def _failure(
    outcomes: Mapping[int, call.Outcome], status: int, function: Callable[..., Any]
) -> BaseException:
    """Return what the first worker to fail has raised."""
    failed = {rank: each for rank, each in outcomes.items() if each.trace}
    if not failed:
        return RuntimeError(f"A worker ended with status {status}, without an error")
    rank = min(failed, key=lambda rank: (failed[rank].too, failed[rank].when))
    outcome = failed[rank]
    error = outcome.error
    if isinstance(error, SystemExit):  # which is to end no more than its process
        error = RuntimeError(f"A worker ended by sys.exit({error.code!r})")
    elif error is None:
        error = RuntimeError(outcome.trace.strip().rpartition("\n")[2])
    trace = _CARRIED.sub(functools.partial(_in_source, function), outcome.trace)
    error.__cause__ = _RemoteTraceback(f'\n"""\nOn worker {rank}:\n{trace}"""')
    return error


def _in_source(function: Callable[..., Any], found: re.Match[str]) -> str:
    """Return a frame of a traceback with its file and line, as far as known here."""
    files = {
        code.co_filename
        for value in (function, *getattr(function, "__globals__", {}).values())
        for code in _codes(value)
        if code.co_name == found[2]
    }
    if len(files) != 1:
        return found[0]
    (path,) = files
    line = linecache.getline(path, int(found[1])).strip()
    return f'  File "{path}", line {found[1]}, in {found[2]}\n    {line}'


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function, or of a class's methods, and all within."""
    if isinstance(value, type) and value.__module__ == "__main__":
        for part in vars(value).values():
            yield from _codes(part)
    code = value if isinstance(value, types.CodeType) else None
    if isinstance(value, types.FunctionType):
        code = value.__code__
    if code is not None:
        yield code
        for part in code.co_consts:
            yield from _codes(part)
