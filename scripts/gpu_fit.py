#!/usr/bin/env python
"""Measure what a step of ResNet-50 in `fit` takes: plain, dense and compressed.

    scripts/gpu_fit.py --batch 64 --steps 20 --repeats 5

One worker, images of 224 x 224 in float32 that are in memory already. The epochs are
taken in turns; printed are the medians of seconds a step, and by how much a strategy
takes longer than none. TF_DGC_XLA=off measures steps of single operations.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Returns a compiled model by the name of what trains it."""
    import keras

    import tf_dgc

    found = {}
    for name, strategy in (
        ("plain", None),
        ("dense", tf_dgc.DenseStrategy(transport="local")),
        ("dgc", tf_dgc.DGCStrategy(tf_dgc.DGCConfig.paper(), transport="local")),
    ):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            side = args.side
            model = keras.applications.ResNet50(
                weights=None, input_shape=(side, side, 3)
            )
            # As under any strategy.
            sgd = keras.optimizers.SGD(0.01, momentum=0.9)
            model.compile(sgd, "sparse_categorical_crossentropy", jit_compile=False)
        found[name] = model
    return found


def main() -> int:
    """Trains in turns and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    import tensorflow as tf

    shape = [args.batch, args.side, args.side, 3]
    images = tf.random.stateless_uniform(shape, [5, 6])
    labels = tf.zeros([args.batch], tf.int32)
    data = tf.data.Dataset.from_tensors((images, labels)).repeat(args.steps)
    own, taken = models(args), {}
    for repeat in range(args.repeats + 1):
        for name, model in own.items():
            start = time.perf_counter()
            model.fit(data, verbose=0)
            tf.test.experimental.sync_devices()
            seconds = (time.perf_counter() - start) / args.steps
            if repeat:  # the first compiles
                taken.setdefault(name, []).append(seconds)
    print("| fit of ResNet-50 | seconds a step | over plain |\n|---|---|---|")
    for name, each in taken.items():
        pairs = zip(each, taken["plain"], strict=True)
        over = statistics.median(one / plain for one, plain in pairs) - 1
        print(f"| {name} | {statistics.median(each):.4f} | {over:+.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
