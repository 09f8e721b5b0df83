"""A worker to whom something happens: run as a worker process by scripts/faults.py.

    python tests/jobs/fault.py --kind kill --moment sparse --strategy dgc \
        --transport auto --folder FOLDER

A rank notes the time in FOLDER/fault when its moment has come, and then dies (`kill`),
stops (`stop`), raises an exception (`raise`), takes its link down (`network`, by the
command of `--cut`), or keeps the others waiting, while somebody sends a signal to the
job (`interrupt`, `terminate`). Each worker notes its process in FOLDER/pid.RANK.
"""

import argparse
import json
import os
import pathlib
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import features
import keras

import tf_dgc
from tf_dgc.exchanges import state_files

STRATEGIES = "dense", "dgc", "averaging", "flight", "split"
PERIOD = 3  # local steps
WARMUP = 6  # steps; an epoch has four
# In which batch of all, at whose beginning, or by which call of a hook it happens.
MOMENTS = {
    "start": 0,
    "warmup": 2,
    "sparse": 9,
    "activations": 9,
    "round": 4 + PERIOD - 1,
    "flight": 4 + PERIOD - 1,  # of the other worker, which goes on
    "evaluation": 5,
    "checkpoint": 1,
}


def own_rank() -> int:
    """Tell this worker's rank before there is a strategy."""
    if "HOROVOD_RANK" in os.environ:
        return int(os.environ["HOROVOD_RANK"])
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def strategy_of(name: str, transport: str) -> Any:
    """Return the strategy to train with."""
    if name in ("dense", "split"):
        return tf_dgc.DenseStrategy(transport=transport)
    config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, warmup_steps=WARMUP)
    if name == "dgc":
        return tf_dgc.DGCStrategy(config, transport=transport)
    overlap = PERIOD if name == "flight" else None
    averaging = tf_dgc.AveragingConfig(period=PERIOD, overlap=overlap)
    return tf_dgc.ParameterAveragingStrategy(averaging, transport=transport)


def note(path: pathlib.Path, text: str) -> None:
    """Write a file that is there with all its content, or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


class Fault:
    """What happens to a rank when its moment has come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._counts = dict.fromkeys(MOMENTS, 0)

    def at(self, *moments: str) -> None:
        """Count that these moments were here once more; it may be the one."""
        for moment in moments:
            count = self._counts[moment]
            self._counts[moment] += 1
            if moment == self._args.moment and count == MOMENTS[moment]:
                self._happen()

    def _happen(self) -> None:
        if own_rank() != self._args.rank:
            return
        note(pathlib.Path(self._args.folder) / "fault", str(time.time()))
        match self._args.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ArithmeticError("what one rank met")
            case "network":
                subprocess.run(shlex.split(self._args.cut), check=True)
            case _:
                time.sleep(100)

    def before(self, function: Callable[..., Any], moment: str) -> Callable[..., Any]:
        """Return a function before whose end a moment comes."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.at(moment)
            return result

        return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--moment", choices=MOMENTS, required=True)
    parser.add_argument("--strategy", choices=STRATEGIES)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rank", type=int, default=1, help="whom it happens to")
    parser.add_argument("--cut", help="the command that takes the link down")
    args = parser.parse_args()
    folder = pathlib.Path(args.folder)
    note(folder / f"pid.{own_rank()}", str(os.getpid()))
    fault = Fault(args)
    fault.at("start")
    strategy = strategy_of(args.strategy, args.transport)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = features.mlp()
        if args.strategy == "split":
            model = tf_dgc.split_dense(model, 1)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    # What each rank has written of a backup does not count before all have.
    state_files.prepare = fault.before(state_files.prepare, "checkpoint")

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            fault.at("warmup", "sparse", "round", "flight", "activations")

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            fault.at("evaluation")

    backup = tf_dgc.callbacks.BackupState(folder / f"backup.{own_rank()}")
    data = features.batches()
    # More than a job lives in which somebody else makes the fault.
    model.fit(
        data,
        epochs=10**6,
        verbose=0,
        shuffle=False,
        validation_data=data,
        callbacks=[Watch(), backup],
    )


if __name__ == "__main__":
    main()
