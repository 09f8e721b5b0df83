"""Fit a linear regression by batch gradient descent in map-reduce form.

    python scripts/run_local.py -n 4 -- python examples/map_reduce_regression.py
    horovodrun -np 4 python examples/map_reduce_regression.py

The gradient of the squared error over 400 examples is a sum over examples, so four
workers each sum 100 of them (map), and the four sums are added (reduce). Worker 0
prints that beside the gradient of all 400 computed by one worker: they agree to
float32 precision, so all that the workers change is who computes what.
"""

import sys

import numpy as np
import tensorflow as tf

import tf_dgc

EXAMPLES = 400
STEPS = 200
LEARNING_RATE = 0.1
TRUE_WEIGHTS = np.array([3.0, -2.0, 0.5, 1.0], "float32")  # the last is the bias


def make_examples() -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs, shape [400, 4], and targets, shape [400], with some noise."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(EXAMPLES, len(TRUE_WEIGHTS))).astype("float32")
    inputs[:, -1] = 1
    noise = random.normal(scale=0.1, size=EXAMPLES).astype("float32")
    return inputs, inputs @ TRUE_WEIGHTS + noise


def gradient_sum(
    weights: tf.Tensor, inputs: tf.Tensor, targets: tf.Tensor
) -> tf.Tensor:
    """Returns the gradient of half the squared error, summed over the examples.

    Args:
        weights: shape [4].
        inputs: shape [examples, 4].
        targets: shape [examples].
    """
    errors = tf.linalg.matvec(inputs, weights) - targets
    return tf.linalg.matvec(inputs, errors, transpose_a=True)


def main() -> int:
    """Runs the descent, reports, and returns the exit status."""
    # Before any TensorFlow operation runs: the workers connect here.
    strategy = tf_dgc.DenseStrategy()
    workers = strategy.num_replicas_in_sync
    if EXAMPLES % workers:
        print(f"{workers} workers cannot share {EXAMPLES} examples evenly")
        return 1
    inputs, targets = make_examples()
    with strategy.scope():
        weights = tf.Variable(tf.zeros(len(TRUE_WEIGHTS)))

    def map_and_reduce(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        own = gradient_sum(weights, inputs, targets)
        return tf.distribute.get_replica_context().all_reduce("SUM", own) / EXAMPLES

    @tf.function
    def reduced_gradient(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        return strategy.run(map_and_reduce, args=(inputs, targets))

    # One batch of all the examples; each worker gets its share of it.
    batches = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(EXAMPLES)
    share = next(iter(strategy.experimental_distribute_dataset(batches)))
    difference = 0.0
    for step in range(STEPS):
        gradient = reduced_gradient(*share)
        alone = gradient_sum(weights, inputs, targets) / EXAMPLES
        difference = max(difference, float(tf.reduce_max(tf.abs(gradient - alone))))
        if step == 0 and strategy.is_chief:
            each = EXAMPLES // workers
            print(f"gradient, {workers} workers of {each:3}: {gradient.numpy()}")
            print(f"gradient, 1 worker of {EXAMPLES}:   {alone.numpy()}")
        weights.assign_sub(LEARNING_RATE * gradient)

    if strategy.is_chief:
        print(f"largest difference in {STEPS} steps: {difference:.1e}")
        print(f"weights found: {np.round(weights.numpy(), 3)}")
        print(f"true weights:  {TRUE_WEIGHTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
