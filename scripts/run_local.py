#!/usr/bin/env python3
"""Start several workers of one command on this machine.

    python scripts/run_local.py -n 2 -- python train.py --epochs 3

Every worker gets a `TF_CONFIG` that names all of them on free ports, so that
`tf_dgc` (and any other user of `TF_CONFIG`) finds its peers. Each line of output
is prefixed with the rank. When one worker fails, the others are ended, and the
exit status is that of the first to fail (128 + N for signal N, 124 for a
timeout). Ctrl-C and SIGTERM are passed on. No process is left behind.

It is what `tf-dgc-run` does on one machine, for any command and from a checkout.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tf_dgc.launcher.job import Job
from tf_dgc.launcher.workers import Workers, free_ports, tf_config


def run(command: Sequence[str], count: int, timeout: float | None, grace: float) -> int:
    """Runs `count` workers of `command`; returns the exit status to end with."""

    def start(attempt: int) -> Workers:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        each = [{"TF_CONFIG": tf_config(addresses, rank)} for rank in range(count)]
        return Workers(command, each)

    return Job("run_local", timeout, grace).run(start)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the arguments and runs the workers."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s -n N [options] -- COMMAND [ARGUMENT ...]",
        description="Start N workers of one training script on this machine.",
    )
    parser.add_argument("-n", type=int, required=True, help="number of workers")
    parser.add_argument("--timeout", type=float, help="end all after so many seconds")
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[options.command[:1] == ["--"] :]
    if options.n < 1:
        parser.error(f"`-n` must be at least 1. Received: -n {options.n}")
    if not command:
        parser.error("no command to run; write it behind `--`")
    try:
        return run(command, options.n, options.timeout, options.grace)
    except (FileNotFoundError, PermissionError) as error:
        print(f"run_local: cannot start {command[0]}: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
