"""`tf-dgc-run --verify`: a script on one worker, then on N, and what differs."""

import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping

from tf_dgc.launcher import workers
from tf_dgc.launcher.apart import Group
from tf_dgc.launcher.job import Job
from tf_dgc.verify import records, verdict

DIFFERENT = 1
_NO_FIT = 3  # status of verify/script.py


def verify(
    job: Job,
    name: str,
    script: workers.Command,
    count: int,
    steps: int,
    environment: Mapping[str, str],
) -> int:
    """Run a script on one worker, then on several; print the verdict.

    Args:
        job: runs the workers.
        name: of the program, for what it says.
        script: `[-m] SCRIPT [ARGUMENT ...]`; no Python before it.
        count: how many workers.
        steps: how many steps to compare.
        environment: what all workers have beside that of this process.

    Returns:
        The exit status: 0 where all is equal, 1 where anything differs, that of the
        script where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="tf-dgc-verify-") as folder:
        for size in (1, count):
            sys.stderr.write(f"{name}: the script on {size} worker(s)\n")
            path = str(pathlib.Path(folder, str(size)))
            start = _start(job, script, path, size, steps, environment)
            status = job.run(start)
            if status == _NO_FIT:
                sys.stderr.write(f"{name}: the script has called no `fit` of a model\n")
            if status:
                return status
        alone = records.load(pathlib.Path(folder, "1-0"))
        together = [
            records.load(pathlib.Path(folder, f"{count}-{rank}"))
            for rank in range(count)
        ]
    found = verdict.compare(alone, together)
    sys.stdout.write(verdict.text(alone, together, found) + "\n")
    return 0 if found is None else DIFFERENT


def _start(
    job: Job,
    script: workers.Command,
    path: str,
    size: int,
    steps: int,
    environment: Mapping[str, str],
) -> Callable[[int], Group]:
    told = json.dumps({"path": path, "steps": steps, "workers": size > 1})
    command = [*workers.of_module("tf_dgc.verify.script"), told, *script.words]

    def start(attempt: int) -> Group:
        script.require()
        return workers.start_here(command, workers.Tasks(size), environment, job.view)

    return start
