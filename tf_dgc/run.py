"""Start a training script on several workers, here or on several hosts.

    tf-dgc-run -n 4 train.py --epochs 3
    tf-dgc-run --hosts a:2,b:2 train.py --epochs 3
    tf-dgc-run -n 4 --strategy dgc --sparsity 0.999 train.py --epochs 3
    tf-dgc-run -n 4 --ps 2 train.py --epochs 3

Each worker gets a `TF_CONFIG` that names all of them, by which the strategies find each
other. With `--strategy` the script needs no changed line: the strategy is made and set
when it first uses TensorFlow. On a terminal the output of worker 0 is seen, and what
others warn of; elsewhere all output, each line behind the worker's rank.
When one worker fails, all are ended, and with `--restarts` the job is started again: it
continues where its `BackupState` has its last backup. Ctrl-C and SIGTERM are passed on
to all workers.
The exit status is that of the first worker to fail, 128 + N for signal N; 124 where
`--timeout` is out, 127 where the workers cannot be started. The pauses before restarts
grow from one second to a minute; a script that is not there is not started again.

With `--verify` the script runs on one worker and on N, until the first steps of its
first `fit` are done, and what differs is told: rows, gradients, weights or logs. The
exit status is 0 where nothing differs, 1 where anything does.

With `--check` no script runs: workers compare what must be equal, measure the network
between them, and print a verdict; see `tf_dgc.check.command`.

`--ps M` starts M parameter servers, with the same script; their output is prefixed with
ps0, ps1, ... Then a worker that fails ends no other, and with `--restarts` is started
again by itself. When all workers have ended the servers get SIGTERM, and the exit
status is that of worker 0. A server that ends while workers run ends all.

`--seats S` beside servers leaves room for S workers in all. Those that are not started
here may join at any time, from other machines too, and leave:

    tf-dgc-run -n 2 --ps 1 --seats 8 --door box:7000 train.py     # on the machine "box"
    tf-dgc-run --join box:7000 train.py                           # on any other

A worker that joins gets SIGTERM at the end of the job, and ends with the job's status.

`--trials G` is for a script that searches hyperparameters with KerasTuner: the workers
are G groups, each of which trains one trial at a time. One process more runs the
script, too: its oracle decides, its output and exit status are those of the job. A
group that fails gives its trial back, and with `--restarts` is started again.

`python -m tf_dgc.run` is the same. Hosts are reached by ssh, with keys; the script, the
Python and its packages must be in the same places there. Workers on them get what of
this environment begins with TF_, KERAS_, PYTHON or OMP_, and what `--env` names.
"""

import argparse
import functools
import os
import shlex
import sys
from collections.abc import Sequence

from tf_dgc.launcher import door, hosts, screen, settings, terminals, workers
from tf_dgc.launcher.apart import Group
from tf_dgc.launcher.job import Job
from tf_dgc.launcher.settings import NO_STRATEGY
from tf_dgc.launcher.workers import ORACLE, Command, Tasks

NAME = "tf-dgc-run"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        NAME,
        usage=f"{NAME} (-n N | --hosts A:N,B:M | --join HOST:PORT) [options] SCRIPT "
        "[ARGUMENT ...]",
        description="Start a training script on several workers.",
        allow_abbrev=False,
    )
    where = parser.add_argument_group("where")
    where.add_argument("-n", type=int, metavar="N", help="number of workers")
    where.add_argument(
        "--ps",
        type=int,
        default=0,
        metavar="M",
        help="number of parameter servers, for DownpourStrategy",
    )
    where.add_argument(
        "--seats",
        type=int,
        default=0,
        metavar="S",
        help="beside servers, workers in all: those that are not started may join",
    )
    where.add_argument(
        "--door",
        metavar="HOST:PORT",
        help="name of this machine, and the port where those ask that join",
    )
    where.add_argument(
        "--join", metavar="HOST:PORT", help="be workers of a job that runs: its --door"
    )
    where.add_argument(
        "--trials",
        type=int,
        default=0,
        metavar="G",
        help="groups of workers, each of which trains one trial of a search at a time",
    )
    where.add_argument("--hosts", metavar="A:N,B:M", help="hosts, and workers on each")
    where.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="how to reach hosts: 'ssh -i k'"
    )
    where.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all workers; may be given several times",
    )
    how = parser.add_argument_group("a script without a strategy")
    how.add_argument(
        "--strategy", choices=settings.STRATEGIES, help="set before it runs"
    )
    how.add_argument("--sparsity", type=float, help="share of elements not sent")
    how.add_argument("--config", metavar="FILE", help="JSON of the strategy's settings")
    how.add_argument(
        "--verify",
        action="store_true",
        help="compare the first steps of its first fit with those of one worker",
    )
    how.add_argument(
        "--verify-steps", type=int, default=3, metavar="S", help="so many (3)"
    )
    end = parser.add_argument_group("the end")
    end.add_argument(
        "--restarts", type=int, default=0, metavar="K", help="start again so often"
    )
    end.add_argument(
        "--pause",
        type=float,
        default=1.0,
        help="seconds before the first restart; each time twice as long, to a minute",
    )
    end.add_argument("--timeout", type=float, help="end all after so many seconds")
    end.add_argument(
        "--grace", type=float, default=5.0, help="seconds from SIGTERM to SIGKILL"
    )
    end.add_argument(
        "--silence",
        type=float,
        default=30.0,
        help="seconds after which a host that cannot be heard is lost",
    )
    before = parser.add_argument_group("before a training")
    before.add_argument(
        "--check",
        action="store_true",
        help="in the place of a script: compare versions, names, clocks and GPUs of "
        "workers, measure their network, print a verdict; with --json, --model "
        "MODULE:FUNCTION, --backups FOLDER, --wait S: see python -m tf_dgc.check -h",
    )
    seen = parser.add_argument_group("what is seen")
    seen.add_argument(
        "--output",
        metavar="chief|all|FOLDER",
        help="the chief's output, as of one process, and the others' warnings (chief: "
        "so on a terminal); every line, behind its worker's rank (all: so elsewhere); "
        "or as chief, and a file for each worker in a folder",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module's name"
    )
    what.add_argument(
        "--no-python", action="store_true", help="SCRIPT is any program, not Python's"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER)
    return parser


def _places(options: argparse.Namespace) -> list[hosts.Host]:
    """Return where workers are to run; on this machine alone, one `localhost`."""
    if options.join is not None:
        _check_guest(options)
        return [
            hosts.Host("localhost", "localhost", 1 if options.n is None else options.n)
        ]
    if options.hosts is None:
        if options.n is None:
            raise ValueError("`-n` or `--hosts` must say how many workers to start")
        if options.n < 1:
            raise ValueError(f"`-n` must be at least 1. Received: -n {options.n}")
        return [hosts.Host("localhost", "localhost", options.n)]
    places = hosts.read_hosts(options.hosts)
    count = sum(place.slots for place in places)
    if options.n not in (None, count):
        raise ValueError(
            "`-n` must be left out with `--hosts`, or be as many as these have. "
            f"Received: -n {options.n}, {count} in --hosts {options.hosts}"
        )
    if len(places) > 1 and any(place.address == "localhost" for place in places):
        raise ValueError(
            "`--hosts` must call this machine by the name that the others know, not "
            f"localhost. Received: --hosts {options.hosts}"
        )
    return places


def _command(options: argparse.Namespace) -> Command:
    """Return the command line of each worker."""
    script = options.script[options.script[:1] == ["--"] :]
    if options.check:
        if options.ps or options.verify or options.strategy or options.no_python:
            raise ValueError(
                "`--check` looks at workers and their network: leave out `--ps`, "
                "`--verify`, `--strategy` and `--no-python`"
            )
        return Command([sys.executable, "-m", "tf_dgc.check", *script])
    if options.trials and (options.ps or options.verify or options.no_python):
        raise ValueError(
            "`--trials` searches hyperparameters with a script of Python: leave out "
            "`--ps`, `--verify` and `--no-python`"
        )
    if not script:
        raise ValueError("no script to run")
    has_servers = options.ps > 0 or options.join is not None
    if (options.strategy == "downpour") != has_servers and options.strategy:
        raise ValueError(
            "`--strategy downpour`, and no other, needs servers: `--ps 1` or more. "
            f"Received: --strategy {options.strategy} --ps {options.ps}"
        )
    if options.verify:
        _check_verified(options)
        words = [*(["-m"] if options.module else []), *script]
        return Command(words, script[0], options.module)
    if options.no_python and options.strategy:
        raise ValueError("`--strategy` needs a script of Python, not `--no-python`")
    settled = options.sparsity is not None or options.config is not None
    if options.strategy is None and settled:
        raise ValueError("`--sparsity` and `--config` need `--strategy`")
    if options.no_python:
        return Command(list(script))
    command = [sys.executable]
    if options.strategy is not None:
        chosen = settings.read(options.strategy, options.sparsity, options.config)
        command = [*workers.of_module("tf_dgc.launcher.script"), chosen.text()]
    elif options.trials:
        command = [*workers.of_module("tf_dgc.launcher.script"), NO_STRATEGY]
    words = [*command, *(["-m"] if options.module else []), *script]
    return Command(words, script[0], options.module)


def _check_verified(options: argparse.Namespace) -> None:
    """Refuse what `--verify` cannot be combined with."""
    if options.verify_steps < 1:
        raise ValueError(
            "`--verify-steps` must be 1 or more. Received: "
            f"--verify-steps {options.verify_steps}"
        )
    if options.n is None or options.n < 2 or options.hosts is not None:
        raise ValueError("`--verify` runs on this machine, on `-n 2` workers or more")
    if options.strategy or options.ps or options.no_python or options.restarts:
        raise ValueError(
            "`--verify` compares dense training of a script of Python: leave out "
            "`--strategy`, `--ps`, `--no-python` and `--restarts`"
        )


def _check_guest(options: argparse.Namespace) -> None:
    """Refuse what `--join` cannot be combined with."""
    door.read_address(options.join, "--join")
    others = "hosts", "ps", "seats", "door", "trials", "check", "verify"
    given = [f"--{name}" for name in others if getattr(options, name)]
    if given:
        raise ValueError(
            "`--join` starts workers here, in a job that has servers: leave out "
            f"{', '.join(given)}"
        )
    if options.n is not None and options.n < 1:
        raise ValueError(f"`-n` must be at least 1. Received: -n {options.n}")


def _door(options: argparse.Namespace, count: int) -> door.Door | None:
    """Return where others may join, if they may."""
    if not options.seats and options.door is None:
        return None
    if not options.ps or options.door is None or options.seats <= count:
        raise ValueError(
            "`--seats` needs `--ps`, more seats than workers that are started, and "
            f"`--door HOST:PORT`. Received: --ps {options.ps} --seats {options.seats} "
            f"--door {options.door} and {count} workers"
        )
    place = door.read_address(options.door, "--door")
    return door.Door(*place, range(count, options.seats))


def _tasks(options: argparse.Namespace, places: Sequence[hosts.Host]) -> Tasks:
    """Return the tasks that are to be started."""
    count = sum(place.slots for place in places)
    if options.trials and count % options.trials:
        raise ValueError(
            "`--trials` must divide the workers into groups of equal size. Received: "
            f"--trials {options.trials} for {count} workers"
        )
    return Tasks(count, options.ps, options.trials)


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Return what `--env` gives to all workers."""
    found = {}
    for text in options.env:
        name, given, value = text.partition("=")
        if not name:
            raise ValueError(f"`--env` must name a variable. Received: --env {text}")
        if not given and name not in os.environ:
            raise ValueError(f"`--env` must name a variable that is set: {name}")
        found[name] = value if given else os.environ[name]
    return found


def _check(options: argparse.Namespace) -> None:
    if options.restarts < 0:
        raise ValueError(
            f"`--restarts` must be 0 or more. Received: --restarts {options.restarts}"
        )
    if options.ps < 0:
        raise ValueError(f"`--ps` must be 0 or more. Received: --ps {options.ps}")
    if options.trials < 0:
        raise ValueError(
            f"`--trials` must be 0 or more. Received: --trials {options.trials}"
        )
    for name in ("pause", "timeout", "grace", "silence"):
        value = getattr(options, name)
        least = name == "timeout" and value == 0  # which would end at once
        if value is not None and (least or not 0 <= value < float("inf")):
            raise ValueError(
                f"`--{name}` must be a number of seconds. Received: --{name} {value}"
            )
    if not shlex.split(options.ssh):
        raise ValueError("`--ssh` must be a command. Received: --ssh ''")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the workers; return the exit status."""
    parser = _parser()
    options, others = parser.parse_known_args(argv)
    if others and not options.check:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    options.script = others + options.script
    try:
        _check(options)
        places, command = _places(options), _command(options)
        environment, tasks = _environment(options), _tasks(options, places)
        if options.output == "all":
            environment = {"TF_DGC_TRACES": "all"} | environment
        quiet = {**os.environ, **environment}.get(workers.QUIET, "3") == "3"
        terminal = terminals.of_this_process()
        if options.check:
            view: screen.View = screen.Chief(terminal, quiet=quiet, bare=True)
        else:
            chief = ORACLE if options.trials else screen.CHIEF
            view = screen.of_option(options.output, quiet, terminal, chief)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    try:
        entrance = _door(options, tasks.workers)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if entrance is not None:
        seats = options.seats - tasks.workers
        tasks = tasks._replace(seats=seats, told=entrance.open)
    job = Job(NAME, options.timeout, options.grace, tasks, view)
    if entrance is not None:
        view.note(f"others join with {NAME} --join {entrance.address} SCRIPT")
        job.before_servers = functools.partial(entrance.see_off, options.grace)
    if options.verify:
        from tf_dgc.verify.command import verify  # needs NumPy

        count, steps = places[0].slots, options.verify_steps
        return verify(job, NAME, command, count, steps, environment)
    launch = os.urandom(8).hex()  # the same for all that is started again

    def start(attempt: int) -> Group:
        own = environment | {"TF_DGC_ATTEMPT": str(attempt), "TF_DGC_LAUNCH": launch}
        if options.join is not None:
            command.require()
            place = door.read_address(options.join, "--join")
            args = place, tasks.workers, own, options.grace, view
            return door.Guests(command.words, *args)
        if places[0].address == "localhost":
            command.require()
            host = "127.0.0.1" if entrance is None else entrance.host
            return workers.start_here(command.words, tasks, own, view, host)
        ssh = hosts.Ssh(options.ssh, options.grace, options.silence)
        passed = hosts.passed_on(os.environ) | own
        how = passed, ssh, lambda: job.received, tasks, view
        return hosts.Hosts(command, places, *how)

    return job.run(start, options.restarts, options.pause)


if __name__ == "__main__":
    sys.exit(main())
