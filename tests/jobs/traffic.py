"""Bytes between hosts in ten steps: run on hosts of scripts/netlab.py.

    tf-dgc-run --hosts host1:2,host2:2 tests/jobs/traffic.py [hosts | auto]

The last line of stdout is a JSON object: what this worker's host has sent and received
over its interface, and what `stats()` says.
"""

import logging
import pathlib
import sys
from typing import Any

import keras
import launch
import numpy as np

import tf_dgc

FIRST, STEPS = 3, 10


def interface() -> list[int]:
    """Return bytes received and sent by eth0."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    (found,) = [line.partition(":")[2].split() for line in lines if "eth0:" in line]
    return [int(found[0]), int(found[8])]


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    wanted = {"hosts": True, "auto": "auto"}.get(sys.argv[-1], False)
    config = tf_dgc.DGCConfig(sparsity=0.9, hierarchical=wanted)
    strategy = tf_dgc.DGCStrategy(config)
    with strategy.scope():
        layers = [keras.layers.Dense(512), keras.layers.Dense(512)]
        model = keras.Sequential([keras.Input((512,)), *layers])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    seen: list[list[int]] = []

    def look(batch: int, logs: Any) -> None:
        if batch in (FIRST, FIRST + STEPS):
            strategy.barrier()  # all are done with the step
            seen.append(interface())

    steps = FIRST + STEPS + 1
    x = np.random.default_rng(0).normal(size=(16 * steps, 512)).astype("float32")
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(x, x, callbacks=[callback], **options)
    stats = strategy.stats()
    launch.say(
        {
            "rank": strategy.rank,
            "seen": [after - before for before, after in zip(*seen, strict=True)],
            "sent": STEPS * int(stats.sent_bytes),
            "received": STEPS * int(stats.received_bytes),
        }
    )


if __name__ == "__main__":
    main()
