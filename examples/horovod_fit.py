"""Train the digits with fit and Horovod, without a strategy.

    horovodrun -np 2 python examples/horovod_fit.py
    horovodrun -np 2 python examples/horovod_fit.py --sparsity 0

As with Horovod's own optimizer, each worker reads its own part of the data, and the
learning rate grows with the number of workers; `--sparsity 0` exchanges everything.
"""

import argparse
import sys

import keras
import numpy as np
import tensorflow as tf
from digits import build, load

import tf_dgc
from tf_dgc import horovod as hvd


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--verbose", type=int, default=2, help="as in Model.fit")
    return parser.parse_args()


def own_part(images: np.ndarray, labels: np.ndarray, size: int) -> tf.data.Dataset:
    """Returns every N-th image, in batches; as many on every worker."""
    count = len(images) // hvd.size() * hvd.size()
    part = slice(hvd.rank(), count, hvd.size())
    data = tf.data.Dataset.from_tensor_slices((images[part], labels[part]))
    return data.shuffle(count).batch(size, drop_remainder=True)


def config_of(sparsity: float, steps: int) -> tf_dgc.DGCConfig | None:
    """Returns the settings, with two epochs of warm-up."""
    if not sparsity:
        return None
    return tf_dgc.DGCConfig(sparsity=sparsity, warmup_steps=2 * steps)


def report(
    model: keras.Model, test: tuple[np.ndarray, np.ndarray], optimizer: object
) -> bool:
    """Prints on worker 0 how it went; tells whether all have the same weights."""
    _, accuracy = model.evaluate(*test, verbose=0)
    weights = [tf.convert_to_tensor(w) for w in model.trainable_weights]
    flat = tf.concat([tf.reshape(w, [-1]) for w in weights], axis=0)
    every = hvd.transport().all_gather(flat, "weights")
    agree = bool(tf.reduce_all(every == every[0]))
    if hvd.rank() == 0:
        total = hvd.stats(optimizer, total=True)
        print(f"test accuracy      {accuracy:.2%} of {len(test[0])} images")
        print(f"sent per worker    {int(total.sent_bytes):,} bytes")
        print(f"dense would send   {int(total.dense_bytes):,} bytes")
        verdict = "bit-identical" if agree else "NOT identical"
        print(f"weights            {verdict} on all workers")
    return agree


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    hvd.init()
    keras.utils.set_random_seed(1)  # so that each run prints the same
    train, _, test = load()
    data = own_part(*train, args.batch_size)
    steps = len(data)
    model = build()
    sgd = keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, config_of(args.sparsity, steps))
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastVariables(),
        hvd.callbacks.MetricAverage(),
        hvd.callbacks.LearningRateWarmup(2 * steps, 1 / hvd.size()),
    ]
    verbose = args.verbose if hvd.rank() == 0 else 0
    model.fit(data, epochs=args.epochs, verbose=verbose, callbacks=callbacks)
    return 0 if report(model, test, optimizer) else 1


if __name__ == "__main__":
    sys.exit(main())
