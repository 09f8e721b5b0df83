"""Train AlexNet's shape on images of 32 x 32 pixels, its dense layers split.

    tf-dgc-run -n 4 examples/split_layers.py
    tf-dgc-run -n 4 examples/split_layers.py --features 512 --classes 200000
    tf-dgc-run -n 4 examples/split_layers.py --whole

Convolutions are data-parallel and compressed; each worker has a part of each large
dense layer. `--features` leaves out all but a last layer on so many features; `--whole`
splits nothing, to compare. The images are noise: what is shown are memory and bytes.

References:
    Krizhevsky: One weird trick for parallelizing convolutional neural networks, 2014,
    https://arxiv.org/abs/1404.5997
"""

import argparse
import pathlib
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

PROCESS = pathlib.Path("/proc/self")


def build(args: argparse.Namespace) -> keras.Model:
    """Returns the model; its large dense layers are drawn in parts."""
    large = keras.layers.Dense if args.whole else tf_dgc.layers.SplitDense
    last = large(args.classes, name="last")
    if args.features:
        return keras.Sequential([keras.Input((args.features,)), last])
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for filters, pool in ((64, 2), (192, 2), (384, 1), (256, 1), (256, 2)):
        layers.append(
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu")
        )
        if pool > 1:
            layers.append(keras.layers.MaxPooling2D(pool))
    layers.append(keras.layers.Flatten())
    for _ in range(2):
        layers += [large(args.width, activation="relu"), keras.layers.Dropout(0.5)]
    return keras.Sequential([*layers, last])


def memory(name: str) -> float:
    """Returns a line of /proc/self/status in MiB: VmRSS is now, VmHWM the most."""
    text = (PROCESS / "status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found, text
    return int(found[1]) / 1024


def main() -> None:
    """Trains, and tells what this worker has and has sent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="split nothing")
    parser.add_argument("--features", type=int, help="only the last layer, on so many")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--width", type=int, default=4096, help="of hidden layers")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of a worker")
    args = parser.parse_args()

    strategy = tf_dgc.DGCStrategy() if not args.features else tf_dgc.DenseStrategy()
    workers = strategy.num_replicas_in_sync
    keras.utils.set_random_seed(1)
    strategy.barrier()  # what the first meeting takes is no memory of the model
    (PROCESS / "clear_refs").write_text("5")  # the most from here on
    before = memory("VmRSS")
    with strategy.scope():
        model = build(args)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    made = memory("VmHWM") - before
    rows = args.batch_size * workers
    shape = (rows, args.features) if args.features else (rows, 32, 32, 3)
    random = np.random.default_rng(1)
    images = random.normal(size=shape).astype("float32")
    labels = random.integers(0, args.classes, rows)
    data = tf.data.Dataset.from_tensors((images, labels)).repeat(args.steps)
    losses = model.fit(data, shuffle=False, verbose=0).history["loss"]
    if strategy.is_chief:
        sent = int(strategy.stats().sent_bytes)
        print(f"workers            {workers}, transport {strategy.transport.name}")
        print(f"parameters here    {model.count_params():,}")
        print(f"loss               {losses[-1]:.4f}")
        print(f"memory             {made:,.0f} MiB at most when the model is made")
        print(f"                   {memory('VmHWM') - before:,.0f} MiB in training")
        print(f"gradients sent     {sent:,} bytes a step")


if __name__ == "__main__":
    main()
