"""Train a small convolutional network on handwritten digits, on several workers.

    python examples/digits.py --strategy single
    horovodrun -np 2 python examples/digits.py
    python scripts/run_local.py -n 2 -- python examples/digits.py --strategy dense

The images, 1797 of 8x8 pixels, come with scikit-learn. At the end worker 0 prints the
accuracy on images not trained on, what each worker sent, and whether all workers
hold bit-identical weights; where they do not, the exit status is 1.
"""

import argparse
import json
import sys
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

Split = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Split, Split, Split]:
    """Returns 1152 images to train, 128 to validate and 517 to test, with labels."""
    from sklearn.datasets import load_digits  # only here: cifar10.py does without

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, np.newaxis] / 16).astype("float32")
    labels = digits.target[order].astype("int32")
    parts = slice(0, 1152), slice(1152, 1280), slice(1280, None)
    return tuple((images[part], labels[part]) for part in parts)


def build(width: int = 128) -> keras.Model:
    """Returns the network: two convolutions and two dense layers, 151,306 weights."""
    model = keras.Sequential([keras.Input((8, 8, 1))])
    model.add(keras.layers.Conv2D(32, 3, padding="same", activation="relu"))
    model.add(keras.layers.Conv2D(64, 3, padding="same", activation="relu"))
    model.add(keras.layers.MaxPooling2D())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(width, activation="relu"))
    model.add(keras.layers.Dense(10, activation="softmax"))
    return model


def make_strategy(
    name: str, sparsity: float, warmup_steps: int
) -> tf_dgc.DGCStrategy | tf_dgc.DenseStrategy:
    """Returns the strategy called `name`: dgc, dense or single."""
    if name == "dgc":
        config = tf_dgc.DGCConfig(sparsity=sparsity, warmup_steps=warmup_steps)
        return tf_dgc.DGCStrategy(config)
    return tf_dgc.DenseStrategy(transport="local" if name == "single" else "auto")


def weights_agree(model: keras.Model, strategy: tf.distribute.Strategy) -> bool:
    """Tells whether all workers hold the same trainable weights, bit for bit."""
    weights = b"".join(np.asarray(w).tobytes() for w in model.trainable_weights)
    own = tf.constant([zlib.crc32(weights)], tf.int64)
    return len(set(strategy.gather(own, axis=0).numpy())) == 1


def report(
    model: keras.Model, strategy: Any, accuracy: float, images: int, steps: int
) -> bool:
    """Prints on worker 0 how it went; tells whether all have the same weights."""
    agree = weights_agree(model, strategy)
    total = strategy.stats(total=True)
    sent, dense = int(total.sent_bytes), int(total.dense_bytes)
    if strategy.is_chief:
        count, transport = strategy.num_replicas_in_sync, strategy.transport.name
        verdict = "bit-identical" if agree else "NOT identical"
        print(f"test accuracy      {accuracy:.2%} of {images} images")
        print(f"workers            {count}, transport {transport}")
        print(f"sent per worker    {sent:,} bytes, {sent // steps:,} per step")
        print(f"dense would send   {dense:,} bytes, {dense // steps:,} per step")
        print(f"weights            {verdict} on all workers")
    return agree


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--strategy", choices=("dgc", "dense", "single"), default="dgc")
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", type=int, default=2, help="as in Model.fit")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    return parser.parse_args()


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    train, validation, test = load()
    steps = len(train[0]) // args.batch_size
    # Before any TensorFlow operation runs: the workers connect here.
    strategy = make_strategy(args.strategy, args.sparsity, 2 * steps)
    keras.utils.set_random_seed(args.seed)  # the same on every worker
    verbose = args.verbose if strategy.is_chief else 0

    with strategy.scope():
        model = build()
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(sgd, "sparse_categorical_crossentropy", metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), args.seed)
    data = data.batch(args.batch_size, drop_remainder=True)
    settings = {"epochs": args.epochs, "shuffle": False, "verbose": verbose}
    model.fit(data, validation_data=validation, **settings)
    _, accuracy = model.evaluate(*test, batch_size=args.batch_size, verbose=0)

    steps = int(model.optimizer.iterations)
    agree = report(model, strategy, accuracy, len(test[0]), steps)
    if args.json and strategy.is_chief:
        total = strategy.stats(total=True)
        sent, dense = int(total.sent_bytes), int(total.dense_bytes)
        figures = {"accuracy": accuracy, "sent_bytes": sent, "dense_bytes": dense}
        print(json.dumps(figures | {"steps": steps, "identical": agree}))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
