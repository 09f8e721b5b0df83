#!/usr/bin/env python3
"""Break the package in 40 places, one at a time, and tell which tier of tests notices.

    scripts/seeded_faults.py [NUMBER ...]

A fault changes what one place means: a sign, a divisor, a mask, an order, a barrier. It
is put into a copy of this checkout, where the tests about the place run, tier by tier,
until one fails. Which files these are stands beside each fault: the test of the
module's name, and those of the modules and jobs that use the place, as names and
imports tell. They are not all tests: those take an hour, and there are 40 faults. So
what none of these notices may be noticed by another, and what the table says is the
least that a tier notices.

Exit status: 0 if the fast and the default tier notice 9 of 10 faults or more, else 1.
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What each runs beside those before it. CI runs all but the last.
TIERS = {
    "fast": "not processes and not long and not extended and not slow",
    "default": "(processes or long) and not extended and not slow",
    "extended": "extended",
    "slow": "slow",
}
WANTED = 0.9  # of the faults, by the tiers that a newcomer runs
_SECONDS = 900  # of one tier


class Fault(NamedTuple):
    """A place, and what is put there."""

    meaning: str
    path: str  # in tf_dgc/
    before: str  # stands there once
    after: str
    tests: str  # files in tests/, without test_ and .py


FAULTS = (
    # Compression.
    Fault(
        "the clipping norm grows with the workers",
        "compression/dgc.py",
        "clip_norm * workers**-0.5",
        "clip_norm * workers**0.5",
        "unit/dgc laws/laws",
    ),
    Fault(
        "velocity is not masked where an element was sent",
        "compression/dgc.py",
        "u = tf.tensor_scatter_nd_update(u, where, tf.zeros_like(sent))",
        "u = tf.identity(u)",
        "unit/dgc unit/ledger laws/laws",
    ),
    Fault(
        "Nesterov's velocity is plain momentum's",
        "compression/dgc.py",
        "u = momentum.factor * (u + gradient)",
        "u = momentum.factor * u + gradient",
        "unit/dgc unit/ledger laws/laws",
    ),
    Fault(
        "any fall of the learning rate shrinks what is kept back",
        "compression/dgc.py",
        "fell = (rate > 0) & (rate <= 0.5 * last)",
        "fell = (rate > 0) & (rate <= last)",
        "unit/dgc",
    ),
    Fault(
        "a position that comes twice in a message is taken for sound",
        "compression/message.py",
        "ascend = (positions[:, :-1] < positions[:, 1:])",
        "ascend = (positions[:, :-1] <= positions[:, 1:])",
        "unit/message laws/fuzz",
    ),
    Fault(
        "one large value sets the scale of coarse values",
        "compression/coarse.py",
        "scales = tf.minimum(tf.cast(most, tf.float64), _MOST * scales)",
        "scales = tf.cast(most, tf.float64)",
        "unit/dgc laws/laws",
    ),
    Fault(
        "tensors are laid end to end without padding",
        "compression/arena.py",
        "offset += -(-size // BLOCK) * BLOCK",
        "offset += size",
        "unit/arena unit/ledger",
    ),
    Fault(
        "the warm-up ends before its steps are over",
        "compression/warmup.py",
        "index * config.warmup_steps // len(climbing)",
        "index * config.warmup_steps // (len(climbing) + 1)",
        "unit/warmup unit/budget",
    ),
    Fault(
        "a warm-up is longer than the budget allows",
        "compression/budget.py",
        "share = min((left - stages[-1]) / more, WARMUP_SHARE)",
        "share = min(left / more, WARMUP_SHARE)",
        "unit/budget",
    ),
    Fault(
        "among equal elements the first of a tensor always win",
        "compression/selection.py",
        "-(step * 7919 % count)",
        "-(0 * step % count)",
        "unit/selection unit/dgc",
    ),
    # Averaging.
    Fault(
        "a mean counts workers that took no step",
        "averaging.py",
        "tf.reduce_sum(tf.cast(moved > 0, tf.float64))",
        "tf.reduce_sum(tf.ones_like(moved, tf.float64))",
        "unit/averaging unit/parameter_averaging laws/local_steps",
    ),
    Fault(
        "an adaptive period follows the loss itself, not its root",
        "averaging.py",
        "tf.math.ceil(tf.sqrt(tf.maximum(loss / first, 0.0)) * most)",
        "tf.math.ceil(tf.maximum(loss / first, 0.0) * most)",
        "unit/averaging",
    ),
    Fault(
        "what was done while a round was in flight is lost",
        "exchanges/flights.py",
        "variable.assign(tf.cast(agreed + since, variable.dtype))",
        "variable.assign(tf.cast(agreed, variable.dtype))",
        "laws/flights",
    ),
    Fault(
        "a worker without rows has moved",
        "exchanges/progress.py",
        "self.moved.assign_add(tf.cast((weight > 0) & ~early, tf.int64))",
        "self.moved.assign_add(tf.cast(~early, tf.int64))",
        "unit/parameter_averaging unit/averaging_strategy unit/without_rows",
    ),
    # Exchanges.
    Fault(
        "a flush leaves what it has applied",
        "exchanges/held_back.py",
        "residual.clear(sent)",
        "del sent",
        "unit/records unit/ledger unit/strategy",
    ),
    Fault(
        "a step with NaN is sent and counted",
        "exchanges/compressed.py",
        "tf.cond(ok, functools.partial(self._large.send, share), no_traffic)",
        "tf.cond(ok | True, functools.partial(self._large.send, share), no_traffic)",
        "unit/ledger",
    ),
    Fault(
        "borrowed state is not given back",
        "exchanges/arenas.py",
        "        self.give_back()\n\n    def",
        "\n    def",
        "unit/ledger unit/records unit/dgc laws/laws",
    ),
    Fault(
        "an owner's sum is of a damaged message, too",
        "exchanges/owner_messages.py",
        "positions = tf.where(faults[:, tf.newaxis] > 0, unused, found.positions)",
        "positions = tf.where(faults[:, tf.newaxis] > 9, unused, found.positions)",
        "laws/owners",
    ),
    Fault(
        "a node's gradients count as those of one worker",
        "exchanges/nodes.py",
        "ratio = everybody.size, transport.size / everybody.size",
        "ratio = everybody.size, 1.0",
        "laws/nodes",
    ),
    Fault(
        "stale is the part of a tensor that was sent",
        "exchanges/figures.py",
        "1.0 - float(sent[segment.offset :][: segment.size].mean())",
        "float(sent[segment.offset :][: segment.size].mean())",
        "unit/ledger unit/callbacks",
    ),
    # Rows and losses.
    Fault(
        "a worker without rows adds whatever it has computed",
        "strategies/rows.py",
        "lambda each: tf.where(empty, tf.zeros_like(each), each),",
        "lambda each: each,",
        "unit/without_rows unit/share unit/own_steps",
    ),
    Fault(
        "gradients of few rows count as much as those of many",
        "strategies/weights.py",
        "return Part(rate, self._rows.weight(), 1)",
        "return Part(rate, one, 1)",
        "unit/share unit/own_steps",
    ),
    Fault(
        "of uneven batches one row is nobody's",
        "strategies/slicing.py",
        "return start, start + each + tf.cast(rank < more, count.dtype)",
        "return start, start + each",
        "unit/data unit/split",
    ),
    Fault(
        "the rows that stand for none are kept",
        "strategies/split.py",
        "kept = tf.fill([last - first], stop > start)",
        "kept = tf.fill([last - first], True)",
        "unit/split",
    ),
    Fault(
        "rows in another order pass for the same",
        "strategies/witness.py",
        "places = 2 * tf.range(tf.size(values, tf.int64), dtype=tf.int64) + 1",
        "places = tf.ones_like(values)",
        "unit/data unit/split",
    ),
    Fault(
        "an epoch ends where the data of one worker end",
        "strategies/level.py",
        'tf.reduce_max(transport.all_gather(told, "has_next"), axis=0)',
        'tf.reduce_min(transport.all_gather(told, "has_next"), axis=0)',
        "unit/level",
    ),
    Fault(
        "the largest of all rows is each worker's own",
        "strategies/losses.py",
        "inverse = self._sums.totals.winners[cut.key] if cut.best else cut.inverse",
        "inverse = cut.inverse",
        "unit/losses",
    ),
    Fault(
        "noise is the same on all workers",
        "strategies/randomness.py",
        "first = (first + rank * _STRIDE) % _LARGEST",
        "first = first % _LARGEST",
        "unit/randomness",
    ),
    Fault(
        "weights that have drifted apart pass for the same",
        "exchanges/replicas.py",
        "differs = found != found[0]",
        "differs = found != found",
        "unit/replicas",
    ),
    Fault(
        "all workers write what callbacks write",
        "strategies/files.py",
        "    elif strategy.is_chief:\n        with on_one_worker():",
        "    elif strategy.is_chief or True:\n        with on_one_worker():",
        "unit/files",
    ),
    Fault(
        "nobody waits for the file that the chief writes at the end of an epoch",
        "strategies/files.py",
        "    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:\n"
        "        if self._held:\n            self._strategy.barrier()",
        "    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:\n"
        "        if self._held:\n            pass",
        "unit/files jobs/features jobs/scripts",
    ),
    # Transports.
    Fault(
        "settings that differ pass for the same",
        "transports/handshake.py",
        "if (digests == digests[0]).all():",
        "if (digests == digests[0]).any():",
        "unit/handshake",
    ),
    Fault(
        "real workers' rows come in another order",
        "transports/collective.py",
        "            rows = tf.reshape(gathered, [self.size, -1])",
        "            rows = tf.reshape(gathered, [self.size, -1])[::-1]",
        "laws/transports",
    ),
    Fault(
        "ranks of srun may lie anywhere on the nodes",
        "transports/schedulers.py",
        "rank == sum(tasks[:node]) + local < size",
        "rank < size",
        "unit/schedulers",
    ),
    # Servers and split layers.
    Fault(
        "all tensors lie on the first server",
        "servers/shards.py",
        "        weights[server] += size\n",
        "",
        "unit/servers",
    ),
    Fault(
        "a synchronous step is taken when the first gradient has arrived",
        "servers/turns.py",
        "ready = tf.math.count_nonzero(arrived) >= needed",
        "ready = tf.math.count_nonzero(arrived) >= 1",
        "unit/turns unit/local_servers jobs/downpour",
    ),
    Fault(
        "the first push after a pull is not pulled",
        "servers/stamped_part.py",
        "blocks = tf.where(self._newest.read_value() > least)[:, 0]",
        "blocks = tf.where(self._newest.read_value() > least + 1)[:, 0]",
        "unit/stamps unit/local_servers",
    ),
    Fault(
        "a softmax over parts forgets whose peak is the highest",
        "layers/logits.py",
        "whole = tf.reduce_sum(found[:, 1] * tf.exp(found[:, 0] - top), 0)",
        "whole = tf.reduce_sum(found[:, 1], 0)",
        "unit/split_layers",
    ),
    # Around training.
    Fault(
        "what Horovod's logs show is a sum",
        "horovod/callbacks.py",
        "means = total.numpy() / self._transport.size",
        "means = total.numpy()",
        "jobs/horovod_front_ends",
    ),
    Fault(
        "a job that a signal ends has that signal's number as its status",
        "launcher/job.py",
        'return End(128 + number, f"received signal {number}")',
        'return End(number, f"received signal {number}")',
        "lab/run_local",
    ),
)


def main() -> int:
    """Try the faults that are asked for, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, help="of faults, from 1 on")
    numbers = parser.parse_args().numbers or range(1, len(FAULTS) + 1)
    import keras  # noqa: F401  # once for all

    with tempfile.TemporaryDirectory(prefix="tf_dgc-faults-") as name:
        copy = pathlib.Path(name)
        _copy_to(copy)
        noticed = [_try(copy, number) for number in numbers]
    counts = {tier: noticed.count(tier) for tier in (*TIERS, "")}
    told = ", ".join(f"{n} by {tier or 'none'}" for tier, n in counts.items())
    print(f"{len(noticed)} faults, noticed first: {told}")
    return int(counts["fast"] + counts["default"] < WANTED * len(noticed))


def _copy_to(folder: pathlib.Path) -> None:
    """Copy the checkout, without what git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def broken(fault: Fault, text: str) -> str:
    """Return the text of a module with a fault in it.

    Raises:
        ValueError: the place is not there, or not once.
    """
    if (found := text.count(fault.before)) != 1:
        raise ValueError(
            f"{fault.path} must have this once, and has it {found} times; follow the "
            f"code here: {fault.before!r}"
        )
    return text.replace(fault.before, fault.after)


def _try(copy: pathlib.Path, number: int) -> str:
    """Return the tier that notices a fault first, or ""."""
    fault, began = FAULTS[number - 1], time.monotonic()
    module = copy / "tf_dgc" / fault.path
    sound = module.read_text()
    module.write_text(broken(fault, sound))
    found = "", "NOT NOTICED"
    for tier, marks in TIERS.items():
        if test := _noticed(copy, files_of(fault), marks):
            found = tier, test
            break
    module.write_text(sound)
    seconds = time.monotonic() - began
    about = f"{fault.meaning} ({fault.path})"
    print(f"{number:2d} {found[0]:8s} {about}: {found[1]}, {seconds:.0f} s", flush=True)
    return found[0]


def files_of(fault: Fault) -> list[str]:
    """Return the files of tests about its place."""
    return [f"tests/{each.replace('/', '/test_')}.py" for each in fault.tests.split()]


def _noticed(copy: pathlib.Path, files: Sequence[str], marks: str) -> str:
    """Return the first of some tests that fails, or ""."""
    options = "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", marks
    output = copy / "output.txt"
    if (pid := os.fork()) == 0:
        _run(copy, [*options, *files], output)
    status = _wait(pid)
    if status is None:
        return f"no end after {_SECONDS} s"
    if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    found = re.search(
        r"^(?:SUB)?(?:FAILED|ERROR)\b.*?tests/(\S+)", output.read_text(), re.MULTILINE
    )
    if found is None:
        raise RuntimeError(f"pytest has ended by {status}:\n{output.read_text()}")
    return found[1]


def _run(copy: pathlib.Path, arguments: list[str], output: pathlib.Path) -> None:
    """Run pytest in a fork, which has TensorFlow, and the package not yet; end."""
    os.setsid()
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:0] = [str(copy)]
    # Files of bytecode tell changes by seconds, and these follow one another.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with output.open("wb") as file, open(os.devnull, "rb") as nothing:
        for stream, number in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(stream.fileno(), number)
    status = 1
    try:
        status = pytest.main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(pid: int) -> int | None:
    """Return the status of a fork, None where it does not end in time."""
    deadline = time.monotonic() + _SECONDS
    status = None
    while status is None and time.monotonic() < deadline:
        time.sleep(0.2)
        ended, found = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(found)
    with contextlib.suppress(ProcessLookupError):  # nothing of it stays behind
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


if __name__ == "__main__":
    sys.exit(main())
