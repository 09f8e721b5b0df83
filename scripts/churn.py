#!/usr/bin/env python
"""Average on servers while workers are killed and join; what it costs the others.

    scripts/churn.py --data text.txt --json churn.json
    scripts/churn.py --data text.txt --rows churn --kills 10 --steps 800

A small transformer learns the characters of a text with Adam, on workers of this
machine, each with 16 rows of a step. That lasts as long as it computes and `--pace`
seconds more, so that workers do not wait for processors. In each row worker 0 takes as
many steps:

    lockstep   ParameterAveragingStrategy, as DiLoCo: all wait for all
    average    the same without an outer optimizer, as on servers
    restarts   lockstep; each kill ends the job, which starts again from its backup
    calm       DownpourStrategy(local_steps=), rounds by a quorum: nobody dies
    churn      the same; the others are killed at drawn moments, and new ones join
    slow       the same as calm; one worker takes three times as long for a step

Of these kills half take a worker, half its launcher, too (`tf-dgc-run --join`), also
while it starts. Printed are the loss on unseen text in nats, seconds of worker 0 from
its first to its last step, the longest wait of a worker behind its first round, bytes
sent in a step, and how many workers took steps at the same time, on average.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

ROWS = ("lockstep", "average", "restarts", "calm", "churn", "slow")
ON_SERVERS = ROWS[3:]
LENGTH, ROWS_OF_WORKER = 32, 16
LEAST_TEXT = 80_000  # characters; a tenth is unseen, of which one batch is 200 x LENGTH
EPOCH_ROUNDS = 10
PASSED = "data workers steps local_steps pace momentum seed".split()
PASSED += "quorum grace liveness".split()
AGAIN_SECONDS = 3.0  # until another worker is started, at most
POLL_SECONDS = 0.05


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="a text")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--restarts", type=int, default=10, help="kills of that row")
    parser.add_argument("--steps", type=int, default=3200, help="of worker 0")
    parser.add_argument("--local-steps", type=int, default=16)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--quorum", type=int, default=2, help="0: all that train")
    parser.add_argument("--grace", type=float, default=3.0, help="seconds")
    parser.add_argument("--liveness", type=float, default=30.0, help="seconds")
    parser.add_argument(
        "--momentum", type=float, default=0.0, help="of the outer step on servers"
    )
    parser.add_argument("--compress", action="store_true", help="what is sent")
    parser.add_argument("--seed", type=int, default=1, help="of weights and kills")
    parser.add_argument("--timeout", type=float, default=1800.0, help="of a row")
    parser.add_argument("--json", type=pathlib.Path, help="write all there")
    parser.add_argument("--worker", metavar="ROW", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 1 or args.steps % (EPOCH_ROUNDS * args.local_steps):
        parser.error(f"`--steps` must be of epochs of {EPOCH_ROUNDS} rounds")
    if args.data.stat().st_size < LEAST_TEXT:
        parser.error(f"`--data` must have {LEAST_TEXT} characters at least")
    return args


def strategy_of(args: argparse.Namespace) -> Any:
    """Joins the workers of a row; a server stays here."""
    import keras

    import tf_dgc

    on_servers = args.worker in ON_SERVERS
    momentum = {"average": 0.0, "lockstep": 0.5, "restarts": 0.5}
    factor = momentum.get(args.worker, args.momentum)

    def outer_sgd() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(1.0, factor, nesterov=True)

    outer = outer_sgd if factor else None
    compression = tf_dgc.DGCConfig() if args.compress else None
    if on_servers:
        config = tf_dgc.DownpourConfig(
            local_steps=args.local_steps,
            quorum=args.quorum or None,
            grace=args.grace,
            liveness=args.liveness,
            outer_optimizer=outer,
            compression=compression,
        )
        return tf_dgc.DownpourStrategy(config)
    config = tf_dgc.AveragingConfig(
        period=args.local_steps, outer_optimizer=outer, compression=compression
    )
    return tf_dgc.ParameterAveragingStrategy(config)


def train(args: argparse.Namespace) -> None:
    """Trains as one worker; writes when each step ended, worker 0 also the outcome."""
    import keras
    import parity

    import tf_dgc

    strategy = strategy_of(args)
    keras.utils.set_random_seed(args.seed)
    batch = ROWS_OF_WORKER * args.workers
    text = argparse.Namespace(
        data=args.data, limit=None, batch_size=batch, task="transformer"
    )
    data, unseen, _, _ = parity.load_text(text, LENGTH)
    characters = len(set(args.data.read_text()))
    with strategy.scope():
        model = parity.transformer(LENGTH, characters, width=32)
        rate = keras.optimizers.schedules.CosineDecay(3e-3, args.steps)
        model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy")
    file = args.folder / f"{strategy.rank}-{os.getpid()}.steps"
    pace = args.pace * (3 if args.slow else 1)

    class Pace(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(pace)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            with file.open("a") as output:
                output.write(f"{time.time()}\n")

    callbacks: list[Any] = [Pace()]
    if args.worker == "restarts":
        backup = args.folder / "backup"
        every = 2 * args.local_steps
        callbacks.append(tf_dgc.callbacks.BackupState(str(backup), save_freq=every))
    epoch = EPOCH_ROUNDS * args.local_steps
    served = args.worker in ON_SERVERS
    joined = served and not strategy.is_chief
    model.fit(
        data.repeat(),
        steps_per_epoch=epoch,
        epochs=10**6 if joined else args.steps // epoch,  # joined: till the job's end
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    result = {"loss": model.evaluate(unseen, verbose=0)}
    total = strategy.server_stats() if served else strategy.stats(total=True)
    if strategy.is_chief:
        result["sent_per_step"] = int(total.sent_bytes) / args.steps
        (args.folder / "result.json").write_text(json.dumps(result))


class Launched:
    """A launcher of this machine, in a group of its own.

    Attributes:
        process: the launcher's.
        alone: whether it has joined, with one worker.
    """

    def __init__(self, args: argparse.Namespace, words: list[str], *own: str) -> None:
        """Start it; its workers run this script."""
        given = [str(HERE / "churn.py"), *own]
        self.alone = "--join" in words
        for name in PASSED:
            given += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        given += ["--compress"] if args.compress else []
        self._log = (args.folder / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tf_dgc.run", *words, *given],
            cwd=HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def lose_one(self, drawn: random.Random) -> bool:
        """Kills one of its workers, or all it has; tells whether there was one."""
        own = self.process.pid
        with contextlib.suppress(OSError):  # it has just ended by itself
            children = pathlib.Path(f"/proc/{own}/task/{own}/children").read_text()
            worker = int(drawn.choice(children.split() or ["0"]))
            if worker and self.alone and drawn.random() < 0.5:
                os.killpg(own, signal.SIGKILL)
            if worker:
                os.kill(worker, signal.SIGKILL)
                return True
        return False

    def end(self) -> None:
        """Have it end its workers, and wait."""
        if self.runs:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.process.kill()
        self.process.wait()
        self._log.close()


def run(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """Runs a row.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    drawn = random.Random(f"churn {row} {args.seed}")
    own = ["--worker", row, "--folder", str(args.folder)]
    kills = {"churn": args.kills, "restarts": args.restarts}.get(row, 0)
    words = ["-n", str(args.workers)]
    if row in ON_SERVERS:
        from tf_dgc.launcher.workers import free_ports

        (port,) = free_ports(1)
        door = f"127.0.0.1:{port}"
        words = f"-n 1 --ps 1 --seats {args.workers} --door {door}".split()
    if row == "restarts":
        words += ["--restarts", str(10 * kills), "--pause", "0"]
    host = Launched(args, words, *own)
    guests: list[Launched] = []
    others = args.workers - 1 if row in ON_SERVERS else 0
    starts = [0.0] * others  # when they are due
    begun = time.monotonic()
    gap = args.steps * args.pace / max(kills, 1)
    due, done = 0.0, 0
    try:
        while host.runs:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if now > begun + args.timeout:
                raise RuntimeError(f"{row} has not ended in {args.timeout} s")
            gone = [guest for guest in guests if not guest.runs]
            for guest in gone:
                guests.remove(guest)
                starts.append(now + AGAIN_SECONDS * drawn.random())
            if chief_began(args.folder):
                due = due or now + gap * drawn.random()
                for start in [start for start in starts if start <= now]:
                    starts.remove(start)
                    slow = ["--slow"] if row == "slow" and not guests else []
                    guests.append(Launched(args, ["--join", door], *own, *slow))
            if due and now >= due and done < kills:
                living = guests if row in ON_SERVERS else [host]
                done += bool(living) and drawn.choice(living).lose_one(drawn)
                due = now + gap * (0.5 + drawn.random())
    finally:
        for each in [*guests, host]:
            each.end()
    if host.process.returncode != 0:
        log = (args.folder / "log").read_text(errors="replace")
        raise RuntimeError(f"{row} failed:\n{log[-3000:]}")
    return figures(args) | {"row": row, "kills": done}


def chief_began(folder: pathlib.Path) -> bool:
    """Tells whether worker 0 has taken a step."""
    return any(folder.glob("0-*.steps"))


def figures(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the workers of a row have written."""
    found = json.loads((args.folder / "result.json").read_text())
    waits, chief, taken = [0.0], [], 0
    for file in args.folder.glob("*.steps"):
        lines = file.read_text().splitlines()
        times = [float(line) for line in lines if line.count(".") == 1]
        taken += len(times)
        first = args.local_steps  # steps, which trace, and build what a round takes
        pairs = zip(times[first:], times[first - 1 :], strict=False)
        waits += [later - earlier - args.pace for later, earlier in pairs]
        if file.name.startswith("0-"):
            chief += times
    joined = len(list(args.folder.glob("*.steps")))
    seconds = max(chief) - min(chief)
    found |= {"seconds": seconds, "wait": max(waits), "workers": joined}
    return found | {"together": taken / args.steps}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows, and prints a table."""
    args = arguments(argv)
    args.data = args.data.resolve()
    if args.worker:
        train(args)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by `finally`
    rows = []
    titles = "row|kills|workers|loss|seconds|longest wait|sent in a step|together"
    print(f"| {' | '.join(titles.split('|'))} |")
    print("|" + (titles.count("|") + 1) * "---|")
    for row in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            args.folder = pathlib.Path(folder)
            rows.append(run(args, row))
        each = rows[-1]
        cells = [row, each["kills"], each["workers"], f"{each['loss']:.3f}"]
        cells += [f"{each['seconds']:.1f}", f"{each['wait']:.2f}"]
        cells += [round(each["sent_per_step"]), f"{each['together']:.2f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
