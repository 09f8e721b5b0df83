"""Train the digits over a slow network: tiny rounds that nobody waits for.

    tf-dgc-run -n 2 examples/between_sites.py
    tf-dgc-run --hosts one.example,two.example examples/between_sites.py --period 16
    tf-dgc-run --hosts one.example:4,two.example:4 examples/between_sites.py \
        --within dense

Each worker takes `--period` steps with its own optimizer. What that has changed goes to
the others while the next period trains: 5% of it as signs, or more where training is
short. With `--within` the workers of a host take each step together, and hosts average.
"""

import argparse
import sys

import keras
import tensorflow as tf
from digits import build, load, report

import tf_dgc


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--period", type=int, default=4)
    parser.add_argument("--within", choices=("dense", "dgc"), help="steps of a site")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers")
    parser.add_argument("--verbose", type=int, default=2, help="as in Model.fit")
    return parser.parse_args()


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    train, validation, test = load()
    steps = args.epochs * (len(train[0]) // args.batch_size)
    within = tf_dgc.DGCConfig() if args.within == "dgc" else args.within
    config = tf_dgc.AveragingConfig.auto(
        "adam", total_steps=steps, period=args.period, within=within
    )
    # Before any TensorFlow operation runs: the workers connect here.
    strategy = tf_dgc.ParameterAveragingStrategy(config)
    keras.utils.set_random_seed(1)  # the same on every worker
    with strategy.scope():
        model = build()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=1)
    data = data.batch(args.batch_size, drop_remainder=True)
    model.fit(
        data,
        validation_data=validation,
        epochs=args.epochs,
        shuffle=False,
        verbose=args.verbose if strategy.is_chief else 0,
        callbacks=[tf_dgc.callbacks.CompressionStats()],
    )
    _, accuracy = model.evaluate(*test, batch_size=args.batch_size, verbose=0)
    steps = int(model.optimizer.iterations)
    if strategy.is_chief:
        rounds = int(strategy.round_stats().rounds)
        print(f"rounds             {rounds} in {steps} steps")
    agree = report(model, strategy, accuracy, len(test[0]), steps)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
