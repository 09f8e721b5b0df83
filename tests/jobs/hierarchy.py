"""Nodes of two workers on one machine, and what they exchange: run by horovodrun.

    horovodrun -np 4 -H localhost:2,127.0.0.1:2 python tests/jobs/hierarchy.py

The last line of stdout is a JSON object.
"""

import sys
from typing import Any
from unittest import mock

import front_ends
import keras
import launch
import tensorflow as tf

import tf_dgc
from tf_dgc import horovod as hvd
from tf_dgc.transports.named_calls import NamedCalls


def main() -> None:
    hvd.init()
    own = hvd.hierarchical()
    results: dict[str, Any] = {"rank": hvd.rank(), "node": own.rank, "nodes": own.size}
    for config in ("dense", "all", "tenth", "owners"):
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

    original = NamedCalls.call

    def call(
        own: Any, operation: Any, place: str, name: str, vector: tf.Tensor
    ) -> tf.Tensor:
        size = int(tf.size(vector)) * vector.dtype.size
        ranks = list(own.among["process_set"].ranks)
        kind = getattr(operation, "func", operation).__name__
        calls.append([kind, ranks, size])
        return original(own, operation, place, name, vector)

    with mock.patch.object(NamedCalls, "call", call):
        step()
    results["calls"] = calls
    rows = tf.constant([10 * own.rank, 10 * own.rank + 1])
    results["rows"] = own.all_to_all(rows, "rows").numpy().tolist()
    own.everybody.barrier()
    launch.say(results)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
