"""A job that may be killed and started again: run as a worker process.

    python tests/backup.py FOLDER [--kill-rank 1 --kill-step 13]

The last line of stdout is a JSON object with checksums of the variables, before and
after a flush.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--shared", action="store_true", help="one folder for all")
    parser.add_argument("--averaging", action="store_true")
    parser.add_argument("--kill-rank", type=int)
    parser.add_argument("--kill-step", type=int)
    args = parser.parse_args()
    strategy: tf_dgc.DGCStrategy | tf_dgc.ParameterAveragingStrategy
    config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, warmup_steps=6)
    if args.averaging:
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
        if next(steps) == args.kill_step and strategy.rank == args.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=maybe_die,
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
    )
    folder = args.folder
    if not args.shared:  # as workers on machines of their own
        folder = os.path.join(folder, str(strategy.rank))
    backup = tf_dgc.callbacks.BackupState(folder)
    callbacks = [watch, backup, tf_dgc.callbacks.CompressionStats()]
    data = features.batches()
    model.fit(data, epochs=5, verbose=0, shuffle=False, callbacks=callbacks)
    crc = zlib.crc32(b"".join(v.numpy().tobytes() for v in model.variables))
    kept = float(strategy.stats().residual_norm)
    strategy.flush(model)
    weights = b"".join(v.numpy().tobytes() for v in model.trainable_variables)
    found = {
        "rank": strategy.rank,
        "epochs": epochs,
        "crc": crc,
        "kept": [kept, float(strategy.stats().residual_norm)],
        "flushed": zlib.crc32(weights),
    }
    launch.say(found)


if __name__ == "__main__":
    main()
