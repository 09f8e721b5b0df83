"""Train on the executors of a Spark cluster: spark-submit spark.py [WORKERS].

spark-tensorflow-distributor runs a function in a barrier stage, whose tasks all start
together, and sets TF_CONFIG in each of them, which the strategy reads.
"""

import sys

from spark_tensorflow_distributor import MirroredStrategyRunner


def train() -> list[float]:
    """Trains a small network on numbers; runs in each task."""
    import zlib

    import keras
    import numpy as np

    import tf_dgc

    strategy = tf_dgc.DGCStrategy()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)  # the same data on all workers
    x = random.normal(size=(512, 32)).astype("float32")
    y = x @ random.normal(size=(32, 1)).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((32,)), *layers])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    losses = model.fit(x, y, batch_size=32, epochs=4, verbose=0).history["loss"]
    weights = b"".join(each.tobytes() for each in model.get_weights())
    rank = strategy.rank
    print(f"worker {rank}: loss {losses[-1]:.4f}, weights {zlib.crc32(weights)}")
    return losses


def main() -> None:
    """Starts the tasks and prints the losses of the first one."""
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    runner = MirroredStrategyRunner(
        num_slots=workers, use_gpu=False, use_custom_strategy=True
    )
    print("loss", " ".join(f"{loss:.4f}" for loss in runner.run(train)))


if __name__ == "__main__":
    main()
