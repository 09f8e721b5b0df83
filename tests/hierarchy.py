"""Nodes of two workers on one machine, and what they exchange: run by horovodrun.

    horovodrun -np 4 -H localhost:2,127.0.0.1:2 python tests/hierarchy.py

The last line of stdout is a JSON object.
"""

import json
import sys
from typing import Any
from unittest import mock

import front_ends
import horovod.tensorflow
import keras
import tensorflow as tf

import tf_dgc
from tf_dgc import horovod as hvd


def main() -> None:
    hvd.init()
    own = hvd.hierarchical()
    results: dict[str, Any] = {"rank": hvd.rank(), "node": own.rank, "nodes": own.size}
    for config in ("dense", "all", "tenth"):
        for hierarchical in (False, True):
            keras.utils.clear_session()
            keras.utils.set_random_seed(1)
            results[f"{config} {hierarchical}"] = front_ends.by_optimizer(
                front_ends.CONFIGS[config],
                front_ends.plain_sgd,
                hierarchical=hierarchical,
            )
    # What goes over the wire in an eager step, by process set.
    calls: list[list[Any]] = []
    config = tf_dgc.DGCConfig(sparsity=0.9, min_elements=1)
    tape_of = hvd.DistributedGradientTape
    weights = tf.Variable(tf.ones([64, 8]))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * tf.random.normal([64, 8]))
        tape_of(tape, config, hierarchical=True).gradient(loss, [weights])

    step()

    def watched(name: str) -> Any:
        original = getattr(horovod.tensorflow, name)

        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            size = tensor.shape.num_elements() * tensor.dtype.size
            calls.append([name, list(kwargs["process_set"].ranks), size])
            return original(tensor, *args, **kwargs)

        return mock.patch.object(horovod.tensorflow, name, call)

    for each in (own._within, own._between):
        if each is not None:
            each._functions.clear()  # so that the calls are traced anew, and seen
    with watched("allreduce"), watched("allgather"):
        step()
    results["calls"] = calls
    own.everybody.barrier()
    print(json.dumps(results), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
