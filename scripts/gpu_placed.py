#!/usr/bin/env python
"""Run a training step, and tell where TensorFlow has placed its operations.

    scripts/gpu_placed.py

Lists operations on the host that the program does not pin there, by what TensorFlow
logs of placement: on a GPU those of reading data, and of scalars and shapes, remain.
"""

import collections
import os
import pathlib
import re
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
# As TensorFlow logs it: "name: (Operation): /job:.../device:GPU:0".
_LINE = re.compile(r"\((\w+)\): \S*device:(CPU|GPU):\d+")


def placed(text: str) -> dict[str, collections.Counter[str]]:
    """Return how many operations of each type are on which kind of device."""
    found: dict[str, collections.Counter[str]] = {
        "CPU": collections.Counter(),
        "GPU": collections.Counter(),
    }
    for operation, device in _LINE.findall(text):
        found[device][operation] += 1
    return found


def logged_step() -> str:
    """Train for two steps; return what TensorFlow logs of placement."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    import keras
    import tensorflow as tf

    import tf_dgc

    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            tf.debugging.set_log_device_placement(True)
            config = tf_dgc.DGCConfig(sparsity=0.99, min_elements=1, warmup_steps=0)
            strategy = tf_dgc.DGCStrategy(config, transport="local")
            with strategy.scope():
                layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
                model = keras.Sequential([keras.Input((64,)), *layers])
                model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            model.fit(tf.ones([32, 64]), tf.ones([32, 10]), batch_size=16, verbose=0)
        finally:
            os.dup2(kept, 2)
        log.seek(0)
        return log.read().decode(errors="replace")


def main() -> int:
    """Trains, compares and prints; returns the exit status."""
    found = placed(logged_step())
    from tf_dgc.lab import kernels, placement

    step = kernels.audit(placement.trace(placement.STEPS["dgc"]), placement.LARGE)
    known = {place.operation for place in step.pinned} | kernels.STRUCTURE
    other = {op: n for op, n in found["CPU"].items() if op not in known}
    for device, operations in found.items():
        print(f"{sum(operations.values()):6} operations on the {device}")
    print("on the host, other than the program pins:", other or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
