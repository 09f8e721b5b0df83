"""Train the digits with a loop of one's own and Horovod: a distributed tape.

horovodrun -np 2 python examples/horovod_tape.py
"""

import sys

import keras
import tensorflow as tf
from digits import build, load
from horovod_fit import arguments, config_of, own_part

from tf_dgc import horovod as hvd


def main() -> int:
    """Trains, reports, and returns the exit status."""
    args = arguments()
    hvd.init()
    keras.utils.set_random_seed(1)  # so that all begin with the same weights
    train, _, (images, labels) = load()
    data = own_part(*train, args.batch_size)
    config = config_of(args.sparsity, len(data))
    model = build()
    optimizer = keras.optimizers.SGD(0.05 * hvd.size())
    optimizer.build(model.trainable_variables)
    losses = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Takes one step on this worker's batch; returns its loss."""
        with tf.GradientTape() as tape:
            loss = losses(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, config)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    for epoch in range(1, args.epochs + 1):
        loss = sum(float(step(*batch)) for batch in data) / len(data)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}")
    right = tf.reduce_mean(
        tf.cast(tf.argmax(model(images), axis=-1) == labels, tf.float32)
    )
    if hvd.rank() == 0:
        print(f"test accuracy      {float(right):.2%} of {len(images)} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
