"""Trains on workers that find each other by themselves: run as a worker process.

The last line of stdout is a JSON object with rank, number of workers and a checksum of
the trained weights.
"""

import json
import zlib

import keras
import numpy as np
import tensorflow as tf

import tf_dgc


def main() -> None:
    strategy = tf_dgc.DGCStrategy(tf_dgc.DGCConfig(sparsity=0.5, min_elements=1))
    tf.distribute.experimental_set_strategy(strategy)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    data = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    model.fit(data, data[:, :3], batch_size=8, epochs=2, verbose=0)
    weights = b"".join(v.numpy().tobytes() for v in model.trainable_variables)
    found = {
        "rank": strategy.rank,
        "workers": strategy.num_replicas_in_sync,
        "transport": strategy.transport.name,
        "crc": zlib.crc32(weights),
    }
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
