#!/usr/bin/env python3
"""Start several workers of one command on this machine.

    python scripts/run_local.py -n 2 -- python train.py --epochs 3

Every worker gets a `TF_CONFIG` that names all of them on free ports, so that
`tf_dgc` (and any other user of `TF_CONFIG`) finds its peers. On a terminal the
output of worker 0 is seen, elsewhere each line behind its rank. When one worker
fails, the others are ended, and the exit status is that of the first to fail
(128 + N for signal N, 124 for a timeout). Ctrl-C and SIGTERM are passed on. No
process is left behind.

    python scripts/run_local.py -n 4 --ps 2 -- python train.py

starts parameter servers, too, which run the same command; then a worker that fails ends
no other.

It is what `tf-dgc-run` does on one machine, for any command and from a checkout.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tf_dgc.launcher import screen
from tf_dgc.launcher.job import Job
from tf_dgc.launcher.terminals import of_this_process
from tf_dgc.launcher.workers import QUIET, Tasks, start_here


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the arguments and runs the workers."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s -n N [options] -- COMMAND [ARGUMENT ...]",
        description="Start N workers of one training script on this machine.",
    )
    parser.add_argument("-n", type=int, required=True, help="number of workers")
    parser.add_argument(
        "--ps", type=int, default=0, metavar="M", help="number of parameter servers"
    )
    parser.add_argument("--timeout", type=float, help="end all after so many seconds")
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[options.command[:1] == ["--"] :]
    if options.n < 1:
        parser.error(f"`-n` must be at least 1. Received: -n {options.n}")
    if options.ps < 0:
        parser.error(f"`--ps` must be 0 or more. Received: --ps {options.ps}")
    if not command:
        parser.error("no command to run; write it behind `--`")
    view = screen.of_option(None, QUIET not in os.environ, of_this_process())
    tasks = Tasks(options.n, options.ps)
    job = Job("run_local", options.timeout, options.grace, tasks, view)
    return job.run(lambda _: start_here(command, tasks, view=view))


if __name__ == "__main__":
    sys.exit(main())
