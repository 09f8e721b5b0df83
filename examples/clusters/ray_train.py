"""Train on the workers of Ray Train: python ray_train.py [WORKERS].

Ray starts the workers and sets TF_CONFIG in each, which the strategy reads. It is made
in the function that they run, before anything else of TensorFlow.
"""

import sys
import tempfile
import zlib
from typing import Any

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config: dict[str, Any]) -> None:
    """Trains a small network on numbers; runs on each worker."""
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
    fitted = model.fit(x, y, batch_size=32, epochs=config["epochs"], verbose=0)
    weights = b"".join(each.tobytes() for each in model.get_weights())
    rank = ray.train.get_context().get_world_rank()
    loss = fitted.history["loss"][-1]
    print(f"worker {rank}: loss {loss:.4f}, weights {zlib.crc32(weights)}", flush=True)


def main() -> None:
    """Starts the workers, whose output Ray shows; raises where one fails."""
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"epochs": 4},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
