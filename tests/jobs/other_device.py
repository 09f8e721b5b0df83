"""Train on the second of two devices, as on a GPU beside a host: the same bits.

A worker's device is another logical one of the processor than the host's.
"""

import sys
import zlib
from typing import Any

import keras
import launch
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc.transports.local import LocalTransport

CPUS = [f"/device:CPU:{i}" for i in range(2)]
STRATEGIES = {
    "dense": tf_dgc.DenseStrategy,
    "dgc": lambda transport: tf_dgc.DGCStrategy(
        tf_dgc.DGCConfig(sparsity=0.9, min_elements=1, clip_norm=1.0, warmup_steps=2),
        transport=transport,
    ),
    "averaging": lambda transport: tf_dgc.ParameterAveragingStrategy(
        tf_dgc.AveragingConfig(period=2, compression=tf_dgc.DGCConfig(sparsity=0.9)),
        transport=transport,
    ),
}


def trained(name: str, device: str) -> dict[str, Any]:
    """Train for some steps; return a checksum, and where large variables are."""
    transport = LocalTransport()
    transport.device = device
    keras.utils.set_random_seed(3)
    make: Any = STRATEGIES[name]
    with tf.device(device):
        strategy = make(transport=transport)
        with strategy.scope():
            layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((40,)), *layers])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        x = np.random.default_rng(1).normal(size=(64, 40)).astype("float32")
        model.fit(x, x[:, :3], batch_size=16, epochs=2, shuffle=False, verbose=0)
    exchanges = strategy._ledger.exchanges()
    state = [v for each in exchanges for v in each.state.values()]
    every = [*(w.value for w in model.weights), *state]
    large = [v for v in every if v.shape.num_elements() > 2]  # one for each tensor
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return {
        "crc": zlib.crc32(weights),
        "devices": sorted({v.device.rpartition("/")[2] for v in large}),
        "large": len(large),
    }


def main() -> None:
    """Train with each strategy on both devices."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    found = {
        name: [trained(name, device) for device in CPUS]
        for name in sys.argv[1:] or STRATEGIES
    }
    launch.say(found)


if __name__ == "__main__":
    main()
