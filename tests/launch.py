"""Start worker processes for a test: real launchers, hard time limits."""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest
from collections.abc import Mapping, Sequence
from typing import Any

import forks

ROOT = pathlib.Path(__file__).parents[1]
# Of what workers import.
FOLDERS = [ROOT / "tests" / each for each in ("", "jobs", "laws")]
# Keras imports scikit-learn and matplotlib where they are: a third of a worker's start.
LEAN = ROOT / "tests" / "lean"
_LINE = re.compile(r"\[(\d+)\](?:<stdout>:| )(.*)")


@functools.cache
def horovod_missing() -> str:
    """Say why Horovod cannot be used here, or nothing."""
    if not shutil.which("horovodrun", path=_path()):
        return "horovodrun is not installed"
    check = [sys.executable, "-c", "import horovod.tensorflow"]
    failed = subprocess.run(check, capture_output=True, text=True, check=False)
    return failed.stderr.strip().rpartition("\n")[2] if failed.returncode else ""


def skip_without_horovod() -> None:
    """Skip the test, or the class that is set up, where Horovod cannot be used."""
    if reason := horovod_missing():
        raise unittest.SkipTest(reason)


def finish(
    process: "subprocess.Popen[str]", timeout: float = 60
) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of a process; kill it when it is late."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


def _path() -> str:
    return f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def launched(
    *command: str,
    workers: int = 2,
    launcher: str = "collective",
    options: Sequence[str] = (),
    timeout: float | None = None,
    servers: int = 0,
) -> list[str]:
    """Return the command that starts a Python script on several workers.

    Args:
        command: script and arguments.
        workers: how many; 1 runs the script without any launcher.
        launcher: "collective" for run_local.py, else horovodrun.
        options: for horovodrun.
        timeout: seconds until run_local.py ends all.
        servers: parameter servers that run_local.py starts, too.
    """
    python = [sys.executable, *command]
    if workers == 1:
        return python
    if launcher == "collective":
        local = [sys.executable, str(ROOT / "scripts/run_local.py"), "-n", str(workers)]
        limit = ["--timeout", str(timeout)] if timeout else []
        return [*local, "--ps", str(servers), *limit, "--", *python]
    script = str(ROOT / "tests" / "horovodrun.py")
    return [sys.executable, script, "-np", str(workers), *options, *python]


def worker_environment() -> dict[str, str]:
    """Return the environment of workers, who do without what stands in lean/."""
    return os.environ | _own_environment() | _forks()


def _own_environment() -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [LEAN, ROOT, *FOLDERS])),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_DGC_TIMEOUT": "100",
        "PATH": _path(),
    }


@functools.cache
def _forks() -> Mapping[str, str]:
    return forks.server(os.environ | _own_environment())


def run(
    *command: str,
    workers: int = 2,
    launcher: str = "collective",
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    timeout: int = 400,
    servers: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script on several workers, each line behind its rank.

    Args:
        command: script and arguments.
        workers: how many; 1 runs the script without any launcher.
        launcher: "collective" for run_local.py, else horovodrun.
        options: for horovodrun.
        environment: added to that of this process.
        timeout: seconds until all are killed.
        servers: parameter servers, for run_local.py.
    """
    how: dict[str, Any] = {"workers": workers, "launcher": launcher, "options": options}
    how["servers"] = servers
    return subprocess.run(
        launched(*command, **how, timeout=timeout - 20),
        cwd=ROOT,
        env=worker_environment() | (environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def results(completed: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the JSON object on the last line of each worker, in the order of rank."""
    if completed.returncode:
        raise AssertionError(
            f"exit status {completed.returncode}\n{completed.stdout[-6000:]}"
            f"\n{completed.stderr[-6000:]}"
        )
    found = by_rank(completed.stdout)
    return [found[rank] for rank in sorted(found)]


def results_of(*command: str, **options: Any) -> list[dict[str, Any]] | Exception:
    """Return `results` of `run`, or what went wrong.

    For setUpClass, which pytest would call again before every test if it failed.
    """
    try:
        return results(run(*command, **options))
    except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
        return error


def checked(found: list[dict[str, Any]] | Exception) -> list[dict[str, Any]]:
    """Return what `results_of` found, or raise what went wrong."""
    if isinstance(found, Exception):
        raise found
    return found


def say(found: dict[str, Any]) -> None:
    """Print a worker's JSON object for `by_rank`.

    In short lines: horovodrun mixes those of several workers where they are longer
    than a pipe holds.
    """
    text = json.dumps(found)
    pieces = [text[i : i + 4000] for i in range(0, len(text), 4000)]
    print("\n+".join(pieces), flush=True)


def by_rank(output: str) -> dict[int, dict[str, Any]]:
    """Return the last JSON object that each worker printed."""
    last: dict[int, str] = {}
    for line in output.splitlines():
        found = _LINE.match(line)
        rank, text = (int(found[1]), found[2]) if found else (0, line)
        if text.startswith("{"):
            last[rank] = text
        elif text.startswith("+") and rank in last:
            last[rank] += text[1:]
    return {rank: json.loads(text) for rank, text in last.items()}
