"""Train the digits with local steps: parameters are averaged, not gradients.

    horovodrun -np 2 python examples/local_sgd.py
    python scripts/run_local.py -n 2 -- python examples/local_sgd.py --period 16 --outer
    python scripts/run_local.py -n 4 -- python examples/local_sgd.py --sparsity 0.99

Each worker takes `--period` steps with its own optimizer, then all agree on parameters.
`--outer` lets an outer optimizer step along the averaged change (DiLoCo),
`--sparsity` sends only its largest elements.
"""

import argparse
import sys

import keras
import tensorflow as tf
from digits import build, load, report

import tf_dgc


def period(text: str) -> int | str:
    """Parses a number of steps, or "adaptive"."""
    return text if text == "adaptive" else int(text)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--period", type=period, default=4, help='or "adaptive"')
    parser.add_argument("--synchronous-steps", type=int, default=0)
    parser.add_argument("--outer", action="store_true", help="use an outer optimizer")
    parser.add_argument("--sparsity", type=float, help="of what is sent; else all is")
    parser.add_argument("--optimizer", default="adam", help="of each worker")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers")
    parser.add_argument("--verbose", type=int, default=2, help="as in Model.fit")
    return parser.parse_args()


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    train, validation, test = load()

    def outer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)

    compression = args.sparsity and tf_dgc.DGCConfig(sparsity=args.sparsity)
    config = tf_dgc.AveragingConfig(
        period=args.period,
        max_period=16,
        synchronous_steps=args.synchronous_steps,
        outer_optimizer=outer if args.outer else None,
        compression=compression,
    )
    # Before any TensorFlow operation runs: the workers connect here.
    strategy = tf_dgc.ParameterAveragingStrategy(config)
    keras.utils.set_random_seed(1)  # the same on every worker
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.get(args.optimizer)
        loss = "sparse_categorical_crossentropy"
        model.compile(optimizer, loss, metrics=["accuracy"])
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
