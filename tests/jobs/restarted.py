"""A script that is killed now and then, and started again: run as a worker process.

    tf-dgc-run -n 2 --restarts 20 --strategy dgc restarted.py FOLDER FREQ STEP ...

Worker 1 kills itself before each STEP of a start, in the first validation of a start
where that is -1, after `fit` where it is -2, and says how many steps it has taken. The
last line of stdout is a JSON object with a checksum of the weights.
"""

import json
import os
import pathlib
import signal
import sys
import zlib

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(3)
folder, freq, *steps = sys.argv[1], *map(int, sys.argv[2:])
attempt = int(os.environ["TF_DGC_ATTEMPT"])
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
count = pathlib.Path(folder, f"steps-{rank}")
count.touch()
taken = 0


def die_at(moment):
    """Die where this moment is the one of this start."""
    if rank == 1 and attempt < len(steps) and moment == steps[attempt]:
        os.kill(os.getpid(), signal.SIGKILL)


def begin(batch, logs=None):
    """Count steps, and die before some."""
    global taken
    die_at(taken)
    taken += 1
    with count.open("a") as file:
        file.write(f"{attempt}\n")


model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3),
    ]
)
metrics = ["mae", keras.metrics.TruePositives()]  # a mean and a sum over workers
model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=metrics)
rows = np.random.default_rng(0).normal(size=(800, 8)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :3]))
data = data.shuffle(100, seed=4, reshuffle_each_iteration=False).batch(8)
backup = __import__("tf_dgc").callbacks.BackupState(folder + "/backup", save_freq=freq)
watch = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
watch.on_test_begin = lambda logs=None: die_at(-1)
plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=1.0)
history = model.fit(
    data,
    epochs=3,
    verbose=0,
    validation_data=(rows[:80], rows[:80, :3]),
    callbacks=[watch, plateau, backup],
).history
die_at(-2)
weights = b"".join(v.numpy().tobytes() for v in model.variables)
logs = history  # of all epochs, also those of other starts
told = {"crc": zlib.crc32(weights), "logs": logs, "attempt": attempt}
print("\n" + json.dumps(told), flush=True)
