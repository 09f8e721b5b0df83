"""Train the digits in a loop of one's own: strategy.run and GradientTape.

    horovodrun -np 2 python examples/custom_loop.py
    python scripts/run_local.py -n 2 -- python examples/custom_loop.py

What differs from a loop on one machine: the dataset is distributed, the step runs
under `strategy.run`, and the loss is divided by the size of the global batch,
because the gradients of the workers are summed.
"""

import argparse
import sys

import keras
import tensorflow as tf
from digits import build, load, make_strategy, report


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--strategy", choices=("dgc", "dense", "single"), default="dgc")
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers")
    return parser.parse_args()


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    train, _, test = load()
    steps = len(train[0]) // args.batch_size
    # Before any TensorFlow operation runs: the workers connect here.
    strategy = make_strategy(args.strategy, args.sparsity, 2 * steps)
    keras.utils.set_random_seed(1)

    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    losses = keras.losses.SparseCategoricalCrossentropy(reduction="none")

    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Takes one step on this worker's share of a batch; returns its loss."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses(labels, model(images, training=True)))
            loss /= args.batch_size
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # the exchange
        return loss

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Takes one step on all workers; returns the loss of the whole batch."""
        return strategy.reduce(
            "SUM", strategy.run(train_step, args=(images, labels)), axis=None
        )

    @tf.function
    def correct(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Counts the right answers of all workers."""

        def count(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            answers = tf.argmax(model(images), axis=-1, output_type=labels.dtype)
            return tf.math.count_nonzero(answers == labels)

        return strategy.reduce(
            "SUM", strategy.run(count, args=(images, labels)), axis=None
        )

    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=1)
    data = data.batch(args.batch_size, drop_remainder=True)
    distributed = strategy.experimental_distribute_dataset(data)
    unseen = tf.data.Dataset.from_tensor_slices(test).batch(args.batch_size)
    for epoch in range(1, args.epochs + 1):
        loss = sum(float(step(*batch)) for batch in distributed) / steps
        if strategy.is_chief:
            print(f"epoch {epoch}: loss {loss:.4f}")
    right = sum(
        int(correct(*batch))
        for batch in strategy.experimental_distribute_dataset(unseen)
    )

    accuracy, taken = right / len(test[0]), args.epochs * steps
    agree = report(model, strategy, accuracy, len(test[0]), taken)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
