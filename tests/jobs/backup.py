"""A job that may be killed and started again: run as a worker process.

    python tests/jobs/backup.py FOLDER [--kill-rank 1 --kill-step 13]

The last line of stdout is a JSON object with checksums of the variables, before and
after a flush. What is not killed runs on the workers of `pool.py`.
"""

import argparse
import os
import signal
import zlib
from typing import Any

import features
import keras
import launch

import tf_dgc


def run(
    folder: str,
    shared: bool = False,
    averaging: bool = False,
    kill_rank: int | None = None,
    kill_step: int | None = None,
) -> dict[str, Any]:
    """Train, go on where a job before was killed; kill a worker before a step.

    Args:
        folder: where the state is kept.
        shared: one folder for all, else workers have folders of their own.
        averaging: by local steps.
        kill_rank: of the worker.
        kill_step: counted from the beginning of this process.
    """
    strategy: tf_dgc.DGCStrategy | tf_dgc.ParameterAveragingStrategy
    config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, warmup_steps=6)
    if averaging:
        strategy = tf_dgc.ParameterAveragingStrategy(
            tf_dgc.AveragingConfig(
                period=3,
                compression=config,
                outer_optimizer=lambda: keras.optimizers.SGD(0.7, momentum=0.9),
            )
        )
    else:
        strategy = tf_dgc.DGCStrategy(config)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)
        model = features.mlp(*layers)
        rate = keras.optimizers.schedules.CosineDecay(0.05, 40)
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    steps = iter(range(10**6))
    epochs: list[int] = []

    def maybe_die(batch: int, logs: Any = None) -> None:
        if next(steps) == kill_step and strategy.rank == kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=maybe_die,
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
    )
    if not shared:  # as workers on machines of their own
        folder = os.path.join(folder, str(strategy.rank))
    backup = tf_dgc.callbacks.BackupState(folder)
    callbacks = [watch, backup, tf_dgc.callbacks.CompressionStats()]
    data = features.batches()
    model.fit(data, epochs=5, verbose=0, shuffle=False, callbacks=callbacks)
    crc = zlib.crc32(b"".join(v.numpy().tobytes() for v in model.variables))
    kept = float(strategy.stats().residual_norm)
    strategy.flush(model)
    weights = b"".join(v.numpy().tobytes() for v in model.trainable_variables)
    return {
        "rank": strategy.rank,
        "epochs": epochs,
        "crc": crc,
        "kept": [kept, float(strategy.stats().residual_norm)],
        "flushed": zlib.crc32(weights),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--averaging", action="store_true")
    parser.add_argument("--kill-rank", type=int)
    parser.add_argument("--kill-step", type=int)
    launch.say(run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
